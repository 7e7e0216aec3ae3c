-- 0007: what a hostile test and an audit found. Workers may run.

-- The server's clock

create table tallybook.clock_step (
  id         bigint generated always as identity primary key,
  noticed_at timestamptz not null,
  by         interval not null
);
comment on table tallybook.clock_step is 'Each step of the server''s clock; by is negative where it went back.';

-- Counting: one path, for people and for verify.

drop function if exists tallybook._counted(boolean);
drop function if exists tallybook._split(int, text, bigint, boolean);
