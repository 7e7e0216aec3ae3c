-- One row per fair lane, the newest: whom the last fair_release came to. Each one appends one and takes the one before
-- away.
--> The key that was served last in each lane of fair jobs.
create table tallybook.fair_turn (
  lane_id  int not null,
  number   bigint not null,
  fair_key text collate "C" not null,
  primary key (lane_id, number)
);

create index lane_fair on tallybook.lane (lane_id) where part = 'fair';

create index waiting_fair on tallybook.waiting (lane_id, fair_key, fair_seq) where fair_key is not null;

create index waiting_fair_new on tallybook.waiting (lane_id, fair_seq) where fair_key is not null;

insert into tallybook.service (name, every) values ('fair_release', '5 s');
