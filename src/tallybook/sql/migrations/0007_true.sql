-- 0007: what a hostile test and an audit found. Locks each table for a moment, the ledgers too. Workers may run.

-- History: ranges are cut by time, no longer by the rate of transaction ids.
alter table tallybook.history_range add column begun_at timestamptz not null default clock_timestamp();
alter table tallybook.history_range alter column quiet_since drop not null;
update tallybook.history_range set begun_at = quiet_since;
comment on column tallybook.history_range.begun_at is 'When prune first found something in it: an eighth of the retention later it is cut.';
comment on column tallybook.history_range.quiet_since is 'When prune first found that no transaction can write to it any more.';
drop table tallybook.xid_rate;
drop function if exists tallybook._xid_rate(timestamptz);
drop function if exists tallybook._ranges_ahead(regclass[], numeric);

drop function if exists tallybook._amend(bigint, text, jsonb, int, timestamptz, boolean, jsonb, timestamptz);
drop function if exists tallybook._look(bigint);
drop function if exists tallybook._busy(bigint);
drop function if exists tallybook._queued_still(bigint);
drop function if exists tallybook._subject_waits(bigint, timestamptz);
drop function if exists tallybook._why_running(bigint, int, text, int, timestamptz, timestamptz, text, timestamptz);

-- The server's clock

create table tallybook.clock_step (
  id         bigint generated always as identity primary key,
  noticed_at timestamptz not null,
  by         interval not null
);
comment on table tallybook.clock_step is 'Each step of the server''s clock; by is negative where it went back.';

-- _enqueue_batch draws the ids of its jobs itself: the role worker may call it.
drop function if exists tallybook._enqueue_batch(text, text, bigint[], text[], jsonb[], timestamptz[], int[], int, jsonb, jsonb, timestamptz);

-- Where all tables are published, PostgreSQL refuses an update or a delete in a table without a replica identity. None of these has a primary
-- key. Nothing on a job's way changes for it: old rows are written to the WAL by updates and deletes alone. Each ledger is locked for a moment.
alter table tallybook.concurrency_holder replica identity full;
alter table tallybook.provider_route replica identity full;
alter table tallybook.pruned replica identity full;
alter table tallybook.rate_call replica identity full;
alter table tallybook.entry replica identity full;
alter table tallybook.claim replica identity full;
alter table tallybook.outcome replica identity full;
alter table tallybook.tally replica identity full;
do $$
declare
  v_table regclass;
begin
  for v_table in select i.inhrelid from pg_inherits i join pg_class c on c.oid = i.inhrelid
                  where c.relnamespace = 'tallybook'::regnamespace and c.relkind in ('r', 'p') loop
    execute format('alter table %s replica identity full', v_table);
  end loop;
end $$;

-- Counting: one path, for people and for verify.

drop function if exists tallybook._counted(boolean);
drop function if exists tallybook._split(int, text, bigint, boolean);

-- A lease that no time can be added to would break whoever reads it.
alter table tallybook.worker add constraint "a lease has at most 100 years" check (lease between interval '0' and interval '100 years');
