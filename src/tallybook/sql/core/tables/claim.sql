-- LEDGER. A claim is an interval of its lane's line, so it has one size whatever it takes, and rows are found again
-- by it.
--> LEDGER: one row is one batch taken by one worker, and its lane's cursor after it.
create table tallybook.claim (
  xid        xid8 not null default pg_current_xact_id(),
  id         bigint not null,
  number     bigint not null,
  --> The window of transaction ids that is being drained: lo <= xid < hi.
  lo         xid8 not null,
  hi         xid8 not null,
  --> This claim took what lies after (from_xid, from_seq) up to (pos_xid, pos_seq).
  from_xid   xid8 not null,
  from_seq   bigint not null,
  pos_xid    xid8 not null,
  pos_seq    bigint not null,
  --> With one_seq: the only entry that this claim took, by its job's id; the cursor is as it was.
  one_xid    xid8,
  one_seq    bigint,
  --> How many jobs this lane has handed out, this claim included.
  claimed    bigint not null,
  claimed_at timestamptz not null,
  lease      uuid,
  lane_id    int not null,
  worker_id  int,
  jobs       int not null,
  retention  "char" not null,
  --> Transactions that were running when the window was opened: not taken with it.
  holes      xid8[] not null,
  --> Former holes that have ended since and are drained before the window; empty: the window is drained.
  closed     xid8[] not null,
  --> Entries (by seq) in the interval that were not taken: cancelled, or taken by id before.
  skipped    bigint[] not null default '{}'
) partition by list (retention);
create index claim_head on tallybook.claim (lane_id, number desc);
create index claim_lease on tallybook.claim (lease);
create index claim_worker on tallybook.claim (worker_id, id);
-- Which claim took an entry: each claim is in one of the three (see _claim_of).
create index claim_by_window on tallybook.claim (lane_id, pos_xid, pos_seq) where one_xid is null and closed = '{}';
create index claim_by_holes on tallybook.claim (lane_id, pos_xid, pos_seq) where one_xid is null and closed <> '{}';
create index claim_by_one on tallybook.claim (one_xid, one_seq) where one_xid is not null;
alter table tallybook.claim replica identity full;
