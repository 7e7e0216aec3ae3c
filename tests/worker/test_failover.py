"""The server dies for good and its standby, which may lack the last commits, takes over; a server has just started.

Without a standby, tests replace the function that returns the timeline; `make chaos NEMESES=failover` promotes one.
"""

import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from support.clusters import streaming
from support.database import one
from support.waiting import wait_until
from support.worker_process import Workers, app, rest
from support.workers import QUICK, Jobs, eventually, working
from tallybook import App, Context
from tallybook._db.migrate import migrate
from tallybook._worker.life.heartbeat import _BEAT, Heartbeat
from tallybook.embedded import Server, temporary_server


@pytest.mark.slow
def test_a_worker_follows_a_failover() -> None:
    """F13 F14 P1 P10: primary killed, standby promoted: a worker with both hosts resumes within 10 s, none is lost.

    Negative control: a worker whose DSN has only the old primary does nothing more.
    """

    def dsn_of(*servers: Server) -> str:
        """Return the DSN of the one of these servers that accepts writes."""
        parts = [conninfo_to_dict(server.dsn("shop")) for server in servers]
        hosts, ports = (",".join(str(part[key]) for part in parts) for key in ("host", "port"))
        user = str(parts[0]["user"])
        return make_conninfo(host=hosts, port=ports, user=user, dbname="shop", target_session_attrs="read-write")

    with ExitStack() as stack:
        primary, standby = stack.enter_context(streaming())
        with psycopg.connect(primary.dsn("postgres"), autocommit=True) as conn:
            conn.execute("alter system set synchronous_standby_names = '*'")
            conn.execute("select pg_reload_conf()")
            shown = "select count(*) from pg_stat_replication where sync_state = 'sync'"
            wait_until(lambda: conn.execute(shown).fetchone() == (1,), "a commit is also on the standby")
        both = dsn_of(primary, standby)
        app.dsn = both
        db = psycopg.connect(both, autocommit=True)
        workers = stack.enter_context(Workers(both, db))
        lonely = stack.enter_context(Workers(dsn_of(primary), db))
        worker = workers.start(queues={"default": 10})
        lonely.start(queues={"lonely": 10})
        put = []
        for n in range(300):
            put.append(rest.enqueue_sync(app, n))
        first = rest.with_(queue="lonely").enqueue_sync(app, 0)
        wait_until(lambda: app.get(first).sync(db).state == "completed", "the lonely one works")
        primary.kill()
        with psycopg.connect(standby.dsn("shop"), autocommit=True) as conn:
            conn.execute("select pg_promote()")
        promoted = time.monotonic()
        with psycopg.connect(both, autocommit=True) as db:
            workers.db = lonely.db = db
            later = [rest.enqueue_sync(app, n) for n in range(1000, 1020)]
            alone = rest.with_(queue="lonely").enqueue_sync(app, 1)
            wait_until(lambda: app.get(later[0]).sync(db).state == "completed", "it goes on")
            took = time.monotonic() - promoted
            for job in [*put, *later]:
                wait_until(
                    lambda job=job: app.get(job).sync(db).state == "completed",  # type: ignore[misc]
                    f"{job} ends",
                    seconds=30,
                )
            ends = "select count(*), count(distinct (entry_xid, entry_seq)) from tallybook.outcome"
            assert db.execute(ends + " where state = 'completed'").fetchone() == (321, 321)
            assert app.get(alone).sync(db).state == "available"
            assert worker.process.poll() is None
            print(f"went on {took:.1f} s after the promotion")
            assert took < 10


def test_after_a_start_of_the_server_everybody_has_a_lease_to_come_back() -> None:
    """F4 F5 P6: a worker that starts right after the server rescues none whose session is slow to return.

    A worker that was heard after the start and then lost has the short grace; a silent one is rescued after its lease.
    """
    with temporary_server() as server:
        dsn = server.create_database("shop")
        claim = "select jobs from tallybook.claim(%s, array['default'], array[1], gen_random_uuid())"
        with psycopg.connect(dsn) as conn:
            migrate(conn)
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("select tallybook.enqueue('default', 'note') from generate_series(1, 2)")
            start = "select tallybook.worker_start(%s, array['default'], session => true, lease => '30 s')"
            workers = ("silent", "heard")
            silent, heard = (conn.execute(start, (name,)).fetchone()[0] for name in workers)  # type: ignore[index]
            for worker in (silent, heard):
                assert conn.execute(claim, (worker,)).fetchone() == (1,)
        server.kill()
        server.start()
        with psycopg.connect(dsn, autocommit=True) as conn:
            (started,) = conn.execute("select pg_postmaster_start_time()").fetchone() or (None,)
            conn.execute("select tallybook.renew(%s, 0)", (heard,))

            def look(seconds: float) -> tuple[int, str]:
                at = started + timedelta(seconds=seconds)
                lost = one(conn, "select lost from tallybook.rescue(grace => '1 s', at => %s)", at)
                names = conn.execute("select name from tallybook.worker where ended_at is null order by 1").fetchall()
                return lost, ",".join(name for (name,) in names)

            assert look(3) == (0, "heard,silent")  # noticed
            assert look(5) == (1, "silent")  # the one that was heard, and has no session any more
            assert look(29) == (0, "silent")
            assert look(31) == (0, "silent")  # noticed
            assert look(43) == (1, "")


TIMELINE = "create or replace function tallybook._timeline() returns text language sql as $$ select '{}'::text $$"
# No rescue here: another worker of the process would take the jobs that this one gives up.
ALONE = {"heartbeat": timedelta(seconds=0.2), "lease": timedelta(seconds=60), "rescue_look": timedelta(seconds=60)}


