-- fair_release(known, max_line, at, as_service): move jobs with a fair key to their lanes in rounds, one job per key in
-- each round.
--
-- A due job with options.fair_key is in waiting. A lane of such jobs (part 'fair') has at most max_line unclaimed jobs.
-- If it has room, the keys with waiting jobs get their turns, beginning after the key that was served last (fair_turn).
-- The job of a new key therefore waits for the jobs in the lane and for one round, however many jobs other keys have. A
-- key that was seen once costs no lane, row or claim.
--   known       the value that the previous call returned: which keys have jobs, and from which number on. With it, the
--               call skips keys without jobs, and dead rows that vacuum cannot remove yet because of an old snapshot.
--               Null: search for all keys. The search is repeated every 3 s, for very late commits; a job up to 100
--               numbers late is found at once.
--   max_line    how many released jobs of a lane may be unclaimed
--   as_service  record the run. This transaction then commits asynchronously, so it must do nothing else. If a crash of
--               the server undoes it, the jobs wait again
-- Returns known; released: the number of moved jobs; busy: another session is releasing jobs of a lane, so call again
-- soon; remain: whether jobs still wait. Any worker may call it at any time: only one session at a time releases jobs
-- of a lane, under a lock that nobody waits for (_service_claim), and it sees the jobs that the previous one has moved.
-- Locked rows are left for a later call. Needs READ COMMITTED (TB003).
-- Reads lane, claim, entry; deletes from waiting, fair_turn; writes entry, scheduled, fair_turn, service.
-- profile: nested
-- rights: worker
create or replace function tallybook.fair_release(inout known jsonb default null, max_line int default 200,
  at timestamptz default clock_timestamp(), as_service boolean default false, out released int, out busy boolean,
  out remain boolean) language plpgsql as $$
declare l record; d record; v_state jsonb; v_known jsonb := coalesce(known, '{}'); v_room int; v_mine boolean;
begin
  perform tallybook._read_committed('fair_release needs READ COMMITTED',
                                    'An older snapshot does not show which jobs are in line.');
  if as_service then perform set_config('synchronous_commit', 'off', true); end if;
  known := '{}'; released := 0; busy := false; remain := false;
  for l in select x.lane_id, x.queue, x.retention from tallybook.lane x where x.part = 'fair' order by x.lane_id loop
    -- Without a lock: an idle lane costs a look at its end. Of very many keys no more are looked up than there is room
    -- for.
    v_state := v_known -> l.lane_id::text;
    v_room := max_line;
    if (v_state ->> 'full')::boolean then v_room := max_line - tallybook._in_line(l.lane_id, max_line); end if;
    v_state := tallybook._fair_keys(l.lane_id, v_state, v_room, at);
    if v_state -> 'keys' <> '{}' then
      v_mine := tallybook._service_claim('fair_release ' || l.lane_id, at);
      v_room := max_line - tallybook._in_line(l.lane_id, max_line);  -- now that nobody else can put any in
      if v_room > 0 and v_mine then
        select * into d from tallybook._fair_release_lane(l.lane_id, l.queue, l.retention, v_state -> 'keys', v_room,
                                                          at);
        v_state := v_state || jsonb_build_object('keys', d.keys);
        released := released + d.released;
      end if;
      busy := busy or v_room > 0 and not v_mine;
    end if;
    remain := remain or v_state -> 'keys' <> '{}' or (v_state ->> 'full')::boolean;
    known := known || jsonb_build_object(l.lane_id, v_state);
  end loop;
  if as_service then perform tallybook._service_ran('fair_release', at, released); end if;
end $$;

-- _fair_keys(lane_id, state, most, at): the keys of a lane that may have waiting jobs, each with the number of its
-- oldest, and what the next look needs to know: top, the newest number that was seen; looked, when all was found out;
-- full, whether there are more keys than these.
--
-- Of most lanes it reads what is newer than top. A walk over the keys, from behind the one that was served last, is for
-- the first time, for every 3 s, after a flood of more than 1000 new jobs, and while there are more than 400 keys.
create or replace function tallybook._fair_keys(p_lane_id int, p_state jsonb, p_room int,
  p_at timestamptz) returns jsonb
