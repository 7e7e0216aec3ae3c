"""Every page of the dashboard with 10 million jobs of history and 1 million in line, over HTTP from `tallybook web`.

The history, the line and jobs of all other states are loaded as for `why`, and besides a thousand queues, a million
subjects, the audit and some schedules. Every route that can be read is requested 60 times, in random order over one
connection. The parameters come from the data, with filters that match often, rarely and never, and with later pages.
The figure is the slowest page's p95.

Then 200 viewers open the live pages at once, and the server is asked which of its sessions do anything for them. The
doctor's session, which checks once a minute, does not count.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import psycopg
from starlette.routing import Route

from bench.figures import SCALE, at_most, median, percentile, plain, say
from bench.server import database, server, start_worker, vacuum
from bench.upsert import _THERE
from bench.why import _load
from tallybook import App
from tallybook.web import dashboard

_HISTORY, _LINE, _OTHERS, _SUBJECTS, _QUEUES = 10_000_000, 1_000_000, 10_000, 1_000_000, 1_000
_TIMES = 60
_VIEWERS, _SECONDS = 200, 10
_NO_PAGES = {"/events", "/login", "/metrics", "/healthz", "/readyz"}
STATES = ("scheduled", "retrying", "waiting", "available", "running", "completed", "cancelled", "dead")
_LONG = "a-name-without-any-space-" * 2


def _furnish(conn: psycopg.Connection[Any]) -> None:
    """Load everything besides jobs."""
    conn.execute(_THERE, {"task": "noop", "subjects": 2 * max(2_000, int(_SUBJECTS * SCALE))})
    for first in range(0, _QUEUES, 100):
        conn.execute(
            "select tallybook.enqueue('q' || n || %s, 'noop', '{}') from generate_series(%s::int, %s::int) n",
            (_LONG[:40], first, first + 99),
        )
    conn.execute(
        "select tallybook.audit_add('ada', 'web', 'queue.pause', '{\"queue\": \"q1\"}') from generate_series(1, %s)",
        (max(1000, int(100_000 * SCALE)),),
    )
    app = App("bench")

    @app.task(name="noop")
    async def noop() -> None: ...

    for n in range(200):
        app.schedules.set(f"nightly-{n}", noop.job(), cron="0 3 * * *").sync(conn)
    conn.execute("select tallybook.enqueue('default', 'rare', '{\"to\": \"x\"}')")


def addresses(jobs: dict[str, list[int]], worker: int, cursor: str) -> dict[str, list[str]]:
    """Return the addresses to request for each route."""
    queue, rare = f"q7{_LONG[:40]}", "nothing-has-this-name"
    tabs = {"retry": "dead", "cancel": "available", "drop": "dead"}
    return {
        "/": ["/", "/?flow=7d&level=7d"],
        "/series": ["/series?span=15m", "/series?span=3h", "/series?span=7d", "/series?span=7d&queue=default"],
        "/queues": ["/queues", "/queues?q=q99&order=name", "/queues?from=900&order=oldest", f"/queues?q={rare}"],
        "/queue": ["/queue?name=default", f"/queue?name={queue}"],
        "/jobs": [
            "/jobs", "/jobs?queue=default", f"/jobs?queue={queue}", "/jobs?task=rare", f"/jobs?task={rare}",
            "/jobs?error=no", f"/jobs?error={rare}", "/jobs?since=1+h", "/jobs?before=2000-01-01",
            "/jobs?link=customer%3D42", "/jobs?unserved=1", *[f"/jobs?state={state}" for state in STATES],
            f"/jobs?state=available&task={rare}", "/jobs?state=completed&error=no",
            "/jobs?state=completed&queue=default&task=rare",
        ],
        "/jobs/preview": [f"/jobs/preview?verb={verb}&state={state}" for verb, state in tabs.items()]
        + [f"/jobs/preview?verb=cancel&task={rare}", "/jobs/preview?verb=cancel&task=rare"],
        "/dead": ["/dead", "/dead?queue=default", "/dead?reason=killed", "/dead?text=no",
                  f"/dead?text={rare}", f"/dead?task={rare}"],
        "/jobs/preview/further": [
            f"/jobs/preview/further?verb=cancel&state=available&after={cursor}&found=available:250&looks=1",
            f"/jobs/preview/further?verb=cancel&task={rare}&state=available&after={cursor}&looks=1",
        ],
        "/dead/preview/further": ["/dead/preview/further?verb=drop&found=dead:250&looks=1"],
        "/maintenance/findings": ["/maintenance/findings"],
        "/dead/preview": ["/dead/preview?verb=retry", f"/dead/preview?verb=drop&text={rare}"],
        "/job/{id}": [f"/job/{ids[len(ids) // 2]}" for ids in jobs.values()],
        "/trace": ["/trace", "/trace?link=customer%3D42", "/trace?subject=asset:42&task=noop",
                   f"/trace?unique={rare}&task=noop"],
        "/schedules": ["/schedules", "/schedules?q=nightly-19"],
        "/schedule": ["/schedule?name=nightly-1"],
        "/subjects": ["/subjects", "/subjects?task=noop", "/subjects?q=asset:1999", f"/subjects?q={rare}",
                      "/subjects?state=dead"],
        "/subject": ["/subject?task=noop&name=asset:42"],
        "/workers": ["/workers"],
        "/worker": [f"/worker?id={worker}"],
        "/limits": ["/limits"],
        "/providers": ["/providers"],
        "/maintenance": ["/maintenance"],
        "/audit": ["/audit", "/audit?actor=ada", f"/audit?actor={rare}", "/audit?action=queue.pause"],
    }  # fmt: skip


@contextmanager
def serving(dsn: str, *words: str, **environment: str) -> Iterator[str]:
    """Run `tallybook web` in its own process; yields its address."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TALLYBOOK_", "PG"))}
    command = [sys.executable, "-m", "tallybook", "web", "--operate", "--port", "0", "--dsn", dsn, *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**clean, "PYTHONUNBUFFERED": "1", **environment}
    ) as running:
        try:
            assert running.stdout is not None
            found = re.search(r"http://\S+:\d+", running.stdout.readline())
            assert found, "the dashboard did not start"
            yield found[0]
        finally:
            running.terminate()


