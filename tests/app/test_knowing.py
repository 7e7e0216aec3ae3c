"""why, trace and links in Python and on the command line; tests/sql covers each case of the verbs."""

import json
from datetime import timedelta
from typing import Any

import pytest

from support.cli import run
from tallybook import App, Reason, TraceEvent
from tallybook.errors import ConfigError, InvalidArgument, UnknownJob


@pytest.fixture
def app(dsn: str) -> App:
    app = App("shop", dsn=dsn)

    @app.task
    async def review(n: int = 0) -> int:
        if n < 0:
            raise ValueError("no such page")
        return n

    @app.task(queue="mail")
    async def tell(n: int = 0) -> None: ...

    return app


async def test_a_program_asks_why(app: App, db: Any) -> None:
    """Issue 6, 4: why gives codes, sentences and details of why a job does not run, with and without an event loop."""
    job = app.tasks["review"].with_(delay=timedelta(hours=1)).enqueue_sync(db)
    late, nobody = app.jobs.why(job).sync(db)
    assert isinstance(late, Reason)
    assert (late.state, late.reason, nobody.reason) == ("scheduled", "not_due", "no_worker")
    assert "until" in late.details and late.explanation.startswith("It is not due before")
    assert await app.jobs.why(job.id) == [late, nobody]
    assert [reason.reason for reason in app.jobs.why(4711).sync(db)] == ["unknown"]
    with pytest.raises(UnknownJob):
        app.jobs.why(0).sync(db)


async def test_a_program_follows_links(app: App, db: Any) -> None:
    """S3-35, S4-02: links={"submission": 42} finds jobs across tasks and queues: single, in bulk and as children."""
    review, tell = app.tasks["review"], app.tasks["tell"]
    links = {"submission": 42, "form": "a"}
    first = review.with_(links=links).enqueue_sync(db, 7)
    both = app.enqueue_many_sync(db, [tell.with_(links={"submission": "42"}).job(1), tell.job(2)])
    child = tell.with_(after=first, links=links, headers={"trace": "x"}).enqueue_sync(db, 3)
    failing = review.with_(links=links, unique="k", max_attempts=1).enqueue_sync(db, -1)
    await app.drain(max_jobs=10)
    events = await app.jobs.trace(links={"submission": 42})
    assert all(isinstance(event, TraceEvent) for event in events)
    assert {event.job for event in events} == {first.id, both[0].id, child.id, failing.id}
    assert {event.queue for event in events} == {"default", "mail"}
    assert [event.at for event in events] == sorted(event.at for event in events)
    (dead,) = app.jobs.trace(job=failing, newest_first=True, max_events=1).sync(db)
    assert dead.event == "dead" and dead.error is not None and dead.error["message"] == "no such page"
    assert [event.event for event in app.jobs.trace(unique="k").sync(db)] == ["enqueued", "started", "dead"]
    info = app.get(child).sync(db)
    assert (info.links, info.headers) == ({"submission": "42", "form": "a"}, {"trace": "x", "links": info.links})
    assert app.get(both[1]).sync(db).links is None


async def test_a_program_follows_a_subject(app: App, db: Any) -> None:
    """S3-35: trace lists a subject's events in order; the enqueued event has the args."""
    app.tasks["review"].subject("doc:7").upsert(1).sync(db)
    await app.drain(max_jobs=5)
    events = app.jobs.trace(subject="doc:7").sync(db)
    assert [event.event for event in events][:2] == ["enqueued", "started"]
    assert events[0].details == {"args": {"n": 1}}


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ({}, "not a mapping"),
        ([("a", 1)], "not a mapping"),
        ({f"k{n}": 1 for n in range(11)}, "at most 10"),
        ({"A": 1}, "a kind must be"),
        ({"a": 1.5}, "neither text nor a whole number"),
        ({"a": True}, "neither text nor a whole number"),
        ({"a": ""}, "1 to 200 bytes"),
        ({"a": "x" * 201}, "1 to 200 bytes"),
        ({"a": "\0"}, "NUL"),
    ],
)
async def test_links_are_checked_before_anything_is_sent(app: App, links: Any, said: str) -> None:
    """Invalid links raise ConfigError, both in with_ and in trace."""
    with pytest.raises(ConfigError, match=said):
        app.tasks["review"].with_(links=links)
    with pytest.raises(ConfigError, match=said):
        app.jobs.trace(links=links).sync()


