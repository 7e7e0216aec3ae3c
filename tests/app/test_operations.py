"""Options of one job, lists of jobs and verbs on many: key conflicts, order keys, expiry, dead letters, cancel."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from importlib import import_module
from typing import Any

import pytest

from support.cli import invoke, run
from support.hands import Hands
from tallybook import App, Complete, Context, Kill, Reschedule
from tallybook.errors import ConfigError, InvalidArgument, JobDied, KeyTaken, UnknownJob
from tallybook.testing import drain_async, travel

HOUR = timedelta(hours=1)


@pytest.fixture
def ran() -> list[Any]:
    """The args with which the task `note` ran, in order."""
    return []


@pytest.fixture
def app(dsn: str, ran: list[Any]) -> App:
    app = App("shop", dsn=dsn)

    @app.task
    async def note(what: Any) -> None:
        ran.append(what)

    @app.task(max_attempts=1, queue="charges")
    async def breaks(user: int, why: str = "boom") -> None:
        raise RuntimeError(why)

    return app


async def test_a_conflict_of_keys_ends_as_the_call_says(app: App, dsn: str, db: Any, ran: list[Any]) -> None:
    """S1-07: the job with the key is left alone, gets new args, a higher priority or a later time, or is reported."""
    note = app.tasks["note"]
    keyed = note.with_(unique="k", priority=5)
    first = keyed.enqueue_sync(db, "first")
    assert keyed.enqueue_sync(db, "skipped") == type(first)(first.id, False)
    with pytest.raises(KeyTaken, match="has the unique key") as taken:
        note.with_(unique="k", on_conflict="raise").enqueue_sync(db, "x")
    assert taken.value.job == first.id
    assert note.with_(unique="k", on_conflict="replace_args").enqueue_sync(db, "second").id == first.id
    assert note.with_(unique="k", on_conflict="raise_priority", priority=1).enqueue_sync(db, "x").id == first.id
    pushed = note.with_(unique="k", on_conflict="push_run_at", delay=HOUR).enqueue_sync(db, "x")
    assert (pushed.id, pushed.created) == (first.id, False)
    note.enqueue_sync(db, "meanwhile")
    await drain_async(app, dsn=dsn)
    found = await app.get(first)
    assert (found.state, found.priority, found.args, ran) == ("scheduled", 1, {"what": "second"}, ["meanwhile"])
    travel(dsn, HOUR)
    await drain_async(app, dsn=dsn)
    assert ran == ["meanwhile", "second"]


async def test_a_user_request_overtakes_the_background_job_that_has_its_key(
    app: App, dsn: str, db: Any, ran: list[Any]
) -> None:
    """S1-07: an enqueue with priority 1 raises the background job of priority 2 that has its key."""
    note = app.tasks["note"]
    note.with_(queue="prices").enqueue_sync(db, "older background job")
    note.with_(queue="prices", unique="asset:7").enqueue_sync(db, "asset 7")
    note.with_(queue="prices", unique="asset:7", priority=1, on_conflict="raise_priority").enqueue_sync(db, "asset 7")
    await drain_async(app, dsn=dsn)
    assert ran == ["asset 7", "older background job"]


async def test_a_key_while_queued_is_free_when_its_job_has_started(app: App, dsn: str, db: Any) -> None:
    """S1-05: with unique_while=queued, enqueues while the job runs create exactly one more job."""
    ids: list[Any] = []

    @app.task
    async def refresh() -> None:
        if not ids:
            again = refresh.with_(unique="r", unique_while="queued")
            ids.extend([again.enqueue_sync(db), again.enqueue_sync(db), refresh.with_(unique="r").enqueue_sync(db)])

    first = refresh.with_(unique="r").enqueue_sync(db)
    await drain_async(app, dsn=dsn)
    assert [job.created for job in ids] == [True, False, False]
    assert ids[0].id == ids[1].id != first.id
    assert db.execute("select count(*) from tallybook.job where state = 'completed'").fetchone() == (2,)


async def test_jobs_with_an_order_key_run_one_after_the_other(app: App, dsn: str, db: Any) -> None:
    """I7 F49: one job per order key runs at a time, in the order of enqueue, whatever its priority and queue."""
    log: list[str] = []

    @app.task
    async def step(ctx: Context, account: int, n: int) -> None:
        log.append(f"{account}:{n} begins")
        await asyncio.sleep(0.001)
        log.append(f"{account}:{n} ends")

    for n in range(8):
        for account in (1, 2):
            step.with_(order_key=f"account:{account}", priority=8 - n, queue=f"q{n % 2}").enqueue_sync(db, account, n)
    await drain_async(app, dsn=dsn, queues={"q0": 10, "q1": 10})
    for account in (1, 2):
        lines = [line for line in log if line.startswith(f"{account}:")]
        assert lines == [f"{account}:{n} {what}" for n in range(8) for what in ("begins", "ends")]


async def test_a_job_that_did_not_start_in_time_is_dead(app: App, dsn: str, db: Any, ran: list[Any]) -> None:
    """S2-08: after expires_at no attempt starts; the job is dead with reason expired, and a user can retry it."""
    late = app.tasks["note"].with_(expires_at=datetime.now(UTC) - timedelta(seconds=1)).enqueue_sync(db, "late")
    app.tasks["note"].with_(expires_at=datetime.now(UTC) + HOUR).enqueue_sync(db, "in time")
    await drain_async(app, dsn=dsn)
    found = await app.get(late)
    assert (found.state, found.reason, found.attempts, found.failures, ran) == ("dead", "expired", 0, 0, ["in time"])
    with pytest.raises(JobDied, match="Expired"):
        await app.result(late)
    await app.retry(late)
    await drain_async(app, dsn=dsn)
    assert ran == ["in time", "late"]


async def test_dead_letters_are_listed_retried_and_dropped_by_filter(
    app: App, dsn: str, db: Any, ran: list[Any]
) -> None:
    """S2-08 S4-14: failing jobs leave the queue; users list them newest first, and retry or drop one or all matches."""
    breaks = app.tasks["breaks"]
    jobs = [breaks.enqueue_sync(db, user, why=f"Timeout {user}") for user in range(4)]
    await drain_async(app, dsn=dsn)
    letters = await app.dead.list()
    assert [letter.job for letter in letters] == [job.id for job in reversed(jobs)]
    newest = letters[0]
    assert (newest.task, newest.queue, newest.reason, newest.failures) == ("breaks", "charges", "failed", 1)
    assert newest.error is not None and newest.error["message"] == "Timeout 3" and newest.args["user"] == 3
    assert [one.job for one in app.dead.list(error="timeout 2").sync(db)] == [jobs[2].id]
    assert [one.job for one in await app.dead.list(before=letters[1].died_at)] == [jobs[1].id, jobs[0].id]
    assert await app.dead.list(reason="crashed") == []
    db.execute("update tallybook.dead set died_at = now()")  # as after a crash of the worker that ran all of them
    pages, last = [], None
    while page := await app.dead.list(max_jobs=1, before=last and last.died_at, before_id=last and last.job):
        pages.append((last := page[0]).job)
    assert pages == [job.id for job in reversed(jobs)]
    done = await app.dead.retry(args={"user": 1})
    assert (done.retried, done.refused) == (1, 0)
    assert await app.dead.drop(jobs[2]) and not await app.dead.drop(jobs[2])
    assert await app.dead.drop_matching(task="breaks") == 2
    assert await app.dead.list() == []
    assert (await app.get(jobs[1])).state == "available"
    with pytest.raises(ConfigError, match="reason"):
        await app.dead.list(reason="tired")
    with pytest.raises(TypeError, match="no filter 'text': write queue, task, reason, error"):
        await app.dead.drop_matching(text="Timeout 3")  # type: ignore[call-arg]


async def test_jobs_are_cancelled_by_key_and_by_filter(app: App, dsn: str, db: Any, ran: list[Any]) -> None:
    """S4-14: cancel_matching cancels every open job, available or scheduled, that matches all filters; no other."""
    note = app.tasks["note"]
    for state in ("available", "scheduled"):
        options = {"delay": HOUR} if state == "scheduled" else {}
        note.with_(**options).enqueue_sync(db, {"customer": 1})
        note.with_(unique=f"{state}:2", **options).enqueue_sync(db, {"customer": 2})
    with pytest.raises(InvalidArgument, match="needs a filter"):
        await app.jobs.cancel_matching()
    done = await app.jobs.cancel_matching(task="note", args={"what": {"customer": 1}}, reason="left")
    assert (done.cancelled, done.cancelling) == (2, 0)
    assert app.jobs.cancel_matching(unique="scheduled:2").sync(db).cancelled == 1
    assert (await app.jobs.cancel_matching(queue="default", states=["scheduled"])).cancelled == 0
    await drain_async(app, dsn=dsn)
    assert ran == [{"customer": 2}]


async def test_dead_letters_are_cancelled_by_filter(app: App, dsn: str, db: Any) -> None:
    """S4-14: a filter with state dead cancels dead letters, each with the reason; without it they stay."""
    jobs = [app.tasks["breaks"].enqueue_sync(db, user) for user in range(4)]
    await drain_async(app, dsn=dsn)
    with pytest.raises(ConfigError, match="dead"):
        await app.jobs.cancel_matching(queue="charges", states=["buried"])
    assert (await app.jobs.cancel_matching(queue="charges")).cancelled == 0
    assert (
        await app.jobs.cancel_matching(queue="charges", states=["dead"], args={"user": 2}, reason="left")
    ).cancelled == 1
    which = ("job", "cancel", "--state", "dead", "--queue", "charges", "--reason", "withdrawn")
    assert "cancel 3 jobs, 0 of them running? Pass --yes" in run(*which, dsn=dsn, code=2)
    assert [letter.job for letter in await app.dead.list()] == [jobs[3].id, jobs[1].id, jobs[0].id]
    assert "1 jobs will not start" in run(*which, "--args", '{"user": 0}', "--yes", dsn=dsn)
    assert "2 jobs will not start" in run(*which, "--yes", dsn=dsn)
    assert "0 jobs will not start" in run(*which, dsn=dsn)
    found = db.execute("select state, reason from tallybook.job order by id").fetchall()
    assert found == [("cancelled", reason) for reason in ("withdrawn", "withdrawn", "left", "withdrawn")]
    assert await app.dead.list() == []


@pytest.mark.parametrize("state", ["dead", "available"])
async def test_a_cancel_that_a_person_declines(
    app: App, dsn: str, db: Any, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """S4-14: if the user declines, nothing is cancelled and no number of jobs is printed."""
    app.tasks["breaks"].enqueue_sync(db, 1)
    if state == "dead":
        await drain_async(app, dsn=dsn)
    monkeypatch.setattr(import_module("tallybook._cli.job"), "agreed", lambda question, yes: False)
    said = run("job", "cancel", "--state", state, "--queue", "charges", dsn=dsn)
    assert said == "nothing done\n"
    assert db.execute("select state from tallybook.job").fetchall() == [(state,)]


async def test_the_command_line_has_the_same_verbs(app: App, dsn: str, db: Any) -> None:
    """S2-08 S4-14: dead list, show, retry, drop and job cancel with filters: each asks before it changes many."""
    jobs = [app.tasks["breaks"].enqueue_sync(db, user) for user in range(3)]
    await drain_async(app, dsn=dsn)
    assert "RuntimeError: boom" in run("dead", "list", "--task", "breaks", dsn=dsn)
    assert '"reason": "failed"' in run("dead", "list", "--json", "--since", "1 hour", dsn=dsn)
    assert "raise RuntimeError(why)" in run("dead", "show", str(jobs[0].id), dsn=dsn)
    assert "retried, attempt 2" in run("dead", "retry", str(jobs[0].id), dsn=dsn)
    assert "pass ids, or filters" in run("dead", "drop", dsn=dsn, code=2)
    assert "Pass --yes" in run("dead", "drop", "--all", dsn=dsn, code=2)
    assert "2 jobs are retried" in run("dead", "retry", "--task", "breaks", "--yes", dsn=dsn)
    assert "3 jobs will not start" in run("job", "cancel", "--queue", "charges", "--yes", dsn=dsn)
    assert "either ids or filters" in run("job", "cancel", "7", "--queue", "x", dsn=dsn, code=2)
    assert "--args is not JSON" in run("job", "cancel", "--args", "{", "--yes", dsn=dsn, code=2)
    await drain_async(app, dsn=dsn)
    assert "no such dead letters" in run("dead", "list", dsn=dsn)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_conflict": "skipp", "unique": "k"}, "must be one of skip"),
        ({"on_conflict": "raise"}, "there is no unique key"),
        ({"unique_while": "queued"}, "there is no unique key"),
        ({"unique": "k", "on_conflict": "push_run_at"}, "no time to push it to"),
        ({"unique": "k", "unique_while": "ever"}, "must be running or queued"),
        ({"order_key": ""}, "1 to 512 bytes"),
        ({"order_key": "a\0b"}, "NUL"),
        ({"expires_at": datetime(2026, 1, 1)}, "not an aware datetime"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_at_once(app: App, options: Any, says: str) -> None:
    """A wrong option raises a ConfigError that says why, before anything is sent."""
    with pytest.raises(ConfigError, match=says):
        app.tasks["note"].with_(**options)


# Lists of jobs in Python and on the command line, and verbs on the listed jobs


async def test_open_jobs_of_one_type(app: App, db: Any) -> None:
    """S4-09: list returns one task's open jobs, newest first, up to max_jobs; the next page continues after them."""
    note, breaks = app.tasks["note"].with_(queue="mail"), app.tasks["breaks"]
    jobs = [note.enqueue_sync(db, str(n)).id for n in range(5)]
    breaks.enqueue_sync(db, 1)
    states = ["available", "running", "scheduled", "waiting"]
    page = await app.jobs.list(task="note", states=states, max_jobs=3)
    assert [job.id for job in page.jobs] == jobs[:1:-1]
    assert {(job.task, job.queue, job.state) for job in page.jobs} == {("note", "mail", "available")}
    rest = app.jobs.list(task="note", states=states, after=page.next).sync(db)
    assert ([job.id for job in rest.jobs], rest.next, rest.looked_to) == (jobs[1::-1], None, None)


