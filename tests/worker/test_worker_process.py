"""Workers as real processes, with real signals and a real server that goes away."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from support.waiting import wait_until
from support.worker_process import ROOT, Workers, app, hold, note, rest, stuck
from tallybook import JobInfo
from tallybook._db.migrate import migrate
from tallybook.embedded import Server, temporary_server


@pytest.fixture
def workers(dsn: str, db: Any) -> Iterator[Workers]:
    with Workers(dsn, db) as workers:
        yield workers


def state(workers: Workers, job: Any) -> JobInfo:
    return app.get(job).sync(workers.db)


def ended(workers: Workers, *jobs: Any, seconds: float = 15.0) -> list[JobInfo]:
    ends = {"completed", "dead", "cancelled"}
    wait_until(lambda: {state(workers, job).state for job in jobs} <= ends, f"{jobs} have ended", seconds=seconds)
    return [state(workers, job) for job in jobs]


def runs(workers: Workers, job: Any) -> None:
    wait_until(lambda: workers.ran(job), f"job {job.id} runs")


def test_sigterm_finishes_what_runs(workers: Workers) -> None:
    """After SIGTERM the running job ends as usual, nothing more is claimed, and the exit code is 0."""
    living = "select count(*) from tallybook.worker where ended_at is null"
    worker = workers.start()
    running = hold.enqueue_sync(workers.db, 1)
    runs(workers, running)
    worker.signal(signal.SIGTERM)
    wait_until(lambda: _asleep(workers), "the signal has arrived")
    later = note.enqueue_sync(workers.db, 2)
    assert state(workers, running).state == "running"
    workers.open_gate()
    assert worker.ends() == 0
    assert (state(workers, running).state, state(workers, later).state) == ("completed", "available")
    assert workers.db.execute(living).fetchone() == (0,)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_gives_jobs_back(workers: Workers, number: signal.Signals) -> None:
    """A second SIGTERM or SIGINT aborts: the job is available at once, with no failure and no crash."""
    worker = workers.start()
    running = hold.enqueue_sync(workers.db, 1)
    runs(workers, running)
    worker.signal(number)
    wait_until(lambda: not worker.process.poll() and _asleep(workers), "the first signal has arrived")
    worker.signal(number)
    assert worker.ends() == 0
    info = state(workers, running)
    assert (info.state, info.failures, info.crashes) == ("available", 0, 0)
    second = workers.start()
    wait_until(lambda: len(workers.ran(running)) == 2, "another worker runs it")
    assert workers.ran(running)[-1] == (2, second.name)


def _asleep(workers: Workers) -> bool:
    # If a job enqueued now is not claimed, the worker claims no more.
    job = note.enqueue_sync(workers.db, 9)
    try:
        wait_until(lambda: state(workers, job).state != "available", "", seconds=0.5)
    except AssertionError:
        app.cancel(job).sync(workers.db)
        return True
    return False


def test_a_thread_that_does_not_end_does_not_keep_the_process(workers: Workers) -> None:
    """After the second signal the process ends, although a plain handler still runs; its job is given back."""
    worker = workers.start()
    job = stuck.enqueue_sync(workers.db)
    wait_until(lambda: state(workers, job).state == "running", "it runs")
    worker.signal(signal.SIGTERM)
    wait_until(lambda: _asleep(workers), "the first signal has arrived")
    worker.signal(signal.SIGTERM)
    worker.ends()
    info = state(workers, job)
    assert (info.state, info.failures, info.crashes) == ("available", 0, 0)


@pytest.mark.direct("a killed worker is missed by the end of its session")
def test_jobs_of_a_killed_worker_are_rescued(workers: Workers) -> None:
    """S1-11 S4-20: after SIGKILL another worker runs the job within 8 s; its unique key is not stuck.

    The lease is 30 s here: the missing session shows the death. It counts as a crash, not as a failure.
    """
    slow = {"lease": 30.0, "heartbeat": 10.0}
    first = workers.start(**slow)
    job = hold.with_(unique="asset 7").enqueue_sync(workers.db, 1)
    runs(workers, job)
    second = workers.start(**slow)
    began = time.monotonic()
    first.signal(signal.SIGKILL)
    wait_until(lambda: len(workers.ran(job)) == 2, "the other worker runs it", seconds=8)
    assert time.monotonic() - began < 8
    assert hold.with_(unique="asset 7").enqueue_sync(workers.db, 1).id == job.id
    workers.open_gate()
    (info,) = ended(workers, job)
    assert (info.state, info.attempts, info.crashes, info.failures) == ("completed", 2, 1, 0)
    assert workers.ran(job) == [(1, "w1"), (2, second.name)]
    assert info.errors is not None
    assert info.errors[0]["type"] == "WorkerLost"
    again = hold.with_(unique="asset 7").enqueue_sync(workers.db, 1)
    assert again.created
    ended(workers, again)


@pytest.mark.slow
def test_a_job_that_kills_its_workers_is_dead(workers: Workers) -> None:
    """A job that three workers died with is a dead letter, with its crashes counted and no failure."""
    job = hold.enqueue_sync(workers.db, 1)
    for crash in range(1, 4):
        worker = workers.start()
        wait_until(lambda crash=crash: len(workers.ran(job)) == crash, "it runs")  # type: ignore[misc]
        worker.signal(signal.SIGKILL)
        worker.ends()
    workers.start()
    (info,) = ended(workers, job)
    assert (info.state, info.reason, info.crashes, info.failures, info.attempts) == ("dead", "crashed", 3, 0, 3)


def test_a_zombie_is_refused_and_comes_back(workers: Workers) -> None:
    """A worker stopped for longer than its lease is given up. Its late end is refused, and it returns as a new one."""
    zombie = workers.start()
    job = hold.enqueue_sync(workers.db, 1)
    runs(workers, job)
    (old_id,) = workers.ids(zombie)
    zombie.signal(signal.SIGSTOP)
    second = workers.start()
    wait_until(lambda: len(workers.ran(job)) == 2, "the other worker runs it")
    workers.open_gate()
    (info,) = ended(workers, job)
    zombie.signal(signal.SIGCONT)
    wait_until(lambda: len(workers.ids(zombie)) == 2, "the zombie is back under a new number")
    assert (info.state, info.attempts, info.crashes) == ("completed", 2, 1)
    assert info.worker == second.name
    ends = workers.db.execute("select attempt, state from tallybook.attempt where job_id = %s order by 1", (job.id,))
    assert ends.fetchall() == [(1, "lost"), (2, "completed")]
    second.signal(signal.SIGTERM)
    assert second.ends() == 0
    more = note.enqueue_sync(workers.db, 2)
    ended(workers, more)
    assert workers.ran(more) == [(1, zombie.name)]
    assert workers.ids(zombie)[0] == old_id


@pytest.mark.slow
def test_no_worker_is_a_leader(workers: Workers) -> None:
    """S1-10: whichever worker dies, the others promote, rescue and run jobs; there is no coordinator to lose."""
    started = [workers.start() for _ in range(3)]
    while len(started) > 1:
        running = hold.enqueue_sync(workers.db, 1)
        runs(workers, running)
        name = workers.ran(running)[0][1]
        victim = next(worker for worker in started if worker.name == name)
        victim.signal(signal.SIGKILL)
        started.remove(victim)
        delayed = note.with_(delay="300 ms").enqueue_sync(workers.db, 2)
        ended(workers, delayed)
        wait_until(lambda running=running: len(workers.ran(running)) == 2, "it was rescued")  # type: ignore[misc]
        workers.open_gate()
        ended(workers, running)
        workers.db.execute("delete from gate")


@pytest.mark.parametrize("limited", [True, False], ids=["limited", "control"])
def test_a_limit_of_one_holds_in_all_worker_processes(workers: Workers, limited: bool) -> None:
    """S2-14: a concurrency limit of 1 holds across all processes; control: without a limit all jobs run at once."""
    if limited:
        workers.db.execute("select tallybook.concurrency_limit_set('task:hold', 1)")
    for _ in range(2):
        workers.start(queues={"default": 2})
    held = [hold.enqueue_sync(workers.db, n) for n in range(3)]
    began = "select count(*) from ran where n < 3"
    wait_until(lambda: workers.db.execute(began).fetchone() == (1 if limited else 3,), "those that may run do")
    after = [note.enqueue_sync(workers.db, 9) for _ in range(10)]
    for job in after:
        ended(workers, job)
    assert workers.db.execute(began).fetchone() == (1 if limited else 3,)
    workers.open_gate()
    for job in held:
        ended(workers, job)


@pytest.mark.slow
def test_many_workers_run_each_job_once(workers: Workers) -> None:
    """S2-10 S5-10: adding worker processes shares the work; each of 2,000 jobs runs exactly once."""
    fleet = [workers.start(wait=False, queues={"default": 20}) for _ in range(4)]
    for worker in fleet:
        wait_until(lambda worker=worker: workers.ids(worker), "is on record")  # type: ignore[misc]
    for _ in range(20):
        app.enqueue_many_sync(workers.db, [note.job(n) for n in range(100)])
    count = "select count(*) from ran"
    wait_until(lambda: workers.db.execute(count).fetchone() == (2000,), "all have run", seconds=40)
    for worker in fleet:
        worker.signal(signal.SIGTERM)
    assert [worker.ends() for worker in fleet] == [0] * 4
    attempts = "select count(*), count(distinct job_id), max(attempt) from tallybook.attempt where state = 'completed'"
    assert workers.db.execute(attempts).fetchone() == (2000, 2000, 1)
    assert workers.db.execute("select count(distinct job_id), count(distinct worker) from ran").fetchone() == (2000, 4)


@pytest.mark.slow
def test_more_than_100_consumers_take_no_job_twice(dsn: str, db: Any) -> None:
    """S3-10: 104 consumers in 4 processes, each with its own connection, claim by SQL: no job goes to two."""
    consumers = """
