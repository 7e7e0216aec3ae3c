-- concurrency_release(names, at, as_service, quiet): release jobs that wait for a permit of a concurrency limit or for
-- a breaker.
--
-- A caller whose job held a permit passes the names of its limits, in the statement that ends the job or later. The
-- service passes no names: it handles permits freed by a crash, a rescue, time or a changed rule, for up to 1000 keys
-- from a random one on. A call releases at most 500 jobs per key.
--   quiet  queues whose workers need not be woken: the caller claims from them itself, and has free slots
-- Returns released: the number of released jobs (null: another session runs the service, or kept one of the names
-- locked for more than 20 ms), and remain: whether jobs still wait.
-- Locks the rows of the keys in their order; without names they are only tried. Reads limit_rule,
-- outcome, tombstone; deletes from concurrency_holder, concurrency_line, waiting; writes entry,
-- scheduled, concurrency_holder, concurrency_line, breaker_state, service.
-- profile: nested
-- rights: worker
create or replace function tallybook.concurrency_release(names text[] default null,
  at timestamptz default clock_timestamp(), as_service boolean default false, quiet text[] default '{}',
  out released int, out remain boolean) language plpgsql as $$
declare v_name text; v_told boolean := names is not null;
begin
  perform tallybook._read_committed('concurrency_release needs READ COMMITTED',
                                    'An older snapshot does not show which jobs have ended.');
  remain := true;
  if as_service and not tallybook._service_claim('concurrency_release', at) then return; end if;
  if names is null then
    names := array(
      with recursive k(name) as (
        (select l.name from tallybook.concurrency_line l
          where l.job_id >= (select b.low + floor(random() * (b.high - b.low + 1))::bigint
                               from (select min(x.job_id) as low, max(x.job_id) as high
                                       from tallybook.concurrency_line x) b)
          order by l.job_id limit 1)
        union  -- once round: union ends at the first repetition
        select coalesce((select l.name from tallybook.concurrency_line l where l.name > k.name order by l.name limit 1),
                        (select l.name from tallybook.concurrency_line l order by l.name limit 1)) from k)
      select k.name from k limit 1000);
  end if;
  -- Lock all of them first, in the order of limit_take; _let_in only tries further locks.
  if v_told and not tallybook._lock_keys(names) then return; end if;
  released := 0;
  for v_name in select n from unnest(names) n group by n order by n loop
    if not v_told then
      perform from tallybook.rate_state s where s.name = v_name for update skip locked;
      continue when not found;
    end if;
    if exists (select from tallybook.concurrency_line l where l.name = v_name) then
      released := released + tallybook._let_in(v_name, at, p_quiet => quiet);
    elsif exists (select from tallybook._limit_of('breaker', v_name)) then
      perform tallybook._permits_free(v_name, at);  -- so that the ends so far count for the breaker
    end if;
  end loop;
  remain := exists (select from tallybook.concurrency_line);
  if as_service then perform tallybook._service_ran('concurrency_release', at, released); end if;
end $$;

-- _lock_keys(names): lock the rows of these keys until the end of the transaction; false if one is not free within
-- 20 ms. A transaction that changes a rule may stay open, and no end of a job waits for it.
create or replace function tallybook._lock_keys(p_names text[]) returns boolean
language plpgsql
set lock_timeout = '20ms'  -- see above
as $$
begin
  perform from (select s.name from tallybook.rate_state s where s.name = any (p_names)
                order by s.name for update) s;
  return true;
exception when lock_not_available then
  return false;
end $$;

-- _let_in(name, at, most, quiet): let as many waiting jobs of this key continue as there are permits; return how
-- many. The key's row is locked.
--
-- A job continues with the permits of all its keys. If another of its keys has none, it moves to that key's line,
-- without an entry, and keeps its seniority. A permit reserved for it meanwhile would be unused, and two jobs
-- could block each other for ever.
-- A job or a key with a lock is skipped; the next look finds it.
-- profile: nested
create or replace function tallybook._let_in(p_name text, p_at timestamptz, p_most int default 500,
  p_quiet text[] default '{}') returns int language plpgsql as $$
