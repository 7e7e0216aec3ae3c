"""enqueue_from enqueues exactly what enqueue would, row by row: in any state of the queue, beside other producers."""

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import psycopg
import pytest
from psycopg import sql

from support.broken import without
from support.database import Connect, Connection, one
from support.hands import Hands, cancel, enqueue_from, keys, put, put_many, retry, values
from support.sessions import behind, crossed
from support.waiting import wait_until

KEYS = ["a", "b", "c", "d", "e"]
TIMES = [None, None, None, "2000-01-01", "2999-01-01"]

pytestmark = pytest.mark.direct("holds transactions open beside one another and watches which waits")


# --- in any state --------------------------------------------------------------------------------------------------


class Example:
    """A task and a queue of their own, with jobs after random steps, and the rows of a query."""

    def __init__(self, db: Connection, seed: int) -> None:
        self.db, self.chance = db, random.Random(seed)
        self.name = f"x{seed}"
        self.own = {"queue": self.name, "task": self.name}
        self.hands = Hands(db, self.name)
        self.running: list[Any] = []
        for _ in range(self.chance.randrange(30)):
            self.step(self.chance.choice([*3 * ["put"], "claim", "complete", "fail", "cancel", "retry", "promote"]))
        self.rows = [
            (self.chance.choice([*KEYS, None]), n, self.chance.choice(TIMES), self.chance.choice([None, 1, 2]))
            for n in range(self.chance.randrange(1, 9))
        ]
        jobs = self.jobs("state not in ('completed', 'dead')")
        self.own_cancel = self.chance.choice(jobs) if jobs and self.chance.random() < 0.15 else None

    def jobs(self, where: str) -> list[int]:
        found = self.db.execute(f"select id from tallybook.job where queue = %s and {where} order by id", [self.name])  # noqa: S608
        return [job for (job,) in found]

    def step(self, what: str) -> None:
        choice, chance = self.chance.choice, self.chance.random
        match what:
            case "put":
                put(
                    self.db, **self.own, unique_key=choice(KEYS), run_at=choice(TIMES),
                    unique_while=choice(["running", "queued"]), order_key=choice([None, None, self.name]),
                )  # fmt: skip
            case "claim" if chance() < 0.2 and (jobs := self.jobs("state = 'available'")):
                self.hands.one("select tallybook.claim_job(%s, %s, gen_random_uuid())", self.hands.worker, choice(jobs))
            case "claim":
                self.running += self.hands.start(self.chance.randrange(1, 3))
            case "complete" if self.running:
                self.hands.say("complete", self.running.pop())
            case "fail" if self.running:
                self.hands.fail(self.running.pop(), choice(["0", "1 h"]), final=chance() < 0.4)
            case "cancel" if jobs := self.jobs("state not in ('completed', 'dead', 'cancelled')"):
                cancel(self.db, choice(jobs))
            case "retry" if jobs := self.jobs("state in ('dead', 'cancelled')"):
                try:
                    retry(self.db, jobs[0])
                except psycopg.Error as error:
                    assert error.sqlstate == "TB005", error  # another job has the key
            case "promote":
                self.db.execute("select tallybook.promote(at => now() + interval '2 h')")

    # Both ways start from the same committed state, and are rolled back.

    def outcome(self, way: Callable[[], object]) -> Any:
        """Return the jobs and keys of this task after it, or the error; new jobs are named by their row."""
        last = self.hands.one("select last_value - (not is_called)::int from tallybook.job_id")
        with self.db.transaction(force_rollback=True):
            if self.own_cancel:
                cancel(self.db, self.own_cancel)
            try:
                with self.db.transaction():
                    way()
            except psycopg.Error as error:
                return error.sqlstate, error.diag.message_primary
            new = self.db.execute(
                "select (args ->> 'n')::int, unique_key, queue, priority, state, attempt, max_attempts,"
                " case when state = 'scheduled' then run_at end, id from tallybook.job"
                " where task = %s and id > %s order by id",
                (self.name, last),
            ).fetchall()
            names = {row[-1]: f"new {row[0]}" for row in new}
            query = "select key, generation, job_id, others from tallybook.unique_key where task = %s order by 1, 2"
            held = self.db.execute(query, [self.name]).fetchall()
            return [row[:-1] for row in new], [(k, g, names.get(job, job), others) for k, g, job, others in held]

    def one_by_one(self) -> None:
        for key, n, at, priority in self.rows:
            priority = 2 if priority is None else priority
            put(self.db, **self.own, args={"n": n}, run_at=at, unique_key=key, priority=priority)

    def at_once(self) -> None:
        literals = sql.SQL(", ").join(sql.SQL("({}, {}, {}::timestamptz, {}::int)").format(*row) for row in self.rows)
        query = sql.SQL("select k as key, jsonb_build_object('n', n) as args, t as run_at, p as priority"
                        " from (values {}) v(k, n, t, p)")  # fmt: skip
        enqueue_from(self.db, query.format(literals).as_string(self.db), **self.own)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guard", "instead"),
    [
        (None, None),
        # Controls: without any one part of the check for held keys, the examples find a difference.
        ("where a.place <> 'dead' and", "where a.place = 'waiting' and"),
        ("where a.place <> 'dead' and", "where a.place = 'scheduled' and"),
        ("or c.job_id is not null", ""),
        ("and k.others is null", ""),
        ("continue when v.key = v_before;", ""),
        ("coalesce(v.generation, 0) + 1", "coalesce(v.generation, 0) + 2"),
    ],
)  # fmt: skip
def test_it_agrees_with_enqueue(db: Connection, guard: str | None, instead: str) -> None:
    """S1-21: in random states of the queue, jobs, keys, generations and errors are those of enqueue row by row."""
    seed, examples = int(os.environ.get("TALLYBOOK_SEED") or random.randrange(1_000_000)), 60
    if guard:
        without(db, "_enqueue_batch", guard, instead)
        seed, examples = 7, 400
    db.execute("set lock_timeout = '5 s'")
    for n in range(examples):
        example = Example(db, seed * 1000 + n)
        one_by_one, at_once = example.outcome(example.one_by_one), example.outcome(example.at_once)
        if one_by_one != at_once:
            assert guard, f"TALLYBOOK_SEED={seed}, example {n}: {example.rows}\n{one_by_one}\n{at_once}"
            return
    assert not guard, "no example differs"


