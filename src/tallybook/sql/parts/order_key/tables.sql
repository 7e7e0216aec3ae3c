-- The next job of an order key has the lowest number. A row is deleted when its job gets its turn.
--> Jobs with an order key that have not had their turn, in their order.
create table tallybook.order_line (
  key    text not null,
  seq    bigint not null,
  job_id bigint not null,
  primary key (key, seq),
  constraint "an order key has 1 to 512 bytes" check (octet_length(key) between 1 and 512)
);
create index order_line_job on tallybook.order_line (job_id);

-- A small ledger like unique_key: the newest row of a key names the job that has the turn, while that job is open.
--> The newest generation of a key has the turn, until its job has ended.
create table tallybook.order_turn (
  key        text not null,
  generation bigint not null,
  job_id     bigint not null,
  primary key (key, generation)
);

create index scheduled_of_order on tallybook.scheduled (order_key) where order_key is not null;

create index waiting_of_key on tallybook.waiting (order_key) where order_key is not null;
