"""The spans: one per enqueuing statement, one per attempt, linked by the job's headers, which carry the trace."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic

from opentelemetry import context as otel
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer

from tallybook._model.job import Job, JobCall
from tallybook._model.payload import kind_name
from tallybook._model.subject import SubjectCall, SubjectReport
from tallybook._model.tracing import Attempt, What, carrying, read_headers, with_added
from tallybook._otel.metrics import Metrics, attributes

_MOST_LINKS = 100
_ENDS = {
    "complete": "completed", "fail": "failed", "crash": "crashed", "cancel": "cancelled", "snooze": "snoozed",
    "limit_take": "snoozed", "postpone": "snoozed", "reschedule": "rescheduled", "drop": "dropped", "kill": "killed",
}  # fmt: skip
_FAILURES = ("fail", "crash")


class Headers:
    """Traces in headers, as a propagator reads and writes them."""

    def __init__(self, propagator: TextMapPropagator) -> None:
        self._propagator = propagator

    def carried(self) -> dict[str, str]:
        found: dict[str, str] = {}
        self._propagator.inject(found)
        return found

    def context_of(self, headers: str | Mapping[str, Any] | None) -> Context:
        """Return the context that the headers carry, without the current one; an empty context if they carry none."""
        # Headers that are not text cannot belong to a trace.
        texts = {name: text for name, text in read_headers(headers).items() if isinstance(text, str)}
        if not self._propagator.fields & texts.keys():
            return Context()
        try:
            return self._propagator.extract(texts, context=Context())
        except Exception:  # the user's propagator, and headers from any program
            return Context()

    def span_of(self, headers: str | Mapping[str, Any] | None) -> trace.SpanContext | None:
        """Return the span that made the job; None: unknown."""
        found = trace.get_current_span(self.context_of(headers)).get_span_context()
        return found if found.is_valid else None

    def with_trace(self, headers: str | None, carried: Mapping[str, str]) -> str | None:
        """Return headers, as JSON text, with the trace added as far as it fits; unchanged if they carry one already."""
        return headers if not carried or self.span_of(headers) else with_added(headers, carried)


class Sending(Generic[What]):
    """See `_model.tracing.Sending`."""

    def __init__(self, what: What, span: Span) -> None:
        self.what: What = what
        self._span = span

    def sent(self, reports: object) -> None:
        """Record the job in the span; for a batch, the jobs' own spans do that."""
        if isinstance(reports, Job):
            self._span.set_attribute("messaging.message.id", str(reports.id))
            self._span.set_attribute("tallybook.created", reports.created)
        elif isinstance(reports, SubjectReport):
            self._span.set_attribute("messaging.message.id", str(reports.job_id))
            self._span.set_attribute("tallybook.report", reports.report)


