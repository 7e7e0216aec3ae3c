"""The counters in SQL: the effect of each verb, a recount after each, and the cost of reading them."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import LiteralString

import psycopg
import pytest

from support.broken import without
from support.database import Connect, Connection, call, miscounted, one
from support.hands import Hands, put, put_many
from support.sessions import pages

STATES = ("scheduled", "retrying", "waiting", "available", "running", "dead")
ENDS = ("completed", "failed", "snoozed", "cancelled", "lost", "moved", "died")
FOLD = "select tallybook.fold()"


def counted(db: Connection) -> dict[str, int]:
    """Return the non-zero counts of all queues together."""
    sums = ", ".join(f"coalesce(sum({what}), 0)::int" for what in (*STATES, *ENDS))
    (row,) = db.execute(f"select {sums} from tallybook.counts()")  # noqa: S608
    return {what: n for what, n in zip((*STATES, *ENDS), row, strict=True) if n}


class Watched:
    """Check each step's effect on the counters before and after a fold, and against a recount."""

    def __init__(self, db: Connection) -> None:
        self.db = db
        self.last = counted(db)

    @contextmanager
    def changes(self, **expected: int) -> Iterator[None]:
        yield
        assert miscounted(self.db) == []
        now = counted(self.db)
        self.db.execute(FOLD)
        assert (counted(self.db), miscounted(self.db)) == (now, [])
        found = {what: now.get(what, 0) - self.last.get(what, 0) for what in {*now, *self.last}}
        assert {what: n for what, n in found.items() if n} == expected
        self.last = now


@pytest.fixture
def watched(db: Connection) -> Watched:
    return Watched(db)


def test_what_is_put_in_and_falls_due_is_counted(db: Connection, watched: Watched) -> None:
    """S3-14, S3-16, S3-17: enqueue, promote, cancel and retry move jobs between counts; a recount agrees each time."""
    with watched.changes(available=1):
        put(db)
    with watched.changes(available=2, scheduled=1):
        db.execute(
            "select tallybook.enqueue(q, 't', run_at => at) from unnest('{q,r,q}'::text[],"
            " array[null, null, now() + interval '1 h']) j(q, at)"
        )
    with watched.changes(), db.transaction(force_rollback=True):
        put(db)
    with watched.changes(scheduled=-1, available=1):
        db.execute("select tallybook.promote(at => clock_timestamp() + interval '2 h')")
    later = put(db, run_at="2100-01-01")
    with watched.changes(scheduled=1):  # the cancel is an intent: the job stays scheduled until it is carried out
        db.execute("select tallybook.cancel(%s)", (later,))
    with watched.changes(scheduled=-1, available=1):
        db.execute("select tallybook.promote(at => '2100-01-02')")
    with watched.changes(available=-5, cancelled=1, running=4):
        assert len(Hands(db, "q", "r").start()) == 3
        assert len(Hands(db, "r").start()) == 1
    with watched.changes(available=1):
        db.execute("select tallybook.retry(%s)", (later,))


def test_how_attempts_end_is_counted(db: Connection, watched: Watched) -> None:
    """S3-14, S3-16, S3-17: complete, fail, retry, snooze, move, cancel, expire, death, rescue, each with a recount."""
    hands = Hands(db)
    for _ in range(9):
        put(db)
    watched.last = counted(db)
    with watched.changes(available=-9, running=9):
        a, b, c, d, e, f, g, h, _ = hands.start()
    with watched.changes(running=-1, completed=1):
        hands.complete(a)
    with watched.changes():
        assert hands.say("complete", a) is True  # a repeated call
    with watched.changes(running=-1, failed=1, retrying=1):
        hands.fail(b, "1 h")
    with watched.changes(running=-1, failed=1, available=1):
        hands.fail(c)
    with watched.changes(running=-1, died=1, dead=1):
        hands.fail(d, final=True)
    with watched.changes(running=-1, snoozed=1, scheduled=1):
        hands.say("snooze", e, timedelta(hours=1))
    with watched.changes(running=-1, died=1, dead=1):
        hands.say("expire", f)
    with watched.changes(running=-1, moved=1, available=1):
        hands.say("unclaim", g, timedelta(0))
    with watched.changes():
        db.execute("select tallybook.cancel(%s)", (h.id,))  # it is running: its worker has to end it
    with watched.changes(running=-1, cancelled=1):
        hands.say("cancel_running", h)
    with watched.changes(dead=-1, available=1):
        db.execute("select tallybook.retry(%s)", (d.id,))
    with watched.changes(dead=-1):
        db.execute("select tallybook.drop_dead(%s)", (f.id,))
    with watched.changes(running=-1, lost=1, available=1):
        hands.rescued()
    with watched.changes(retrying=-1, scheduled=-1, available=2):
        db.execute("select tallybook.promote(at => clock_timestamp() + interval '2 h')")
    with watched.changes(available=-6, completed=6):
        assert len(Hands(db).run_all()) == 6
    assert watched.last == {"completed": 7, "failed": 2, "snoozed": 1, "moved": 1, "cancelled": 1, "lost": 1, "died": 2}


