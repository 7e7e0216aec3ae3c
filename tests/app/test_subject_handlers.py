"""Subjects in Python: how handlers end an iteration, in drains and real workers, beside producers."""

import asyncio
import signal
from datetime import UTC, date, datetime, timedelta
from typing import Any

import psycopg
import pytest

from support import zoo
from support.waiting import wait_until
from support.worker_process import Workers, hold
from support.workers import Jobs, eventually, working
from tallybook import App, Cancel, Complete, Constant, Context, Dead, Drop, Kill, Reject, Reschedule, Snooze, Subject
from tallybook.errors import JobDied
from tallybook.testing import drain, travel

WEEK = timedelta(weeks=1)
NAME = "asset:42"


class Shop:
    """An app with one task, whose handler does what the test sets next, and its database."""

    def __init__(self, dsn: str, db: Any) -> None:
        self.app = App("prices", dsn=dsn)
        self.dsn, self.db = dsn, db
        self.says: list[Any] = []
        self.seen: list[Subject | None] = []
        self.args: list[dict[str, Any]] = []

        @self.app.task(queue="prices", retry=Constant(timedelta(0)), max_attempts=3)
        async def refresh(ctx: Context, asset_id: int, page: int = 0, since: date | None = None) -> Any:
            self.seen.append(ctx.subject)
            self.args.append({"asset_id": asset_id, "page": page})
            return _end(self.says.pop(0))

        self.refresh = refresh
        self.asset = refresh.subject(NAME)

    def run(self, *outcomes: Any) -> Any:
        """Drain; the handler returns these outcomes in turn, and raises those wrapped in a list."""
        self.says = [*outcomes]
        report = drain(self.app, dsn=self.dsn)
        assert not self.says, "the handler was not called as often as it should"
        return report

    @property
    def info(self) -> Any:
        return self.asset.get().sync(self.db)

    def job(self) -> Any:
        return self.app.get(self.info.job_id).sync(self.db)

    def errors(self) -> list[tuple[Any, ...]]:
        statement = "select subject, message, details, ref_id from tallybook.error order by ended_at"
        return list(self.db.execute(statement).fetchall())


def _end(outcome: Any) -> Any:
    if isinstance(outcome, list):
        raise outcome[0]
    return outcome


@pytest.fixture
def shop(dsn: str, db: Any) -> Shop:
    return Shop(dsn, db)


def near(at: Any, delay: timedelta) -> bool:
    return abs(at - datetime.now(UTC) - delay) < timedelta(minutes=1)


# Ends of an iteration


@pytest.mark.parametrize("raised", [False, True], ids=["returned", "raised"])
@pytest.mark.parametrize("when", ["+1 week", WEEK, "instant"], ids=str)
def test_reschedule_goes_on_under_the_same_name(shop: Shop, when: Any, raised: bool) -> None:
    """S3-07 S3-27 S3-40: Reschedule plans the same job for an instant or '+1 week': one iteration, no failure."""
    put = shop.asset.push(42).sync(shop.db)
    outcome = Reschedule(datetime.now(UTC) + WEEK if when == "instant" else when)
    report = shop.run([outcome] if raised else outcome)
    assert (report.processed, report.retrying) == (1, 1)
    info = shop.info
    assert (info.state, info.iterations, info.failures, info.job_id) == ("planned", 1, 0, put.job_id)
    assert near(info.next_run_at, WEEK) and near(info.last_at, timedelta(0))
    assert shop.run().processed == 0
    travel(shop.dsn, WEEK)
    shop.run(Reschedule("+1 day"))
    assert shop.info.iterations == 2
    first, second = shop.seen
    assert first == Subject(NAME, 0, None)
    assert second is not None and second.iterations == 1 and near(second.last_at, timedelta(0))


