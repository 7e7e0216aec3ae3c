--> The progress of a job, and the checkpoint for its next attempt.
create table tallybook.progress (
  job_id     bigint primary key,
  attempt    int not null,
  done       real,
  message    text,
  checkpoint jsonb,
  updated_at timestamptz not null,
  constraint "done goes from 0 to 1" check (done between 0 and 1)
);
