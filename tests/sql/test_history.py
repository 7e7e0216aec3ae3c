"""History is pruned by ranges of transaction ids: what goes, what stays, and that nobody waits for it."""

import random
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from functools import partial
from typing import Any, LiteralString

import psycopg
import pytest

from support.broken import without
from support.database import Connect, Connection, miscounted, one
from support.hands import Hands
from support.sessions import behind, enqueue, is_blocked, pages
from support.waiting import wait_until

S, DAY = timedelta(seconds=1), timedelta(days=1)
COUNT = "select (select count(*) from tallybook.entry), (select count(*) from tallybook.outcome)"


def prune(db: Connection, at: datetime) -> int:
    """Prune until there is nothing left to do; return how many rows went."""
    went = 0
    db.execute("select tallybook.fold()")
    for _ in range(1000):
        passed(db)
        effect, again = db.execute("select effect, again from tallybook.prune(%s)", [at]).fetchone() or (0, False)
        went += effect
        if not again:
            return went
    raise AssertionError("it does not come to an end")


def done(db: Connection, hands: Hands, jobs: int, queue: str = "q") -> None:
    enqueue(db, queue, n=jobs)
    while claimed := hands.claim():
        hands.complete(*claimed)


CUT: LiteralString = """
select x.at::text, x.at = r.upper or tallybook._range_split(f.parents, r.lower, x.at)
  from tallybook._families() f, tallybook._ranges(f.parents[1]) r,
       lateral (select pg_snapshot_xmax(pg_current_snapshot())::text::numeric as now) s,
       lateral (select least(s.now + 500, r.upper) as at) x
 where f.name = 'default' and r.lower <= s.now order by r.lower desc limit 1"""


def cut(db: Connection, *, ended: bool = True) -> None:
    """Start another range for what follows; with `ended`, wait until all earlier transactions have ended."""
    for _ in range(20):  # other tests use up transaction ids, too
        row = db.execute(CUT).fetchone()
        if row and row[1]:
            db.execute(
                f"do $$ begin while pg_snapshot_xmax(pg_current_snapshot()) <= '{row[0]}'::xid8"
                " loop perform pg_current_xact_id(); commit; end loop; end $$"
            )
            return passed(db) if ended else None
    raise AssertionError("nobody else has these tables")


def burn(db: Connection, ids: int) -> None:
    db.execute(f"do $$ begin for n in 1..{ids} loop perform pg_current_xact_id(); commit; end loop; end $$".encode())


OTHERS: LiteralString = """
select a.backend_xid::text, concat_ws(' ', a.backend_type, a.pid, a.datname, a.state, a.xact_start, left(a.query, 200))
  from pg_stat_activity a where a.backend_xid is not null
   and (a.datname is distinct from current_database() or a.backend_type <> 'client backend')
union all select p.transaction::text, concat_ws(' ', 'prepared', p.gid, p.database, p.prepared)
  from pg_prepared_xacts p where p.database <> current_database()"""


def passed(db: Connection) -> None:
    """Wait until transactions of others in this server have ended, such as tests and autovacuum: they hold ranges."""
    begun = dict(db.execute(OTHERS).fetchall())
    try:
        wait_until(lambda: begun.keys().isdisjoint(dict(db.execute(OTHERS).fetchall())), "all have ended", seconds=90)
    except AssertionError as late:
        late.add_note(f"held by: {[was for xid, was in db.execute(OTHERS).fetchall() if xid in begun]}")
        raise


def held(db: Connection, at: datetime) -> list[tuple[Any, ...]]:
    return db.execute("select open_jobs, why from tallybook.held_ranges(%s)", [at]).fetchall()


# What goes, and what stays


def test_ended_jobs_go_when_their_time_is_over(db: Connection, now: datetime) -> None:
    """S3-21: a range of ended jobs stays until its newest end is past its retention; then it goes, on record."""
    hands = Hands(db)
    done(db, hands, 30)
    cut(db)
    assert prune(db, now + 6 * DAY) == 0
    assert db.execute(COUNT).fetchone() == (30, 30)
    assert prune(db, now + 8 * DAY) == 30
    assert db.execute(COUNT).fetchone() == (0, 0)
    rows = db.execute("select retention, entries, ended from tallybook.pruned").fetchall()
    assert rows == [("d", 30, {"completed": 30})]


