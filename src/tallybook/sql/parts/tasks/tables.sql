create table tallybook.task (
  name          text primary key,
  app           text not null,
  summary       text,
  on_dead_task  text,
  on_dead_queue text,
  version       int not null default 1,
  aliases       text[] not null default '{}',
  definition    jsonb not null,
  registered_at timestamptz not null,
  constraint "versions start at 1" check (version >= 1)
);
comment on table tallybook.task is 'The catalogue of tasks, as workers have recorded it.';
comment on column tallybook.task.summary is 'One line for people, with {names} of args in it.';
comment on column tallybook.task.definition is 'Arguments, queue, retry policy and limits, for people.';
