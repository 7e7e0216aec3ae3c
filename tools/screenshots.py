"""Take pictures of every dashboard page in a real browser, light, dark and on a phone: docs/screenshots/NAME-*.png.

Starts a server, fills a database with the jobs of a bookshop, runs a worker and `tallybook web`, and opens each page.
`python tools/screenshots.py [NAME...]` makes only these; `--list` names them. Needs Chromium; pngquant makes the files
a third as large.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import psycopg

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.chromium import PACKAGES, Browser, browser, installed
from support.cli import Command
from tallybook import App, Cancel, Context
from tallybook._db.migrate import migrate
from tallybook.embedded import temporary_server

FOLDER = Path(__file__).parents[1] / "docs" / "screenshots"
WIDE, HIGH, PHONE = 1280, 1600, (390, 844)
LARGEST = 150_000
LONG = "reports-of-the-quarter-for-customers-whose-name-goes-on-and-on"

app = App("bookshop")


@app.task(queue="mail", max_attempts=3, summary="Welcome mail to {to}")
async def send_welcome(to: str, smtp_password: str = "not shown") -> str:
    await asyncio.sleep(random.random() / 20)
    if random.random() < 0.06:
        raise ConnectionError(f"smtp.example.org: 451 try again later, recipient <{to}>")
    return "250 queued"


@app.task(queue="reports", timeout="10 min", summary="Report for {month}")
async def build_report(ctx: Context, month: str) -> dict[str, int]:
    for page in range(60):
        await ctx.progress(page / 60, f"page {page} of 60")
        await asyncio.sleep(1)
    return {"rows": 18_402}


async def import_file(path: str) -> None:
    raise ValueError(f"{path}, line 3: 'price' is not a number: '12,50 €' <b>bold</b>")


# A picture of its traceback must not show the path of this file.
import_file.__code__ = import_file.__code__.replace(co_filename="bookshop/imports.py")
import_file = app.task(queue="import", max_attempts=1)(import_file)


@app.task(queue="feeds", limits=("feed:example.org",))
async def fetch_feed(url: str) -> int:
    await asyncio.sleep(0.3)
    return 304


@app.task(queue="stock")
async def reserve(sku: str, count: int) -> Cancel | None:
    return Cancel("sold out") if count > 8 else None


@app.task(queue="mail", schedule="*/5 * * * *", tz="Europe/Berlin")
async def digest() -> None: ...


@app.task(queue="maintenance", schedule=timedelta(seconds=10))
async def heartbeat() -> None: ...


app.concurrency_limit("feed:example.org", 2)
app.rate_limit("smtp", 600, per="1 min", burst=20)
app.breaker("payment-provider", 5, per="1 min", open_for="30 s")


async def fill(dsn: str) -> None:
    """Enqueue a morning's work: some jobs done, some waiting, some dead."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        for n in range(400):
            await send_welcome.with_(links={"customer": n % 40}).enqueue(conn, f"customer{n}@example.org")
            await reserve.with_(links={"order": n}).enqueue(conn, f"978-0-14-{n:06}", n % 10)
        for n in range(6):
            await import_file.enqueue(conn, f"/imports/2026/prices-{n}.csv")
        for n in range(60):
            await send_welcome.with_(delay=timedelta(hours=n + 1)).enqueue(conn, f"later{n}@example.org")
        for n in range(25):
            url = f"https://example.org/feeds/{n}/catalogue.xml"
            await fetch_feed.subject(url).push(url=url).on(conn)
        app.dsn = dsn
        await app.drain(queues={"mail": 20, "stock": 20, "import": 5, "feeds": 4})
        for month in ("2026-08", "2026-09", "2026-10"):
            await build_report.with_(unique=f"report:{month}", links={"customer": 7}).enqueue(conn, month)
        first = await build_report.with_(queue=LONG, delay="3 h").enqueue(conn, "2026-11")
        await send_welcome.with_(after=first, queue=LONG).enqueue(conn, "ada@example.org")
        for n in range(40):
            await send_welcome.with_(queue="newsletter").enqueue(conn, f"reader{n}@example.org")
        await app.queues.pause("newsletter", by="ada").on(conn)
        await app.schedules.set(
            "stock-count", reserve.job("978-0-14-000001", 1), cron="0 3 * * mon", tz="Asia/Kolkata"
        ).on(conn)
        await app.schedules.set("prices-of-yesterday", import_file.job("/imports/daily.csv"), cron="30 5 * * *").on(
            conn
        )
        await app.schedules.pause("prices-of-yesterday", "bob").on(conn)
        await app.breakers.set("payment-provider", 5, per="1 min", open_for="30 s").on(conn)
        await app.breakers.open("payment-provider", "20 min").on(conn)
        await app.concurrency_limits.set(f"queue:{LONG}", 2).on(conn)
        for name, kind in (("acme", "market-data"), ("mailgate", "smtp"), ("warehouse", "webhook")):
            await app.providers.set(name, kind=kind, settings={"base_url": f"https://{name}.example"}, conn=conn)
        await app.providers.route("price", "acme", conn=conn)
        for actor, action, target in (
            ("ada", "queue.pause", '{"queue": "newsletter"}'),
            ("bob", "schedule.pause", '{"schedule": "prices-of-yesterday"}'),
            ("ada", "job.retry", '{"job": 412}'),
        ):
            await conn.execute("select tallybook.audit_add(%s, 'web', %s, %s::jsonb)", (actor, action, target))


