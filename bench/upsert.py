"""Bulk upsert of subjects beside the plain statement that bounds it: INSERT ... ON CONFLICT DO UPDATE into the same
tables.

100,000 subjects, every second one new, one statement per 1,000. The two kinds take turns, each with its own names. The
plain statement ignores claims: it would change running jobs, and it does not report the former values.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

import psycopg

from bench.figures import SCALE, at_least, plain
from bench.server import database, server

BATCH = 1_000
_THERE = """
with made as (
  insert into tallybook.subject_job (task, subject, job_id, made_at)
  select %(task)s, 'asset:' || 2 * n, nextval('tallybook.job_id'), now() from generate_series(1, %(subjects)s / 2) n
  returning subject, job_id)
insert into tallybook.scheduled (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, task, args,
                                 unique_key, options)
select m.job_id, now() + interval '1 day', now(), (select l.lane_id from tallybook._lane('prices', 2, '') l),
       1, 0, 0, %(task)s, '{"asset_id": 42, "text": "a small payload, as most are"}', m.subject,
       '{"subject": {"iterations": 0}}' from made m"""
_OURS: LiteralString = """
select subject, job_id, report, old_run_at, new_run_at
  from tallybook.subject_upsert_many(
    'prices', 'ours', %(subjects)s::text[], %(args)s::text[], %(run_ats)s::timestamptz[])"""
_PLAIN: LiteralString = """
with given as materialized (
  select * from unnest(%(subjects)s::text[], %(args)s::text[], %(run_ats)s::timestamptz[]) u(subject, args, run_at)
), names as (
  insert into tallybook.subject_job as j (task, subject, job_id, made_at)
  select 'plain', g.subject, nextval('tallybook.job_id'), now() from given g order by g.subject
  on conflict (task, subject, scope) do update set made_at = j.made_at returning j.subject, j.job_id)
insert into tallybook.scheduled as s (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, task, args,
                                      unique_key, options)
select n.job_id, g.run_at, now(), (select l.lane_id from tallybook._lane('prices', 2, '') l), 1, 0, 0, 'plain',
       g.args::jsonb, n.subject, '{"subject": {"iterations": 0}}'
  from names n join given g on g.subject = n.subject
on conflict (job_id) do update set args = excluded.args, run_at = excluded.run_at
returning s.unique_key, s.job_id, s.xmax = 0 as created, s.run_at"""


def run() -> None:
    """Print the figures."""
    subjects = max(2 * BATCH, int(100_000 * SCALE) // BATCH * BATCH)
    took = {"ours": 0.0, "plain": 0.0}
    with server() as running, database(running) as dsn, psycopg.connect(dsn, autocommit=True) as conn:
        for task in took:
            conn.execute(_THERE, {"task": task, "subjects": subjects})
        run_at = datetime.now(UTC) + timedelta(days=2)
        for first in range(1, subjects, BATCH):
            names = [f"asset:{n}" for n in range(first, first + BATCH)]
            given = {
                "subjects": names,
                "args": [
                    f'{{"asset_id": {n}, "text": "a small payload, as most are"}}' for n in range(first, first + BATCH)
                ],
                "run_ats": [run_at] * BATCH,
            }
            # They take turns in going first.
            for task in sorted(took, reverse=first // BATCH % 2 == 1):
                took[task] += _upsert(conn, _OURS if task == "ours" else _PLAIN, given)
        _check(conn, subjects)
    rates = {task: subjects / seconds for task, seconds in took.items()}
    limit = f"plain {rates['plain']:,.0f}/s"
    at_least("upsert", "ratio_to_on_conflict", rates["ours"] / rates["plain"], "ratio", 0.5, limit).show()
    plain("upsert", "rows_per_s", rates["ours"], "rows/s", "one connection, durable, report included").show()


def _upsert(conn: psycopg.Connection[Any], query: LiteralString, given: dict[str, Any]) -> float:
    begin = time.perf_counter()
    rows = conn.execute(query, given).fetchall()
    seconds = time.perf_counter() - begin
    assert len(rows) == BATCH
    return seconds


def _check(conn: psycopg.Connection[Any], subjects: int) -> None:
    """Check that both have done the same work."""
    done = conn.execute(
        "select task, count(*), count(*) filter (where run_at > now() + interval '36 h')"
        " from tallybook.scheduled group by task"
    ).fetchall()
    assert sorted(done) == [("ours", subjects, subjects), ("plain", subjects, subjects)], done
