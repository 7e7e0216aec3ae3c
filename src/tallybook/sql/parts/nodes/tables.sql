create table tallybook.node (
  number            int primary key,
  name              text not null unique,
  address           text not null,
  state             text not null default 'live',
  system_identifier bigint,
  seen_job_id       bigint,
  seen_at           timestamptz,
  added_at          timestamptz not null,
  changed_at        timestamptz not null,
  constraint "the node number has 10 bits" check (number between 0 and 1023),
  constraint "a node is live, retiring or gone" check (state in ('live', 'retiring', 'gone'))
);
comment on table tallybook.node is
  'The databases of one app, stored in one of them; empty if there is only one. Read the view nodes.';
comment on column tallybook.node.state is
  'retiring: no key is routed there any more. gone: removed; its number is not given out again.';
comment on column tallybook.node.system_identifier is
  'That of the first cluster that answered there; another one is a clone, or was moved by a dump.';
comment on column tallybook.node.seen_job_id is
  'The highest job id that a check has seen there, at seen_at; a lower one means a restore of an older state.';

create table tallybook.node_pin (
  key       text primary key,
  node      text not null,
  pinned_at timestamptz not null
);
create index node_pin_node on tallybook.node_pin (node);
comment on table tallybook.node_pin is
  'Keys whose jobs go to this node instead of the one that the hash chooses. Read the view node_pins.';
