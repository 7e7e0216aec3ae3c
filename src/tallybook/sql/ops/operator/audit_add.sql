-- audit_add(actor, via, action, target, done): put on record what somebody has changed: who, by what (web, api, cli),
-- which verb, on what, and what became of it. Call it in the transaction of the change: then there is no change without
-- its row, and no row without its change.
-- Neither args nor secrets belong into target and done. Returns the row's id. Errors: TB005 a name that is empty or too
-- long, what is no object or has more than 8 KB. Writes audit.
-- rights: operator
create or replace function tallybook.audit_add( actor text, via text, action text, target jsonb default '{}',
  done jsonb default '{}', at timestamptz default clock_timestamp() ) returns bigint language plpgsql as $$
declare
  v_id bigint;
begin
  perform tallybook._audit_name('actor', actor, 200), tallybook._audit_name('via', via, 32),
          tallybook._audit_name('action', action, 64);
  perform tallybook._audit_object('target', target), tallybook._audit_object('done', done);
  insert into tallybook.audit (at, actor, via, action, target, done)
  values (audit_add.at, audit_add.actor, audit_add.via, audit_add.action, audit_add.target, audit_add.done)
         returning id into v_id;
  return v_id;
end $$;

create or replace function tallybook._audit_name(p_what text, p_name text, p_most int) returns void
language sql stable as $$
  select tallybook._refuse((length(p_name) between 1 and p_most) is not true,
           format('the %s of an audit row has %s characters', p_what, coalesce(length(p_name), 0)),
           format('From 1 to %s.', p_most))
$$;

create or replace function tallybook._audit_object(p_what text, p_object jsonb) returns void
language sql stable as $$
  select tallybook._refuse(
           p_object is null or jsonb_typeof(p_object) <> 'object' or octet_length(p_object::text) > 8192,
           format('the %s of an audit row is no object of at most 8 KB', p_what),
           'Name ids and counts, not all that was changed.')
$$;
