"""The cost of roles: enqueue, claim, claimed_jobs and complete_many with the owner's rights and a fixed search_path.

Two databases of one server, one without and one with roles, are called in turns, so that other load on the machine hits
both. A third and a fourth measure the parts of it: search_path alone, and SECURITY DEFINER alone.
"""

from __future__ import annotations

import random
import secrets
import time
import uuid
from contextlib import ExitStack
from typing import Any, LiteralString

import psycopg
from psycopg import sql

from bench.figures import SCALE, at_most, median, plain
from bench.server import database, server
from tallybook._db import roles

_ENQUEUE: LiteralString = """select tallybook.enqueue('default', 'noop', '{"n": 1}')"""
_START: LiteralString = "select tallybook.worker_start('bench', '{default}', '{noop}')"
_CLAIM: LiteralString = "select jobs from tallybook.claim(%s, '{default}', '{10}', %s::uuid, durable => false)"
_LEASED: LiteralString = "select job_id, attempt, args::text from tallybook.claimed_jobs(%s::uuid)"
_COMPLETE: LiteralString = "select tallybook.complete_many(%s::uuid[], %s::bigint[], %s::int[])"
_ALTER: LiteralString = "alter function {} {}"
_KINDS = ("plain", "roles", "path", "definer")
_WHAT = ("enqueue", "claim", "claimed_jobs", "complete_many")


class _Side:
    def __init__(self, conn: psycopg.Connection[Any], kind: str, prefix: str) -> None:
        self._conn = conn
        self.seconds: dict[str, list[float]] = {what: [] for what in _WHAT}
        if kind == "roles":
            roles.create(conn, prefix)
        elif kind != "plain":
            how = "set search_path = pg_catalog, pg_temp" if kind == "path" else "security definer"
            for (call,) in conn.execute(
                "select p.oid::regprocedure::text from pg_proc p"
                " join tallybook._rights() r on r.name = p.proname and r.kind = 'definer'"
                " where p.pronamespace = 'tallybook'::regnamespace"
            ).fetchall():
                conn.execute(sql.SQL(_ALTER).format(sql.SQL(call), sql.SQL(how)))
        conn.execute("set synchronous_commit = off")  # measure the server's CPU, not its disk
        row = conn.execute(_START).fetchone()
        self._worker = row[0] if row else 0

    def _timed(self, what: str, query: LiteralString, *params: object) -> list[tuple[Any, ...]]:
        start = time.perf_counter()
        rows = self._conn.execute(query, params, prepare=True).fetchall()
        self.seconds[what].append(time.perf_counter() - start)
        return rows

    def turn(self) -> None:
        """Run ten jobs, from their enqueue to their end."""
        for _ in range(10):
            self._timed("enqueue", _ENQUEUE)
        lease = uuid.uuid4()
        self._timed("claim", _CLAIM, self._worker, lease)
        jobs = self._timed("claimed_jobs", _LEASED, lease)
        self._timed("complete_many", _COMPLETE, [lease] * len(jobs), [job[0] for job in jobs], [job[1] for job in jobs])


def run() -> None:
    """Print the ratios."""
    prefix, turns = f"bench_{secrets.token_hex(4)}_", max(30, int(2000 * SCALE))
    with server() as running, ExitStack() as stack:
        sides = {}
        for kind in _KINDS:
            conn = stack.enter_context(psycopg.connect(stack.enter_context(database(running)), autocommit=True))
            stack.callback(conn.close)
            sides[kind] = _Side(conn, kind, prefix)
        order = list(sides.values())
        for _ in range(turns):
            random.shuffle(order)  # the first one finds colder caches
            for side in order:
                side.turn()
        base = {what: median(sides["plain"].seconds[what]) for what in _WHAT}
        for what in _WHAT:
            found = median(sides["roles"].seconds[what])
            limit = f"{found * 1e6:.0f} us against {base[what] * 1e6:.0f} us"
            at_most("roles", f"{what}_with_roles", found / base[what], "times", 1.25, limit).show()
            for kind in ("path", "definer"):
                plain("roles", f"{what}_{kind}", median(sides[kind].seconds[what]) / base[what], "times").show()
