-- summary(task, args): one line that says what a job is about, by its task's template; null: the task has none.
-- {name} stands for that arg; an arg that is not there stays as it is written.
-- rights: operator
create or replace function tallybook.summary(task text, args jsonb) returns text
language sql stable as $$
  -- Piece by piece, so that an arg with braces in it is not filled in again.
  select left(string_agg(case when m.r[1] ~ '^\{\w+\}$'
                         then coalesce(summary.args ->> trim(both '{}' from m.r[1]), m.r[1]) else m.r[1] end,
                         '' order by m.n), 300)
    from regexp_matches((tallybook._task_of(summary.task)).summary, '(\{\w+\}|[^{]+|\{)', 'g')
           with ordinality m(r, n)
$$;
