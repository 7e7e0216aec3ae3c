-- _parent_ended(job_id): wake parents_resolve if a job waits for this one, which was cancelled or has died.
--
-- Only for these rare ends. A worker reports completed ones, or a look finds them: see parents_resolve.
-- profile: lookup
create or replace function tallybook._parent_ended(p_job_id bigint) returns void language plpgsql as $$
begin
  perform tallybook._wake(' parents_resolve')
    where exists (select from tallybook.parent p where p.parent_id = p_job_id and p.ended_as is null);
end $$;

-- _waits_for(job_id): describe for people which parents a waiting job waits for; null: none.
-- profile: lookup
-- rights: operator, reader
create or replace function tallybook._waits_for(p_job_id bigint) returns text language sql stable as $$
  select format('%s of its %s parents have not ended: %s', count(p.open), count(*),
                array_to_string((array_agg(p.open order by p.place) filter (where p.open is not null))[:3], ', ')
                || case when count(p.open) > 3 then ', ...' else '' end)
    from (select x.place, case when x.ended_as is null then x.parent_id end as open
            from tallybook.parent x where x.child_id = p_job_id) p having count(*) > 0
$$;
