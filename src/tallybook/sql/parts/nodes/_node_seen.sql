-- _node_seen(number, system_identifier, job_id, at): keep what a check has seen on a node. Writes node.
-- rights: operator
create or replace function tallybook._node_seen(p_number int, p_system_identifier bigint, p_job_id bigint,
  p_at timestamptz default clock_timestamp()) returns void
language sql as $$
  update tallybook.node n
     set system_identifier = coalesce(n.system_identifier, p_system_identifier), seen_at = p_at,
         seen_job_id = greatest(n.seen_job_id, p_job_id)
   where n.number = p_number
$$;