async def test_dead_letters_are_retried_and_dropped_by_what_was_listed(app: App, db: Any, dsn: str) -> None:
    """S4-14: dead letters list task, last error, attempts and enqueue time; users retry or drop what is listed."""
    breaks = app.tasks["breaks"]
    first, second, other = (breaks.enqueue_sync(db, n, why).id for n, why in enumerate(("Card 1", "Card 2", "x")))
    await drain_async(app, dsn=dsn)
    page = await app.jobs.list(states=["dead"], error="card")
    assert [(job.id, job.task, job.last_error, job.attempts) for job in page.jobs] == [
        (second, "breaks", "Card 2", 1),
        (first, "breaks", "Card 1", 1),
    ]
    assert all(job.enqueued_at <= job.ended_at for job in page.jobs if job.ended_at)
    assert [letter.job for letter in await app.dead.list(error="card")] == [second, first]
    said = await app.jobs.retry([job.id for job in page.jobs] + [second])
    assert [(one.job, one.done, one.detail, one.changed) for one in said] == [
        (first, "retried", "attempt 2", True),
        (second, "retried", "attempt 2", True),
    ]
    said = await app.jobs.drop([first, other])
    assert [(one.job, one.done, one.changed) for one in said] == [(first, "refused", False), (other, "dropped", True)]
    assert [one.done for one in await app.jobs.cancel([first, second], "enough")] == ["cancelled", "cancelled"]
    assert [one.done for one in app.jobs.retry([first]).sync(db)] == ["retried"]
    assert [one.done for one in app.jobs.cancel([first]).sync(db)] == ["cancelled"]
    assert [one.done for one in app.jobs.drop([first]).sync(db)] == ["refused"]


