-- _why_waiting(place, at): what a job in waiting waits for: a permit, a breaker, its turn by a key, its parents. A part
-- of why.
create or replace function tallybook._why_waiting(w tallybook._job_place, p_at timestamptz)
returns setof tallybook._reason language plpgsql stable as $$
declare l record; v_n bigint; v_ids bigint[]; v_room int; v_key text;
begin
  if w.options ? 'held' then
    select x.priority, x.seq, x.name into l from tallybook.concurrency_line x where x.job_id = w.job_id limit 1;
    v_key := coalesce(l.name, w.options ->> 'held');
    select count(*) into v_n from (
      select from tallybook.concurrency_line x where x.name = l.name and (x.priority, x.seq) < (l.priority, l.seq)
             limit 10000) x;
    return query select r.reason, r.explanation, r.details || tallybook._counted_before(v_n)
                   from tallybook._why_permit(v_key, p_at) r;
    if not found then
      return query select * from tallybook._why_service('concurrency_release', format(
        'The key %s has room for it, behind %s', to_json(v_key), tallybook._others(v_n)));
    end if;
  elsif w.fair_key is not null then
    select count(*) into v_n from (
      select from tallybook.waiting x where x.lane_id = w.lane_id and x.fair_key = w.fair_key and x.fair_key is not null
             and x.fair_seq < w.fair_seq limit 10000) x;
    v_room := tallybook._in_line(w.lane_id, 1000);
    return query
    select 'fair_key', format('The turn of its fair key %s has not come: %s with this key are before it, and '
                              '%s of all keys are in line.', to_json(w.fair_key), tallybook._others(v_n), v_room),
           jsonb_build_object('key', w.fair_key, 'in_line', v_room) || tallybook._counted_before(v_n);
    if v_n = 0 and v_room < 200 then
      return query select * from tallybook._why_service('fair_release', 'There is room in the line');
    end if;
  elsif w.order_key is not null then
    return query select * from tallybook._why_order(w.job_id, w.order_key);
    if not found then
      return query select * from tallybook._why_service('rescue', format('Its turn by the order key %s has come',
                                                                           to_json(w.order_key)));
    end if;
  else
    select count(*), (array_agg(x.parent_id))[:10] into v_n, v_ids from (
      select p.parent_id from tallybook.parent p where p.child_id = w.job_id and p.ended_as is null order by p.parent_id
             limit 10000) x;
    v_ids := array(select e.job_id from tallybook._ended_as(v_ids) e where e.ended_as is null order by e.job_id);
    if v_ids <> '{}' or v_n > 10 then
      return query
      select 'parents', format('It waits for its parents: %s of them have not ended, among them %s.',
                               case when v_n = 10000 then 'at least 10000' else v_n::text end,
                               array_to_string(v_ids, ', ')),
             jsonb_build_object('open', v_n, 'jobs', v_ids) || tallybook._counted_before(v_n) - 'before';
    else
      return query select * from tallybook._why_service('parents_resolve', 'Its parents have ended');
    end if;
  end if;
end $$;

-- _why_service(service, because): nothing holds the job; a service moves it to its lane at its next run.
create or replace function tallybook._why_service(p_service text, p_because text)
returns setof tallybook._reason language sql stable as $$
  select 'service_pending', format('%s. The maintenance service %s moves it to its lane at its next run.', p_because,
                                   p_service),
         jsonb_build_object('service', p_service, 'last_run_at',
                            (select s.last_run_at from tallybook.service s where s.name = p_service))
$$;

-- _why_permit(key, at): what prevents the next job of a key from starting: its breaker, or taken permits. No
-- row: nothing.
create or replace function tallybook._why_permit(p_key text, p_at timestamptz)
returns setof tallybook._reason language plpgsql stable as $$
declare b tallybook.breaker_state; v_most int; v_held bigint; v_jobs bigint[]; v_probe bigint;
begin
  select r.most into v_most from tallybook._limit_of('concurrency', p_key) r;
  select count(*), (array_agg(h.job_id order by h.job_id))[:10], min(h.job_id) filter (where h.probe) into v_held,
         v_jobs, v_probe from (
    select x.job_id, x.probe from tallybook.concurrency_holder x
     where x.name = p_key and not exists (select from tallybook._outcome_of(x.retention, x.xid, x.seq)) limit 10000) h;
  if exists (select from tallybook._limit_of('breaker', p_key)) then
    select s.* into b from tallybook.breaker_state s where s.name = p_key;
  end if;
  if b.state = 'open' and b.open_until > p_at then
    return query
    select 'breaker', format('The breaker of %s has been open since %s and stays open until %s.', to_json(p_key),
                             tallybook._moment(b.changed_at), tallybook._moment(b.open_until)),
           jsonb_build_object('key', p_key, 'state', 'open', 'since', b.changed_at, 'until', b.open_until);
  elsif b.state in ('open', 'half-open') and v_probe is not null then
    return query
    select 'breaker', format('The breaker of %s has started job %s as a probe. The others start when it completes.',
                             to_json(p_key), v_probe),
           jsonb_build_object('key', p_key, 'state', 'half-open', 'since', b.changed_at, 'job', v_probe);
  elsif v_held >= v_most then
    return query
    select 'concurrency_limit', format('All permits of the limit %s are taken: %s of %s, by job %s%s.', to_json(p_key),
                                       v_held, v_most, array_to_string(v_jobs, ', '), case when v_held > 10
                                       then ', ...' end),
           jsonb_build_object('key', p_key, 'most', v_most, 'held', v_held, 'jobs', v_jobs);
  end if;
end $$;

-- _why_order(job_id, order_key): which job of the order key is before this one. No row: none.
create or replace function tallybook._why_order(p_job_id bigint, p_key text)
returns setof tallybook._reason language plpgsql stable as $$
declare v_holder bigint; v_seq bigint; v_n bigint; l record;
begin
  select t.job_id into v_holder from tallybook.order_turn t where t.key = p_key order by t.generation desc limit 1;
  if v_holder = p_job_id then return; end if;
  if not tallybook._job_open(v_holder) then v_holder := null; end if;
  v_seq := coalesce((select min(x.seq) from tallybook.order_line x where x.job_id = p_job_id and x.key = p_key),
                    9223372036854775807);
  select count(*) into v_n
    from (select from tallybook.order_line x where x.key = p_key and x.seq < v_seq limit 10000) x;
  if v_holder is null then  -- the first open one of the hundred before it
    for l in select x.job_id from tallybook.order_line x where x.key = p_key and x.seq < v_seq
              order by x.seq limit 100 loop
      if tallybook._job_open(l.job_id) then v_holder := l.job_id; exit; end if;
    end loop;
    if v_holder is null and v_n <= 100 then return; end if;
  end if;
  return query
  select 'order_key', format('Jobs with order key %s run one at a time: %s first, %s are before it.', to_json(p_key),
                             coalesce('job ' || v_holder || ' runs', 'another job runs'), tallybook._others(v_n)),
         jsonb_build_object('key', p_key, 'job', v_holder) || tallybook._counted_before(v_n);
end $$;