def test_what_waits_is_counted(db: Connection, watched: Watched) -> None:
    """S3-14, S3-17: jobs that wait for order keys, parents and fair keys are counted, with a recount at each step."""
    hands = Hands(db)
    with watched.changes(available=3):
        parent, *_ = (put(db, order_key="k") for _ in range(3))
    with watched.changes(available=-3, running=1, waiting=2, moved=2):
        (first,) = hands.start()
    with watched.changes(waiting=1):
        child = one(db, "select tallybook.enqueue_after('q', 'then', array[%s::bigint])", parent)
    with watched.changes(running=-1, completed=1, waiting=-1, available=1):
        hands.complete(first)
    with watched.changes(waiting=-1, available=1):
        db.execute("select tallybook.parents_resolve()")
    assert one(db, "select state from tallybook.job where id = %s", child) == "available"
    with watched.changes(waiting=2):
        for tenant in ("x", "y"):
            db.execute("select tallybook.enqueue('q', 'fair', options => %s)", (f'{{"fair_key": "{tenant}"}}',))
    with watched.changes(waiting=-2, available=2):
        db.execute("select tallybook.fair_release()")
    with watched.changes(waiting=-1, available=-4, completed=5):
        hands.run_all()


def test_subjects_are_counted(db: Connection, watched: Watched) -> None:
    """S3-14, S3-17: a subject that is pushed, changed, run, rescheduled and completed counts as its job does."""
    hands = Hands(db)
    with watched.changes(available=1):
        db.execute("select tallybook.subject_push('q', 't', 'one')")
    with watched.changes(scheduled=1):
        db.execute("select tallybook.subject_push('q', 't', 'two', run_at => now() + interval '1 day')")
    with watched.changes():
        db.execute("select tallybook.subject_push('q', 't', 'two')")
    with watched.changes(scheduled=-1, available=1):
        db.execute("select tallybook.subject_upsert('q', 't', 'two', run_at => now() - interval '1 s')")
        db.execute("select tallybook.promote()")
    with watched.changes(available=-2, running=2):
        jobs = hands.start()
    with watched.changes(running=-1, snoozed=1, scheduled=1):
        db.execute(
            "select tallybook.subject_reschedule(%s, %s, %s, clock_timestamp() + interval '1 h')",
            (jobs[0].lease, jobs[0].id, jobs[0].attempt),
        )
    with watched.changes(running=-1, completed=1):
        db.execute("select tallybook.subject_complete(%s, %s, %s)", (jobs[1].lease, jobs[1].id, jobs[1].attempt))


def test_attempts_in_the_millions_are_counted(db: Connection) -> None:
    """A subject that runs every ten seconds has 2,200,000 attempts after eight months; a thousand are due at once."""
    db.execute("select tallybook.enqueue('q', 't', run_at => now() + interval '1 h') from generate_series(1, 1000)")
    db.execute("update tallybook.scheduled set attempt = 2200000")
    db.execute("select tallybook.promote(at => now() + interval '2 h')")
    db.execute(FOLD)
    assert (counted(db), miscounted(db)) == ({"available": 1000}, [])


def test_a_truncated_queue_is_counted(db: Connection, watched: Watched) -> None:
    """S3-36: truncate ends available and scheduled jobs in batches of 1,000, and every step agrees with a recount."""
    db.execute(
        "select tallybook.enqueue('q', t)"
        " from unnest(array_fill('a'::text, '{1500}') || array_fill('b'::text, '{1500}')) t"
    )
    db.execute("select tallybook.enqueue('q', 'a', run_at => now() + interval '1 h') from generate_series(1, 50)")
    Hands(db).claim(10)
    watched.last = counted(db)
    mark, remain = None, True
    with watched.changes(available=-2990, scheduled=-50, cancelled=3040):
        while remain:
            mark, remain = db.execute(
                "select mark, remain from tallybook.queue_truncate('q', max_jobs => 1000, mark => %s)", (mark,)
            ).fetchone()  # type: ignore[misc]
            mark = psycopg.types.json.Jsonb(mark)
            assert miscounted(db) == []
    assert watched.last == {"running": 10, "cancelled": 3040}


