-- _doctor_settings(): settings of the server and of this session that can lose or block jobs.
-- rights: operator, as the caller
create or replace function tallybook._doctor_settings() returns setof tallybook._check language sql stable as $$
  select f.* from tallybook._finding('settings', (
      select jsonb_agg(jsonb_build_object('level', v.level, 'text', format('%s is %s: %s', s.name, s.setting, v.why),
               'setting', s.name, 'value', s.setting, 'source', s.source,
               'do', format('%s = %s (the present value comes from: %s).', s.name, v.wanted, s.source)) order by v.n)
        from (values (1, 'problem', 'fsync', '{on}'::text[], 'on', 'a crash of the machine can destroy the database'),
                     (2, 'problem', 'default_transaction_read_only', '{off}', 'off',
                      'sessions with this setting cannot enqueue or run jobs'),
                     (3, 'warning', 'full_page_writes', '{on}', 'on', 'a crash of the machine can destroy pages'),
                     (4, 'warning', 'synchronous_commit', '{on,local,remote_write,remote_apply}', 'on',
                      'a crash can lose enqueued jobs and recorded outcomes'),
                     (5, 'note', 'default_transaction_isolation', '{read committed}', 'read committed',
                      'claim and retry need read committed'))
             v(n, level, name, fine, wanted, why)
        join pg_settings s on s.name = v.name and s.setting <> all (v.fine)),
    'no setting can lose or block jobs', 'Set, for the server, the database or the role:',
    (select jsonb_object_agg(s.name, s.setting) from pg_settings s
      where s.name in ('synchronous_commit', 'idle_in_transaction_session_timeout', 'max_prepared_transactions', 'jit',
                       'wal_level', 'hot_standby_feedback',
                       'max_slot_wal_keep_size', 'statement_timeout', 'lock_timeout', 'max_connections',
                       'shared_buffers'))) f
$$;
