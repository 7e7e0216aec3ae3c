-- _leave_parents(job_ids): these jobs have ended while they waited, or before they were due: delete their parents, and
-- wake parents_resolve for jobs that wait for them. Deletes from parent.
-- profile: nested
create or replace function tallybook._leave_parents(p_ids bigint[]) returns void language plpgsql as $$
begin
  delete from tallybook.parent p using unnest(p_ids) i(id) where p.child_id = i.id;
  perform tallybook._wake(' parents_resolve')
    where exists (select from unnest(p_ids) i(id) join tallybook.parent p on p.parent_id = i.id and p.ended_as is null);
end $$;

-- _parents_said(job_id, options): the options of a job whose wait for parents has ended: with how
-- many of them had ended and failed.
-- profile: lookup
create or replace function tallybook._parents_said(p_job_id bigint, p_options jsonb) returns jsonb
language plpgsql stable as $$
begin
  return p_options - 'held' || (
    select jsonb_build_object('parents', jsonb_build_object('ended', count(p.ended_as), 'failed', count(p.failure)))
      from tallybook.parent p where p.child_id = p_job_id);
end $$;
