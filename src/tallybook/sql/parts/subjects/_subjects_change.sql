-- _subjects_change(queue, max_attempts, at, wanted, known): an upsert of planned jobs, in place; see _subjects_put,
-- whose settings it has.
--
-- Of kind p those that are still planned become d, with their reports and times; soon: one of them is due within 10 s.
-- Another trace alone is no change: each upsert of a traced program has one. A job that waits for its turn at a limit
-- keeps it, unless its time, its queue or its limits change.
create or replace function tallybook._subjects_change(p_queue text, p_max_attempts int, p_at timestamptz,
  p_wanted tallybook._wanted_subject[], inout known tallybook._found_subject[], out soon boolean)
language plpgsql as $$
declare c_trace constant text[] := '{traceparent,tracestate,baggage}';
begin
  with want as materialized (
    select u.* from unnest(p_wanted, known) with ordinality u where u.kind = 'p'
  ), old as materialized (
    select q.ordinality, s.was from (select w.job_id, w.ordinality from want w order by w.job_id) q, lateral (
      select x as was from tallybook.scheduled x where x.job_id = q.job_id limit 1 for update) s
  ), new as materialized (
    select c.*, ((c.was).args, (c.was).run_at, (c.was).lane_id, (c.was).options, (c.was).max_attempts,
                 coalesce((c.was).headers, '{}') - c_trace)
                is distinct from (c.args, c.run_at, c.lane_id, c.options, c.max_attempts,
                                  coalesce(c.headers, '{}') - c_trace) as changed
      from (select q.ordinality, o.was, q.args::jsonb as args, coalesce(q.run_at, (o.was).run_at) as run_at,
                   coalesce(q.headers::jsonb, (o.was).headers) as headers,
                   coalesce(p_max_attempts, (o.was).max_attempts)::smallint as max_attempts,
                   case when coalesce(q.run_at, (o.was).run_at) = (o.was).run_at and l.queue = p_queue
                             and n.options -> 'limits' is not distinct from (o.was).options -> 'limits'
                        then n.options else tallybook._turn_over(n.options) end as options,
                   case when l.queue = p_queue and l.priority = coalesce(q.priority, l.priority) then l.lane_id
                        when q.priority is not null then q.lane_id
                        else (select x.lane_id from tallybook._lane(p_queue, l.priority, '') x) end as lane_id
              from old o join want q on q.ordinality = o.ordinality, lateral (
                   select k.lane_id, k.queue, k.priority from tallybook.lane k
                    where k.lane_id = (o.was).lane_id limit 1) l, lateral (
                   select case when q.options is null then (o.was).options - 'version'  -- that of the args: the first
                               else q.options::jsonb || jsonb_build_object('subject', (o.was).options -> 'subject')
                                    || jsonb_strip_nulls(jsonb_build_object('turn', (o.was).options -> 'turn',
                                                                            'permits', (o.was).options -> 'permits'))
                               end as options) n) c
  ), done as (
    -- They are there, and locked: this finds each by its key. An update that is joined to them could read the whole
    -- of scheduled instead, for a planner that takes it for empty.
    insert into tallybook.scheduled as s (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes,
                                          max_attempts, task, args, headers, options)
    select (x.was).job_id, x.run_at, (x.was).enqueued_at, x.lane_id, (x.was).attempt, (x.was).failures,
           (x.was).crashes, x.max_attempts, (x.was).task, x.args, x.headers, x.options
      from new x where x.changed order by (x.was).job_id
    on conflict on constraint scheduled_pkey do update
      set args = excluded.args, run_at = excluded.run_at, lane_id = excluded.lane_id,
          max_attempts = excluded.max_attempts, options = excluded.options, headers = excluded.headers)
  select array_agg(row(case when x.ordinality is null then u.kind else 'd' end, u.job_id,
                       case when x.ordinality is null then u.report when x.changed then 'updated'
                            else 'unchanged' end,
                       coalesce((x.was).run_at, u.old_run_at), coalesce(x.run_at, u.new_run_at),
                       u.carry)::tallybook._found_subject order by u.ordinality),
         coalesce(bool_or(x.changed and x.run_at < p_at + interval '10 s'), false)
    into known, soon
    from unnest(known) with ordinality u left join new x on x.ordinality = u.ordinality;
end $$;
