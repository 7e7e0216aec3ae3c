-- _task_of(name): return the recorded task for jobs with this name: the task, or the task that has it as an alias.
--
-- The alias has precedence, because a renamed task is also recorded under its old name by older releases.
-- Null: no worker has recorded it. Reads task.
create or replace function tallybook._task_of(p_name text) returns tallybook.task
language plpgsql stable as $$
begin
  return (select k from tallybook.task k where k.name = p_name or p_name = any (k.aliases)
           order by k.name = p_name, k.registered_at desc, k.name limit 1);
end $$;
