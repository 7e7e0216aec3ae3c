-- 0007: what a hostile test and an audit found. Workers may run.

drop function if exists tallybook._amend(bigint, text, jsonb, int, timestamptz, boolean, jsonb, timestamptz);
drop function if exists tallybook._look(bigint);
drop function if exists tallybook._busy(bigint);
drop function if exists tallybook._queued_still(bigint);
drop function if exists tallybook._subject_waits(bigint, timestamptz);
drop function if exists tallybook._why_running(bigint, int, text, int, timestamptz, timestamptz, text, timestamptz);
