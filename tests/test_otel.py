"""OpenTelemetry: traces from the enqueue to the handler, metrics by the conventions, and no cost when it is off."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from opentelemetry import baggage, trace
from opentelemetry.context import attach, detach
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from psycopg import AsyncConnection

from support.fleet import Fleet
from support.pages import python
from support.paths import TESTS
from support.workers import SLEEPY, Jobs, eventually, working
from tallybook import App, Cancel, Constant, Context, Dead, Reschedule, Snooze
from tallybook._db import numbers as _numbers
from tallybook._db.numbers import MOST, OTHERS
from tallybook._otel.metrics import Metrics
from tallybook._otel.spans import Headers
from tallybook.errors import ConfigError
from tallybook.otel import instrument, uninstrument
from tallybook.testing import drain, drain_async, travel

CUSTOM = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Telemetry:
    """The records that an SDK has of one app."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])
        self.tracer = self.tracers.get_tracer("test")

    def instrument(self, app: App, **options: Any) -> None:
        instrument(app, tracer_provider=self.tracers, meter_provider=self.meters, **options)

    def spans(self, name: str) -> list[ReadableSpan]:
        """The spans of this name, in the order in which they ended."""
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def span(self, name: str) -> ReadableSpan:
        (found,) = self.spans(name)
        return found

    def points(self, metric: str) -> list[tuple[dict[str, Any], Any]]:
        """Labels and data point of each series of a metric."""
        data = self.reader.get_metrics_data()
        return [
            (dict(point.attributes or {}), point)
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for found in scope.metrics
            if found.name == metric
            for point in found.data.data_points
        ]


@pytest.fixture
def seen(app: App) -> Iterator[Telemetry]:
    found = Telemetry()
    found.instrument(app)
    yield found
    uninstrument(app)
    found.tracers.shutdown()
    found.meters.shutdown()


def id_of(span: ReadableSpan) -> tuple[int, int]:
    return span.context.trace_id, span.context.span_id


