"""The trace in a job's headers: put there by the producer, read by the worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter, TextMapPropagator

from tallybook._model.carrying import read_headers, with_added


class _Texts(Getter[Mapping[str, Any]]):
    """Reads those headers that are texts: the others are nobody's trace."""

    def get(self, carrier: Mapping[str, Any], key: str) -> list[str] | None:
        found = carrier.get(key)
        return [found] if isinstance(found, str) else None

    def keys(self, carrier: Mapping[str, Any]) -> list[str]:
        return list(carrier)


_TEXTS = _Texts()


class Headers:
    """What a propagator makes of headers."""

    def __init__(self, propagator: TextMapPropagator) -> None:
        self._propagator = propagator

    def carried(self) -> dict[str, str]:
        found: dict[str, str] = {}
        self._propagator.inject(found)
        return found

    def context_of(self, headers: str | Mapping[str, Any] | None) -> Context:
        """The context that headers carry, and nothing of the current one; an empty one for headers that carry none."""
        found = read_headers(headers)
        if not self._propagator.fields & found.keys():
            return Context()
        try:
            return self._propagator.extract(found, context=Context(), getter=_TEXTS)
        except Exception:  # a propagator of the user's, and headers of anybody's
            return Context()

    def span_of(self, headers: str | Mapping[str, Any] | None) -> trace.SpanContext | None:
        """The span that made the job; None: unknown."""
        found = trace.get_current_span(self.context_of(headers)).get_span_context()
        return found if found.is_valid else None

    def with_trace(self, headers: str | None, carried: Mapping[str, str]) -> str | None:
        """Headers, as JSON text, with the trace in them, as far as it fits; as they are where they carry one already."""
        if not carried or self.span_of(headers):
            return headers
        return with_added(headers, carried)
