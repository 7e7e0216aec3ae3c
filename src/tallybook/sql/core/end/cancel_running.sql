-- cancel_running(lease, job_id, attempt, reason, at): end an attempt as cancelled. A worker calls it for a cancelled
-- job, or when the handler itself asks for it. Returns cancelled, or refused.
-- Reads claim, entry; writes outcome, tally; see _release for jobs with an order key.
-- rights: worker
create or replace function tallybook.cancel_running(lease uuid, job_id bigint, attempt int, reason text default null,
  at timestamptz default clock_timestamp())
returns text language plpgsql as $$
declare
  e tallybook.entry := tallybook._end(lease, job_id, attempt, 'cancelled',
    case when reason is not null then jsonb_build_object('message', reason) end, cancel_running.at);
begin
  if e.job_id is null then return 'refused'; end if;
  if e.order_key is not null then perform tallybook._release(e.order_key, job_id, cancel_running.at); end if;
  perform tallybook._parent_ended(e.job_id);
  return 'cancelled';
end $$;
