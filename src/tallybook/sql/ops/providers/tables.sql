--> Providers that jobs call, without secrets. Secrets are in provider_secret.
create table tallybook.provider (
  name       text primary key,
  --> Its purpose, in your words: market-data, webhook, smtp.
  kind       text not null,
  settings   jsonb not null default '{}',
  --> False: it is not loaded, and no route leads to it.
  active     boolean not null default true,
  created_at timestamptz not null,
  changed_at timestamptz not null,
  constraint "settings are one JSON object" check (jsonb_typeof(settings) = 'object')
);

--> Secrets of providers, encrypted by programs with keys that the database never sees. See the view provider_field.
create table tallybook.provider_secret (
  provider   text not null references tallybook.provider on delete cascade,
  field      text not null,
  --> previous: what it was before its last change, where that is still good.
  slot       text not null,
  --> The key that encrypts it.
  key_id     text not null,
  nonce      bytea not null,
  --> AES-256-GCM with the tag at its end; bound to provider, field, slot and key_id.
  ciphertext bytea not null,
  --> When the secret was set. sealed_at: when it was last encrypted, for example by a rotation of keys.
  set_at     timestamptz not null,
  sealed_at  timestamptz not null,
  primary key (provider, field, slot),
  constraint "a slot is current or previous" check (slot in ('current', 'previous')),
  constraint "a nonce has 96 bits" check (octet_length(nonce) = 12),
  constraint "a ciphertext has a tag of 16 bytes" check (octet_length(ciphertext) between 16 and 65552)
);
create index provider_secret_key on tallybook.provider_secret (key_id);

--> Which provider serves a kind of data. A route for one symbol has precedence over the broad one (symbol is null).
create table tallybook.provider_route (
  data_type  text not null,
  symbol     text,
  provider   text not null references tallybook.provider,
  active     boolean not null default true,
  created_at timestamptz not null,
  changed_at timestamptz not null
);
create unique index provider_route_broad on tallybook.provider_route (data_type) where symbol is null;
create unique index provider_route_specific on tallybook.provider_route (data_type, symbol) where symbol is not null;
create index provider_route_provider on tallybook.provider_route (provider);
alter table tallybook.provider_route replica identity full;
