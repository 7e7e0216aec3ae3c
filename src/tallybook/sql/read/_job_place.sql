-- _job_place(job_id): the row in which a job is now, whichever table it lies in; null: there is none.
--
--   place  scheduled, waiting, dead, or entry: its newest attempt
--   since  since when it waits, is dead, or has ended; state: of an entry that has an outcome; reason: of a dead letter
-- By one snapshot, the caller's statement's, so that a job on its way from one table to the other is not missed.
-- Reads scheduled, waiting, dead, entry, outcome, lane.
create or replace function tallybook._job_place(p_job_id bigint)
returns table (place text, job_id bigint, lane_id int, queue text, priority int, part text, retired boolean,
  retention "char", xid xid8, seq bigint, attempt int, failures int, task text, args jsonb, unique_key text,
  order_key text, fair_key text, fair_seq bigint, expires_at timestamptz, options jsonb, run_at timestamptz,
  enqueued_at timestamptz, since timestamptz, state text, error jsonb, reason text)
language plpgsql stable
-- profile: nested
as $$
begin
  return query
  select 'scheduled', p_job_id, s.lane_id, l.queue, l.priority::int, l.part, l.retired_at is not null, l.retention,
         null::xid8, null::bigint, s.attempt, s.failures::int, s.task, s.args, s.unique_key, s.order_key, null::text,
         null::bigint, s.expires_at, s.options, s.run_at, s.enqueued_at, null::timestamptz, null::text, s.errors -> -1,
         null::text
    from tallybook.scheduled s join tallybook.lane l on l.lane_id = s.lane_id where s.job_id = p_job_id;
  if found then return; end if;
  return query
  select 'waiting', p_job_id, w.lane_id, l.queue, l.priority::int, l.part, l.retired_at is not null, l.retention,
         null::xid8, null::bigint, w.attempt, w.failures::int, w.task, w.args, w.unique_key, w.order_key, w.fair_key,
         w.fair_seq, w.expires_at, w.options, w.run_at, w.enqueued_at, w.waits_since, null::text, w.errors -> -1,
         null::text
    from tallybook.waiting w join tallybook.lane l on l.lane_id = w.lane_id where w.job_id = p_job_id;
  if found then return; end if;
  return query
  select 'dead', p_job_id, d.lane_id, l.queue, l.priority::int, l.part, l.retired_at is not null, l.retention,
         null::xid8, null::bigint, d.attempt, d.failures::int, d.task, d.args, d.unique_key, d.order_key, null::text,
         null::bigint, d.expires_at, d.options, null::timestamptz, d.enqueued_at, d.died_at, null::text,
         d.errors -> -1, d.reason
    from tallybook.dead d join tallybook.lane l on l.lane_id = d.lane_id where d.job_id = p_job_id;
  if found then return; end if;
  return query
  select 'entry', p_job_id, e.lane_id, l.queue, l.priority::int, l.part, l.retired_at is not null, e.retention, e.xid,
         e.seq, e.attempt, e.failures::int, e.task, e.args, e.unique_key, e.order_key, null::text, null::bigint,
         e.expires_at, e.options, e.run_at, e.enqueued_at, o.ended_at, o.state::text,
         coalesce(o.error, e.errors -> -1), null::text
    from tallybook._newest(p_job_id) e join tallybook.lane l on l.lane_id = e.lane_id
    left join lateral (select x.state, x.ended_at, x.error from tallybook.outcome x
                        where x.retention = e.retention and x.entry_xid = e.xid and x.entry_seq = e.seq
                        limit 1) o on true;
end $$;

-- _cancel_of(job_id, attempt): the cancel that holds for this attempt and is not carried out yet; nulls: there is none.
create or replace function tallybook._cancel_of(p_job_id bigint, p_attempt int, out created_at timestamptz,
  out reason text)
language plpgsql stable
-- profile: hot
as $$
begin
  select t.created_at, t.reason into created_at, reason from tallybook.tombstone t
   where t.job_id = p_job_id and t.cancelled and (t.attempt = p_attempt or t.attempt < p_attempt and not t.once)
   order by t.attempt desc limit 1;
end $$;
