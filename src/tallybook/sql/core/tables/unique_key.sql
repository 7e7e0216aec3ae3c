-- A small ledger: the newest row of a key names the job that has it, and the key is free once that job has ended.
-- No row is deleted when a key is freed, so that a key that is used ten thousand times under a pinned horizon stays as
-- fast.
create table tallybook.unique_key (
  task       text not null,
  key        text not null,
  generation bigint not null,
  job_id     bigint not null,
  --> Older jobs with this key that still ran when this generation was taken.
  others     bigint[],
  primary key (task, key, generation),
  constraint "a unique key has 1 to 512 bytes" check (octet_length(key) between 1 and 512)
);
