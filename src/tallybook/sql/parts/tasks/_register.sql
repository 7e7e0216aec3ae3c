-- _register(catalogue, at): keep what these tasks are; who finds it as it is writes nothing. A task that left the code
-- stays on record, with nobody who serves it, for as long as jobs may have its name.
create or replace function tallybook._register(p_catalogue jsonb, p_at timestamptz) returns void
language sql as $$
  -- A name that no job can have would be found when one has died, and its death could not be recorded.
  select tallybook._check_name('queue', coalesce(c.on_dead_queue, 'default'), 64),
         tallybook._check_name('task name', c.on_dead_task, 200)
    from jsonb_to_recordset(p_catalogue) c(on_dead_queue text, on_dead_task text) where c.on_dead_task is not null;
  insert into tallybook.task as t (name, app, summary, on_dead_task, on_dead_queue, version, aliases, definition,
                                   registered_at)
  select c.name, c.app, c.summary, c.on_dead_task, c.on_dead_queue, coalesce(c.version, 1), coalesce(c.aliases, '{}'),
         coalesce(c.definition, '{}'), p_at
    from jsonb_to_recordset(p_catalogue)
      c(name text, app text, summary text, on_dead_task text, on_dead_queue text, version int, aliases text[],
        definition jsonb)
   where not exists (
     select from tallybook.task k
      where k.name = c.name
        and (k.app, k.summary, k.on_dead_task, k.on_dead_queue, k.version, k.aliases, k.definition)
            is not distinct from (c.app, c.summary, c.on_dead_task, c.on_dead_queue, coalesce(c.version, 1),
                                  coalesce(c.aliases, '{}'), coalesce(c.definition, '{}')))
   order by c.name
  on conflict (name) do update
    set app = excluded.app, summary = excluded.summary, on_dead_task = excluded.on_dead_task,
        on_dead_queue = excluded.on_dead_queue,
        version = excluded.version, aliases = excluded.aliases, definition = excluded.definition,
        registered_at = excluded.registered_at
  -- In a rolling deploy the old and the new workers take turns: the newer version of the args is the one that is shown.
  where excluded.version >= t.version
$$;
