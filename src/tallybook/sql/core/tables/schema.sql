-- The schema itself, what several tables share, and what is installed.
create schema tallybook;
comment on schema tallybook is 'Tallybook, a job queue: start with "select * from tallybook.job"';

-- How one attempt ended. completed, cancelled and dead are final for the job; after the others it has a next attempt.
create type tallybook.ending as enum ('completed', 'failed', 'snoozed', 'cancelled', 'lost', 'moved', 'dead');

-- Job ids and the numbers that order what is put back in line come from one sequence: 43 bits, below the node's 10
-- bits.
create sequence tallybook.job_id as bigint;
create sequence tallybook.claim_id as bigint;

--> One row: what is installed here, and in which cluster its transaction ids mean something.
create table tallybook.installation (
  one               boolean primary key default true check (one),
  version           int not null,
  routines          text not null,
  node              int not null,
  system_identifier bigint not null,
  installed_at      timestamptz not null default clock_timestamp(),
  migrated_at       timestamptz not null default clock_timestamp(),
  works_from        int not null default 1,
  constraint "the node number has 10 bits" check (node between 0 and 1023)
);
