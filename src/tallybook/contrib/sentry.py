"""Tallybook in Sentry: failures with their job, one trace from enqueue to handler. Needs `tallybook[sentry]`.

See https://github.com/tallybook/tallybook/blob/main/docs/sentry.md.

    sentry_sdk.init(dsn=..., traces_sample_rate=0.1)
    instrument(app)
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic

try:
    import sentry_sdk
    from sentry_sdk.scope import Scope, use_isolation_scope
    from sentry_sdk.utils import capture_internal_exceptions, event_from_exception
except ImportError as error:  # pragma: no cover - shown to people
    raise ImportError(f"{error}. Install it with: pip install 'tallybook[sentry]'") from error

from tallybook._app import App
from tallybook._model.tracing import Attempt, Sending, Tracing, What, carrying, read_headers, with_added
from tallybook.errors import ConfigError

__all__ = ["instrument"]

_ORIGIN = "auto.queue.tallybook"
_W3C = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")
_FRAME = re.compile(r'^ *(?:\| *)?File "(.*)", line (\d+), in (.*)$', re.MULTILINE)


def instrument(app: App, *, retried: bool = True, args: bool = False) -> None:
    """Report failures of this App's jobs to Sentry, and trace them. Call it before a worker or a drain starts.

    Each attempt that fails by an exception is one event, with task, queue, job and attempt; a Reject, Kill or Dead is
    not reported. `retried=False` reports only failures after which the job is dead. An event has neither the job's
    args nor the variables of its frames unless `args` is true.

    If `tallybook.otel.instrument` traces the App, call that first. Raises ConfigError if `app` is not an App.

        instrument(app, retried=False)
    """
    if not isinstance(app, App):
        raise ConfigError("app", app, "not an App", hint="Write instrument(app)")
    _drop_doubles()
    for each in (app, *app._included):
        inner = each._tracing.inner if isinstance(each._tracing, _Sentry) else each._tracing
        each._tracing = _Sentry(inner, retried=retried, args=args)


@cache
def _drop_doubles() -> None:
    sentry_sdk.get_global_scope().add_event_processor(_without_doubles)


def _without_doubles(event: Any, hint: Mapping[str, Any]) -> Any:
    """Drop log records of the worker about an attempt that is reported with its exception."""
    record = hint.get("log_record")
    ours = record is not None and record.name == "tallybook.worker"
    return None if ours and getattr(record, "event", None) in ("crashed", "dead") else event


@dataclass
class _Alone(Generic[What]):
    what: What

    def sent(self, reports: object) -> None:
        """Do nothing: there is no other tracer."""


class _Sentry:
    """See `_model.tracing.Tracing`. `inner` is the App's other tracer, OpenTelemetry's."""

    def __init__(self, inner: Tracing | None, *, retried: bool, args: bool) -> None:
        self.inner, self._retried, self._args = inner, retried, args

    @contextmanager
    def sending(self, what: What, *, keeps: bool = False) -> Iterator[Sending[What]]:
        inner = None if self.inner is None else self.inner.sending(what, keeps=keeps)
        with inner or nullcontext(_Alone(what)) as sending:
            if not sentry_sdk.get_client().is_active():
                yield sending
                return
            batch = what if isinstance(what, list) else [what]
            tasks, queues = {call.task for call in batch}, {call.options.queue for call in batch}
            name = tasks.pop() if len(tasks) == 1 else "several tasks"
            with sentry_sdk.start_span(op="queue.publish", name=name, origin=_ORIGIN) as span:
                span.set_data("messaging.system", "tallybook")
                if len(queues) == 1 and (queue := queues.pop()) is not None:
                    span.set_data("messaging.destination.name", queue)
                carried = _carried()

                def headers(own: str | None) -> str | None:
                    is_left = (keeps and own is None) or "sentry-trace" in read_headers(own)
                    return own if is_left else with_added(own, carried)

                sending.what = carrying(sending.what, headers)
                yield sending

    @contextmanager
    def processing(self, attempt: Attempt) -> Iterator[None]:
        with nullcontext() if self.inner is None else self.inner.processing(attempt):
            if not sentry_sdk.get_client().is_active():
                yield
                return
            with sentry_sdk.isolation_scope() as scope:
                scope.clear_breadcrumbs()
                name, queue = attempt.task_name, attempt.queue
                about = {"task": name, "queue": queue, "job": attempt.job_id, "attempt": attempt.attempt}
                scope.set_tags({f"tallybook.{key}": str(value) for key, value in about.items()})
                scope.set_context("tallybook", {**about, "worker": attempt.worker_name})
                transaction = sentry_sdk.continue_trace(
                    _incoming(attempt.headers), op="queue.process", name=name, source="task", origin=_ORIGIN
                )
                with sentry_sdk.start_transaction(transaction) as span:
                    span.set_data("messaging.system", "tallybook")
                    span.set_data("messaging.destination.name", queue)
                    span.set_data("messaging.message.id", str(attempt.job_id))
                    span.set_data("messaging.message.retry.count", attempt.attempt - 1)
                    attempt.recorded = partial(self._recorded, attempt, scope, span.get_trace_context())
                    yield
                    failed = hasattr(attempt, "raised") and not attempt.in_doubt
                    span.set_status("internal_error" if failed else "ok")

    def _recorded(self, attempt: Attempt, scope: Scope, trace: Mapping[str, Any], state: str) -> None:
        if not hasattr(attempt, "raised") or not (self._retried or state == "dead"):
            return
        with capture_internal_exceptions(), use_isolation_scope(scope):
            event, hint = self._event(attempt.raised)
            event["transaction"] = attempt.task_name
            if trace:
                event["contexts"] = {"trace": dict(trace)}
            event["tags"] = {"tallybook.retried": str(state != "dead").lower()}
            if self._args:
                event["extra"] = {"args": read_headers(attempt.args)}
            sentry_sdk.capture_event(event, hint=hint)

    def _event(self, error: BaseException) -> tuple[Any, Any]:
        mechanism = {"type": "tallybook", "handled": False}
        described = getattr(error, "described", None)
        if isinstance(described, dict):  # it was raised in a child process: only its stored form exists
            frames = [
                {"filename": file, "abs_path": file, "lineno": int(line), "function": function}
                for file, line, function in _FRAME.findall(described.get("traceback") or "")
            ]
            value = {"type": described.get("type"), "value": described.get("message"), "mechanism": mechanism}
            if frames:
                value["stacktrace"] = {"frames": frames}
            return {"level": "error", "exception": {"values": [value]}}, {}
        options = sentry_sdk.get_client().options
        if not self._args:
            options = {**options, "include_local_variables": False}
        return event_from_exception(error, client_options=options, mechanism=mechanism)

    def carried(self) -> dict[str, str]:
        found = {} if self.inner is None else self.inner.carried()
        return {**found, **_carried()} if sentry_sdk.get_client().is_active() else found

    def enter(self, carried: Mapping[str, str]) -> None:
        if self.inner is not None:
            self.inner.enter(carried)
        sentry_sdk.get_isolation_scope().generate_propagation_context(dict(carried))

    def opened(self, dsn: str, name: str, node: str | None = None) -> None:
        if self.inner is not None:
            self.inner.opened(dsn, name, node)

    def closed(self, name: str) -> None:
        if self.inner is not None:
            self.inner.closed(name)


def _carried() -> dict[str, str]:
    found = {"sentry-trace": sentry_sdk.get_traceparent(), "baggage": sentry_sdk.get_baggage()}
    return {name: value for name, value in found.items() if value}


def _incoming(headers: Any) -> dict[str, Any]:
    """Return the trace of a job: Sentry's own, else that of OpenTelemetry or SQL."""
    found = {name: value for name, value in read_headers(headers).items() if isinstance(value, str)}
    if "sentry-trace" not in found and (w3c := _W3C.match(found.get("traceparent", ""))):
        trace, span, flags = w3c.groups()
        found["sentry-trace"] = f"{trace}-{span}-{int(flags, 16) & 1}"
    return found
