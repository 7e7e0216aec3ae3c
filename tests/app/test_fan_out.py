"""Fan-out and fan-in: many jobs by one call, and a job that runs when others have ended."""

import signal
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from support.waiting import wait_until
from support.worker_process import Workers, hold, note
from support.worker_process import app as shop
from support.workers import SLEEPY, Jobs, working
from tallybook import App, Constant, Context, Dead
from tallybook.errors import ConfigError, InvalidArgument, UnknownJob
from tallybook.testing import drain

RAN: list[Any] = []
app = App("forms")


@app.task
async def step(n: int) -> None:
    RAN.append(n)


@app.task(queue="mail")
async def email(to: str) -> None:
    RAN.append(("email", to))


@app.task(queue="sms", max_attempts=1)
def sms(number: str) -> Dead | None:
    RAN.append(("sms", number))
    return Dead("no such number") if number == "0" else None


@app.task(retry=Constant(timedelta(0)), max_attempts=3)
async def flaky(ctx: Context) -> None:
    RAN.append(("flaky", ctx.attempt))
    if ctx.attempt < 3:
        raise OSError("not yet")


@app.task
async def summary(form: int, failed: list[dict[str, Any]] | None = None) -> None:
    RAN.append(("summary", form, failed))


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    RAN.clear()


def test_one_submission_fans_out(dsn: str, db: Any) -> None:
    """S4-22: one call enqueues five jobs of four tasks for one submission, and a notification that runs after them."""
    jobs = [email.job("a@b.c"), email.job("d@e.f"), sms.job("1"), step.job(1), flaky.job()]
    with db.transaction():
        report = app.enqueue_many_sync(db, jobs, then=summary.job(7))
    assert [app.get(job).sync(db).task for job in report] == ["email", "email", "sms", "step", "flaky", "summary"]
    assert app.get(report[-1]).sync(db).state == "waiting"
    assert drain(app, dsn=dsn).completed == 6
    assert RAN[-1] == ("summary", 7, [])
    assert sorted(map(str, RAN[:-1])) == sorted(
        map(str, [("email", "a@b.c"), ("email", "d@e.f"), ("sms", "1"), 1, *(("flaky", n) for n in (1, 2, 3))])
    )


def test_the_follow_up_is_told_what_failed(dsn: str, db: Any) -> None:
    """S4-22: a failed job of the fan-out is in the follow-up's args, with id, task, state, reason and message."""
    mail, text, last = app.enqueue_many_sync(db, [email.job("a@b.c"), sms.job("0")], then=summary.job(8))
    assert not drain(app, dsn=dsn).retrying
    assert RAN[-1] == (
        "summary",
        8,
        [{"job": text.id, "task": "sms", "state": "dead", "reason": "failed", "message": "no such number"}],
    )
    assert app.get(last).sync(db).options["parents"] == {"ended": 2, "failed": 1}  # type: ignore[index]
    assert app.get(mail).sync(db).state == "completed"


def test_a_follow_up_that_needs_all(dsn: str, db: Any) -> None:
    """With on_parent=completed a follow-up is cancelled if a job of the fan-out is dead."""
    then = summary.with_(on_parent="completed").job(9)
    _, text, last = app.enqueue_many_sync(db, [step.job(1), sms.job("0")], then=then)
    drain(app, dsn=dsn)
    found = app.get(last).sync(db)
    assert (found.state, found.reason) == ("cancelled", f"its parent {text.id} (sms) is dead: no such number")


def test_its_own_word_for_failed_is_left(dsn: str, db: Any) -> None:
    """The caller's own value for `failed` stays, and a task without that parameter gets none."""
    app.enqueue_many_sync(db, [sms.job("0")], then=summary.job(1, failed=[{"mine": True}]))
    app.enqueue_many_sync(db, [sms.job("0")], then=step.job(3))
    drain(app, dsn=dsn)
    assert ("summary", 1, [{"mine": True}]) in RAN
    assert 3 in RAN


def test_a_diamond_in_any_order(dsn: str, db: Any) -> None:
    """S3-40: jobs of one call may wait for one another, in any given order; the report keeps that order."""
    top = step.job(1)
    left, right = step.with_(after=top).job(2), step.with_(after=[top]).job(3)
    bottom = step.with_(after=(left, right)).job(4)
    report = app.enqueue_many_sync(db, [bottom, right, top, left])
    assert [app.get(job).sync(db).args["n"] for job in report] == [4, 3, 1, 2]
    assert [app.get(job).sync(db).state for job in report] == ["waiting", "waiting", "available", "waiting"]
    drain(app, dsn=dsn)
    assert (RAN[0], sorted(RAN[1:3]), RAN[3]) == (1, [2, 3], 4)


def test_after_jobs_of_earlier_calls(dsn: str, db: Any) -> None:
    """`after` takes enqueued jobs and ids; the child is enqueued like any other job."""
    first = step.enqueue_sync(db, 1)
    second = step.with_(after=[first, first.id]).enqueue_sync(db, 2)
    third = step.with_(after=second, delay=timedelta(0)).enqueue_sync(db, 3)
    drain(app, dsn=dsn)
    assert RAN == [1, 2, 3]
    assert app.get(third).sync(db).state == "completed"


def test_a_chain_longer_than_the_stack(db: Any) -> None:
    """A chain of 1,500 jobs is enqueued by one call."""
    chain = [step.job(0)]
    for n in range(1, 1500):
        chain.append(step.with_(after=chain[-1]).job(n))
    report = app.enqueue_many_sync(db, reversed(chain))
    assert [job.id for job in reversed(report)] == sorted(job.id for job in report)
    assert db.execute("select count(*) from tallybook.parent").fetchone() == (1499,)


