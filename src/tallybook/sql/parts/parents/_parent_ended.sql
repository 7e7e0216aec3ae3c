-- _parent_ended(job_id): wake parents_resolve if a job waits for this one, which was cancelled or has died.
--
-- Only for these rare ends. A worker reports completed ones, or a look finds them: see parents_resolve.
create or replace function tallybook._parent_ended(p_job_id bigint) returns void
language plpgsql
-- profile: lookup
as $$
begin
  if exists (select from tallybook.parent p where p.parent_id = p_job_id and p.ended_as is null) then
    perform tallybook._wake(' parents_resolve');
  end if;
end $$;

-- _waits_for(job_id): describe for people which parents a waiting job waits for; null: none.
-- rights: operator, reader
create or replace function tallybook._waits_for(p_job_id bigint) returns text
language plpgsql stable
-- profile: lookup
as $$
declare
  v_ids text[]; v_all bigint; v_open bigint;
begin
  select count(*), count(*) filter (where p.ended_as is null),
         (array_agg(p.parent_id order by p.place) filter (where p.ended_as is null))[:3]
    into v_all, v_open, v_ids from tallybook.parent p where p.child_id = p_job_id;
  if v_all = 0 then return null; end if;
  return format('%s of its %s parents have not ended: %s', v_open, v_all, array_to_string(v_ids, ', ') || case
                when v_open > 3 then ', ...' else '' end);
end $$;
