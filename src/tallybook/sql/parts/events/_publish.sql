-- _publish(what, states, queues, tasks, ids): publish transitions of jobs on the channel tallybook_jobs at the commit.
--
-- One JSON object per message: queue, task, state, ids (at most 300 jobs, because a message has at most 8000 bytes).
-- The triggers below call it; they exist only while a queue has notify on, so nothing is paid otherwise. "set
-- tallybook.notify = off" switches it off, as for _wake.
-- profile: nojit
create or replace function tallybook._publish(p_queues text[], p_tasks text[], p_states text[],
  p_ids bigint[]) returns void language sql as $$
  select pg_notify('tallybook_jobs', json_build_object('queue', m.queue, 'task', m.task, 'state', m.state, 'ids',
                                                       m.ids)::text)
    from (select n.queue, n.task, n.state, array_agg(n.id order by n.id) as ids
            from (select j.*, (row_number() over (partition by j.queue, j.task, j.state
                                                  order by j.id) - 1) / 300 as part
                    from unnest(p_queues, p_tasks, p_states, p_ids) j(queue, task, state, id)) n
           group by n.queue, n.task, n.state, n.part order by min(n.id)) m
   where coalesce(current_setting('tallybook.notify', true), 'on') <> 'off'
$$;

-- _publish_rows(): trigger for new rows. In line: available. In scheduled: scheduled, or retrying if it has failed. In
-- dead: dead. Claims: started. Outcomes: completed, cancelled; a failure is published as its result: retrying,
-- available or dead.
-- profile: lookup
create or replace function tallybook._publish_rows() returns trigger language plpgsql as $$
begin
  if tg_table_name = 'claim' then
    perform tallybook._publish(array_agg(l.queue), array_agg(e.task), array_agg('started'::text), array_agg(e.job_id))
      from come c join tallybook.lane l on l.lane_id = c.lane_id join tallybook.queue q on q.name = l.queue
           and q.notify, lateral (
        -- its interval (see claimed_jobs), or the one entry; not in a case: the index begins and ends there
        select coalesce(c.one_xid, c.from_xid), case when c.one_xid is null then c.from_seq else c.one_seq - 1 end,
               coalesce(c.one_xid, c.pos_xid), coalesce(c.one_seq, c.pos_seq)) i(from_xid, from_seq, to_xid, to_seq),
           lateral (
        select x.job_id, x.task from tallybook.entry x where x.lane_id = c.lane_id and x.retention = c.retention
           and x.xid >= i.from_xid and (x.xid, x.seq) > (i.from_xid, i.from_seq)
           and x.xid <= i.to_xid and (x.xid, x.seq) <= (i.to_xid, i.to_seq)
           and (c.one_xid is not null or x.seq <> all (c.skipped)
                and case when c.closed <> '{}' then x.xid = any (c.closed) else x.xid <> all (c.holes) end)
         order by x.xid, x.seq limit c.jobs) e
     where c.lease is not null having count(*) > 0;
  elsif tg_table_name = 'outcome' then
    perform tallybook._publish(array_agg(l.queue), array_agg(e.task), array_agg(o.state::text), array_agg(e.job_id))
      from come o join tallybook.queue q on q.notify join tallybook.lane l on l.queue = q.name
           and l.retention = o.retention, lateral (
        select x.job_id, x.task from tallybook.entry x
         where x.lane_id = l.lane_id and x.retention = o.retention and x.xid = o.entry_xid and x.seq = o.entry_seq
         limit 1) e
     where o.state in ('completed', 'cancelled') having count(*) > 0;
  else
    -- A job that enters its line together with its end (see _cancel_aside) was not available.
    perform tallybook._publish(array_agg(l.queue), array_agg(r.task),
                               array_agg(case when tg_table_name = 'entry' then 'available'
                                              when tg_table_name = 'dead' then 'dead'
                                              when r.failures > 0 then 'retrying' else 'scheduled' end),
                               array_agg(r.job_id))
      from come r join tallybook.lane l on l.lane_id = r.lane_id join tallybook.queue q on q.name = l.queue and q.notify
      left join tallybook.tombstone t on tg_table_name = 'entry' and t.job_id = r.job_id and t.attempt = r.attempt
           and t.taken
     where t.job_id is null having count(*) > 0;
  end if;
  return null;
end $$;

-- _publishing(): create the triggers if a queue has notify on, else drop them. Creating one waits for the
-- transactions that have written to its table, and all others would wait behind it. It is tried for 50 ms per table and
-- then ends with an error. Dropping is postponed instead:
-- the triggers find no queue, and a later change of a queue drops them. One change at a time, or one could rely on
-- triggers that another is dropping.
create or replace function tallybook._publishing() returns void
language plpgsql
set lock_timeout = '50ms'  -- see above
as $$
declare v_on boolean;
begin
  perform pg_advisory_xact_lock(1413565449, hashtext('notify: one at a time'));
  v_on := exists (select from tallybook.queue q where q.notify);
  if v_on = exists (select from pg_trigger t where t.tgrelid = 'tallybook.entry'::regclass and t.tgname = 'publish')
     then return; end if;
  if v_on then
    create trigger publish after insert on tallybook.claim referencing new table as come
      for each statement execute function tallybook._publish_rows();
    create trigger publish after insert on tallybook.dead referencing new table as come
      for each statement execute function tallybook._publish_rows();
    create trigger publish after insert on tallybook.entry referencing new table as come
      for each statement execute function tallybook._publish_rows();
    create trigger publish after insert on tallybook.outcome referencing new table as come
      for each statement execute function tallybook._publish_rows();
    create trigger publish after insert on tallybook.scheduled referencing new table as come
      for each statement execute function tallybook._publish_rows();
  else
    drop trigger publish on tallybook.claim;
    drop trigger publish on tallybook.dead;
    drop trigger publish on tallybook.entry;
    drop trigger publish on tallybook.outcome;
    drop trigger publish on tallybook.scheduled;
  end if;
exception when lock_not_available then
  perform tallybook._refuse(v_on, 'notify cannot be switched on now', 'It needs a moment without open transactions '
            'that have enqueued or ended jobs: try again, or end the long ones.', '55P03');
end $$;
