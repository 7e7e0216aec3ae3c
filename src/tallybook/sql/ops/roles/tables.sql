--> The roles that `tallybook roles` has given rights. Without rows, functions run with the caller's rights.
create table tallybook.role (
  kind text primary key,
  name name not null unique,
  constraint "there are five kinds of roles" check (kind in ('producer', 'worker', 'operator', 'reader', 'metrics'))
);
