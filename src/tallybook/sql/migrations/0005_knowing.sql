-- 0005: knowing: counters, history, queues as things, why and trace. Workers may run; the tables that get a trigger are locked for a moment,
-- entry while two indexes of few of its rows are made, which read it once each.

-- Counters

-- History

-- Queues

-- Why and trace

-- The jobs of a row of yours, by headers.links, which few jobs have: the others are in none of these and cost nothing. GIN, since a job
-- may have several; without a list of pending rows, which every look-up would read and now and then a producer would have to sort in.
-- entry is locked for writes while its two are made, each of which reads it once; none of its rows is in the first.
create index entry_linked on tallybook.entry using gin ((headers -> 'links') jsonb_path_ops) with (fastupdate = off) where headers ? 'links';
create index scheduled_linked on tallybook.scheduled using gin ((headers -> 'links') jsonb_path_ops) with (fastupdate = off) where headers ? 'links';
create index waiting_linked on tallybook.waiting using gin ((headers -> 'links') jsonb_path_ops) with (fastupdate = off) where headers ? 'links';
create index dead_linked on tallybook.dead using gin ((headers -> 'links') jsonb_path_ops) with (fastupdate = off) where headers ? 'links';

-- The jobs that a subject has had: one row a job, none for its iterations.
create index entry_of_subject on tallybook.entry (unique_key) where attempt = 1 and options ? 'subject';
