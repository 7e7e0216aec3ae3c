-- service_every(service, every): set the longest interval of a maintenance service. Running workers use it from their
-- next check on. Returns false if nothing changed. Errors: TB005 an unknown service, an interval out of range. Writes
-- service.
-- rights: operator
create or replace function tallybook.service_every(service text, every interval) returns boolean
language plpgsql as $$
begin
  perform tallybook._refuse(every is null or every not between interval '100 ms' and interval '1 day',
            format('a service cannot run every %s', coalesce(every::text, 'null')), 'It must be from 100 ms to 1 day.');
  perform tallybook._refuse(not exists (select from tallybook.service s where s.name = service_every.service),
            format('there is no service %s', coalesce(to_json(service)::text, 'null')),
            (select 'There are ' || string_agg(s.name, ', ' order by s.name) || '.' from tallybook.service s));
  update tallybook.service s set every = service_every.every where s.name = service_every.service
    and s.every <> service_every.every;
  return found;
end $$;