def linked(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def traced_by(header: Any) -> tuple[int, int]:
    _, trace_id, span_id, _ = header["traceparent"].split("-")
    return int(trace_id, 16), int(span_id, 16)


async def test_a_job_is_traced_from_enqueue_to_handler(
    app: App, dsn: str, db: Any, jobs: Jobs, seen: Telemetry
) -> None:
    """S2-09: the enqueue is a producer span with its context in the row; a consumer span, the attempt, links to it."""
    inside: list[Any] = []

    @app.task(queue="mail")
    async def hello(n: int) -> None:
        await asyncio.sleep(0)
        inside.append(trace.get_current_span().get_span_context())

    with seen.tracer.start_as_current_span("request") as request:
        job = hello.enqueue_sync(db, 1)
    async with working(app, dsn, {"mail": 1}, **SLEEPY):
        await jobs.ends(job)
    sent, done = seen.span("send mail"), seen.span("process mail")
    assert traced_by(jobs(job).headers) == id_of(sent)
    assert (sent.kind, done.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert sent.parent is not None and sent.parent.span_id == request.get_span_context().span_id
    assert linked(done) == [id_of(sent)] and done.parent is None
    assert id_of(done) == (inside[0].trace_id, inside[0].span_id)
    assert dict(sent.attributes or {}) == {
        "messaging.system": "tallybook", "messaging.operation.name": "send", "messaging.operation.type": "send",
        "messaging.destination.name": "mail", "messaging.message.id": str(job.id), "tallybook.task": "hello",
        "tallybook.created": True,
    }  # fmt: skip
    found = dict(done.attributes or {})
    assert found.pop("messaging.client.id")
    assert found == {
        "messaging.system": "tallybook", "messaging.operation.name": "process", "messaging.operation.type": "process",
        "messaging.destination.name": "mail", "messaging.message.id": str(job.id), "tallybook.task": "hello",
        "tallybook.attempt": 1, "tallybook.end": "completed",
    }  # fmt: skip
    assert sent.status.status_code is done.status.status_code is StatusCode.UNSET
    assert not trace.get_current_span().get_span_context().is_valid


def test_without_it_nothing_is_there(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """Control: an app that is not instrumented, or no longer, adds no header and records no span."""
    found = Telemetry()

    @app.task
    async def hello() -> None:
        pass

    with found.tracer.start_as_current_span("request"):
        first = hello.enqueue_sync(db)
        found.instrument(app)
        traced = hello.enqueue_sync(db)
        uninstrument(app)
        last = hello.enqueue_sync(db)
    assert [jobs(job).headers is None for job in (first, traced, last)] == [True, False, True]
    assert drain(app, dsn=dsn).completed == 3
    assert not found.spans("process default") and len(found.spans("send default")) == 1


async def test_each_way_to_put_in_carries_the_trace(app: App, dsn: str, db: Any, seen: Telemetry) -> None:
    """enqueue, enqueue_many with parents and a follow-up, push, push_many, append: each job has its call's span."""

    @app.task
    async def one(n: int) -> None:
        pass

    @app.task(queue="other")
    async def two(n: int) -> None:
        pass

    def last() -> tuple[int, int]:
        return id_of(seen.exporter.get_finished_spans()[-1])

    def headers(*ids: int) -> set[tuple[int, int]]:
        rows = db.execute("select headers from tallybook.job where id = any(%s)", (list(ids),)).fetchall()
        assert len(rows) == len(ids)
        return {traced_by(row[0]) for row in rows}

    async with await AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=None) as conn:
        job = await one.with_(unique="k").enqueue(conn, 1)
        assert headers(job.id) == {last()}
        again = await one.with_(unique="k").enqueue(conn, 1)
        assert again.id == job.id
        assert seen.spans("send default")[-1].attributes["tallybook.created"] is False  # type: ignore[index]
        first = one.job(1)
        second = two.with_(after=first).job(2)
        put = await app.enqueue_many(conn, [second, first, one.job(3)], then=two.job(4))
        assert headers(*(job.id for job in put)) == {last()}
        batch = seen.span("send")  # of two queues
        assert batch.attributes is not None and batch.attributes["messaging.batch.message_count"] == 4
        assert "messaging.destination.name" not in batch.attributes
        pushed = await one.subject("s:1").push(1).on(conn)
        assert headers(pushed.job_id) == {last()}
        more = await app.subjects.push_many([one.subject(f"s:{n}").job(n) for n in (2, 3)]).on(conn)
        assert headers(*(report.job_id for report in more)) == {last()}
        appended = await one.append(1).on(conn)
        assert headers(appended.job_id) == {last()}
    rows = one.with_(after=job).enqueue_sync(db, 5)
    assert headers(rows.id) == {last()}
    assert (await drain_async(app, dsn=dsn)).completed == 10
    assert len(seen.spans("process default")) == 8


def test_an_upsert_takes_no_headers_away(app: App, db: Any, seen: Telemetry) -> None:
    """An upsert without headers keeps the existing ones, links and trace; one with headers carries its own trace."""

    @app.task
    async def refresh(n: int) -> None:
        pass

    later = refresh.with_(delay="1 hour")
    pushed = refresh.with_(delay="1 hour", links={"asset": 7}).subject("a").push(1).sync(db)

    def headers() -> Any:
        return db.execute("select headers from tallybook.job where id = %s", (pushed.job_id,)).fetchone()[0]

    before = headers()
    assert before["links"] == {"asset": "7"}
    assert later.subject("a").upsert(2).sync(db).report == "updated"
    assert headers() == before
    refresh.with_(delay="1 hour", links={"asset": 8}).subject("a").upsert(3).sync(db)
    assert headers()["links"] == {"asset": "8"}
    assert traced_by(headers()) == id_of(seen.spans("send default")[-1])


def test_the_users_own_trace_wins(app: App, dsn: str, db: Any, jobs: Jobs, seen: Telemetry) -> None:
    """A caller's traceparent is not changed; the attempt links to it, and so does the span of the enqueue."""

    @app.task
    async def hello() -> None:
        pass

    own = {"traceparent": CUSTOM, "tenant": "a"}
    job = hello.with_(headers=own).enqueue_sync(db)
    assert jobs(job).headers == own
    assert linked(seen.span("send default")) == [traced_by(own)]
    broken = hello.with_(headers={"traceparent": 7, "tracestate": [1]}).enqueue_sync(db)
    assert jobs(broken).headers == {"traceparent": 7, "tracestate": [1]}  # the caller's values are not overwritten
    drain(app, dsn=dsn)
    assert [linked(span) for span in seen.spans("process default")] == [[traced_by(own)], []]


def test_a_trace_whose_ids_look_like_numbers_fits_as_any_other() -> None:
    """An id that looks like a number with an exponent is text: nearly full headers take this trace, too."""
    carried = {"traceparent": f"00-{'e' * 32}-{'e' * 16}-01"}
    full = json.dumps({"x": "x" * 7_700})
    assert json.loads(Headers(TraceContextTextMapPropagator()).with_trace(full, carried) or "") == {
        **json.loads(full),
        **carried,
    }


def test_a_trace_never_makes_headers_too_long(app: App, db: Any, jobs: Jobs, seen: Telemetry) -> None:
    """Nearly full headers get no trace, or as much of it as fits; the enqueue succeeds."""

    @app.task
    async def hello() -> None:
        pass

    token = attach(baggage.set_baggage("cart", "b" * 300))
    try:
        full, nearly, room = (hello.with_(headers={"x": "x" * size}) for size in (7_950, 7_700, 10))
        found = [jobs(task.enqueue_sync(db)).headers or {} for task in (full, nearly, room)]
        digits = hello.with_(headers={f"n{n}": 1e300 for n in range(25)})  # 300 bytes each, once it is jsonb
        assert len(jobs(digits.enqueue_sync(db)).headers or {}) == 25
    finally:
        detach(token)
    assert [sorted(headers) for headers in found] == [["x"], ["traceparent", "x"], ["baggage", "traceparent", "x"]]
    with pytest.raises(psycopg.errors.DatabaseError):  # control: the server has this limit
        db.execute("select tallybook.enqueue('q', 't', headers => jsonb_build_object('x', repeat('x', 8000)))")


async def test_each_end_marks_its_span(app: App, dsn: str, db: Any, seen: Telemetry) -> None:
    """A failure is an error with its type, and so is Dead; snoozed, cancelled and completed attempts are none."""

    @app.task(max_attempts=1)
    async def end(how: str) -> Any:
        match how:
            case "fail":
                raise ZeroDivisionError("by zero")
            case "snooze":
                return Snooze(timedelta(hours=1))
            case "cancel":
                return Cancel("not needed")
            case "dead":
                return Dead("hopeless")
        return how

    @app.task(retry=Constant(timedelta(hours=1)))
    def in_thread(how: str) -> None:
        assert trace.get_current_span().get_span_context().is_valid
        raise KeyError(how)

    @app.task(atomic=True, retry=Constant(timedelta(hours=1)))
    async def atomic(conn: AsyncConnection[Any], how: str) -> None:
        if how == "raise":
            raise ValueError(how)
        await end.with_(queue="inner").enqueue(conn, "complete")

    @app.task
    async def itself(ctx: Context) -> None:
        async with await AsyncConnection.connect(dsn, prepare_threshold=None) as conn:
            await ctx.complete(conn)

    @app.task
    async def iterate() -> Any:
        return Reschedule(timedelta(hours=1))

    for how in ("fail", "snooze", "cancel", "dead", "complete"):
        end.enqueue_sync(db, how)
    in_thread.enqueue_sync(db, "x")
    atomic.enqueue_sync(db, "raise")
    atomic.enqueue_sync(db, "complete")
    itself.enqueue_sync(db)
    iterate.subject("s").push().sync(db)
    await drain_async(app, dsn=dsn, queues=["default"])

    def told(span: ReadableSpan) -> tuple[Any, ...]:
        attributes = span.attributes or {}
        return attributes["tallybook.task"], attributes["tallybook.end"], attributes.get("error.type")

    spans = seen.spans("process default")
    assert sorted(map(told, spans), key=str) == sorted(
        [
            ("end", "failed", "ZeroDivisionError"), ("end", "snoozed", None), ("end", "cancelled", None),
            ("end", "failed", "Dead"), ("end", "completed", None), ("in_thread", "failed", "KeyError"),
            ("atomic", "failed", "ValueError"), ("atomic", "completed", None), ("itself", "completed", None),
            ("iterate", "rescheduled", None),
        ],
        key=str,
    )  # fmt: skip
    for span in spans:
        assert (span.status.status_code is StatusCode.ERROR) == (told(span)[2] is not None)
    (failed,) = [span for span in spans if told(span)[2] == "ZeroDivisionError"]
    (event,) = failed.events
    assert event.name == "exception" and event.attributes is not None
    assert event.attributes["exception.type"] == "ZeroDivisionError"
    assert event.attributes["exception.message"] == "by zero"
    assert "raise ZeroDivisionError" in str(event.attributes["exception.stacktrace"])
    # A handler's enqueue belongs to the handler's span.
    (parent,) = [span for span in spans if told(span) == ("atomic", "completed", None)]
    inner = seen.span("send inner")
    assert inner.parent is not None and inner.parent.span_id == id_of(parent)[1]


def test_attempts_keep_the_trace(app: App, dsn: str, db: Any, jobs: Jobs, seen: Telemetry) -> None:
    """Retries, a promotion and a user's retry keep the headers: all attempts link to the one enqueue."""

    @app.task(retry=Constant(timedelta(minutes=1)), max_attempts=2)
    async def flaky(ctx: Context) -> None:
        if ctx.attempt < 3:
            raise OSError("again")

    job = flaky.with_(delay="1 min").enqueue_sync(db)
    for _ in range(2):
        travel(dsn, timedelta(minutes=2))
        drain(app, dsn=dsn)
    assert jobs(job).state == "dead"
    app.retry(job.id).sync(db)
    drain(app, dsn=dsn)
    assert jobs(job).state == "completed"
    spans = seen.spans("process default")
    assert [(span.attributes or {})["tallybook.attempt"] for span in spans] == [1, 2, 3]
    assert [linked(span) for span in spans] == [[id_of(seen.span("send default"))]] * 3


def test_schedules_make_no_trace_of_their_own(app: App, dsn: str, db: Any, seen: Telemetry) -> None:
    """A schedule's job has the headers that were declared with it, and its attempt links to nothing."""

    @app.task
    async def tick() -> None:
        pass

    app.schedule("own", tick.with_(headers={"tenant": "a"}).job(), every=timedelta(minutes=1))
    with seen.tracer.start_as_current_span("deploy"):
        drain(app, dsn=dsn)
    travel(dsn, timedelta(minutes=2))
    drain(app, dsn=dsn)
    assert db.execute("select distinct headers from tallybook.job").fetchall() == [({"tenant": "a"},)]
    assert linked(seen.spans("process default")[-1]) == []


@pytest.mark.parametrize("parent", [True, False])
def test_one_trace_where_that_is_asked_for(app: App, dsn: str, db: Any, parent: bool) -> None:
    """With parent=True the attempt is the enqueue's child; either way only the handler has the enqueue's baggage."""
    seen, said = Telemetry(), []
    seen.instrument(app, parent=parent)

    @app.task
    async def hello() -> None:
        said.append(baggage.get_baggage("tenant"))

    token = attach(baggage.set_baggage("tenant", "acme"))
    hello.enqueue_sync(db)
    detach(token)
    drain(app, dsn=dsn)
    sent, done = seen.span("send default"), seen.span("process default")
    assert linked(done) == [id_of(sent)]
    assert (done.parent is not None and done.parent.span_id == id_of(sent)[1]) == parent
    assert (id_of(done)[0] == id_of(sent)[0]) == parent
    assert said == ["acme"] and baggage.get_baggage("tenant") is None


def test_who_drains_in_a_span_is_linked(app: App, dsn: str, db: Any, seen: Telemetry) -> None:
    """Attempts of a drain inside a request have their own traces, which link to the request, too."""

    @app.task
    async def hello() -> None:
        pass

    hello.enqueue_sync(db)
    with seen.tracer.start_as_current_span("cron") as cron:
        drain(app, dsn=dsn)
    found = cron.get_span_context()
    assert linked(seen.span("process default")) == [id_of(seen.span("send default")), (found.trace_id, found.span_id)]


async def test_an_aborted_handler_ends_its_span(app: App, dsn: str, db: Any, jobs: Jobs, seen: Telemetry) -> None:
    """A job that is cancelled while it runs, and one given back at the stop, end their spans without an error."""
    running = asyncio.Semaphore(0)

    @app.task
    async def hold() -> None:
        running.release()
        await asyncio.Event().wait()

    first = hold.enqueue_sync(db)
    hold.enqueue_sync(db)
    async with working(app, dsn, stop_timeout=timedelta(0), abort_timeout=timedelta(seconds=1)):
        await running.acquire()
        await running.acquire()
        app.cancel(first.id).sync(db)
        await jobs.ends(first)
    ends = sorted(str((span.attributes or {})["tallybook.end"]) for span in seen.spans("process default"))
    assert ends == ["cancelled", "snoozed"]
    assert all(span.status.status_code is StatusCode.UNSET for span in seen.spans("process default"))


def run(dsn: str, *words: str) -> list[dict[str, Any]]:
    """The spans of one process."""
    return [json.loads(line) for line in python(TESTS, dsn, "-m", "support.traced", dsn, *words).splitlines()]


@pytest.mark.slow
def test_the_trace_crosses_processes(app: App, dsn: str, db: Any) -> None:
    """S2-09: one process enqueues, another runs the job in a thread: the row alone links its span to the first."""
    (sent,) = run(dsn, "put")
    (done,) = run(dsn, "drain")
    assert (sent["name"], done["name"]) == ("send default", "process default")
    assert done["links"] == [[sent["trace"], sent["span"]]] and done["trace"] != sent["trace"]
    result = db.execute("select result from tallybook.job").fetchone()[0]
    assert result == done["span"]


def test_a_task_in_a_child_is_in_the_trace(app: App, dsn: str, db: Any) -> None:
    """With process=True the attempt's span is the worker's; the handler's own spans, in the child, are its children."""
    enqueue = (
        "select tallybook.enqueue('default', 'apart', '{\"n\": 1}',"
        " headers => jsonb_build_object('traceparent', %s::text))"
    )
    db.execute(enqueue, (CUSTOM,))
    spans = {span["name"]: span for span in run(dsn, "drain")}
    assert spans["process default"]["links"] == [CUSTOM.split("-")[1:3]]
    assert spans["inside"]["parent"] == spans["process default"]["span"]
    assert db.execute("select result from tallybook.job").fetchone()[0] == spans["process default"]["trace"]


def test_metrics_by_the_conventions(app: App, dsn: str, db: Any, seen: Telemetry) -> None:
    """S2-09: jobs sent and consumed are counted, durations are in histograms, by queue and task, failures by type."""

    @app.task(queue="mail", max_attempts=1)
    async def hello(n: int) -> None:
        if n == 3:
            raise OSError("no")

    app.enqueue_many_sync(db, [hello.job(n) for n in range(3)])
    hello.enqueue_sync(db, 3)
    with pytest.raises(psycopg.Error), psycopg.connect(dsn) as broken:
        broken.close()
        hello.enqueue_sync(broken, 4)
    drain(app, dsn=dsn)
    base = {"messaging.system": "tallybook", "messaging.destination.name": "mail"}
    send = {**base, "messaging.operation.name": "send", "messaging.operation.type": "send"}
    process = {**base, "messaging.operation.name": "process", "messaging.operation.type": "process"}
    mine, failed = {"tallybook.task": "hello"}, {"error.type": "psycopg.OperationalError"}
    found = {
        metric: [(labels, getattr(point, "value", None) or point.count) for labels, point in seen.points(metric)]
        for metric in (
            "messaging.client.sent.messages", "messaging.client.operation.duration",
            "messaging.client.consumed.messages", "messaging.process.duration",
        )
    }  # fmt: skip
    assert found == {
        "messaging.client.sent.messages": [({**send, **mine}, 4), ({**send, **mine, **failed}, 1)],
        "messaging.client.operation.duration": [(send, 2), ({**send, **failed}, 1)],
        "messaging.client.consumed.messages": [({**process, **mine}, 4)],
        "messaging.process.duration": [({**process, **mine}, 3), ({**process, **mine, "error.type": "OSError"}, 1)],
    }
    (_, point), *_ = seen.points("messaging.process.duration")
    assert point.explicit_bounds[:3] == (0.005, 0.01, 0.025)


async def test_gauges_say_what_is_in_the_database(
    app: App, dsn: str, db: Any, seen: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a worker runs, gauges have jobs by queue, task and state and the oldest's age, from one cached query."""
    monkeypatch.setattr(_numbers, "FRESH", 3600.0)
    asked: list[str] = []
    ask = _numbers.ask_sync
    monkeypatch.setattr(_numbers, "ask_sync", lambda *to: asked.append("") or ask(*to))

    db.execute("select tallybook.enqueue('mail', 'unknown')")
    db.execute("select tallybook.enqueue('mail', 'unknown', run_at => now() + interval '1 day')")
    assert seen.points("tallybook.jobs") == [] and asked == []  # no worker, no query
    async with working(app, dsn, ["other"], **SLEEPY) as worker:
        await eventually(lambda: not worker.why_not_ready(), "it is ready")
        points = await asyncio.to_thread(seen.points, "tallybook.jobs")
        ages = await asyncio.to_thread(seen.points, "tallybook.oldest_job.age")
        assert asked == [""]
    found = {labels["tallybook.state"]: point.value for labels, point in points}
    assert found == {"scheduled": 1, "retrying": 0, "waiting": 0, "available": 1, "running": 0, "dead": 0}
    assert {labels["messaging.destination.name"] for labels, _ in points} == {"mail"}
    assert {labels["tallybook.state"] for labels, _ in ages} >= {"available"}
    assert seen.points("tallybook.jobs") == []


async def test_gauges_of_several_nodes(
    fleet: Fleet, seen: Telemetry, app: App, caplog: pytest.LogCaptureFixture
) -> None:
    """The gauges have each node's numbers with its name; a node that does not answer is left out and logged."""
    assert app._tracing is not None
    for number in (1, 2):
        fleet.run(number, "select tallybook.enqueue('mail', 't') from generate_series(1, %s)", number)
        app._tracing.opened(fleet.dsns[number - 1], f"w {number}", ("north", "south")[number - 1])
    app._tracing.opened("host=127.0.0.1 port=1", "w 3", "west")
    points = await asyncio.to_thread(seen.points, "tallybook.jobs")
    ages = await asyncio.to_thread(seen.points, "tallybook.oldest_job.age")
    assert {
        labels["tallybook.node"]: point.value for labels, point in points if labels["tallybook.state"] == "available"
    } == {"north": 1, "south": 2}
    assert {labels["tallybook.node"] for labels, _ in ages} == {"north", "south"}
    assert "telemetry: node west does not answer" in caplog.text


async def test_gauges_without_a_database(app: App, seen: Telemetry, caplog: pytest.LogCaptureFixture) -> None:
    """A database that does not answer causes no series and no exception, and is logged once."""
    assert app._tracing is not None
    app._tracing.opened("host=127.0.0.1 port=1", "w")
    for _ in range(2):
        assert await asyncio.to_thread(seen.points, "tallybook.jobs") == []
    assert caplog.text.count("the database does not answer") == 1


def test_the_series_of_a_process_are_bounded() -> None:
    """Above a maximum of pairs of queue and task, further pairs are counted together."""
    seen = Telemetry()
    metrics = Metrics(seen.meters.get_meter("test"))
    for n in range(3 * MOST):
        metrics.started(f"q{n}", "t")
    points = seen.points("messaging.client.consumed.messages")
    assert len(points) == 2 * MOST + 1
    (others,) = [point.value for labels, point in points if labels["messaging.destination.name"] == OTHERS]
    assert others == MOST


def test_unreadable_headers_are_no_trace() -> None:
    """Headers that Python or a propagator cannot read carry no trace, and nothing is raised."""

    class Broken:
        fields = {"traceparent"}  # noqa: RUF012

        def extract(self, *args: Any, **options: Any) -> Any:
            raise RuntimeError

    from opentelemetry.propagate import get_global_textmap

    headers = Headers(get_global_textmap())
    deep = "[" * 100_000
    for text in ("[1]", '{"traceparent": "nonsense"}', '{"traceparent": {}}', f'{{"traceparent": {deep}', "7", None):
        assert headers.span_of(text) is None
    assert headers.span_of(f'{{"traceparent": "{CUSTOM}"}}') is not None  # control
    assert Headers(Broken()).span_of(f'{{"traceparent": "{CUSTOM}"}}') is None  # type: ignore[arg-type]


def test_ready_made_tasks_are_traced(app: App, db: Any) -> None:
    """A task of another App is traced by the App that includes it, before or after instrument."""
    seen = Telemetry()
    shelf, later = App("shelf"), App("later")

    @shelf.task
    async def first() -> None:
        pass

    @later.task
    async def second() -> None:
        pass

    app.include(first)
    seen.instrument(app)
    app.include(second)
    first.enqueue_sync(db)
    second.enqueue_sync(db)
    assert len(seen.spans("send default")) == 2
    uninstrument(app)
    assert shelf._tracing is later._tracing is None


def test_wrong_use_is_refused(app: App) -> None:
    """Anything but an App raises an error that says so."""
    with pytest.raises(ConfigError, match="not an App"):
        instrument("shop")  # type: ignore[arg-type]


@pytest.mark.slow
def test_off_means_not_imported(dsn: str) -> None:
    """Without instrument, neither producers nor workers import OpenTelemetry; with it, they do (control)."""
    program = """
import asyncio, sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        assert not name.startswith("opentelemetry"), name
sys.meta_path.insert(0, Refused())
from tallybook import App
app = App("shop", dsn=sys.argv[1])
@app.task
async def hello(n: int) -> None: pass
@app.task
def plain(n: int) -> None: pass
async def main():
    await hello.enqueue(app, 1)
    await asyncio.to_thread(plain.enqueue_sync, app, 1)
    await app.enqueue_many(app, [hello.job(2)])
    await hello.subject("s").push(1)
    print((await app.drain()).completed, *(name for name in sys.modules if "opentelemetry" in name or "_otel" in name))
asyncio.run(main())
{more}
"""

    def printed(more: str) -> subprocess.CompletedProcess[str]:
        code = program.replace("{more}", more)
        return subprocess.run(
            [sys.executable, "-c", code, dsn], capture_output=True, text=True, timeout=60, check=False
        )

    off = printed("")
    assert (off.stdout, off.returncode) == ("4\n", 0), off.stderr
    on = printed("from tallybook.otel import instrument\ninstrument(app)")
    assert on.returncode == 1 and "AssertionError: opentelemetry" in on.stderr


def test_off_means_no_statement_and_no_call(app: App, dsn: str, db: Any) -> None:
    """When off, an enqueue is one statement and one extra call, and neither it nor the worker calls tracing code."""

    def calls(work: Callable[[], object]) -> list[str]:
        """The functions of Tallybook that the work calls, in order."""
        found = []

        def profile(frame: Any, event: str, _: object) -> None:
            if event == "call" and "/tallybook/" in frame.f_code.co_filename:
                found.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")

        sys.setprofile(profile)
        try:
            work()
        finally:
            sys.setprofile(None)
        return found

    @app.task
    async def hello() -> None:
        pass

    hello.enqueue_sync(db)  # compiles what is compiled once
    statements: list[Any] = []
    execute = psycopg.Cursor.execute

    mine = threading.current_thread()

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        if threading.current_thread() is mine:  # another thread makes the next test's database
            statements.append(args[0])
        return execute(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psycopg.Cursor, "execute", counted)
        off = calls(lambda: hello.enqueue_sync(db))
        assert len(statements) == 1
        drained = calls(lambda: drain(app, dsn=dsn))
        seen = Telemetry()
        seen.instrument(app)
        statements.clear()
        on = calls(lambda: hello.enqueue_sync(db))
        assert len(statements) == 1  # tracing costs no statement either
        traced = calls(lambda: drain(app, dsn=dsn))
    tracing = {"spans", "metrics", "headers", "otel"}
    assert not [name for name in off + drained if name.split(".")[0] in tracing or "_trace" in name]
    assert off.count("verb.traced") == 1
    assert {"spans.sending"} <= set(on) and {"spans.processing", "runner._traced"} <= set(traced)  # control