def test_an_instant_that_is_past_is_now(shop: Shop) -> None:
    """S3-27: a subject rescheduled to a past date is available at once."""
    shop.asset.push(42).sync(shop.db)
    shop.run(Reschedule(datetime(2020, 1, 1, tzinfo=UTC)), Reschedule(timedelta(0)), Complete())
    assert (shop.info.state, shop.info.iterations) == ("completed", 3)


@pytest.mark.parametrize("outcome", [None, Complete(), [Complete()], 7], ids=repr)
def test_complete_keeps_the_name(shop: Shop, outcome: Any) -> None:
    """S3-07 S3-28: a handler that returns or completes keeps the subject: push does nothing, upsert restarts it."""
    put = shop.asset.push(42).sync(shop.db)
    assert shop.run(outcome).completed == 1
    assert (shop.info.state, shop.info.iterations, shop.info.next_run_at) == ("completed", 1, None)
    assert shop.app.result(put.job_id).sync(shop.db) == (7 if outcome == 7 else None)
    again = shop.asset.push(43).sync(shop.db)
    assert (again.report, again.job_id) == ("unchanged", put.job_id)
    assert shop.run().processed == 0
    assert shop.asset.upsert(44).sync(shop.db).report == "updated"
    shop.run(Complete())
    assert shop.args[-1] == {"asset_id": 44, "page": 0}
    assert shop.info.iterations == 2


def test_drop_forgets_the_name(shop: Shop) -> None:
    """S3-28: a dropped subject is forgotten: the next push creates a new one, whose iterations start at 0."""
    put = shop.asset.push(42).sync(shop.db)
    assert shop.run(Drop()).completed == 1
    assert shop.asset.get().sync(shop.db) is None
    again = shop.asset.push(42).sync(shop.db)
    assert again.created and again.job_id != put.job_id
    shop.run(Reschedule("+1 week"))
    assert shop.info.iterations == 1


def test_kill_buries_and_keeps_the_name(shop: Shop) -> None:
    """S3-28: Kill makes a dead letter with its reason and the given args; push and upsert leave it alone."""
    put = shop.asset.push(42).sync(shop.db)
    assert shop.run(Kill("no such asset", args={"asset_id": 42, "page": 9})).dead == 1
    assert (shop.info.state, shop.info.args) == ("killed", {"asset_id": 42, "page": 9})
    (letter,) = shop.app.dead.list().sync(shop.db)
    assert (letter.job, letter.reason) == (put.job_id, "killed")
    assert letter.error is not None and letter.error["message"] == "no such asset"
    assert shop.asset.push(42).sync(shop.db).report == "unchanged"
    assert shop.asset.upsert(42).sync(shop.db).report == "dead"
    with pytest.raises(JobDied, match="no such asset"):
        shop.app.result(put.job_id).sync(shop.db)
    shop.app.retry(put.job_id).sync(shop.db)
    shop.run(Reschedule("+1 week"))
    assert (shop.info.state, shop.args[-1]["page"]) == ("planned", 9)


@pytest.mark.parametrize("raised", [False, True], ids=["returned", "raised"])
def test_reject_is_a_failure_on_record(shop: Shop, raised: bool) -> None:
    """S3-29 S3-30: a rejected iteration is retried; the error log has its message, details and reference."""
    shop.asset.push(42).sync(shop.db)
    reject = Reject("502", {"url": "x"}, ref_id="req-1", retry_in="10 min")
    assert shop.run([reject] if raised else reject).retrying == 1
    info = shop.info
    assert (info.state, info.failures, info.iterations) == ("planned", 1, 0)
    assert near(info.next_run_at, timedelta(minutes=10))
    assert shop.errors() == [(NAME, "502", {"url": "x"}, "req-1")]
    travel(shop.dsn, timedelta(minutes=10))
    shop.run(Reschedule("+1 week"))
    assert (shop.info.failures, shop.info.iterations) == (0, 1)


def test_details_that_are_no_json_are_kept_as_text(shop: Shop) -> None:
    """S3-29: details that are not JSON are stored as text, and the reject stays a reject."""
    shop.asset.push(42).sync(shop.db)
    shop.run(Reject("no", {"at": object()}), Complete())
    ((_, message, details, _),) = shop.errors()
    assert message == "no" and details.startswith("{'at': <object")


