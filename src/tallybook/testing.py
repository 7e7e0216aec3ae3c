"""Helpers for tests of programs that use Tallybook, on a real PostgreSQL.

    from tallybook.testing import assert_enqueued, drain, travel

    def test_a_registration_is_welcomed(tallybook_dsn):              # a fresh database, with Tallybook installed
        with psycopg.connect(tallybook_dsn) as conn:
            register(conn, "ada@example.org")
            assert_enqueued(conn, send_welcome, email="ada@example.org")
        travel(tallybook_dsn, timedelta(days=1))                     # makes jobs due as if a day had passed
        assert drain(app, dsn=tallybook_dsn).completed == 1

With pytest installed, the fixtures `tallybook_dsn` and `tallybook_server` are available. Without pytest, use
`fresh_databases`.
"""

import asyncio
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo
from psycopg.rows import tuple_row

from tallybook._app import App
from tallybook._db import calls
from tallybook._db.declared import Call
from tallybook._db.link import dsn_for_people
from tallybook._db.migrate import migrate
from tallybook._db.policy import unreached
from tallybook._db.source import in_loop
from tallybook._db.verb import AsyncConn, SyncConn, run, run_sync
from tallybook._model.job_info import JobInfo
from tallybook._model.payload import encode
from tallybook._task import Task
from tallybook._worker.life.drain import DrainReport
from tallybook.errors import InvalidArgument, QueueUnavailable

__all__ = [
    "DrainReport", "FreshDatabases", "assert_enqueued", "assert_enqueued_async", "assert_not_enqueued",
    "assert_not_enqueued_async", "drain", "drain_async", "fresh_databases", "travel",
]  # fmt: skip


class FreshDatabases:
    """A server for tests that gives each test a new database; made by `fresh_databases`."""

    def __init__(self, server_dsn: str) -> None:
        self._server_dsn = server_dsn
        self._template: str | None = None

    def dsn(self, dbname: str = "postgres") -> str:
        """Return the DSN of one database of this server; a URI if the server's DSN is one."""
        parts = urlsplit(self._server_dsn)
        if parts.scheme in ("postgresql", "postgres"):
            # Built by hand: urlunsplit drops the empty host of postgresql:///name?host=/run.
            query = f"?{parts.query}" if parts.query else ""
            return f"{parts.scheme}://{parts.netloc}/{quote(dbname, safe='')}{query}"
        return make_conninfo(self._server_dsn, dbname=dbname)

    @contextmanager
    def fresh(self) -> Iterator[str]:
        """Yield the DSN of a new database with Tallybook installed, and drop it at the end, even if it has connections.

        It is a copy of a template, which takes about 30 ms.

            with databases.fresh() as dsn: ...
        """
        if self._template is None:
            self._template = self._new_template()
        name = _name("test")
        self._create(name, self._template)
        try:
            yield self.dsn(name)
        finally:
            self._drop(name)

    def close(self) -> None:
        """Drop the template."""
        if self._template is not None:
            self._drop(self._template)
            self._template = None

    def _new_template(self) -> str:
        name = _name("template")
        self._create(name, "template1")
        try:
            with psycopg.connect(self.dsn(name)) as conn:
                migrate(conn)
        except BaseException:
            self._drop(name)
            raise
        return name

    def _create(self, name: str, template: str) -> None:
        self._execute(sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template)))

    def _drop(self, name: str) -> None:
        self._execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))

    def _execute(self, statement: sql.Composed) -> None:
        try:
            conn = psycopg.connect(self._server_dsn, autocommit=True)
        except psycopg.OperationalError as error:
            # Without the cause: pytest would print its frames, whose arguments contain the password.
            raise QueueUnavailable(dsn_for_people(self._server_dsn), unreached(error)) from None
        with conn:
            conn.execute(statement)


def _name(kind: str) -> str:
    return f"tallybook_{kind}_{secrets.token_hex(6)}"


@contextmanager
def fresh_databases(dsn: str | None = None) -> Iterator[FreshDatabases]:
    """Yield a PostgreSQL for test databases: that of `dsn` or TALLYBOOK_TEST_DSN, else an embedded one.

    The embedded server starts in about a second, needs `pip install 'tallybook[embedded]'`, and is removed at the end.
    On an existing server the role must be allowed to create databases; only databases created here, named
    tallybook_test_... and tallybook_template_..., are changed. Raises EmbeddedUnavailable if there is no server.

        with fresh_databases() as databases, databases.fresh() as dsn: ...
    """
    given = dsn or os.environ.get("TALLYBOOK_TEST_DSN")
    if given:
        with closing(FreshDatabases(given)) as databases:
            yield databases
        return
    from tallybook.embedded import temporary_server

    with temporary_server() as server:
        yield FreshDatabases(server.dsn())


