-- Written when a subject is made, revived, ended or forgotten, not by its iterations: those are the job's. What is
-- null until it has ended is what has to be known of it when its job's history has gone.
--> The job of each subject, a recurring job with a name. For people: the view subject.
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
  --> The queue to which the name belongs, by its setting own_names; empty: all queues share it.
  scope      text not null default '',
  --> completed, killed or dead, until a person or an upsert revives it; null: it lives, or its job was cancelled.
  ended_as   text,
  queue      text,
  args       jsonb,
  error      jsonb,
  primary key (task, subject, scope),
  constraint "a subject has 1 to 512 bytes" check (octet_length(subject) between 1 and 512),
  constraint "a subject ends completed, killed or dead" check (ended_as in ('completed', 'killed', 'dead')),
  constraint "an ended subject says when" check ((ended_as is null) = (ended_at is null))
);
create index subject_of_job on tallybook.subject_job (job_id);
-- Which subjects have stopped, the last first: written when one stops, not by its iterations.
create index subject_stopped on tallybook.subject_job (ended_at, task, subject, scope) where ended_at is not null;

-- The jobs that a subject has had: one row a job, none for its iterations.
create index entry_of_subject on tallybook.entry (unique_key) where attempt = 1 and options ? 'subject';

-- What one call of _subjects_put is asked for, and what it knows of each.
create type tallybook._wanted_subject as (place bigint, subject text, args text, run_at timestamptz, priority int,
  headers text, options text, lane_id int, retention "char");
create type tallybook._found_subject as (kind "char", job_id bigint, report text, old_run_at timestamptz,
  new_run_at timestamptz, carry jsonb);
