"""A program that reports to Sentry with the default integrations of its SDK: `python -m support.sentry_app DSN`.

It prints each event that would be sent as one line of JSON, and the results of its jobs at the end.
"""

import asyncio
import json
import os
import signal
import sys
from datetime import timedelta

import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from tallybook import App, Constant
from tallybook.contrib.sentry import instrument


class Printer(Transport):
    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            print(json.dumps({"type": item.type, **(item.payload.json or {})}, default=str), flush=True)


app = App("shop")
# Integrations of other libraries are off: they take a second to import in each of the four processes.
sentry_sdk.init(
    dsn="https://key@sentry.example/1", transport=Printer, traces_sample_rate=1.0, auto_enabling_integrations=False
)
instrument(app)


@app.task(retry=Constant(timedelta(hours=1)))
async def first(n: int) -> None:
    raise ValueError("no luck")


@app.task(max_attempts=1)
def last(n: int) -> None:
    raise ValueError("no luck at all")


@app.task(process=True, max_attempts=1)
def apart(n: int) -> None:
    raise LookupError("not here")


@app.task(process=True)
def trace(n: int) -> str:
    return sentry_sdk.get_traceparent() or ""


@app.task(process=True, queue="dies")
def dies(n: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def main() -> None:
    app.dsn = sys.argv[1]
    with sentry_sdk.start_transaction(name="request"):
        jobs = [await task.enqueue(app, 4711471147114711) for task in (first, last, apart, dies, trace)]
    await app.drain(queues={"default": 10})
    # By itself: it is retried a second after its crash, and a drain that still runs another job would start it again.
    await app.drain(queues={"dies": 1})
    print(json.dumps({"type": "result", "trace": await app.result(jobs[-1])}))


if __name__ == "__main__":
    asyncio.run(main())