import asyncio, json, sys, uuid
import psycopg

async def consume(dsn, name):
    taken = []
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=None) as conn:
        row = await conn.execute("select tallybook.worker_start(%s, array['default'])", (name,))
        (worker,) = await row.fetchone()
        ready.release()
        await start.wait()
        while True:
            lease = uuid.uuid4()
            row = await (await conn.execute(
                "select jobs from tallybook.claim(%s::int, array['default'], array[%s::int], %s)",
                (worker, 1 + worker % 3, lease),
            )).fetchone()
            if not row[0]:
                return taken
            rows = await conn.execute("select job_id, attempt from tallybook.claimed_jobs(%s)", (lease,))
            jobs = await rows.fetchall()
            taken += [job_id for job_id, _ in jobs]
            for job_id, attempt in jobs:
                await conn.execute("select tallybook.complete(%s, %s, %s)", (lease, job_id, attempt))

async def main(dsn, number):
    global ready, start
    ready, start = asyncio.Semaphore(0), asyncio.Event()
    consumers = [asyncio.create_task(consume(dsn, f"{number}/{n}")) for n in range(26)]
    for _ in consumers:
        await ready.acquire()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    start.set()
    print(json.dumps(await asyncio.gather(*consumers)))

asyncio.run(main(*sys.argv[1:]))
"""
    clients = """