def test_errors_outlive_their_jobs_where_the_queue_keeps_them(db: Connection, now: datetime) -> None:
    """S3-30: a queue's errors leave the log before its jobs, with them, or later, according to error_retention."""
    queues = ("a", "b", "c", "d")  # longer, as the jobs, shorter, dropped
    hands, old = Hands(db, *queues), now - 8 * DAY
    for queue in queues:
        enqueue(db, queue)
    while claimed := hands.claim():
        hands.fail(claimed[0], final=True)
    db.execute('update tallybook.outcome set ended_at = %s, error = error || \'{"message": "lost"}\'', [old])
    db.execute("update tallybook.claim set claimed_at = %s", [old])
    errors = "select queue, message from tallybook.error order by queue"
    assert db.execute(errors).fetchall() == [(queue, "lost") for queue in queues]
    db.execute("select tallybook.queue_set(q, error_retention => '9 days') from unnest('{a,d}'::text[]) q")
    db.execute("select tallybook.queue_set('c', error_retention => '1 h')")
    assert db.execute(errors).fetchall() == [(queue, "lost") for queue in "abd"]  # c's is still with its job
    assert one(db, "select count(*) from tallybook.attempt where state = 'dead'") == 4
    cut(db)
    assert prune(db, now) == 4
    assert db.execute(errors).fetchall() == [("a", "lost"), ("d", "lost")]
    db.execute("delete from tallybook.queue where name = 'd'")
    assert db.execute(errors).fetchall() == [("a", "lost")]
    assert prune(db, now) == 1  # d's copy
    assert prune(db, now + 2 * DAY) == 1  # a's
    assert one(db, "select count(*) from tallybook.error_kept") == 0


def test_an_error_is_copied_only_when_its_range_goes(db: Connection, connect: Connect, now: datetime) -> None:
    """S3-30: an error is in the log exactly once, both while a reader holds its range and after that has gone."""
    hands = Hands(db)
    enqueue(db)
    hands.fail(hands.claim()[0], final=True)
    db.execute("select tallybook.queue_set('q', error_retention => '1 year')")
    cut(db)
    reader = connect(autocommit=False)
    reader.execute("select from tallybook.outcome")
    pid = one(reader, "select pg_backend_pid()")  # through a pooler it differs from the connection's
    prune(db, now + 8 * DAY)
    assert [why for _, why in held(db, now + 8 * DAY)] == [f"a reader: pid {pid}"]
    assert one(db, "select count(*) from tallybook.error") == 1
    reader.rollback()
    assert prune(db, now + 8 * DAY) == 1
    assert one(db, "select count(*) from tallybook.error") == 1


def test_without_a_longer_retention_no_error_is_copied(db: Connection, now: datetime) -> None:
    """Control: _errors_keep does not read history if no queue keeps errors for longer than its class."""
    db.execute("select tallybook.queue_set('q', error_retention => '1 h')")
    db.execute("begin")
    db.execute("select tallybook._errors_keep('d', '7 days', '0', '18446744073709551615', %s)", [now])
    seen = db.execute(
        "select relname::text from pg_stat_xact_user_tables"
        " where relname ~ '^(outcome|entry)' and seq_scan + idx_scan > 0"
    ).fetchall()
    db.execute("rollback")
    assert seen == []


def test_the_lane_goes_on_where_it_was(db: Connection, now: datetime) -> None:
    """S3-21: a lane whose newest claim has gone continues behind it: no job is taken twice, none is left."""
    hands = Hands(db)
    done(db, hands, 5)
    enqueue(db, n=3)
    assert len(hands.claim(1)) == 1
    cut(db)
    before = one(db, "select max(claimed) from tallybook.claim")
    for job in [*hands.claim(10)]:
        hands.say("complete", job)
    db.execute("update tallybook.worker set seen_at = '-infinity'")
    db.execute("select tallybook.rescue(at => %s)", [now + 60 * S])
    db.execute("select tallybook.rescue(at => %s)", [now + 120 * S])
    hands = Hands(db, at="'infinity'")
    for job in hands.claim():
        hands.say("complete", job)
    burn(db, 20)
    cut(db)
    assert prune(db, now + 8 * DAY) == 9
    assert one(db, "select count(*) from tallybook.claim where jobs > 0") == 0
    assert one(db, "select max(claimed) from tallybook.claim") > before
    assert hands.claim() == []
    enqueue(db, n=4)
    assert len(hands.claim()) == 4


@pytest.mark.parametrize("kind", ["waits in a paused queue", "runs"])
def test_an_open_job_holds_its_range(db: Connection, now: datetime, kind: str) -> None:
    """S3-21: an open job of any age holds its whole range, with a reason; once it has ended, all of it goes."""
    hands = Hands(db)
    done(db, hands, 20)
    enqueue(db)
    jobs = hands.claim() if kind == "runs" else []
    cut(db)
    assert prune(db, now + 400 * DAY) == 0
    assert held(db, now + 400 * DAY) == [(1, "open jobs")]
    for job in jobs or hands.claim():
        hands.say("complete", job)
    assert prune(db, now + 401 * DAY) == 21
    assert held(db, now + 401 * DAY) == []


