-- 0004: the outside world: providers and routes, webhooks' endpoints, parents, limits. Workers may run; waiting is locked for a moment.

-- Providers and routes

-- Webhooks

-- Parents

-- A job that waits for its parents lies in waiting without an order key: its own is in its options until it comes into line.
alter table tallybook.waiting alter column order_key drop not null;
create index waiting_of_child on tallybook.waiting ((options #>> '{parents,order_key}')) where order_key is null and options #>> '{parents,order_key}' is not null;
comment on table tallybook.waiting is 'A job that may not run yet because of others: its turn by its order key has not come, or its parents have not ended.';

create table tallybook.parent (
  child_id  bigint not null,
  parent_id bigint not null,
  place     int not null,
  ended_as  text,
  failure   jsonb,
  primary key (child_id, parent_id),
  constraint "no job waits for itself" check (child_id <> parent_id),
  constraint "a parent ends completed, cancelled, dead or gone" check (ended_as in ('completed', 'cancelled', 'dead', 'gone'))
);
create index parent_open on tallybook.parent (parent_id) where ended_as is null;
create index parent_of_child on tallybook.parent (child_id) where ended_as is null;
create index parent_failed on tallybook.parent (child_id) where failure is not null;
comment on table tallybook.parent is 'Which jobs a job in waiting waits for; the rows go when it comes into line, or is cancelled.';
comment on column tallybook.parent.ended_as is 'How the parent was seen to have ended; null: not yet. Written by who holds the row of the child in waiting.';
comment on column tallybook.parent.failure is 'What the child is told of a parent that did not complete.';
insert into tallybook.service (name, every) values ('settle', '5 s');

-- Limits
