-- _release(order_key, ended, at): put the next job of an order key in line, if it waits and no job has the turn.
--
-- Every verb that ends a job with an order key for good calls it after the end (ended); rescue and promote call it for
-- what was missed: an end at another isolation level, a locked row or key. The lock of the key is kept until the
-- commit: setting a job aside takes it, too, so no job is set aside after the look. The wait for it is bounded: another
-- open transaction that has moved the same line (for example by completing a job of it) must not block a worker that
-- ends its jobs. One transaction moves at most 256 lines, because it keeps their locks; rescue moves the others. Locks:
-- the key (class 1413565448). Reads order_turn, order_line; writes entry, scheduled; deletes from waiting, order_line.
-- profile: nested
create or replace function tallybook._release(p_key text, p_ended bigint default null,
  p_at timestamptz default clock_timestamp()) returns void language plpgsql as $$
declare v_holder bigint; l record; w tallybook.waiting; v_tries int := 1;
begin
  if not tallybook._locks_left('tallybook.keys_locked', 256) then return; end if;
  if p_ended is not null then  -- the end that frees the line tries for 0.2 s, others for a moment
    v_tries := case when tallybook._has_turn(p_key, p_ended) then 40 else 3 end;
  end if;
  while not pg_try_advisory_xact_lock(1413565448, hashtext(p_key)) loop
    v_tries := v_tries - 1;
    if v_tries = 0 then return; end if;
    perform pg_sleep(0.005);
  end loop;
  select t.job_id into v_holder from tallybook.order_turn t where t.key = p_key order by t.generation desc limit 1;
  if found and tallybook._job_open(v_holder) then return; end if;
  for l in select n.seq, n.job_id from tallybook.order_line n where n.key = p_key order by n.seq loop
    if not tallybook._job_open(l.job_id) then  -- cancelled before its turn
      delete from tallybook.order_line n where n.key = p_key and n.seq = l.seq;
      continue;
    end if;
    delete from tallybook.waiting x
     where x.job_id = (select y.job_id from tallybook.waiting y where y.job_id = l.job_id for update skip locked)
    returning x.* into w;
    if not found then return; end if;  -- the first of the line needs no move if it does not wait
    if w.run_at > p_at then  -- pushed to a later time while it waited: it lines up again then
      delete from tallybook.order_line n where n.job_id = w.job_id;
    end if;
    if tallybook._place_waiting(w, p_at) then return; end if;
  end loop;
  -- The line is empty: a job that still waits has lost its place.
  delete from tallybook.waiting x
   where x.job_id = (select y.job_id from tallybook.waiting y
                      where y.order_key = p_key and tallybook._job_open(y.job_id) order by y.job_id
                            limit 1 for update skip locked)
  returning x.* into w;
  if found then perform tallybook._place_waiting(w, p_at); end if;
end $$;

-- _release_missed(at): release jobs that no end has released. Reads up to 1000 of the keys that jobs wait for, from
-- a random one on, and locks only keys whose turn no job has, 100 of them. Waiting jobs that were
-- cancelled go to their lanes, where a claim ends them.
-- profile: nested
create or replace function tallybook._release_missed(p_at timestamptz default clock_timestamp()) returns void
language plpgsql as $$
declare v_key text; v_holder bigint; v_released int := 0; w tallybook.waiting;
begin
  for w in delete from tallybook.waiting x where x.job_id = any (array(
             select y.job_id from tallybook.tombstone t join tallybook.waiting y on y.job_id = t.job_id
              where t.cancelled and (t.attempt = y.attempt or t.attempt < y.attempt and not t.once)
                and not exists (select from tallybook.parent p where p.child_id = y.job_id)  -- see parents_resolve
              limit 1000 for update of y skip locked)) returning x.* loop
    w.run_at := least(w.run_at, p_at);
    perform tallybook._place_waiting(w, p_at);
  end loop;
  -- By order_line, which has all jobs that wait for their key and few others: waiting may have a million jobs that wait
  -- for something else.
  for v_key in
    with recursive k(key) as (
      select coalesce(
        (select y.order_key from tallybook.waiting y
          where y.order_key >= (select n.key from tallybook.order_line n
                                 where n.job_id >= (select b.low + floor(random() * (b.high - b.low + 1))::bigint
                                                      from (select min(x.job_id) as low, max(x.job_id) as high
                                                            from tallybook.order_line x) b)
                                 order by n.job_id limit 1)
          order by y.order_key limit 1),
        (select y.order_key from tallybook.waiting y where y.order_key is not null order by y.order_key limit 1))
      union  -- once round: union ends at the first repetition
      select coalesce(
        (select y.order_key from tallybook.waiting y where y.order_key > k.key order by y.order_key limit 1),
        (select y.order_key from tallybook.waiting y where y.order_key is not null order by y.order_key limit 1))
        from k)
    select k.key from k where k.key is not null limit 1000 loop
    exit when v_released = 100;
    select t.job_id into v_holder from tallybook.order_turn t where t.key = v_key order by t.generation desc limit 1;
    if v_holder is null or not tallybook._job_open(v_holder) then
      perform tallybook._release(v_key, null, p_at);
      v_released := v_released + 1;
    end if;
  end loop;
end $$;

-- _line_up(order_key, job_id, seq): give a job that enters its line its place: that of its entry, or the last one. Then
-- its former place is deleted, unless another session is deleting it.
create or replace function tallybook._line_up(p_key text, p_job_id bigint, p_seq bigint default null) returns void
language sql as $$
  delete from tallybook.order_line n
   where (n.key, n.seq) in (select x.key, x.seq from tallybook.order_line x
                             where p_seq is null and x.job_id = p_job_id for update skip locked);
  insert into tallybook.order_line (key, seq, job_id)
    values (p_key, coalesce(p_seq, nextval('tallybook.job_id')), p_job_id)
$$;

-- _line_up_many(order_keys, job_ids, seqs, new): the same for many, at the places of their entries. Not new: a job that
-- was there before keeps its turn or its place, if it has one.
-- profile: nested
create or replace function tallybook._line_up_many(p_keys text[], p_job_ids bigint[], p_seqs bigint[],
  p_new boolean default false) returns void language sql as $$
  insert into tallybook.order_line (key, seq, job_id)
  select u.key, u.seq, u.job_id from unnest(p_keys, p_job_ids, p_seqs) u(key, job_id, seq)
   where u.key is not null
     and (p_new or not tallybook._has_turn(u.key, u.job_id)
                   and not exists (select from tallybook.order_line n where n.job_id = u.job_id))
$$;

-- _has_turn(order_key, job_id): whether it is this job's turn.
-- profile: lookup
create or replace function tallybook._has_turn(p_key text, p_job_id bigint) returns boolean
language plpgsql stable as $$
begin
  return coalesce(p_job_id = (select t.job_id from tallybook.order_turn t where t.key = p_key
                              order by t.generation desc limit 1), false);
end $$;
