"""Queues: settings, retention classes, pause and resume, drop, top, transitions on a channel, oldest jobs."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

import psycopg
import pytest

from support.broken import without
from support.database import Connect, Connection, Row, call, one
from support.hands import Hands, put, put_many, states
from support.sessions import is_blocked, pages
from support.waiting import wait_until

LATER = datetime.now(UTC) + timedelta(days=1)
PAST, MIN = datetime(2026, 1, 31, 9, tzinfo=UTC), timedelta(minutes=1)
OLDEST = "select queue, oldest from tallybook._oldest_of(%s) order by queue"


def heard(db: Connection, ear: Connection) -> list[dict[str, Any]]:
    """Return what has been published so far to a session that listens to until_here, too, in the order of commits."""
    db.execute("notify until_here")
    said = []
    for word in ear.notifies(timeout=60):
        if word.channel == "until_here":
            return said
        said.append(json.loads(word.payload))
    raise AssertionError(f"the word at the end has not come; before it came {said}")


@pytest.mark.servers
def test_a_queue_is_made_and_changed(db: Connection) -> None:
    """S3-36: queue_set reports created, changed or unchanged; null keeps a setting; the view shows all and the user."""
    assert one(db, "select tallybook.queue_set('q', by => 'ada')") == "created"
    assert one(db, "select tallybook.queue_set('q')") == "unchanged"
    assert one(db, "select tallybook.queue_set('q', max_attempts => 3, retention => 'long', by => 'bob')") == "changed"
    assert one(db, "select tallybook.queue_set('q', max_attempts => 3)") == "unchanged"
    row = db.execute("select retention, max_attempts, notify, changed_by from tallybook.queues").fetchall()
    assert row == [("long", 3, False, "bob")]
    assert one(db, "select tallybook.queue_set('q', max_attempts => 0)") == "changed"
    assert one(db, "select max_attempts is null from tallybook.queues") is True
    kept: LiteralString = "select error_retention::text || ', ' || metrics_retention::text from tallybook.queues"
    assert (
        one(db, "select tallybook.queue_set('q', error_retention => '24 h', metrics_retention => '7 days')")
        == "changed"
    )
    assert (one(db, "select tallybook.queue_set('q', notify => false)"), one(db, kept)) == (
        "unchanged",
        "24:00:00, 7 days",
    )
    assert one(db, "select tallybook.queue_set('q', error_retention => '0')") == "changed"
    assert db.execute("select error_retention, metrics_retention from tallybook.queue").fetchone() == (
        None,
        timedelta(7),
    )


@pytest.mark.parametrize(
    ("code", "words", "call"),
    [
        ("TB005", "1 to 64 bytes", "queue_set('')"),
        ("TB005", "no retention class", "queue_set('q', 'ever')"),
        ("TB005", "out of range", "queue_set('q', max_attempts => 40000)"),
        ("TB005", "error_retention", "queue_set('q', error_retention => '59 s')"),
        ("TB005", "metrics_retention", "queue_set('q', metrics_retention => '101 years')"),
        ("TB002", "no queue", "queue_top('nobody')"),
        ("TB005", "unknown states", "queue_top('q', '{running}')"),
        ("TB005", "is not a place", "queue_top('q', after => 'here')"),
        ("TB005", "out of range", "queue_top('q', max_jobs => 1001)"),
        ("TB005", "is in use: 1 workers", "queue_drop('q')"),
    ],
)
def test_bad_input(db: Connection, hands: Hands, code: str, words: str, call: str) -> None:
    """Invalid arguments raise a clear error."""
    with pytest.raises(psycopg.Error, match=words) as said:
        db.execute(f"select tallybook.{call}")  # type: ignore[arg-type]
    assert said.value.sqlstate == code


def test_the_default_of_attempts_is_between_the_tasks_and_5(db: Connection, hands: Hands) -> None:
    """S3-36: a job's own max_attempts goes first, then its task's, then its queue's, then 5."""

    def failures(task: int | None, **more: Any) -> int:
        job = put(db, **more)
        for n in range(1, 10):
            (taken,) = hands.start()
            said = hands.one(
                "select tallybook.fail(%s, %s, %s, '{}', '0', max_attempts => %s)",
                taken.lease,
                job,
                taken.attempt,
                task,
            )
            if said == "dead":
                return n
        raise AssertionError("it lives for ever")

    assert failures(None) == 5
    db.execute("select tallybook.queue_set('q', max_attempts => 3)")
    assert [failures(None), failures(4), failures(4, max_attempts=1), failures(None, max_attempts=6)] == [3, 4, 1, 6]


