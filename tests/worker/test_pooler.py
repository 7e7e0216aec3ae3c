"""Workers and producers through a real PgBouncer in transaction mode."""

import json
import logging
import signal
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from support.cli import run
from support.pooler import PACKAGE, installed
from support.waiting import wait_until
from support.worker_process import Workers, hold
from support.workers import Jobs, eventually, working
from tallybook import App
from tallybook._db.link import Link
from tallybook._db.pooler import is_behind_pooler, shares_sessions
from tallybook._worker.claim.claimer import Claimer
from tallybook.errors import ConfigError

pytestmark = [
    pytest.mark.direct("these tests have a PgBouncer of their own, and look at both of its sides"),
    pytest.mark.skipif(not installed(), reason=f"not installed: {PACKAGE}"),
]
ADVISORY = """
select count(*) from pg_locks where locktype = 'advisory' and classid in (1413565443, 1413565444)
   and database = (select oid from pg_database where datname = current_database())"""


def test_a_pooler_is_noticed(dsn: str, pooled: str) -> None:
    """F40: through a pooler, another process answers than the one that was connected to; directly, the same."""
    with psycopg.connect(dsn) as direct, psycopg.connect(pooled) as through:
        assert (is_behind_pooler(direct), is_behind_pooler(through)) == (False, True)
    assert (shares_sessions(dsn), shares_sessions(pooled)) == (False, True)


@pytest.mark.parametrize("pooled", ["session"], indirect=True)
def test_a_pooler_in_session_mode_shares_nothing(pooled: str) -> None:
    """F40: a pooler with one session per connection shares none, so its DSN can be the direct DSN."""
    with psycopg.connect(pooled) as through:
        assert is_behind_pooler(through)
    assert not shares_sessions(pooled)


