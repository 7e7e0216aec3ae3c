-- _timeline(): the timeline that this server writes. It changes with each promotion and each restore to a point in
-- time, and with nothing else: what somebody was told on another one may not have happened on this one.
-- Where a service does not show it (shared storage, where a failover loses nothing) it is always the first.
-- rights: worker
create or replace function tallybook._timeline() returns text language plpgsql volatile as $$
begin
  return left(pg_walfile_name(pg_current_wal_insert_lsn()), 8);
exception when feature_not_supported or insufficient_privilege or undefined_function then
  return '00000001';
end $$;

-- _on_timeline(timeline): an error where the server is on another one by now. In the same statement as what must not
-- happen then.
-- rights: worker
create or replace function tallybook._on_timeline(p_timeline text) returns boolean language plpgsql volatile as $$
begin
  if p_timeline <> tallybook._timeline() then
    raise exception 'this worker is of timeline %, the server is on % now', p_timeline, tallybook._timeline()
      using errcode = 'TB006', detail =
  'The last that it was told before the failover may be lost: claims, ends, its own place on record.',
            hint = 'Start again with worker_start.';
  end if;
  return true;
end $$;
