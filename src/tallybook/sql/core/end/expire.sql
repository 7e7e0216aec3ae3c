-- expire(lease, job_id, attempt): end an attempt that was claimed after its job's expires_at: dead, with the reason
-- expired. Returns dead, or refused. Counts no failure. Reads claim, entry; writes outcome, tally; see _make_dead.
-- rights: worker
create or replace function tallybook.expire(lease uuid, job_id bigint, attempt int,
  at timestamptz default clock_timestamp()) returns text
language plpgsql as $$
declare
  e tallybook.entry; v_error jsonb := jsonb_build_object('attempt', attempt, 'at', at, 'type', 'Expired', 'message',
                                                         'it had not started by its expires_at');
begin
  e := tallybook._end(lease, job_id, attempt, 'dead', v_error, expire.at);
  if e.job_id is null then return 'refused'; end if;
  e.errors := tallybook._errors(e.errors, v_error);
  perform tallybook._make_dead(e, 'expired', at);
  return 'dead';
end $$;
