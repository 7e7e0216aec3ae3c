-- schedules: every schedule, declared in code or kept in the database.
create or replace view tallybook.schedules as select * from tallybook.schedule;
comment on view tallybook.schedules is 'Every schedule, declared in code or kept in the database.';