def test_dead_after_its_tolerance_and_a_reschedule_begins_anew(shop: Shop) -> None:
    """S3-04 S3-29 S3-31 S3-40: three failures in a row (errors count) make it dead; a reschedule resets the count."""
    shop.asset.push(42).sync(shop.db)
    shop.run(
        [ValueError("one")],
        Reject("two"),
        Reschedule(timedelta(0)),
        Reject("three"),
        [KeyError("four")],
        Reject("five"),
    )
    info = shop.info
    assert (info.state, info.failures, info.iterations) == ("dead", 3, 1)
    assert [message for _, message, _, _ in shop.errors()] == ["one", "two", "three", "'four'", "five"]
    assert shop.job().reason == "failed"


def test_a_policy_says_when_a_reject_is_tried_again(dsn: str, db: Any) -> None:
    """S3-29: without retry_in the task's retry policy gets the Reject and sets the delay or ends the attempts."""
    app = App("prices", dsn=dsn)

    def policy(failures: int, error: BaseException) -> timedelta | None:
        return timedelta(minutes=7) if isinstance(error, Reject) and error.message == "later" else None

    @app.task(retry=policy)
    async def refresh(message: str) -> Reject:
        return Reject(message)

    for message in ("later", "never"):
        refresh.subject(message).push(message).sync(db)
    drain(app, dsn=dsn)
    later, never = (refresh.subject(name).get().sync(db) for name in ("later", "never"))
    assert later is not None and near(later.next_run_at, timedelta(minutes=7))
    assert never is not None and never.state == "dead"


def test_the_ends_of_ordinary_jobs_keep_their_meaning(shop: Shop) -> None:
    """A snooze is not an iteration, Dead is dead at once, and Cancel frees the name."""
    shop.asset.push(42).sync(shop.db)
    shop.run(Snooze(timedelta(hours=1)))
    assert (shop.info.state, shop.info.iterations, shop.info.failures) == ("planned", 0, 0)
    travel(shop.dsn, timedelta(hours=1))
    shop.run(Dead("for good"))
    assert (shop.info.state, shop.info.iterations) == ("dead", 0)
    other = shop.refresh.subject("other")
    other.push(1).sync(shop.db)
    shop.run(Cancel("not wanted"))
    assert other.push(1).sync(shop.db).report == "created"


# New args


def test_new_args_are_those_of_the_next_iteration(shop: Shop) -> None:
    """S3-27 S3-28: Reschedule and Complete set the args of the next iteration."""
    shop.asset.push(42).sync(shop.db)
    shop.run(
        Reschedule(timedelta(0), args={"asset_id": 42, "page": 1}),
        Reschedule(timedelta(0)),
        Complete(args={"asset_id": 7}),
    )
    assert [args["page"] for args in shop.args] == [0, 1, 1]
    assert (shop.info.args, shop.info.state) == ({"asset_id": 7}, "completed")


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({"page": 1}, "missing 'asset_id'"),
        ({"asset_id": 1, "colour": "red"}, "unexpected argument 'colour'"),
        ({"asset_id": 1, "since": "yesterday"}, "$.since"),
        ({"asset_id": 1, "page": object()}, "$.page"),
    ],
)
def test_new_args_that_do_not_fit_fail_where_they_are_given(shop: Shop, args: dict[str, Any], error: str) -> None:
    """New args that do not fit the task make the subject dead at once, with its old args."""
    shop.asset.push(42).sync(shop.db)
    shop.run(Reschedule("+1 week", args=args))
    assert (shop.info.state, shop.info.args) == ("dead", {"asset_id": 42})
    assert error in shop.job().last_error


