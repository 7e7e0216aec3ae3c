"""Locks per transaction: a server has room for a few thousand, which all its databases and connections share."""

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from support.broken import without
from support.clusters import cluster
from support.database import Connect, Connection
from support.hands import Hands, put_many
from support.sessions import behind, is_blocked
from support.subjects import many
from support.waiting import wait_until
from tallybook._db.migrate import migrate

pytestmark = pytest.mark.direct("counts the locks of a session, and holds transactions open")

MOST = 256
"""The limit of advisory locks of one class, as in sql/README.md."""
RETRY = "select tallybook.retry(o.job_id) from tallybook.outcome o where o.state = 'cancelled'"


def held(db: Connection) -> dict[int, int]:
    """Return how many advisory locks of each class, 40 to 49, this session holds."""
    query = (
        "select classid::bigint - 1413565400, count(*) from pg_locks"
        " where locktype = 'advisory' and pid = pg_backend_pid() group by 1"
    )
    return dict(db.execute(query).fetchall())


def keyed(db: Connection, keys: list[str], how: str, n: int = 1, task: str = "t") -> list[int]:
    """Enqueue a job for each of these keys, in one statement."""
    each = len(keys)
    unique = {"unique_keys": keys, "on_conflicts": [how] * each, "unique_whiles": ["queued"] * each}
    return put_many(db, each, task=task, args=f'{{"n": {n}}}', **unique)


def names(n: int) -> list[str]:
    return [f"k{i}" for i in range(n)]


def cancelled(db: Connection, n: int) -> None:
    """Make n cancelled jobs that no claim meets anymore."""
    keyed(db, names(n), "skip")
    db.execute("select tallybook.cancel_many(queue => 'q', max_jobs => %s)", (n,))
    assert Hands(db).claim(n) == []


def change(db: Connection, verb: str, n: int) -> None:
    """Prepare n jobs, then change them all, or enqueue to n queues, in a transaction that stays open."""
    if verb == "retry":
        cancelled(db, n)
    elif verb.startswith("subject"):
        many(db, "subject_push_many", names(n))
    elif verb != "queues":
        keyed(db, names(n), "skip")
    db.execute("begin")
    match verb:
        case "subject_upsert_many":
            assert {row[2] for row in many(db, verb, names(n), args=['{"n": 2}'] * n)} == {"updated"}
        case "subject_forget":
            query = "select distinct tallybook.subject_forget('t', 'k' || i) from generate_series(0, %s) i"
            assert db.execute(query, (n - 1,)).fetchall() == [("forgotten",)]
        case "replace_args":
            keyed(db, names(n), "replace_args", 2)
        case "unique_while queued":
            keyed(db, names(n), "skip", 2)
        case "queues":
            db.execute("select tallybook.enqueue('q' || i, 't') from generate_series(1, %s) i", (n,))
        case "retry":
            assert db.execute(RETRY).fetchall() == [(2,)] * n


@pytest.mark.parametrize(
    "verb", ["subject_upsert_many", "subject_forget", "replace_args", "unique_while queued", "queues", "retry"]
)
def test_the_locks_of_one_transaction_are_bounded(db: Connection, verb: str) -> None:
    """However many jobs or queues one transaction changes, it takes at most 256 advisory locks of a class."""
    change(db, verb, 400)
    assert max(held(db).values(), default=0) <= MOST, held(db)
    db.execute("rollback")


def test_the_locks_of_order_keys_are_bounded(db: Connection) -> None:
    """order_admit takes 256 keys and returns busy for the others; ends move as many lines, and rescue the rest."""
    hands, n = Hands(db), 300
    for _ in range(2):
        put_many(db, n, order_keys=names(n))
    first, second = hands.claim(n), hands.claim(n)
    db.execute("begin")
    ready, busy = hands.turn(first)
    assert (held(db)[48], len(ready), len(busy)) == (MOST, MOST, n - MOST)
    db.execute("commit")
    assert hands.turn([job for job in first if job.id in busy]) == (busy, [])
    _, busy = hands.turn(second)
    assert (len(busy), hands.turn([job for job in second if job.id in busy])) == (n - MOST, ([], []))
    db.execute("begin")
    hands.complete(*first)
    assert held(db)[48] == MOST
    db.execute("commit")
    assert hands.one("select count(*) from tallybook.waiting") == n - MOST
    db.execute("select tallybook._release_missed(clock_timestamp())")
    assert hands.one("select count(*) from tallybook.waiting") == 0


