create table tallybook.clock_step (
  id         bigint generated always as identity primary key,
  noticed_at timestamptz not null,
  by         interval not null
);
comment on table tallybook.clock_step is 'Each step of the server''s clock; by is negative where it went back.';
