-- subjects(task, queue, states, prefix, after, max_subjects, max_looked): list subjects in pages, as in the view
-- subject.
--
--   states  planned, pending, active, completed, killed, dead; null: all
--   prefix  only names that start with this
--   after   the cursor of the last row of the previous page
--   max_subjects  page size, 1 to 1000
--   max_looked    how many rows to skip at most, 1000 to 1,000,000
-- If states has only completed, killed or dead, the subjects that ended last come first, with state and error.
-- Otherwise the order is by task and name. If there may be more, the last row has no subject: pass its cursor for the
-- next page. Without such a row the list is complete.
-- Errors: TB005. Reads subject_job, and for matching ones what the view reads, by indexes only.
-- profile: nested
-- rights: operator
create or replace function tallybook.subjects(task text default null, queue text default null,
  states text[] default null, prefix text default null, after text default null, max_subjects int default 50,
  max_looked int default 50000)
returns table (task_name text, subject text, job_id bigint, queue_name text, state text, priority int, args jsonb,
  iterations int, failures int, attempts int, next_run_at timestamptz, last_at timestamptz, last_error text,
  error jsonb, made_at timestamptz, ended_at timestamptz, scope text, cursor text) language plpgsql stable as $$
declare
  v_stopped boolean := coalesce(states <@ '{completed,killed,dead}', false);
  v_at jsonb; v_n int := 0; v_left int := max_looked; v_piece int := 256; v_rows int; v_when timestamptz := 'infinity';
  v_task text := ''; v_name text := ''; v_scope text := ''; k record;
begin
  perform tallybook._refuse(not states <@ '{planned,pending,active,completed,killed,dead}' or states = '{}',
    format('unknown states %s', states), 'Use planned, pending, active, completed, killed, dead.');
  perform tallybook._refuse(
    coalesce(max_subjects not between 1 and 1000 or max_looked not between 1000 and 1000000, true),
    'max_subjects or max_looked is out of range', 'max_subjects is from 1 to 1000, max_looked from 1000 to 1000000.');
  if after is not null then
    begin
      v_at := after::jsonb;
      v_task := v_at ->> 0; v_name := v_at ->> 1; v_scope := v_at ->> 2; v_when := v_at ->> 3;
    exception when others then
      v_at := null;
    end;
    perform tallybook._refuse(num_nulls(v_task, v_name, v_scope) > 0 or (v_when is not null) <> v_stopped,
      format('%s is not a cursor of this list', to_json(left(after, 100))),
      'Pass the cursor of the previous page''s last row, with the same filters.');
  elsif not v_stopped then
    v_task := coalesce(subjects.task, '');
  end if;
  loop
    v_rows := 0;
    for k in
      (select j.task, j.subject, j.scope, j.ended_at, j.ended_as, j.queue from tallybook.subject_job j
        where v_stopped and j.ended_at is not null
          and (j.ended_at, j.task, j.subject, j.scope) < (v_when, v_task, v_name, v_scope)
        order by j.ended_at desc, j.task desc, j.subject desc, j.scope desc limit v_piece)
      union all
      (select j.task, j.subject, j.scope, null, j.ended_as, null from tallybook.subject_job j
        where not v_stopped and (j.task, j.subject, j.scope) > (v_task, v_name, v_scope)
          and (subjects.task is null or j.task = subjects.task)
        order by j.task, j.subject, j.scope limit v_piece)
    loop
      v_rows := v_rows + 1; v_left := v_left - 1; v_when := k.ended_at; v_task := k.task; v_name := k.subject;
      v_scope := k.scope;
      continue when task <> k.task or queue <> k.queue or not starts_with(k.subject, prefix)
        or k.ended_as <> all (states);
      -- One look-up of the present state of a job costs as much as skipping a hundred.
      v_left := v_left - case when v_stopped then 0 else 100 end;
      return query select s.*, json_build_array(s.task, s.subject, s.scope, v_when)::text
                     from tallybook.subject s
                    where s.task = k.task and s.subject = k.subject and s.scope = k.scope
                      and (v_stopped or (subjects.queue is null or s.queue = subjects.queue)
                                        and (states is null or s.state = any (states)));
      v_n := v_n + (v_stopped or found)::int;
      exit when v_n = max_subjects or v_left <= 0;
    end loop;
    if v_n = max_subjects or v_left <= 0 then
      cursor := json_build_array(v_task, v_name, v_scope, v_when);
      return next;
      return;
    end if;
    exit when v_rows < v_piece;
  end loop;
end $$;