@pytest.mark.slow
def test_old_args_are_upgraded_in_the_flow(dsn: str, db: Any) -> None:
    """S3-39: an old subject's args are upgraded in memory; new args are stored with the task's version."""

    def versions(dsn: str) -> tuple[App, App, list[Any]]:
        """Two releases of a program: the args of the second have a currency."""
        one, two, seen = App("prices", dsn=dsn), App("prices", dsn=dsn), list[Any]()

        @one.task(name="refresh")
        async def refresh_1(asset: int) -> Reschedule:
            seen.append(("v1", asset))
            return Reschedule("+1 week")

        @two.task(name="refresh", version=2)
        async def refresh_2(ctx: Context, asset_id: int, currency: str) -> Reschedule:
            seen.append(("v2", asset_id, currency))
            assert ctx.subject is not None
            if ctx.subject.name == "in memory":
                return Reschedule("+1 week")
            return Reschedule("+1 week", args={"asset_id": asset_id, "currency": "USD"})

        @refresh_2.upgrade(1)
        def from_1(args: dict[str, Any]) -> dict[str, Any]:
            return {"asset_id": args["asset"], "currency": "EUR"}

        return one, two, seen

    one, two, seen = versions(dsn)
    old = one.tasks["refresh"]
    for name, n in (("stored", 1), ("in memory", 2)):
        old.subject(name).push(n).sync(db)
    drain(one, dsn=dsn)
    travel(dsn, WEEK)
    drain(two, dsn=dsn)
    assert sorted(seen) == [("v1", 1), ("v1", 2), ("v2", 1, "EUR"), ("v2", 2, "EUR")]
    rows = db.execute(
        "select s.subject, s.args, j.options -> 'version'"
        "  from tallybook.subject s join tallybook.job j on j.id = s.job_id order by 1"
    )
    assert rows.fetchall() == [("in memory", {"asset": 2}, None), ("stored", {"asset_id": 1, "currency": "USD"}, 2)]
    seen.clear()
    travel(dsn, WEEK)
    assert drain(one, dsn=dsn).moved == 1  # the older release leaves the args that it cannot read, and runs the other
    drain(two, dsn=dsn)
    assert sorted(seen) == [("v1", 2), ("v2", 1, "USD")]
    new = two.tasks["refresh"].subject("in memory")
    assert new.upsert(3, "EUR").sync(db).report == "updated"
    travel(dsn, WEEK)
    drain(two, dsn=dsn)
    assert seen[-1] == ("v2", 3, "EUR") or seen[-2] == ("v2", 3, "EUR")
    info = new.get().sync(db)
    assert info is not None and info.iterations == 4


# Ordinary jobs


def test_an_ordinary_job_cannot_go_on_under_a_name(shop: Shop) -> None:
    """An outcome for subjects only makes an ordinary job dead, with an error; the others work as usual."""
    cases: list[tuple[Any, str, str | None]] = [
        (Reschedule("+1 week"), "dead", "not a subject, so it cannot end with Reschedule"),
        (Drop(), "dead", "not a subject, so it cannot end with Drop"),
        (Complete(args={"asset_id": 1}), "dead", "not a subject, so it cannot end with Complete(args=...)"),
        (Complete(), "completed", None),
        (Kill("why"), "dead", "why"),
        (Reject("502"), "dead", "502"),
    ]
    ids = [shop.refresh.with_(max_attempts=1).enqueue_sync(shop.db, n) for n in range(len(cases))]
    shop.run(*(outcome for outcome, _, _ in cases))
    assert shop.seen == [None] * len(cases) and [args["asset_id"] for args in shop.args] == list(range(len(cases)))
    for job, (_, state, error) in zip(ids, cases, strict=True):
        info = shop.app.get(job).sync(shop.db)
        assert (info.state, info.attempts) == (state, 1)
        assert (error or "") in (info.last_error or "")
        if error and "not a subject" in error:
            assert info.errors is not None and info.errors[0]["type"] == "tallybook.errors.NotASubject"


# Workers


