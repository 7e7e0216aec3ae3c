-- service_every(service, every): how often a service is looked after at least. Workers take it from the table at their
-- next look. False: it was so already. Errors: TB005 an unknown service, a time out of range. Writes service.
-- rights: operator
create or replace function tallybook.service_every(service text, every interval) returns boolean
language plpgsql as $$
begin
  perform tallybook._refuse(every is null or every not between interval '100 ms' and interval '1 day',
            format('a service cannot run every %s', coalesce(every::text, 'null')), 'From 100 ms to 1 day.');
  perform tallybook._refuse(not exists (select from tallybook.service s where s.name = service_every.service),
            format('there is no service %s', coalesce(to_json(service)::text, 'null')),
            (select 'There are ' || string_agg(s.name, ', ' order by s.name) || '.' from tallybook.service s));
  update tallybook.service s set every = service_every.every where s.name = service_every.service
    and s.every <> service_every.every;
  return found;
end $$;
