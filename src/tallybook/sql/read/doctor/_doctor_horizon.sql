-- _horizon(): sessions, prepared transactions, replication slots and standbys that prevent the removal of dead rows, or
-- that have written and not committed; oldest first.
--
-- since is null if the server hides it (another user's session, without pg_monitor) or does not know it. transactions
-- is the age in transaction ids; null: it pins nothing. Its cost depends on the number of sessions only. Reads
-- pg_stat_activity, pg_prepared_xacts, pg_replication_slots.
-- profile: nojit
-- rights: operator, reader, as the caller
create or replace function tallybook._horizon()
returns table (kind text, who text, since timestamptz, transactions bigint, writes boolean, pid int, xid text,
  active boolean, idle_since timestamptz, remedy text) language sql stable as $$
  select * from (
    select case when a.datid is null then 'standby' else 'transaction' end,
           format('%s (%s)', case when a.datid is null then 'the standby of pid ' || a.pid
                  else 'pid ' || a.pid end, concat_ws(', ',
             coalesce(nullif(a.application_name, ''), 'no application name'), 'user ' || a.usename, host(a.client_addr),
             a.state)),
           a.xact_start, greatest(age(a.backend_xmin), age(a.backend_xid))::bigint, a.backend_xid is not null, a.pid,
           a.backend_xid::text, true,
           case when a.state like 'idle in transaction%' then a.state_change end,
           case when a.datid is not null then format('select pg_terminate_backend(%s);', a.pid) end
      from pg_stat_activity a
     where a.pid <> pg_backend_pid() and (a.datname = current_database() or a.datid is null)
       and (a.backend_xmin is not null or a.backend_xid is not null or a.state like 'idle in transaction%')
       and a.backend_type is distinct from 'autovacuum worker'
           and not exists (select from pg_stat_progress_vacuum v where v.pid = a.pid)
    union all
    select 'prepared transaction', format('the prepared transaction %L of %s', p.gid, p.owner), p.prepared,
           age(p.transaction)::bigint, true, null,
           p.transaction::text, true, null, format('rollback prepared %L; -- or commit prepared', p.gid)
      from pg_prepared_xacts p where p.database = current_database()
    union all
    select 'replication slot', format('the replication slot %s (%s, %s)', s.slot_name, s.slot_type,
                                      case when s.active then 'in use by pid ' || s.active_pid else 'not in use' end),
           null, age(s.xmin)::bigint, false, null, null, s.active, null,
           format('select pg_drop_replication_slot(%L);', s.slot_name)
      from pg_replication_slots s where s.xmin is not null) h(kind, who, since, transactions, writes, pid, xid, active,
                                                              idle_since, remedy)
   order by h.since nulls last, h.transactions desc nulls last
$$;

-- _doctor_horizon(at): what pins the horizon of vacuum; long uncommitted transactions; sessions idle in a
-- transaction; replication slots.
-- rights: operator, as the caller
create or replace function tallybook._doctor_horizon(p_at timestamptz) returns setof tallybook._check
language plpgsql stable as $$
declare v_hidden text := ''; v_jobs text[]; v_idle text := current_setting('idle_in_transaction_session_timeout');
begin
  -- A transaction with new jobs holds a lock on a ledger; a prepared one under the name that it had in its
  -- session.
  v_jobs := array(
    select distinct t.transactionid::text from pg_locks t
      join pg_locks k on k.virtualtransaction = t.virtualtransaction and k.pid is not distinct from t.pid
      join pg_class c on c.oid = k.relation and c.relnamespace = 'tallybook'::regnamespace and c.relname ~ '^entry'
     where t.locktype = 'transactionid' and t.mode = 'ExclusiveLock' and t.granted and k.mode = 'RowExclusiveLock'
           and k.granted
       and k.database = (select d.oid from pg_database d where d.datname = current_database()));
  if not pg_has_role(current_user, 'pg_read_all_stats', 'usage') then
    v_hidden := ', as far as this role can see: without pg_monitor, other users'' sessions show no times and states';
  end if;
  return query
  with h as materialized (
    select k.*, extract(epoch from p_at - k.since) as age, tallybook._ago(p_at - k.since) as ago,
           k.writes and k.xid = any (v_jobs) as jobs
      from tallybook._horizon() k
  ), found as (  -- worst first
    select x.name, jsonb_agg(jsonb_build_object('level', x.level, 'text', x.text, 'do', h.remedy) || to_jsonb(h)
                             order by x.first desc, h.since nulls last, h.transactions desc nulls last) as items
      from h, lateral (values
        ('horizon', format('%s pins the horizon %s', h.who,
                           coalesce('for ' || h.ago, 'by ' || h.transactions || ' transactions')), false,
         case when h.transactions is null then null
              when h.kind = 'replication slot' and (not h.active or h.transactions > 1000000) or h.age >= 3600
              then 'warning'
              when h.age >= 300 or h.age is null and h.transactions > 100000 then 'note' end),
        ('transactions', format('the transaction of %s has been open for %s and has %s', h.who, h.ago,
                                case when h.jobs then 'enqueued jobs' else 'written rows' end), coalesce(h.jobs, false),
         case when h.writes and h.age >= 600 then 'warning' when h.writes and h.age >= 60 then 'note' end),
        ('idle_in_transaction', format('%s has been idle in its transaction for %s', h.who,
                                       tallybook._ago(p_at - h.idle_since)), false,
         case when p_at - h.idle_since >= '300 s' then 'warning' when p_at - h.idle_since >= '60 s' then 'note' end),
        ('prepared', format('%s has waited to be committed or rolled back for %s%s', h.who, h.ago,
                            case when h.jobs then ', and has enqueued jobs' end), false,
         case when h.kind = 'prepared transaction' and h.age >= 60
              then case when h.age >= 300 then 'warning' else 'note' end end)) x(name, text, first, level)
     where x.level is not null group by x.name
  )
  select f.* from (values
    ('horizon', 'nothing has pinned the horizon for longer than 5 min' || v_hidden,
     'Rows that have died since then cannot be removed. The ledger stays fast, but tables with updates (scheduled, '
     'worker, service) grow and become slower, and old history may be dropped later than usual. '
     'Wait until it has ended, or find its owner and end it:', '{}'::jsonb),
    ('transactions', 'no transaction has been open for longer than 1 min after a write' || v_hidden,
     'Jobs that it enqueued do not start before it commits; it rarely delays other jobs. Shorten the transaction, or '
     'end it:',
     '{}'),
    ('idle_in_transaction', 'no session has been idle in a transaction for longer than 1 min' || v_hidden,
     format('Its program has not committed, or is waiting for something else. To end such sessions automatically, set '
            'idle_in_transaction_session_timeout (now %s). To end one now:', v_idle),
     jsonb_build_object('idle_in_transaction_session_timeout', v_idle)),
    ('prepared', 'no prepared transaction is older than 1 min',
     'No timeout or restart ends it. Until it has ended, it keeps its locks, and its jobs cannot start. Find out what '
     'its transaction manager decided, then run:', '{}')) c(name, fine, advice, details),
    lateral tallybook._finding(c.name, (select d.items from found d where d.name = c.name), c.fine, c.advice,
                               c.details) f;

  return query select * from tallybook._finding('slots', (
      select jsonb_agg(jsonb_build_object('level', l.level, 'slot', s.slot_name, 'wal_status', s.wal_status,
                                          'kept', k.kept, 'active', s.active,
               'text', format('the replication slot %s (%s) %s', s.slot_name,
                              concat_ws(', ', s.slot_type, s.plugin, case when not s.active then 'not in use' end),
                              case when s.wal_status = 'lost' then 'has lost WAL that it needs'
                                   else 'retains ' || pg_size_pretty(k.kept) || ' of WAL' end),
               'do', case when not s.active then format('select pg_drop_replication_slot(%L);', s.slot_name) end)
               order by k.kept desc nulls last, s.slot_name)
        from pg_replication_slots s,
             lateral (select case when not pg_is_in_recovery() then pg_wal_lsn_diff(pg_current_wal_lsn(),
                 s.restart_lsn) end) k(kept),
             lateral (select case when s.wal_status in ('unreserved', 'lost') or k.kept > 10737418240 then 'problem'
                                  when not s.active and (s.restart_lsn is not null or s.xmin is not null
                                                         or s.catalog_xmin is not null) then 'warning'
                                  when k.kept > 1073741824 then 'note' end) l(level)
       where l.level is not null),
    'no replication slot retains too much WAL',
    'A slot retains WAL until its consumer has received it, which can fill the disk. Start the consumer, or drop the '
    'slot if it has none. max_slot_wal_keep_size limits how much WAL a slot may retain.');
end $$;
