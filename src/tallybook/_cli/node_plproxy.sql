-- Tallybook's functions for a PL/Proxy database, printed by `tallybook node plproxy`. Run it there with psql; it can be
-- run again.
--
-- PL/Proxy commits each call on its node at once: a rollback of the proxy's transaction does not take a job back, and a
-- call for many keys is one transaction for each node. An order and its job go in together when one function of yours
-- on the node writes both: see "PL/Proxy" in https://github.com/tallybook/tallybook/blob/main/docs/nodes.md.
begin;
create extension if not exists plproxy;
create schema if not exists tallybook_proxy;

-- A key lies in the partition hashtext(key) & @mask@, and each partition on a node:
@map@
-- Passwords are not printed: use the password file of the proxy's server. Whoever calls the functions needs
-- `grant usage on schema tallybook_proxy` and `grant usage on foreign server @cluster@`.
create server if not exists @cluster@ foreign data wrapper plproxy options (@empty@);
do $$ declare v_there int; begin
  select count(*) into v_there from pg_foreign_server s, unnest(s.srvoptions) o
   where s.srvname = @name@ and o ~ '^p(artition_)?[0-9]+=';
  if v_there <> @count@ then
    raise exception 'cluster @cluster@ has % partitions, and these functions are for @count@', v_there
      using hint = format('Print them with --partitions %s. Another number moves every key.', v_there);
  end if;
end $$;
create user mapping if not exists for public server @cluster@;
alter server @cluster@ options (
  @partitions@);

-- _partition_of(job_id): a partition on the node that the id names.
create or replace function tallybook_proxy._partition_of(job_id bigint) returns int language plpgsql immutable as $$
begin
  case job_id >> 43
    @cases@
    else raise exception 'no node of this cluster has job %', job_id using errcode = 'TB002',
      hint = format('Its id names node %s. After a node was added, print these functions again.', job_id >> 43);
  end case;
end $$;

-- enqueue(key, queue, task, args, ...): put one job in on the node of this key. Returns its id.
-- PL/Proxy passes times as text, which a node could read otherwise than in ISO 8601.
create or replace function tallybook_proxy.enqueue(key text, queue text, task text, args jsonb default '{}',
  run_at timestamptz default null, priority int default 2, unique_key text default null, max_attempts int default null,
  headers jsonb default null, on_conflict text default 'skip', unique_while text default 'running',
  order_key text default null, expires_at timestamptz default null, options jsonb default null)
returns bigint language plproxy set datestyle = 'ISO' as $$
  cluster @name@; run on hashtext(key);
  select tallybook.enqueue(queue, task, args, run_at, priority, unique_key, max_attempts, headers, on_conflict,
                           unique_while, order_key, expires_at, options);
$$;

-- enqueue_many(keys, queues, tasks, args): put many jobs in, each on the node of its key, in one transaction for each
-- node. One row a job, in no order. Arrays of one length, args as JSON text.
create or replace function tallybook_proxy.enqueue_many(keys text[], queues text[], tasks text[], args text[])
returns table (key text, job_id bigint, created boolean) language plproxy as $$
  cluster @name@; split all; run on hashtext(keys);
  select x.key, x.job_id, x.created
    from tallybook.enqueue_many(queues, tasks, args) m, unnest(keys, m.job_ids, m.created) x(key, job_id, created);
$$;

-- state(job_id): the state of one job, asked of the node that the id names; null: there is no such job.
create or replace function tallybook_proxy.state(job_id bigint) returns text language plproxy strict as $$
  cluster @name@; run on tallybook_proxy._partition_of(job_id);
  select tallybook.state(job_id);
$$;

-- job(job_id): all that the view tallybook.job shows of one job; null: there is no such job.
create or replace function tallybook_proxy.job(job_id bigint) returns jsonb language plproxy strict as $$
  cluster @name@; run on tallybook_proxy._partition_of(job_id);
  select (select to_jsonb(j) from tallybook.job j where j.id = job_id);
$$;

-- counts(): how many jobs are in which state, per node, queue and task. An error when a node does not answer.
create or replace function tallybook_proxy.counts()
returns table (node int, queue text, task text, scheduled bigint, retrying bigint, waiting bigint, available bigint,
               running bigint, dead bigint, completed bigint) language plproxy as $$
  cluster @name@; run on all;
  select i.node, c.queue, c.task, c.scheduled, c.retrying, c.waiting, c.available, c.running, c.dead, c.completed
    from tallybook.installed i, tallybook.counts() c;
$$;

-- dead_letters(max_jobs): the newest dead letters of each node, so many of each. An error when a node does not answer.
create or replace function tallybook_proxy.dead_letters(max_jobs int default 50)
returns table (node int, job_id bigint, died_at timestamptz, queue text, task text, reason text, failures int,
               last_error jsonb) language plproxy set datestyle = 'ISO' as $$
  cluster @name@; run on all;
  select i.node, d.job_id, d.died_at, d.queue_name as queue, d.task_name as task, d.why as reason, d.failures,
         d.last_error
    from set_config('datestyle', 'ISO', true), tallybook.installed i,
         tallybook.dead_letters(null, null, null, null, null, null, null, max_jobs) d;
$$;
commit;