def pages(dsn: str) -> dict[str, str]:
    """Return the address of each picture by name, with ids from the data."""
    with psycopg.connect(dsn, autocommit=True) as conn:

        def one(query: str) -> object:
            row = conn.execute(query.encode()).fetchone()
            return row[0] if row else ""

        dead = one("select id from tallybook.job where state = 'dead' and task = 'import_file' limit 1")
        running = one("select id from tallybook.job where state = 'running' and task = 'build_report' limit 1")
        worker = one("select id from tallybook.workers where ended_at is null limit 1")
    subject = "https%3A%2F%2Fexample.org%2Ffeeds%2F3%2Fcatalogue.xml"
    return {
        "overview": "/",
        "queues": "/queues",
        "queue": "/queue?name=mail",
        "queue-long": f"/queue?name={LONG}",
        "jobs": "/jobs?state=dead&state=scheduled",
        "jobs-preview": "/jobs/preview?verb=cancel&queue=newsletter",
        "job": f"/job/{dead}",
        "job-running": f"/job/{running}",
        "trace": "/trace?link=customer%3D7",
        "dead": "/dead",
        "dead-preview": "/dead/preview?verb=retry&queue=import",
        "schedules": "/schedules",
        "schedule": "/schedule?name=digest",
        "subjects": "/subjects",
        "subject": f"/subject?task=fetch_feed&name={subject}",
        "workers": "/workers",
        "worker": f"/worker?id={worker}",
        "limits": "/limits",
        "providers": "/providers",
        "maintenance": "/maintenance",
        "audit": "/audit",
        "empty": "/jobs?queue=nothing-here",
    }


_DRAWN = """
return document.readyState == "complete"
  && [...document.querySelectorAll(".chart")].every((one) => one.querySelector("canvas"))"""


def picture(window: Browser, base: str, address: str, path: Path, width: int, high: int) -> None:
    """Save a picture of one page once its live parts and charts have loaded."""
    window.size(width, PHONE[1] if width < 600 else 900)
    window.get(base + address)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not window.run(_DRAWN):
        time.sleep(0.1)
    time.sleep(1.5)
    height = int(window.run("return document.documentElement.scrollHeight"))
    window.size(width, min(max(height, 500), high))
    time.sleep(0.3)
    window.driver.save_screenshot(str(path))
    slim(path)
    status = window.run("return performance.getEntriesByType('navigation')[0].responseStatus")
    complaints = window.complaints()
    size = path.stat().st_size
    bad = "  TOO LARGE" if size > LARGEST else ""
    print(f"{path.name:34} {size // 1000:4} kB  {status}{bad}  {' '.join(complaints)}", flush=True)