def drain(
    app: App,
    *,
    dsn: str | None = None,
    queues: Mapping[str, int] | Iterable[str] | None = None,
    max_jobs: int | None = None,
    max_seconds: float | timedelta | None = None,
    raise_on_failure: bool = False,
) -> DrainReport:
    """Run all due jobs and return the counts; never waits for later jobs.

    Runs `app.drain` in a new event loop; inside a coroutine use `await drain_async(...)`. `queues` defaults to those
    of the app's tasks and all that have jobs. Until it returns, `app.dsn` is `dsn`, so that handlers that enqueue
    through the App use the same database. A handler's exception becomes its job's last_error; with `raise_on_failure`
    the first one is raised at the end, as JobFailed.

        assert drain(app, dsn=tallybook_dsn).completed == 1
    """
    if in_loop():
        raise RuntimeError("drain() was called in a running event loop: write `await drain_async(...)` there")
    options: dict[str, Any] = {"queues": queues, "max_jobs": max_jobs, "max_seconds": max_seconds}
    return asyncio.run(drain_async(app, dsn=dsn, raise_on_failure=raise_on_failure, **options))


async def drain_async(
    app: App,
    *,
    dsn: str | None = None,
    queues: Mapping[str, int] | Iterable[str] | None = None,
    max_jobs: int | None = None,
    max_seconds: float | timedelta | None = None,
    raise_on_failure: bool = False,
) -> DrainReport:
    """Run all due jobs; `drain` for coroutines.

    report = await drain_async(app, dsn=tallybook_dsn)
    """
    before = app.dsn
    app.dsn = dsn or before
    try:
        if queues is None:
            queues = await asyncio.to_thread(_queues, app)
        return await app.drain(
            dsn=app.conninfo(), queues=queues, max_jobs=max_jobs, max_seconds=max_seconds,
            raise_on_failure=raise_on_failure,
        )  # fmt: skip
    finally:
        app.dsn = before


def _queues(app: App) -> list[str]:
    with psycopg.connect(app.conninfo(), autocommit=True) as conn:
        used = {str(row[0]) for row in conn.execute("select distinct queue from tallybook.lane")}
    return sorted(used | {task.queue for task in app.tasks.values()} | {"default"})


def assert_enqueued(conn: SyncConn, task: Task[..., Any] | str, /, **args: object) -> JobInfo:
    """Check that a job of this task waits or runs, with at least these args; return the newest such job.

    `conn` is a connection as for `enqueue_sync`, which also finds uncommitted jobs of its transaction, or a DSN. The
    job must have these `args` and may have others. Scheduled, retrying, waiting, available and running jobs count. The
    AssertionError shows the existing jobs.

        job = assert_enqueued(conn, send_welcome, user_id=42)
        assert job.queue == "mail"
    """
    call = _find(task, args)
    with _opened(conn) as own:
        return run_sync(own, calls.get(_matching(run_sync(own, call), task, args)))


def assert_not_enqueued(conn: SyncConn, task: Task[..., Any] | str, /, **args: object) -> None:
    """Check that no job of this task waits or runs with these args; see assert_enqueued.

    assert_not_enqueued(conn, send_welcome, user_id=42)
    """
    call = _find(task, args)
    with _opened(conn) as own:
        _absent(run_sync(own, call), task, args)


async def assert_enqueued_async(conn: AsyncConn, task: Task[..., Any] | str, /, **args: object) -> JobInfo:
    """Check that a job of this task waits or runs; `assert_enqueued` for an async connection.

    job = await assert_enqueued_async(conn, send_welcome, user_id=42)
    """
    found = await run(conn, _find(task, args))
    return await run(conn, calls.get(_matching(found, task, args)))


async def assert_not_enqueued_async(conn: AsyncConn, task: Task[..., Any] | str, /, **args: object) -> None:
    """Check that no job of this task waits or runs with these args; see assert_enqueued_async.

    await assert_not_enqueued_async(conn, send_welcome, user_id=42)
    """
    _absent(await run(conn, _find(task, args)), task, args)


def travel(conn: psycopg.Connection[Any] | str, by: timedelta) -> int:
    """Make scheduled work due as if this time had passed; return the number of jobs moved.

    The clocks do not change. It moves the run_at of scheduled and retrying jobs, the time that an available job was
    pushed to, the expires_at of open jobs, the next tick of schedules that a worker or a drain has registered, and the
    past calls and failures of rate limits and breakers. After travel(..., timedelta(hours=1)) all work of the next
    hour is due, in the same order. A schedule is due once, however many of its ticks lie in that time, and its tick is
    now (with jitter that reaches back to a tick, at that tick). A rate limit had no calls in that hour. It runs
    nothing: call `drain`, or a worker starts within seconds. `conn` is a psycopg connection, whose transaction is
    used, or a DSN. Raises InvalidArgument for a negative time.

        travel(tallybook_dsn, timedelta(hours=1))
    """
    if by < timedelta(0):
        raise InvalidArgument(f"cannot travel by {by}", hint="Time travels forwards only")
    if isinstance(conn, str):
        with psycopg.connect(conn, autocommit=True) as own:
            return travel(own, by)
    row = conn.cursor(row_factory=tuple_row).execute(_TRAVEL, {"by": by}).fetchone()
    return int(row[0]) if row else 0


