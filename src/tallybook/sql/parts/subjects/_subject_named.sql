-- _subject_named(task, subject, queue): the row of a subject, nulls if there is none. queue: the name as a push into
-- that queue means it; null: of whichever queue has it. Waits for nothing.
-- Errors: TB005 several queues have a subject of this name. Reads subject_job, queue.
-- profile: nested
-- rights: operator
create or replace function tallybook._subject_named(p_task text, p_subject text, p_queue text)
returns tallybook.subject_job language plpgsql stable as $$
declare
  v tallybook.subject_job[] := array(
    select j from tallybook.subject_job j
     where j.task = p_task and j.subject = p_subject
       and (p_queue is null or j.scope = tallybook._subject_scope(p_queue))
     order by j.scope limit 6);
begin
  perform tallybook._refuse(cardinality(v) > 1,
    format('several queues have a subject %s of the task %s: %s', to_json(p_subject), to_json(p_task),
           (select string_agg(case when u.ordinality = 6 then '...' when u.scope = '' then 'those that share names'
                                   else to_json(u.scope)::text end, ', ' order by u.ordinality)
              from unnest(v) with ordinality u)),
    'Name the queue.');
  return v[1];
end $$;

-- _subject_scope(queue): whose names the subjects of a queue have: its own, or '', those that the queues share.
create or replace function tallybook._subject_scope(p_queue text) returns text
language sql stable as $$
  select coalesce((select q.name from tallybook.queue q where q.name = p_queue and q.own_names), '')
$$;