def test_a_class_is_for_new_lanes(db: Connection, hands: Hands) -> None:
    """S3-21, S3-36: after a change of class producers use new lanes of that class, and the old lanes are drained."""

    def lanes(db: Connection) -> list[tuple[Any, ...]]:
        return db.execute(
            "select retention, priority, part from tallybook.lane where queue = 'q' order by lane_id"
        ).fetchall()

    old, later = put(db), put(db, run_at=LATER)
    db.execute("select tallybook.queue_set('q', retention => 'brief')")
    assert lanes(db) == [("d", 2, ""), ("b", 2, "")]
    new, other = put(db), put(db, priority=7)
    assert lanes(db)[2:] == [("b", 7, "")]
    classes = dict(db.execute("select job_id, retention from tallybook.entry").fetchall())
    assert classes == {old: "d", new: "b", other: "b"}
    db.execute("select tallybook.promote(at => now() + interval '2 days')")
    assert one(db, "select retention from tallybook.entry where job_id = %s", later) == "d"
    assert sorted(hands.run_all()) == sorted([old, later, new, other])
    db.execute("select tallybook.queue_set('q', retention => 'default')")
    put(db)
    assert one(db, "select retention from tallybook.entry order by job_id desc limit 1") == "d"
    assert len(hands.run_all()) == 1


def test_what_goes_by_another_part_keeps_its_class(db: Connection, hands: Hands) -> None:
    """After a change of class fair jobs run, and a job released by a limit is claimed, each in a lane of its class."""
    fair = {"fair_key": "x"}
    jobs = [put(db, options=fair), put(db, options=fair, run_at=LATER)]
    db.execute("select tallybook.queue_set('q', retention => 'brief')")
    jobs += [put(db, options=fair)]
    db.execute("select tallybook.promote(at => now() + interval '2 days')")
    db.execute("select tallybook.fair_release(at => now() + interval '2 days')")
    wrong = (
        "select count(*) from tallybook.entry e join tallybook.lane l using (lane_id) where e.retention <> l.retention"
    )
    assert one(db, wrong) == 0
    assert sorted(hands.run_all()) == jobs
    db.execute("select tallybook.concurrency_limit_set('l', 1)")
    held = {"limits": ["l"]}
    two = [put(db, options=held), put(db, options=held)]
    first, _ = hands.claim()
    free = db.execute(
        "select job_id from tallybook.limit_take(%s, %s, %s) where starts_in is not null",
        ([first.lease] * 2, two, [1, 1]),
    ).fetchall()
    assert free == [(two[0],)]
    hands.complete(first)
    db.execute("select tallybook.concurrency_release()")
    (again,) = hands.claim()
    assert (again.id, one(db, wrong)) == (two[1], 0)


@pytest.mark.direct("listens")
def test_pause_and_resume_are_published(db: Connection, connect: Connect, hands: Hands) -> None:
    """S3-37: each change of a queue is one JSON object on tallybook_queues; a rolled-back change publishes nothing."""
    ear = connect()
    ear.execute("listen tallybook_queues; listen until_here")
    db.execute("select tallybook.queue_set('q', max_attempts => 2, by => 'ada')")
    db.execute("select tallybook.queue_set('q', max_attempts => 2, by => 'ada')")
    db.execute("select tallybook.pause('q', 'bob')")
    db.execute("begin; select tallybook.resume('q', 'eve'); rollback")
    db.execute("select tallybook.resume('q', 'bob')")
    put(db)
    db.execute("select tallybook.queue_truncate('q', by => 'bob')")
    said = heard(db, ear)
    assert [(word["queue"], word["change"], word["by"]) for word in said] == [
        ("q", "changed", "ada"),
        ("q", "paused", "bob"),
        ("q", "resumed", "bob"),
        ("q", "truncated", "bob"),
    ]
    assert [word["paused"] for word in said] == [False, True, False, False]
    assert said[0]["max_attempts"] == 2


def test_a_pause_holds_from_its_commit_on(db: Connection, hands: Hands) -> None:
    """S3-38: a claim after the commit of pause returns no jobs, one after resume does; also through a pooler."""
    job = put(db)
    for _ in range(3):
        assert one(db, "select tallybook.pause('q')") is True
        assert hands.claim() == []
        assert one(db, "select tallybook.resume('q')") is True
    assert [found.id for found in hands.claim()] == [job]


