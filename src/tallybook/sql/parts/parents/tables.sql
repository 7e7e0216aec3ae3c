--> The parents of a waiting job; the rows are deleted when it enters its line, or is cancelled.
create table tallybook.parent (
  child_id  bigint not null,
  parent_id bigint not null,
  place     int not null,
  --> How the parent ended; null: not yet. Written by the session that holds the row of the child in waiting.
  ended_as  text,
  --> The facts about a parent that did not complete, for the child.
  failure   jsonb,
  primary key (child_id, parent_id),
  constraint "no job waits for itself" check (child_id <> parent_id),
  constraint "a parent ends completed, cancelled, dead or gone"
    check (ended_as in ('completed', 'cancelled', 'dead', 'gone'))
);
create index parent_open on tallybook.parent (parent_id) where ended_as is null;
create index parent_of_child on tallybook.parent (child_id) where ended_as is null;
create index parent_failed on tallybook.parent (child_id) where failure is not null;

create index waiting_of_child on tallybook.waiting ((options #>> '{parents,order_key}'))
  where order_key is null and options #>> '{parents,order_key}' is not null;

insert into tallybook.service (name, every) values ('parents_resolve', '5 s');