def _measure(base: str, asked: dict[str, list[str]], times: int) -> tuple[dict[str, list[float]], list[str]]:
    """Return the milliseconds from request to end of answer, by address; and the addresses that failed."""
    took: dict[str, list[float]] = {path: [] for paths in asked.values() for path in paths}
    order = [path for path in took for _ in range(times)]
    random.Random(7).shuffle(order)
    failed: dict[str, int] = {}
    with httpx2.Client(base_url=base, timeout=60) as http:
        for path in took:  # make the sessions and plans
            http.get(path)
        for path in order:
            began = time.perf_counter()
            answer = http.get(path)
            took[path].append((time.perf_counter() - began) * 1000)
            if answer.status_code != 200:
                failed[path] = answer.status_code
    return took, [f"{path}: {status}" for path, status in failed.items()]


_BUSY = """\
select pid, query_start from pg_stat_activity
 where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'
   and application_name <> 'tallybook web doctor'"""
_DONE = "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"


async def _viewers(base: str, dsn: str, job: int) -> tuple[int, float, int]:
    """Return the most sessions active within one second, transactions per second, and viewers with news."""
    topics = ("topic=overview&topic=point", "topic=workers", f"topic=job:{job}")
    heard: set[int] = set()

    async def look(http: httpx2.AsyncClient, n: int) -> None:
        async with http.stream("GET", f"/events?{topics[n % len(topics)]}") as stream:
            assert stream.status_code == 200, stream.status_code
            async for chunk in stream.aiter_text():
                if "data:" in chunk:
                    heard.add(n)

    limits = httpx2.Limits(max_connections=_VIEWERS + 10)
    async with (
        httpx2.AsyncClient(base_url=base, timeout=60, limits=limits) as http,
        await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn,
    ):
        looking = [asyncio.create_task(look(http, n)) for n in range(_VIEWERS)]
        until = time.perf_counter() + 60
        while len(heard) < _VIEWERS:
            await asyncio.sleep(0.1)
            assert time.perf_counter() < until, f"only {len(heard)} viewers got news"
            if failed := [one for one in looking if one.done()]:
                failed[0].result()
        before, began = await _count(conn), time.perf_counter()
        seen: dict[int, Any] = {}
        most = 0
        for _ in range(_SECONDS):
            busy, until = set[int](), time.perf_counter() + 1
            while time.perf_counter() < until:
                for pid, at in await (await conn.execute(_BUSY)).fetchall():
                    if pid in seen and seen[pid] != at:
                        busy.add(pid)
                    seen[pid] = at
                await asyncio.sleep(0.05)
            most = max(most, len(busy))
        rate = (await _count(conn) - before) / (time.perf_counter() - began)
        for one in looking:
            one.cancel()
        await asyncio.gather(*looking, return_exceptions=True)
    return most, rate, len(heard)


