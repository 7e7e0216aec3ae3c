-- tasks: the catalogue: what each task is, as the workers that know it have said.
-- rights: worker, operator; reader (name, app, version, aliases, registered_at)
create or replace view tallybook.tasks as select * from tallybook.task;
comment on view tallybook.tasks is 'The catalogue: what each task is, as the workers that know it have said.';
