"""One reading of what `tallybook top` shows: one statement, which costs the same however much history there is."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg

from tallybook._db.calls import instant

__all__ = ["Rates", "Reading", "rates", "read"]

Conn = psycopg.Connection[Any]

# Index scans: the planner knows nothing of tables that were empty when it looked last.
_LIMITS = """\
select set_config('statement_timeout', '5s', true), set_config('lock_timeout', '1s', true), set_config('jit', 'off', true),
       set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       has_column_privilege('tallybook.error', 'message', 'select')"""
_READ = """\
with r as materialized (select * from tallybook.running(max_jobs => 10000)),
     w as materialized (select w.* from tallybook.workers w where w.ended_at is null)
select json_build_object(
  'now', clock_timestamp(), 'database', current_database(), 'server', current_setting('server_version'),
  'horizon', (select json_build_object('who', h.who, 'since', h.since, 'transactions', h.transactions) from tallybook._horizon() h
               where h.transactions is not null
                 and (h.since < clock_timestamp() - interval '5 min' or h.kind = 'replication slot' and not h.active) limit 1),
  'alive', (select count(*) from w where w.seen_at >= clock_timestamp() - w.lease),
  'running', (select count(*) from r),
  'queues', (select json_agg(json_build_object(
       'name', s.queue, 'available', s.available, 'running', s.running, 'scheduled', s.scheduled, 'retrying', s.retrying,
       'waiting', s.waiting, 'dead', s.dead, 'completed', s.completed, 'failed', s.failed, 'cancelled', s.cancelled,
       'oldest', s.oldest, 'paused_at', q.paused_at))
     from tallybook.queue_stats s left join tallybook.queues q on q.name = s.queue),
  'workers', (select json_agg(x) from (
     select w.id, w.name, w.queues, w.seen_at, w.seen_at < clock_timestamp() - w.lease as silent,
            (select count(*) from r where r.worker_id = w.id) as running from w order by 6 desc, w.id limit 100) x),
  'longest', (select json_agg(x) from (select r.* from r order by r.started_at, r.job_id limit 50) x),
  'failures', (select json_agg(x) from (
     select e.ended_at, e.queue, e.task, e.job_id, e.attempt, e.state, e.type, {message} as message
       from tallybook.error e order by e.ended_at desc limit 50) x))::text"""


@dataclass(frozen=True)
class Reading:
    """How things stand at one moment, as the server says it."""

    now: datetime
    database: str
    server: str
    alive: int
    """Workers that are not silent."""
    running: int
    queues: dict[str, dict[str, Any]]
    workers: list[dict[str, Any]]
    longest: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    horizon: dict[str, Any] | None = None
    """Who pins it for longer than five minutes."""


@dataclass(frozen=True)
class Rates:
    """Per second, between two readings; None: there is only one."""

    entered: float | None = None
    completed: float | None = None
    failed: float | None = None
    of_queues: dict[str, float] = field(default_factory=dict)
    """Completed a second."""


def read(conn: Conn) -> Reading:
    """One reading, in a transaction of its own: nothing is set on a session that a pooler may share."""
    with conn.transaction():
        row = conn.execute(_LIMITS, prepare=False).fetchone()
        assert row is not None
        message = "e.message" if row[-1] else "null"  # a reader's role does not see it
        found = conn.execute(_READ.replace("{message}", message).encode(), prepare=False).fetchone()
    assert found is not None
    raw = json.loads(found[0])
    now = instant(raw["now"])
    assert now is not None
    return Reading(
        now=now,
        database=raw["database"],
        server=raw["server"],
        alive=raw["alive"],
        running=raw["running"],
        queues={one["name"]: one for one in raw["queues"] or []},
        workers=raw["workers"] or [],
        longest=raw["longest"] or [],
        failures=raw["failures"] or [],
        horizon=raw["horizon"],
    )


_ENTERED = ("available", "running", "scheduled", "retrying", "waiting", "dead", "completed", "cancelled")


def rates(before: Reading | None, after: Reading) -> Rates:
    """What happened between the two. Whatever was dropped meanwhile does not count backwards."""
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