# --- beside other producers ----------------------------------------------------------------------------------------


@contextmanager
def producer(connect: Connect, *unique: str) -> Iterator[Connection]:
    """A session that has enqueued a job with each of these keys, and has not committed."""
    conn = connect(autocommit=False)
    for key in unique:
        put(conn, unique_key=key)
    yield conn
    conn.rollback()


@contextmanager
def waiting(db: Connection, connect: Connect) -> Iterator[tuple[Connection, Future[tuple[int, int]]]]:
    """A session that has enqueued a job with key b, and a call with keys a, b and c that waits for its end."""
    conn = connect()
    with producer(connect, "b") as other, behind(conn) as pool:
        call = pool.submit(enqueue_from, conn, values("a", "b", "c"))
        pids = (other.info.backend_pid, conn.info.backend_pid)
        wait_until(lambda: one(db, "select %s = any (pg_blocking_pids(%s))", *pids), "the call waits for the other")
        yield other, call


def live(db: Connection) -> list[str | None]:
    return sorted(keys(db, "state not in ('completed', 'cancelled', 'dead')"), key=str)


def test_it_waits_for_nobody_else(db: Connection, connect: Connect) -> None:
    """A producer with other keys, the same keys of another task, or jobs without a key delays nothing."""
    with producer(connect, "x", "y") as other:
        other.execute("select tallybook.enqueue('q', 'other', unique_key => 'a'), tallybook.enqueue('q', 't')")
        db.execute("set lock_timeout = '2 s'")
        assert enqueue_from(db, values("a", "b", "c")) == (3, 3)


