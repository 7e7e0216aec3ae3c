--> The catalogue of tasks, as workers have recorded it.
create table tallybook.task (
  name          text primary key,
  app           text not null,
  --> One line for people, with {names} of args in it.
  summary       text,
  on_dead_task  text,
  on_dead_queue text,
  version       int not null default 1,
  aliases       text[] not null default '{}',
  --> Arguments, queue, retry policy and limits, for people.
  definition    jsonb not null,
  registered_at timestamptz not null,
  constraint "versions start at 1" check (version >= 1)
);
