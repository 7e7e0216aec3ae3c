-- 0003: time: services that any worker runs, schedules, subjects. Workers may run; entry is locked while an index of its retried
-- attempts is made, which reads it once.

-- Services ---------------------------------------------------------------------------------------------------------

create table tallybook.service (
  name        text primary key,
  every       interval not null,
  last_run_at timestamptz,
  last_took   interval,
  last_effect bigint,
  constraint "a service runs every 0.1 s to 1 day" check (every between interval '100 ms' and interval '1 day')
) with (fillfactor = 50);
insert into tallybook.service (name, every) values ('promote', '5 s'), ('rescue', '5 s'), ('rebase', '5 s'), ('schedules', '5 s');
comment on table tallybook.service is 'Maintenance that any worker runs: how often at least, and what the last run did. Change every as you like.';
comment on column tallybook.service.every is 'The longest time between two looks of one worker; what is known to be due is not waited for.';
comment on column tallybook.service.last_effect is 'How many jobs, or rows, the last run that is on record has changed. At most one run a second is put on record.';

-- Schedules --------------------------------------------------------------------------------------------------------

-- Subjects ---------------------------------------------------------------------------------------------------------

-- Written when a subject is made, revived, ended or forgotten, not by its iterations: those are the job's. What is null until
-- it has ended is what has to be known of it when its job's history has gone.
create table tallybook.subject_job (
  job_id     bigint not null,
  made_at    timestamptz not null,
  ended_at   timestamptz,
  last_at    timestamptz,
  priority   smallint,
  iterations int,
  attempts   int,
  failures   int,
  task       text not null,
  subject    text not null,
  ended_as   text,
  queue      text,
  args       jsonb,
  error      jsonb,
  primary key (task, subject),
  constraint "a subject has 1 to 512 bytes" check (octet_length(subject) between 1 and 512),
  constraint "a subject ends completed, killed or dead" check (ended_as in ('completed', 'killed', 'dead')),
  constraint "an ended subject says when" check ((ended_as is null) = (ended_at is null))
);
create index subject_of_job on tallybook.subject_job (job_id);
comment on table tallybook.subject_job is 'The job behind each subject: a named job that lives on. For people there is the view subject.';
comment on column tallybook.subject_job.ended_as is 'completed, killed or dead, until a person or an upsert revives it; null: it lives, or its job was cancelled.';

-- A job that lives on has thousands of attempts: the newest is found without reading the others. Jobs that succeed at their
-- first attempt are not in it.
create index entry_again on tallybook.entry (job_id, attempt) where attempt > 1;

-- Whoever is about to start a job that has a unique key, or is a subject's, learns that it was cancelled while he waited.
alter type tallybook.looked add attribute cancelled boolean;
