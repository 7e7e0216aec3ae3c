"""The time of a page of a list of jobs, by filter, with 10 million jobs of history and 1 million in line.

Loaded like `why`, with a quiet queue whose few jobs are older than all others, and one whose jobs have failed. For each
filter the pages are read one after the other from the first on, including filters that find nothing.
"""

from __future__ import annotations

import time
from typing import Any

import psycopg

from bench.cpu import thread_cpu
from bench.figures import SCALE, at_most, median, percentile, plain
from bench.server import database, load, server, start_worker, vacuum
from bench.why import _load
from tallybook import App
from tallybook._app.jobs import STATES

_JOBS = App("bench").jobs
_PAGES = 30
_FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    **{state: {"states": [state]} for state in STATES},
    "ended": {"states": ["completed", "cancelled", "dead"]},
    "open": {"states": ["scheduled", "retrying", "waiting", "available", "running"]},
    "busy_queue": {"queue": "default"},
    "quiet_queue": {"queue": "quiet"},
    "quiet_completed": {"queue": "quiet", "states": ["completed"]},
    "rare_task": {"task": "rare"},
    "error": {"error": "no luck"},
    "rare_error": {"error": "once only"},
    "no_such_error": {"error": "never said"},
    "links": {"links": {"submission": 7}},
    "no_such_task": {"task": "none"},
}
_FAIL = """
do $$
declare
  v_worker int := tallybook.worker_start('failing', '{flaky,quiet}', at => 'infinity'); v_lease uuid; j record;
begin
  for n in 1..%s loop
    v_lease := gen_random_uuid();
    perform tallybook.claim(v_worker, '{flaky,quiet}', '{100,100}', v_lease);
    exit when not exists (select from tallybook.claimed_jobs(v_lease));
    for j in select * from tallybook.claimed_jobs(v_lease) loop
      if j.task = 'rare' then
        perform tallybook.complete(v_lease, j.job_id, j.attempt);
      else
        perform tallybook.fail(v_lease, j.job_id, j.attempt, jsonb_build_object('type', 'ValueError',
          'message', case when j.job_id %% 1000 = 7 then 'once only' else 'no luck' end),
          retry_in => case when j.job_id %% 2 = 0 then interval '1 h' end, final => j.job_id %% 3 = 0);
      end if;
    end loop;
    commit;
  end loop;
  perform tallybook.worker_stop(v_worker);
end $$"""


def _fill(conn: psycopg.Connection[Any], done: int, line: int, others: int) -> None:
    load(conn, 30, queue="quiet", task="rare")
    load(conn, others // 5, queue="flaky", task="flaky")
    conn.execute(_FAIL % 1000)  # type: ignore[arg-type]
    _load(conn, done, line, others)
    conn.execute(
        "select tallybook.enqueue('linked', 'noop', headers =>"
        """ format('{"links": {"submission": %%s}}', n %% 100)::jsonb) from generate_series(1, %s::int) n""",
        (others,),
    )
    conn.execute(
        "select tallybook.cancel(job_id) from (select job_id from tallybook.scheduled order by job_id limit 1000) s"
    )


def _pages(conn: psycopg.Connection[Any], which: dict[str, Any]) -> tuple[list[float], list[float], int]:
    """Return the times of the first pages and the server's CPU for each, in milliseconds; and the jobs found."""
    took, cpu, found, after = [], [], 0, None
    pid = conn.info.backend_pid  # its CPU excludes other load on the machine
    for _ in range(_PAGES):
        worked, began = thread_cpu(pid) * 1000, time.perf_counter()
        page = _JOBS.list(**which, after=after, max_jobs=50).sync(conn)
        took.append((time.perf_counter() - began) * 1000)
        cpu.append(thread_cpu(pid) * 1000 - worked)
        found += len(page.jobs)
        after = page.next
        if after is None:
            break
    return took, cpu, found


def measure(dsn: str, shown: str) -> None:
    """Print the figures of a loaded database."""
    every, worked = [], []
    with psycopg.connect(dsn, autocommit=True) as conn:
        for given in _FILTERS.values():  # make the plans
            _JOBS.list(**given, max_jobs=1, max_looked=1000).sync(conn)
        for name, given in _FILTERS.items():
            took, cpu, found = _pages(conn, given)
            every += took
            worked += cpu
            note = f"{len(took)} pages, {found} jobs; the first {cpu[0]:.1f} ms, p50 {median(cpu):.1f} ms"
            plain("lists", f"cpu_p95_ms_{name}", percentile(cpu, 0.95), "ms", note).show()
    note = f"{len(every)} pages of {len(_FILTERS)} filters; {shown}"
    at_most("lists", "cpu_p95_ms", percentile(worked, 0.95), "ms", 100, note).show()
    plain("lists", "wall_p95_ms", percentile(every, 0.95), "ms", f"p50 {median(every):.1f} ms").show()


def run() -> None:
    """Load, and print the figures."""
    done, line, others = (
        max(least, int(size * SCALE)) for size, least in ((10_000_000, 10_000), (1_000_000, 5_000), (10_000, 500))
    )
    with server() as running, database(running) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("select tallybook._lane('default', 2, '')")
            start_worker(conn, ["default"])
            _fill(conn, done, line, others)
        vacuum(dsn)
        measure(dsn, f"{done:,} jobs of history, {line:,} in line")