@pytest.mark.parametrize(("end", "made"), [("commit", 2), ("rollback", 3)])
def test_it_waits_for_who_uses_the_same_key(db: Connection, connect: Connect, end: str, made: int) -> None:
    """S1-21: a call waits for a producer that uses one of its keys, and enqueues that row only after a rollback."""
    with waiting(db, connect) as (other, call):
        getattr(other, end)()
        assert call.result(30) == (3, made)
    assert live(db) == ["a", "b", "c"]


def test_control_a_key_taken_meanwhile(db: Connection, connect: Connect) -> None:
    """Negative control: without the check whether it got the key, two jobs have it."""
    without(db, "_enqueue_batch", "if found then", "if true then")
    with waiting(db, connect) as (other, call):
        other.commit()
        call.result(30)
    assert live(db) == ["a", "b", "b", "c"]


@pytest.mark.parametrize("control", [False, True], ids=["guard", "control"])
def test_after_a_conflict_it_looks_again(db: Connection, connect: Connect, control: bool) -> None:
    """A producer that cancels its job before its commit leaves the key free, so the row is enqueued."""
    if control:  # a conflict counts as a held key, so that row is lost
        without(db, "_enqueue_batch", "v_ours[v.n] := tallybook._claim_key(p_task, v.key, v.id) = v.id", "continue")
    with waiting(db, connect) as (other, call):
        other.execute("select tallybook.cancel(id) from tallybook.job where unique_key = 'b'")
        other.commit()
        assert call.result(30) == (3, 2 if control else 3)
    assert live(db) == (["a", "c"] if control else ["a", "b", "c"])


@pytest.mark.parametrize("control", [False, True], ids=["guard", "control"])
def test_opposite_orders_do_not_deadlock(db: Connection, connect: Connect, control: bool) -> None:
    """Two calls with the same rows in opposite orders do not deadlock: one enqueues all, the other nothing."""
    if control:  # keys are taken in the query's order
        without(db, "enqueue_from", "order by s.key, s.place", "order by s.place")
    with pytest.raises(psycopg.errors.DeadlockDetected) if control else nullcontext():
        answers = crossed(
            db, connect, lambda third: put(third, unique_key="m"),
            lambda conn: enqueue_from(conn, values("a", "m", "z")),
            lambda conn: enqueue_from(conn, values("z", "m", "a")),
        )  # fmt: skip
        assert sorted(answers) == [(3, 0), (3, 3)]
        assert live(db) == ["a", "m", "z"]


def test_in_the_order_of_enqueue_many(db: Connection, connect: Connect) -> None:
    """Beside an enqueue_many with the same keys, in the order of the database's collation, there is no deadlock."""
    names = ["B", "a", "Ä", "z", "_", "1"]
    _, (seen, _) = crossed(
        db, connect, lambda third: put(third, unique_key="a"),
        lambda conn: put_many(conn, 6, unique_keys=names[::-1]), lambda conn: enqueue_from(conn, values(*names)),
    )  # fmt: skip
    assert seen == 6
    assert live(db) == sorted(names)


def test_an_older_snapshot_meets_a_conflict(db: Connection, connect: Connect) -> None:
    """REPEATABLE READ works; a key that was taken since the snapshot raises 40001, for the caller's own retry."""
    old = connect(autocommit=False)
    old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    assert enqueue_from(old, values("a", "b")) == (2, 2)
    old.commit()
    old.execute("select")
    with producer(connect, "c") as other:
        other.commit()
    with pytest.raises(psycopg.errors.SerializationFailure):
        enqueue_from(old, values("a", "c"))


def test_many_at_once(db: Connection, connect: Connect) -> None:
    """S1-21: five calls that find the same rows in random order enqueue each row once in total, and none fails."""
    query = "select n as key, '{}'::jsonb as args from generate_series(1, 300) n order by random()"
    for _ in range(3):
        with ThreadPoolExecutor(5) as pool:
            calls = [pool.submit(enqueue_from, connect(), query) for _ in range(5)]
        assert sum(call.result()[1] for call in calls) == 300
        Hands(db).run_all()
    assert db.execute("select count(*), count(distinct unique_key) from tallybook.job").fetchone() == (900, 300)
