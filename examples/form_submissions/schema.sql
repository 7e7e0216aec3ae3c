create table form (
  name text primary key, webhook text not null, owner_email text not null, owner_phone text not null,
  sheet text not null, webhook_attempts smallint not null default 5 check (webhook_attempts > 0));

-- handed_over is false if the queue refused the operations: catch_up enqueues them later.
create table submission (
  id bigint generated always as identity primary key, form text not null references form, data jsonb not null,
  handed_over boolean not null default true, saved_at timestamptz not null default now());
create index on submission (id) where not handed_over;

-- The side table of the jobs: their submission and kind. Written with the jobs, joined to tallybook.job.
create table operation (
  job_id bigint primary key, submission bigint not null references submission, kind text not null,
  unique (submission, kind));

create table enrichment (submission bigint primary key references submission, company text not null);

insert into form (name, webhook, owner_email, owner_phone, sheet, webhook_attempts)
select n, 'https://hooks.example/' || n, 'owner@example.org', '+491', page, most from (values
  ('contact', 'contacts', 5), ('signup', 'signups', 5), ('broken', 'broken', 6), ('gone', 'gone', 5)) f (n, page, most);