async def test_a_worker_through_a_pooler(
    app: App, note: Any, dsn: str, pooled: str, db: Any, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """F40 P10: a worker runs through it with no option: no session lock, no LISTEN, no setting; one line reports it."""
    caplog.set_level(logging.INFO, "tallybook.worker")
    app.dsn = pooled
    async with working(app, pooled, lease=timedelta(seconds=30)) as worker:
        put = [await note.enqueue(app, n) for n in range(50)]
        put += app.enqueue_many_sync(db, [note.job(n) for n in range(500)])
        assert {job.state for job in await jobs.ends(*put, seconds=30)} == {"completed"}
        assert worker.sleeper is None
        assert db.execute(ADVISORY).fetchone() == (0,)
        assert db.execute("select session from tallybook.worker").fetchall() == [(False,)]
        told = [record for record in caplog.records if getattr(record, "event", "") == "pooled"]
        assert len(told) == 1 and "behind a pooler in transaction mode" in told[0].getMessage()
    with psycopg.connect(pooled, autocommit=True, prepare_threshold=None) as conn:
        for name, value in (("synchronous_commit", "on"), ("idle_in_transaction_session_timeout", "0")):
            assert conn.execute("select current_setting(%s)", (name,)).fetchone() == (value,)
        assert conn.execute("select count(*) from pg_prepared_statements").fetchone() == (0,)
        assert conn.execute("select count(*) from pg_listening_channels()").fetchone() == (0,)


@pytest.mark.parametrize("pooled", ["rotating"], indirect=True)
def test_a_command_prepares_nothing(pooled: str) -> None:
    """F40: a command repeats a statement on any session of a pooler, and leaves no setting on it for other clients."""
    with ExitStack() as stack:
        for _ in range(3):  # open transactions, so that the pooler has several sessions
            stack.enter_context(psycopg.connect(pooled)).execute("select")
    found = json.loads(run("doctor", "--json", dsn=pooled, code=1))  # of the tests' server
    assert [one["finding"] for one in found if "could not be checked" in one["finding"]] == []
    with psycopg.connect(pooled, autocommit=True, prepare_threshold=None) as other:
        assert {other.execute("show jit").fetchone() for _ in range(8)} == {("on",)}


@pytest.mark.parametrize("pooled", ["rotating"], indirect=True)
async def test_taken_for_a_session_a_pooler_breaks_the_worker(
    app: App, note: Any, pooled: str, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F40, negative control: statements prepared by name, as without a pooler, reach sessions that do not know them.

    A PgBouncer with little load would give the worker the same session every time: this one has several, and takes them
    in turn.
    """
    original = Claimer._prepare

    async def as_direct(self: Claimer, conn: Any) -> None:
        self.link.pooled = False
        await original(self, conn)

    monkeypatch.setattr(Claimer, "_prepare", as_direct)
    links = [Link(pooled, "x"), Link(pooled, "y")]
    failed: list[str] = []
    monkeypatch.setattr("tallybook._db.policy.Outage.failed", lambda *args: failed.append(str(args[1])) or 0.05)
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(psycopg.connect(pooled, prepare_threshold=None)).execute("select 1")
    async with working(app, pooled, queues={"default": 4}) as worker:
        for n in range(30):
            note.enqueue_sync(db, n)
        await eventually(lambda: any("prepared statement" in text for text in failed), "it fails")
        assert worker.claimer.link.pooled is False
    for link in links:
        await link.close()


async def test_a_direct_dsn_gives_the_worker_its_session(
    app: App, note: Any, dsn: str, pooled: str, db: Any, jobs: Jobs
) -> None:
    """F40: with a direct DSN the worker is woken and holds its session; all other statements use the pooler."""
    sleepy = {"poll": timedelta(seconds=60), "direct_dsn": dsn}
    async with working(app, pooled, **sleepy) as worker:
        for _ in range(3):
            await eventually(lambda: worker.sleeper and worker.sleeper.clear, "the worker sleeps")
            with psycopg.connect(pooled, autocommit=True) as producer:
                await jobs.ends(note.enqueue_sync(producer))
        assert worker.claimer.link.pooled and worker.links["ends"].pooled
        assert db.execute("select session from tallybook.worker").fetchall() == [(True,)]


async def test_a_direct_dsn_that_is_none(
    app: App, note: Any, pooled: str, db: Any, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """F40: a direct DSN that also leads through the pooler is logged and not used for a session."""
    async with working(app, pooled, direct_dsn=pooled) as worker:
        await jobs.ends(note.enqueue_sync(db))
        assert worker.sleeper is None
    assert "also leads to a pooler in transaction mode" in caplog.text


async def test_a_direct_dsn_of_another_database(app: App, pooled: str, dsn: str, server: Any) -> None:
    """A direct DSN of another database, where the worker would be registered, is refused at the start."""
    with pytest.raises(ConfigError, match="another database"):
        async with working(app, pooled, direct_dsn=server.dsn("postgres")) as worker:
            await eventually(
                lambda: worker._background.tasks or worker._failed or worker.claimer.stopping.is_set(), "started"
            )


@pytest.mark.slow
def test_a_killed_worker_behind_a_pooler_is_rescued_by_its_lease(dsn: str, db: Any, pooled: str) -> None:
    """F1 F40 P6: no session shows the death of a worker: its job runs again within its lease and 5 s.

    The others look every 4 s at the latest; the remaining second is for a busy machine to start the job.
    """
    times = {"lease": 6.0, "heartbeat": 2.0, "rescue_look": 4.0}
    with Workers(pooled, db) as workers:
        first = workers.start(**times)
        job = hold.enqueue_sync(db, 1)
        wait_until(lambda: workers.ran(job), "it runs")
        workers.start(**times)
        killed = time.monotonic()
        first.signal(signal.SIGKILL)
        wait_until(lambda: len(workers.ran(job)) == 2, "it runs again")
        assert time.monotonic() - killed < 6 + 5
        workers.open_gate()


def test_the_wake_probe_leaves_no_lock_behind(dsn: str, pooled: str, db: Any) -> None:
    """F40: the probe for sleepers locks and unlocks in one expression, so no end of a transaction leaves its lock."""
    with psycopg.connect(dsn, autocommit=True) as sleeping:
        sleeping.execute("select tallybook.listen_begin(array['default'])")
        with psycopg.connect(pooled, prepare_threshold=None) as producer:
            for turn in range(20):
                producer.execute("select tallybook.enqueue('default', 'note')")
                if turn % 3 == 0:
                    producer.commit()
                elif turn % 3 == 1:
                    producer.rollback()
                else:
                    with pytest.raises(psycopg.Error):
                        producer.execute("select 1/0")
                    producer.rollback()
        exclusive = ADVISORY + " and mode = 'ExclusiveLock'"
        assert db.execute(exclusive).fetchone() == (0,)
        sleeping.execute("select tallybook.listen_end(array['default'])")
    with psycopg.connect(pooled, prepare_threshold=None) as producer:
        producer.execute("select tallybook.enqueue('default', 'note') from generate_series(1, 10)")
    assert db.execute(ADVISORY).fetchone() == (0,)


async def test_an_apps_pool_behind_a_pooler_prepares_nothing(app: App, note: Any, pooled: str, db: Any) -> None:
    """F40: the pool of app.open() notices the pooler, too: of many concurrent enqueues none fails."""
    import asyncio

    async with app.open(dsn=pooled, max_size=8):
        await asyncio.gather(*(note.enqueue(app, n) for n in range(300)))
    assert db.execute("select count(*) from tallybook.job").fetchone() == (300,)


async def test_what_a_role_sets_is_told_behind_a_pooler(
    app: App, note: Any, pooled: str, db: Any, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """F20 F40: a time-out set for a role or database cannot be overridden there: the worker logs it."""
    (name,) = db.execute("select current_database()").fetchone()
    db.execute(f"alter database {name} set statement_timeout = '20s'")
    async with working(app, pooled):
        await jobs.ends(note.enqueue_sync(db))
    assert "statement_timeout is '20000'" in caplog.text
