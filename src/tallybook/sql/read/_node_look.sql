-- _node_look(at): the data that a check of the nodes reads on each: its identity, last job id, open jobs and workers.
-- rights: operator
create or replace function tallybook._node_look(p_at timestamptz default clock_timestamp()) returns jsonb
language sql stable as $$
  select jsonb_build_object('number', i.node, 'system_identifier', c.system_identifier,
    'known_identifier', i.system_identifier, 'database', (select d.oid from pg_database d
                                                           where d.datname = current_database()),
    'last_job_id', (select s.last_value from tallybook.job_id s where s.is_called),
    'open', (select coalesce(sum(n.scheduled + n.retrying + n.waiting + n.available + n.running), 0)
               from tallybook.counts() n),
    'workers', (select count(*) from tallybook.worker w where w.ended_at is null and w.seen_at >= p_at - w.lease),
    'unserved', (select coalesce(jsonb_agg(f.finding), '[]') from tallybook._doctor_queues(p_at) f
                  where f.name in ('unserved_queues', 'unserved_tasks') and f.level <> 'ok'))
    from tallybook.installation i, pg_control_system() c
$$;
