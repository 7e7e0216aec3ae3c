-- subject_kill(lease, job_id, attempt, reason, args, version): end one attempt of a subject for good, as a dead letter
-- with the reason killed. Its name stays taken: only a person's retry or subject_forget brings it back.
-- Returns dead, or refused. Errors: TB005 not a subject's job, or invalid args.
-- Reads claim, entry; writes outcome, tally, dead, subject_job, and the follow-up of on_dead.
-- rights: worker
create or replace function tallybook.subject_kill(lease uuid, job_id bigint, attempt int, reason text default null,
  args jsonb default null, at timestamptz default clock_timestamp(), version int default null)
returns text language plpgsql as $$
declare
  v_error jsonb := jsonb_build_object('attempt', attempt, 'at', at, 'type', 'Killed', 'message',
                                      coalesce(reason, 'killed'));
  e tallybook.entry := tallybook._subject_end(lease, job_id, attempt, 'dead', v_error, args, at, version);
begin
  if e.job_id is null then return 'refused'; end if;
  e.errors := tallybook._errors(e.errors, v_error);
  perform tallybook._make_dead(e, 'killed', at);
  return 'dead';
end $$;