# The wake-up is for a worker that sleeps until the next job is due.
_TRAVEL = """\
with moved as (
  update tallybook.scheduled set run_at = run_at - %(by)s, expires_at = expires_at - %(by)s
   where isfinite(run_at) returning 1
), held as (
  update tallybook.waiting set run_at = run_at - %(by)s, expires_at = expires_at - %(by)s
), pushed as (
  update tallybook.amendment set run_at = run_at - %(by)s where run_at is not null
), in_line as (
  update tallybook.entry e set expires_at = e.expires_at - %(by)s
   where e.expires_at is not null and not exists (
     select from tallybook.outcome o where o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq)
), ticking as (
  update tallybook.schedule s
     set tick = case when s.due_at - %(by)s <= n.now then n.now - s.jitter else s.tick - %(by)s end,
         due_at = greatest(s.due_at - %(by)s, n.now)
    from (select clock_timestamp() as now) n where s.tick is not null and s.due_at is not null
), called as (
  update tallybook.rate_call set called_at = called_at - %(by)s
), limited as (
  update tallybook.rate_state r
     set next_at = r.next_at - %(by)s, front_at = r.front_at - %(by)s, pushed_to = r.pushed_to - %(by)s,
         promised_at = r.promised_at - %(by)s, paced_to = r.paced_to - %(by)s
    from (select name from tallybook.rate_state order by name for update) k where k.name = r.name
), broken as (
  update tallybook.breaker_state b
     set failed_at = array(select f.at - %(by)s from unnest(b.failed_at) with ordinality f(at, n) order by f.n),
         changed_at = b.changed_at - %(by)s, open_until = b.open_until - %(by)s
)
select count(*), tallybook._wake(' promote'), tallybook._wake(' schedule') from moved"""

# Equality of JSON: 1 equals 1.0, but not true.
_FIND = """\
select cast(json_build_object(
  'matching', (
    select max(j.id) from tallybook.job j
     where j.task = %(task)s and j.state in ('scheduled', 'retrying', 'waiting', 'available', 'running')
       and not exists (select from jsonb_each(cast(cast(%(args)s as text) as jsonb)) w
                        where not coalesce(j.args -> w.key = w.value, false))),
  'there', (
    select coalesce(json_agg(t order by t.id), '[]') from (
      select j.id, j.task, j.args, j.state, j.queue from tallybook.job j
       order by j.task = %(task)s desc, j.id desc limit 10) t)) as text)"""


def _find(task: Task[..., Any] | str, args: dict[str, object]) -> Call[dict[str, Any]]:
    if isinstance(task, Task):
        unknown = [] if task.args.is_open else sorted(args.keys() - task.args.names)
        if unknown:  # or a typo would make assert_not_enqueued always pass
            known = ", ".join(sorted(task.args.names)) or "none"
            raise InvalidArgument(f"task {task.name!r} has no argument {unknown[0]!r}", hint=f"It has {known}")
    elif not isinstance(task, str):
        text = f"expected a task, not an object of type {type(task).__name__}"
        raise InvalidArgument(text, hint="Pass the task made by @app.task, or its name")
    name = task if isinstance(task, str) else task.name
    return Call("job", _FIND, {"task": name, "args": encode(args, task=name)}, json.loads)


def _opened(conn: SyncConn) -> AbstractContextManager[Any]:
    # Any string that is not a DSN is a Django alias.
    is_dsn = isinstance(conn, str) and ("=" in conn or "://" in conn)
    return psycopg.connect(conn, autocommit=True) if isinstance(conn, str) and is_dsn else nullcontext(conn)


def _matching(found: dict[str, Any], task: Task[..., Any] | str, args: dict[str, object]) -> int:
    if found["matching"] is None:
        raise AssertionError(f"no job {_shown(task, args)} is enqueued; {_listed(found)}")
    return int(found["matching"])


def _absent(found: dict[str, Any], task: Task[..., Any] | str, args: dict[str, object]) -> None:
    if found["matching"] is not None:
        raise AssertionError(f"job {found['matching']}, {_shown(task, args)}, is enqueued; {_listed(found)}")


def _shown(task: Task[..., Any] | str, args: dict[str, object]) -> str:
    name = task if isinstance(task, str) else task.name
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})"


def _listed(found: dict[str, Any]) -> str:
    there = found["there"]
    if not there:
        return "there are no jobs at all"
    lines = [f"  {job['id']} {_shown(job['task'], job['args'])} {job['state']} in {job['queue']}" for job in there]
    return "\n".join([f"there {'is' if len(lines) == 1 else 'are'}:", *lines])