class Traces:
    """See `_model.tracing.Tracing`."""

    def __init__(self, tracer: Tracer, metrics: Metrics, propagator: TextMapPropagator, *, parent: bool) -> None:
        self._tracer = tracer
        self._metrics = metrics
        self._headers = Headers(propagator)
        self._parent = parent
        self.carried, self.opened, self.closed = self._headers.carried, metrics.opened, metrics.closed

    # Producers

    @contextmanager
    def sending(self, what: What, *, keeps: bool = False) -> Iterator[Sending[What]]:
        """Open a span around an enqueue; the jobs then carry it."""
        batch: Sequence[JobCall | SubjectCall] = what if isinstance(what, list) else [what]
        kinds = Counter((call.options.queue, call.task) for call in batch)
        queues, tasks = {queue for queue, _ in kinds}, {task for _, task in kinds}
        queue = queues.pop() if len(queues) == 1 else None
        labels = attributes("send", queue)
        if len(tasks) == 1:
            labels["tallybook.task"] = tasks.pop()
        if isinstance(what, list):
            labels["messaging.batch.message_count"] = len(batch)
        elif isinstance(what, SubjectCall):
            labels["tallybook.subject"] = what.name
        began, failed = time.perf_counter(), None
        with self._tracer.start_as_current_span(
            _name("send", queue), kind=SpanKind.PRODUCER, attributes=labels, links=self._links(batch)
        ) as span:
            try:
                yield Sending(self._carrying(what, keeps=keeps), span)
            except Exception as error:
                failed = kind_name(type(error))
                span.set_attribute("error.type", failed)
                raise
            finally:
                self._metrics.sent(kinds, time.perf_counter() - began, failed)

    def _links(self, batch: Sequence[JobCall | SubjectCall]) -> list[Link]:
        """Return links to the traces that the caller has put into headers."""
        own = dict.fromkeys(call.options.headers for call in batch if call.options.headers is not None)
        spans = (span for headers in own if (span := self._headers.span_of(headers)))
        found = {(span.trace_id, span.span_id): span for span in spans}
        return [Link(span) for span in list(found.values())[:_MOST_LINKS]]

    def _carrying(self, what: What, *, keeps: bool) -> What:
        carried = self.carried()
        if not carried:
            return what

        def headers(own: str | None) -> str | None:
            return own if keeps and own is None else self._headers.with_trace(own, carried)

        return carrying(what, headers)

    # Workers

    @contextmanager
    def processing(self, attempt: Attempt) -> Iterator[None]:
        """Open a span around a handler, linked to its producer's span, and make it the current one of its context."""
        before = self._headers.context_of(attempt.headers)
        creator = trace.get_current_span(before).get_span_context()
        ambient = trace.get_current_span().get_span_context()  # of a caller that drains inside its own span
        labels = attributes("process", attempt.queue) | {
            "messaging.message.id": str(attempt.job_id),
            "messaging.client.id": attempt.worker_name,
            "tallybook.task": attempt.task_name,
            "tallybook.attempt": attempt.attempt,
        }
        # The handler gets what the producer sends beside the trace, its baggage, in either case.
        over = before if self._parent else trace.set_span_in_context(trace.INVALID_SPAN, before)
        links = [Link(found) for found in (creator, ambient) if found.is_valid]
        name = _name("process", attempt.queue)
        span = self._tracer.start_span(name, context=over, kind=SpanKind.CONSUMER, attributes=labels, links=links)
        told = _teller(span, attempt, self._metrics)
        attempt.told = told
        self._metrics.started(attempt.queue, attempt.task_name)
        token = otel.attach(trace.set_span_in_context(span, before))
        try:
            yield
        except BaseException:  # the loop is closing: its end will not be reported
            told("lost", None)
            raise
        finally:
            otel.detach(token)
        if not attempt.in_doubt:
            told("complete", None)

    def enter(self, carried: Mapping[str, str]) -> None:
        otel.attach(self._headers.context_of(carried))


def _teller(span: Span, attempt: Attempt, metrics: Metrics) -> Callable[[str, Mapping[str, Any] | None], None]:
    """Return a function that ends the span of an attempt when its end is first reported."""
    began, over = time.perf_counter(), False

    def told(verb: str, error: Mapping[str, Any] | None) -> None:
        nonlocal over
        if over:
            return
        over, kind = True, None
        span.set_attribute("tallybook.end", _ENDS.get(verb, verb))
        if verb in _FAILURES:
            said = error or {}
            kind = str(said.get("type") or "_OTHER")
            span.set_attribute("error.type", kind)
            span.set_status(Status(StatusCode.ERROR, kind))
            event = {"exception.type": kind}
            for name, key in (("message", "exception.message"), ("traceback", "exception.stacktrace")):
                if said.get(name):
                    event[key] = str(said[name])
            span.add_event("exception", event)
        metrics.ended(attempt.queue, attempt.task_name, time.perf_counter() - began, kind)
        span.end()

    return told


def _name(operation: str, queue: str | None) -> str:
    return operation if queue is None else f"{operation} {queue}"