def test_the_claim_of_a_running_job_stays(db: Connection, now: datetime) -> None:
    """S3-21: a job of an old range that was claimed in a newer one holds both, so that its end finds its claim."""
    hands = Hands(db)
    enqueue(db)
    cut(db)
    (job,) = hands.claim()
    done(db, hands, 10)
    cut(db)
    assert prune(db, now + 30 * DAY) == 0
    assert ("open jobs") in [why for _, why in held(db, now + 30 * DAY)]
    hands.say("complete", job)
    assert prune(db, now + 31 * DAY) == 11


def test_control_without_the_look_at_claims_a_running_job_loses_its_claim(db: Connection, now: datetime) -> None:
    """Control: without the check of workers' claims, a running job's claim is pruned, and the job cannot end."""
    without(db, "_range_claims", "exists (select from tallybook._open_attempts(c.worker_id, c.id, c.id))", "false")
    hands = Hands(db)
    enqueue(db)
    cut(db)
    (job,) = hands.claim()
    done(db, hands, 10)
    cut(db)
    assert prune(db, now + 30 * DAY) == 10
    assert one(db, "select count(*) from tallybook.claim where lease = %s", job.lease) == 0


def test_control_without_the_count_an_open_job_is_lost(db: Connection, now: datetime) -> None:
    """Control: if a range counts as complete without its outcomes, an open job is pruned with it."""
    without(db, "_range_count", "if h.entries = h.outcomes then", "if true then")
    hands = Hands(db)
    done(db, hands, 5)
    enqueue(db)
    cut(db)
    assert prune(db, now + 30 * DAY) > 0
    assert hands.claim() == []


def test_a_job_that_others_wait_for_is_told_first(db: Connection, now: datetime) -> None:
    """A range with an ended job stays until parents_resolve has released the job's children."""
    hands = Hands(db)
    enqueue(db)
    (job,) = hands.claim()
    db.execute("select tallybook.enqueue_after('brief', 'work', %s)", [[job.id]])
    hands.say("complete", job)
    cut(db)
    assert prune(db, now + 30 * DAY) == 0
    assert held(db, now + 30 * DAY) == [(None, "jobs that wait for a job in this range")]
    assert one(db, "select released from tallybook.parents_resolve()") == 1
    assert prune(db, now + 31 * DAY) == 1


@pytest.mark.direct("watches which session waits for which")
def test_a_job_that_comes_to_wait_while_prune_waits_for_it_is_told(
    db: Connection, connect: Connect, now: datetime
) -> None:
    """A range stays if a job that waits for one in it is committed between prune's check and its lock."""
    hands = Hands(db)
    done(db, hands, 1)
    cut(db)
    job = one(db, "select max(job_id) from tallybook.entry")
    reader, producer, pruner = connect(autocommit=False), connect(autocommit=False), connect()
    one(reader, "select count(*) from tallybook.entry")
    assert prune(pruner, now + 30 * DAY) == 0, "all is checked, only the lock is missing"
    one(producer, "select tallybook.enqueue_after('brief', 'work', %s)", [job])
    reader.rollback()
    without(db, "_range_lock", "for try in 1..25 loop", "for try in 21..21 loop")  # instead of a few short attempts:
    without(db, "_range_lock", "'1ms'", "'0'")  # it waits until it gets the lock
    with behind(pruner) as pool:
        pruned = pool.submit(prune, pruner, now + 30 * DAY)
        wait_until(lambda: is_blocked(db, pruner), "prune waits for the producer")
        producer.commit()
        assert pruned.result(timeout=20) == 0
    assert one(db, "select released from tallybook.parents_resolve()") == 1
    assert prune(db, now + 31 * DAY) == 1


def test_a_place_of_an_ended_job_does_not_outlive_its_outcome(db: Connection, now: datetime) -> None:
    """A permit is free once the history of its holder has gone, even without a release in between."""
    db.execute("select tallybook.concurrency_limit_set('one', 1)")
    hands = Hands(db)
    enqueue(db)
    (job,) = hands.claim()
    db.execute(
        "insert into tallybook.concurrency_holder (xid, seq, job_id, retention, name)"
        " select xid, seq, job_id, retention, 'one' from tallybook.entry where job_id = %s",
        [job.id],
    )
    hands.say("complete", job)
    cut(db)
    assert prune(db, now + 30 * DAY) == 1
    assert one(db, "select count(*) from tallybook.concurrency_holder") == 0


