-- rate_limit_set(name, calls, per, burst): allow at most this many calls in any window of length per, across all
-- workers.
--
-- NAME applies to the key NAME, and to each key NAME:... separately (a provider, a customer) unless that has a rule of
-- its own. queue:NAME applies to all jobs of a queue, task:NAME to all jobs of a task.
--   burst    how many calls may start at once; 1: each call starts one gap (per divided by calls) after the previous
--            one
--   in_code  the app whose code declares the rule; a rule of this name that a user has set takes precedence and is not
--            changed
-- Returns created, changed or unchanged. With a faster rule, waiting jobs get new turns at once, in the same order;
-- with a slower one, they keep their turns and are checked again at that time. If the rule changes, the rows of its
-- keys and of their waiting jobs are locked until the end of the transaction: commit at once. A job that another
-- transaction has locked keeps its turn.
-- Errors: TB005. Writes limit_rule; if the rule changes, rate_state, scheduled.
-- rights: operator
create or replace function tallybook.rate_limit_set(name text, calls int, per interval, burst int default 1,
  in_code text default null, at timestamptz default clock_timestamp())
returns text language sql as $$ select tallybook._limit_set('rate', name, calls, per, burst, null, in_code, at) $$;

-- _rate_changed(name, at): move the keys of this rule to where their last calls and the new rule put them, if that is
-- sooner. The jobs that wait for their turn come sooner, too. Writes rate_state, scheduled.
-- profile: hot
create or replace function tallybook._rate_changed(p_name text, p_at timestamptz) returns void language plpgsql as $$
declare k record; v_next timestamptz;
begin
  for k in select s.name, s.next_at, s.pushed_to, r.per / (r.most - r.burst + 1) as gap, r.name is not null as held
             from (select s.name, s.next_at, s.pushed_to from tallybook.rate_state s
                    where s.name in (select n.name from tallybook.rate_state n where n.name = p_name
                                     or split_part(n.name, ':', 1) = p_name)
                    order by s.name for update) s
             left join lateral tallybook._limit_of('rate', s.name) r on true loop
    v_next := least(k.next_at, greatest(case when k.held then k.pushed_to end,
      (select max(c.called_at) from tallybook.rate_call c where c.name = k.name) + coalesce(k.gap, interval '0'),
      '-infinity'));
    update tallybook.rate_state s
       set next_at = v_next, front_at = '-infinity', promised_at = '-infinity', paced_to = '-infinity',
           pushed_to = case when k.held then s.pushed_to end
     where s.name = k.name;
    update tallybook.scheduled s set run_at = w.turn
      from (select w.job_id, least(w.run_at, greatest(v_next,
                                                      p_at) + (row_number() over (order by w.run_at, w.job_id) - 1)
                                             * coalesce(k.gap, interval '0') - interval '120 ms') as turn
              from (select x.job_id, x.run_at from tallybook.scheduled x
                     where x.options ? 'turn' and x.options ->> 'turn' = k.name for update skip locked) w) w
     where s.job_id = w.job_id and s.run_at > w.turn;
  end loop;
  perform tallybook._wake(' promote');
end $$;
