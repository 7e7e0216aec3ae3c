"""Retries: what follows a failure and when, with a real worker or drain on a real PostgreSQL."""

import itertools
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from support.database import one
from support.workers import Jobs
from tallybook import App, Constant, Context, Exponential, Linear, Snooze
from tallybook.errors import ConfigError
from tallybook.testing import drain_async, travel

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)


def waits(info: Any) -> timedelta:
    """Return the time from the end of the last attempt to the start of the next one."""
    return info.run_at - datetime.fromisoformat(info.errors[-1]["at"])


async def test_five_ten_twenty_forty_eighty_minutes(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S4-11 S4-12: delays of 5, 10, 20, 40, 80 min, none shorter, 5, 15, 35, 75, 155 in total; failure 6 is final."""
    runs: list[int] = []

    @app.task(retry=Exponential(5 * MINUTE), max_attempts=6)
    async def send(ctx: Context) -> None:
        runs.append(ctx.failures)
        raise ConnectionError("no route")

    job = send.enqueue_sync(db)
    found = []
    for number in range(1, 6):
        assert (await drain_async(app, dsn=dsn)).retrying == 1
        info = jobs(job)
        assert (info.state, info.failures, info.attempts) == ("retrying", number, number)
        found.append(waits(info))
        travel(dsn, found[-1] - MINUTE)
        assert (await drain_async(app, dsn=dsn)).processed == 0
        travel(dsn, MINUTE)
    assert [wait / MINUTE for wait in found] == [5, 10, 20, 40, 80]
    assert [total / MINUTE for total in itertools.accumulate(found)] == [5, 15, 35, 75, 155]
    assert (await drain_async(app, dsn=dsn)).dead == 1
    info = jobs(job)
    assert (info.state, info.reason, info.failures, info.attempts) == ("dead", "failed", 6, 6)
    assert runs == [0, 1, 2, 3, 4, 5]
    travel(dsn, timedelta(days=1))
    assert (await drain_async(app, dsn=dsn)).processed == 0


async def test_the_third_failure_is_final(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S1-24: a failed job is counted and runs again; the third failure is final, and its row and error are kept."""

    @app.task(retry=Constant(MINUTE), max_attempts=3)
    def import_row(row: int) -> None:
        raise ValueError(f"row {row} has no price")

    job = import_row.enqueue_sync(db, 7)
    seen = []
    for _ in range(3):
        await drain_async(app, dsn=dsn)
        info = jobs(job)
        seen.append((info.state, info.failures))
        travel(dsn, MINUTE)
    assert seen == [("retrying", 1), ("retrying", 2), ("dead", 3)]
    assert (info.args, info.last_error, info.reason) == ({"row": 7}, "row 7 has no price", "failed")
    assert (await drain_async(app, dsn=dsn)).processed == 0
    assert jobs(job) == info


async def test_tasks_share_a_named_policy(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S2-07: tasks that name one policy have the same delays, whichever is declared first; it may be a function."""

    @app.task(retry="standard")
    async def early() -> None:
        raise ValueError

    standard = app.retry_policy("standard", Linear(7 * MINUTE))
    app.retry_policy("ours", lambda failures: 11 * MINUTE)

    @app.task(retry="standard")
    async def late() -> None:
        raise ValueError

    @app.task(retry="ours")
    async def other() -> None:
        raise ValueError

    put = [task.enqueue_sync(db) for task in (early, late, other)]
    await drain_async(app, dsn=dsn)
    assert [waits(jobs(job)) / MINUTE for job in put] == [7, 7, 11]
    assert early.retry == late.retry == standard == Linear(7 * MINUTE)


async def test_a_policy_that_is_not_declared_stops_the_worker_at_its_start(app: App, dsn: str, db: Any) -> None:
    """S2-07: an undeclared name is a ConfigError with similar names, before any job is claimed."""
    app.retry_policy("standard", Exponential())
    app.retry_policy("patient", Exponential(HOUR))

    @app.task(retry="standrad")
    async def send() -> None:
        raise AssertionError("it must not run")

    send.enqueue_sync(db)
    with pytest.raises(ConfigError, match="Did you mean 'standard'") as caught:
        await app.drain(dsn=dsn)
    assert (caught.value.option, caught.value.value) == ("retry of task 'send'", "standrad")
    with pytest.raises(ConfigError, match="no retry policy of that name"):
        await app.run_worker(dsn=dsn, install_signals=False)
    assert db.execute("select state, attempts from tallybook.job").fetchall() == [("available", 0)]
    with pytest.raises(ConfigError, match="It has 'patient', 'standard'"):
        app._policy("x")
    with pytest.raises(ConfigError, match="It has none"):
        App("empty")._policy("x")


def test_wrong_declarations_of_policies(app: App) -> None:
    """S2-07: a duplicate name, an empty one and a value that is no policy are refused at the declaration."""
    app.retry_policy("standard", Exponential())
    wrong: list[tuple[str, Any]] = [("standard", Exponential()), ("", Exponential()), ("x", "standard"), ("x", MINUTE)]
    for name, policy in wrong:
        with pytest.raises(ConfigError, match="retry_policy"):
            app.retry_policy(name, policy)
    options: list[dict[str, Any]] = [
        {"retry": ""},
        {"retry": MINUTE},
        {"retry": Exponential},
        {"no_retry": "ValueError"},
    ]
    for option in options:
        with pytest.raises(ConfigError) as caught:
            app.task(**option)(lambda: None)
        assert caught.value.option in option
    assert list(app._retry_policies) == ["standard"]


async def test_a_function_decides(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S2-07: a function of (failures, error) returns the delay, or None to make the job dead, with attempts left."""
    heard: list[tuple[int, str]] = []

    def by_kind(failures: int, error: BaseException) -> timedelta | None:
        heard.append((failures, str(error)))
        return failures * HOUR if isinstance(error, ConnectionError) else None

    @app.task(retry=by_kind)
    async def send(ctx: Context) -> None:
        raise ConnectionError(str(ctx.failures)) if ctx.failures < 2 else KeyError("gone")

    job = send.enqueue_sync(db)
    for number in (1, 2):
        await drain_async(app, dsn=dsn)
        assert waits(jobs(job)) == number * HOUR
        travel(dsn, number * HOUR)
    assert (await drain_async(app, dsn=dsn)).dead == 1
    info = jobs(job)
    assert (info.state, info.reason, info.failures, info.last_error) == ("dead", "failed", 3, "'gone'")
    assert heard == [(1, "0"), (2, "1"), (3, "'gone'")]


async def test_a_call_chooses_its_policy(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S2-07: a job can have another policy than its task, a value or a name: alone, in a batch, keyed or by SQL."""

    def app_at(app: App, dsn: str) -> App:
        app.dsn = dsn
        return app

    app.retry_policy("patient", lambda failures: failures * HOUR)

    @app.task(retry=Constant(MINUTE), max_attempts=9)
    async def send() -> None:
        raise ValueError

    own = Linear(7 * MINUTE, cap=HOUR)
    put = [
        send.enqueue_sync(db),
        send.with_(retry="patient").enqueue_sync(db),
        send.with_(retry=own).enqueue_sync(db),
        await send.with_(retry=own, unique="one").enqueue(app_at(app, dsn)),
        send.with_(retry=own, delay=MINUTE).enqueue_sync(db),
        *app.enqueue_many_sync(db, [send.job(), send.with_(retry=own).job(), send.with_(retry="patient").job()]),
        *app.enqueue_many_sync(db, [send.with_(retry=own, delay=MINUTE).job()] * 2),
    ]
    by_sql = [
        db.execute("select tallybook.enqueue('default', 'send', options => %s)", [options]).fetchone()[0]
        for options in ('{"retry": "patient"}', '{"retry": {"linear": {"first": "7 min"}}}', '{"retry": null}', "{}")
    ]
    travel(dsn, MINUTE)
    await drain_async(app, dsn=dsn)
    found = [waits(jobs(job)) / MINUTE for job in [*put, *by_sql]]
    assert found == [1, 60, 7, 7, 7, 1, 7, 60, 7, 7, 60, 7, 1, 1]


async def test_the_choice_of_a_call_holds_for_all_its_attempts(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S2-07: a job's own policy holds after failures, a snooze, a lost worker and a user's retry."""

    @app.task(retry=Constant(MINUTE), max_attempts=5)
    async def send(ctx: Context) -> Any:
        if ctx.attempt == 2:
            return Snooze(MINUTE)
        raise ValueError

    job = send.with_(retry=Linear(7 * MINUTE)).enqueue_sync(db)
    await drain_async(app, dsn=dsn)
    assert waits(jobs(job)) == 7 * MINUTE
    travel(dsn, 7 * MINUTE)
    await drain_async(app, dsn=dsn)
    travel(dsn, MINUTE)
    await drain_async(app, dsn=dsn)
    assert waits(jobs(job)) == 14 * MINUTE
    travel(dsn, 14 * MINUTE)
    db.execute("select promoted from tallybook.promote()")
    (worker,) = db.execute("select tallybook.worker_start('gone', '{default}')").fetchone()
    (taken,) = db.execute(
        "select jobs from tallybook.claim(%s, '{default}', '{1}', gen_random_uuid())", [worker]
    ).fetchone()
    db.execute("select tallybook.worker_stop(%s)", [worker])
    await drain_async(app, dsn=dsn)
    info = jobs(job)
    assert (taken, info.attempts, info.failures, info.crashes) == (1, 5, 3, 1)
    assert waits(info) == 21 * MINUTE
    for minutes in (21, 28):
        travel(dsn, minutes * MINUTE)
        await drain_async(app, dsn=dsn)
    assert jobs(job).state == "dead"
    app.retry(job).sync(db)
    await drain_async(app, dsn=dsn)
    assert waits(jobs(job)) == 7 * MINUTE


async def test_a_call_cannot_choose_what_nobody_has_declared(app: App, db: Any) -> None:
    """S2-07: an undeclared name, and a function, are refused before anything is sent, with a hint."""
    app.retry_policy("patient", Constant(HOUR))

    @app.task
    async def send() -> None:
        pass

    with pytest.raises(ConfigError, match="Did you mean 'patient'"):
        send.with_(retry="patent").enqueue_sync(db)
    with pytest.raises(ConfigError, match=r"app\.retry_policy"):
        send.with_(retry=lambda failures: HOUR)  # type: ignore[arg-type]
    for wrong in ("", HOUR, Exponential):
        with pytest.raises(ConfigError):
            send.with_(retry=wrong)  # type: ignore[arg-type]
    assert db.execute("select count(*) from tallybook.job").fetchone() == (0,)


async def test_a_policy_that_is_none_is_not_used_and_said(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S2-07: if SQL enqueues an invalid policy, the task's own holds, and the failure notes it."""
    app.retry_policy("patient", Constant(HOUR))

    @app.task(retry=Constant(MINUTE))
    async def send() -> None:
        raise ValueError

    query = "select tallybook.enqueue('default', 'send', options => jsonb_build_object('retry', %s::jsonb))"
    wrong = [
        '"patent"',
        "5",
        "[]",
        '{"constant": {"every": 5}}',
        '{"linear": {}}',
        '{"exponential": {"factor": 0.5}}',
        '""',
    ]
    ids = [one(db, query, retry) for retry in wrong]
    await drain_async(app, dsn=dsn)
    for retry, job in zip(wrong, ids, strict=True):
        info = jobs(job)
        assert waits(info) == MINUTE, retry
        assert info.errors and "the retry policy that the job asks for is not used" in info.errors[0]["note"], retry


@pytest.mark.parametrize("retry", ["9" * 5000, "[" * 3000 + "]" * 3000], ids=["5000 digits", "3000 levels"])
async def test_no_options_can_stop_the_worker(app: App, dsn: str, db: Any, retry: str) -> None:
    """S5-09: options that PostgreSQL accepts and Python cannot read stop no claim: the task's policy holds."""

    @app.task(retry=Constant(MINUTE))
    async def send() -> None:
        raise ValueError

    options = f'{{"retry": {retry}}}'
    db.execute("select tallybook.enqueue('default', 'send', options => %s)", [options])
    assert (await drain_async(app, dsn=dsn)).retrying == 1
    found = db.execute("select run_at - (errors -> 0 ->> 'at')::timestamptz from tallybook.job").fetchall()
    assert found == [(MINUTE,)]


async def test_what_must_not_be_retried_is_dead(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S2-07: an exception in no_retry, or a marked one, makes its job dead at the first failure; others are retried."""

    class Rejected(Exception):
        """An exception marked by a library."""

        no_retry = True

    cases = [
        (KeyError("gone"), "dead"),
        (ValueError("no"), "dead"),
        (Rejected("no"), "dead"),
        (ExceptionGroup("calls", [ValueError("no"), KeyError("gone")]), "dead"),
        (ExceptionGroup("calls", [ValueError("no"), OSError("may pass")]), "retrying"),
        (OSError("may pass"), "retrying"),
    ]

    @app.task(retry=Constant(HOUR), no_retry=(ValueError, LookupError))
    async def send(case: int) -> None:
        raise cases[case][0]

    ids = [send.enqueue_sync(db, case) for case in range(len(cases))]
    await drain_async(app, dsn=dsn)
    for job, (error, state) in zip(ids, cases, strict=True):
        info = jobs(job)
        reason = "failed" if state == "dead" else None
        assert (info.state, info.reason, info.failures, info.attempts) == (state, reason, 1, 1), error
        assert info.errors is not None and len(info.errors) == 1, error


class TooManyRequests(Exception):
    def __init__(self, headers: dict[str, str]) -> None:
        self.response = SimpleNamespace(headers=headers)


async def test_retry_after_is_honoured(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S2-07: the delay is the server's Retry-After, at most a day, or the policy's delay if that is longer."""
    cases: list[tuple[Any, str, timedelta]] = [
        (Constant(MINUTE), "3600", HOUR),
        (Constant(2 * HOUR), "3600", 2 * HOUR),
        (Constant(MINUTE), "999999999", timedelta(days=1)),
        (Constant(timedelta(days=3)), "999999999", timedelta(days=3)),
        (Constant(MINUTE), "soon", MINUTE),
        (lambda failures: 1 / 0, "3600", HOUR),
    ]

    async def fetch(said: str) -> None:
        raise RuntimeError("cannot fetch") from TooManyRequests({"retry-after": said})

    ids = [
        app.task(name=f"fetch-{n}", retry=policy)(fetch).enqueue_sync(db, said)
        for n, (policy, said, _) in enumerate(cases)
    ]
    await drain_async(app, dsn=dsn)
    assert [waits(jobs(job)) for job in ids] == [wait for _, _, wait in cases]


async def test_retry_after_gives_no_further_attempt(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """S4-12: Retry-After gives no attempt to a job that has none left, or that must not be retried."""

    @app.task(max_attempts=1)
    async def last() -> None:
        raise TooManyRequests({"Retry-After": "5"})

    @app.task(retry=lambda failures: None)
    async def never() -> None:
        raise TooManyRequests({"Retry-After": "5"})

    put = [last.enqueue_sync(db), never.enqueue_sync(db)]
    await drain_async(app, dsn=dsn)
    assert [jobs(job).state for job in put] == ["dead", "dead"]


async def test_failing_jobs_do_not_block_the_head_of_the_line(app: App, dsn: str, db: Any) -> None:
    """S5-07: jobs that keep failing at once, first in the lane, delay no others: each retry goes behind them."""
    ran: list[str] = []

    @app.task(retry=Constant(timedelta(0)), max_attempts=1000)
    async def poison() -> None:
        ran.append("poison")
        raise ValueError

    @app.task
    async def good() -> None:
        ran.append("good")

    for _ in range(5):
        poison.enqueue_sync(db)
    for _ in range(3):
        good.enqueue_sync(db)
    for _ in range(8):  # each drain ends when its job's failure is stored, before the next claim
        await app.drain(dsn=dsn, max_jobs=1)
    assert ran == ["poison"] * 5 + ["good"] * 3