@pytest.mark.direct("listens")
def test_a_sleeper_is_woken_by_resume(db: Connection, connect: Connect, hands: Hands) -> None:
    """S3-38: the commit of resume notifies a worker that sleeps on the queue."""
    put(db)
    db.execute("select tallybook.pause('q')")
    ear = connect()
    ear.execute("listen tallybook")
    assert ear.execute("select armed, clear from tallybook.listen_begin('{q}')").fetchone() == (True, True)
    db.execute("select tallybook.resume('q')")
    assert [word.payload for word in ear.notifies(timeout=60, stop_after=1)] == ["q"]


def test_drop_refuses_what_is_in_use(db: Connection, hands: Hands) -> None:
    """S3-36: open jobs, workers and schedules prevent a drop; after the drop the queue's history can still be read."""
    job = put(db)
    db.execute("select tallybook.schedule_set('s', task => 't', queue => 'q', every => '1 h')")
    with pytest.raises(psycopg.Error, match="1 workers serve it, 1 schedules"):
        db.execute("select tallybook.queue_drop('q')")
    db.execute("select tallybook.schedule_drop('s')")
    (running,) = hands.start()
    hands.complete(running)
    db.execute("select tallybook.worker_stop(%s)", (hands.worker,))
    open_ = [put(db), put(db, run_at=LATER)]
    with pytest.raises(psycopg.Error, match="has 2 open jobs"):
        db.execute("select tallybook.queue_drop('q')")
    assert one(db, "select tallybook.queue_drop('q', truncate => true)") is True
    assert states(db, job, *open_) == ["completed", "cancelled", "cancelled"]
    assert db.execute("select name from tallybook.queues").fetchall() == []
    assert one(db, "select tallybook.queue_drop('q')") is False
    with pytest.raises(psycopg.Error, match="no queue"):
        db.execute("select tallybook.pause('q')")


@pytest.mark.direct("holds a transaction open beside another")
def test_a_job_that_is_being_enqueued_outlives_the_drop(db: Connection, connect: Connect) -> None:
    """S3-36: a producer beside a drop does not wait or lose its job; the queue is created again with the defaults."""
    db.execute("select tallybook.queue_set('q', retention => 'brief', max_attempts => 2)")
    put(db)
    other = connect(autocommit=False)
    coming = put(other)
    assert one(db, "select tallybook.queue_drop('q', truncate => true)") is True
    assert db.execute("select name from tallybook.queues").fetchall() == []
    other.commit()
    assert db.execute("select name, retention from tallybook.queues").fetchall() == [("q", None)]
    later = put(db)
    hands = Hands(db)
    assert sorted(job.id for _ in range(2) for job in hands.claim()) == [coming, later]
    assert one(db, "select retention from tallybook.entry where job_id = %s", later) == "d"


def test_a_queue_can_be_dumped_alone(db: Connection, hands: Hands) -> None:
    """S3-21: one query dumps the jobs of a queue; it is truncated and dropped without touching any other."""
    jobs = [put(db), put(db, run_at=LATER), put(db, priority=7)]
    put(db, queue="other")
    with db.cursor().copy(
        "copy (select id, task, state from tallybook.job where queue = 'q' order by id) to stdout"
    ) as copy:
        dumped = b"".join(copy).decode().splitlines()
    assert [int(line.split("\t")[0]) for line in dumped] == sorted(jobs)
    db.execute("select tallybook.worker_stop(%s)", (hands.worker,))
    db.execute("select tallybook.queue_set('q', max_attempts => 7)")
    db.execute("select tallybook.queue_drop('q', truncate => true)")
    assert db.execute("select queue, state, jobs from tallybook.backlog()").fetchall() == [("other", "available", 1)]
    assert db.execute("select name, max_attempts from tallybook.queues").fetchall() == [("other", None)]


def top(db: Connection, **more: Any) -> list[Row]:
    return sorted(call(db, "queue_top", "position, id, state, priority, place", queue="q", **more))


def test_top_is_the_order_in_which_they_run(db: Connection, hands: Hands) -> None:
    """S3-36: top lists jobs in the order of their claims, then scheduled ones by time; pages follow without gaps."""
    first = put(db)
    hands.complete(*hands.start())
    gone, late = put(db), put(db, run_at=LATER + timedelta(hours=1))
    soon = put(db, run_at=LATER)
    line = [put(db, priority=p) for p in (5, 2, 2, 0, 5)]
    db.execute("select tallybook.cancel(%s)", (gone,))
    order = [line[3], line[1], line[2], line[0], line[4], soon, late]
    rows = top(db)
    assert [row[0] for row in rows] == list(range(1, 8))
    assert [row[1] for row in rows] == order
    assert first not in order
    pages, after = [], None
    while page := top(db, max_jobs=2, after=after):
        pages += [row[:2] for row in page]
        after = page[-1][4]
    assert pages == [row[:2] for row in rows]
    assert [row[1] for row in top(db, states=["scheduled"])] == [soon, late]
    assert hands.run_all() == order[:5]
    assert [row[1] for row in top(db)] == [soon, late]


