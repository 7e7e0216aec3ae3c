-- _whereabouts(job_id): the row in which a job is now, whichever table it lies in; place is null where there is none.
--
--   place  scheduled, waiting, dead, or entry: its newest attempt
--   since  since when it waits, or is dead; state, ended_at, result: of an entry that has an outcome; reason: of a dead
--          letter
-- By one snapshot, the caller's statement's, so that a job on its way from one table to the other is not missed.
-- Reads scheduled, waiting, dead, entry, outcome, lane.
create or replace function tallybook._whereabouts(p_job_id bigint, out place text, out lane_id int, out queue text,
  out priority int, out part text, out retention "char", out retired boolean, out xid xid8, out seq bigint,
  out attempt int, out failures int, out crashes int, out task text, out args jsonb, out unique_key text,
  out order_key text, out fair_key text, out fair_seq bigint, out expires_at timestamptz, out options jsonb,
  out run_at timestamptz, out enqueued_at timestamptz, out since timestamptz, out state text, out ended_at timestamptz,
  out error jsonb, out reason text)
language plpgsql stable
-- profile: nested
as $$
declare
  s tallybook.scheduled; w tallybook.waiting; d tallybook.dead; e tallybook.entry;
begin
  select x.* into s from tallybook.scheduled x where x.job_id = p_job_id;
  if found then
    place := 'scheduled'; lane_id := s.lane_id; attempt := s.attempt; failures := s.failures; crashes := s.crashes;
    task := s.task; args := s.args;
    unique_key := s.unique_key; order_key := s.order_key; expires_at := s.expires_at; options := s.options;
    run_at := s.run_at;
    enqueued_at := s.enqueued_at; error := s.errors -> -1;
  else
    select x.* into w from tallybook.waiting x where x.job_id = p_job_id;
    if found then
      place := 'waiting'; lane_id := w.lane_id; attempt := w.attempt; failures := w.failures; crashes := w.crashes;
      task := w.task; args := w.args;
      unique_key := w.unique_key; order_key := w.order_key; fair_key := w.fair_key; fair_seq := w.fair_seq;
      expires_at := w.expires_at;
      options := w.options; run_at := w.run_at; enqueued_at := w.enqueued_at; since := w.waits_since;
      error := w.errors -> -1;
    else
      select x.* into d from tallybook.dead x where x.job_id = p_job_id;
      if found then
        place := 'dead'; lane_id := d.lane_id; attempt := d.attempt; failures := d.failures; crashes := d.crashes;
        task := d.task; args := d.args;
        unique_key := d.unique_key; order_key := d.order_key; expires_at := d.expires_at; options := d.options;
        enqueued_at := d.enqueued_at;
        since := d.died_at; reason := d.reason; error := d.errors -> -1;
      else
        e := tallybook._newest(p_job_id);
        if e.job_id is null then return; end if;
        place := 'entry'; lane_id := e.lane_id; retention := e.retention; xid := e.xid; seq := e.seq;
        attempt := e.attempt; failures := e.failures;
        crashes := e.crashes; task := e.task; args := e.args; unique_key := e.unique_key; order_key := e.order_key;
        expires_at := e.expires_at;
        options := e.options; run_at := e.run_at; enqueued_at := e.enqueued_at; error := e.errors -> -1;
        select o.state::text, o.ended_at, o.error into state, ended_at, error from tallybook.outcome o
         where o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq limit 1;
        error := coalesce(error, e.errors -> -1);
      end if;
    end if;
  end if;
  select l.queue, l.priority, l.part, l.retired_at is not null, coalesce(_whereabouts.retention, l.retention)
         into queue, priority, part, retired, retention
    from tallybook.lane l where l.lane_id = _whereabouts.lane_id;
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
