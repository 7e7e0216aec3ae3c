-- _query_read(query): return the query without a semicolon at its end, and the select list for q: key, args, run_at,
-- priority, null for missing columns. Raises TB005 unless it is one SELECT that can run here.
--
-- Opening a cursor parses and plans it, and runs nothing. A single statement cannot close the bracket around it later
-- and add another statement; the bracket itself then requires a SELECT. An unknown column is refused: with a misspelt
-- key each call would enqueue everything again. Key and time have types whose text or time does not depend on the
-- session's settings. limit 0: nothing of the query runs. Error class 42 comes from the parser; 0A000 means that a part
-- of it is not allowed in a sub-select. A missing right is passed on.
-- rights: worker, as the caller
create or replace function tallybook._query_read(p_query text, out query text, out columns text)
language plpgsql as $$
declare
  v_from text; v_names text[]; v_types regtype[]; v_list text[] := '{}'; v_type regtype; c record; v_plan refcursor;
  v_state text; v_message text; v_hint text;
begin
  query := regexp_replace(coalesce(p_query, ''), '[[:space:];]+$', '');
  perform tallybook._refuse(query = '', 'the query is empty',
                            'Write one SELECT with a column args, and mostly a column key.');
  perform tallybook._refuse(octet_length(query) > 100000, format('the query has %s bytes', octet_length(query)),
                            'It can have at most 100,000. Use a view for a longer one.');
  v_from := ' from (select) one left join lateral (select * from (' || query || E'\n) q limit 0) q on true';
  begin
    open v_plan for execute query;
    close v_plan;
    execute 'select array(select json_object_keys(row_to_json((select tallybook_row from (select q.*) tallybook_row))))'
      || v_from
      into v_names;
    perform tallybook._refuse(true, format('the query has an unknown column %s', to_json(n)),
                              'Use args and, if needed, key, run_at and priority.')
       from unnest(v_names) n where n not in ('key', 'args', 'run_at', 'priority') limit 1;
    perform tallybook._refuse(array_position(v_names, 'args') is null, 'the query has no column args',
                              'Write jsonb_build_object(''name'', value) as args.');
    perform tallybook._refuse(true, format('the query has more than one column %s', n))
       from unnest(v_names) n group by n having count(*) > 1 limit 1;
    execute 'select array[' || (select string_agg(format('pg_typeof(q.%I)', n), ', ' order by i)
                                  from unnest(v_names) with ordinality u(n, i)) || ']' || v_from into v_types;
  exception when others then
    get stacked diagnostics v_state = returned_sqlstate, v_message = message_text, v_hint = pg_exception_hint;
    perform tallybook._refuse(v_state like '42%' and v_state <> '42501' or v_state = '0A000',
      'the query is refused: ' || v_message, coalesce(nullif(v_hint, ''),
        'Write one SELECT that works in brackets: without changes and without a semicolon.'));
    raise;
  end;
  for c in select * from (values
      ('key', 'text', '{text,character varying,uuid,smallint,integer,bigint}'::regtype[],
       'q.key::text collate pg_catalog."default"'),
      ('args', 'jsonb', '{jsonb,json}', 'q.args'),
      ('run_at', 'timestamptz', '{timestamp with time zone}', 'q.run_at'),
      -- A number above an int is refused like one above the highest priority.
      ('priority', 'int', '{smallint,integer,bigint}',
       'case when q.priority < 0 then -1 when q.priority > 32767 then 32768 else q.priority end')) x(name, type, fits,
           value) loop
    v_type := v_types[array_position(v_names, c.name)];
    perform tallybook._refuse(v_type <> all (c.fits),
      format('the column %s of the query has the type %s, not %s', c.name, v_type, c.type),
      format('Write %s::%s as %1$s.', c.name, c.type));
    v_list := v_list || format('(%s)::%s as %s', case when v_type is null then 'null' else c.value end, c.type, c.name);
  end loop;
  columns := array_to_string(v_list, ', ');
end $$;

-- _query_row(key, args, run_at): raise TB005, with the row, for a row that cannot be a job.
create or replace function tallybook._query_row(p_key text, p_args jsonb, p_run_at timestamptz) returns void
language plpgsql immutable as $$
begin
  if octet_length(p_key) not between 1 and 512 then
    raise exception 'a unique key must have 1 to 512 bytes, one of the query has %', octet_length(p_key)
      using errcode = 'TB005', detail = format('It begins with %s.', to_json(left(p_key, 40)));
  end if;
  begin
    perform tallybook._check_args(p_args, null), tallybook._check_options(null, null, null, p_run_at);
  exception when sqlstate 'TB005' then
    raise exception 'a row of the query is invalid: %', sqlerrm
      using errcode = 'TB005', detail = format('Its key is %s.', coalesce(to_json(p_key)::text, 'null'));
  end;
end $$;
