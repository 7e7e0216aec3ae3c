"""pick: a claim for callers that keep no state, in SQL alone."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import psycopg
import pytest

from support.askers import MIN, S, T, put
from support.database import Connect, Connection, call, one
from support.hands import states
from support.sessions import behind, is_blocked
from support.subjects import forget, push, upsert
from support.waiting import wait_until


def pick(db: Connection, n: int = 10, at: datetime = T, lock: str = "5 min") -> list[Any]:
    """Return lease, job and attempt of each picked job."""
    return call(db, "pick", "lease, job_id, attempt", queue="q", max_jobs=n, lock=lock, at=at)


def complete(db: Connection, *picked: Any) -> list[bool]:
    return [one(db, "select tallybook.complete(%s, %s, %s)", *job) for job in picked]


def test_a_pick_is_ended_by_its_lease(db: Connection) -> None:
    """S3-26: pick and complete work without worker_start and heartbeat; a queue that nobody has used is empty."""
    assert pick(db) == []
    jobs = put(db, n=3)
    picked = pick(db)
    assert [job for _, job, _ in picked] == jobs
    assert states(db, *jobs) == ["running"] * 3
    assert complete(db, *picked) == [True] * 3
    assert states(db, *jobs) == ["completed"] * 3
    assert pick(db) == []


def test_no_job_is_picked_twice(db: Connection, connect: Any) -> None:
    """S3-26: two callers get ten different jobs each, through one row in `worker`; the others are left."""
    jobs = put(db, n=25)
    first, second = pick(db), pick(connect())
    assert [job for _, job, _ in first + second] == jobs[:20]
    assert db.execute("select name, queues from tallybook.worker").fetchall() == [("pick", ["q"])]


def test_a_pick_takes_one_version_only(db: Connection) -> None:
    """S3-26, S3-39: pick takes only jobs of its version, in order; it sets others aside once, for their version."""
    two = psycopg.types.json.Jsonb({"version": 2})
    jobs = [put(db, options=two if n % 2 else None)[0] for n in range(6)]

    def of(version: int) -> list[Any]:
        """Return what two calls pick: first the lane, then what was set aside."""
        return [
            job
            for _ in range(2)
            for job in call(db, "pick", "lease, job_id, attempt", queue="q", max_jobs=10, version=version)
        ]

    first, second = of(1), of(2)
    assert [[job for _, job, _ in picked] for picked in (first, second)] == [jobs[::2], jobs[1::2]]
    put(db, options=two)
    assert of(1) == [], "it is not taken, and put aside"
    assert all(complete(db, *first, *second, *of(2)))
    (old,) = put(db)
    assert of(2) == []
    assert complete(db, *of(1)) == [True], "so is one of version 1"
    assert db.execute("select distinct state, failures, attempts from tallybook.job").fetchall() == [
        ("completed", 0, 1)
    ]
    moves = "select max(n) from (select count(*) as n from tallybook.attempt where state = 'moved' group by job_id) m"
    assert one(db, moves) == 1 and states(db, old) == ["completed"]
    assert db.execute("select distinct name from tallybook.worker order by 1").fetchall() == [
        ("pick, version 1",),
        ("pick, version 2",),
    ]
    with pytest.raises(psycopg.Error, match="version"):
        of(0)


def test_the_lock_runs_out(db: Connection) -> None:
    """S3-05, S3-26: an attempt is given back at its lock time or at most a quarter later; its lease is refused."""

    def rescued(at: datetime) -> int:
        """Run rescue at this time and half a minute later; return how many jobs it has given back."""
        return sum(one(db, "select lost from tallybook.rescue(at => %s)", when) for when in (at, at + MIN / 2))

    (job,) = put(db)
    (old,) = pick(db)
    put(db)
    assert one(db, "select locked_until from tallybook.pick('q', at => %s)", T) == T + 5 * MIN
    assert rescued(T + 4.4 * MIN) == 0
    assert pick(db, at=T + 5 * MIN) == []
    assert rescued(T + 6.25 * MIN) + rescued(T + 7 * MIN) + rescued(T + 9 * MIN) == 2
    again = pick(db, at=T + 10 * MIN)
    assert job in [other for _, other, _ in again]
    assert complete(db, old) == [False]
    assert complete(db, *again) == [True, True]


def test_a_later_pick_does_not_prolong_an_earlier_one(db: Connection) -> None:
    """Each quarter of the lock time has its own worker row, so many picks make few rows and renew no lock."""
    put(db, n=40)
    for second in range(0, 300, 10):
        assert len(pick(db, 1, at=T + second * S)) == 1
    leases = db.execute("select lease, seen_at - %s from tallybook.worker order by id", (T,)).fetchall()
    assert leases == [(6.25 * MIN, n * 80 * S) for n in range(4)]


def test_a_failure_waits_for_its_backoff(db: Connection) -> None:
    """fail with the picked lease retries the job after its delay, and counts the failure."""
    put(db)
    ((lease, job, attempt),) = pick(db)
    assert one(
        db, "select tallybook.fail(%s, %s, %s, '{}', retry_in => '1 min', at => %s)", lease, job, attempt, T
    ) == ("scheduled")
    assert pick(db) == []
    db.execute("select tallybook.promote(at => %s)", (T + MIN,))
    assert call(db, "pick", "failures, attempt", queue="q", at=T + MIN) == [(1, 2)]


def test_what_may_not_start_is_not_picked(db: Connection) -> None:
    """S1-18: a concurrency limit and a cancel apply to pick as to any worker."""
    db.execute("select tallybook.concurrency_limit_set('task:t', 2)")
    cancelled, *jobs = put(db, n=5)
    db.execute("select tallybook.cancel(%s)", (cancelled,))
    picked = pick(db)
    assert [job for _, job, _ in picked] == jobs[:2]
    assert states(db, *jobs) == ["running", "running", "waiting", "waiting"]
    assert complete(db, *picked) == [True, True]
    db.execute("select tallybook.concurrency_release(at => %s)", (T,))
    assert [job for _, job, _ in pick(db)] == jobs[2:]


def test_the_turn_of_an_order_key_comes_one_at_a_time(db: Connection) -> None:
    """pick takes one job of an order key; the next one once that has ended."""
    first, second = put(db, n=2, order_key="k")
    (picked,) = pick(db)
    assert picked[1] == first
    assert pick(db) == []
    complete(db, picked)
    db.execute("select tallybook.rescue(at => %s)", (T + MIN,))
    assert [job for _, job, _ in pick(db, at=T + MIN)] == [second]


def test_a_limit_without_a_rule_is_told_and_nothing_is_lost(db: Connection) -> None:
    """A job that names a limit without a rule raises an error with the limit's name; no job leaves its lane."""
    jobs = [*put(db), *put(db, options={"limits": ["api"]})]
    with pytest.raises(psycopg.Error, match="names the limit api, which has no rule"):
        pick(db)
    assert states(db, *jobs) == ["available"] * 2


