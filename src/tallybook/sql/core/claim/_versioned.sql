-- _versioned(options, version): the options of a job whose args were replaced by args of this version; null: the first.
create or replace function tallybook._versioned(p_options jsonb, p_version jsonb) returns jsonb
language sql immutable as $$
  select nullif(coalesce(p_options, '{}') - 'version' || case when p_version is null then '{}'
                else jsonb_build_object('version', p_version) end, '{}')
$$;