def test_two_prunes_at_once_lose_no_open_job(db: Connection, connect: Connect, now: datetime) -> None:
    """S3-21: a prune beside an open one does nothing and does not wait: no page counts twice, no open job goes."""
    at = now + 30 * DAY
    done(db, Hands(db), 2)
    enqueue(db, n=2)
    cut(db)
    db.execute("select tallybook.fold()")
    db.execute("select tallybook.prune(%s)", [at])  # the entries are counted, the outcomes are next
    first = connect(autocommit=False)
    assert first.execute("select effect, again from tallybook.prune(%s)", [at]).fetchone() == (0, True)
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(lambda: db.execute("select effect, again from tallybook.prune(%s)", [at]).fetchone())
        try:
            answer = beside.result(timeout=60)
        except TimeoutError:
            answer = None
        first.commit()
        beside.result()
    assert prune(db, at) == 0
    assert (answer, db.execute(COUNT).fetchone()) == ((None, False), (4, 2))


@pytest.mark.direct("holds a lock of a transaction")
def test_a_lane_that_somebody_keeps_locked_holds_its_range_only(
    db: Connection, connect: Connect, now: datetime
) -> None:
    """S3-21: an open claim holds only the range of its lane's cursor; prune names it and has no more to do."""
    hands = Hands(db, "q", "other")
    done(db, hands, 3)
    cut(db)
    open_claim = connect(autocommit=False)
    open_claim.execute("select pg_advisory_xact_lock(1413565441, lane_id) from tallybook.lane")
    assert prune(db, now + 30 * DAY) == 0
    assert held(db, now + 30 * DAY) == [(None, "a claim that is not committed")]
    open_claim.rollback()
    assert prune(db, now + 30 * DAY) == 3


def test_the_counters_come_first(db: Connection, now: datetime) -> None:
    """A range that the counters have not passed stays, and the reason is named."""
    done(db, Hands(db), 3)
    cut(db)
    db.execute(
        "create or replace function tallybook._folded(p_below xid8) returns boolean language sql as 'select false'"
    )
    assert prune(db, now + 30 * DAY) == 0
    assert held(db, now + 30 * DAY) == [(None, "the counters are behind")]


def test_a_rewritten_table_is_counted_anew(db: Connection, now: datetime) -> None:
    """Counts of a range are valid for its files only: a table that was rewritten or restored is counted again."""
    hands = Hands(db)
    done(db, hands, 5)
    enqueue(db)
    cut(db)
    prune(db, now + 30 * DAY)
    db.execute("update tallybook.history_range set complete = true, entries = 6, outcomes = 6, newest_end = %s", [now])
    db.execute("vacuum full tallybook.outcome_default_1")
    assert prune(db, now + 31 * DAY) == 0
    assert one(db, "select count(*) from tallybook.entry") == 6


def test_a_range_that_is_written_again_is_counted_anew(db: Connection, now: datetime) -> None:
    """Counts of a range from another cluster are no longer valid once this cluster writes to it."""
    enqueue(db)
    prune(db, now)
    db.execute("update tallybook.history_range set complete = true, quiet_since = %s, newest_end = %s", [now, now])
    prune(db, now)
    cut(db)
    assert prune(db, now + 30 * DAY) == 0
    assert held(db, now + 30 * DAY) == [(1, "open jobs")]


# Nobody waits


