create table tallybook.progress (
  job_id     bigint primary key,
  attempt    int not null,
  done       real,
  message    text,
  checkpoint jsonb,
  updated_at timestamptz not null,
  constraint "done goes from 0 to 1" check (done between 0 and 1)
);
comment on table tallybook.progress is 'How far a job says that it is, and where its next attempt can go on.';