async def test_an_active_subject_is_never_touched(dsn: str, db: Any) -> None:
    """S3-25: an upsert while the handler runs reports active and changes nothing; neither does a push."""
    app = App("prices", dsn=dsn)
    may_end, seen = asyncio.Event(), list[int]()

    @app.task
    async def refresh(asset_id: int) -> Reschedule:
        seen.append(asset_id)
        await may_end.wait()
        return Reschedule("+1 week")

    asset = refresh.subject(NAME)
    put = await asset.push(42)
    async with working(app, dsn):
        await eventually(lambda: seen == [42], "it runs")
        reports = [
            await refresh.with_(delay="1 hour").subject(NAME).upsert(43),
            *await app.subjects.upsert_many([asset.job(44), refresh.subject("other").job(1)]),
            await asset.push(45),
        ]
        assert [report.report for report in reports] == ["active", "active", "created", "unchanged"]
        assert {report.job_id for report in reports if report.subject == NAME} == {put.job_id}
        info = await asset.get()
        assert info is not None and (info.state, info.args) == ("active", {"asset_id": 42})
        may_end.set()
        await eventually(lambda: asset.get().sync(db).state == "planned", "it has ended")
    info = await asset.get()
    assert info is not None
    assert (info.args, info.iterations) == ({"asset_id": 42}, 1)
    assert near(info.next_run_at, WEEK)
    assert (await asset.upsert(43)).report == "updated"


async def test_a_worker_is_awake_when_an_iteration_is_due(dsn: str, db: Any) -> None:
    """S3-27: a subject that reschedules itself soon runs on time, whatever the worker's poll interval."""
    app, seen = App("prices", dsn=dsn), list[int]()

    @app.task
    async def refresh(ctx: Context) -> Reschedule | Complete:
        assert ctx.subject is not None
        seen.append(ctx.subject.iterations)
        return Reschedule("200 ms") if len(seen) < 4 else Complete()

    await refresh.subject(NAME).push()
    async with working(app, dsn):
        await eventually(lambda: seen == [0, 1, 2, 3], "four iterations")


@pytest.mark.slow
def test_a_subject_whose_worker_died_runs_again(dsn: str, db: Any) -> None:
    """S3-06 S3-31: after SIGKILL another worker runs it again; the lost attempt is no failure and no iteration."""

    def _ran(db: Any, job_id: int) -> list[tuple[int, str]]:
        return list(db.execute("select attempt, worker from ran where job_id = %s order by 1", (job_id,)).fetchall())

    with Workers(dsn, db) as workers:
        first = workers.start()
        asset = hold.subject(NAME)
        job = asset.push(1).sync(db)
        wait_until(lambda: len(_ran(db, job.job_id)) == 1, "it runs")
        first.signal(signal.SIGKILL)
        second = workers.start()
        wait_until(lambda: len(_ran(db, job.job_id)) == 2, "it runs again")
        workers.open_gate()
        wait_until(lambda: asset.get().sync(db).state == "completed", "it is completed")
    info = asset.get().sync(db)
    assert info is not None
    assert (info.iterations, info.failures) == (1, 0)
    assert _ran(db, job.job_id) == [(1, first.name), (2, second.name)]


@pytest.mark.slow
async def test_outcomes_come_out_of_processes(dsn: str, db: Any) -> None:
    """S3-40: a handler in its own process ends its subject like any other, and knows its subject."""

    def _ended(jobs: Jobs, job_id: int) -> bool:
        return jobs(job_id).state not in ("available", "running")

    jobs = Jobs(zoo.app, db)
    kinds = ("reschedule", "complete", "drop", "kill", "reject", "misfit", "unstorable")
    async with working(zoo.app, dsn):
        put = {kind: zoo.iterates.subject(kind).push(kind).sync(db) for kind in kinds}
        await eventually(
            lambda: all(_ended(jobs, report.job_id) for report in put.values()), "all have ended", seconds=30
        )
    infos = {kind: zoo.iterates.subject(kind).get().sync(db) for kind in kinds}
    assert {kind: info and info.state for kind, info in infos.items()} == {
        "reschedule": "planned", "complete": "completed", "drop": None, "kill": "killed", "reject": "planned",
        "misfit": "dead", "unstorable": "dead",
    }  # fmt: skip
    assert infos["reschedule"] is not None
    assert (infos["reschedule"].args, infos["reschedule"].iterations) == (
        {"kind": "reschedule", "seen": "reschedule 0"},
        1,
    )
    assert infos["complete"] is not None and infos["complete"].args == {"kind": "complete", "seen": "x"}
    rejected = db.execute("select message, details, ref_id from tallybook.error where subject = 'reject'").fetchall()
    assert rejected == [("no", {"code": 502}, "r1")]


