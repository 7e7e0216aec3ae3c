-- _sweep(at): delete a batch of each small table that grows with history and that nothing else cleans. Locked rows are
-- left for later. Returns the number of deleted rows, and whether some batch was full.
--
-- Reads retention_class and all that jobs can be in; deletes from api_nonce, audit, dead, fire, rate_call, progress,
-- unique_key, order_turn, worker, error_kept; writes sweep.
-- profile: lookup
create or replace function tallybook._sweep(p_at timestamptz, out swept bigint, out more boolean) language plpgsql as $$
declare c_batch constant int := 1000; v_ids bigint[];
begin
  v_ids := array(select p.job_id from tallybook.progress p
                  where p.job_id > coalesce((tallybook._sweep_place('progress') #>> '{}')::bigint, -1)
                  order by p.job_id limit 500);
  with dead as (
    delete from tallybook.dead d where d.job_id = any (array(
      select x.job_id from tallybook.dead x where x.died_at < p_at - tallybook._keep('dead') order by x.died_at
             limit c_batch for update skip locked)) returning 1
  ), fire as (
    delete from tallybook.fire f where f.ctid = any (array(
      with recursive s as (
        (select x.schedule from tallybook.fire x order by x.schedule limit 1)
        union all
        select (select x.schedule from tallybook.fire x where x.schedule > s.schedule order by x.schedule limit 1)
          from s where s.schedule is not null)
      select o.ctid from s, lateral (
               select x.ctid from tallybook.fire x where x.schedule = s.schedule
                      and x.tick < p_at - tallybook._keep('fires')
                order by x.tick limit c_batch for update skip locked) o limit c_batch)) returning 1
  ), rate_call as (
    delete from tallybook.rate_call c where c.ctid = any (array(
      select o.ctid from tallybook.rate_state s
        left join lateral (select r.per from tallybook.limit_rule r
                            where r.kind = 'rate' and r.name in (s.name, split_part(s.name, ':', 1))
                            order by r.name = s.name desc limit 1) r on true,
             lateral (
               select x.ctid from tallybook.rate_call x where x.name = s.name
                      and x.called_at < p_at - greatest(tallybook._keep('default'), r.per)
                order by x.called_at limit c_batch for update skip locked) o limit c_batch)) returning 1
  ), worker as (  -- no claim is left that names them
    delete from tallybook.worker w where w.id = any (array(
      select x.id from tallybook.worker x
       where x.ended_at < p_at - (select max(r.keep) from tallybook.retention_class r) order by x.id
             limit c_batch for update skip locked)) returning 1
  ), audit as (
    -- Ids and times rise together, so the oldest are looked at alone; a row that another clock has dated later goes a
    -- little later.
    delete from tallybook.audit a where a.id = any (array(
      select x.id from tallybook.audit x
       where x.id <= (select max(o.id) from (select y.id from tallybook.audit y order by y.id limit c_batch) o)
         and x.at < p_at - tallybook._keep('audit') for update skip locked)) returning 1
  ), error as (
    delete from tallybook.error_kept k where k.ctid = any (array(
      select o.ctid
        from (select distinct l.queue from tallybook.lane l where exists (select from tallybook.error_kept)) n
        left join tallybook.queue q on q.name = n.queue, lateral (
          select x.ctid from tallybook.error_kept x
           where x.queue = n.queue and x.ended_at <= p_at - coalesce(q.error_retention, '0')
           order by x.ended_at limit c_batch for update skip locked) o limit c_batch)) returning 1
  ), nonce as (  -- what was signed 300 s ahead may come again 600 s after it was seen: two windows of nonce_take
    delete from tallybook.api_nonce n where n.ctid = any (array(
      select x.ctid from tallybook.api_nonce x where x.seen_at < p_at - interval '600 s' order by x.seen_at
             limit c_batch for update skip locked)) returning 1
  ), progress as (  -- and checkpoints, of jobs that have left
    delete from tallybook.progress p where p.job_id = any (array(
      select x.job_id from unnest(v_ids) i(id), lateral (
               select y.job_id from tallybook.progress y where y.job_id = i.id for update skip locked) x
       where not tallybook._job_known(i.id))) returning 1
  )
  select sum(g.n), bool_or(g.n = c_batch) into swept, more
    from (select count(*) as n from dead union all select count(*) from fire union all select count(*) from rate_call
          union all select count(*) from worker union all select count(*) from audit
          union all select count(*) from nonce union all select count(*) from error
          union all select count(*) from progress) g;
  perform tallybook._sweep_to('progress', to_jsonb(v_ids[500]));
  swept := swept + tallybook._sweep_keys() + tallybook._sweep_turns();
end $$;

-- _keep(name): the retention period of this class.
create or replace function tallybook._keep(p_name text) returns interval
language sql stable as $$ select r.keep from tallybook.retention_class r where r.name = p_name $$;

-- _job_known(job_id): whether there is anything left of a job but names.
create or replace function tallybook._job_known(p_job_id bigint) returns boolean
language plpgsql stable as $$
begin
  return exists (select from tallybook.entry e where e.job_id = p_job_id)
      or exists (select from tallybook._aside a where a.job_id = p_job_id);
end $$;

-- _sweep_place(kind), _sweep_to(kind, place): where the sweep of a table continues; null: at its beginning.
create or replace function tallybook._sweep_place(p_kind text) returns jsonb
language sql stable as $$ select s.place from tallybook.sweep s where s.kind = p_kind $$;

create or replace function tallybook._sweep_to(p_kind text, p_place jsonb) returns void
language sql as $$
  delete from tallybook.sweep s where s.kind = p_kind and p_place is null;
  insert into tallybook.sweep (kind, place) select p_kind, p_place where p_place is not null
  on conflict (kind) do update set place = excluded.place
$$;

-- _sweep_keys(): delete older generations of unique keys whose jobs are gone. The newest stays: producers read it.
--
-- Rows of a key are deleted from the oldest on, without a gap. A producer with an old snapshot takes an older
-- generation for the newest, and inserts the next one: an existing row stops it. If that is deleted, the one that it
-- saw is deleted, too, and it notices that when it locks it (see _claim_key).
create or replace function tallybook._sweep_keys() returns bigint
language plpgsql as $$
declare
  c_batch constant int := 500; v_place jsonb := tallybook._sweep_place('unique_key'); v_n bigint;
  v_keys tallybook.unique_key[];
begin
  v_keys := array(select x from tallybook.unique_key x
                   where v_place is null or (x.task, x.key, x.generation) > (v_place ->> 0, v_place ->> 1,
                                                                             (v_place ->> 2)::bigint)
                   order by x.task, x.key, x.generation limit c_batch);
  delete from tallybook.unique_key d using (
    select f.task, f.key, f.generation,
           bool_and(f.gone) over (partition by f.task, f.key order by f.generation) as free,
           min(f.generation) over (partition by f.task, f.key) as first
      from (select i.task, i.key, i.generation,
                   x.job_id is not null and not tallybook._job_known(x.job_id)
                   and exists (select from tallybook.unique_key n where n.task = i.task and n.key = i.key
                               and n.generation > i.generation) as gone
              from unnest(v_keys) i left join lateral (
                     select y.job_id from tallybook.unique_key y
                      where y.task = i.task and y.key = i.key and y.generation = i.generation for update skip locked) x
                            on true) f) g
   where g.free and d.task = g.task and d.key = g.key and d.generation = g.generation
     and not exists (select from tallybook.unique_key l where l.task = g.task and l.key = g.key
                     and l.generation < g.first);
  get diagnostics v_n = row_count;
  perform tallybook._sweep_to('unique_key', (
    select jsonb_build_array(u.task, u.key, u.generation) from unnest(v_keys[c_batch:]) u));
  return v_n;
end $$;

-- _sweep_turns(): delete older turns of order keys, and the newest if its job is gone. It only tries the lock of the
-- key. A session that takes a turn holds that lock and reads the turns after it has it.
create or replace function tallybook._sweep_turns() returns bigint
language plpgsql as $$
declare
  c_batch constant int := 100; v_key text := tallybook._sweep_place('order_turn') #>> '{}'; v_newest bigint;
  v_job bigint; v_n bigint; v_all bigint := 0;
begin
  for turn in 1..c_batch loop
    v_key := (select t.key from tallybook.order_turn t where v_key is null or t.key > v_key order by t.key limit 1);
    exit when v_key is null;
    continue when not pg_try_advisory_xact_lock(1413565448, hashtext(v_key));
    select t.generation, t.job_id into v_newest, v_job from tallybook.order_turn t where t.key = v_key
           order by t.generation desc limit 1;
    if v_job is not null and not tallybook._job_known(v_job) then v_newest := v_newest + 1; end if;
    delete from tallybook.order_turn t where t.ctid = any (array(
      select x.ctid from tallybook.order_turn x where x.key = v_key and x.generation < v_newest order by x.generation
             limit 1000 for update skip locked));
    get diagnostics v_n = row_count;
    v_all := v_all + v_n;
  end loop;
  perform tallybook._sweep_to('order_turn', to_jsonb(v_key));
  return v_all;
end $$;
