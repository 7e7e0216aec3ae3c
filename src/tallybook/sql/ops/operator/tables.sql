-- Changes by people and programs, recorded in the transaction of the change.
create table tallybook.audit (
  id     bigint generated always as identity primary key,
  at     timestamptz not null,
  actor  text not null,
  via    text not null,
  action text not null,
  target jsonb not null,
  done   jsonb not null,
  constraint "who, how and what are named" check (actor <> '' and via <> '' and action <> ''),
  constraint "target and done are objects" check (jsonb_typeof(target) = 'object' and jsonb_typeof(done) = 'object')
);
create index audit_of_actor on tallybook.audit (actor, id);
create index audit_of_action on tallybook.audit (action, id);
comment on table tallybook.audit is
  'Changes by people and programs. Rows are never updated; they are deleted after the retention of the class audit.';

-- Not UNLOGGED: a crash would empty it, and a captured request could be sent again.
create table tallybook.api_nonce (
  key_id  text not null,
  nonce   text not null,
  seen_at timestamptz not null,
  primary key (key_id, nonce)
);
create index api_nonce_seen on tallybook.api_nonce (seen_at);
comment on table tallybook.api_nonce is
  'Nonces of served requests, kept as long as the requests could be sent again: see nonce_take.';
