"""The time of `why` for jobs of every state, with 10 million jobs of history and 1 million in line.

Plain SQL loads the history and the line (see rescue), and 10,000 jobs of each other state: scheduled, dead, waiting for
a parent, for their order key and among fair keys. Each job is asked for once, in random order, over one connection. The
time is the caller's.
"""

from __future__ import annotations

import random
import time
from typing import Any

import psycopg

from bench.figures import SCALE, at_most, median, percentile, plain, say
from bench.rescue import fill
from bench.server import database, server, start_worker, vacuum

_OTHERS = """
do $$
declare
  v_lane int := (select l.lane_id from tallybook.lane l where l.queue = 'default' and l.part = '' limit 1);
  v_first bigint; n int := %s;
begin
  insert into tallybook.scheduled (job_id, run_at, enqueued_at, lane_id, attempt, failures, crashes, task, args)
  select nextval('tallybook.job_id'), now() + interval '1 day' * random(), now(), v_lane, 1, 0, 0, 'noop', '{}'
    from generate_series(1, n);
  insert into tallybook.dead
         (job_id, died_at, enqueued_at, lane_id, attempt, failures, crashes, reason, task, args, errors)
  select nextval('tallybook.job_id'), now(), now(), v_lane, 5, 5, 0, 'failed', 'noop', '{}', '[{"message": "no"}]'
    from generate_series(1, n);
  perform tallybook.enqueue_many(array_fill('default'::text, array[n]), array_fill('noop'::text, array[n]),
                                 array_fill('{}'::text, array[n]),
                                 options => array(select format('{"fair_key": "k%%s"}', i %% 100)
                                                    from generate_series(1, n) i));
  v_first := tallybook.enqueue('default', 'noop', run_at => now() + interval '1 day');
  perform tallybook.enqueue_after('default', 'noop', after => array[v_first]) from generate_series(1, n);
  for i in 1..n loop
    perform tallybook.enqueue('ordered', 'noop', order_key => 'k' || i %% 10);
  end loop;
end $$"""
_LINE = """
insert into tallybook.entry (seq, job_id, enqueued_at, lane_id, attempt, failures, crashes, retention, task, args)
select n, n, clock_timestamp(), l.lane_id, 1, 0, 0, l.retention, 'noop',
       jsonb_build_object('to', 'user@example.com', 'n', n)
  from (select nextval('tallybook.job_id') as n from generate_series(1, %s)) s,
       (select lane_id, retention from tallybook.lane where queue = 'default' and part = '' limit 1) l"""


def _load(conn: psycopg.Connection[Any], done: int, line: int, others: int) -> dict[str, list[int]]:
    """Load the jobs; return ids of some jobs of each state."""
    fill(conn, done)
    say("  why: the history is loaded")
    worker = start_worker(conn, ["default", "ordered"])
    for first in range(0, line, 100_000):
        conn.execute(_LINE, (min(100_000, line - first),))
    conn.execute(
        "select tallybook.claim(%s::int, '{default}', '{100}', gen_random_uuid()) from generate_series(1, 1)", (worker,)
    )
    conn.execute(_OTHERS % others)  # type: ignore[arg-type]
    lease = "11111111-1111-1111-1111-111111111111"
    conn.execute("select tallybook.claim(%s::int, '{ordered}', '{1000}', %s)", (worker, lease))
    conn.execute(
        "select tallybook.order_admit(array_agg(%s::uuid), array_agg(job_id), array_agg(attempt))"
        " from tallybook.claimed_jobs(%s)",
        (lease, lease),
    )
    queries = {
        "completed": "select e.job_id from tallybook.entry e order by e.job_id limit %(n)s offset 1000",
        "running": "select l.job_id from tallybook.claim c, tallybook.claimed_jobs(c.lease) l"
        " where c.worker_id = %(worker)s",
        "available": "select e.job_id from tallybook.entry e tablesample bernoulli (5) where not exists"
        " (select from tallybook.outcome o where o.entry_xid = e.xid and o.entry_seq = e.seq) limit %(n)s",
        "scheduled": "select job_id from tallybook.scheduled limit %(n)s",
        "dead": "select job_id from tallybook.dead limit %(n)s",
        "fair": "select job_id from tallybook.waiting where fair_key is not null order by random() limit %(n)s",
        "order": "select job_id from tallybook.waiting where order_key is not null order by random() limit %(n)s",
        "parents": "select child_id from tallybook.parent limit %(n)s",
        "unknown": "select 1000000000000 + n from generate_series(1, %(n)s) n",
    }
    params = {"n": 200, "worker": worker}
    return {name: [n for (n,) in conn.execute(one, params)] for name, one in queries.items()}  # type: ignore[arg-type]


def run() -> None:
    """Print the figures."""
    done, line, others = (
        max(least, int(size * SCALE)) for size, least in ((10_000_000, 10_000), (1_000_000, 5_000), (10_000, 500))
    )
    with server() as running, database(running) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("select tallybook._lane('default', 2, '')")
            jobs = _load(conn, done, line, others)
        vacuum(dsn)
        took: dict[str, list[float]] = {name: [] for name in jobs}
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("select * from tallybook.why(1)").fetchall()  # make the plans
            asked = [(name, job) for name, ids in jobs.items() for job in ids]
            random.Random(6).shuffle(asked)
            for name, job in asked:
                began = time.perf_counter()
                rows = conn.execute("select reason from tallybook.why(%s)", (job,)).fetchall()
                took[name].append((time.perf_counter() - began) * 1000)
                assert rows, job
    for name, times in took.items():
        assert times, f"there is no job in state {name}"
        plain(
            "why", f"p95_ms_{name}", percentile(times, 0.95), "ms", f"{len(times)} jobs, p50 {median(times):.2f} ms"
        ).show()
    every = [one for times in took.values() for one in times]
    shown = f"{len(every)} jobs of every state, {done:,} of history, {line:,} in line"
    at_most("why", "p95_ms", percentile(every, 0.95), "ms", 20, shown).show()
