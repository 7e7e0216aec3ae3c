"""OpenTelemetry: a trace from the enqueue to the handler, and metrics. Needs `tallybook[otel]`.

See https://github.com/tallybook/tallybook/blob/main/docs/telemetry.md.

    from tallybook.otel import instrument

    instrument(app)

An App that is not instrumented imports nothing of this, and reads one attribute per enqueue.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from tallybook._app import App
from tallybook.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace import TracerProvider

__all__ = ["instrument", "uninstrument"]


def instrument(
    app: App,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    propagator: TextMapPropagator | None = None,
    parent: bool = False,
) -> None:
    """Trace and count this App's enqueues and attempts. Call it before a worker or a drain starts.

    Each enqueue is a span `send QUEUE`; the headers of its jobs carry the context. Each attempt is a span `process
    QUEUE`, linked to the enqueue and current inside the handler. With `parent=True` it is a child of the enqueue, in
    the same trace. Providers and propagator default to the global ones. A later call replaces an earlier one. Raises
    ConfigError if `app` is not an App or Sentry's `instrument` was called before, and ImportError without
    OpenTelemetry.

        instrument(app, tracer_provider=provider)
    """
    if not isinstance(app, App):
        raise ConfigError("app", app, "not an App", hint="Write instrument(app)")
    try:
        from opentelemetry import metrics, propagate, trace
    except ImportError as error:
        raise ImportError("tallybook.otel needs OpenTelemetry: pip install 'tallybook[otel]'") from error
    from tallybook._otel.metrics import Metrics
    from tallybook._otel.spans import Traces

    if not isinstance(app._tracing, Traces | None):
        hint = "Call tallybook.otel.instrument before tallybook.contrib.sentry.instrument"
        raise ConfigError("app", app, "Sentry traces it already", hint=hint)
    version = metadata.version("tallybook")
    tracer = trace.get_tracer("tallybook", version, tracer_provider)
    meter = metrics.get_meter("tallybook", version, meter_provider)
    found = Traces(tracer, Metrics(meter), propagator or propagate.get_global_textmap(), parent=parent)
    for each in (app, *app._included):
        each._tracing = found


def uninstrument(app: App) -> None:
    """Stop tracing new work; running workers continue to trace until they end."""
    for each in (app, *app._included):
        each._tracing = None