select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
   and backend_type = 'client backend' and query like '%tallybook.worker_start%'"""
    app.enqueue_many_sync(db, [note.job(n) for n in range(1500)])
    crowd = [
        subprocess.Popen(
            [sys.executable, "-c", consumers, dsn, str(n)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ,
        )
        for n in range(4)
    ]
    try:
        for process in crowd:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        assert db.execute(clients).fetchone() == (104,)
        said = []
        for process in crowd:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in crowd:
            said.append(process.communicate(timeout=60)[0])
    finally:
        for process in crowd:
            process.kill()
            process.wait()
    taken = [job_id for text in said for one in json.loads(text) for job_id in one]
    assert len(taken) == len(set(taken)) == 1500
    states = "select state, count(*) from tallybook.job group by state"
    assert db.execute(states).fetchall() == [("completed", 1500)]


@pytest.fixture
def own_server() -> Iterator[Server]:
    """A server that the test may kill."""
    with temporary_server() as server:
        with psycopg.connect(server.create_database("shop")) as conn:
            migrate(conn)
        yield server


@pytest.mark.slow
def test_a_restart_of_the_server_loses_nothing(own_server: Server) -> None:
    """The server is killed and restarted under load: the worker waits, reconnects, and every job completes."""
    dsn = own_server.dsn("shop")
    with Workers(dsn, psycopg.connect(dsn, autocommit=True)) as workers:
        worker = workers.start()
        jobs = app.enqueue_many_sync(workers.db, [rest.job(n) for n in range(3000)])
        done = "select count(*) from tallybook.outcome where state = 'completed'"
        wait_until(lambda: workers.db.execute(done).fetchone()[0] > 100, "it is at work")
        own_server.kill()
        own_server.start()
        workers.db = psycopg.connect(dsn, autocommit=True)
        later = rest.enqueue_sync(workers.db, 1)
        ended(workers, jobs[-1], later, seconds=40)
        left = "select state, count(*) from tallybook.job group by state"
        wait_until(lambda: workers.db.execute(left).fetchall() == [("completed", 3001)], "all have ended")
        assert worker.process.poll() is None
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0
        workers.db.close()


@pytest.mark.slow
def test_a_schedules_lock_and_its_work_go_down_and_come_back_together(own_server: Server) -> None:
    """S2-03: nothing fires or runs while the server is down; later each fire has its one job, never half."""
    # Ticks recorded as enqueued whose job is missing, and jobs of the schedule without a tick.
    half = """
