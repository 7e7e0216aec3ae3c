-- Not unique on purpose: a second producer of a brand-new lane must not wait for the first one's commit, so a producer
-- that sees none makes its own. Twins are harmless: later producers use the newest, a claim walks them all.
create table tallybook.lane (
  lane_id    int generated always as identity primary key,
  queue      text not null,
  priority   smallint not null,
  --> Empty, 'turn' for jobs whose turn at a limit has come, 'fair' for jobs whose turn among the keys of their queue
  --> has come, or 'task:NAME' for jobs whose task the workers that met them did not know.
  part       text not null default '',
  --> b, d or l: brief, default or long. The ledgers are partitioned by it.
  retention  "char" not null,
  --> Whether new jobs get a random place among those that wait (see queue_set). A lane keeps this, too.
  shuffled   boolean not null default false,
  --> No entry of this lane can have a lower transaction id: its first window begins here. Of a retired lane: all
  --> entries below have ended.
  born       xid8 not null default pg_snapshot_xmin(pg_current_snapshot()),
  --> Since when nobody lines up here: the database has moved to another cluster, and the lane has a successor.
  retired_at timestamptz,
  --> Its queue was dropped: what had committed by then does not count for whether there is such a queue.
  dropped    pg_snapshot,
  constraint "a queue name has 1 to 64 bytes" check (octet_length(queue) between 1 and 64)
);
create index lane_of_queue on tallybook.lane (queue, priority, part, lane_id) include (retention, shuffled)
  where retired_at is null;