QUEUED = {"unique_key": "k", "unique_while": "queued"}
PRODUCERS = [
    pytest.param(lambda db: put(db, **QUEUED, on_conflict="replace_args", args={"n": 2})[0], None, id="replaces"),
    pytest.param(lambda db: put(db, **QUEUED)[0], None, id="relies on it"),
    pytest.param(lambda db: upsert(db, "k", args={"n": 2})[1], "active", id="upserts"),
    pytest.param(lambda db: forget(db, "k"), "active", id="forgets"),
]


@pytest.mark.direct("watches which session waits for which")
@pytest.mark.parametrize(("change", "said"), PRODUCERS)
def test_a_producer_waits_for_a_pick_that_may_have_its_job(
    db: Connection, connect: Connect, change: Callable[[Connection], Any], said: str | None
) -> None:
    """A change of a job that an open pick has taken finds it running: what the producer is told then holds."""
    job = push(db, "k")[0] if said else put(db, **QUEUED)[0]
    picker, producer = connect(autocommit=False), connect()
    ((_, picked, _),) = pick(picker)
    assert picked == job
    with behind(producer) as pool:
        change_ = pool.submit(change, producer)
        wait_until(lambda: change_.done() or is_blocked(db, producer), "the producer to wait")
        picker.commit()
        answer = change_.result(timeout=20)
    assert answer == said if said else answer > job, "it runs: it is left alone"
    assert db.execute("select from tallybook.amendment").fetchall() == []


@pytest.mark.parametrize(("change", "said"), PRODUCERS)
def test_a_pick_leaves_a_job_that_a_producer_changes(
    db: Connection, connect: Connect, change: Callable[[Connection], Any], said: str | None
) -> None:
    """A pick that meets an open change of a job puts the job back, and nobody waits."""
    _ = push(db, "k") if said else put(db, **QUEUED)
    producer = connect(autocommit=False)
    change(producer)
    assert pick(db) == []


@pytest.mark.direct("watches which session waits for which")
def test_the_key_of_a_job_that_a_pick_has_taken_is_not_free(db: Connection, connect: Connect) -> None:
    """S3-26: a job that was cancelled after an open pick took it keeps its unique key: enqueue waits for the pick."""
    (job,) = put(db, unique_key="k")
    picker, producer = connect(autocommit=False), connect()
    (picked,) = pick(picker)
    assert one(db, "select tallybook.cancel(%s)", job) == "cancelled"
    with behind(producer) as pool:
        second = pool.submit(put, producer, unique_key="k")
        wait_until(lambda: is_blocked(db, producer), "the producer waits")
        picker.commit()
        assert second.result(timeout=20) == [job]
    assert complete(db, picked) == [True]
    assert put(db, unique_key="k") != [job]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_jobs": 0}, "max_jobs 0 is out of range"),
        ({"max_jobs": 10_001}, "max_jobs 10001 is out of range"),
        ({"lock": "0.5 s"}, "lock 00:00:00.5 is out of range"),
        ({"lock": "8 days"}, "lock 8 days is out of range"),
        ({"queue": ""}, "queue"),
    ],
)
def test_wrong_numbers_are_refused(db: Connection, wrong: dict[str, Any], says: str) -> None:
    """An argument that is out of range raises an error with its value."""
    with pytest.raises(psycopg.Error, match=says):
        call(db, "pick", **{"queue": "q", **wrong})