language plpgsql stable as $$
declare
  v_now numeric := extract(epoch from p_at);
  v_all boolean := p_state is null or v_now not between (p_state ->> 'looked')::numeric
    and (p_state ->> 'looked')::numeric + 3;
  v_full boolean := coalesce((p_state ->> 'full')::boolean, false);
  v_keys jsonb := coalesce(p_state -> 'keys', '{}'); v_top bigint := coalesce((p_state ->> 'top')::bigint, 0);
  v_new jsonb; v_count int; v_newest bigint; v_most int; v_names text[]; v_seqs bigint[]; v_next int;
  v_found text[] := '{}'; v_found_seqs bigint[] := '{}'; v_n int := 0; v_seq bigint; v_wrapped boolean;
  v_last text collate "C"; v_key text collate "C"; v_near text collate "C"; v_between text collate "C";
begin
  if not v_all then
    select jsonb_object_agg(k.fair_key, k.seq), sum(k.jobs), max(k.newest) into v_new, v_count, v_newest from (
      select n.fair_key, min(n.fair_seq) as seq, max(n.fair_seq) as newest, count(*) as jobs from (
        select w.fair_key, w.fair_seq from tallybook.waiting w
         where w.lane_id = p_lane_id and w.fair_seq > v_top - 100 and w.fair_key is not null order by w.fair_seq
               limit 1000) n
       group by n.fair_key) k;
    if v_count is not null and v_count < 1000 then
      -- Late in a known key: its floor goes down.
      v_keys := v_new || v_keys || coalesce((select jsonb_object_agg(n.key, n.value) from jsonb_each(v_new) n
                                              where (n.value)::bigint < (v_keys -> n.key)::bigint), '{}');
      v_top := greatest(v_top, v_newest);
    end if;
    if coalesce(v_count, 0) < 1000 and not v_full then
      return jsonb_build_object('keys', v_keys, 'top', v_top, 'full', false, 'looked', p_state -> 'looked');
    end if;
  end if;
  -- Before the walk: what is committed in between has a higher number, or is late.
  select w.fair_seq into v_newest from tallybook.waiting w where w.lane_id = p_lane_id and w.fair_key is not null
         order by w.fair_seq desc limit 1;
  v_top := greatest(v_top, v_newest);
  if v_all then v_keys := '{}'; end if;
  v_most := case when v_full and not v_all then greatest(p_room, 0) + 1 else greatest(400, p_room + 1) end;
  select t.fair_key into v_last from tallybook.fair_turn t where t.lane_id = p_lane_id order by t.number desc limit 1;
  v_last := coalesce(v_last, ''); v_key := v_last; v_wrapped := v_last = '';
  select array_agg(k.key order by k.key collate "C"), array_agg(k.value::bigint order by k.key collate "C"),
         count(*) filter (where k.key collate "C" <= v_last) + 1
    into v_names, v_seqs, v_next from jsonb_each(v_keys) k;
  loop
    -- Up to the next key that is known, which is not looked up: its dead rows would be walked over.
    v_near := v_names[v_next];
    if v_near is null then
      select w.fair_key, w.fair_seq into v_near, v_seq from tallybook.waiting w
       where w.lane_id = p_lane_id and w.fair_key > v_key and w.fair_key is not null order by w.fair_key, w.fair_seq
             limit 1;
    else
      select w.fair_key, w.fair_seq into v_between, v_seq from tallybook.waiting w
       where w.lane_id = p_lane_id and w.fair_key > v_key and w.fair_key < v_near and w.fair_key is not null
       order by w.fair_key, w.fair_seq limit 1;
      if found then v_near := v_between; else v_seq := v_seqs[v_next]; v_next := v_next + 1; end if;
    end if;
    if v_near is null or v_wrapped and v_last <> '' and v_near > v_last then
      exit when v_wrapped;
      v_wrapped := true; v_key := ''; v_next := 1;
      continue;
    end if;
    v_key := v_near; v_n := v_n + 1;
    v_found[v_n] := v_near; v_found_seqs[v_n] := v_seq;
    exit when v_n = v_most;
  end loop;
  return jsonb_build_object('keys', coalesce((select jsonb_object_agg(f.key, f.seq)
                                                from unnest(v_found, v_found_seqs) f(key, seq)), '{}'),
                            'top', v_top, 'full', v_n = v_most,
                            'looked', case when v_all then to_jsonb(v_now) else p_state -> 'looked' end);
end $$;

-- _in_line(lane_id, most): how many entries of a lane no claim has passed yet; no more than most are counted.
create or replace function tallybook._in_line(p_lane_id int, p_most int) returns int
language plpgsql stable as $$
begin
  return (select count(*) from (select from tallybook._line_entries(p_lane_id) limit p_most) n);
end $$;

