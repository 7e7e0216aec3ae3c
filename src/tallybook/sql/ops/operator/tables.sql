-- Changes by people and programs, recorded in the transaction of the change.
--> Changes by people and programs. Rows are never updated; they are deleted after the retention of the class audit.
create table tallybook.audit (
  id     bigint generated always as identity primary key,
  at     timestamptz not null,
  actor  text not null,
  via    text not null,
  action text not null,
  --> The object of the change; no args, no secrets.
  target jsonb not null,
  --> The result; no args, no secrets.
  done   jsonb not null,
  constraint "who, how and what are named" check (actor <> '' and via <> '' and action <> ''),
  constraint "target and done are objects" check (jsonb_typeof(target) = 'object' and jsonb_typeof(done) = 'object')
);
create index audit_of_actor on tallybook.audit (actor, id);
create index audit_of_action on tallybook.audit (action, id);

-- Not UNLOGGED: a crash would empty it, and a captured request could be sent again.
--> Nonces of served requests, kept as long as the requests could be sent again: see nonce_take.
create table tallybook.api_nonce (
  key_id  text not null,
  nonce   text not null,
  seen_at timestamptz not null,
  primary key (key_id, nonce)
);
create index api_nonce_seen on tallybook.api_nonce (seen_at);
