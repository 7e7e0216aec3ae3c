-- complete_many(leases, job_ids, attempts, results): end many attempts as completed. Returns the job ids that were refused.
--
-- results: what the handlers returned, as JSON text, null where nothing; at most 1,000,000 bytes each: a larger one is not
-- kept, which the outcome says; the job completes all the same. One that starts with '!' is the reason why there is none.
-- Refused: the lease is not on record, or the attempt has ended otherwise (rescued, cancelled). Nothing else happens then.
-- Said twice by the same lease it is accepted twice, so a caller that lost the answer asks again.
-- Rows go by job id, attempt, like in every verb that ends several, so that no two can deadlock. The plain INSERT comes
-- first: ON CONFLICT would write a second WAL record a row, for a conflict that almost never is.
-- Reads claim, entry; writes outcome; see _release for jobs with an order key, _subjects_completed for subjects'.
create or replace function tallybook.complete_many(leases uuid[], job_ids bigint[], attempts int[], results text[] default null,
  at timestamptz default clock_timestamp())
returns bigint[] language plpgsql
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_now timestamptz := at; v_ended bigint[]; v_n bigint; v_ordered bigint[]; v_keys text[]; v_special boolean := false;
begin
  if results is not null then
    return tallybook._complete_with(leases, job_ids, attempts, results, at);
  end if;
  begin
    -- One pass also says which lines go on; who has none, and no subjects, pays nothing.
    if exists (select from tallybook.order_turn) or exists (select from tallybook.subject_job) then
      v_special := true;
      with h as materialized (select * from tallybook._held(leases, job_ids, attempts)), ended as (
        insert into tallybook.outcome (entry_xid, entry_seq, ended_at, retention, state)
        select h.xid, h.seq, v_now, h.retention, 'completed' from h order by h.job_id, h.attempt)
      select count(*), array_agg(h.job_id) filter (where h.order_key is not null), array_agg(h.order_key) filter (where h.order_key is not null)
        into v_n, v_ordered, v_keys from h;
    else
      insert into tallybook.outcome (entry_xid, entry_seq, ended_at, retention, state)
      select h.xid, h.seq, v_now, h.retention, 'completed'
        from tallybook._held(leases, job_ids, attempts) h order by h.job_id, h.attempt;
      get diagnostics v_n = row_count;
    end if;
    if v_n <> cardinality(job_ids) then
      v_ended := array(select h.job_id from tallybook._held(leases, job_ids, attempts) h);
    end if;
  exception when unique_violation then
    v_n := -1; v_keys := null; v_special := false;
    v_ended := tallybook._complete_again(leases, job_ids, attempts, null, at);
  end;
  if v_keys is not null then perform tallybook._release_of(v_ordered, v_keys, v_now); end if;
  if v_special then perform tallybook._subjects_completed(job_ids); end if;
  if v_n = cardinality(job_ids) then return '{}'; end if;
  return array(select j from unnest(job_ids) j where j <> all (coalesce(v_ended, '{}')));
end $$;

-- _complete_with(leases, job_ids, attempts, results): the same for attempts with results.
create or replace function tallybook._complete_with(p_leases uuid[], p_job_ids bigint[], p_attempts int[], p_results text[],
  p_at timestamptz default clock_timestamp())
returns bigint[] language plpgsql as $$
declare
  v_ended bigint[];
begin
  if cardinality(p_results) <> cardinality(p_job_ids) then
    raise exception 'the arrays of complete_many have different lengths' using errcode = 'TB005';
  end if;
  v_ended := tallybook._complete_again(p_leases, p_job_ids, p_attempts, p_results, p_at);
  return array(select j from unnest(p_job_ids) j where j <> all (v_ended));
end $$;

-- _complete_again(leases, job_ids, attempts, results): the same where some may have ended: which are completed now, or were before.
create or replace function tallybook._complete_again(p_leases uuid[], p_job_ids bigint[], p_attempts int[], p_results text[],
  p_at timestamptz default clock_timestamp())
returns bigint[] language plpgsql
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_now timestamptz := p_at; v_ended bigint[]; v_ordered bigint[]; v_keys text[];
begin
  insert into tallybook.outcome (entry_xid, entry_seq, ended_at, retention, state, result, error)
  select h.xid, h.seq, v_now, h.retention, 'completed',
         case when octet_length(r.result) <= 1000000 and left(r.result, 1) <> '!' then r.result::jsonb end,
         case when left(r.result, 1) = '!' then jsonb_build_object('message', 'its result was not kept: ' || substr(r.result, 2, 1000))
              when octet_length(r.result) > 1000000
              then jsonb_build_object('message', format('its result was not kept: it has %s bytes, at most 1,000,000 are', octet_length(r.result))) end
    from tallybook._held(p_leases, p_job_ids, p_attempts) h
    join unnest(p_job_ids, p_attempts, p_results) r(job_id, attempt, result) on r.job_id = h.job_id and r.attempt = h.attempt
   order by h.job_id, h.attempt
  on conflict do nothing;
  select coalesce(array_agg(h.job_id), '{}'), array_agg(h.job_id) filter (where h.order_key is not null),
         array_agg(h.order_key) filter (where h.order_key is not null)
    into v_ended, v_ordered, v_keys
    from tallybook._held(p_leases, p_job_ids, p_attempts) h
   where (select o.state from tallybook.outcome o  -- one at a time: a join reads the whole index
           where o.retention = h.retention and o.entry_xid = h.xid and o.entry_seq = h.seq limit 1) = 'completed';
  if v_keys is not null then perform tallybook._release_of(v_ordered, v_keys, v_now); end if;
  if exists (select from tallybook.subject_job) then perform tallybook._subjects_completed(v_ended); end if;
  return v_ended;
end $$;

-- _release_of(job_ids, order_keys): what follows the end of these for the lines of their order keys.
create or replace function tallybook._release_of(p_job_ids bigint[], p_keys text[], p_at timestamptz default clock_timestamp()) returns void
language plpgsql as $$
declare
  v record;
begin
  -- In one order, so that two that end jobs of the same keys do not wait for each other.
  for v in select f.id, f.k from unnest(p_job_ids, p_keys) f(id, k) order by hashtext(f.k), f.k, f.id loop
    perform tallybook._release(v.k, v.id, p_at);
  end loop;
end $$;
