"""Parents that end at the same moment in open transactions: no child waits forever, starts early or starts twice."""

import random
from typing import Any

import pytest
from psycopg import errors as pg

from support.broken import without
from support.chance import seeds
from support.database import Connect, Connection, call
from support.hands import Hands, child, put, resolve, states
from support.sessions import crossed

pytestmark = pytest.mark.direct("holds transactions open beside one another")

GUARD = ("parents_resolve", " order by w.job_id for update skip locked")
ENDED = ("completed", "cancelled", "dead")


@pytest.mark.parametrize("guarded", [True, False], ids=["guard", "control"])
def test_two_parents_that_are_settled_at_once(db: Connection, connect: Connect, guarded: bool) -> None:
    """A transaction skips a child that another one has locked; the next parents_resolve finds both parents ended."""
    if not guarded:  # parents_resolve marks both parents, and the child waits forever
        without(db, *GUARD)
    hands = Hands(db)
    parents = [put(db), put(db)]
    waiter = child(db, *parents)
    hands.complete(*hands.start())
    one, two = connect(), connect()
    with one.transaction(), two.transaction():
        resolve(one, parents[0])
        resolve(two, parents[1])
    resolve(db)
    assert states(db, waiter) == ["available" if guarded else "waiting"]


def test_an_open_transaction_that_has_the_child_stops_nobody(db: Connection, connect: Connect) -> None:
    """An open transaction that cancels or changes a child delays only that child; parents_resolve does not wait."""
    hands = Hands(db)
    parent, bad = put(db), put(db)
    changed = child(db, parent, unique_key="u")
    cancelled = child(db, bad)
    others = [child(db, parent), child(db, bad)]
    first, second = hands.start()
    hands.complete(first)
    hands.fail(second, final=True)
    user, someone = connect(), connect()
    with user.transaction():
        child(user, parent, unique_key="u", on_conflict="replace_args", args='{"new": 1}')
        with someone.transaction():
            someone.execute("select tallybook.cancel(%s, 'mine')", (cancelled,))
            db.execute("set statement_timeout = '20s'")
            assert resolve(db)[1:] == (1, 1, 2)
            assert states(db, changed, cancelled, *others) == ["waiting", "waiting", "available", "cancelled"]
            assert resolve(db)[1:3] == (0, 0)
        assert resolve(db)[1:] == (0, 1, 1)
    assert resolve(db)[1:] == (1, 0, 0)
    assert states(db, changed, cancelled) == ["available", "cancelled"]
    row = db.execute("select args, reason from tallybook.job where id = any (%s) order by id", ([changed, cancelled],))
    assert row.fetchall() == [({"new": 1}, None), ({}, "mine")]