-- _fair_release_lane(lane_id, queue, retention, keys, room, at): put the next of these keys' jobs in line, at most so
-- many. The caller has the lane's lock.
create or replace function tallybook._fair_release_lane(p_lane_id int, p_queue text, p_retention "char", p_keys jsonb,
  p_room int, p_at timestamptz, out released int, out keys jsonb)
language plpgsql as $$
declare
  t record; w tallybook.waiting; v_ring text[]; v_each int; v_tids tid[]; v_last text; v_later boolean; v_short boolean;
  v_moved int;
begin
  released := 0; keys := p_keys;
  select x.number, x.fair_key into t from tallybook.fair_turn x where x.lane_id = p_lane_id order by x.number desc
         limit 1;
  v_ring := array(select k from jsonb_object_keys(p_keys) k
                   order by (k collate "C") <= coalesce(t.fair_key, '' collate "C"), k collate "C" limit p_room);
  -- One of each key, as many as there is room for; of few keys as many rounds as it takes. Where some have less than
  -- their share, the others are read further, at most to the whole room.
  v_each := (p_room - 1) / cardinality(v_ring) + 1;
  loop
    with found as (
      select r.key, x.*, row_number() over (order by x.nth, r.place) as rank
        from unnest(v_ring) with ordinality r(key, place), lateral (
          select y.ctid as tid, y.fair_seq, y.run_at > p_at as later, row_number() over (order by y.fair_seq) as nth
            from tallybook.waiting y
           where y.lane_id = p_lane_id and y.fair_key = r.key and y.fair_key is not null
                 and y.fair_seq >= (p_keys ->> r.key)::bigint
           order by y.fair_seq limit v_each + 1) x
    ), told as (
      select f.*, f.nth <= v_each and f.rank <= p_room as chosen from found f
    )
    select array_agg(f.tid order by f.rank) filter (where f.chosen),
           (array_agg(f.key order by f.rank desc) filter (where f.chosen))[1], bool_or(f.later and f.chosen),
           count(*) filter (where f.chosen) < p_room and coalesce(bool_or(not f.chosen), false),
           p_keys - v_ring || coalesce(jsonb_object_agg(f.key, f.fair_seq order by f.rank desc)
                                         filter (where not f.chosen), '{}')
      into v_tids, v_last, v_later, v_short, keys from told f;
    exit when not v_short or v_each >= p_room;
    v_each := least(p_room, v_each * 8);
  end loop;
  if v_tids is null then return; end if;
  if v_later then  -- pushed to a later time while it waited
    for w in delete from tallybook.waiting x
              where x.ctid = any (array(select y.ctid from tallybook.waiting y where y.ctid = any (v_tids)
                                          and y.lane_id = p_lane_id and y.fair_key is not null and y.run_at > p_at
                                          for update skip locked)) returning x.* loop
      released := released + 1;
      perform tallybook._place_waiting(w, p_at);
    end loop;
  end if;
  -- By their places: what was changed since lies elsewhere, and waits for a later call.
  with gone as materialized (
    delete from tallybook.waiting x
     where x.ctid = any (array(select y.ctid from tallybook.waiting y
                                where y.ctid = any (v_tids) and y.lane_id = p_lane_id and y.fair_key is not null
                                  and (y.run_at > p_at) is not true for update skip locked))
    returning x.*
  )
  insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, retention, failures, crashes, max_attempts,
                               task, args, headers, unique_key, run_at, errors, expires_at, options)
  -- The numbers are drawn in the order of the rounds.
  select nextval('tallybook.job_id'), g.job_id, g.enqueued_at, p_lane_id, g.attempt, p_retention, g.failures, g.crashes,
         g.max_attempts, g.task, g.args, g.headers, g.unique_key, g.run_at, g.errors, g.expires_at, g.options
    from (select * from gone x
           order by row_number() over (partition by x.fair_key order by x.fair_seq), x.fair_key <= t.fair_key,
                    x.fair_key) g;
  get diagnostics v_moved = row_count;
  released := released + v_moved;
  -- The newest row is valid: older ones are never read, even if vacuum is held back.
  insert into tallybook.fair_turn (lane_id, number, fair_key)
  values (p_lane_id, nextval('tallybook.job_id'), v_last);
  delete from tallybook.fair_turn x
   where (x.lane_id, x.number) in (select o.lane_id, o.number from tallybook.fair_turn o
                                    where o.lane_id = p_lane_id and o.number = t.number for update skip locked);
  perform tallybook._wake(p_queue);
end $$;
