"""The metrics of workers and the dashboard: names, numbers of the database, and the text format 0.0.4 of Prometheus.

The numbers are read by two functions, which are called at most once per second and process.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

import psycopg

from tallybook._db.declared import Declared, Simple, T
from tallybook._db.policy import first_line
from tallybook._db.sync import done, got
from tallybook._db.texts import records
from tallybook._model.counting import Counts
from tallybook.errors import QueueUnavailable

log = logging.getLogger("tallybook.telemetry")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST = 100  # pairs of queue and task, and queues, with their own series; others are summed under OTHERS
OTHERS = "_others"

# Name: type, labels, help. https://github.com/tallybook/tallybook/blob/main/docs/telemetry.md has the same table.
METRICS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "tallybook_up":
        ("gauge", (), "1: the database responded; 0: it did not respond, and only the metrics of this process follow."),
    "tallybook_query_seconds": ("gauge", (), "Time that the database took to return its metrics."),
    "tallybook_jobs": ("gauge", ("queue", "task", "state"), "Jobs in this state now, in the whole database."),
    "tallybook_jobs_ended_total":
        ("counter", ("queue", "task", "end"), "Jobs that have ended with this outcome so far."),
    "tallybook_attempts_followed_total": (
        "counter", ("queue", "task", "end"),
        "Attempts so far with this outcome that did not end their job."
        " A crash that makes the job dead is counted here as well, as lost.",
    ),
    "tallybook_oldest_job_age_seconds":
        ("gauge", ("queue", "state"), "How long the oldest job in this state has been due to run."),
    "tallybook_standby_lag_seconds":
        ("gauge", (), "Lag of the standby that these numbers are read from; only with a standby."),
    "tallybook_worker_info": ("gauge", ("name", "version"), "Always 1; the labels show the worker's name and version."),
    "tallybook_worker_ready": ("gauge", (), "1: /readyz responds with 200; 0: it responds with 503."),
    "tallybook_worker_slots":
        ("gauge", ("queue",), "How many jobs of the queue this process can run at the same time."),
    "tallybook_worker_slots_used": ("gauge", ("queue",), "Slots of the queue that hold a job."),
    "tallybook_worker_jobs_claimed_total": ("counter", (), "Jobs that this process has claimed."),
    "tallybook_worker_attempts_ended_total":
        ("counter", ("end",), "Attempts of this process that have ended, by the new state of the job."),
    "tallybook_worker_ends_waiting": ("gauge", (), "Outcomes that the worker has not yet sent to the database."),
    "tallybook_worker_handlers_abandoned":
        ("gauge", (), "Handlers that are still running after their deadline and grace period."),
    "tallybook_worker_loop_lag_seconds": ("gauge", (), "Delay of the event loop, measured twice a second."),
    "tallybook_worker_loop_blocked_total":
        ("counter", (), "Times that a handler blocked the event loop for 1 s or longer."),
    "tallybook_worker_connection_errors_total":
        ("counter", ("connection",), "Times that a connection to the database was lost or failed."),
}  # fmt: skip

STATES = ("scheduled", "retrying", "waiting", "available", "running", "dead")
_ENDED = ("completed", "cancelled", "died")
_FOLLOWED = ("failed", "snoozed", "lost", "moved")
COLUMNS = (*STATES, *_ENDED, *_FOLLOWED)  # the columns of counts(), in the order of `Numbers.counts`

Sample = tuple[tuple[str, ...], float]
_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


@dataclass(frozen=True)
class Numbers:
    """The answer of the database."""

    counts: Mapping[tuple[str, str], tuple[int, ...]]  # by queue and task: one number per name in COLUMNS
    ages: Mapping[tuple[str, str], float]  # by queue and state: seconds
    seconds: float


@dataclass
class Shown:
    """The pairs and queues with their own series. A pair keeps its series, so that no counter decreases."""

    pairs: set[tuple[str, str]] = field(default_factory=set)
    queues: set[str] = field(default_factory=set)

    def counts(self, numbers: Numbers) -> dict[tuple[str, str], tuple[int, ...]]:
        """Return the numbers of pairs with their own series (the busiest get one first), and the sums of the others."""
        found = numbers.counts
        if room := MOST - len(self.pairs):
            new = sorted(found.keys() - self.pairs, key=lambda pair: (-sum(found[pair]), pair))
            self.pairs.update(new[:room])
        shown: dict[tuple[str, str], tuple[int, ...]] = {}
        for pair, row in found.items():
            at = pair if pair in self.pairs else (OTHERS, OTHERS)
            shown[at] = tuple(map(sum, zip(shown[at], row, strict=True))) if at in shown else row
        return shown

    def ages(self, numbers: Numbers) -> dict[tuple[str, str], float]:
        """Return the ages of queues with their own series, and the oldest age of the others."""
        if room := MOST - len(self.queues):
            new = {queue for queue, _ in numbers.ages} - self.queues
            self.queues.update(sorted(new, key=lambda queue: (-_oldest(numbers, queue), queue))[:room])
        shown: dict[tuple[str, str], float] = {}
        for (queue, state), age in numbers.ages.items():
            at = (queue if queue in self.queues else OTHERS, state)
            shown[at] = max(age, shown.get(at, 0.0))
        return shown


def _oldest(numbers: Numbers, queue: str) -> float:
    return max(age for (at, _), age in numbers.ages.items() if at == queue)


def of_the_database(numbers: Numbers | None, shown: Shown) -> dict[str, list[Sample]]:
    """Return the samples by metric; without numbers only that the database is unavailable."""
    if numbers is None:
        return {"tallybook_up": [((), 0.0)]}
    counts = shown.counts(numbers)

    def picked(names: Iterable[str]) -> list[Sample]:
        at = [(name, COLUMNS.index(name)) for name in names]
        return [((*pair, name), float(row[index])) for pair, row in sorted(counts.items()) for name, index in at]

    return {
        "tallybook_up": [((), 1.0)],
        "tallybook_query_seconds": [((), numbers.seconds)],
        "tallybook_jobs": picked(STATES),
        "tallybook_jobs_ended_total": picked(_ENDED),
        "tallybook_attempts_followed_total": picked(_FOLLOWED),
        "tallybook_oldest_job_age_seconds": sorted(shown.ages(numbers).items()),
    }


def of_nodes(found: Mapping[str, Mapping[str, list[Sample]]]) -> dict[str, list[Sample]]:
    """Return the samples of several nodes, with the node's name as an additional label."""
    whole: dict[str, list[Sample]] = {}
    for node, of_one in found.items():
        for metric, samples in of_one.items():
            whole.setdefault(metric, []).extend(((*values, node), number) for values, number in samples)
    return whole


