-- complete_many(leases, job_ids, attempts, results): end many attempts as completed. Returns the refused job ids.
--
-- results: the handlers' return values as JSON text, or null; at most 1,000,000 bytes each. A larger one is not stored:
-- the outcome records this, and the job still completes. A text that starts with '!' is not a result, but the reason
-- why there is none.
-- An attempt is refused, and nothing changes, if no claim has the lease or the attempt has ended otherwise (rescued,
-- cancelled). The same lease can complete an attempt twice, so a caller that lost the response can repeat the call.
-- Rows are written by job id and attempt, as in every function that ends several attempts, so two calls cannot
-- deadlock. The plain INSERT comes first, because ON CONFLICT would write a second WAL record per row, for a conflict
-- that is very rare. Reads claim, entry; writes outcome, tally; see _release for jobs with an order key,
-- _subjects_completed for subjects.
-- profile: hot
-- rights: worker
create or replace function tallybook.complete_many(leases uuid[], job_ids bigint[], attempts int[],
  results text[] default null, at timestamptz default clock_timestamp())
returns bigint[] language plpgsql as $$
declare h record;
begin
  if results is not null then return tallybook._complete_with(leases, job_ids, attempts, results, at); end if;
  begin
    h := tallybook._complete_held(leases, job_ids, attempts, at);
  exception when unique_violation then
    return tallybook._complete_with(leases, job_ids, attempts, results, at);
  end;
  if h.keys is not null then perform tallybook._release_of(h.ordered, h.keys, at); end if;
  perform tallybook._subjects_completed(job_ids);
  if h.n = cardinality(job_ids) then return '{}'; end if;
  return array(select j from unnest(job_ids) j
                where j <> all (array(select e.job_id from tallybook._lease_entries(leases, job_ids, attempts) e)));
end $$;

-- _complete_held(leases, job_ids, attempts, at): write the outcomes of the attempts that their leases hold, and count
-- them in tally.
--
-- A claim of which many attempts end, or a single job, is read at once into arrays, and one INSERT writes all: a join
-- that carries the rows along takes longer, and the difference pays for the counting. All others are looked up by
-- _lease_entries, which takes 35 us more for a single job. n: their number; also returns those with order keys.
-- Raises unique_violation if one has already ended. Reads claim, entry; writes outcome, tally.
-- profile: batch
create or replace function tallybook._complete_held(p_leases uuid[], p_job_ids bigint[], p_attempts int[],
  p_at timestamptz, out n bigint, out ordered bigint[], out keys text[]) language plpgsql as $$
declare
  c record; f record; v_leases uuid[]; v_ids bigint[] := p_job_ids; v_tries int[] := p_attempts; v_few uuid[] := '{}';
  v_xids xid8[] := '{}'; v_seqs bigint[] := '{}'; v_jobs bigint[] := '{}'; v_classes "char"[] := '{}';
