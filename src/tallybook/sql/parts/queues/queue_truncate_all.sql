-- queue_truncate_all(states, running, by, max_jobs, mark, at): cancel the jobs of all queues in batches, in the order
-- of their names. Each call is a queue_truncate of one queue, with the same arguments and results.
--
--   mark   the mark that the previous call returned, until remain is false; null: begin. Commit after each call
--   queue  the queue of this call; null: none is left
--   busy   as in queue_truncate, for this queue or an earlier one
-- A queue created meanwhile is truncated if its name comes later. Errors, reads and writes: see queue_truncate.
-- rights: operator
create or replace function tallybook.queue_truncate_all(states text[] default null, running boolean default false,
  by text default session_user, max_jobs int default 10000, inout mark jsonb default null,
  at timestamptz default clock_timestamp(), out queue text, out cancelled int, out cancelling int, out busy boolean,
  out remain boolean)
language plpgsql as $$
declare v_busy boolean := coalesce((mark ->> 'busy')::boolean, false); v_mark jsonb;
begin
  perform tallybook._refuse(mark is not null and jsonb_typeof(mark -> 'queue') is distinct from 'string',
            format('%s is not a mark', mark), 'Pass the mark that the previous call returned, or null to begin.');
  select min(q.name) into queue from tallybook.queues q
   where mark is null or q.name > mark ->> 'queue' or q.name = mark ->> 'queue' and mark ? 'mark';
  cancelled := 0; cancelling := 0; busy := v_busy; remain := queue is not null;
  if not remain then return; end if;
  v_mark := case when queue = mark ->> 'queue' then mark -> 'mark' end;
  select t.cancelled, t.cancelling, t.busy or v_busy, case when t.remain then t.mark end
    into cancelled, cancelling, busy, v_mark
    from tallybook.queue_truncate(queue, states, running, by, max_jobs, v_mark, at) t;
  mark := jsonb_strip_nulls(jsonb_build_object('queue', queue, 'mark', v_mark, 'busy',
                                               case when v_mark is null then busy else v_busy end));
end $$;