def slim(path: Path) -> None:
    """Compress a picture with the tools that are installed; it looks the same."""
    for command in (
        ["pngquant", "--force", "--skip-if-larger", "--output", str(path), str(path)],
        ["optipng", "-quiet", "-o2", str(path)],
    ):
        try:
            subprocess.run(command, check=False)
        except FileNotFoundError:
            continue


_RUNS = "select 1 from tallybook.job where state = 'running' limit 1"


@contextmanager
def running(stack: ExitStack) -> Iterator[tuple[str, str, Command]]:
    """Start a server, a worker and a dashboard; yield the dashboard's address, the DSN and the worker."""
    server = stack.enter_context(temporary_server(18, settings={"fsync": "on", "full_page_writes": "on"}))
    dsn = server.create_database("bookshop")
    with psycopg.connect(dsn, autocommit=True) as conn:
        migrate(conn)
    asyncio.run(fill(dsn))
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    tools = str(Path(__file__).parent)
    words = (
        "worker",
        "-A",
        "screenshots:app",
        "--queues",
        "mail=10,reports=2,feeds=2,maintenance=1",
        "--name",
        "web-1:4711",
    )
    worker = stack.enter_context(Command(folder, *words, dsn=dsn, PYTHONPATH=tools))
    web = stack.enter_context(
        Command(folder, "web", "-A", "screenshots:app", "--operate", "--port", "0", dsn=dsn, PYTHONPATH=tools)
    )
    web.says("the dashboard is at ")
    found = re.search(r"http://\S+:\d+", web.output)
    assert found
    with psycopg.connect(dsn, autocommit=True) as conn:
        until = time.monotonic() + 60
        while (
            time.monotonic() < until
            and not conn.execute("select 1 from tallybook.job where state = 'running' limit 1").fetchone()
        ):
            time.sleep(0.2)
    yield found[0], dsn, worker


def main() -> int:
    """Make the pictures; return 1 if the browser is not installed or a picture is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="make only these")
    parser.add_argument("--list", action="store_true", help="list the names")
    parser.add_argument("--to", type=Path, default=FOLDER, help="folder for the pictures")
    options = parser.parse_args()
    if installed() is None:
        print(f"screenshots: not installed: {PACKAGES}", file=sys.stderr)
        return 1
    options.to.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack, running(stack) as (base, dsn, _):
        every = pages(dsn)
        if options.list:
            print("\n".join([*every, "thousand"]))
            return 0
        wanted = {name: address for name, address in every.items() if name in options.names or not options.names}
        for kind, dark, width, high in (
            ("light", False, WIDE, HIGH),
            ("dark", True, WIDE, HIGH),
            ("phone", False, PHONE[0], HIGH),
        ):
            with browser(dark=dark) as window:
                for name, address in wanted.items():
                    picture(window, base, address, options.to / f"{name}-{kind}.png", width, high)
        if not options.names or "thousand" in options.names:
            with psycopg.connect(dsn, autocommit=True) as conn:
                conn.execute(
                    "select tallybook.enqueue('tenant-' || lpad(n::text, 4, '0'), 'sync', '{}')"
                    " from generate_series(1, 1000) n"
                )
            with browser() as window:
                picture(window, base, "/queues", options.to / "thousand-light.png", WIDE, HIGH)
    large = [path.name for path in options.to.glob("*.png") if path.stat().st_size > LARGEST]
    if large:
        print(f"screenshots: larger than {LARGEST // 1000} kB: {', '.join(large)}", file=sys.stderr)
    return 1 if large else 0


if __name__ == "__main__":
    sys.exit(main())
