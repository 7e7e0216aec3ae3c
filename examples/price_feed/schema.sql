create table currency (code text primary key, decimals int not null);
insert into currency values ('INR', 2), ('USD', 2), ('JPY', 0), ('KWD', 3);

-- stopped: its last job is dead. Its price is not fetched until a person retries that job.
create table asset (
  id bigint generated always as identity primary key, symbol text not null unique, data_type text not null,
  currency text not null references currency, price_mode text not null default 'api',
  active boolean not null default true, deleted_at timestamptz, viewed_at timestamptz,
  stopped boolean not null default false);

create table holding (
  owner text not null, asset bigint not null references asset, units int not null, active boolean not null default true,
  primary key (owner, asset));

-- amount is in minor units of the asset's currency: 284750 is 2,847.50 INR.
create table price (
  job_id bigint primary key, asset bigint not null references asset, amount bigint not null check (amount >= 0),
  provider text not null, at timestamptz not null default now());
create index on price (asset, at desc);

create table event (
  job_id bigint primary key, name text not null, body jsonb not null, at timestamptz not null default now());

-- The current state of each asset. fetched: its prices come from a provider, and a route exists. stale: no price of the
-- last 24 h.
create view asset_now as
  select a.id, a.symbol, a.data_type, a.currency, c.decimals, a.viewed_at, a.stopped, p.amount, p.at as priced_at,
         p.provider,
         a.price_mode = 'api' and a.active and a.deleted_at is null and not a.stopped
           and tallybook.provider_resolve(a.data_type, a.symbol) is not null as fetched,
         coalesce(p.at < now() - interval '24 h', true) as stale
    from asset a join currency c on c.code = a.currency
    left join lateral (select * from price p where p.asset = a.id order by p.at desc limit 1) p on true;
