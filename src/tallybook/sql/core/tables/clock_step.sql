--> Each step of the server's clock; by is negative where it went back.
create table tallybook.clock_step (
  id         bigint generated always as identity primary key,
  noticed_at timestamptz not null,
  by         interval not null
);
