"""The Celery application of `make bench BENCH=cpu_bound`; `python -m bench.peers.celery_peer N` enqueues N jobs.

As in Celery's own first steps: prefork, no result backend, a job is acknowledged when it starts. That is its fastest
form. With `acks_late`, which corresponds to Tallybook's guarantee, it is a little slower.
"""

from __future__ import annotations

import os
import sys

from celery import Celery

from bench.burn import burn as work

app = Celery("bench", broker=os.environ["BURN_BROKER"])
app.conf.task_ignore_result = True
app.conf.broker_connection_retry_on_startup = True


@app.task(name="burn")
def burn(n: int) -> None:
    """Use 50 ms of CPU time."""
    work(n)


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        burn.delay(number)
