-- service_every(service, every): how often a service is looked after at least. Workers take it from the table at their
-- next look. False: it was so already. Errors: TB005 an unknown service, a time out of range. Writes service.
-- rights: operator
create or replace function tallybook.service_every(service text, every interval) returns boolean
language plpgsql as $$
begin
  if every is null or every not between interval '100 ms' and interval '1 day' then
    raise exception 'a service cannot run every %', coalesce(every::text, 'null')
      using errcode = 'TB005', hint = 'From 100 ms to 1 day.';
  end if;
  perform from tallybook.service s where s.name = service_every.service;
  if not found then
    raise exception 'there is no service %', coalesce(to_json(service)::text, 'null')
      using errcode = 'TB005', hint = (select 'There are ' || string_agg(s.name, ', ' order by s.name) || '.'
                                       from tallybook.service s);
  end if;
  update tallybook.service s set every = service_every.every where s.name = service_every.service
    and s.every <> service_every.every;
  return found;
end $$;
