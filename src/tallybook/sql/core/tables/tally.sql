-- The counted changes: where jobs are (opened: entered their line), how attempts have ended (unclaimed: those that no
-- worker had claimed), and events of your own. took and waited are the times of completed attempts, in buckets.
create type tallybook.counted as enum ('opened', 'scheduled', 'retrying', 'waiting', 'dead',
  'completed', 'failed', 'snoozed', 'cancelled', 'lost', 'moved', 'died', 'unclaimed', 'event', 'took', 'waited');

-- LEDGER, short-lived. The changes of one statement. Rows are never updated, so no two statements wait for each other.
-- Entries of a line are not in it: they are read from entry itself.
--> LEDGER: what one statement has changed, per lane, task and state. Folded into series and total, then pruned.
create table tallybook.tally (
  xid      xid8 not null default pg_current_xact_id(),
  --> Null: an event of your own, whose name is in task.
  lane_id  int,
  n        int not null,
  --> The sum of the attempt numbers of these jobs.
  attempts bigint not null default 0,
  what     tallybook.counted not null,
  --> From claim to end of these jobs, as a bucket: see _bucket.
  took     smallint,
  --> From when they could run to their claim, as a bucket.
  waited   smallint,
  task     text not null
) partition by range (xid);
create index tally_line on tallybook.tally (xid) with (fillfactor = 100);
alter table tallybook.tally replica identity full;

create table tallybook.tally_1 partition of tallybook.tally for values from (minvalue) to (maxvalue);
alter table tallybook.tally_1 replica identity full;

-- Triggers count the jobs that are not in line, whatever moves them. Their function is in _bucket.sql.
create function tallybook._count_moved() returns trigger language plpgsql as $$ begin return null; end $$;
do $$
declare v_table text;
begin
  foreach v_table in array array['scheduled', 'waiting', 'dead'] loop
    execute format('create trigger counts_in after insert on tallybook.%I referencing new table as moved'
      ' for each statement execute function tallybook._count_moved()', v_table);
    execute format('create trigger counts_out after delete on tallybook.%I referencing old table as moved'
      ' for each statement execute function tallybook._count_moved()', v_table);
    execute format('create trigger counts_changed after update on tallybook.%I for each row'
      ' when ((old.lane_id, old.attempt, old.failures > 0)'
      '       is distinct from (new.lane_id, new.attempt, new.failures > 0))'
      ' execute function tallybook._count_moved()', v_table);
  end loop;
end $$;
