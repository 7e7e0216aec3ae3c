-- retention_set(class, keep): set a retention period. Classes: brief, default, long: ended jobs of the queues of that
-- class; dead: dead letters; fires: ticks of schedules; audit: changes by people. Returns false if nothing changed.
-- Running workers use it within a minute. A shorter period deletes older history for good. Errors: TB005 an unknown
-- class, a period out of range. Writes retention_class.
-- rights: operator
create or replace function tallybook.retention_set(class text, keep interval) returns boolean
language plpgsql as $$
begin
  perform tallybook._refuse(keep is null or keep not between interval '1 minute' and interval '100 years',
    format('history cannot be kept for %s', coalesce(keep::text, 'null')), 'It must be from 1 minute to 100 years.');
  perform tallybook._refuse(coalesce(bool_and(r.name <> retention_set.class), true),
    format('there is no retention class %s', coalesce(to_json(class)::text, 'null')),
    'There are ' || string_agg(r.name, ', ' order by r.name) || '.') from tallybook.retention_class r;
  update tallybook.retention_class r set keep = retention_set.keep where r.name = retention_set.class
    and r.keep <> retention_set.keep;
  return found;
end $$;