# Atomic tasks


def forwarding(dsn: str, outcomes: dict[str, Any], *, plain: bool = False) -> tuple[App, Any, Any]:
    """A task that forwards a document to another queue, in the transaction that ends its iteration, as its URL says."""
    app = App("crawler", dsn=dsn)

    @app.task(queue="parse")
    async def parse(url: str, size: int) -> None: ...

    @app.task(queue="fetch", atomic=True, max_attempts=2)
    def fetch(tx: psycopg.Connection[Any], url: str) -> Any:
        parse.subject(url).upsert(url, size=3).sync(tx)
        return _end(outcomes[url])

    @app.task(queue="fetch", atomic=True, max_attempts=2)
    async def fetch_async(tx: psycopg.AsyncConnection[Any], url: str) -> Any:
        await parse.subject(url).upsert(url, size=3).on(tx)
        return _end(outcomes[url])

    return app, fetch if plain else fetch_async, parse


@pytest.mark.parametrize("plain", [False, True], ids=["async", "plain"])
def test_a_document_is_forwarded_with_the_end_of_its_iteration(dsn: str, db: Any, plain: bool) -> None:
    """S3-40: an atomic handler's enqueue and its end are one transaction; a raised outcome undoes the enqueue."""
    reject = Reject("502", {"a": 1}, retry_in="1 hour")
    cases: dict[str, tuple[Any, str | None, bool]] = {
        "reschedule": (Reschedule("+1 week"), "planned", True),
        "complete": (Complete(), "completed", True),
        "complete with args": (Complete(args={"url": "other"}), "completed", True),
        "return": (None, "completed", True),
        "drop": (Drop(), None, True),
        "kill": (Kill("gone"), "killed", True),
        "reject": (reject, "planned", True),
        "raise reject": ([reject], "planned", False),
        "raise reschedule": ([Reschedule("+1 week")], "planned", False),
        "reschedule with wrong args": (Reschedule("+1 week", args={"uri": "x"}), "dead", False),
    }
    app, fetch, parse = forwarding(dsn, {url: outcome for url, (outcome, _, _) in cases.items()}, plain=plain)
    for url in cases:
        fetch.subject(url).push(url).sync(db)
    drain(app, dsn=dsn, queues={"fetch": 1})
    for url, (_, state, forwarded) in cases.items():
        found, next_one = fetch.subject(url).get().sync(db), parse.subject(url).get().sync(db)
        assert (found and found.state, next_one and (next_one.queue, next_one.args)) == (
            state, ("parse", {"url": url, "size": 3}) if forwarded else None
        ), url  # fmt: skip


def test_an_ordinary_atomic_job_that_reschedules_leaves_nothing(dsn: str, db: Any) -> None:
    """An ordinary job that returns Reschedule is dead, and its handler's writes are rolled back."""
    app, fetch, parse = forwarding(dsn, {"u": Reschedule("+1 week")})
    job = fetch.enqueue_sync(db, "u")
    drain(app, dsn=dsn, queues={"fetch": 1})
    info = app.get(job).sync(db)
    assert (info.state, info.attempts) == ("dead", 1)
    assert parse.subject("u").get().sync(db) is None