async def _count(conn: psycopg.AsyncConnection[Any]) -> int:
    row = await (await conn.execute(_DONE)).fetchone()
    assert row is not None
    return int(row[0])


def run() -> None:
    """Print the figures."""
    done, line, others = (
        max(least, int(size * SCALE)) for size, least in ((_HISTORY, 10_000), (_LINE, 5_000), (_OTHERS, 500))
    )
    with server() as running, database(running) as dsn:
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("select tallybook._lane('default', 2, '')")
            jobs = {name: ids for name, ids in _load(conn, done, line, others).items() if name != "unknown"}
            _furnish(conn)
            worker = start_worker(conn, ["default"])
            # The benchmarks' workers have no end, but a page shows times.
            conn.execute("update tallybook.worker set seen_at = clock_timestamp(), started_at = clock_timestamp()")
            conn.execute("select tallybook.recount()")
            found = conn.execute(
                "select cursor from tallybook.jobs(states => '{available}', max_jobs => 250) where id is null"
            )
            (cursor,) = found.fetchone() or ("",)
        vacuum(dsn)
        say("  pages: all is loaded")
        asked = addresses(jobs, worker, cursor)
        there = [
            one.path
            for one in dashboard(App("bench"), dsn=dsn).routes
            if isinstance(one, Route) and "GET" in (one.methods or ())
        ]
        assert not (left := set(there) - set(asked) - _NO_PAGES), f"no address for {left}"
        asked = {path: found for path, found in asked.items() if path in there}
        with serving(dsn) as base:
            took, failed = _measure(base, asked, max(5, int(_TIMES * min(1.0, SCALE * 4))))
            say("  pages: all have answered; now the viewers")
            most, rate, heard = asyncio.run(_viewers(base, dsn, jobs["scheduled"][0]))
    for one in failed:
        say(f"  pages: not answered: {one}")
    slow = sorted(took.items(), key=lambda one: -percentile(one[1], 0.95))
    for path, times in slow[:12]:
        say(f"  pages: {percentile(times, 0.95):8.1f} ms p95 {median(times):8.1f} ms p50  {path}")
    worst, times = slow[0]
    every = [one for found in took.values() for one in found]
    size = f"{done:,} of history, {line:,} in line"
    shown = f"slowest of {len(took)} addresses of {len(asked)} pages: {worst}; all: p50 {median(every):.1f} ms, {size}"
    at_most("pages", "server_p95_ms", percentile(times, 0.95), "ms", 100, shown).show()
    plain("pages", "p95_ms_all", percentile(every, 0.95), "ms", f"{len(every)} requests").show()
    at_most(
        "pages", "pages_failed", len(failed), "addresses", 0, "answered with an error, for example after 3 s"
    ).show()
    at_most("pages", "pollers", most, "sessions", 1, f"active within a second for {heard} viewers").show()
    plain("pages", "transactions_per_s", rate, "/s", "of the whole database meanwhile").show()
