-- _timeline(): the timeline that this server writes. Only a promotion or a point-in-time restore changes it.
-- Commits that a session saw on another timeline may be missing on this one.
-- If a service hides it (shared storage, where a failover loses nothing), it is always the first.
-- rights: worker
create or replace function tallybook._timeline() returns text language plpgsql volatile as $$
begin
  return left(pg_walfile_name(pg_current_wal_insert_lsn()), 8);
exception when feature_not_supported or insufficient_privilege or undefined_function then
  return '00000001';
end $$;

-- _on_timeline(timeline): raise TB006 if the server is on another timeline by now. Call it in the statement that must
-- not run then.
-- rights: worker
create or replace function tallybook._on_timeline(p_timeline text) returns boolean language plpgsql volatile as $$
begin
  if p_timeline <> tallybook._timeline() then
    raise exception 'this worker is of timeline %, the server is on % now', p_timeline, tallybook._timeline()
      using errcode = 'TB006', detail =
  'The newest commits before the failover may be lost: claims, ends, its own registration.',
            hint = 'Start again with worker_start.';
  end if;
  return true;
end $$;