async def run_and_lose(app: App, db: Any, jobs: Jobs, runs: list[int]) -> Any:
    """Return a job that its worker has completed and the database has lost; the watermark is past it."""

    @app.task
    async def note(ctx: Context) -> None:
        runs.append(ctx.attempt)

    job = note.enqueue_sync(db)
    await jobs.ends(job)
    await jobs.ends(note.enqueue_sync(db))
    passed = (
        "select count(*) from tallybook.worker w join tallybook.claim c on c.worker_id = w.id and c.id < w.open_from"
    )
    await eventually(lambda: db.execute(passed).fetchone()[0] >= 1, "the watermark is past the first claim")
    # Delete the outcome and keep the claim, as on a standby.
    lose = (
        "delete from tallybook.outcome o using tallybook.entry e where e.job_id = %s"
        " and o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq"
    )
    assert db.execute(lose, (job.id,)).rowcount == 1
    assert jobs(job).state == "running"
    return job


@pytest.mark.servers
async def test_a_lost_end_is_found_after_a_failover(
    app: App, dsn: str, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F13 P3 P10: if a job's end was lost with the old primary, its worker registers anew and the job runs again."""
    jobs, runs, beating, beat = Jobs(app, db), list[int](), threading.Lock(), Heartbeat._beat

    def one_at_a_time(self: Heartbeat) -> None:
        with beating:
            beat(self)

    monkeypatch.setattr(Heartbeat, "_beat", one_at_a_time)
    async with working(app, dsn, **ALONE):
        job = await run_and_lose(app, db, jobs, runs)
        # The standby's watermark is older than the lost end: no heartbeat may advance it before the failover.
        with beating:
            db.execute("update tallybook.worker set open_from = 0")
            db.execute(TIMELINE.format("00000002"))
        (ended,) = await jobs.ends(job)
    assert (ended.state, ended.attempts) == ("completed", 2)
    assert runs == [1, 1, 2]


@pytest.mark.servers
@pytest.mark.slow
async def test_control_without_the_timeline_a_lost_end_is_never_found(app: App, dsn: str, db: Any) -> None:
    """F13: negative control: a worker that does not notice reports its older claims ended, and the job stays lost."""
    jobs, runs = Jobs(app, db), list[int]()
    async with working(app, dsn, **{**ALONE, "lease": QUICK["lease"], "rescue_look": QUICK["rescue_look"]}):
        job = await run_and_lose(app, db, jobs, runs)
        before = db.execute("update tallybook.worker set open_from = 0 returning seen_at").fetchone()[0]
        beats = "select count(*) from tallybook.worker where seen_at > %s + interval '3 s' and open_from > 1"
        await eventually(lambda: db.execute(beats, (before,)).fetchone()[0] == 1, "it has beaten on")
        assert jobs(job).state == "running"
    # Even after the worker's stop: nobody looks at claims below the watermark.
    assert jobs(job).state == "running"


@pytest.mark.servers
async def test_what_runs_at_a_failover_is_fenced(app: App, dsn: str, db: Any) -> None:
    """F13 P5: a handler that runs during a failover is cancelled, and its job runs again under a new lease."""
    living = "select id from tallybook.worker where ended_at is null order by id"
    jobs, runs = Jobs(app, db), list[int]()

    @app.task
    async def hold(ctx: Context) -> None:
        runs.append(ctx.attempt)
        while ctx.attempt == 1:
            await eventually(lambda: False, "cancelled", seconds=60)

    job = hold.enqueue_sync(db)
    async with working(app, dsn, **ALONE):
        await eventually(lambda: runs, "the handler has begun")
        db.execute(TIMELINE.format("00000002"))
        (ended,) = await jobs.ends(job)
        assert (ended.state, ended.attempts, runs) == ("completed", 2, [1, 2])
        await eventually(lambda: len(db.execute(living).fetchall()) == 1, "its old self is off record")


@pytest.mark.servers
def test_each_timeline_has_worker_numbers_of_its_own(db: Any) -> None:
    """F13: worker numbers from before the failover, even forgotten ones, are not reused after it."""
    start = "select tallybook.worker_start('w', '{default}')"
    first = db.execute(start).fetchone()[0]
    db.execute(TIMELINE.format("0000000B"))
    numbers = [db.execute(start).fetchone()[0] for _ in range(3)]
    assert first < 1_000_000
    assert numbers == [10_000_001, 10_000_002, 10_000_003]


@pytest.mark.servers
def test_a_beat_on_another_timeline_changes_nothing(db: Any) -> None:
    """F13: the timeline check and the heartbeat are one statement: if refused, it leaves watermark and time alone."""
    worker = db.execute("select tallybook.worker_start('w', '{default}')").fetchone()[0]
    here = db.execute("select tallybook._timeline()").fetchone()[0]
    read = "select seen_at, open_from from tallybook.worker where id = %s"
    before = db.execute(read, (worker,)).fetchone()
    with pytest.raises(Exception, match="timeline") as refused:
        db.execute(_BEAT, ("0000FFFF", worker, 1, [], None, None))
    assert refused.value.sqlstate == "TB006"  # type: ignore[attr-defined]
    assert db.execute(read, (worker,)).fetchone() == before
    db.execute(_BEAT, (here, worker, 1, [], None, None))
    wait_until(lambda: db.execute(read, (worker,)).fetchone() != before, "on its own timeline it beats")