def text(found: Mapping[str, list[Sample]]) -> str:
    """Return the page with these samples, in the order of METRICS."""
    lines: list[str] = []
    for name, (kind, labels, says) in METRICS.items():
        if name not in found:
            continue
        lines.append(f"# HELP {name} {says}\n# TYPE {name} {kind}\n")
        for values, number in found[name]:
            names = (*labels, "node")[: len(values)]
            given = zip(names, values, strict=True)
            pairs = ",".join(f'{label}="{value.translate(_ESCAPED)}"' for label, value in given)
            shown = f"{int(number)}" if number.is_integer() else repr(number)
            lines.append(f"{name}{{{pairs}}} {shown}\n" if pairs else f"{name} {shown}\n")
    return "".join(lines)


FRESH = 1.0  # seconds for which an answer of the database, or its absence, serves all requests
ANSWER = 3.0  # time limit of the database in seconds
COUNTS = Simple("""
  counts()
  -> rows (queue task text,
           scheduled retrying waiting available running dead completed failed snoozed cancelled lost moved died bigint)
     order by r.queue, r.task""", records(Counts))  # fmt: skip
_COUNTS = COUNTS.select(f"queue, task, {', '.join(COLUMNS)}")
_BACKLOG = Declared("backlog() -> rows (queue text, state text, oldest_run_at timestamptz)")
_AGE = "greatest(0, extract(epoch from clock_timestamp() - oldest_run_at))::float8"
_AGES = f"{_BACKLOG.select(f'queue, state, {_AGE}')} where isfinite(oldest_run_at)"


async def ask(conn: Any) -> Numbers:
    began = time.monotonic()
    found = await got((await got(conn.execute(_COUNTS))).fetchall())
    ages = await got((await got(conn.execute(_AGES))).fetchall())
    tallies = {(queue, task): tuple(map(int, row)) for queue, task, *row in found}
    oldest = {(queue, state): float(age) for queue, state, age in ages}
    return Numbers(tallies, oldest, time.monotonic() - began)


def ask_sync(dsn: str, name: str) -> Numbers:
    """Read the current numbers over a connection for this one query."""
    connect = {"connect_timeout": int(ANSWER), "application_name": f"tallybook {name}"[:63]}
    with psycopg.connect(dsn, prepare_threshold=None, **connect) as conn:  # type: ignore[arg-type]  # of the values
        conn.read_only = True
        conn.execute("select set_config('statement_timeout', %s, true)", (f"{ANSWER:g}s",))
        return done(ask(conn))


class Asked(Generic[T]):
    """The result of `answer`, at most FRESH seconds old for any number of callers; an outage is logged once."""

    def __init__(self, answer: Callable[[], Awaitable[T]]) -> None:
        self._answer = answer
        self._asking: asyncio.Task[None] | None = None
        self._asked_at = float("-inf")
        self._away = False
        self._found: T | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def now(self) -> T | None:
        """Return the result, or None if the database is unavailable."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a query in another loop may have ended with that loop
            self._loop, self._asking = loop, None
        if self._asking is None and time.monotonic() - self._asked_at >= FRESH:
            self._asking = asyncio.create_task(self._ask())
        if self._asking:
            await asyncio.shield(self._asking)  # a caller that is cancelled does not cancel it for the others
        return self._found

    async def _ask(self) -> None:
        found = None
        try:
            found = await self._answer()
            if self._away:
                log.info("telemetry: the database answers again")
            self._away = False
        except (psycopg.Error, OSError, QueueUnavailable) as error:
            if not self._away:
                log.warning("telemetry: the database does not answer: %s", first_line(error))
            self._away = True
        finally:
            if self._loop is asyncio.get_running_loop():
                self._found, self._asked_at, self._asking = found, time.monotonic(), None
