-- _jobs_by_end(endings, filter, below, below_id, most, looks): the matching jobs by the time of such an end of an
-- attempt, last first, below this time (in microseconds) and id, at most `most` and one more. Otherwise as
-- _jobs_by_id.
--
--   endings  cancelled: cancelled jobs; failed, dead, lost: jobs whose last error is of this attempt, without scheduled
--            and waiting ones
create or replace function tallybook._jobs_by_end(p_endings tallybook.ending[], p_filter jsonb, p_below bigint,
  p_below_id bigint, p_most int, p_looks int)
returns table (place text, line tallybook.job_line, at timestamptz, n int) language plpgsql stable as $$
declare
  v_at timestamptz := coalesce('epoch'::timestamptz + p_below * interval '1 microsecond', 'infinity');
  v_id bigint := coalesce(p_below_id, 0); v_piece int := p_most + 1; v_left int := p_looks; v_rows int; v_n int := 0;
  v_found int; v_ats timestamptz[]; v_ids bigint[]; v_errors jsonb[];
  v_said text := lower(p_filter ->> 'error'); v_cancelled boolean := 'cancelled' = any (p_endings);
  v_since timestamptz := coalesce((p_filter ->> 'since')::timestamptz, '-infinity');
begin
  loop
    select count(*), array_agg(u.ended_at) filter (where u.ok), array_agg(u.job_id) filter (where u.ok),
           array_agg(u.error) filter (where u.ok),
           (array_agg(u.ended_at))[count(*)], (array_agg(u.job_id))[count(*)]  -- in the order of u
      into v_rows, v_ats, v_ids, v_errors, v_at, v_id
      from (select s.ended_at, s.job_id, s.error,
                   v_said is null or strpos(lower(concat_ws(' ', s.error ->> 'type', s.error ->> 'message')),
                                            v_said) > 0 as ok
              from unnest(p_endings) e(state), lateral (
                     select o.ended_at, o.job_id, o.error from tallybook.outcome o
                      where o.state = e.state and o.state <> 'completed' and o.ended_at <= v_at
                        and o.ended_at >= v_since and (o.ended_at, o.job_id) < (v_at, v_id)
                      order by o.ended_at desc, o.job_id desc limit v_piece) s
             order by s.ended_at desc, s.job_id desc limit v_piece) u;
    exit when v_rows = 0;
    return query
    select (extract(epoch from v_ats[l.nth]) * 1000000)::bigint || '.' || (l.line).id, l.line, v_ats[l.nth],
           v_n + row_number() over ()::int
      from tallybook._job_lines(v_ids, null, case when not v_cancelled then v_errors end,
                                case when v_cancelled then v_ats end,
                                case when v_cancelled then '{cancelled}'
                                     else '{available,running,completed,beyond,cancelled,unmet}' end::text[], p_filter,
                                p_most + 1 - v_n) l;
    get diagnostics v_found = row_count;
    v_n := v_n + v_found;
    exit when v_n > p_most or v_rows < v_piece;
    v_left := v_left - v_rows - 100 * coalesce(cardinality(v_ids), 0);
    if v_left <= 0 then
      return query select (extract(epoch from v_at) * 1000000)::bigint || '.' || v_id, null::tallybook.job_line, v_at,
                          v_n + 1;
      return;
    end if;
    v_piece := least(greatest(2 * v_piece, 64), case when cardinality(v_ids) > v_rows / 4 then 256 else 4096 end);
  end loop;
end $$;
