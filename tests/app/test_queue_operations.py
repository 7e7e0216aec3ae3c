"""Queues in Python, in running workers and on the command line. sql/test_queues.py covers the verbs."""

import json
from datetime import timedelta
from typing import Any

import pytest

from support.cli import invoke, run
from support.workers import Jobs, eventually, working
from tallybook import App
from tallybook.errors import ConfigError, InvalidArgument, UnknownQueue
from tallybook.testing import drain


@pytest.fixture
def app(dsn: str) -> App:
    made = App("shop", dsn=dsn)

    @made.task(queue="mail")
    async def send(n: int) -> None:
        if n < 0:
            raise RuntimeError("no such letter")

    return made


async def test_settings_in_python(app: App, db: Any) -> None:
    """S3-36: queues.set creates and changes a queue, queues.list lists queues, with and without an event loop."""
    assert await app.queues.set("mail", retention="brief", max_attempts=3, by="ada") == "created"
    assert app.queues.set("mail", max_attempts=3).sync(db) == "unchanged"
    assert app.queues.set("mail", max_attempts=0).sync(db) == "changed"
    (queue,) = await app.queues.list()
    assert (queue.name, queue.retention, queue.max_attempts, queue.changed_by) == ("mail", "brief", None, db.info.user)
    assert await app.queues.set("mail", error_retention="1 day", metrics_retention=timedelta(hours=1)) == "changed"
    assert app.queues.set("mail", metrics_retention="0 s").sync(db) == "changed"
    (queue,) = app.queues.list().sync(db)
    assert (queue.error_retention, queue.metrics_retention) == (timedelta(days=1), None)
    assert await app.queues.set("eu", own_names=True) == "created"
    assert [(queue.name, queue.own_names) for queue in await app.queues.list()] == [("eu", True), ("mail", False)]
    assert await app.queues.set("eu", random_order=True) == "changed"
    assert [queue.random_order for queue in await app.queues.list()] == [True, False]
    with pytest.raises(ConfigError, match="error_retention"):
        app.queues.set("mail", error_retention="soon").sync(db)
    with pytest.raises(ConfigError, match="brief, default or long"):
        await app.queues.set("mail", retention="ever").on(db)
    with pytest.raises(ConfigError, match="whole number"):
        app.queues.set("mail", max_attempts=True).sync(db)


def test_workers_run_a_queue_in_random_order(app: App, dsn: str, db: Any) -> None:
    """A worker runs each job of a queue with random_order once, and not in the order in which they were enqueued."""
    assert invoke("queue", "create", "mail", "--random-order", to=dsn).exit_code == 0
    app.enqueue_many_sync(db, [app.tasks["send"].job(n) for n in range(20)])
    assert drain(app, dsn=dsn, queues={"mail": 1}).completed == 20
    started = db.execute("select args -> 'n' from tallybook.job order by started_at").fetchall()
    ran = [n for (n,) in started]
    assert sorted(ran) == list(range(20)) != ran
    assert invoke("queue", "set", "mail", "--in-order", to=dsn).output.startswith("queue 'mail'")


async def test_truncate_top_and_drop_in_python(app: App, dsn: str, db: Any) -> None:
    """S3-36: top lists the next jobs, truncate cancels all in batches, drop removes a queue without open jobs."""
    send = app.tasks["send"]
    jobs = app.enqueue_many_sync(db, [send.job(n) for n in range(5)])
    later = send.with_(delay=timedelta(hours=1)).enqueue_sync(db, 7)
    page = await app.queues.top("mail", max_jobs=4)
    assert [job.id for job in page] == [job.id for job in jobs[:4]]
    rest = app.queues.top("mail", after=page[-1].place).sync(db)
    assert [(job.position, job.id, job.state) for job in rest] == [
        (5, jobs[4].id, "available"),
        (6, later.id, "scheduled"),
    ]
    with pytest.raises(InvalidArgument, match="6 open jobs"):
        app.queues.drop("mail").sync(db)
    heard: list[int] = []
    done = await app.queues.truncate("mail", on_batch=heard.append)
    assert (done.cancelled, done.cancelling, done.busy, sum(heard)) == (6, 0, False, 6)
    assert (await app.get(later)).reason == "truncated"
    beside = send.with_(queue="other").enqueue_sync(db, 8)
    again = send.enqueue_sync(db, 9)
    assert (await app.queues.truncate_all(by="ada")).cancelled == 2
    assert {(await app.get(job)).reason for job in (beside, again)} == {"truncated"}
    assert app.queues.truncate_all().sync(db).cancelled == 0
    kept = send.enqueue_sync(db, 10)
    app.schedules.set("nightly", send.job(1), every="1 h").sync(db)
    for truncate in (False, True):
        with pytest.raises(InvalidArgument, match="in use: 0 workers serve it, 1 schedules"):
            app.queues.drop("mail", truncate=truncate).sync(db)
    assert "in use" in run("queue", "drop", "mail", "--truncate", "--yes", dsn=dsn, code=1)
    assert (await app.get(kept)).state == "available", "a queue that stays keeps its jobs"
    app.schedules.drop("nightly").sync(db)
    assert await app.queues.drop("mail", truncate=True) is True
    assert app.queues.drop("mail", truncate=True).sync(db) is False
    with pytest.raises(UnknownQueue):
        app.queues.truncate("mail").sync(db)


