"""Rate limits in Python, in running workers and on the command line. sql/test_rate_limits.py covers the rules."""

import asyncio
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from chaos.proxy import Proxy
from support import zoo
from support.cli import invoke
from support.proxy import upstream
from support.workers import Jobs, eventually, working
from tallybook import App, Context, RateInfo, Snooze
from tallybook.errors import ConfigError, InvalidArgument

HOUR = timedelta(hours=1)


@pytest.mark.slow
async def test_handlers_start_at_their_turn(app: App, dsn: str, db: Any) -> None:
    """S1-18: with two workers no window of a second has more than ten starts of one key."""
    app.rate_limit("api", 10, per="1 s")
    starts: list[float] = []

    @app.task(limits=("api:{customer}",))
    async def call(customer: str) -> None:
        starts.append(time.monotonic())

    app.enqueue_many_sync(db, [call.job("acme") for _ in range(25)])
    async with working(app, dsn), working(app, dsn):
        await eventually(lambda: len(starts) == 25, "25 calls")
    assert all(later - first >= 1.0 for first, later in zip(starts, starts[10:], strict=False))
    assert db.execute("select distinct name from tallybook.rate_call").fetchall() == [("api:acme",)]


@pytest.mark.parametrize("inside", [False, True], ids=["before the handler", "in the handler"])
async def test_jobs_start_where_answers_take_longer_than_a_start_may_be_late(
    app: App, dsn: str, db: Any, jobs: Jobs, inside: bool
) -> None:
    """S1-18: with a server 25 ms away and a window of a second, each job starts, at its turn or the next one."""
    app.rate_limit("api", 100, per="1 s")

    @app.task(limits=() if inside else ("api",))
    async def call(ctx: Context) -> None:
        if inside:
            await ctx.limit("api")

    put = app.enqueue_many_sync(db, [call.job() for _ in range(5)])
    async with Proxy(upstream(dsn)) as proxy:
        proxy.delay(0.025)
        away = make_conninfo(dsn, host="127.0.0.1", port=proxy.port)
        async with working(app, away):
            infos = await jobs.ends(*put)
    assert {info.state for info in infos} == {"completed"}


