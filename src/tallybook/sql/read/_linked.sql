-- _linked(links, most): the ids of jobs that have all of these links, unordered, about `most` of them.
--
-- A key is searched as text and as number, because SQL producers write either. Uses the partial GIN indexes on links
-- alone, by bitmaps (switched on here, because trace switches them off), so rows without links are never read. Reads
-- entry, scheduled, waiting, dead.
-- profile: nojit
-- rights: operator
create or replace function tallybook._linked(p_links jsonb, p_most int) returns setof bigint
language plpgsql stable
set plan_cache_mode = force_generic_plan  -- planned once
set enable_seqscan = off set enable_indexscan = off set enable_bitmapscan = on  -- a GIN index gives a bitmap
as $$
declare
  v_path jsonpath := (
    select string_agg(case when k.key ~ '^(0|-?[1-9][0-9]{0,17})$'
                      then format('($.%1$s == %2$s || $.%1$s == %3$s)', to_json(e.key), to_json(k.key), k.key)
                           else format('$.%s == %s', to_json(e.key), to_json(k.key)) end, ' && ')
      from jsonb_each_text(p_links) e(key, value), lateral (select e.value) k(key))::jsonpath;
begin
  return query
  select distinct f.job_id from (
    (select e.job_id from tallybook.entry e where e.headers ? 'links' and e.headers -> 'links' @@ v_path
     limit 2 * p_most)
    union all
    (select a.job_id from tallybook._aside a where a.headers ? 'links' and a.headers -> 'links' @@ v_path
     limit p_most)) f;
end $$;
