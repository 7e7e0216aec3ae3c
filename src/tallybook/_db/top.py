"""One reading for `tallybook top`: two statements, whose cost does not depend on the amount of history."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg

from tallybook._db.declared import Declared
from tallybook._db.sync import done, got
from tallybook._db.texts import at, loads
from tallybook._model.counting import Throughput
from tallybook._model.merged import summed

_LIMITS = """\
select set_config('statement_timeout', '5s', true), set_config('lock_timeout', '1s', true),
       set_config('jit', 'off', true), has_function_privilege('tallybook._failures_said(int)', 'execute')"""
_MAY_SEE = "select has_function_privilege('tallybook._failures_said(int)', 'execute')"
_READ = """\
with w as materialized (select w.* from tallybook.workers w where w.ended_at is null),
s as materialized (
  select s.queue as name, s.available, s.running, s.scheduled, s.retrying, s.waiting, s.dead, s.completed, s.failed,
         s.cancelled, s.paused_at
    from tallybook.queue_stats s),
o as materialized (
  select o.queue, o.oldest from tallybook._oldest_of(array(
    select s.name from s where s.available > 0 order by s.available + s.running + s.dead desc, s.name limit 200)) o)
select json_build_object(
  'now', clock_timestamp(), 'database', current_database(), 'server', current_setting('server_version'),
  'horizon', (select json_build_object('who', h.who, 'since', h.since, 'transactions', h.transactions)
                from tallybook._horizon() h
               where h.transactions is not null
                 and (h.since < clock_timestamp() - interval '5 min' or h.kind = 'replication slot' and not h.active)
               limit 1),
  'alive', (select count(*) from w where w.seen_at >= clock_timestamp() - w.lease),
  'queues', (select json_agg(x) from (select s.*, o.oldest from s left join o on o.queue = s.name) x),
  'workers', (select json_agg(x) from (
     select w.id, w.name, w.queues, w.seen_at, w.seen_at < clock_timestamp() - w.lease as silent,
            extract(epoch from w.lag) as lag, w.memory from w) x),
  'failures', (select json_agg(f) from tallybook.{failures}(50) f))::text"""
# The age of the oldest job is read for the 200 fullest queues: more than a screen shows.
# Jobs that ended since their workers' last heartbeat are read along with running ones: about 10 s of work.
RUNNING = Declared("""
  running(max_jobs int, of_worker int)
  -> rows (job_id bigint, attempt int, queue text, task text, worker_id int, worker text, started_at timestamptz)""")
_RUNNING = f"""\
with r as materialized (
  select r.*, row_number() over () as n from {RUNNING.called(max_jobs="10000", of_worker="null")} r)