async def test_what_cannot_be_followed_is_refused(app: App) -> None:
    """trace refuses no target, two targets and max_events=0; with_ refuses links as a header."""
    with pytest.raises(InvalidArgument, match="one thing"):
        app.jobs.trace().sync()
    with pytest.raises(InvalidArgument, match="one thing"):
        app.jobs.trace(subject="s", unique="k").sync()
    with pytest.raises(ConfigError, match="max_events"):
        app.jobs.trace(subject="s", max_events=0).sync()
    with pytest.raises(ConfigError, match="option of their own"):
        app.tasks["review"].with_(headers={"links": {"a": 1}})


async def test_a_person_asks_why(app: App, dsn: str, db: Any) -> None:
    """Issue 6, 4: `tallybook job why ID` prints sentences with the next step; --json prints everything."""
    job = app.tasks["review"].enqueue_sync(db)
    db.execute("select tallybook.pause('default', 'ann')")
    said = run("job", "why", str(job.id), dsn=dsn)
    assert said.splitlines()[0] == f"job {job.id}: available"
    assert "paused since" in said and "by ann. [queue_paused]" in said
    assert "tallybook queue resume default" in said and "tallybook worker" in said
    found = json.loads(run("job", "why", str(job.id), "--json", dsn=dsn))
    assert [one["reason"] for one in found] == ["queue_paused", "no_worker"]
    db.execute("select tallybook.resume('default')")
    await app.drain(max_jobs=5)
    assert "It completed at" in run("job", "why", str(job.id), dsn=dsn)
    assert run("job", "why", "4711", dsn=dsn, code=1).startswith("job 4711: unknown\n- There is no job 4711")
    assert "unknown job 0" in run("job", "why", "0", dsn=dsn, code=1)


async def test_a_person_follows_a_thing(app: App, dsn: str, db: Any) -> None:
    """S3-35, S4-02: `tallybook job trace` by link, key, subject and job, and `tallybook job list --link`."""
    linked = app.tasks["review"].with_(links={"submission": 42}, unique="k").enqueue_sync(db, 1)
    app.tasks["review"].enqueue_sync(db, 2)
    app.tasks["tell"].subject("doc").upsert(3).sync(db)
    await app.drain(max_jobs=10)
    lines = run("job", "trace", "--link", "submission=42", dsn=dsn).splitlines()
    assert [line.split()[6] for line in lines[1:]] == ["enqueued", "started", "completed"]
    rows = json.loads(run("job", "trace", "--unique", "k", "--json", dsn=dsn))
    assert [row["job"] for row in rows] == [linked.id] * 3
    assert json.loads(run("job", "trace", str(linked.id), "--json", dsn=dsn)) == rows
    newest = run("job", "trace", "--unique", "k", "--newest-first", "--limit", "1", dsn=dsn)
    assert "completed" in newest and "enqueued" not in newest and "--limit shows more" in newest
    assert "enqueued" in run("job", "trace", "--subject", "doc", dsn=dsn)
    assert run("job", "trace", "--link", "submission=43", dsn=dsn) == "no events\n"
    assert "pass one of" in run("job", "trace", dsn=dsn, code=2)
    assert "not KIND=KEY" in run("job", "trace", "--link", "42", dsn=dsn, code=2)
    assert [row["id"] for row in json.loads(run("job", "list", "--link", "submission=42", "--json", dsn=dsn))] == [
        linked.id
    ]
    assert run("job", "list", "--link", "submission=43", dsn=dsn) == "no such jobs\n"
