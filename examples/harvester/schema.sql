-- Nothing here is unique: what was done twice would show.
create table visit (
  url text not null, iteration int not null, etag text not null, changed boolean not null, worker text not null,
  at timestamptz not null default now());
create index on visit (url, iteration);

create table item (id int primary key, cents int not null, url text not null, checks int not null default 1);
