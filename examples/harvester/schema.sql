-- There is no unique key, so that work done twice shows.
create table visit (
  url text not null, iteration int not null, etag text not null, changed boolean not null, worker text not null,
  at timestamptz not null default now());
create index on visit (url, iteration);

create table item (id int primary key, cents int not null, url text not null, checks int not null default 1);