def test_a_unique_key_that_another_job_has(db: Any) -> None:
    """A child whose unique key is taken is not created: the job that has the key is returned and keeps its parents."""
    first = step.enqueue_sync(db, 1)
    one = step.with_(after=first, unique="u").enqueue_sync(db, 2)
    two = step.with_(after=step.enqueue_sync(db, 3), unique="u").enqueue_sync(db, 2)
    assert (one.created, two.created, one.id == two.id) == (True, False, True)
    assert db.execute("select child_id, parent_id from tallybook.parent").fetchall() == [(one.id, first.id)]


@pytest.mark.parametrize("after", [0, -1, True, "17", [], [None], 1 << 63, [["x"]]])
def test_what_is_no_job(after: Any) -> None:
    """`after` raises a ConfigError that names the option for anything but jobs and ids."""
    with pytest.raises(ConfigError, match="after"):
        step.with_(after=after)


def test_mistakes_are_found_before_anything_is_sent(db: Any) -> None:
    """Refused: a parent outside the call, a wrong on_parent, `then` or id, `after` in a schedule or subject."""
    with pytest.raises(InvalidArgument, match="job 1 waits for a job of 'step' that this call does not enqueue"):
        app.enqueue_many_sync(db, [step.job(1), step.with_(after=step.job(1)).job(2)])
    with pytest.raises(InvalidArgument, match="this call does not enqueue"):
        step.with_(after=step.job(1)).enqueue_sync(db, 2)
    with pytest.raises(ConfigError, match="on_parent"):
        step.with_(on_parent="never")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="then is of type"):
        app.enqueue_many_sync(db, [step.job(1)], then=summary)  # type: ignore[arg-type]
    with pytest.raises(UnknownJob):
        step.with_(after=4711).enqueue_sync(db, 1)
    with pytest.raises(ConfigError, match="cannot wait for others"):
        app.schedules.set("s", step.with_(after=1).job(1), cron="* * * * *").sync(db)
    with pytest.raises(ConfigError, match="after"):
        step.with_(after=1).subject("x").push(1).sync(db)
    assert db.execute("select count(*) from tallybook.job").fetchone() == (0,)


async def test_a_worker_goes_on_at_once(dsn: str, db: Any) -> None:
    """A worker that never polls runs a chain, a fan-out and its follow-up without waiting for parents_resolve."""
    chain = [step.job(0)]
    for n in range(1, 20):
        chain.append(step.with_(after=chain[-1]).job(n))
    db.execute("select tallybook.service_every('parents_resolve', '1 day')")
    async with working(app, dsn, ["default", "mail", "sms"], **SLEEPY):
        report = app.enqueue_many_sync(db, [*chain, sms.job("0"), flaky.job()], then=summary.job(1))
        (last,) = await Jobs(app, db).ends(report[-1])
        assert last.state == "completed"
    assert [n for n in RAN if isinstance(n, int)] == list(range(20))
    assert [failed["task"] for failed in RAN[-1][2]] == ["sms"]


@pytest.mark.slow
async def test_a_parent_that_nobody_marked(dsn: str, db: Any) -> None:
    """A child of a job of an earlier call starts after that job completes, and is cancelled if it is cancelled."""
    first, second = step.with_(delay="1 hour").enqueue_sync(db, 1), step.enqueue_sync(db, 2)
    async with working(app, dsn, ["default"]):
        jobs = Jobs(app, db)
        below = step.with_(after=second).enqueue_sync(db, 3)
        (found,) = await jobs.ends(below)
        assert found.state == "completed"
        stays = step.with_(after=first).enqueue_sync(db, 4)
        app.cancel(first, "not today").sync(db)
        (found,) = await jobs.ends(stays)
        assert (found.state, found.reason) == ("cancelled", f"its parent {first.id} (step) is cancelled: not today")


@pytest.mark.slow
@pytest.mark.servers
def test_a_worker_that_is_killed_holds_up_no_child(dsn: str, db: Any) -> None:
    """S4-22: if a worker is killed in a fan-out, another runs the job again, and the follow-up once, after it."""
    with Workers(dsn, db) as workers:
        first = workers.start()
        jobs = [hold.job(1), note.job(2), note.job(3)]
        *parts, last = shop.enqueue_many_sync(db, jobs, then=note.job(4))
        wait_until(lambda: all(map(workers.ran, parts)), "all parts have started")
        first.signal(signal.SIGKILL)
        workers.open_gate()
        workers.start()
        wait_until(lambda: shop.get(last).sync(db).state == "completed", "the follow-up has run")
        assert len(workers.ran(parts[0])) == 2
        assert len(workers.ran(last)) == 1


def test_an_end_that_nobody_has_told(dsn: str, db: Any) -> None:
    """If a worker dies after a parent's end, before resolving it, the next run resolves it."""
    *_, last = app.enqueue_many_sync(db, [step.job(1)], then=step.job(2))
    with psycopg.connect(dsn, autocommit=True) as other:
        worker = other.execute("select tallybook.worker_start('w', '{default}', '{step}')").fetchone()
        lease = "6f0a9a6e-0000-4000-8000-000000000001"
        assert worker is not None
        other.execute("select tallybook.claim(%s, '{default}', '{10}', %s)", (worker[0], lease))
        other.execute(
            "select tallybook.complete(%s::uuid, job_id, attempt) from tallybook.claimed_jobs(%s::uuid)", (lease, lease)
        )
    assert app.get(last).sync(db).state == "waiting"
    drain(app, dsn=dsn)
    assert app.get(last).sync(db).state == "completed"