async def test_a_handler_takes_a_slot_or_ends_as_a_snooze(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S1-18: ctx.limit returns for the first job, and snoozes the second until its turn, without a failure."""
    app.rate_limit("provider", 1, per="1 hour")
    seen: list[tuple[int, str]] = []

    @app.task
    async def fetch(ctx: Context) -> None:
        seen.append((ctx.job_id, "before"))
        await ctx.limit("provider:acme")
        seen.append((ctx.job_id, "after"))

    @app.task
    def fetch_plain(ctx: Context) -> None:
        ctx.limit_sync("provider:acme")
        seen.append((ctx.job_id, "plain"))

    first = fetch.enqueue_sync(db).id
    async with working(app, dsn):
        await eventually(lambda: jobs(first).state == "completed", "the first call")
        second, plain = fetch.enqueue_sync(db).id, fetch_plain.enqueue_sync(db).id
        await eventually(lambda: (jobs(second).state, jobs(plain).state) == ("scheduled", "scheduled"), "two snoozes")
    assert seen == [(first, "before"), (first, "after"), (second, "before")]
    for job in (second, plain):
        found = jobs(job)
        assert (found.failures, found.errors, found.run_at is not None) == (0, None, True)
    (at,) = db.execute("select min(run_at) - max(called_at) from tallybook.scheduled, tallybook.rate_call").fetchone()
    assert abs(at - HOUR) < timedelta(seconds=1)


async def test_an_atomic_task_and_one_in_a_process_are_put_off_too(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S1-18: over the limit, an atomic task is rolled back and a process task is put off; no failure is counted."""
    app.rate_limits.set("provider", 1, per="1 hour").sync(db)
    app.rate_limits.push("provider:acme", datetime.now(UTC) + HOUR).sync(db)
    db.execute("create table written (n int)")

    @app.task(atomic=True)
    async def write(tx: psycopg.AsyncConnection[Any], ctx: Context) -> None:
        await tx.execute("insert into written values (1)")
        await ctx.limit("provider:acme")

    app.rate_limits.set("other", 1, per="1 s").sync(db)
    limited = app.task(process=True)(zoo.limited)
    both = [write.enqueue_sync(db).id, limited.enqueue_sync(db).id]
    async with working(app, dsn):
        await eventually(lambda: [jobs(job).state for job in both] == ["scheduled", "scheduled"], "both are put off")
    assert [jobs(job).failures for job in both] == [0, 0]
    assert db.execute("select * from written").fetchall() == []
    said = db.execute("select next_at > now() + interval '59 min' from tallybook.rate_state where name = 'other'")
    assert said.fetchall() == [(True,)]


async def test_a_provider_that_says_429_is_left_alone(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S1-19: ctx.push_back delays the limit itself, so the job's next attempt starts after it."""
    app.rate_limit("provider", 6000, per="1 min")  # per minute, so that a start may be late by more than half a second
    calls = list[int]()

    @app.task(limits=("provider:acme",))
    async def fetch(ctx: Context) -> Snooze:
        calls.append(ctx.job_id)
        await ctx.push_back("provider:acme", HOUR)
        return Snooze(timedelta(0))

    job = fetch.enqueue_sync(db).id
    async with working(app, dsn):
        # Not by attempt number: a start that a busy machine has missed is an attempt, too.
        put_off = "select run_at > now() + interval '59 min' from tallybook.scheduled where job_id = %s"
        await eventually(lambda: db.execute(put_off, [job]).fetchone() == (True,), "the second attempt is put off")
    assert calls == [job]
    (rate,) = [rate for rate in app.rate_limits.list().sync(db) if rate.name == "provider:acme"]
    assert rate.pushed_to is not None and rate.pushed_to - datetime.now(UTC) > timedelta(minutes=59)
    assert (rate.waiting, rate.rule) == (1, "provider")


async def test_an_unknown_limit_is_an_error_that_says_so(
    app: App, dsn: str, db: Any, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """S1-18: a misspelled limit fails the attempt, before or in the handler; the log names it, no job is lost."""

    @app.task(max_attempts=1)
    async def named() -> None:
        raise AssertionError("it started")

    @app.task(max_attempts=1)
    async def asked(ctx: Context) -> None:
        await ctx.limit("provder:acme")

    both = [named.with_(limits=("provder:acme",)).enqueue_sync(db).id, asked.enqueue_sync(db).id]
    async with working(app, dsn):
        await eventually(lambda: [jobs(job).state for job in both] == ["dead", "dead"], "two dead letters")
    for job in both:
        assert "there is no limit" in str(jobs(job).last_error)
        assert "provder:acme" in str(jobs(job).last_error)
        assert any(f" {job}: attempt 1 failed" in line and "provder:acme" in line for line in caplog.messages)


async def test_limits_in_code_come_change_and_go(app: App, dsn: str, db: Any) -> None:
    """S1-18: a starting worker creates, changes and removes the app's limits; a limit set by a user stays."""
    app.rate_limit("provider", 8, per="1 min")
    app.rate_limit("mail", 5, per="1 s", burst=2)
    app.rate_limits.set("mail", 1, per="1 s").sync(db)
    async with working(app, dsn):
        pass
    query = "select name, most, burst, in_code from tallybook.limit_rule where kind = 'rate' order by name"
    assert db.execute(query).fetchall() == [("mail", 1, 1, None), ("provider", 8, 1, "shop")]
    newer = App("shop")
    newer.rate_limit("provider", 9, per="1 min")
    async with working(newer, dsn):
        pass
    assert db.execute(query).fetchall() == [("mail", 1, 1, None), ("provider", 9, 1, "shop")]
    newer.rate_limits.push("provider:acme", datetime.now(UTC) + HOUR).sync(db)
    async with working(App("shop"), dsn):
        pass
    assert db.execute(query).fetchall() == [("mail", 1, 1, None)]
    pushed = db.execute("select pushed_to from tallybook.rate_state").fetchall()
    assert pushed == [(None,)], "its keys' delays go with it"


async def test_drain_puts_off_what_a_limit_holds(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S1-18: drain does not wait for a turn: a job over the limit stays scheduled."""
    app.rate_limits.set("api", 1, per="1 hour").sync(db)

    @app.task(limits=("api",))
    async def call() -> None: ...

    both = [call.enqueue_sync(db).id for _ in range(2)]
    app.dsn = dsn
    await app.drain()
    assert [jobs(job).state for job in both] == ["completed", "scheduled"]


def test_keys_are_made_of_args(app: App) -> None:
    """S1-18: {name} in a key is that argument, a string or an integer; others raise when the job is described."""

    @app.task(limits=("provider:{provider}", "all"))
    async def fetch(provider: str, n: int = 1) -> None: ...

    assert fetch.job("acme").options.limits == ("provider:acme", "all")
    assert fetch.with_(limits=("n:{n}",)).job("acme", n=3).options.limits == ("n:3",)
    with pytest.raises(ConfigError, match="has no argument 'x'"):
        fetch.with_(limits=("{x}",)).job("acme")
    with pytest.raises(ConfigError, match="is neither a string nor an integer"):
        fetch.with_(limits=("{n}",)).job("acme")
    with pytest.raises(ConfigError, match="1 to 200 bytes"):
        fetch.job("a" * 200)


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda app: app.rate_limit("", 1, per="1 s"), "1 to 200 bytes"),
        (lambda app: app.rate_limit("queue:", 1, per="1 s"), "queue:NAME"),
        (lambda app: app.rate_limit("a", 0, per="1 s"), "from 1 to 100000"),
        (lambda app: app.rate_limit("a", 2, per="1 s", burst=3), "from 1 to 2"),
        (lambda app: app.rate_limit("a", 2, per="1 ms"), "1 s to 366 days"),
        (lambda app: app.rate_limit("a", 2, per="1"), "needs a unit"),
        (lambda app: [app.rate_limit("a", 2, per="1 s") for _ in range(2)], "declared twice"),
        (lambda app: app.task(limits="a"), "not a tuple"),
        (lambda app: app.task(limits=("a", "a")), "up to 8 different"),
        (lambda app: app.task(limits=("queue:mail",)), "without being named"),
    ],
)
def test_what_cannot_be_meant_is_told_at_once(app: App, declare: Callable[[App], object], message: str) -> None:
    """A wrong limit raises ConfigError where it is declared."""
    with pytest.raises(ConfigError, match=message):
        declare(app)


async def test_the_verbs_in_python(app: App, dsn: str) -> None:
    """S1-18: set, push, list and drop, awaited, on the app's own connection."""
    app.dsn = dsn
    async with app.open():
        assert await app.rate_limits.set("api", 30, per=timedelta(minutes=1), burst=5) == "created"
        until = datetime(2031, 1, 1, tzinfo=UTC)
        assert await app.rate_limits.push("api:acme", until) == until
        with pytest.raises(InvalidArgument, match="there is no rate limit"):
            await app.rate_limits.push("other", until)
        with pytest.raises(ConfigError, match="aware"):
            await app.rate_limits.push("api", datetime(2031, 1, 1))
        with pytest.raises(InvalidArgument, match="at most 100 years"):
            await app.rate_limits.push("api", "99999999 h")
        broad, key = await app.rate_limits.list()
        assert broad == RateInfo(name="api", rule="api", calls=30, per=timedelta(minutes=1), burst=5)
        assert (key.name, key.rule, key.next_call_at, key.pushed_to) == ("api:acme", "api", until, until)
        assert (await app.rate_limits.drop("api"), await app.rate_limits.drop("api")) == (True, False)


def test_a_push_by_a_duration_counts_from_the_servers_clock(app: App, db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose clock is an hour behind blocks a key for the whole time."""

    class Behind(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) - HOUR

    monkeypatch.setattr("tallybook._app.limits.datetime", Behind)
    app.rate_limits.set("api", 30, per=timedelta(minutes=1)).sync(db)
    until = app.rate_limits.push("api:acme", "5 min").sync(db)
    ahead = db.execute("select %s - clock_timestamp()", [until]).fetchone()[0]
    assert timedelta(minutes=4) < ahead <= timedelta(minutes=5)


def test_the_command_line(dsn: str, db: Any) -> None:
    """S1-18, S1-19: set, list, push, calls and drop, as text and as JSON, with exit codes."""

    run = partial(invoke, "limit", to=dsn)

    assert run("list").output == "no limits\n"
    assert run("set", "provider", "8", "1min").output == "rate limit 'provider' is created\n"
    assert run("at-once", "customer", "2").output == "concurrency limit 'customer' is created\n"
    assert "may start at" in run("push", "provider:acme", "5min").output
    shown = run("list").output.splitlines()
    assert shown[0].split()[:2] == ["key", "limit"]
    assert "8 per 1 min" in shown[2] and "(pushed back)" in shown[2]
    assert shown[3].split() == ["customer", "2", "running", "0", "0", "-", "-"]
    assert {one["name"]: one.get("per", one.get("most")) for one in json.loads(run("list", "--json").output)} == {
        "provider": 60.0,
        "provider:acme": 60.0,
        "customer": 2,
    }
    db.execute("insert into tallybook.rate_call values (now(), 7, 1, 'provider:acme')")
    assert run("calls", "provider:acme").output.splitlines()[1].split()[-4:] == ["7", "1", "not", "ended"]
    assert json.loads(run("calls", "provider:acme", "--json").output)[0]["job_id"] == 7
    assert run("drop", "provider").output == "rate limit 'provider' is removed\n"
    missing = run("drop", "provider")
    assert (missing.exit_code, missing.output) == (1, "there is no limit 'provider'\n")
    wrong = run("set", "provider", "0", "1min")
    assert wrong.exit_code == 2


async def test_no_more_than_the_limit_run_at_once(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S1-18: two workers run 30 jobs of one customer three at a time, never four; each end starts the next."""
    app.concurrency_limit("customer", 3)
    now, most, order = 0, 0, list[int]()

    @app.task(limits=("customer:{customer}",))
    async def work(customer: int, n: int) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        order.append(n)
        await asyncio.sleep(0.01)
        now -= 1

    app.enqueue_many_sync(db, [work.job(42, n) for n in range(30)])
    async with working(app, dsn) as one, working(app, dsn):
        await eventually(lambda: len(order) == 30, "all of them have run")
        assert most == 3
        assert sorted(order) == list(range(30))
        one.stop()
    (key,) = [key for key in app.concurrency_limits.list().sync(db) if key.name == "customer:42"]
    assert (key.rule, key.most, key.waiting) == ("customer", 3, 0)


async def test_an_end_hands_its_permit_on_itself(app: App, dsn: str, db: Any) -> None:
    """S1-18: the statement that completes a job passes its permit on; no other statement is needed."""
    app.concurrency_limit("one", 1)
    told: list[Any] = []

    @app.task(limits=("one",))
    async def work() -> None: ...

    app.enqueue_many_sync(db, [work.job() for _ in range(20)])
    done = "select count(*) from tallybook.outcome where state = 'completed'"
    async with working(app, dsn) as worker:
        worker.book.on.permits = told.append
        await eventually(lambda: db.execute(done).fetchone() == (20,), "all are done")
    assert len(told) < 10  # none, unless the service holds the key's row just then


async def test_no_end_waits_for_a_person_who_changes_a_limit(
    app: App, dsn: str, db: Any, jobs: Jobs, connect: Any
) -> None:
    """S1-18: while an open transaction locks a limit's row, jobs with its permits still end; the others wait."""
    app.concurrency_limit("one", 1)
    gate, began = asyncio.Event(), list[int]()

    @app.task(limits=("one",))
    async def work(ctx: Context) -> None:
        began.append(ctx.job_id)
        await gate.wait()

    first, second = (work.enqueue_sync(db).id for _ in range(2))
    person = connect(autocommit=False)
    async with working(app, dsn):
        await eventually(lambda: jobs(second).state == "waiting", "one of them waits")
        assert person.execute("select name from tallybook.rate_state where name = 'one' for update").rowcount == 1
        gate.set()
        await jobs.becomes(first, "completed")
        assert began == [first]
        person.rollback()
        await jobs.becomes(second, "completed")


async def test_a_handler_takes_a_place_that_it_names_itself(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S1-18: ctx.limit takes a permit of a concurrency limit, too; without one the job waits, then runs again."""
    app.concurrency_limit("report", 1)
    gate, began = asyncio.Event(), list[int]()

    @app.task
    async def report(ctx: Context) -> None:
        await ctx.limit("report:big")
        began.append(ctx.job_id)
        await gate.wait()

    first = report.enqueue_sync(db).id
    async with working(app, dsn):
        await eventually(lambda: began == [first], "the first runs")
        second = report.enqueue_sync(db).id
        await eventually(lambda: jobs(second).state == "waiting", "the second waits")
        assert jobs(second).reason == 'the permits of the limit "report:big" are taken'
        gate.set()
        await eventually(lambda: began == [first, second], "the second runs")


def test_concurrency_limits_by_hand(dsn: str, db: Any, app: App) -> None:
    """S1-18: concurrency limits are created, listed and removed on the command line and in Python."""

    run = partial(invoke, "limit", to=dsn)

    assert run("at-once", "customer", "2").output == "concurrency limit 'customer' is created\n"
    assert app.concurrency_limits.set("customer:7", 5).sync(db) == "created"
    assert ["customer:7", "5", "running", "0", "0"] in [line.split()[:5] for line in run("list").output.splitlines()]
    assert run("drop", "customer").output == "concurrency limit 'customer' is removed\n"
    assert app.concurrency_limits.drop("customer").sync(db) is False
    assert [(one.name, one.most) for one in app.concurrency_limits.list().sync(db)] == [("customer:7", 5)]
    with pytest.raises(ConfigError, match="from 1 to 10000"):
        app.concurrency_limit("a", 0)
    app.concurrency_limit("a", 1)
    with pytest.raises(ConfigError, match="declared twice"):
        app.concurrency_limit("a", 1)
