-- _doctor_counters(asked): whether the counters agree with a recount. It reads all history, so unasked only where there is little.
create or replace function tallybook._doctor_counters(p_asked boolean)
returns table (name text, level text, finding text, advice text, details jsonb) language plpgsql stable set jit = off as $$
#variable_conflict use_column
declare
  v_bytes numeric;
begin
  if not exists (select from pg_proc p where p.pronamespace = 'tallybook'::regnamespace and p.proname = 'verify') then return; end if;
  select sum(pg_relation_size(c.oid)) into v_bytes from pg_class c
   where c.relnamespace = 'tallybook'::regnamespace and c.relkind = 'r' and c.relname ~ '^(entry|claim|outcome)_';
  if not p_asked and v_bytes > 67108864 then
    return query select * from tallybook._finding('counters', null, format('not recounted: that reads %s; `tallybook doctor --verify` does', pg_size_pretty(v_bytes)), null);
    return;
  end if;
  return query select * from tallybook._finding('counters', (
      select jsonb_agg(jsonb_build_object('level', 'problem', 'text', to_jsonb(v)::text) || to_jsonb(v)) from tallybook.verify() v),
    'the counters agree with a recount', 'That is a defect: please report it, with these lines.');
end $$;