async def test_bad_input(app: App) -> None:
    """Invalid input raises a clear error before anything is sent."""
    with pytest.raises(ConfigError, match="must be some of scheduled, retrying"):
        await app.jobs.list(states=["failed"])
    with pytest.raises(ConfigError, match="from 1 to 1000"):
        await app.jobs.list(max_jobs=1001)
    with pytest.raises(InvalidArgument, match="is not a cursor"):
        await app.jobs.list(after="here")
    with pytest.raises(InvalidArgument, match="of a list with other filters"):
        await app.jobs.list(states=["available"], after="i12")
    with pytest.raises(ConfigError, match="at most 1000 ids"):
        await app.jobs.retry(range(1, 1002))
    with pytest.raises(UnknownJob):
        await app.jobs.cancel([0])


async def test_the_command_line_pages_and_filters(app: App, db: Any, dsn: str) -> None:
    """`job list` filters by several states, error text and time; --after continues where a page ended."""

    def run(dsn: str, *words: str) -> tuple[str, str]:
        """Return what `tallybook job list` prints on stdout and on stderr."""
        result = invoke("job", "list", *words, to=dsn)
        assert result.exit_code == 0, result.output
        return result.stdout, result.stderr

    note, breaks = app.tasks["note"], app.tasks["breaks"]
    dead = [breaks.enqueue_sync(db, n, why).id for n, why in enumerate(("Card 1", "x", "card 2"))]
    await drain_async(app, dsn=dsn)
    note.enqueue_sync(db, "x")
    listed = [job["id"] for job in json.loads(run(dsn, "--error", "CARD", "--json")[0])]
    assert listed == [dead[2], dead[0]]
    out, said = run(dsn, "--state", "dead", "--state", "completed", "--limit", "2", "--since", "1 hour")
    assert (dead[2] and str(dead[1]) in out, said) == (
        True,
        f"the newest 2; --limit shows more, --after i{dead[1]} the next\n",
    )
    rest, said = run(dsn, "--state", "dead", "--after", f"i{dead[1]}", "--json")
    assert ([job["id"] for job in json.loads(rest)], said) == ([dead[0]], "")
    assert run(dsn, "--before", "1 hour") == ("no such jobs\n", "")
    result = invoke("job", "list", "--since", "2030-01-01", to=dsn)
    assert result.exit_code == 2 and "has no zone" in result.output