begin
  for c in select d.lease, d.n, count(*) over () > 1 as others, k.*
             from (select l as lease, count(*) as n from unnest(p_leases) l group by l) d left join lateral (
               select k.lane_id, k.retention, k.claimed_at, k.from_xid, k.from_seq, k.pos_xid, k.pos_seq, k.one_xid,
                      k.jobs, k.holes, k.closed, k.skipped
                 from tallybook.claim k where k.lease = d.lease limit 1) k on true loop
    if c.n < 8 and (c.n > 1 or c.others) or c.jobs is null or c.n * 8 < c.jobs
       or c.one_xid is not null or c.closed <> '{}' then
      v_few := v_few || c.lease;
      continue;
    end if;
    if c.others then
      select array_agg(u.id), array_agg(u.attempt) into v_ids, v_tries
        from unnest(p_leases, p_job_ids, p_attempts) u(lease, id, attempt) where u.lease = c.lease;
    end if;
    select array_agg(e.xid) as xids, array_agg(e.seq) as seqs, array_agg(e.job_id) as jobs,
           min(e.task collate "C") as task, max(e.task collate "C") as other, count(*) as n, sum(e.attempt) as attempts,
           min(e.ready_at) as first, max(e.ready_at) as last, count(e.order_key) as ordered
      into f
      from (select e.* from (
              select e.xid, e.seq, e.job_id, e.attempt, e.task, e.order_key,
                     greatest(e.run_at, e.enqueued_at) as ready_at from tallybook.entry e
               where e.lane_id = c.lane_id and e.retention = c.retention
                 and e.xid >= c.from_xid and (e.xid, e.seq) > (c.from_xid, c.from_seq)
                 and e.xid <= c.pos_xid and (e.xid, e.seq) <= (c.pos_xid, c.pos_seq)
                 and e.xid <> all (c.holes) and e.seq <> all (c.skipped)
               order by e.xid, e.seq limit c.jobs) e  -- the limit: see claimed_jobs
            join (select u.job_id, u.attempt from unnest(v_ids, v_tries) u(job_id, attempt)) u
              on u.job_id = e.job_id and u.attempt = e.attempt order by e.job_id) e;
    if f.task <> f.other or f.ordered > 0 then v_few := v_few || c.lease; end if;  -- each one counts by its own
    continue when f.task <> f.other or f.ordered > 0 or f.n = 0;
    v_xids := v_xids || f.xids; v_seqs := v_seqs || f.seqs; v_jobs := v_jobs || f.jobs;
    v_classes := v_classes || array_fill(c.retention, array[f.n::int]);
    insert into tallybook.tally (lane_id, n, attempts, what, took, waited, task)
    values (c.lane_id, f.n, f.attempts, 'completed', tallybook._bucket(c.claimed_at, p_at),
            tallybook._bucket(case when isfinite(f.first) and isfinite(f.last)
                              then f.first + (f.last - f.first) / 2 end, c.claimed_at), f.task);
  end loop;
  if v_few <> '{}' then
    select array_agg(u.lease), array_agg(u.id), array_agg(u.attempt) into v_leases, v_ids, v_tries
      from unnest(p_leases, p_job_ids, p_attempts) u(lease, id, attempt) where u.lease = any (v_few);
    with h as materialized (
      select * from tallybook._lease_entries(v_leases, v_ids, v_tries)
    ), told as (
      insert into tallybook.tally (lane_id, n, attempts, what, took, waited, task)
      select k.lane_id, count(*), sum(k.attempt), 'completed', k.took, k.waited, k.task
        from (select h.lane_id, h.attempt, h.task, tallybook._bucket(h.claimed_at, p_at) as took,
                     tallybook._bucket(h.ready_at, h.claimed_at) as waited from h) k
       group by k.lane_id, k.task, k.took, k.waited)
    select v_xids || coalesce(array_agg(h.xid), '{}'), v_seqs || coalesce(array_agg(h.seq), '{}'),
           v_jobs || coalesce(array_agg(h.job_id), '{}'), v_classes || coalesce(array_agg(h.retention), '{}'),
           array_agg(h.job_id) filter (where h.order_key is not null),
           array_agg(h.order_key) filter (where h.order_key is not null)
      into v_xids, v_seqs, v_jobs, v_classes, ordered, keys
      from h;
  end if;
  insert into tallybook.outcome (entry_xid, entry_seq, ended_at, retention, state)
  select u.xid, u.seq, p_at, u.class, 'completed'
    from unnest(v_xids, v_seqs, v_jobs, v_classes) u(xid, seq, job, class) order by u.job;
  get diagnostics n = row_count;
end $$;

-- _complete_with(leases, job_ids, attempts, results): the same for attempts with results.
create or replace function tallybook._complete_with(p_leases uuid[], p_job_ids bigint[], p_attempts int[],
  p_results text[], p_at timestamptz default clock_timestamp())
