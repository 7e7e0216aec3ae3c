-- tasks: the catalogue of tasks, as workers have recorded it.
--> The catalogue of tasks, as workers have recorded it.
-- rights: worker, operator; reader (name, app, version, aliases, registered_at)
create or replace view tallybook.tasks as select * from tallybook.task;
