-- 0007: what a hostile test and an audit found. Workers may run.

-- _enqueue_batch draws the ids of its jobs itself: the role worker may call it.
drop function if exists tallybook._enqueue_batch(text, text, bigint[], text[], jsonb[], timestamptz[], int[], int, jsonb, jsonb, timestamptz);
