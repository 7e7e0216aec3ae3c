"""Lists of jobs in Python and on the command line, and verbs on the listed jobs."""

import json
from typing import Any

import pytest

from support.cli import invoke
from support.hands import Hands
from tallybook import App, Complete, Kill, Reschedule
from tallybook.errors import ConfigError, InvalidArgument, UnknownJob
from tallybook.testing import drain_async


@pytest.fixture
def app(dsn: str) -> App:
    app = App("shop", dsn=dsn)

    @app.task(queue="mail")
    async def note(what: str) -> None: ...

    @app.task(max_attempts=1, queue="charges")
    async def breaks(user: int, why: str = "boom") -> None:
        raise RuntimeError(why)

    return app


async def test_open_jobs_of_one_type(app: App, db: Any) -> None:
    """S4-09: list returns one task's open jobs, newest first, up to max_jobs; the next page continues after them."""
    note, breaks = app.tasks["note"], app.tasks["breaks"]
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
    done = [note.enqueue_sync(db, str(n)).id for n in range(20)]
    hands = Hands(db, "mail")
    for job in hands.claim(20):
        hands.one("select tallybook.complete(%s, %s, %s)", job.lease, job.id, job.attempt)
    app.enqueue_many_sync(db, [note.with_(order_key="one").job(str(n)) for n in range(300)])
    claimed = hands.claim(300)
    call = "select tallybook.order_admit(%s::uuid[], %s::bigint[], %s::int[])"
    hands.one(call, [job.lease for job in claimed], [job.id for job in claimed], [job.attempt for job in claimed])
    page = "tallybook.jobs(states => '{completed}', max_jobs => 20, max_looked => 5000)"
    assert hands.one(f"select array_agg(id) from {page} where id is not null") == done[::-1]  # noqa: S608
