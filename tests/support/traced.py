"""A producer or a worker process with OpenTelemetry: `python -m support.traced DSN put|drain`.

It prints each span that it has ended as one line of JSON.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from tallybook import App
from tallybook.otel import instrument


class Printer(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for span in spans:
            assert span.context is not None
            found: dict[str, Any] = {
                "name": span.name,
                "trace": f"{span.context.trace_id:032x}",
                "span": f"{span.context.span_id:016x}",
                "parent": f"{span.parent.span_id:016x}" if span.parent else None,
                "links": [[f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}"] for link in span.links],
                "attributes": dict(span.attributes or {}),
            }
            print(json.dumps(found), flush=True)
        return SpanExportResult.SUCCESS


app = App("shop")
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(Printer()))
instrument(app, tracer_provider=provider)


@app.task
def hello(n: int) -> str:
    return f"{trace.get_current_span().get_span_context().span_id:016x}"


@app.task(process=True)
def apart(n: int) -> str:
    with provider.get_tracer("mine").start_as_current_span("inside"):
        return f"{trace.get_current_span().get_span_context().trace_id:032x}"


if __name__ == "__main__":
    app.dsn = sys.argv[1]
    if sys.argv[2] == "put":
        hello.enqueue_sync(app, 1)
    else:
        asyncio.run(app.drain())