select json_build_object(
  'running', (select count(*) from r), 'longest', (select json_agg(r order by r.n) from r where r.n <= 50),
  'workers', (select json_agg(x) from (select r.worker_id, count(*) as jobs from r group by r.worker_id) x)
)::text"""  # noqa: S608
_SHARE = 20  # running jobs are read again after this many times the duration of the last read: 5 % of a core


@dataclass(frozen=True)
class Runs:
    """The running jobs at one moment."""

    jobs: int = 0
    longest: list[dict[str, Any]] = field(default_factory=list)
    of_workers: dict[int, int] = field(default_factory=dict)
    good_until: float = 0.0  # when to read them again, by time.monotonic()


@dataclass(frozen=True)
class Reading:
    """The state at one moment, from the server."""

    now: datetime
    database: str
    server: str
    alive: int  # workers that are not silent
    queues: dict[str, dict[str, Any]]
    workers: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    runs: Runs
    horizon: dict[str, Any] | None = None  # the session that pins it for longer than five minutes


@dataclass(frozen=True)
class Rates:
    """Rates per second between two readings; None: there is only one."""

    entered: float | None = None
    completed: float | None = None
    failed: float | None = None
    of_queues: dict[str, float] = field(default_factory=dict)  # completed jobs per second


def read(conn: psycopg.Connection[Any], before: Reading | None = None) -> Reading:
    """Read once, in a transaction: nothing is set on a session that a pooler may share. `before`: as runs_async."""
    with conn.transaction():
        return done(read_async(conn, before, _LIMITS))


async def read_async(conn: Any, before: Reading | None = None, first: str = _MAY_SEE) -> Reading:
    """The same on a connection that is in a transaction with its own limits."""
    may_see = await _last(conn, first)  # the role reader does not see the texts of failures
    raw = loads(await _last(conn, _READ.replace("{failures}", "_failures_said" if may_see else "_failures")))
    rows = {name: raw[name] or [] for name in ("queues", "workers", "failures")}
    rows["queues"] = {one["name"]: one for one in rows["queues"]}
    runs = await runs_async(conn, before.runs if before else None)
    return Reading(**raw | rows | {"now": at(raw["now"]), "runs": runs})


async def runs_async(conn: Any, before: Runs | None = None) -> Runs:
    """Read the running jobs; if that takes long, the result `before` is reused for a while."""
    if before and time.monotonic() < before.good_until:
        return before
    began = time.monotonic()
    raw = loads(await _last(conn, _RUNNING))
    ended = time.monotonic()
    of_workers = {one["worker_id"]: one["jobs"] for one in raw["workers"] or []}
    return Runs(raw["running"], raw["longest"] or [], of_workers, ended + _SHARE * (ended - began))


async def _last(conn: Any, query: str) -> Any:
    return (await got((await got(conn.execute(query, prepare=False))).fetchone()))[-1]


def merged(readings: Mapping[str, Reading]) -> Reading:
    """Return one reading for those of several nodes, given by name.

    Numbers are added, workers' names get the node's as a prefix, and a queue has the name of its first node.
    Ids of workers are made unique, because they count from 1 on every node.
    """
    queues: dict[str, dict[str, Any]] = {}
    workers: list[dict[str, Any]] = []
    of_workers: dict[int, int] = {}
    for place, (node, one) in enumerate(readings.items()):
        for name, row in one.queues.items():
            queues[name] = _summed(queues[name], row) if name in queues else row | {"node": node}
        workers += [
            row | {"id": row["id"] + (place << 40), "name": f"{node}/{row['name']}", "node": node}
            for row in one.workers
        ]
        of_workers |= {number + (place << 40): jobs for number, jobs in one.runs.of_workers.items()}
    found = list(readings.values())
    longest = sorted((row for one in found for row in one.runs.longest), key=lambda row: at(row["started_at"]))
    failures = sorted((row for one in found for row in one.failures), key=lambda row: at(row["ended_at"]), reverse=True)
    return Reading(
        now=max(one.now for one in found),
        database=f"{len(found)} nodes",
        server=", ".join(sorted({one.server for one in found})),
        alive=sum(one.alive for one in found),
        queues=queues,
        workers=workers,
        failures=failures[:50],
        runs=Runs(sum(one.runs.jobs for one in found), longest[:50], of_workers),
        horizon=next((one.horizon for one in found if one.horizon), None),
    )


def _summed(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge a queue on two nodes, with the older of the oldest jobs."""
    return summed(one, other) | {"oldest": min(filter(None, (one["oldest"], other["oldest"])), key=at, default=None)}


def added(rates: Sequence[Rates]) -> Rates:
    def total(name: str) -> float | None:
        known = [value for one in rates if (value := getattr(one, name)) is not None]
        return sum(known) if known else None

    of_queues: Counter[str] = Counter()
    for one in rates:
        of_queues.update(one.of_queues)
    return Rates(total("entered"), total("completed"), total("failed"), dict(of_queues))


def flow(found: Sequence[Throughput]) -> Rates:
    of_queues: Counter[str] = Counter()
    for one in found:
        of_queues[one.queue] += one.completed_per_s  # type: ignore[assignment]
    return Rates(None, sum(of_queues.values()), sum(one.failed_per_s for one in found), dict(of_queues))


_ENTERED = ("available", "running", "scheduled", "retrying", "waiting", "dead", "completed", "cancelled")


def rates(before: Reading | None, after: Reading) -> Rates:
    """Return the rates between two readings. A queue that was dropped meanwhile does not count negatively."""
    seconds = (after.now - before.now).total_seconds() if before else 0.0
    if before is None or seconds <= 0:
        return Rates()

    def total(reading: Reading, *names: str) -> int:
        return sum(one[name] or 0 for one in reading.queues.values() for name in names)

    def rate(*names: str) -> float:
        return max(0, total(after, *names) - total(before, *names)) / seconds

    of_queues = {
        name: max(0, one["completed"] - before.queues.get(name, {}).get("completed", 0)) / seconds
        for name, one in after.queues.items()
    }
    return Rates(rate(*_ENTERED), rate("completed"), rate("failed"), of_queues)
