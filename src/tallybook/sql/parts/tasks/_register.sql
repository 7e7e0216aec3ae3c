-- _register(catalogue, at): record these tasks; nothing is written if nothing has changed. A task that has left the
-- code stays recorded without workers, because jobs may still have its name.
create or replace function tallybook._register(p_catalogue jsonb, p_at timestamptz) returns void
language sql as $$
  -- An invalid name would be noticed only at a death, which could not be recorded then.
  select tallybook._check_name('queue', coalesce(c.on_dead_queue, 'default'), 64),
         tallybook._check_name('task name', c.on_dead_task, 200)
    from jsonb_populate_recordset(null::tallybook.task, p_catalogue) c where c.on_dead_task is not null;
  insert into tallybook.task as t (name, app, summary, on_dead_task, on_dead_queue, version, aliases, definition,
                                   registered_at)
  select n.*, p_at
    from jsonb_populate_recordset(null::tallybook.task, p_catalogue) c, lateral (
      select c.name, c.app, c.summary, c.on_dead_task, c.on_dead_queue, coalesce(c.version, 1) as version,
             coalesce(c.aliases, '{}') as aliases, coalesce(c.definition, '{}') as definition) n
   where not exists (
     select from tallybook.task k where k.name = n.name and to_jsonb(k) - 'registered_at' = to_jsonb(n))
   order by n.name
  on conflict (name) do update
    set app = excluded.app, summary = excluded.summary, on_dead_task = excluded.on_dead_task,
        on_dead_queue = excluded.on_dead_queue, version = excluded.version, aliases = excluded.aliases,
        definition = excluded.definition, registered_at = excluded.registered_at
  -- In a rolling deploy old and new workers write in turns: the newer version of the args is shown.
  where excluded.version >= t.version
$$;