class World:
    """Jobs and their children under random steps of sessions that keep transactions open for a while."""

    def __init__(self, db: Connection, connect: Connect, seed: int) -> None:
        self.db = db
        self.random = random.Random(seed)
        self.hands = Hands(db)
        self.sessions = [connect(autocommit=False) for _ in range(3)]
        for session in self.sessions:
            session.execute("set lock_timeout = '50ms'")
            session.commit()
        self.unsure: dict[int, list[tuple[int, list[int], str]]] = {}
        self.children: dict[int, tuple[list[int], str]] = {}
        self.jobs: list[int] = []
        self.running: list[Any] = []
        self.retried: set[int] = set()
        self.recent: list[int] = []

    def ended(self, jobs: list[int]) -> bool:
        query = "select count(*) from tallybook.job where id = any (%s) and state = any (%s)"
        return self.db.execute(query, (jobs, list(ENDED))).fetchone() == (len(set(jobs)),)

    def start(self) -> None:
        for one in self.hands.start(self.random.randint(1, 4)):
            if one.id in self.children and one.attempt == 1 and not self.retried & set(self.children[one.id][0]):
                assert self.ended(self.children[one.id][0]), f"{one.id} has started before its parents had ended"
            self.running.append(one)

    def end(self) -> None:
        if self.running:
            one = self.running.pop(self.random.randrange(len(self.running)))
            self.recent.append(one.id)
            what = self.random.choice(("complete", "complete", "complete", "fail", "dead", "snooze"))
            if what == "complete":
                self.hands.complete(one)
            elif what == "snooze":
                self.hands.say("snooze", one, "0")
            else:
                self.hands.fail(one, final=what == "dead")

    def step(self) -> None:
        at = self.random.randrange(len(self.sessions))
        session = self.sessions[at]
        weights = {
            "start": 6, "end": 10, "parents_resolve": 1, "told": 10, "child": 6, "job": 6, "cancel": 2, "retry": 1,
            "commit": 5, "rollback": 1, "rescue": 1,
        }  # fmt: skip
        (what,) = self.random.choices([*weights], [*weights.values()])
        try:
            if what == "start":
                self.start()
            elif what == "end":
                self.end()
            elif what == "job":
                self.jobs.append(put(self.db))
            elif what == "rescue":
                self.db.execute("select tallybook.rescue()")
            elif what == "parents_resolve":
                resolve(session)
            elif what == "told" and self.recent:  # as the worker that ended it does
                resolve(session, self.recent.pop(0))
            elif what == "child" and self.jobs:
                young = self.jobs[-6:]
                after = self.random.sample(young, self.random.randint(1, min(3, len(young))))
                on = self.random.choice(("completed", "any"))
                self.unsure.setdefault(at, []).append((child(session, *after, on_parent=on), after, on))
            elif what == "cancel" and self.jobs:
                session.execute("select tallybook.cancel(%s)", (self.random.choice(self.jobs),))
            elif what == "retry" and self.jobs:
                job = self.random.choice(self.jobs)
                session.execute("select tallybook.retry(%s)", (job,))
                self.retried.add(job)
            elif what == "commit":
                self.commit(at)
            elif what == "rollback":
                raise pg.LockNotAvailable
        except pg.DatabaseError as error:
            known = isinstance(error, (pg.LockNotAvailable, pg.DeadlockDetected))
            assert known or error.sqlstate in ("TB005", "TB002"), error
            session.rollback()
            self.unsure.pop(at, None)

    def commit(self, at: int) -> None:
        self.sessions[at].commit()
        for job, after, on in self.unsure.pop(at, []):
            self.children[job] = (after, on)
            self.jobs.append(job)

    def play(self) -> None:
        """Take steps, commit open transactions, run everything to its end, and check it."""
        for _ in range(250):
            self.step()
        for at in range(len(self.sessions)):
            self.commit(at)
        for _ in range(400):
            resolve(self.db)
            self.start()
            while self.running:
                self.hands.complete(self.running.pop())
            if self.ended(self.jobs):
                break
        else:
            query = "select id, state, reason from tallybook.job where not state = any (%s)"
            raise AssertionError(f"these wait for ever: {self.db.execute(query, (list(ENDED),)).fetchall()}")
        assert self.db.execute("select count(*) from tallybook.parent").fetchone() == (0,)
        how = dict(self.db.execute("select id, state from tallybook.job").fetchall())
        for job, (after, on) in self.children.items():
            if self.retried & {job, *after} or how[job] != "completed":
                continue
            assert on == "any" or all(how[parent] == "completed" for parent in after), (job, after, on)
        bad = self.db.execute(
            "select e.job_id from tallybook.entry e where e.attempt = 1 group by e.job_id having count(*) > 1"
        ).fetchall()
        assert bad == []
        assert len(self.children) > 10


@pytest.mark.parametrize("seed", seeds(8))
def test_random_interleavings(db: Connection, connect: Connect, seed: int) -> None:
    """Under random steps of concurrent sessions, no child starts before its parents have ended.

    The sessions enqueue, end, cancel, retry and resolve. No child waits forever, each enters its lane once, and a child
    runs only if its parents ended as it requires.
    """
    World(db, connect, seed).play()


@pytest.mark.slow
def test_random_interleavings_find_it_without_the_lock(db: Connection, connect: Connect) -> None:
    """Control: without the lock on the child's row, the same steps leave a job that waits forever, or raise."""
    without(db, *GUARD)
    with pytest.raises((AssertionError, pg.DatabaseError)):
        for seed in range(25):
            World(db, connect, seed).play()


def followers(db: Connection, keys: str) -> list[int]:
    """Fan out a job and one that waits for it under each of these keys; return the ids of those that wait."""
    n = len(keys)
    ((jobs,),) = call(
        db, "fan_out", "job_ids", queues=["q"] * (n + 1), tasks=["child"] * (n + 1), args=["{}"] * (n + 1),
        unique_keys=[None, *keys], afters=[None] + ["{-1}"] * n,
    )  # fmt: skip
    return list(jobs[1:])


def test_two_fan_outs_with_the_same_keys_do_not_deadlock(db: Connection, connect: Connect) -> None:
    """F18: two calls whose waiting jobs have the same unique keys in opposite orders both end, with one set of jobs."""
    first, second = crossed(
        db, connect, lambda third: call(third, "enqueue", queue="q", task="child", unique_key="m"),
        lambda conn: followers(conn, "amz"), lambda conn: followers(conn, "zma"),
    )  # fmt: skip
    assert first == second[::-1]
    assert states(db, *first) == ["waiting"] * 3


def test_a_key_twice_in_one_fan_out(db: Connection) -> None:
    """Of two jobs of a call that wait under one key, the first is made; the second is the same job."""
    first, other, again = followers(db, "aba")
    assert (first == again, other > first) == (True, True)
    assert db.execute("select child_id, count(*) from tallybook.parent group by 1 order by 1").fetchall() == [
        (first, 1), (other, 1),
    ]  # fmt: skip


def test_a_job_cannot_wait_for_the_next_id(db: Connection) -> None:
    """A parent that does not exist yet is refused, even if the child itself gets that id."""
    job = put(db)
    with pytest.raises(pg.DatabaseError, match=f"there is no job {job + 1}"):
        child(db, job + 1)
