"""Sentry: a failure is one event with its job, one trace covers enqueue and handler, and no args are sent."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sentry_sdk
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from support.pages import project, python
from support.paths import TESTS
from tallybook import App, Cancel, Constant, Dead, Snooze, otel
from tallybook.contrib.sentry import instrument
from tallybook.errors import ConfigError
from tallybook.testing import drain_async, travel

W3C = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collected(Transport):
    """Collects the items that would be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[dict[str, Any]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        self.sent += [json.loads(item.get_bytes()) for item in envelope.items]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [one for one in self.sent if one.get("type") != "transaction"]

    def transactions(self, op: str) -> list[dict[str, Any]]:
        return [one for one in self.sent if one.get("type") == "transaction" and one["contexts"]["trace"]["op"] == op]


@pytest.fixture
def sentry() -> Iterator[Collected]:
    """A client in this test's own scope: nothing of the process is set or patched."""
    found = Collected()
    client = sentry_sdk.Client(
        dsn="https://key@sentry.example/1", transport=found, traces_sample_rate=1.0, default_integrations=False
    )
    with sentry_sdk.isolation_scope() as scope:
        scope.set_client(client)
        yield found
    client.close()


@pytest.fixture
def app(dsn: str) -> App:
    app = App("shop", dsn=dsn)
    instrument(app)
    return app


async def test_a_failure_is_an_event_with_its_job(app: App, dsn: str, sentry: Collected) -> None:
    """A failure, async or in a thread, is one event per attempt: type, message, frame, task, queue, job and attempt."""
    secret = "-".join(("canary", "of", "args"))  # joined, so that the source lines of a frame do not show it

    @app.task(queue="mail", max_attempts=2, retry=Constant(timedelta(hours=1)))
    async def on_loop(secret: str) -> None:
        raise ValueError("no luck")

    @app.task(queue="mail", max_attempts=1)
    def in_thread(secret: str) -> None:
        raise ValueError("no luck")

    first, second = await on_loop.enqueue(app, secret), await in_thread.enqueue(app, secret)
    await drain_async(app)
    travel(dsn, timedelta(hours=2))
    await drain_async(app)
    shown = sorted(
        (event["tags"]["tallybook.job"], event["tags"]["tallybook.attempt"], event["tags"]["tallybook.retried"])
        for event in sentry.events
    )
    assert shown == [(str(first.id), "1", "true"), (str(first.id), "2", "false"), (str(second.id), "1", "false")]
    for event in sentry.events:
        name = event["transaction"]
        assert name == event["tags"]["tallybook.task"] and event["tags"]["tallybook.queue"] == "mail"
        (value,) = event["exception"]["values"]
        assert (value["type"], value["value"], value["mechanism"]["handled"]) == ("ValueError", "no luck", False)
        assert value["stacktrace"]["frames"][-1]["function"] == name
    assert secret not in json.dumps(sentry.sent)


async def test_only_last_failures_and_args_where_asked(app: App, dsn: str, sentry: Collected) -> None:
    """retried=False reports only the failure that makes the job dead; args=True sends args and frames' variables."""
    instrument(app, retried=False, args=True)

    @app.task(max_attempts=2, retry=Constant(timedelta(hours=1)))
    async def hello(n: int) -> None:
        raise ValueError

    await hello.enqueue(app, 4711)
    await drain_async(app)
    assert sentry.events == [] and len(sentry.transactions("queue.process")) == 1
    travel(dsn, timedelta(hours=2))
    await drain_async(app)
    (event,) = sentry.events
    assert event["tags"]["tallybook.attempt"] == "2" and event["extra"]["args"] == {"n": 4711}
    assert event["exception"]["values"][0]["stacktrace"]["frames"][-1]["vars"]["n"] == "4711"


async def test_what_is_no_unhandled_failure_is_not_reported(app: App, sentry: Collected) -> None:
    """A snooze, a cancel, a handler that gives up and one that completes are no events, but ok transactions."""
    outcomes = {
        "snooze": Snooze(timedelta(hours=1)),
        "cancel": Cancel("no need"),
        "dead": Dead("given up"),
        "fine": None,
    }

    @app.task
    async def ends(how: str) -> Any:
        return outcomes[how]

    @app.task
    def raises(how: str) -> None:
        raise outcomes[how] or RuntimeError  # a control: an exception that is no outcome is an event

    for how in outcomes:
        await ends.enqueue(app, how)
        await raises.enqueue(app, how)
    await drain_async(app)
    assert [event["exception"]["values"][0]["type"] for event in sentry.events] == ["RuntimeError"]
    found = sorted(one["contexts"]["trace"]["status"] for one in sentry.transactions("queue.process"))
    assert found == ["internal_error"] + 7 * ["ok"]


async def test_args_that_cannot_be_read_and_a_deadline_are_reported(app: App, db: Any, sentry: Collected) -> None:
    """A failure outside the handler's code is an event, too: args that cannot be read, and a deadline."""

    @app.task(timeout=timedelta(milliseconds=200), retry=Constant(timedelta(hours=1)))
    async def slow(n: int) -> None:
        await asyncio.Event().wait()

    await slow.enqueue(app, 1)
    db.execute("select tallybook.enqueue('default', 'slow', '{\"m\": 1}')")
    await drain_async(app)
    types = sorted(event["exception"]["values"][0]["type"] for event in sentry.events)
    assert types == ["PayloadError", "TimeoutError"]


async def test_one_trace_goes_from_the_enqueue_to_the_handler(app: App, db: Any, sentry: Collected) -> None:
    """The enqueue is a span in the job's headers; the attempt and its failure share its trace. So do SQL's jobs."""

    @app.task(max_attempts=1)
    async def hello(n: int) -> None:
        raise ValueError

    with sentry_sdk.start_transaction(name="request"):
        await hello.enqueue(app, 1)
        await app.enqueue_many(app, [hello.job(2), hello.with_(headers={"sentry-trace": "mine"}).job(3)])
    (request,) = [one for one in sentry.sent if one.get("transaction") == "request"]
    published = [span for span in request["spans"] if span["op"] == "queue.publish"]
    assert [span["description"] for span in published] == ["hello", "hello"]
    db.execute(
        "select tallybook.enqueue('default', 'hello', '{\"n\": 4}', headers => %s)", (json.dumps({"traceparent": W3C}),)
    )
    rows = db.execute("select headers ->> 'sentry-trace' from tallybook.job order by id").fetchall()
    trace = request["contexts"]["trace"]["trace_id"]
    sent = [f"{trace}-{span['span_id']}-1" for span in published]
    assert [row[0] for row in rows] == [*sent, "mine", None]
    await drain_async(app)
    found = {one["contexts"]["tallybook"]["job"]: one for one in sentry.transactions("queue.process")}
    ids = [found[job]["contexts"]["trace"]["trace_id"] for job in sorted(found)]
    assert [ids[0], ids[1], ids[3]] == [trace, trace, W3C[3:35]] and ids[2] not in (trace, ids[3])
    spans = {one["contexts"]["trace"]["span_id"] for one in found.values()}
    assert {event["contexts"]["trace"]["span_id"] for event in sentry.events} == spans


async def test_it_goes_with_opentelemetry_that_came_first(dsn: str, sentry: Collected) -> None:
    """Both see the attempt once, even if instrument is called again; the other order loses Sentry and is refused."""
    app, exporter = App("shop", dsn=dsn), InMemorySpanExporter()
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    otel.instrument(app, tracer_provider=tracers, meter_provider=MeterProvider())
    instrument(app)
    instrument(app)

    @app.task(max_attempts=1)
    async def hello() -> None:
        raise ValueError

    job = await hello.enqueue(app)
    await drain_async(app)
    assert [span.name for span in exporter.get_finished_spans()] == ["send default", "process default"]
    assert len(sentry.events) == 1
    assert {"traceparent", "sentry-trace"} <= set((await app.get(job)).headers or {})
    with pytest.raises(ConfigError, match=r"before tallybook\.contrib\.sentry\.instrument"):
        otel.instrument(app)


async def test_without_a_client_nothing_is_added(app: App) -> None:
    """An App that is instrumented without Sentry's client: no headers are added, and jobs run and fail as usual."""

    @app.task(max_attempts=1)
    async def hello() -> None:
        raise ValueError

    job = await hello.enqueue(app)
    assert (await app.get(job)).headers is None
    await drain_async(app)
    assert (await app.get(job)).state == "dead"
    with pytest.raises(ConfigError, match="not an App"):
        instrument("shop")  # type: ignore[arg-type]


def test_a_whole_program_reports_each_failure_once(dsn: str) -> None:
    """With the SDK's own integrations each failure is one event, from processes too; no log line is a second one."""
    done = subprocess.run(
        [sys.executable, "-m", "support.sentry_app", dsn],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    events = [one for one in found if one["type"] == "event"]
    assert sorted((one.get("transaction"), one["exception"]["values"][0]["type"]) for one in events) == [
        ("apart", "LookupError"),
        ("dies", "ProcessDied"),
        ("first", "ValueError"),
        ("last", "ValueError"),
    ]
    (apart,) = [one for one in events if one["transaction"] == "apart"]
    frame = apart["exception"]["values"][0]["stacktrace"]["frames"][-1]
    assert frame["function"] == "apart" and frame["filename"].endswith("sentry_app.py") and frame["in_app"]
    traces = {one["contexts"]["trace"]["trace_id"] for one in found if one["type"] in ("event", "transaction")}
    assert traces == {found[-1]["trace"][:32]}, "one trace, in the child process too"
    assert "4711471147114711" not in done.stdout


def test_the_page_runs(tmp_path: Path, dsn: str) -> None:
    """docs/sentry.md as written: each failure is one event, also of a retry due at once (the delay is random)."""
    assert project(tmp_path, "docs/sentry.md") == ["jobs.py"]
    uses = """
import os
os.environ["SENTRY_DSN"] = "https://key@sentry.example/1"
import asyncio, sentry_sdk
from sentry_sdk.transport import Transport
from jobs import app, send_welcome
class Printer(Transport):
    def capture_envelope(self, envelope):
        print("".join(item.get_bytes().decode() + "\\n" for item in envelope.items if item.type == "event"), end="")
sentry_sdk.get_client().transport = Printer()
send_welcome.enqueue_sync(app, 42)
asyncio.run(app.drain())
"""
    events = [json.loads(line)["tags"] for line in python(tmp_path, dsn, "-c", uses).splitlines()]
    assert events and [event["tallybook.attempt"] for event in events] == [str(n) for n, _ in enumerate(events, 1)]
    assert {(event["tallybook.task"], event["tallybook.retried"]) for event in events} == {("send_welcome", "true")}