select f.tick, j.id from tallybook.fire f
  full join (select * from tallybook.job where task = 'rest') j on j.id = f.job_id
 where f.what = 'enqueued' and j.id is null or f.tick is null"""
    completed = "select count(*) from tallybook.job where task = 'rest' and state = 'completed'"
    dsn = own_server.dsn("shop")
    with Workers(dsn, psycopg.connect(dsn, autocommit=True)) as workers:
        workers.start()
        workers.db.execute(
            "select tallybook.schedule_set('tick', task => 'rest', every => '1 s', args => '{\"n\": 1}')"
        )
        wait_until(lambda: workers.db.execute(completed).fetchone()[0] >= 2, "it fires and runs")
        own_server.kill()
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(dsn, connect_timeout=1)
        own_server.start()
        workers.db = psycopg.connect(dsn, autocommit=True)
        (before,) = workers.db.execute(completed).fetchone()
        wait_until(
            lambda: workers.db.execute(completed).fetchone()[0] >= before + 2, "it fires and runs again", seconds=40
        )
        workers.db.execute("select tallybook.schedule_pause('tick')")
        assert workers.db.execute(half).fetchall() == []
        workers.db.close()


@pytest.mark.slow
def test_a_limit_outlives_the_workers_that_have_used_it(workers: Workers) -> None:
    """S1-19: after the one call an hour, its worker is killed and another started; the next call waits out the hour."""
    workers.db.execute("select tallybook.rate_limit_set('provider', 1, '1 hour')")
    limited = note.with_(limits=("provider",))
    first = workers.start()
    called = limited.enqueue_sync(workers.db, 1)
    ended(workers, called)
    first.signal(signal.SIGKILL)
    first.ends()
    workers.start()
    held = limited.enqueue_sync(workers.db, 2)
    waits = "select run_at > now() + interval '50 min' from tallybook.scheduled where job_id = %s"
    wait_until(lambda: workers.db.execute(waits, [held.id]).fetchall() == [(True,)], "it waits for its turn")
    assert workers.ran(held) == []


def test_a_worker_waits_for_a_server_that_is_not_up(own_server: Server) -> None:
    """Started before its server, a worker waits, and runs the job that is available when it comes."""
    dsn = own_server.dsn("shop")
    with psycopg.connect(dsn, autocommit=True) as db, Workers(dsn, db):
        job = note.enqueue_sync(db, 1)
    own_server.kill()
    with Workers(dsn) as workers:
        worker = workers.start(wait=False)
        wait_until(lambda: "waiting for it" in worker.said, "it waits")
        own_server.start()
        workers.db = psycopg.connect(dsn, autocommit=True)
        assert ended(workers, job)[0].state == "completed"
        workers.db.close()


def test_a_worker_that_waits_for_its_server_can_be_stopped(own_server: Server) -> None:
    """SIGTERM ends a worker that was started before its server, although there is nothing to connect to."""
    dsn = own_server.dsn("shop")
    own_server.kill()
    with Workers(dsn) as workers:
        worker = workers.start(wait=False)
        wait_until(lambda: "waiting for it" in worker.said, "it waits")
        worker.signal(signal.SIGTERM)
        worker.ends()


@pytest.mark.slow
def test_a_worker_whose_server_is_away_can_be_stopped(own_server: Server) -> None:
    """SIGTERM ends a worker whose server died while it was at work, within 12 s."""
    dsn = own_server.dsn("shop")
    with Workers(dsn, psycopg.connect(dsn, autocommit=True)) as workers:
        worker = workers.start(stop_timeout=1.0, abort_timeout=1.0)
        jobs = app.enqueue_many_sync(workers.db, [rest.job(n) for n in range(2000)])
        wait_until(lambda: state(workers, jobs[0]).state == "completed", "it is at work")
        own_server.kill()
        worker.signal(signal.SIGTERM)
        worker.ends(12)