@pytest.mark.parametrize("line", [30, 2200], ids=["a short line", "a long line"])
def test_tasks_that_share_a_lane_are_told_apart(db: Connection, line: int) -> None:
    """S4-15: if several tasks share a lane, available and running are exact per task, whichever is smaller."""
    db.execute(
        "select tallybook.enqueue('q', (array['a', 'b', 'c'])[1 + n %% 3]) from generate_series(1, %s) n", (line + 20,)
    )
    hands = Hands(db)
    jobs = hands.claim(20)
    hands.complete(*jobs[:5])
    hands.fail(jobs[5], "1 h")
    tasks: LiteralString = "select task, state, count(*)::int from tallybook.job group by 1, 2"
    for step in (FOLD, "select tallybook.recount()", FOLD):
        seen: LiteralString = "select task, state, jobs::int from tallybook.queue_status where queue = 'q'"
        assert sorted(db.execute(seen).fetchall()) == sorted(db.execute(tasks).fetchall())
        assert miscounted(db) == []
        db.execute(step)
    running = dict(db.execute("select task, running from tallybook.counts()").fetchall())
    assert sum(running.values()) == 14


@pytest.mark.slow
def test_what_has_run_for_long_before_a_long_line_costs_no_reader_all_claims_since(db: Connection) -> None:
    """S3-15: in a lane of several tasks, a count reads the newest claims and each worker's oldest open one only."""
    hands = Hands(db)
    many: LiteralString = "select tallybook.enqueue('q', 'short') from generate_series(1, %s)"
    for task in ("long", "middle"):
        db.execute("select tallybook.enqueue('q', %s)", (task,))
        assert len(hands.claim(1)) == 1
        db.execute(many, (3_000,))
        while jobs := hands.claim(500):
            hands.complete(*jobs)
    db.execute(many, (2_500,))
    hands.claim(3)
    db.execute(FOLD)
    seen: LiteralString = "select task, available::int, running::int from tallybook.counts() order by 1"
    # The middle job's claim is not read: the job counts under the most frequent task. The totals are right.
    assert db.execute(seen).fetchall() == [("long", 0, 1), ("middle", 1, 0), ("short", 2_496, 4)]
    assert one(db, "select array[available, running]::text from tallybook.queue_stats") == "{2497,5}"
    assert miscounted(db) == [], "one job of the queue may be of another task"


def unattributed(db: Connection) -> None:
    """Make a lane of several tasks with one running job whose claim is not read, so it counts under another task."""
    without(db, "_counted_of", "<= 2000", "<= 2")
    without(db, "_split", "v_seen >= 3000", "v_seen >= 3")
    without(db, "_split", "v_seen >= 2000", "v_seen >= 1")
    hands = Hands(db)
    for task in ("long", "middle"):
        db.execute("select tallybook.enqueue('q', %s)", (task,))
        assert len(hands.claim(1)) == 1
        db.execute("select tallybook.enqueue('q', 'short') from generate_series(1, 3)")
        hands.complete(*hands.claim(3))
    db.execute("select tallybook.enqueue('q', 'short') from generate_series(1, 10)")
    hands.claim(3)
    seen: LiteralString = "select task, available::int, running::int from tallybook.counts() order by 1"
    assert db.execute(seen).fetchall() == [("long", 0, 1), ("middle", 1, 0), ("short", 6, 4)]


def test_verify_compares_what_people_read(db: Connection) -> None:
    """S4-15: verify allows tasks to differ by as many jobs as counts leaves unattributed; it reports any more."""
    unattributed(db)
    assert miscounted(db) == []
    db.execute(
        "insert into tallybook.tally (lane_id, n, attempts, what, task)"
        " select l.lane_id, x.n, x.n, 'opened', x.task"
        " from tallybook.lane l, (values (2, 'long'), (-2, 'short')) x(n, task)"
    )
    found = [("q", "long", "available"), ("q", "short", "available")]
    assert sorted(row[:3] for row in miscounted(db)) == found


