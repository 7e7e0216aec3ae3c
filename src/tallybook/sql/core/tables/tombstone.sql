--> An attempt that no claim may take from the line: cancelled (and all later ones with it), or taken by id.
create table tallybook.tombstone (
  job_id     bigint not null,
  attempt    int not null,
  cancelled  boolean not null default false,
  taken      boolean not null default false,
  --> The cancel was for this attempt alone: a person has given the job another one since.
  once       boolean not null default false,
  reason     text,
  xid        xid8 not null default pg_current_xact_id(),
  created_at timestamptz not null default clock_timestamp(),
  primary key (job_id, attempt),
  constraint "a tombstone says why" check (cancelled or taken)
);
