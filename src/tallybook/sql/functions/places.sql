-- places(names, at, as_service): let those go on who wait for a place at a concurrency limit, where one is free.
--
-- Said with names by whoever has just seen the end of a job that held one; without, by a service, for what a crash, a rescue or a
-- changed rule has freed: up to 1000 keys, from a random one on.
-- Returns released: how many were let go on (null: somebody else runs the service), and whether anybody waits still.
-- Locks the keys' rows in their order. Reads concurrency_limit, outcome, tombstone; deletes from concurrency_holder, concurrency_line,
-- waiting; writes entry, scheduled, concurrency_holder, service.
create or replace function tallybook.places(names text[] default null, at timestamptz default clock_timestamp(), as_service boolean default false,
  out released int, out remain boolean)
language plpgsql
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
  v_name text; v_first text;
begin
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception 'places needs READ COMMITTED' using errcode = 'TB003', hint = 'An older snapshot does not see who has ended.';
  end if;
  remain := true;
  if as_service and not tallybook._service_claim('places', at) then return; end if;
  released := 0;
  if names is null then
    names := '{}';
    select l.name into v_first from tallybook.concurrency_line l
     where l.job_id >= (select b.low + floor(random() * (b.high - b.low + 1))::bigint
                          from (select min(x.job_id) as low, max(x.job_id) as high from tallybook.concurrency_line x) b)
     order by l.job_id limit 1;
    v_name := v_first;
    for step in 1..1000 loop
      exit when v_name is null;
      names := names || v_name;
      select n.name into v_name from (
        select (select l.name from tallybook.concurrency_line l where l.name > v_name order by l.name limit 1)) n(name);
      if v_name is null then select l.name into v_name from tallybook.concurrency_line l order by l.name limit 1; end if;
      exit when v_name = v_first;
    end loop;
  end if;
  -- In the order in which limit_take locks them: the rows are there since the first who waits was put aside.
  for v_name in select n from unnest(names) n group by n order by n loop
    continue when not exists (select from tallybook.concurrency_line l where l.name = v_name);
    perform from tallybook.rate_state s where s.name = v_name for update;
    released := released + tallybook._let_in(v_name, at);
  end loop;
  remain := exists (select from tallybook.concurrency_line);
  if as_service then perform tallybook._service_ran('places', at, released); end if;
end $$;

-- _let_in(name, at): those who wait for a place of this key go on, as many as there are places; how many. The key's row is locked.
create or replace function tallybook._let_in(p_name text, p_at timestamptz) returns int
language plpgsql
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off
as $$
declare
  v_free int; v_in int := 0; l record; w tallybook.waiting;
begin
  v_free := coalesce((select r.most from tallybook._concurrency_limit_of(p_name) r), 2147483647) - tallybook._places_held(p_name);
  while v_in < v_free loop
    select n.priority, n.seq, n.job_id into l from tallybook.concurrency_line n where n.name = p_name order by n.priority, n.seq limit 1;
    exit when not found;
    delete from tallybook.concurrency_line n where n.name = p_name and n.priority = l.priority and n.seq = l.seq;
    delete from tallybook.waiting x
     where x.job_id = (select y.job_id from tallybook.waiting y where y.job_id = l.job_id and y.options ->> 'held' = p_name for update)
    returning x.* into w;
    continue when not found;  -- cancelled, and on its way already
    w.options := w.options - 'held';
    if exists (select from tallybook.tombstone t where t.job_id = w.job_id and t.cancelled
                  and (t.attempt = w.attempt or t.attempt < w.attempt and not t.once)) then
      w.run_at := least(w.run_at, p_at);
      perform tallybook._put_back(w, p_at);  -- a claim meets and ends it
      continue;
    end if;
    w.lane_id := coalesce((select n.lane_id from tallybook.lane o, lateral tallybook._lane(o.queue, o.priority, 'turn') n
                            where o.lane_id = w.lane_id and o.part = ''), w.lane_id);
    w.options := w.options || jsonb_build_object('turn', coalesce(w.options ->> 'turn', p_name));
    if tallybook._put_back(w, p_at) then
      insert into tallybook.concurrency_holder (xid, seq, job_id, retention, name)
      select pg_current_xact_id(), currval('tallybook.job_id'), w.job_id, n.retention, p_name from tallybook.lane n where n.lane_id = w.lane_id;
      v_in := v_in + 1;
    end if;
  end loop;
  return v_in;
end $$;

-- _places_held(name): how many hold a place of this key. Forgets those that have ended. The key's row is locked.
create or replace function tallybook._places_held(p_name text) returns int
language plpgsql
set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off set enable_memoize = off
as $$
begin
  delete from tallybook.concurrency_holder h
   where h.name = p_name
     and exists (select from tallybook.outcome o where o.retention = h.retention and o.entry_xid = h.xid and o.entry_seq = h.seq);
  return (select count(*) from tallybook.concurrency_holder h where h.name = p_name);
end $$;

-- _concurrency_limit_of(name): the rule of a key: of its own name, else of what stands before the first colon. No row: none.
create or replace function tallybook._concurrency_limit_of(p_name text) returns setof tallybook.concurrency_limit
language plpgsql stable as $$
begin
  return query select r.* from tallybook.concurrency_limit r where r.name = p_name;
  if not found then return query select r.* from tallybook.concurrency_limit r where r.name = split_part(p_name, ':', 1); end if;
end $$;

-- _until_place(lease, job_id, attempt, name, priority, at): end an attempt as moved; the job waits for a place of this key.
create or replace function tallybook._until_place(p_lease uuid, p_job_id bigint, p_attempt int, p_name text, p_priority int,
  p_at timestamptz) returns void
language plpgsql
set jit = off set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  e tallybook.entry := tallybook._end(p_lease, p_job_id, p_attempt, 'moved', null, p_at);
begin
  if e.job_id is null then return; end if;
  insert into tallybook.waiting (job_id, waits_since, enqueued_at, run_at, lane_id, attempt, failures, crashes, max_attempts, task, args,
                                 headers, unique_key, errors, expires_at, order_key, options)
  values (e.job_id, p_at, e.enqueued_at, e.run_at, e.lane_id, e.attempt + 1, e.failures, e.crashes, e.max_attempts, e.task,
          e.args, e.headers, e.unique_key, e.errors, e.expires_at, e.order_key,
          coalesce(e.options, '{}') || jsonb_build_object('held', p_name));
  insert into tallybook.concurrency_line (name, priority, seq, job_id) values (p_name, p_priority, nextval('tallybook.job_id'), e.job_id);
end $$;