def test_verify_finds_a_job_that_nobody_counts(db: Connection) -> None:
    """S4-15: if counts loses the job that it cannot attribute, verify returns the queue's numbers."""
    without(db, "_counted_of", "k.seen + k.unattributed end as running", "k.seen end as running")
    with pytest.raises(AssertionError):
        unattributed(db)
    assert [row[:3] for row in miscounted(db) if row[1] is None] == [("q", None, "available"), ("q", None, "running")]


def test_what_was_to_run_since_ever_completes(db: Connection) -> None:
    """S3-33: a job whose run_at is -infinity completes and is counted like any other; it waits since its enqueue."""
    hands = Hands(db)
    for n in (1, 9):  # few jobs of a claim are looked up one by one, many are read at once
        db.execute(
            "select tallybook.enqueue('q', 't', run_at => now() + interval '1 h') from generate_series(1, %s)", (n,)
        )
        db.execute("update tallybook.scheduled set run_at = '-infinity'")
        db.execute("select tallybook.promote()")
        assert one(db, "select isfinite(oldest) from tallybook.queue_stats")
        jobs = hands.claim(n)
        hands.complete(*jobs)
        assert len(jobs) == n
    db.execute(FOLD)
    assert (counted(db), miscounted(db)) == ({"completed": 10}, [])
    assert one(db, "select jobs from tallybook.timings()") == 10


def test_queue_status_says_how_old_and_how_often(db: Connection) -> None:
    """S4-15: queue_status has the jobs, the oldest, the newest and the average attempts per queue, task and state."""
    for minutes, task in ((30, "mail"), (20, "mail"), (10, "report")):
        db.execute("select tallybook.enqueue('q', %s, at => now() - make_interval(mins => %s))", (task, minutes))
    hands = Hands(db)
    first, *_ = hands.start(1)
    hands.fail(first, "1 h")
    rows = db.execute(
        "select task, state, jobs, round(extract(epoch from now() - oldest) / 60)::int,"
        " round(extract(epoch from now() - newest) / 60)::int, average_attempts::float"
        " from tallybook.queue_status order by 1, 2"
    ).fetchall()
    assert rows == [
        ("mail", "available", 1, 20, 20, 0.0),
        ("mail", "retrying", 1, 30, 30, 1.0),
        ("report", "available", 1, 10, 10, 0.0),
    ]


def test_completed_today_is_a_look_up(db: Connection) -> None:
    """S4-16: completed_since counts today's completions without yesterday's; queue_stats has all states and ends."""
    hands = Hands(db)
    now = one(db, "select date_trunc('day', now()) + interval '12 h'")
    for at, n in ((now - timedelta(days=1), 3), (now, 2)):
        for _ in range(n):
            put(db)
        for job in hands.start():
            hands.say("complete", job)
        db.execute("select tallybook.fold(at => %s)", (at,))
    today: LiteralString = "select queue, task, completed from tallybook.completed_since(%s)"
    assert db.execute(today, (now - timedelta(hours=12),)).fetchall() == [("q", "t", 2)]
    assert db.execute(today, (now - timedelta(days=2),)).fetchall() == [("q", "t", 5)]
    put(db)
    stats = db.execute(
        "select queue, available, running, completed, failed, cancelled, unserved from tallybook.queue_stats"
    )
    assert stats.fetchall() == [("q", 1, 0, 5, 0, 0, 0)]
    hands.complete(*hands.start())
    assert sum(row[2] for row in db.execute(today, (now - timedelta(days=2),)).fetchall()) == 6  # not folded yet