returns bigint[] language plpgsql as $$
declare v_ended bigint[];
begin
  if cardinality(p_results) <> cardinality(p_job_ids) then
    raise exception 'the arrays of complete_many have different lengths' using errcode = 'TB005';
  end if;
  v_ended := tallybook._complete_again(p_leases, p_job_ids, p_attempts, p_results, p_at);
  return array(select j from unnest(p_job_ids) j where j <> all (v_ended));
end $$;

-- _complete_again(leases, job_ids, attempts, results): the same if some may have ended. Returns those that are
-- completed now or were before.
-- profile: hot
create or replace function tallybook._complete_again(p_leases uuid[], p_job_ids bigint[], p_attempts int[],
  p_results text[], p_at timestamptz default clock_timestamp())
returns bigint[] language plpgsql as $$
declare v_now timestamptz := p_at; v_ended bigint[]; v_ordered bigint[]; v_keys text[];
begin
  with h as materialized (  -- once each: an attempt that a call names twice ends, and is counted, once
    select distinct on (h.job_id, h.attempt) h.*, r.result
      from tallybook._lease_entries(p_leases, p_job_ids, p_attempts) h
      join unnest(p_job_ids, p_attempts, p_results) r(job_id, attempt, result) on r.job_id = h.job_id
           and r.attempt = h.attempt
  ), ended as (
    insert into tallybook.outcome (entry_xid, entry_seq, ended_at, retention, state, result, error)
    select h.xid, h.seq, v_now, h.retention, 'completed',
           case when octet_length(h.result) <= 1000000 and left(h.result, 1) <> '!' then h.result::jsonb end,
           case when left(h.result, 1) = '!' then jsonb_build_object('message', 'its result was not kept: '
                                                                     || substr(h.result, 2, 1000))
                when octet_length(h.result) > 1000000
                then jsonb_build_object('message',
                                        format('its result was not kept: it has %s bytes, at most 1,000,000 are',
                                               octet_length(h.result))) end
      from h order by h.job_id, h.attempt
    on conflict do nothing returning entry_xid, entry_seq)
  insert into tallybook.tally (lane_id, n, attempts, what, took, waited, task)
  select k.lane_id, count(*), sum(k.attempt), 'completed', k.took, k.waited, k.task
    from (select h.lane_id, h.attempt, h.task, tallybook._bucket(h.claimed_at, v_now) as took,
          tallybook._bucket(h.ready_at, h.claimed_at) as waited
            from ended d join h on h.xid = d.entry_xid and h.seq = d.entry_seq) k
   group by k.lane_id, k.task, k.took, k.waited;
  select coalesce(array_agg(h.job_id), '{}'), array_agg(h.job_id) filter (where h.order_key is not null),
         array_agg(h.order_key) filter (where h.order_key is not null)
    into v_ended, v_ordered, v_keys
    from tallybook._lease_entries(p_leases, p_job_ids, p_attempts) h
   where (select o.state from tallybook.outcome o  -- one at a time: a join reads the whole index
           where o.retention = h.retention and o.entry_xid = h.xid and o.entry_seq = h.seq limit 1) = 'completed';
  if v_keys is not null then perform tallybook._release_of(v_ordered, v_keys, v_now); end if;
  perform tallybook._subjects_completed(v_ended);
  return v_ended;
end $$;

-- _release_of(job_ids, order_keys): release the next jobs of these order keys.
create or replace function tallybook._release_of(p_job_ids bigint[], p_keys text[],
  p_at timestamptz default clock_timestamp()) returns void
language plpgsql as $$
declare v record;
begin
  -- In one order, so that two that end jobs of the same keys do not wait for each other.
  for v in select f.id, f.k from unnest(p_job_ids, p_keys) f(id, k) order by hashtext(f.k), f.k, f.id loop
    perform tallybook._release(v.k, v.id, p_at);
  end loop;
end $$;
