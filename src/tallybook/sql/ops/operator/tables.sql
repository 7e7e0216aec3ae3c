-- What people have changed by a page, by the API or in another way that puts it on record: in the transaction of the
-- change itself.
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
  'What people have changed. Rows are added, never updated, and go after the retention of the class audit.';
comment on column tallybook.audit.target is 'What was meant; never args or secrets.';
comment on column tallybook.audit.done is 'What became of it; never args or secrets.';

-- UNLOGGED would forget them in a crash, and what was captured before it could be sent again.
create table tallybook.api_nonce (
  key_id  text not null,
  nonce   text not null,
  seen_at timestamptz not null,
  primary key (key_id, nonce)
);
create index api_nonce_seen on tallybook.api_nonce (seen_at);
comment on table tallybook.api_nonce is
  'Signed requests that were served, for as long as somebody could send them again: see nonce_take.';
