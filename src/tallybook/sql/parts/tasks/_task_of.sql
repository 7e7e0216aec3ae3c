-- _task_of(name): what the catalogue says about jobs with this task name: its task, or the task that has it as an
-- alias.
--
-- The alias first: a task that was renamed is on record under its old name too, as older releases have said it.
-- Null: no worker has told. Reads task.
create or replace function tallybook._task_of(p_name text) returns tallybook.task
language plpgsql stable as $$
begin
  return (select k from tallybook.task k where k.name = p_name or p_name = any (k.aliases)
           order by k.name = p_name, k.registered_at desc, k.name limit 1);
end $$;