async def test_which_subjects_have_stopped_and_why(app: App, db: Any, dsn: str) -> None:
    """S1-26: an admin lists the stopped subjects, last stopped first, with the reason; and all, by task and name."""

    @app.task(max_attempts=1)
    async def refresh(what: str) -> Any:
        if what == "breaks":
            raise RuntimeError("no price")
        return {"killed": Kill("delisted"), "done": Complete(), "lives": Reschedule("+1 week")}[what]

    for name in ("a:breaks", "b:lives", "b:killed", "c:done", "d:breaks"):
        refresh.subject(name).push(name[2:]).sync(db)
        await drain_async(app, dsn=dsn)
    stopped = ["completed", "killed", "dead"]
    page = await app.subjects.list(states=stopped, max_subjects=3)
    assert [(one.subject, one.state, one.last_error, one.ended_at is not None) for one in page.subjects] == [
        ("d:breaks", "dead", "no price", True),
        ("c:done", "completed", None, True),
        ("b:killed", "killed", "delisted", True),
    ]
    rest = app.subjects.list(states=stopped, after=page.next).sync(db)
    assert ([one.subject for one in rest.subjects], rest.next) == (["a:breaks"], None)
    assert [one.subject for one in (await app.subjects.list(states=["dead"], prefix="d")).subjects] == ["d:breaks"]

    names, after = [], None
    for _ in range(3):
        page = await app.subjects.list(task="refresh", after=after, max_subjects=2)
        names += [one.subject for one in page.subjects]
        after = page.next
    assert (names, after) == (["a:breaks", "b:killed", "b:lives", "c:done", "d:breaks"], None)
    assert [one.subject for one in (await app.subjects.list(states=["planned", "dead"])).subjects] == [
        "a:breaks", "b:lives", "d:breaks",
    ]  # fmt: skip
    assert (await app.subjects.list(task="other")).subjects == []
    result = invoke("subject", "list", "--state", "dead", "--state", "killed", to=dsn)
    assert [line.split()[1:3] for line in result.stdout.splitlines()[-3:]] == [
        ["d:breaks", "dead"],
        ["b:killed", "killed"],
        ["a:breaks", "dead"],
    ], result.output
    assert "no price" in result.stdout
    with pytest.raises(ConfigError, match="must be some of planned"):
        await app.subjects.list(states=["failed"])
    with pytest.raises(InvalidArgument, match="is not a cursor of this list"):
        await app.subjects.list(states=stopped, after='["refresh", "a:breaks"]')


async def test_completed_jobs_behind_many_that_were_set_aside(app: App, db: Any) -> None:
    """A page of completed jobs is full even if the newest claims are of jobs that wait for their order key."""
    note = app.tasks["note"]
    done = [note.with_(queue="mail").enqueue_sync(db, str(n)).id for n in range(20)]
    hands = Hands(db, "mail")
    for job in hands.claim(20):
        hands.one("select tallybook.complete(%s, %s, %s)", job.lease, job.id, job.attempt)
    app.enqueue_many_sync(db, [note.with_(queue="mail", order_key="one").job(str(n)) for n in range(300)])
    claimed = hands.claim(300)
    call = "select tallybook.order_admit(%s::uuid[], %s::bigint[], %s::int[])"
    hands.one(call, [job.lease for job in claimed], [job.id for job in claimed], [job.attempt for job in claimed])
    page = "tallybook.jobs(states => '{completed}', max_jobs => 20, max_looked => 5000)"
    assert hands.one(f"select array_agg(id) from {page} where id is not null") == done[::-1]  # noqa: S608