@pytest.mark.direct("holds locks of a session")
@pytest.mark.parametrize("insists", [False, True], ids=["prune", "control"])
def test_a_long_reader_makes_nobody_wait(db: Connection, connect: Connect, now: datetime, insists: bool) -> None:
    """S3-21: prune tries later while a dump reads a range, and claims do not wait; control: a plain TRUNCATE."""
    hands = Hands(db)
    done(db, hands, 5)
    cut(db)
    enqueue(db, n=2)
    reader, dropper = connect(autocommit=False), connect()
    pid = one(reader, "select pg_backend_pid() from (select from tallybook.entry_default_1 limit 1) x")
    if insists:
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(dropper.execute, "truncate tallybook.entry_default_1")
            wait_until(
                lambda: one(
                    db,
                    "select count(*) from pg_stat_activity"
                    " where datname = current_database() and wait_event_type = 'Lock'",
                ),
                "the truncate waits",
            )
            db.execute("set lock_timeout = '100ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                db.execute("select tallybook.claim(%s, '{q}', '{1}', gen_random_uuid())", [hands.worker])
            reader.rollback()
            waits.result()
        return
    db.execute("set lock_timeout = '1ms'")
    assert prune(dropper, now + 30 * DAY) == 0
    assert len(hands.claim(1)) == 1
    assert held(db, now + 30 * DAY) == [(None, f"a reader: pid {pid}")]
    reader.rollback()
    assert prune(dropper, now + 30 * DAY) == 5


@pytest.mark.direct("holds locks of a session")
def test_a_range_is_cut_only_where_nobody_is(db: Connection, connect: Connect, now: datetime) -> None:
    """S3-21: a range is cut only after an open producer has ended; that one does not wait, and is named."""
    producer = connect(autocommit=False)
    pid = one(producer, "select pg_backend_pid() from (select tallybook.enqueue('q', 'work')) x")
    enqueue(db)
    prune(db, now)
    prune(db, now + DAY)
    producer.execute("set lock_timeout = '1ms'")
    producer.execute("select tallybook.enqueue('q', 'work')")
    assert len(ranges(db, "entry_default")) == 1
    assert held(db, now + 8.74 * DAY) == []
    assert held(db, now + 8.75 * DAY) == [(None, f"a reader: pid {pid}")]
    producer.commit()
    prune(db, now + DAY)
    assert len(ranges(db, "entry_default")) == 2


# Ranges


def ranges(db: Connection, table: str) -> list[tuple[Any, ...]]:
    query = "select r.lower, r.upper from tallybook._ranges(%s) r order by 1"
    return db.execute(query, [f"tallybook.{table}"]).fetchall()


def test_the_range_in_use_is_cut_by_time(db: Connection, now: datetime) -> None:
    """S3-21: a range is cut once it has held something for an eighth of the retention; an empty one never is.

    Entries, claims and outcomes have the same ranges, without a gap.
    """
    prune(db, now - DAY)
    enqueue(db)
    prune(db, now)
    prune(db, now + 0.87 * DAY)
    assert len(ranges(db, "entry_default")) == 1
    prune(db, now + 0.88 * DAY)
    prune(db, now + 5 * DAY)
    found = ranges(db, "entry_default")
    assert len(found) == 2
    assert found == ranges(db, "claim_default") == ranges(db, "outcome_default")
    assert found[0][0] == 0 and found[-1][1] is None
    assert [upper for _, upper in found[:-1]] == [lower for lower, _ in found[1:]]
    assert len(ranges(db, "entry_long")) == len(ranges(db, "entry_brief")) == 1


def test_a_clock_that_was_set_back_does_not_stop_the_cuts(db: Connection, now: datetime) -> None:
    """A range that was begun in the future counts as begun now."""
    enqueue(db)
    prune(db, now + 100 * DAY)
    prune(db, now)
    prune(db, now + DAY)
    assert len(ranges(db, "entry_default")) == 2


@pytest.mark.slow
def test_never_more_than_sixteen_ranges(db: Connection, now: datetime) -> None:
    """S3-21: old empty ranges become one, so that a class never has more than 16, however long it lives."""
    hands = Hands(db)
    db.execute("update tallybook.retention_class set keep = '1 hour'")
    most = 0
    for n in range(24):
        done(db, hands, 2)
        prune(db, now + n * timedelta(minutes=8))
        most = max(most, len(ranges(db, "entry_default")))
    assert 8 < most <= 16
    assert one(db, "select count(*) from tallybook.entry") <= 16, "what was ended has gone, but for the ranges in use"
    assert one(db, "select sum(entries) from tallybook.pruned") >= 25


def test_at_the_limit_of_ranges_the_reason_is_named(db: Connection, now: datetime) -> None:
    """If open jobs hold so many ranges that no more can be created, that is named as the reason until they end."""
    without(db, "_ranges_kept", "c_most constant int := 16", "c_most constant int := 5")
    for n in range(10):
        enqueue(db)
        prune(db, now + n * DAY)
    assert len(ranges(db, "entry_default")) == 5
    found = held(db, now + 60 * DAY)
    assert found[-1] == (None, "too many ranges")
    assert [why for _, why in found[:-1]] == ["open jobs"] * 4
    hands = Hands(db)
    hands.complete(*hands.claim())
    passed(db)
    prune(db, now + 60 * DAY)
    prune(db, now + 61 * DAY)
    assert one(db, "select count(*) from tallybook.entry") == 0
    assert held(db, now + 61 * DAY) == []


# Bursts


@pytest.mark.parametrize("before", [0, 5], ids=["first of all", "after quiet hours"])
def test_a_burst_leaves_in_time(db: Connection, now: datetime, before: int) -> None:
    """S3-21: every ended job leaves within 1.25 times its retention after its end, even after a burst.

    The burst uses up transaction ids and space a thousand times as fast as what comes before and after it.
    """

    def large(db: Connection, jobs: int) -> None:
        """Enqueue jobs in one transaction, one to a page of 8 kB."""
        db.execute(
            "do $$ declare l regclass; begin for l in select r.leaf"
            " from tallybook._families() f, tallybook._ranges(f.parents[1]) r"
            " where f.name = 'default' loop execute format('alter table %s set (fillfactor = 10)', l); end loop; end $$"
        )
        db.execute(
            "select tallybook.enqueue_many(array_agg(text 'q'), array_agg(text 'work'),"
            " array_agg(jsonb_build_object('x', repeat('x', 900))::text)) from generate_series(1, %s)",
            [jobs],
        )

    def finish(db: Connection, hands: Hands, at: datetime) -> None:
        """Claim all that can be claimed, and end it at this time."""
        while jobs := hands.claim(5000):
            db.execute(
                "select tallybook.complete_many(%s, %s, %s, at => %s)",
                ([j.lease for j in jobs], [j.id for j in jobs], [j.attempt for j in jobs], at),
            )
        db.execute("update tallybook.claim set claimed_at = %s where claimed_at < clock_timestamp()", [at])

    def pruned(at: datetime) -> bool:
        """Prune, and return whether nothing unrelated held a range."""
        passed(db)
        prune(db, at)
        return bool(one(db, "select not exists (select from tallybook.history_range where held is not null)"))

    keep, step = timedelta(hours=8), timedelta(hours=1)
    db.execute("update tallybook.retention_class set keep = %s where name = 'default'", [keep])
    hands, at = Hands(db), now + DAY
    for n in range(before + 12):
        at += step
        enqueue(db, n=2)
        if n == before:
            burn(db, 8000)
            large(db, 2200)
        finish(db, hands, at)
        wait_until(partial(pruned, at), "no other test and no autovacuum holds a range", seconds=90)
        late = one(db, "select count(*) from tallybook.outcome where ended_at < %s", at - 1.25 * keep)
        assert late == 0, (n, ranges(db, "entry_default"))
    assert one(db, "select sum(entries) from tallybook.pruned") > 2200
    assert held(db, at) == []


@pytest.mark.slow
def test_exactly_once_whatever_is_pruned_in_between(db: Connection, now: datetime) -> None:
    """S3-21: with short ranges and random claims, ends, cancels and prunes each job runs once and none is lost."""
    draw = random.Random(7)
    hands = [Hands(db, at="'infinity'") for _ in range(3)]
    left: list[tuple[Hands, Any]] = []
    completed: list[int] = []
    total, at, cancelled = 0, now, 0
    for step in range(90):
        at += DAY
        what = draw.random()
        if what < 0.35:
            total += len(enqueue(db, n=draw.randint(1, 6)))
        elif what < 0.6:
            hand = draw.choice(hands)
            left += [(hand, job) for job in hand.claim(draw.randint(1, 5))]
        elif what < 0.66:
            job = one(db, "select tallybook.enqueue('q', 'work')")
            assert one(db, "select tallybook.cancel(%s)", job) == "cancelled"
            total, cancelled = total + 1, cancelled + 1
        elif what < 0.9 and left:
            hand, job = left.pop(draw.randrange(len(left)))
            if job.attempt < 4 and draw.random() < 0.3:
                db.execute("select tallybook.fail(%s, %s, %s, '{}', '0')", [job.lease, job.id, job.attempt])
                db.execute("select tallybook.promote(at => 'infinity')")
            else:
                assert hand.say("complete", job), "its claim is on record, however old"
                completed.append(job.id)
        if step % 9 == 0:
            cut(db)
        if step % 6 == 0:
            prune(db, at)
            assert miscounted(db) == [], "the counters know what has gone"
    while True:
        for hand, job in left:
            assert hand.say("complete", job)
            completed.append(job.id)
        left = [(hands[0], job) for job in hands[0].claim(50)]
        if not left:
            break
    assert sorted(completed) == sorted(set(completed))
    assert len(completed) + cancelled == total
    cut(db)
    assert prune(db, at + 30 * DAY) > 0
    assert db.execute(COUNT).fetchone() == (0, 0)
    sums = db.execute(
        "select sum(entries), sum((ended ->> 'completed')::int), sum((ended ->> 'cancelled')::int)"
        " from tallybook.pruned"
    ).fetchone()
    assert sums is not None and sums[1:] == (len(completed), cancelled)
    assert sums[0] == one(db, "select sum(v.value::int) from tallybook.pruned p, jsonb_each_text(p.ended) v"), (
        "each entry had its outcome"
    )


def test_the_reads_of_a_claim_do_not_grow_with_history(db: Connection, now: datetime) -> None:
    """S3-20: a claim reads the same pages in the sixth range as in the second, but for one probe per range."""
    hands = Hands(db)

    def cost() -> int:
        enqueue(db, n=10)
        found = pages(db, "select tallybook.claim(%s, '{q}', '{1}', gen_random_uuid())", hands.worker)
        hands.complete(*hands.claim())
        return found

    done(db, hands, 50)
    cut(db)
    few = cost()
    done(db, hands, 1000)
    for _ in range(4):
        cut(db)
        done(db, hands, 100)
    assert cost() < few + 4 * 12, few


STEP: LiteralString = """
select tallybook._range_split(f.parents, (select max(r.lower) from tallybook._ranges(f.parents[1]) r
                                           where r.lower <= pg_snapshot_xmax(pg_current_snapshot())::text::numeric))
  from tallybook._families() f where f.name = 'default'"""


def in_steps(db: Connection) -> None:
    """Let every range count as large, whatever it holds."""
    without(db, "_range_split", "c_small constant bigint := 1048576", "c_small constant bigint := 0")


def cut_again(db: Connection) -> None:
    """Cut the range in use, however many tries its locks take."""
    before = len(ranges(db, "entry_default"))
    for _ in range(2000):
        db.execute(STEP)
        if len(ranges(db, "entry_default")) > before:
            return
    raise AssertionError("it is never cut")


def misplaced(db: Connection) -> int:
    """Return how many rows are in a range to which they do not belong."""
    leaves = db.execute(
        "select r.leaf::text, pg_get_partition_constraintdef(r.leaf)"
        " from tallybook._families() f, unnest(f.parents) p, lateral tallybook._ranges(p) r"
    ).fetchall()
    count = "select count(*) from {} where not ({})"
    return sum(one(db, count.format(leaf, bounds)) for leaf, bounds in leaves if bounds)


def test_a_large_range_is_cut_without_a_look_at_its_rows(db: Connection) -> None:
    """S3-21: a large range is validated beside producers; under the lock PostgreSQL relies on its constraint."""
    hands = Hands(db)
    in_steps(db)
    done(db, hands, 3)
    said: list[str] = []
    db.add_notice_handler(lambda d: said.append(d.message_primary or ""))
    db.execute("set client_min_messages = 'debug1'")
    for _ in range(4):  # the constraints, and each table on its own
        assert one(db, STEP) is True
        done(db, hands, 1)
        assert len(ranges(db, "entry_default")) == 1
    said.clear()
    assert one(db, STEP) is True
    db.execute("reset client_min_messages")
    implied = [text.split('"')[1] for text in said if "is implied by existing constraints" in text]
    assert implied == ["entry_default_1", "claim_default_1", "outcome_default_1"]
    done(db, hands, 1)
    assert len(ranges(db, "entry_default")) == 2
    assert one(db, "select count(*) from tallybook.entry_default_1") == 7
    assert one(db, "select count(*) from pg_constraint where conname = 'what lies in a range that is being cut'") == 0
    assert misplaced(db) == 0


def test_control_a_bound_that_is_known_too_early_fails_producers(db: Connection) -> None:
    """Control: with the bound of the cut in the constraint, a producer before the cut gets an error."""
    in_steps(db)
    early = "format('%I < %L::xid8', k.key, pg_snapshot_xmax(pg_current_snapshot()))"
    without(db, "_range_split", "format('%I < tallybook._range_cut()', k.key)", early)
    enqueue(db)
    db.execute(STEP)
    with pytest.raises(psycopg.errors.CheckViolation):
        enqueue(db)


def test_control_a_cut_behind_what_was_written_is_seen(db: Connection) -> None:
    """Control: if a range is cut right behind the first job that was written, the others are in the wrong one."""
    guard = (
        "v_next := greatest(pg_snapshot_xmax(pg_current_snapshot())::text::numeric,"
        " pg_current_xact_id()::text::numeric + 1);"
    )
    in_steps(db)
    first = "(select e.xid::text::numeric from tallybook.entry e order by e.xid limit 1)"
    without(db, "_range_split", guard, f"v_next := {first} + 1;")
    for _ in range(3):
        enqueue(db)
    cut_again(db)
    assert misplaced(db) == 2


def test_no_producer_and_no_claim_fails_beside_cuts(db: Connection, connect: Connect) -> None:
    """S3-21: while ranges are cut again and again beside producers and a claimer, each job runs once, in its range."""
    in_steps(db)
    more = True

    def produce() -> int:
        conn, jobs = connect(), 0
        while more:
            enqueue(conn)
            jobs += 1
        return jobs

    def consume() -> list[int]:
        hands, ended = Hands(connect()), list[int]()
        while more:
            for job in hands.claim(20):
                assert hands.say("complete", job)
                ended.append(job.id)
        return ended

    enqueue(db)
    with ThreadPoolExecutor(3) as pool:
        producers, consumer = [pool.submit(produce) for _ in range(2)], pool.submit(consume)
        try:
            for _ in range(4):
                cut_again(db)
        finally:
            more = False
        total, ended = 1 + sum(one.result() for one in producers), consumer.result()
    hands = Hands(db)
    while jobs := hands.claim():
        hands.complete(*jobs)
        ended += [job.id for job in jobs]
    assert sorted(ended) == sorted(set(ended))
    assert len(ended) == total
    assert misplaced(db) == 0
    assert miscounted(db) == []


@pytest.mark.direct("holds locks of a session")
@pytest.mark.parametrize("prepared", [False, True], ids=["open", "prepared"])
def test_an_open_transaction_that_holds_history_is_named(
    db: Connection, connect: Connect, now: datetime, prepared: bool
) -> None:
    """S3-21: a transaction that is still open holds what was written before its first write, and is named."""
    done(db, Hands(db), 3)
    writer = connect(autocommit=False)
    pid = one(writer, "select pg_backend_pid(), pg_current_xact_id()")
    if prepared:
        writer.execute("prepare transaction 'a sale'")
    try:
        cut(db, ended=False)
        prune(db, now)
        prune(db, now + 30 * DAY)
        # Other tests' transactions in the same cluster may be named beside it.
        holder = "the prepared transaction 'a sale'" if prepared else f"pid {pid}"
        whys = [why for _, why in held(db, now + 30 * DAY) if holder in why]
        assert whys and all(why.startswith("an open transaction: ") for why in whys)
        doctor = "select finding from tallybook.doctor(at => %s) where name = 'partitions'"
        assert holder in one(db, doctor, now + 30 * DAY)
    finally:
        writer.rollback()
        if prepared:
            db.execute("rollback prepared 'a sale'")
    passed(db)
    prune(db, now + 30 * DAY)
    assert db.execute(COUNT).fetchone() == (0, 0)
    assert held(db, now + 38 * DAY) == []


def test_jobs_of_another_cluster_that_hold_a_range_are_named(db: Connection, now: datetime) -> None:
    """A range with jobs from a cluster that was ahead of this one is not cut, whatever its size; that is named."""
    for large_ones in (False, True):
        if large_ones:
            in_steps(db)
        enqueue(db)
        db.execute(
            "insert into tallybook.lane (queue, priority, part, retention, retired_at)"
            " values ('old', 2, '', 'd', now() - interval '1 day')"
        )
        db.execute(
            "insert into tallybook.entry"
            " (xid, seq, job_id, enqueued_at, lane_id, attempt, failures, crashes, retention, task, args)"
            " select (e.xid::text::bigint + 100000)::text::xid8, e.seq + 1000, e.job_id + 1000,"
            " e.enqueued_at, e.lane_id, 1, 0, 0, 'd', 'work', '{}' from tallybook.entry e limit 1"
        )
        prune(db, now)
        prune(db, now + DAY)
        assert len(ranges(db, "entry_default")) == 1
        assert held(db, now + 9 * DAY) == [(None, "jobs of another cluster")]


# Messages about jobs that have left


def test_a_job_that_has_left_is_said_to_be_past_its_retention(db: Connection, now: datetime) -> None:
    """S3-21: cancel and retry report of a pruned id that it is past its retention, and of an unknown id nothing."""
    done(db, Hands(db), 3)
    cut(db)
    for job, said in ((2, None), (10**9, None)):
        assert one(db, "select tallybook._pruned_hint(%s)", job) is said
    prune(db, now + 30 * DAY)
    for verb in ("cancel", "retry"):
        with pytest.raises(psycopg.Error) as caught:
            db.execute(f"select tallybook.{verb}(2)")
        assert (caught.value.sqlstate, caught.value.diag.message_primary) == ("TB002", "there is no job 2")
        assert "its retention has passed" in str(caught.value.diag.message_detail)
        with pytest.raises(psycopg.Error) as caught:
            db.execute(f"select tallybook.{verb}(1000000000)")
        assert not caught.value.diag.message_detail
    assert db.execute("select tallybook.state(2), (select count(*) from tallybook.result(2))").fetchone() == (None, 0)


# How long


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("'short', '1 day'", 'there is no retention class "short"'),
        ("null, '1 day'", "there is no retention class null"),
        ("'brief', '59 s'", "history cannot be kept for 00:00:59"),
        ("'brief', '101 years'", "history cannot be kept for 101 years"),
        ("'brief', null", "history cannot be kept for null"),
    ],
)
def test_a_retention_that_cannot_be_is_refused(db: Connection, call: str, said: str) -> None:
    """S3-21: an unknown class and a time out of range raise TB005, and nothing is changed."""
    with pytest.raises(psycopg.Error) as caught:
        db.execute(f"select tallybook.retention_set({call})".encode())
    assert (caught.value.sqlstate, caught.value.diag.message_primary) == ("TB005", said)
    assert one(db, "select keep from tallybook.retentions where class = 'brief'") == timedelta(hours=1)


def test_a_shorter_retention_holds_at_once(db: Connection, now: datetime) -> None:
    """S3-21: history that was kept for a week goes after an hour once its class has an hour."""
    done(db, Hands(db), 3)
    cut(db)
    assert prune(db, now + 2 * timedelta(hours=1)) == 0
    assert one(db, "select tallybook.retention_set('default', '1 hour')") is True
    assert one(db, "select tallybook.retention_set('default', '1 hour')") is False
    assert prune(db, now + 2 * timedelta(hours=1)) == 3
