"""A user's type checker on right and wrong calls of a task."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_right_calls_pass_and_wrong_calls_fail(tmp_path: Path, checker: str) -> None:
    """S4-06: a call is checked against its task's signature without the Context; right ones pass in all three forms."""
    right = """
import asyncio
from datetime import timedelta
from typing import Any
import psycopg
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from tallybook import App, Constant, Context, DeadLetter, Drop, Job, JobCall, Reschedule
from tallybook.extra.tasks import email, http, webhook
from tallybook import Subject, SubjectCall, SubjectInfo, SubjectReport, Task
from starlette.requests import Request
from tallybook.web import User, dashboard

app = App("shop", dsn="host=db")

async def who(request: Request) -> User | None: return User("ada")

pages = dashboard(app, authenticate=who)

@app.task
async def send(user_id: int, *, lang: str = "en") -> str: return lang

@app.task(queue="mail", retry=Constant(timedelta(seconds=1)), max_attempts=3, unique=("order_id",))
def charge(order_id: int) -> float: return 1.0

def by_error(failures: int, error: BaseException) -> timedelta | None: return None

app.retry_policy("patient", Constant(timedelta(minutes=1)))
app.retry_policy("ours", by_error)

@app.task(retry="patient", no_retry=(ValueError, KeyError))
async def named(n: int) -> None: ...

@app.task(retry=lambda failures: timedelta(seconds=failures), no_retry=ValueError)
async def by_function() -> None: ...

@app.task(retry=by_error)
def by_its_error() -> None: ...

@app.task
async def sync_orders(ctx: Context, since: str) -> None: ...

@app.task(queue="mail")
def report(ctx: Context) -> bytes: return b""

@app.task
async def sweep() -> None: ...

@app.task(atomic=True)
async def pay(tx: psycopg.AsyncConnection[Any], invoice_id: int, *, note: str = "") -> str: return note

@app.task(atomic=True, queue="mail")
def book(tx: Session, ctx: Context, invoice_id: int) -> int: return 1

@app.task(atomic=True)
async def close(tx: AsyncSession) -> None: ...

async def use_atomic(
    conn: psycopg.AsyncConnection[Any], plain: Session, ctx: Context, tx: psycopg.AsyncConnection[Any], session: Session
) -> None:
    job: Job = await pay.enqueue(conn, 42, note="x")
    job = book.with_(priority=1).enqueue_sync(plain, 42)
    job = await close.enqueue(conn)
    text: str = await pay(tx, 42)
    number: int = book(session, ctx, 42)
    one: Task[..., Any] = pay
    await ctx.complete(conn)
    ctx.complete_sync(plain)
    await ctx.end(conn, Reschedule("+1 week"))
    ctx.end_sync(plain, Drop())

async def use(conn: psycopg.AsyncConnection[Any], plain: psycopg.Connection[Any], ctx: Context) -> None:
    job: Job = await send.enqueue(conn, 42, lang="de")
    job = send.enqueue_sync(plain, user_id=42)
    job = await send.with_(delay="5 min", unique="u:42").enqueue(conn, 42)
    job = await sync_orders.enqueue(app, "2030")
    job = report.enqueue_sync("default")
    job = await sweep.enqueue(conn)
    call: JobCall = charge.job(7)
    jobs: list[Job] = await app.enqueue_many(conn, [send.job(1), call, report.with_(priority=0).job()])
    text: str = await send(42)
    number: float = charge(7)
    await sync_orders(ctx, "2030")
    data: bytes = report(ctx)
    state: str = await app.cancel(job, "why").on(conn)
    known: dict[str, Task[..., Any]] = app.tasks
    one: Task[..., Any] = report
    ids: list[int] = [job.id for job in jobs]
    paused: bool = await send.app.queues.pause("mail")
    same: App = pay.app

async def use_forms(session: Session, later: AsyncSession, plain: psycopg.Connection[Any]) -> None:
    paused: bool = await app.queues.pause("mail", by="ada")
    paused = await app.queues.pause("mail").on(later)
    paused = app.queues.pause("mail").sync()
    paused = app.queues.pause("mail").sync(session)
    paused = app.queues.pause("mail").sync("default")
    both: tuple[bool, bool] = await asyncio.gather(app.queues.pause("a"), app.queues.resume("b"))
    running: asyncio.Task[bool] = asyncio.create_task(app.queues.pause("mail"))
    truncated: int = (await app.queues.truncate("mail")).cancelled
    truncated = app.queues.truncate("mail").sync(plain).cancelled
    letters: list[DeadLetter] = await app.dead.list(task="send", error="timeout")
    text: str = await app.result(await send.enqueue(app, 42))
    number: float = app.result(charge.enqueue_sync(app, 7)).sync()
    anything: int = await app.result(4711)

@app.task
async def refresh(ctx: Context, asset_id: int, *, page: int = 0) -> Reschedule | Drop | None:
    of: Subject | None = ctx.subject
    if of is None or of.iterations > 9:
        return Drop()
    return Reschedule("+1 week", args={"asset_id": asset_id, "page": page + 1})

async def use_subjects(conn: psycopg.AsyncConnection[Any], plain: psycopg.Connection[Any]) -> None:
    one = refresh.subject("asset:42")
    report: SubjectReport = await one.push(42, page=1)
    report = one.push(asset_id=42).sync(plain)
    report = await refresh.with_(delay="5 min").subject("asset:42").upsert(42).on(conn)
    report = await refresh.append(42)
    report = pay.subject("invoice:42").push(42, note="x").sync()
    call: SubjectCall = one.job(42)
    reports: list[SubjectReport] = await app.subjects.upsert_many([call, charge.subject("x").job(7)]).on(conn)
    info: SubjectInfo | None = one.get().sync()
    forgotten: str = await one.forget()

async def use_ready_made(conn: psycopg.AsyncConnection[Any], plain: psycopg.Connection[Any], ctx: Context) -> None:
    app.include(webhook, email, http)
    job: Job = await webhook.enqueue(conn, "acme", {"type": "paid"}, idempotency_key="7", headers={"X-Form": "7"})
    job = webhook.with_(queue="out").enqueue_sync(plain, provider="acme", text="{}")
    call: JobCall = email.job("mail", ["ada@example.org"], "Hello", html="<b>Hello</b>")
    call = http.job(url="https://example.org/", expect=[404])
    result: dict[str, Any] = await app.result(job)
    same: App = ctx.app
"""
    wrong = """
def wrong_forms(conn: psycopg.AsyncConnection[Any], plain: psycopg.Connection[Any], session: Session) -> None:
    app.queues.pause("mail").sync(conn)  # an async connection, without an event loop
    app.queues.pause("mail").on(plain)  # a plain one, with an event loop
    send.enqueue_sync(conn, 42)  # an async connection
    app.enqueue_many_sync(conn, [])  # an async connection
    paused: str = app.queues.pause("mail").sync(plain)  # it is a bool
    job: Job[int] = charge.enqueue_sync(session, 7)  # its result is a float
    app.dead.list(colour="red")  # unknown filter
    app.jobs.list(limit=3)  # unknown option
send.enqueue_sync(app, "42")  # wrong type
send.enqueue_sync(app)  # missing
send.enqueue_sync(app, 42, language="de")  # unknown argument
send.job(42, 43)  # too many
send.with_(delay="5 min").enqueue_sync(app, "42")  # wrong type behind with_
send.with_(colour="red")  # unknown option of a job
app.task(colour="red")  # unknown option of a task
app.task(retry=5)  # no policy
app.task(no_retry="ValueError")  # a name is no class
app.retry_policy("x", lambda failures: "5 min")  # a text is no timedelta
charge("7")  # wrong type of a plain call
sync_orders.job(object(), "2030")  # a Context is no argument of a job
report.job(1)  # nor with options given
charge.enqueue(app, order_id="7")  # wrong type by name
app.enqueue_many_sync(app, [send])  # a task is no job
send.enqueue_sync(app, 42).ident  # no such attribute
pay.job("42")  # an atomic task's arguments are checked as well
book.job(object(), 42)  # neither its transaction nor its Context is an argument
pay(object(), 42)  # a direct call needs a transaction of the right kind
app.task(atomic=True, process=True)  # it runs in the worker
send.app.colours  # no such noun
app.task(atomic=3)  # neither True nor an alias
refresh.subject(42)  # a name is a text
refresh.subject("a").push("42")  # wrong type
refresh.subject("a").upsert()  # missing
refresh.subject("a").job(42, colour="red")  # unknown argument
refresh.with_(priority=1).subject("a").push("42")  # wrong type behind with_
refresh.append("42")  # wrong type
app.subjects.upsert_many([refresh.job(42)])  # a job is no subject
webhook.job({"type": "paid"})  # a provider is a name
email.job("mail", subject="no recipient")  # missing
http.job("rates", header={})  # unknown argument
Reschedule(60)  # a bare number
Reschedule("+1 week", args=[1])  # args go by name
"""
    (tmp_path / "shop.py").write_text(right + wrong)
    command = ["mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), "shop.py"]
    if checker == "pyright":
        (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard", "include": ["shop.py"]}')
        command = ["basedpyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False, cwd=tmp_path)
    if checker == "pyright":
        found = json.loads(done.stdout)["generalDiagnostics"]
        errors = {one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"}
    else:
        errors = {int(line) for line in re.findall(r"^shop\.py:(\d+): error: ", done.stdout, re.MULTILINE)}
    start = right.count("\n") + 1
    expected = {start + n for n, line in enumerate(wrong.splitlines()) if "#" in line}
    assert errors == expected, done.stdout + done.stderr