@pytest.mark.direct("holds transactions open beside one another")
def test_top_knows_holes(db: Connection, connect: Connect, hands: Hands) -> None:
    """A job that commits behind the cursor is shown where it will be claimed: after the window, once."""
    put(db)
    hands.complete(*hands.start())
    slow = connect(autocommit=False)
    late = put(slow)
    jobs = [put(db) for _ in range(4)]
    hands.complete(*hands.start(2))
    slow.commit()
    behind = put(db)
    shown = [row[1] for row in top(db)]
    assert sorted(shown) == sorted([*jobs[2:], late, behind])
    assert hands.run_all() == shown


def test_top_reads_what_it_shows(db: Connection) -> None:
    """S3-36: a page of ten reads the same few pages of memory with 50 jobs as with 20,000 available and scheduled."""

    ten = "select * from tallybook.queue_top('q', max_jobs => 10)"
    put_many(db, 50)
    few = pages(db, ten)
    put_many(db, 10_000)
    put_many(db, 10_000, run_ats=[LATER] * 10_000)
    assert pages(db, ten) < few + 40


def test_a_small_queue_does_not_pay_for_a_large_one(db: Connection) -> None:
    """S3-36: top of a queue with one scheduled job does not read the scheduled jobs of another queue."""

    ten = "select tallybook.queue_top('few', max_jobs => 10)"
    put(db, queue="few", run_at=LATER + timedelta(days=1))
    few = pages(db, ten)
    put_many(db, 20_000, "many", run_ats=[LATER - timedelta(seconds=n) for n in range(20_000)])
    db.execute("analyze tallybook.scheduled")
    assert pages(db, ten) < few + 60
    control = "select count(*) from tallybook.scheduled where args::text <> ''"
    assert pages(db, control) > 150, "control: to read all of it is more than that"


@pytest.mark.direct("listens")
def test_transitions_are_published_while_notify_is_on(db: Connection, connect: Connect, hands: Hands) -> None:
    """S3-37: with notify on, transitions of this queue's jobs are published in batches; off, there is no trigger."""
    triggers = "select count(*) from pg_trigger where tgname = 'publish'"
    assert one(db, triggers) == 0
    db.execute("select tallybook.queue_set('q', notify => true), tallybook.queue_set('quiet')")
    assert one(db, triggers) == 5
    ear = connect()
    ear.execute("listen tallybook_jobs; listen until_here")
    put(db, queue="quiet")
    put(db, queue="quiet", run_at=LATER)
    Hands(db, "quiet").run_all()
    good, bad = put(db), put(db, task="bad", max_attempts=2)
    later = put(db, run_at=LATER)
    for job in hands.start():
        if job.id == good:
            hands.complete(job)
        else:
            hands.fail(job, "1 h")
    db.execute("select tallybook.promote(at => now() + interval '2 h')")
    hands.fail(*hands.start())
    truncated = one(db, "select cancelled from tallybook.queue_truncate('q')")
    said = [(word["task"], word["state"], word["ids"]) for word in heard(db, ear)]
    assert said == [
        ("t", "available", [good]),
        ("bad", "available", [bad]),
        ("t", "scheduled", [later]),
        ("t", "started", [good]),
        ("bad", "started", [bad]),
        ("t", "completed", [good]),
        ("bad", "retrying", [bad]),
        ("bad", "available", [bad]),
        ("bad", "started", [bad]),
        ("bad", "dead", [bad]),
        ("t", "cancelled", [later]),
    ]
    assert truncated == 1
    put_many(db, 700)
    assert [len(word["ids"]) for word in heard(db, ear)] == [300, 300, 100]
    db.execute("select tallybook.queue_set('q', notify => false)")
    assert one(db, triggers) == 0


@pytest.mark.direct("holds a transaction open beside another")
def test_notify_never_holds_up_producers(db: Connection, connect: Connect) -> None:
    """S3-37: switching notify on beside an open transaction that has enqueued fails at once, and nobody waits."""
    other = connect(autocommit=False)
    put(other)
    with pytest.raises(psycopg.errors.LockNotAvailable, match="cannot be switched on"):
        db.execute("select tallybook.queue_set('q', notify => true)")
    assert one(db, "select count(*) from pg_trigger where tgname = 'publish'") == 0
    other.commit()
    assert one(db, "select tallybook.queue_set('q', notify => true)") == "created"


