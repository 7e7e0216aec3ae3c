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
language plpgsql immutable as $$
begin
  if p_name is null or length(p_name) not between 1 and p_most then
    raise exception 'the % of an audit row has % characters', p_what, coalesce(length(p_name), 0)
      using errcode = 'TB005', hint = format('From 1 to %s.', p_most);
  end if;
end $$;

create or replace function tallybook._audit_object(p_what text, p_object jsonb) returns void
language plpgsql immutable as $$
begin
  if p_object is null or jsonb_typeof(p_object) <> 'object' or octet_length(p_object::text) > 8192 then
    raise exception 'the % of an audit row is no object of at most 8 KB', p_what
      using errcode = 'TB005', hint = 'Name ids and counts, not all that was changed.';
  end if;
end $$;