declare
  v_in int := 0; v_free int; v_probing boolean; v_priority int := -1; v_seq bigint := 0; v_job bigint; v_lane record;
  v_keys text[]; v_probes text[]; v_full text; v_busy boolean; v_here boolean; f record; w tallybook.waiting; k text;
  v_notify text := coalesce(current_setting('tallybook.notify', true), '');
begin
  select x.free, x.probing into v_free, v_probing from tallybook._permits_free(p_name, p_at) x;
  for step in 1..p_most loop
    exit when v_in >= v_free;  -- null: it has no rule
    select n.priority, n.seq, n.job_id into v_priority, v_seq, v_job from tallybook.concurrency_line n
     where n.name = p_name and (n.priority, n.seq) > (v_priority, v_seq) order by n.priority, n.seq limit 1;
    exit when not found;
    select y.* into w from tallybook.waiting y where y.job_id = v_job
           and y.options ->> 'held' = p_name for update skip locked;
    v_here := found;
    continue when not v_here and exists (  -- it has a lock
      select from tallybook.waiting y where y.job_id = v_job and y.options ->> 'held' = p_name);
    if not v_here or exists (select from tallybook._cancel_of(w.job_id, w.attempt)) then
      delete from tallybook.concurrency_line n where n.name = p_name and n.priority = v_priority and n.seq = v_seq;
      continue when not v_here;  -- cancelled, and moved already
      delete from tallybook.waiting y where y.job_id = w.job_id;
      w.run_at := least(w.run_at, p_at);
      perform tallybook._place_waiting(w, p_at);  -- a claim meets and ends it
      continue;
    end if;
    select o.queue, o.priority, o.part into v_lane from tallybook.lane o where o.lane_id = w.lane_id;
    v_keys := '{}'; v_probes := case when v_probing then array[p_name] else '{}' end; v_full := null; v_busy := false;
    for k in select distinct n from jsonb_array_elements_text(coalesce(w.options -> 'limits', '[]')
                                                              || coalesce(w.options -> 'permits', '[]')
                                                              || tallybook._wide_limits(v_lane.queue, w.task)) n
              where n <> p_name order by n loop
      perform from tallybook.rate_state s where s.name = k for update skip locked;
      if not found then
        v_busy := exists (select from tallybook.rate_state s where s.name = k);
        exit when v_busy;
        continue;  -- no job has asked for it yet
      end if;
      select x.free, x.probing into f from tallybook._permits_free(k, p_at) x;
      continue when f.free is null;
      if f.free <= 0 then v_full := k; exit; end if;
      v_keys := v_keys || k;
      if f.probing then v_probes := v_probes || k; end if;
    end loop;
    continue when v_busy;
    if v_full is not null then
      update tallybook.concurrency_line n set name = v_full where n.name = p_name and n.priority = v_priority
        and n.seq = v_seq;
      update tallybook.waiting y set options = y.options || jsonb_build_object('held', v_full)
        where y.job_id = w.job_id;
      continue;
    end if;
    delete from tallybook.concurrency_line n where n.name = p_name and n.priority = v_priority and n.seq = v_seq;
    delete from tallybook.waiting y where y.job_id = w.job_id;
    if v_lane.part in ('', 'fair') then w.lane_id := tallybook._lane_beside(w.lane_id, 'turn'); end if;
    w.options := w.options || '{"turn": ""}';
    perform set_config('tallybook.notify', 'off', true) where v_lane.queue = any (p_quiet);
    v_here := tallybook._place_waiting(w, p_at);
    perform set_config('tallybook.notify', v_notify, true) where v_lane.queue = any (p_quiet);
    if v_here then
      insert into tallybook.concurrency_holder (xid, seq, job_id, retention, probe, name)
      select pg_current_xact_id(), currval('tallybook.job_id'), w.job_id, l.retention, n = any (v_probes), n
        from tallybook.lane l, unnest(case when v_free is null then v_keys else p_name || v_keys end) n
             where l.lane_id = w.lane_id;
      v_in := v_in + 1;
    end if;
  end loop;
  return v_in;
end $$;