async def test_a_queues_default_of_attempts_counts_in_a_worker(app: App, dsn: str, db: Any) -> None:
    """S3-36: the queue's max_attempts applies if neither the job nor its task sets one."""
    app.queues.set("mail", max_attempts=1).sync(db)
    jobs = Jobs(app, db)
    async with working(app, dsn, queues={"mail": 5}):
        job = app.tasks["send"].enqueue_sync(db, -1)
        await eventually(lambda: jobs(job).state == "dead", "it is dead")
        assert jobs(job).failures == 1


async def test_pause_and_resume_reach_a_worker(app: App, dsn: str, db: Any) -> None:
    """S3-38: a running worker starts no job of a paused queue, runs another queue, and resumes without a restart."""
    jobs = Jobs(app, db)
    send = app.tasks["send"]
    async with working(app, dsn, queues={"mail": 5, "other": 5}):
        first = send.enqueue_sync(db, 1)
        await eventually(lambda: jobs(first).state == "completed", "it runs")
        assert app.queues.pause("mail", by="ada").sync(db) is True
        held = [send.enqueue_sync(db, n) for n in range(3)]
        beside = send.with_(queue="other").enqueue_sync(db, 9)
        await eventually(lambda: jobs(beside).state == "completed", "the other queue goes on")
        assert {jobs(job).state for job in held} == {"available"}
        assert await app.queues.resume("mail") is True
        await eventually(lambda: {jobs(job).state for job in held} == {"completed"}, "they run")


def test_the_command_line(app: App, dsn: str, db: Any) -> None:
    """S3-36: create, set, top, truncate and drop; prompts show the number of jobs, and --json prints JSON."""
    assert run("queue", "create", "mail", "--max-attempts", "3", dsn=dsn) == "queue 'mail' is created\n"
    assert "exists already" in invoke("queue", "create", "mail", to=dsn).output
    said = json.loads(run("queue", "set", "mail", "--retention", "brief", "--json", dsn=dsn))
    assert said == {"queue": "mail", "said": "changed"}
    assert run("queue", "set", "mail", "--error-retention", "1d", dsn=dsn) == "queue 'mail' is changed\n"
    assert app.queues.list().sync(db)[0].error_retention == timedelta(days=1)
    assert "pass a setting to change" in run("queue", "set", "mail", dsn=dsn, code=2)
    assert "Did you mean 'mail'?" in run("queue", "set", "mial", "--notify", dsn=dsn, code=1)
    app.enqueue_many_sync(db, [app.tasks["send"].job(n) for n in range(3)])
    assert [job["position"] for job in json.loads(run("queue", "top", "mail", "--max", "2", "--json", dsn=dsn))] == [
        1,
        2,
    ]
    assert "send" in run("queue", "top", "mail", dsn=dsn)
    assert "Cancel 3 jobs of queue 'mail'?" in run("queue", "truncate", "mail", dsn=dsn, code=2)
    assert "3 open jobs" in run("queue", "drop", "mail", "--yes", dsn=dsn, code=1)
    assert "queue 'mail': 3 jobs are cancelled" in run("queue", "truncate", "mail", "--yes", dsn=dsn)
    app.tasks["send"].with_(queue="other").enqueue_sync(db, 1)
    assert "name one queue, or pass --all" in run("queue", "truncate", dsn=dsn, code=2)
    assert "name one queue, or pass --all" in run("queue", "truncate", "mail", "--all", dsn=dsn, code=2)
    assert "Cancel 1 job of all queues?" in run("queue", "truncate", "--all", dsn=dsn, code=2)
    assert "all queues: 1 jobs are cancelled\n" in run("queue", "truncate", "--all", "--yes", dsn=dsn)
    assert "queue 'mail' is dropped" in run("queue", "drop", "mail", "--truncate", "--yes", dsn=dsn)
    assert "Did you mean" not in run("queue", "drop", "mail", "--yes", dsn=dsn, code=1)
