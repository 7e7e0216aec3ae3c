-- _query_text(query): the query without a semicolon at its end, if it is one statement that is complete in itself; else
-- TB005.
--
-- Opening a cursor parses and plans it, and runs nothing. What is a statement on its own cannot close the bracket that
-- it is put into later and go on with another statement behind it; that it is a SELECT is then said by the bracket.
-- rights: worker, as the caller
create or replace function tallybook._query_text(p_query text) returns text
language plpgsql as $$
declare
  v_query text := regexp_replace(coalesce(p_query, ''), '[\s;]+$', '');
  c refcursor; v_state text; v_message text; v_hint text;
begin
  if v_query = '' then
    raise exception 'the query is empty' using errcode = 'TB005',
      hint = 'It is one SELECT with a column args, and mostly a column key.';
  end if;
  if octet_length(v_query) > 100000 then
    raise exception 'the query has % bytes', octet_length(v_query)
      using errcode = 'TB005', hint = 'At most 100,000 fit. A view can hold a longer one.';
  end if;
  begin
    open c for execute v_query;
    close c;
  exception when others then
    get stacked diagnostics v_state = returned_sqlstate, v_message = message_text, v_hint = pg_exception_hint;
    perform tallybook._query_refused(v_state, v_message, v_hint);
    raise;
  end;
  return v_query;
end $$;

-- _query_columns(query): what to select from it as q: key, args, run_at, priority, null for what it does not have; or
-- TB005.
--
-- A name that is not known is refused: with a misspelt key each call would put everything in once more. Key and time
-- have types whose text or instant does not depend on the session's settings. limit 0: nothing of the query is run.
-- rights: worker, as the caller
create or replace function tallybook._query_columns(p_query text) returns text
language plpgsql as $$
declare
  v_from constant text := ' from (select) one left join lateral (select * from (' || p_query
    || E'\n) q limit 0) q on true';
  v_names text[]; v_types text[]; v_list text[] := '{}'; v_bad text; v_type text; c record;
  v_state text; v_message text; v_hint text;
begin
  begin
    execute 'select array(select json_object_keys(row_to_json((select tallybook_row from (select q.*) tallybook_row))))'
      || v_from
      into v_names;
    select n into v_bad from unnest(v_names) n where n not in ('key', 'args', 'run_at', 'priority') limit 1;
    if found then
      raise exception 'the query has a column % that is not known', to_json(v_bad)
        using errcode = 'TB005', hint = 'Its columns are args and, where needed, key, run_at and priority.';
    end if;
    if array_position(v_names, 'args') is null then
      raise exception 'the query has no column args'
        using errcode = 'TB005', hint = 'Make it with jsonb_build_object(''name'', value) as args.';
    end if;
    select n into v_bad from unnest(v_names) n group by n having count(*) > 1 limit 1;
    if found then
      raise exception 'the query has more than one column %', v_bad using errcode = 'TB005';
    end if;
    execute 'select array[' || (select string_agg(format('pg_typeof(q.%I)::text', n), ', ' order by i)
                                  from unnest(v_names) with ordinality u(n, i)) || ']' || v_from into v_types;
  exception when others then
    get stacked diagnostics v_state = returned_sqlstate, v_message = message_text, v_hint = pg_exception_hint;
    perform tallybook._query_refused(v_state, v_message, v_hint);
    raise;
  end;
  for c in select * from (values
      ('key', 'text', '{text,character varying,uuid,smallint,integer,bigint}'::text[], 'q.key'),
      ('args', 'jsonb', '{jsonb,json}', 'q.args'),
      ('run_at', 'timestamptz', '{timestamp with time zone}', 'q.run_at'),
      -- What is too large for an int is refused as what is too large for a priority.
      ('priority', 'int', '{smallint,integer,bigint}',
       'case when q.priority < 0 then -1 when q.priority > 32767 then 32768 else q.priority end')) x(name, type, fits,
           value) loop
    v_type := v_types[array_position(v_names, c.name)];
    if v_type <> all (c.fits) then
      raise exception 'the column % of the query has the type %, not %', c.name, v_type, c.type
        using errcode = 'TB005', hint = format('Write %s::%s as %1$s.', c.name, c.type);
    end if;
    v_list := v_list || format('%s::%s as %s', case when v_type is null then 'null' else c.value end, c.type, c.name);
  end loop;
  return array_to_string(v_list, ', ');
end $$;

-- _query_refused(sqlstate, message, hint): raises TB005 for an error that says that the query is no SELECT that can run
-- here.
--
-- Class 42 is the parser's, 0A000 says that a part of it cannot stand in a sub-select. Lack of a right stays what it
-- is.
-- rights: worker, as the caller
create or replace function tallybook._query_refused(p_state text, p_message text, p_hint text) returns void
language plpgsql as $$
begin
  if p_state like '42%' and p_state <> '42501' or p_state = '0A000' then
    raise exception 'the query is refused: %', p_message
      using errcode = 'TB005',
            hint = coalesce(nullif(p_hint, ''),
                            'It is one SELECT that can stand in brackets: it changes nothing, and no semicolon is in '
                            'it.');
  end if;
end $$;

-- _query_row(key, args): raises TB005 for a row of a query that is no job, and says which.
create or replace function tallybook._query_row(p_key text, p_args jsonb) returns void
language plpgsql immutable as $$
begin
  if octet_length(p_key) not between 1 and 512 then
    raise exception 'a unique key has 1 to 512 bytes, one of the query has %', octet_length(p_key)
      using errcode = 'TB005', detail = format('It begins with %s.', to_json(left(p_key, 40)));
  end if;
  begin
    perform tallybook._check_args(p_args, null);
  exception when sqlstate 'TB005' then
    raise exception 'a row of the query does not fit: %', sqlerrm
      using errcode = 'TB005', detail = format('Its key is %s.', coalesce(to_json(p_key)::text, 'null'));
  end;
end $$;
