"""The trace in a job's headers: the producer adds it, the worker reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter, TextMapPropagator

from tallybook._model.carrying import read_headers, with_added


class _Texts(Getter[Mapping[str, Any]]):
    """Reads only headers that are text: others cannot belong to a trace."""

    def get(self, carrier: Mapping[str, Any], key: str) -> list[str] | None:
        found = carrier.get(key)
        return [found] if isinstance(found, str) else None

    def keys(self, carrier: Mapping[str, Any]) -> list[str]:
        return list(carrier)


_TEXTS = _Texts()


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
        found = read_headers(headers)
        if not self._propagator.fields & found.keys():
            return Context()
        try:
            return self._propagator.extract(found, context=Context(), getter=_TEXTS)
        except Exception:  # the user's propagator, and headers from any program
            return Context()

    def span_of(self, headers: str | Mapping[str, Any] | None) -> trace.SpanContext | None:
        """Return the span that made the job; None: unknown."""
        found = trace.get_current_span(self.context_of(headers)).get_span_context()
        return found if found.is_valid else None

    def with_trace(self, headers: str | None, carried: Mapping[str, str]) -> str | None:
        """Return headers, as JSON text, with the trace added as far as it fits; unchanged if they carry one already."""
        if not carried or self.span_of(headers):
            return headers
        return with_added(headers, carried)
