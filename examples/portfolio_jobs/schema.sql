-- quote is the newest price, from the schedule "quotes": a closing price far from it is rejected.
create table instrument (symbol text primary key, quote numeric not null, quoted_at timestamptz);
-- Units of each currency per dollar, from the schedule "rates".
create table rate (currency text primary key, per_dollar numeric not null, rated_at timestamptz not null default now());
create table portfolio (
  id int primary key, owner text not null, market text not null, currency text not null default 'USD');
create table holding (
  portfolio int not null references portfolio, symbol text not null references instrument, quantity numeric not null,
  primary key (portfolio, symbol));

-- The balance of an owner's address on the chain, from the schedule "wallets" or on the owner's request.
create table wallet (
  portfolio int primary key references portfolio, address text not null unique, balance numeric, synced_at timestamptz);

-- The closes of the markets: written with the jobs that value their portfolios.
create table closing (
  market text not null, day date not null, closed_at timestamptz not null default now(), primary key (market, day));

-- amount is in US cents. worker: the worker that valued it, which the run prints.
create table valuation (
  portfolio int not null references portfolio, day date not null, amount bigint not null, worker text not null,
  valued_at timestamptz not null default clock_timestamp(), primary key (portfolio, day));

-- The key: a dead letter may be retried after another job has sent its statement.
create table statement (
  portfolio int not null, day date not null, sent_at timestamptz not null default now(), primary key (portfolio, day),
  foreign key (portfolio, day) references valuation);

-- The owners' requests. content: the imported or the exported file. picture: a screenshot, until it is read.
create table request (
  id bigint generated always as identity primary key, portfolio int not null references portfolio,
  kind text not null check (kind in ('import', 'export', 'screenshot')), content text not null default '',
  picture bytea, job_id bigint, asked_at timestamptz not null default now(), done_at timestamptz);

create view held as select h.portfolio, h.symbol, h.quantity, i.quote from holding h join instrument i using (symbol);
create view valued as select p.owner, p.market, v.* from portfolio p join valuation v on v.portfolio = p.id;

-- The query of the schedule "statements": the valuations without one.
create view unstated as
select format('statement:%s:%s', v.portfolio, v.day) as key,
       jsonb_build_object('portfolio', v.portfolio, 'day', v.day) as args
  from valuation v where not exists (select from statement s where s.portfolio = v.portfolio and s.day = v.day);

-- For the pages. A job is joined while it is in the history; done_at and content are permanent.
create view worth as
select p.*, v.day, v.amount, round(v.amount * r.per_dollar) as converted
  from portfolio p left join rate r using (currency)
  left join lateral (select * from valuation v where v.portfolio = p.id order by v.day desc limit 1) v on true;
create view request_status as
select r.id, r.portfolio, r.kind, r.asked_at, r.done_at, j.state, j.progress, j.progress_message, j.result, j.reason
  from request r left join tallybook.job j on j.id = r.job_id;
