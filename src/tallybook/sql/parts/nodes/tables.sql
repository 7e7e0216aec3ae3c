--> The databases of one app, stored in one of them; empty if there is only one. Read the view nodes.
create table tallybook.node (
  number            int primary key,
  name              text not null unique,
  --> The difference to the DSN that leads to this table: host, port, dbname. Never a password.
  address           text not null,
  --> retiring: no key is routed there any more. gone: removed; its number is not given out again.
  state             text not null default 'live',
  --> That of the first cluster that answered there; another one is a clone, or was moved by a dump.
  system_identifier bigint,
  --> The highest job id that a check has seen there, at seen_at; a lower one means a restore of an older state.
  seen_job_id       bigint,
  seen_at           timestamptz,
  added_at          timestamptz not null,
  changed_at        timestamptz not null,
  constraint "the node number has 10 bits" check (number between 0 and 1023),
  constraint "a node is live, retiring or gone" check (state in ('live', 'retiring', 'gone'))
);

--> Keys whose jobs go to this node instead of the one that the hash chooses. Read the view node_pins.
create table tallybook.node_pin (
  key       text primary key,
  node      text not null,
  pinned_at timestamptz not null
);
create index node_pin_node on tallybook.node_pin (node);