@pytest.mark.direct("waits for another session")
@pytest.mark.parametrize("before", [True, False], ids=["on", "off"])
def test_notify_is_switched_on_beside_another_change_of_it(db: Connection, connect: Connect, before: bool) -> None:
    """S3-37: switching notify on waits for an uncommitted change of it, raises no error, and notify is on."""
    db.execute("alter function tallybook._publishing() set lock_timeout = '10s'")
    first, second = connect(autocommit=False), connect()
    db.execute("select tallybook.queue_set('a', notify => %s)", [not before])
    first.execute("select tallybook.queue_set('a', notify => %s)", [before])
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(one, second, "select tallybook.queue_set('b', notify => true)")
        wait_until(lambda: beside.done() or is_blocked(db, second), "it waits")
        first.commit()
        assert beside.result() == "created"
    assert one(db, "select count(*) from pg_trigger where tgname = 'publish'") == 5


def oldest(db: Connection, *queues: str) -> dict[str, int]:
    """Return the time of each queue's oldest job, in minutes after PAST; check that the view agrees."""
    found = {queue: (at - PAST) // MIN for queue, at in db.execute(OLDEST, [list(queues)]).fetchall()}
    view = db.execute("select queue, oldest from tallybook.queue_stats where oldest is not null").fetchall()
    assert found == {queue: (at - PAST) // MIN for queue, at in view if queue in queues}
    return found


@pytest.mark.direct("holds transactions open beside others")
@pytest.mark.parametrize("open_ones", [0, 2])
def test_the_oldest_of_a_queue_is_the_next_of_its_lines(db: Connection, connect: Connect, open_ones: int) -> None:
    """S3-36: the oldest job is never a claimed one, even of a transaction that is claimed in part, or uncommitted.

    With other transactions open, it is found in another way, with the same result.
    """
    put(db, queue="a", at=PAST + MIN)
    Hands(db, "a").claim()  # so that all go to one lane
    others = [connect(autocommit=False) for _ in range(open_ones)]
    for n, other in enumerate(others):
        put(other, queue="a", at=PAST + n * MIN)  # older than all, and not committed
    with db.transaction():
        for minutes in range(10, 20):
            put(db, queue="a", at=PAST + minutes * MIN)
    put(db, queue="a", at=PAST + 30 * MIN, priority=1)
    put(db, queue="b", at=PAST + 40 * MIN)
    put(db, queue="done", at=PAST + 5 * MIN)
    assert oldest(db, "a", "b", "done", "never") == {"a": 10, "b": 40, "done": 5}
    Hands(db, "done").claim()
    assert oldest(db, "a", "b", "done") == {"a": 10, "b": 40}
    hands = Hands(db, "a")
    hands.claim(1)  # of the lane that goes first
    assert oldest(db, "a") == {"a": 10}
    hands.claim(3)
    assert oldest(db, "a", "b") == {"a": 13, "b": 40}
    hands.claim(7)
    assert oldest(db, "a", "b") == {"b": 40}
    for n, other in enumerate(others):  # the claims have passed them, and they are there now
        other.commit()
        assert oldest(db, "a") == {"a": 0}, n
    put(db, queue="a", at=PAST + 50 * MIN)
    assert oldest(db, "a") == {"a": 50}  # a claim takes the late jobs after this one


@pytest.mark.direct("holds transactions open beside others")
def test_control_an_open_transaction_is_asked_about(db: Connection, connect: Connect) -> None:
    """Control of the quick way: if it is taken with a hole in the line, the late job is not found."""
    hands, other = Hands(db, "a"), connect(autocommit=False)
    put(db, queue="a", at=PAST + 5 * MIN)  # so that both go to one lane
    put(other, queue="a", at=PAST)
    put(db, queue="a", at=PAST + 10 * MIN)
    assert len(hands.claim()) == 2
    other.commit()
    assert oldest(db, "a") == {"a": 0}
    without(db, "_oldest_of", "h.holes = '{}' and h.closed = '{}'", "true")
    # Another test's transaction in the same cluster would send it the other way.
    without(db, "_oldest_of", "pg_snapshot_xmin(v_snap) >= pg_snapshot_xmax(v_snap)", "true")
    assert db.execute(OLDEST, [["a"]]).fetchall() == []
