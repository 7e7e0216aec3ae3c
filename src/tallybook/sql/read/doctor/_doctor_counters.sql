-- _doctor_counters(asked): whether the counters agree with a recount. A recount reads the whole history, so without
-- `asked` it runs only if the history is small.
-- rights: operator
create or replace function tallybook._doctor_counters(p_asked boolean)
returns table (name text, level text, finding text, advice text, details jsonb) language plpgsql stable as $$
declare
  v_bytes numeric := (select sum(pg_relation_size(c.oid)) from pg_class c
                       where c.relnamespace = 'tallybook'::regnamespace and c.relkind = 'r'
                             and c.relname ~ '^(entry|claim|outcome)_');
  v_asked boolean := p_asked or v_bytes <= 67108864;
begin
  return query select * from tallybook._finding('counters', (
      select jsonb_agg(jsonb_build_object('level', 'problem', 'text', format('%s%s: %s counted, %s found',
                         coalesce(case when v.queue is not null then format('queue %s, task %s, ', to_json(v.queue),
                             to_json(v.task)) end, ''), v.what, v.counted, v.found)) || to_jsonb(v)
                       order by v.queue, v.task, v.what) from tallybook.verify() v where v_asked),
    case when v_asked then 'the counters agree with a recount'
         else format('not recounted, because this would read %s; to recount, run `tallybook doctor --verify`',
                     pg_size_pretty(v_bytes)) end,
    'This is a defect in Tallybook: please report it with this finding. `select tallybook.recount()` corrects the '
    'counters.');
end $$;