def test_reading_costs_the_same_at_any_size(db: Connection, connect: Connect) -> None:
    """S3-15: counts and views for people read no more pages with 20,000 jobs, half of them completed, than with 100."""
    reads: dict[str, LiteralString] = {
        "counts": "select * from tallybook.counts()",
        "queue_stats": "select * from tallybook.queue_stats",
        "backlog": "select * from tallybook.backlog()",
        "completed_since": "select * from tallybook.completed_since(now() - interval '1 day')",
    }
    cost: list[dict[str, int]] = []
    for n in (100, 20_000):
        put_many(db, n)
        hands = Hands(db)
        for _ in range(20):
            jobs = hands.claim(n // 40)
            ended = [job.lease for job in jobs], [job.id for job in jobs], [job.attempt for job in jobs]
            assert hands.one("select tallybook.complete_many(%s, %s, %s)", *ended) == []
        db.execute(FOLD)
        cost.append({name: pages(connect(), query) for name, query in reads.items()})
    now, (few, many) = counted(db), cost
    assert now["available"] > 10_000 and now["completed"] > 9000
    assert {name: (few[name], n) for name, n in many.items() if n > few[name] + 40} == {}
    assert pages(db, "select count(*) from tallybook.entry") > many["counts"] + 40, "control: it reads all of them"


def test_two_that_complete_at_once_do_not_wait(db: Connection, connect: Connect) -> None:
    """S3-17: a statement changes the counters in its own transaction and waits for no other open transaction."""
    for _ in range(4):
        put(db)
    hands = Hands(db)
    jobs = hands.start()
    first, second = connect(autocommit=False), connect(autocommit=False)
    for conn, job in zip((first, second), jobs, strict=False):
        conn.execute("set lock_timeout = '2 s'")
        conn.execute("select tallybook.complete(%s, %s, %s)", (job.lease, job.id, job.attempt))
        assert counted(conn) == {"running": 3, "completed": 1}  # its own change, immediately
    assert counted(db) == {"running": 4}
    db.execute(FOLD)
    second.commit()
    db.execute(FOLD)
    assert counted(db) == {"running": 3, "completed": 1}
    first.rollback()
    assert (counted(db), miscounted(db)) == ({"running": 3, "completed": 1}, [])


def test_control_a_counter_row_makes_the_second_wait(db: Connection, connect: Connect) -> None:
    """Negative control: if both update one row in place, the second waits for the first one's transaction."""
    db.execute("create table counter (n int); insert into counter values (0)")
    first, second = connect(autocommit=False), connect(autocommit=False)
    first.execute("update counter set n = n + 1")
    second.execute("set lock_timeout = '100 ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        second.execute("update counter set n = n + 1")


def test_counters_are_logged_and_folded(db: Connection) -> None:
    """S3-18: each change is a row of a log; folds add new totals and update none in place; all counts stay the same."""
    db.execute(
        "create function refuse() returns trigger"
        " language plpgsql as $$ begin raise 'an update of %', tg_table_name; end $$"
    )
    for table in ("tally", "series", "total"):
        db.execute(f"create trigger updated before update on tallybook.{table} for each row execute function refuse()")
    hands, checkpoints = Hands(db), set()
    for n in range(70):
        for task in range(n, n + 4):
            put(db, task=f"t{task % 7}")
        job, *_ = hands.start(1)
        hands.say(*(("complete", job) if n % 3 else ("fail", job, "{}", timedelta(hours=1))))
        now = counted(db)
        assert one(db, FOLD) > 0
        assert counted(db) == now
        checkpoints.add(one(db, "select checkpoint from tallybook.fold order by number desc limit 1"))
        if n % 5 == 0:
            assert one(db, "select count(*) from tallybook.tally where xid < (select max(hi) from tallybook.fold)") > 0
    assert one(db, FOLD) == 0
    assert counted(db) == {"available": 210, "completed": 46, "failed": 24, "retrying": 24}
    assert len(checkpoints) > 2, "totals were written, and written anew"
    assert miscounted(db) == []


def test_counters_are_folded_where_tables_are_published(db: Connection) -> None:
    """S3-18: folds, checkpoints and recounts work while a publication covers all tables, as for logical replication."""
    db.execute("create publication everything for all tables")
    for n in range(220):
        put(db, task=f"t{n}")
        db.execute(FOLD)
    assert one(db, "select checkpoint > 0 from tallybook.fold order by number desc limit 1") is True
    db.execute("select tallybook.recount()")
    assert (counted(db), miscounted(db)) == ({"available": 220}, [])


def test_events_are_counted_up_and_down(db: Connection, connect: Connect) -> None:
    """S3-16, S3-33: count_event moves an event up or down at its commit; folds and recounts keep the count."""
    events: LiteralString = "select name, n::int from tallybook.event_counts()"
    for n in (5, -2, 1):
        db.execute("select tallybook.count_event('sent', %s)", (n,))
    db.execute("select tallybook.count_event('owed', -3)")
    other = connect(autocommit=False)
    other.execute("select tallybook.count_event('sent')")
    assert db.execute(events).fetchall() == [("owed", -3), ("sent", 4)]
    for step in (FOLD, "select tallybook.recount()", FOLD):
        db.execute(step)
        assert db.execute(events).fetchall() == [("owed", -3), ("sent", 4)]
    other.commit()
    assert db.execute(events).fetchall() == [("owed", -3), ("sent", 5)]
    assert one(db, "select sum(n)::int from tallybook.event_series('sent')") == 5
    db.execute(FOLD)
    assert one(db, "select sum(n)::int from tallybook.event_series('sent')") == 5
    assert counted(db) == {}


def test_an_event_is_set_and_forgotten(db: Connection, connect: Connect) -> None:
    """S3-33: event_set sets an event after any fold, deletes it at 0 and waits for a setter; count_event does not."""
    events: LiteralString = "select name, n::int from tallybook.event_counts()"
    setting: LiteralString = "select tallybook.event_set('open', %s)"
    assert [one(db, setting, 17), one(db, setting, 17), one(db, setting, -4_000)] == [0, 17, 17]
    db.execute(FOLD)
    other, third = connect(autocommit=False), connect()
    assert one(other, setting, 5) == -4_000
    db.execute("select tallybook.count_event('open', 2)")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        third.execute("set lock_timeout = '50 ms'; select tallybook.event_set('another', 1)")
    other.commit()
    assert db.execute(events).fetchall() == [("open", 7)]  # 5, plus what was counted concurrently
    assert one(db, setting, 0) == 7 and db.execute(events).fetchall() == []
    db.execute("select tallybook.recount()")
    assert db.execute(events).fetchall() == []
    db.execute("select tallybook.count_event('open')")
    assert db.execute(events).fetchall() == [("open", 1)]


def test_a_recount_inside_a_transaction_counts_its_changes_once(db: Connection, connect: Connect) -> None:
    """S3-33: a recount inside a transaction counts the changes before and after it once, and none after a rollback."""
    put(db)
    for end in ("commit", "rollback"):
        conn = connect(autocommit=False)
        put(conn)
        put(db)  # a later transaction id that has committed
        Hands(conn)
        conn.execute("select tallybook.recount()")
        put(conn, run_at="2100-01-01")
        put(conn)
        conn.execute(end)  # type: ignore[arg-type]
        assert miscounted(db) == []
    assert counted(db) == {"available": 5, "scheduled": 1}


@pytest.mark.parametrize("results", [False, True], ids=["plain", "results"])
@pytest.mark.parametrize("jobs", [1, 20])
def test_an_attempt_that_is_said_twice_in_a_call_is_counted_once(
    db: Connection, watched: Watched, jobs: int, results: bool
) -> None:
    """S3-33: complete_many accepts attempts that are passed twice, and counts each once."""
    hands = Hands(db)
    with watched.changes(running=jobs):
        for _ in range(jobs):
            put(db)
        claimed = hands.claim() * 2
    with watched.changes(running=-jobs, completed=jobs):
        said = [[j.lease for j in claimed], [j.id for j in claimed], [j.attempt for j in claimed]]
        refused = one(
            db, "select tallybook.complete_many(%s, %s, %s, %s)", *said, ["1"] * len(claimed) if results else None
        )
    assert refused == []


def test_a_difference_is_found_and_mended(db: Connection) -> None:
    """S3-33: verify reports counters that were changed by hand, and a recount corrects them."""
    for _ in range(3):
        put(db)
    db.execute(FOLD)
    db.execute(
        "alter table tallybook.tally disable trigger all; update tallybook.series set n = n + 2 where what = 'opened'"
    )
    assert miscounted(db) == [("q", "t", "available", 5, 3)]
    db.execute("select tallybook.recount()")
    assert (miscounted(db), counted(db)) == ([], {"available": 3})


def test_throughput_and_times(db: Connection) -> None:
    """S3-33: throughput is what came and ended per second; timings are percentiles, at most 19 % too high."""
    now = one(db, "select clock_timestamp()")
    for seconds in (10, 20, 40):
        db.execute("select tallybook.enqueue('q', 't', at => %s)", (now - timedelta(seconds=seconds),))
    lease = one(db, "select gen_random_uuid()")
    worker = one(db, "select tallybook.worker_start('w', '{q}')")
    db.execute("select tallybook.claim(%s, '{q}', '{10}', %s, at => %s)", (worker, lease, now))
    for job, seconds in ((1, 1), (2, 2), (3, 8)):
        db.execute("select tallybook.complete(%s, %s, 1, at => %s)", (lease, job, now + timedelta(seconds=seconds)))
    at = now + timedelta(seconds=30)
    db.execute("select tallybook.fold(at => %s)", (at,))
    row = db.execute("select came, completed, completed_per_s from tallybook.throughput('1 min', %s)", (at,)).fetchone()
    assert row == (3, 3, 0.05)
    found = db.execute(
        "select jobs, waited_p50, waited_p99, took_p50, took_p99 from tallybook.timings('1 min', %s)", (at,)
    ).fetchone()
    assert found is not None and found[0] == 3
    for percentile, exact in zip(found[1:], (20e3, 40e3, 2e3, 8e3), strict=True):
        assert exact <= percentile <= 1.19 * exact + 1
    later = at + timedelta(minutes=5)
    for past in ("throughput", "timings"):
        assert call(db, past, span="1 min", at=later) == [], past


def test_levels_walk_back_from_now(db: Connection) -> None:
    """S3-33: levels has the open jobs at the end of each step, and its ends; the last step has unfolded changes."""
    start = one(db, "select date_bin('1 min', now(), '2001-01-01 00:00+00')")
    hands = Hands(db)
    for minute, come, done in ((0, 5, 1), (1, 0, 3), (3, 2, 0)):
        for _ in range(come):
            put(db)
        for job in hands.start(done) if done else ():
            hands.complete(job)
        db.execute("select tallybook.fold(at => %s)", (start + timedelta(minutes=minute, seconds=30),))
    put(db)
    rows = db.execute(
        "select begins, open, completed from tallybook.levels('1 min', %s, 'q', at => %s)",
        (start, start + timedelta(minutes=4, seconds=1)),
    ).fetchall()
    assert [(round((begins - start).total_seconds() / 60), open_, done) for begins, open_, done in rows] == [
        (0, 4, 1), (1, 1, 3), (2, 1, 0), (3, 3, 0), (4, 4, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_levels_by_day_do_not_depend_on_the_time_zone(db: Connection, zone: str) -> None:
    """S3-33: steps of days are UTC days, even if the session's time zone changes its clocks in between."""
    put(db)
    db.execute("select tallybook.fold(at => '2026-11-10 12:00+00')")
    with db.transaction():
        db.execute("select set_config('TimeZone', %s, true)", (zone,))
        days = db.execute(
            "select to_char(begins at time zone 'UTC', 'MM-DD HH24'), open from tallybook.levels("
            "'1 day', '2026-10-20 00:00+00', at => '2026-11-10 13:00+00') order by begins desc limit 2"
        ).fetchall()
    assert days == [("11-10 00", 1), ("11-09 00", 0)]


@pytest.mark.parametrize("keep", [{}, {0: "3 days", 60: "1 h"}], ids=["as installed", "a longer step kept shorter"])
def test_series_thin_out_with_age(db: Connection, keep: dict[int, str]) -> None:
    """S3-34: folds become minutes, hours and days with age; every sum stays the same; the oldest are dropped."""
    for step, time in keep.items():
        assert one(db, "select tallybook.series_keep(%s, %s::interval)", step, time) is True
        assert one(db, "select tallybook.series_keep(%s, %s::interval)", step, time) is False
    start = one(db, "select date_trunc('day', now())")
    sums: LiteralString = "select sum(n)::int from tallybook.event_series('e', '1 day', %s, at => %s)"
    for n in range(1, 241):
        db.execute("select tallybook.count_event('e', %s)", (n,))
        at = start + timedelta(minutes=7 * n)
        db.execute("select tallybook.fold(at => %s)", (at,))
        if n % 40 == 0:
            assert one(db, sums, start, at) == n * (n + 1) // 2
    kept_steps = "select step, count(*)::int from tallybook.series group by step"
    kept = lambda: dict(db.execute(kept_steps).fetchall())  # noqa: E731
    rows = sum(kept().values())
    ages = ((timedelta(days=5), {3600}), (timedelta(days=120), {86400}), (timedelta(days=4000), set()))
    for age, steps in ages:
        for n in range(3):
            db.execute("select tallybook.count_event('filler')")
            db.execute(
                "select tallybook._checkpoint(f.checkpoint, f.number), 0"
                " from tallybook.fold f order by f.number desc limit 1"
            )
            db.execute(
                "update tallybook.fold set checkpoint = number where number = (select max(number) from tallybook.fold)"
            )
            at = start + age + timedelta(minutes=n)
            db.execute("select tallybook.fold(at => %s)", (at,))
        left = {
            step for (step,) in db.execute("select distinct step from tallybook.series where task = 'e'").fetchall()
        }
        assert left == steps
        assert sum(kept().values()) < rows
        if steps:
            assert one(db, sums, start, at) == 240 * 241 // 2
    assert one(db, "select n::int from tallybook.event_counts() where name = 'e'") == 240 * 241 // 2


def test_a_queues_metrics_leave_before_the_others(db: Connection) -> None:
    """S3-36: a queue's series goes once its metrics_retention and its step are past; others and all totals stay."""
    db.execute("select tallybook.queue_set('short', metrics_retention => '2 h')")
    start = one(db, "select date_trunc('day', now())")
    db.execute("select tallybook.enqueue(q, 't') from unnest('{short,long}'::text[]) q")

    def left(after: timedelta) -> set[tuple[str, int]]:
        db.execute("select tallybook.fold(at => %s)", (start + after,))
        db.execute(
            "select tallybook._checkpoint(f.checkpoint, f.number) from tallybook.fold f order by f.number desc limit 1"
        )
        db.execute(
            "update tallybook.fold set checkpoint = number where number = (select max(number) from tallybook.fold)"
        )
        db.execute("select tallybook._thin(%s)", (start + after,))
        query = "select l.queue, s.step from tallybook.series s join tallybook.lane l using (lane_id) group by 1, 2"
        return set(db.execute(query).fetchall())

    assert left(timedelta(0)) == {("short", 0), ("long", 0)}
    assert left(timedelta(hours=1)) == {("short", 60), ("long", 60)}
    assert left(timedelta(days=3)) == {("long", 3600)}
    assert db.execute("select queue, available from tallybook.counts() order by queue").fetchall() == [
        ("long", 1),
        ("short", 1),
    ]


@pytest.mark.parametrize(
    "call",
    [
        "levels('90 s')",
        "levels('1 month')",
        "levels('1 min', '-infinity')",
        "event_series('e', '10 s')",
        "throughput('0')",
        "timings(null)",
        "completed_since(null)",
        "count_event('')",
        "count_event('e', 0)",
        "event_set('e', null)",
        "event_set('e', 2147483648)",
        "series_keep(60, '1 min')",
        "series_keep(61, '1 h')",
    ],
)
def test_what_does_not_fit_is_said(db: Connection, call: str) -> None:
    """S3-33: invalid arguments raise TB005."""
    with pytest.raises(psycopg.Error) as caught:
        db.execute(f"select tallybook.{call}".encode())
    assert caught.value.sqlstate == "TB005"


def test_the_backlog_is_made_of_the_counters(db: Connection) -> None:
    """S3-15: backlog has the number of jobs per queue and state, and the time at which the oldest could run."""
    first = one(db, "select clock_timestamp()") - timedelta(hours=3)
    for hours in (0, 1):
        db.execute("select tallybook.enqueue('q', 't', at => %s)", (first + timedelta(hours=hours),))
    db.execute("select tallybook.enqueue('q', 't', run_at => %s)", (first + timedelta(days=2),))
    rows: LiteralString = "select queue, state, jobs::int, oldest_run_at from tallybook.backlog()"
    assert db.execute(rows).fetchall() == [
        ("q", "available", 2, first),
        ("q", "scheduled", 1, first + timedelta(days=2)),
    ]
    hands = Hands(db)
    job, *_ = hands.start(1)
    assert db.execute(rows).fetchall()[:2] == [
        ("q", "available", 1, first + timedelta(hours=1)),
        ("q", "running", 1, None),
    ]
    hands.fail(job, final=True)
    assert ("q", "dead", 1, first) in db.execute(rows).fetchall()


def test_the_counters_of_one_queue_are_its_own(db: Connection) -> None:
    """The status and the levels of one queue contain no job of another, though both read the same counters."""
    for queue in ("q", "other", "other"):
        put(db, queue=queue)
    put(db, queue="other", run_at=datetime.now(UTC) + timedelta(days=1))
    status: LiteralString = "select queue, state, jobs from tallybook._status_of(%s) order by 1, 2"
    level: LiteralString = "select open, scheduled from tallybook.levels(queue => %s) order by begins desc limit 1"
    rows = {"q": [("q", "available", 1)], "other": [("other", "available", 2), ("other", "scheduled", 1)]}
    for queue, found in rows.items():
        assert db.execute(status, [queue]).fetchall() == found
    assert [db.execute(level, [queue]).fetchone() for queue in ("q", "other", None)] == [(1, 0), (2, 1), (3, 1)]
