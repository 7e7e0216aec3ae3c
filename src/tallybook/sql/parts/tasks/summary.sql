-- summary(task, args): return a line that describes a job, from its task's template; null: the task has no template.
-- {name} is replaced by that arg; a missing arg leaves it unchanged.
-- rights: operator
create or replace function tallybook.summary(task text, args jsonb) returns text
language plpgsql stable as $$
declare v_text text := (tallybook._task_of(summary.task)).summary;
begin
  if v_text is null then return null; end if;
  -- Piece by piece, so that braces in an arg are not replaced.
  return left((select string_agg(case when m.r[1] ~ E'^\\{\\w+\\}$'
                                 then coalesce(args ->> trim(both '{}' from m.r[1]), m.r[1]) else m.r[1] end,
                                 '' order by m.n)
                 from regexp_matches(v_text, E'(\\{\\w+\\}|[^{]+|\\{)', 'g') with ordinality m(r, n)), 300);
end $$;