@pytest.mark.parametrize("guarded", [True, False], ids=["guard", "control"])
def test_two_people_retry_one_cancelled_job(db: Connection, connect: Connect, guarded: bool) -> None:
    """The second waits for the first, then gets TB005, because the job is no longer cancelled."""
    if not guarded:  # without the lock on the row of its newest attempt both retry the job
        without(db, "retry", "order by x.attempt desc limit 1 for update;", "order by x.attempt desc limit 1;")
    cancelled(db, 1)
    first, second = connect(autocommit=False), connect()
    assert first.execute(RETRY).fetchall() == [(2,)]
    with behind(second) as pool:
        waiting = pool.submit(second.execute, RETRY)
        wait_until(lambda: waiting.done() or is_blocked(db, second), "it waits")
        first.commit()
        if not guarded:
            assert waiting.result(60).fetchall() == [(2,)]
            return
        with pytest.raises(psycopg.Error) as refused:
            waiting.result(60)
        assert refused.value.sqlstate == "TB005"


# --- a transaction that changes more jobs than it has locks for ----------------------------------------------------

CHANGED = 200
"""More than the 128 jobs that have a lock each."""


@pytest.mark.parametrize("guarded", [True, False], ids=["guard", "control"])
def test_what_a_crowd_changes_waits_for_it(db: Connection, connect: Connect, guarded: bool) -> None:
    """Jobs beyond the 128 with a lock of their own also wait for the producer and see its rows; other tasks do not."""
    if not guarded:  # without the probe of the task's lock, jobs start with the old args
        without(db, "_amendment_state", "or p_crowd and not", "or false and not")
    hands, producer = Hands(db), connect()
    jobs = dict(zip(names(CHANGED + 10), keyed(db, names(CHANGED + 10), "skip"), strict=True))
    (other,) = keyed(db, ["other"], "skip", task="another task")
    (early,) = hands.claim(1)  # the first has started before
    assert early.id == jobs["k0"]
    producer.execute("begin")
    assert keyed(producer, names(CHANGED), "replace_args", 2)[0] != early.id  # it got a job of its own
    claimed = hands.claim(1000)
    called = {job: name for name, job in jobs.items()} | {other: "other"}
    free = {called[job.id] for job in claimed if not job.changing}
    producer.execute("commit")
    (lease,) = {job.lease for job in claimed}
    after = hands.claimed_jobs(lease)
    assert not any(job.changing for job in after)
    if guarded:
        assert free == {"other"}
        assert [job.args["n"] for job in after if called[job.id] in names(CHANGED)] == [2] * (CHANGED - 1)
    else:
        assert free >= {"other", "k99"}  # the last in the order of keys


def test_few_changes_hold_only_what_they_change(db: Connection, connect: Connect) -> None:
    """With up to 128 jobs in a transaction no other job waits; a rollback to a savepoint releases the locks."""
    hands, producer = Hands(db), connect()
    keyed(db, names(CHANGED), "skip")
    producer.execute("begin; savepoint s")
    keyed(producer, names(CHANGED), "replace_args", 2)
    assert set(held(producer)) >= {46, 47}
    producer.execute("rollback to savepoint s")
    keyed(producer, names(128), "replace_args", 2)
    assert (held(producer)[47], 46 in held(producer)) == (128, False)
    assert sum(job.changing for job in hands.claim(1000)) == 128
    producer.execute("commit")


def test_crowds_do_not_deadlock(db: Connection, connect: Connect) -> None:
    """Transactions on the same 200 jobs in opposite orders, beside workers of the task: none fails."""
    keys = names(CHANGED)
    query = "select tallybook.enqueue('q', 't', unique_key => k, run_at => now() + '1 h') from unnest(%s::text[]) k"
    db.execute(query, (keys,))
    keyed(db, [f"w{i}" for i in range(100)], "skip")
    failed: list[str] = []
    started: list[int] = []

    def produce(order: list[str]) -> None:
        producer = connect()
        for _ in range(5):
            with producer.transaction():
                for part in (order[:100], order[100:]):
                    keyed(producer, part, "skip", 2)

    def work() -> None:
        hands = Hands(connect())
        while jobs := hands.claim(20):
            while any(job.changing for job in hands.claimed_jobs(jobs[0].lease)):
                pass
            started.extend(job.id for job in jobs)

    def run(do: Callable[..., None], *args: Any) -> None:
        try:
            do(*args)
        except psycopg.Error as error:
            failed.append(repr(error))

    threads = [threading.Thread(target=run, args=(produce, order)) for order in (keys, keys[::-1]) * 2]
    threads += [threading.Thread(target=run, args=(work,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (failed, len(started)) == ([], 100)


@pytest.mark.slow
def test_everybody_can_connect_beside_a_crowd() -> None:
    """With the default max_locks_per_transaction and 20 connections, 6,000 changes leave room for others."""
    with cluster(max_connections="20") as server:
        for verb in ("subject_upsert_many", "unique_while queued", "queues"):  # one for each class of locks
            dsn = server.create_database(verb)
            with psycopg.connect(dsn, autocommit=True) as db:
                migrate(db)
                change(db, verb, 6000)
                for _ in range(5):
                    with psycopg.connect(dsn) as other:
                        other.execute("select tallybook.enqueue('another', 't')")
                db.execute("commit")
