"""One effect per job: atomic tasks in real processes that are killed or stopped and continued, and a killed server."""

import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from support.atomic_process import TABLES, app, pay, pay_in_thread, pay_slowly
from support.waiting import wait_until
from support.worker_process import WorkerProcess, Workers
from tallybook._db.migrate import migrate
from tallybook.embedded import temporary_server

pytestmark = pytest.mark.servers
QUEUED = (
    "select count(*) from tallybook.job"
    " where task like 'pay%' and state in ('available', 'running', 'retrying', 'scheduled')"
)
WRONG = """
select (select count(*) from (select job_id from effect group by job_id having count(*) <> 1) x),
       (select count(*) from tallybook.job j where task like 'pay%' and state = 'completed'
          and not exists (select from effect e where e.job_id = j.id)),
       (select count(*) from effect e join tallybook.job j on j.id = e.job_id where state <> 'completed'),
       (select count(*) from tallybook.job where task = 'follow') - (select count(*) from effect)
"""


@pytest.fixture
def workers(dsn: str, db: Any) -> Iterator[Workers]:
    db.execute(TABLES)
    with Workers(dsn, db, module="support.atomic_process") as workers:
        yield workers


def row(db: Any, query: str) -> tuple[Any, ...]:
    return db.execute(query).fetchone()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_worker_that_dies_at_commit(workers: Workers, where: str) -> None:
    """P4 S5-05 F1 F3: after SIGKILL right before or right after COMMIT, the effect and the follow-up job exist once."""
    first = workers.start(die=where)
    job = pay.enqueue_sync(workers.db, 1)
    assert first.ends() == -signal.SIGKILL
    if where == "before":
        workers.start()
    wait_until(lambda: row(workers.db, QUEUED) == (0,), "the job has ended")
    info = app.get(job).sync(workers.db)
    assert (info.state, info.attempts) == ("completed", 2 if where == "before" else 1)
    assert workers.db.execute("select job_id, attempt from effect").fetchall() == [(job.id, info.attempts)]
    assert row(workers.db, WRONG) == (0, 0, 0, 0)


def zombie(workers: Workers) -> tuple[Any, WorkerProcess]:
    """Return a job in its second attempt, and the worker of the first, stopped in the middle of it."""
    first = workers.start()
    job = pay_slowly.enqueue_sync(workers.db, 1)
    began = "select count(*) from began"
    wait_until(lambda: row(workers.db, began) == (1,), "the first attempt runs")
    first.signal(signal.SIGSTOP)
    workers.start()
    wait_until(lambda: row(workers.db, began) == (2,), "the second attempt runs")
    return job, first


@pytest.mark.slow
def test_a_worker_that_was_stopped_past_its_lease(workers: Workers) -> None:
    """P4 P5 F8: after SIGSTOP past the lease and SIGCONT, the rescued attempt's effect is the only one."""
    job, first = zombie(workers)
    workers.db.execute("insert into gate values (true)")
    wait_until(lambda: row(workers.db, "select attempt from effect") == (2,), "the second attempt's effect is there")
    first.signal(signal.SIGCONT)
    note = pay.enqueue_sync(workers.db, 2)
    wait_until(lambda: row(workers.db, QUEUED) == (0,), "all has ended")
    first.signal(signal.SIGTERM)
    assert first.ends() == 0
    effects = workers.db.execute("select job_id, attempt from effect order by job_id").fetchall()
    assert effects == [(job.id, 2), (note.id, 1)]


@pytest.mark.slow
def test_control_a_zombie_without_the_fence(workers: Workers) -> None:
    """Negative control: with a `tallybook.complete` that accepts everything, the zombie's effect exists, too."""
    workers.db.execute('alter table effect drop constraint "one effect a job"')
    workers.db.execute(
        "create or replace function tallybook.complete(lease uuid, job_id bigint, attempt int,"
        " result jsonb default null, at timestamptz default clock_timestamp())"
        " returns boolean language sql as"
        " $$ select tallybook.complete_many(array[lease], array[job_id], array[attempt]) is not null $$"
    )
    job, first = zombie(workers)
    # The zombie's heartbeat would cancel the handler first, so make it too late, as on a blocked event loop.
    workers.db.execute("update tallybook.worker set ended_at = null, seen_at = clock_timestamp(), gone_at = null")
    workers.db.execute("insert into gate values (true)")
    first.signal(signal.SIGCONT)
    wait_until(lambda: row(workers.db, "select count(*) from effect") == (2,), "the second effect shows")
    assert workers.db.execute("select job_id, attempt from effect order by attempt").fetchall() == [
        (job.id, 1),
        (job.id, 2),
    ]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_one_effect_a_job_through_kills(workers: Workers) -> None:
    """P4 S5-03 S5-05 F1 F8: 1000 jobs end under random kills and stops; completed ones have one effect, others none."""
    put = [pay.job(n) if n % 2 else pay_in_thread.job(n) for n in range(1000)]
    running = [workers.start(), workers.start(), workers.start()]
    for at in range(0, len(put), 100):
        app.enqueue_many_sync(workers.db, put[at : at + 100])
        victim = random.choice(running)
        if random.random() < 0.5:
            victim.signal(signal.SIGKILL)
            running.remove(victim)
            running.append(workers.start())
        else:
            victim.signal(signal.SIGSTOP)
            until = time.monotonic() + 4.0
            wait_until(lambda until=until: time.monotonic() > until, "its lease is over")  # type: ignore[misc]
            victim.signal(signal.SIGCONT)
    wait_until(lambda: row(workers.db, QUEUED) == (0,), "all have ended", seconds=60)
    assert row(workers.db, WRONG) == (0, 0, 0, 0)
    dead = row(workers.db, "select count(*) from tallybook.job where state = 'dead' and reason <> 'crashed'")
    assert dead == (0,)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_one_effect_a_job_through_the_servers_death() -> None:
    """P4 P10 F4 F5: kill -9 of the server, three times under load: one effect per job, and no worker is restarted."""

    class Reconnecting:
        """The test's own connection, which the server's death breaks, too."""

        def __init__(self, dsn: str) -> None:
            self._dsn = dsn
            self.conn = psycopg.connect(dsn, autocommit=True)

        def execute(self, *statement: Any) -> Any:
            try:
                return self.conn.execute(*statement)
            except psycopg.OperationalError:
                self.conn = wait_until(self._again, "the server is back")
                return self.conn.execute(*statement)

        def _again(self) -> psycopg.Connection[Any] | None:
            try:
                return psycopg.connect(self._dsn, autocommit=True)
            except psycopg.OperationalError:
                return None

    with temporary_server(18, settings={"fsync": "on"}) as server:
        dsn = server.create_database("shop")
        with psycopg.connect(dsn) as conn:
            migrate(conn)
            conn.execute(TABLES)
        db, effects = Reconnecting(dsn), "select count(*) from effect"
        with Workers(dsn, module="support.atomic_process") as workers:
            workers.db = db
            workers.start()
            workers.start()
            for _ in range(3):
                row(db, "select 1")  # reconnects after the server's death
                app.enqueue_many_sync(db.conn, [pay.job(n) if n % 2 else pay_in_thread.job(n) for n in range(400)])
                done = row(db, effects)[0]
                wait_until(lambda done=done: row(db, effects)[0] > done + 30, "they run")  # type: ignore[misc]
                server.kill()
                server.start()
            wait_until(lambda: row(db, QUEUED) == (0,), "all have ended", seconds=60)
            assert row(db, WRONG) == (0, 0, 0, 0)
            assert row(db, effects) == (1200,)
