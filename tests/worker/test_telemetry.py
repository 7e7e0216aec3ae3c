"""A worker's metrics and probes over HTTP: what they return, and that no client disturbs the worker."""

import asyncio
import signal
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from support.cli import Command
from support.paths import ROOT
from support.roles import house
from support.samples import parsed, value
from support.waiting import wait_until
from support.workers import QUICK, SLEEPY, Jobs, ask, eventually, working
from tallybook import App, Constant, __version__
from tallybook._db import numbers as _numbers
from tallybook._db.numbers import COLUMNS, METRICS, MOST, OTHERS, Numbers, Shown, of_the_database, text
from tallybook._worker.life import telemetry
from tallybook._worker.life.worker import Worker
from tallybook._worker.settings import WorkerSettings
from tallybook.errors import ConfigError


async def page(worker: Worker, path: str, method: str = "GET") -> tuple[int, str]:
    port = await eventually(lambda: worker.telemetry.port, "it listens")
    return await asyncio.to_thread(ask, port, path, method)


async def until(worker: Worker, path: str, status: int, says: str = "") -> str:
    """Ask until this is the answer; return its text."""
    for _ in range(2000):
        found = await page(worker, path)
        if found[0] == status and says in found[1]:
            return found[1]
        await asyncio.sleep(0.01)
    raise AssertionError(f"{path} is {found}, not {status} {says}")


@pytest.mark.servers
async def test_metrics_are_what_has_happened(
    app: App, dsn: str, db: Any, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2-09: a scrape parses, has every metric, and counts completed, failed, dead and available jobs."""
    monkeypatch.setattr(_numbers, "FRESH", 0.0)  # each scrape asks the database

    @app.task
    async def good() -> None:
        pass

    @app.task(max_attempts=2, retry=Constant(timedelta(0)))
    async def bad() -> None:
        raise ValueError

    put = [good.enqueue_sync(db), good.enqueue_sync(db), bad.enqueue_sync(db)]
    good.with_(queue="other").enqueue_sync(db)
    async with working(app, dsn, "default=3", metrics_port=0, **SLEEPY) as worker:
        await jobs.ends(*put)
        await eventually(lambda: not worker.book.running, "it is idle")
        await worker.finisher.drained()  # and all its ends are counted
        status, text = await page(worker, "/metrics")
        found = parsed(text)
        ended = {end: n for end, n in worker.finisher.counts.items() if n}
    assert status == 200
    named = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert named == METRICS.keys() - {"tallybook_standby_lag_seconds"}  # only the dashboard's
    assert value(found, "tallybook_up") == 1
    assert value(found, "tallybook_worker_ready") == 1
    assert value(found, "tallybook_worker_info", name=worker.settings.name, version=__version__) == 1
    at = {"queue": "default", "task": "good"}
    assert value(found, "tallybook_jobs_ended_total", **at, end="completed") == 2
    assert value(found, "tallybook_jobs", **at, state="available") == 0
    assert value(found, "tallybook_jobs", queue="other", task="good", state="available") == 1
    assert value(found, "tallybook_attempts_followed_total", queue="default", task="bad", end="failed") == 1
    assert value(found, "tallybook_jobs_ended_total", queue="default", task="bad", end="died") == 1
    assert value(found, "tallybook_jobs", queue="default", task="bad", state="dead") == 1
    age = value(found, "tallybook_oldest_job_age_seconds", queue="other", state="available")
    assert age is not None and 0 < age < 120
    assert value(found, "tallybook_worker_slots", queue="default") == 3
    assert value(found, "tallybook_worker_slots_used", queue="default") == 0
    assert value(found, "tallybook_worker_jobs_claimed_total") == 4
    assert ended["completed"] == 2 and ended["dead"] == 1
    for end, n in ended.items():
        assert value(found, "tallybook_worker_attempts_ended_total", end=end) == n


async def test_nothing_listens_unless_asked(app: App, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default no socket and no thread; with a port one of each, on loopback, until the worker has stopped."""
    made: list[Any] = []
    create = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *args, **kw: made.append(args[0]) or create(*args, **kw))

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "tallybook-telemetry"]

    async with working(app, dsn) as worker:
        await eventually(lambda: not worker.why_not_ready(), "it runs")
        assert (made, threads(), worker.telemetry) == ([], [], None)
    async with working(app, dsn, metrics_port=0) as worker:
        await until(worker, "/readyz", 200)
        assert (made, threads()) == ([("127.0.0.1", 0)], ["tallybook-telemetry"])
    assert threads() == []
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", worker.telemetry.port))


async def test_ready_only_from_registration_to_stop(app: App, dsn: str, db: Any, jobs: Jobs) -> None:
    """/readyz is 503 with the reason before the worker is registered and while it stops; /healthz is always 200."""
    opening, running, ending = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @app.lifespan
    async def slow(ctx: Any) -> Any:
        await opening.wait()
        yield

    @app.task
    async def hold() -> None:
        running.set()
        await ending.wait()

    job = hold.enqueue_sync(db)
    async with working(app, dsn, metrics_port=0, **SLEEPY) as worker:
        await until(worker, "/readyz", 503, "not registered")
        assert (await page(worker, "/healthz"))[0] == 200
        assert value(parsed((await page(worker, "/metrics"))[1]), "tallybook_worker_ready") == 0
        opening.set()
        await until(worker, "/readyz", 200, "ok")
        await running.wait()
        worker.stop()
        assert await page(worker, "/readyz") == (503, "stopping\n")
        assert await page(worker, "/healthz") == (200, "ok\n")
        ending.set()
    assert jobs(job).state == "completed"


async def test_a_database_that_is_not_there(app: App) -> None:
    """Before the server can be reached, a scrape works: alive, not ready, tallybook_up 0, the process's own numbers."""
    worker = Worker(app, "host=127.0.0.1 port=1", WorkerSettings(metrics_port=0, **QUICK))
    life = asyncio.create_task(worker.run())
    try:
        status, text = await page(worker, "/metrics")
        assert status == 200
        found = parsed(text)
        assert value(found, "tallybook_up") == 0
        assert value(found, "tallybook_worker_slots", queue="default") == 10
        assert not [name for name, _ in found if name.startswith("tallybook_jobs")]
        await eventually(lambda: worker.maintenance_link.errors, "a failure is counted")
        assert (await page(worker, "/readyz"))[0] == 503
        assert (await page(worker, "/healthz"))[0] == 200
    finally:
        worker.stop()
        await life


@pytest.mark.direct("a pooler keeps connections to the database that is closed to others")
async def test_a_database_that_goes_and_comes_back(
    app: App, dsn: str, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the database goes away, a running worker has up 0 and is not ready; both recover by themselves."""
    monkeypatch.setattr(_numbers, "FRESH", 0.0)
    allow = "update pg_database set datallowconn = %s where datname = current_database()"
    async with working(app, dsn, metrics_port=0, poll=timedelta(seconds=0.05)) as worker:
        await until(worker, "/metrics", 200, "tallybook_up 1\n")
        await until(worker, "/readyz", 200)
        db.execute(allow, (False,))
        db.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        await until(worker, "/metrics", 200, "tallybook_up 0\n")
        await until(worker, "/readyz", 503, "no connection to the database")
        db.execute(allow, (True,))
        await until(worker, "/metrics", 200, "tallybook_up 1\n")
        await until(worker, "/readyz", 200)


@pytest.mark.direct("logs in as users of its own")
async def test_the_role_of_a_worker_may_ask(app: App, empty_dsn: str) -> None:
    """The rights of a worker are enough for the database's numbers; those of a producer are not."""
    with house(empty_dsn) as at:
        at.give()
        at.db.execute("select tallybook.enqueue('mail', 'hello')")
        found = {}
        for kind in ("worker", "producer"):
            database = telemetry.Database(at.dsn_of(at.user(kind)), kind)
            found[kind] = await database.numbers()
            await database.close()
    assert found["producer"] is None
    assert found["worker"] is not None and ("mail", "hello") in found["worker"].counts
    assert ("mail", "available") in found["worker"].ages


async def test_the_database_is_asked_once_for_many_scrapes(app: App, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All scrapes within the lifetime of one answer cost one query; without a lifetime, one each."""
    monkeypatch.setattr(_numbers, "FRESH", 3600.0)
    asked: list[Any] = []
    monkeypatch.setattr(telemetry, "ask", lambda conn, ask=telemetry.ask: asked.append(conn) or ask(conn))
    async with working(app, dsn, metrics_port=0) as worker:
        await until(worker, "/readyz", 200)
        assert worker.telemetry._databases == {}  # no scrape, no connection
        answers = await asyncio.gather(*(page(worker, "/metrics") for _ in range(10)))
        assert {status for status, _ in answers} == {200}
        assert len(asked) == 1
        monkeypatch.setattr(_numbers, "FRESH", 0.0)
        await page(worker, "/metrics")
        await page(worker, "/metrics")
        assert len(asked) == 3


async def test_a_blocked_loop_is_not_alive(
    app: App, dsn: str, db: Any, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a handler blocks the event loop, /healthz still answers: 503 with the duration; later 200."""
    monkeypatch.setattr(telemetry, "BLOCKED", 0.1)
    blocking, release, answers = threading.Event(), threading.Event(), []

    @app.task
    async def block() -> None:
        blocking.set()
        release.wait(30)

    async with working(app, dsn, metrics_port=0, **SLEEPY) as worker:
        await until(worker, "/readyz", 200)
        port = worker.telemetry.port

        def look() -> None:
            try:
                blocking.wait(30)
                wait_until(lambda: ask(port, "/healthz")[0] == 503, "it is not alive")
                answers.extend([ask(port, "/healthz"), ask(port, "/readyz"), ask(port, "/metrics")])
            finally:
                release.set()

        looking = threading.Thread(target=look)
        looking.start()
        job = block.enqueue_sync(db)
        await jobs.ends(job)
        await asyncio.to_thread(looking.join)
        await until(worker, "/healthz", 200)
    assert [status for status, _ in answers] == [503, 503, 200]
    assert "has not turned for" in answers[0][1]
    lag = value(parsed(answers[2][1]), "tallybook_worker_loop_lag_seconds")
    assert lag is not None and lag > 0.1


async def test_no_node_is_ready_while_the_loop_is_blocked(app: App, dsn: str) -> None:
    """While the event loop is blocked, tallybook_worker_ready is 0 for each node, as /readyz is 503."""
    async with working(app, dsn) as worker:
        await eventually(lambda: not worker.why_not_ready(), "it runs")
        endpoint = telemetry.Telemetry(worker.settings, dsn, nodes=lambda: {"north": (dsn, worker)})
        ready = [value(parsed(await endpoint._metrics()), "tallybook_worker_ready", node="north")]
        endpoint._asked = time.monotonic() - 2 * telemetry.BLOCKED
        ready.append(value(parsed(await endpoint._metrics()), "tallybook_worker_ready", node="north"))
        await endpoint._databases["north"][1].close()
    assert ready == [1, 0]


async def test_a_node_that_moved_keeps_no_connection(app: App, dsn: str) -> None:
    """A node whose address has changed, or that was removed, is not asked any more: its connection is closed."""
    nodes: dict[str, Any] = {"north": (dsn, None)}
    endpoint = telemetry.Telemetry(WorkerSettings(metrics_port=0), dsn, nodes=lambda: nodes)
    asked = []
    for later in ({"north": (make_conninfo(dsn, application_name="moved"), None)}, {}):
        await endpoint._metrics()
        asked.append(endpoint._databases["north"][1])
        nodes = later
    await endpoint._metrics()
    assert [database._link.conn for database in asked] == [None, None]


async def test_hostile_requests_do_not_disturb(
    app: App, dsn: str, db: Any, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad methods, bodies, long headers, slow clients, a hundred connections: clear answers, and jobs still run."""

    def say(port: int, words: bytes) -> bytes:
        """Send these bytes; return the answer, to the end of the connection."""
        with socket.create_connection(("127.0.0.1", port), timeout=20) as conn:
            conn.sendall(words)
            return b"".join(iter(lambda: conn.recv(65_536), b""))

    def _refused(crowd: list[socket.socket]) -> int:
        """Return how many are refused; 0 until all beyond the limit are."""
        found = 0
        for conn in crowd:
            conn.setblocking(False)
            with suppress(BlockingIOError, ConnectionError):
                found += conn.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 503"
            conn.setblocking(True)
        return found if found >= len(crowd) - telemetry._MOST_CONNECTIONS else 0

    host = b"Host: x\r\n"
    hostile = {
        "post": (b"POST /metrics HTTP/1.1\r\n" + host + b"\r\n", 405),
        "no such method": (b"BREW /metrics HTTP/1.1\r\n" + host + b"\r\n", 405),
        "no such page": (b"GET /../etc/passwd HTTP/1.1\r\n" + host + b"\r\n", 404),
        "a body": (b"GET /metrics HTTP/1.1\r\n" + host + b"Content-Length: 5\r\n\r\nhello", 400),
        "no host": (b"GET /metrics HTTP/1.1\r\n\r\n", 400),
        "two hosts": (b"GET /metrics HTTP/1.1\r\n" + host + host + b"\r\n", 400),
        "a folded header": (b"GET /metrics HTTP/1.1\r\n" + host + b" folded: x\r\n\r\n", 400),
        "a bare newline": (b"GET /metrics HTTP/1.1\r\n" + host + b"a: b\nc: d\r\n\r\n", 400),
        "not HTTP": (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        "a long header": (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 9000 + b"\r\n\r\n", 431),
        "no end": (b"GET /metrics HTTP/1.1\r\n", 408),
    }

    @app.task
    async def note() -> None:
        pass

    async with working(app, dsn, metrics_port=0, **SLEEPY) as worker:
        await until(worker, "/readyz", 200)
        port = worker.telemetry.port
        for what, (words, status) in hostile.items():
            monkeypatch.setattr(telemetry, "_READ", 0.1 if status == 408 else 3600.0)
            answer = await asyncio.to_thread(say, port, words)
            assert answer.startswith(b"HTTP/1.1 %d " % status), (what, answer[:200])
        monkeypatch.setattr(telemetry, "_READ", 3600.0)  # slow clients stay connected
        crowd = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(100)]
        try:
            for conn in crowd[:50]:
                with suppress(OSError):  # those beyond the limit are closed already
                    conn.sendall(b"GET /met")
            refused = await eventually(lambda: _refused(crowd), "those beyond the limit are refused")
            assert refused >= 100 - telemetry._MOST_CONNECTIONS
            await jobs.ends(note.enqueue_sync(db))
            assert not worker.why_not_ready()
        finally:
            for conn in crowd:
                conn.close()
        await until(worker, "/healthz", 200)  # there is room again
        status, text = await page(worker, "/healthz", "HEAD")
        assert (status, text) == (200, "")


async def test_hostile_names_are_escaped(app: App, dsn: str, db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotes, braces and backslashes in names of queues and tasks are unchanged when parsed, and forge no line."""
    monkeypatch.setattr(_numbers, "FRESH", 0.0)
    queue, task = 'a"b\\c{x="1"} 5', 'tallybook_up 7 \\n \\"\\'
    db.execute("select tallybook.enqueue(%s, %s)", (queue, task))
    async with working(app, dsn, metrics_port=0, **SLEEPY) as worker:
        found = parsed(await until(worker, "/metrics", 200, "tallybook_up 1\n"))
    assert value(found, "tallybook_jobs", queue=queue, task=task, state="available") == 1
    assert value(found, "tallybook_up") == 1


def test_newlines_forge_no_line() -> None:
    """The database refuses names with control characters; if one existed, it would stay in its label."""
    pair = ("q\ntallybook_up 7", 't\\\n"')
    numbers = Numbers({pair: (3,) * len(COLUMNS)}, {}, 0.0)
    found = parsed(text(of_the_database(numbers, Shown())))
    assert value(found, "tallybook_jobs", queue=pair[0], task=pair[1], state="dead") == 3
    assert value(found, "tallybook_up") == 1


def test_the_series_are_bounded() -> None:
    """Only some queues and tasks have series; the others are one sum, even if a real one has its name; none moves."""

    def numbers(n: int, **more: int) -> Numbers:
        counts = {("q", f"t{i}"): (i,) * len(COLUMNS) for i in range(n)} | {
            ("q", task): (jobs,) * len(COLUMNS) for task, jobs in more.items()
        }
        counts[OTHERS, OTHERS] = (1,) * len(COLUMNS)
        return Numbers(counts, {(f"q{i}", "available"): float(i) for i in range(n)}, 0.0)

    shown = Shown()
    few = parsed(text(of_the_database(numbers(5), shown)))
    assert value(few, "tallybook_jobs", queue="q", task="t0", state="dead") == 0
    many = numbers(5 + 3 * MOST, big=10**9)
    found = parsed(text(of_the_database(many, shown)))
    jobs = {
        labels: n for (name, labels), n in found.items() if name == "tallybook_jobs" and ("state", "dead") in labels
    }
    assert len(jobs) == MOST and sum(jobs.values()) == sum(row[0] for row in many.counts.values())
    assert value(found, "tallybook_jobs", queue="q", task="big", state="dead") == 10**9
    assert (
        value(found, "tallybook_jobs", queue="q", task="t0", state="dead") == 0
    )  # it had series before and keeps them
    ages = [n for (name, _), n in found.items() if name == "tallybook_oldest_job_age_seconds"]
    assert len(ages) == MOST + 1 and max(ages) == 4 + 3 * MOST
    grown = parsed(text(of_the_database(numbers(5 + 3 * MOST, big=10**9, bigger=10**10), shown)))
    assert value(grown, "tallybook_jobs", queue="q", task="bigger", state="dead") is None


@pytest.mark.parametrize(
    "options",
    [{"metrics_port": -1}, {"metrics_port": 65_536}, {"metrics_port": True}, {"metrics_host": "0.0.0.0"},
     {"metrics_port": 1, "metrics_host": " "}],
)  # fmt: skip
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    """An invalid port, and an address without a port, are errors that name the option."""
    with pytest.raises(ConfigError, match="metrics_"):
        WorkerSettings(**options)


async def test_a_port_that_is_taken(app: App, dsn: str) -> None:
    """A port that another process uses is a clear error, and no worker is registered."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        worker = Worker(app, dsn, WorkerSettings(metrics_port=port))
        with pytest.raises(ConfigError, match="cannot be listened on"):
            await worker.run()
    with psycopg.connect(dsn) as conn:
        assert conn.execute("select count(*) from tallybook.workers").fetchone() == (0,)


def test_the_command_line_listens_while_it_waits(tmp_path: Path) -> None:
    """`tallybook worker --metrics-port`: while waiting for its server it is alive, not ready, and stops with code 0."""
    (tmp_path / "shop.py").write_text(
        "from tallybook import App\napp = App('shop')\n@app.task\ndef note() -> None: ...\n"
    )
    words = ("worker", "-A", "shop:app", "--dsn", "host=127.0.0.1 port=1", "--metrics-port", "0")
    with Command(tmp_path, *words) as running:
        running.says("metrics and probes on http://127.0.0.1:")
        port = int(running.output.split("http://127.0.0.1:")[1].split()[0])
        assert ask(port, "/healthz") == (200, "ok\n")
        assert ask(port, "/readyz") == (503, "the database has not been reached yet\n")
        assert value(parsed(ask(port, "/metrics")[1]), "tallybook_up") == 0
        running.send(signal.SIGTERM)
        assert running.ended() == 0


def test_every_process_has_a_port_of_its_own() -> None:
    """--processes: the children listen on the port and the following ones, on any free one for 0, on none without."""
    from tallybook._worker.life.supervisor import _port

    assert [_port(9464, number) for number in (1, 2)] == [["--metrics-port", "9464"], ["--metrics-port", "9465"]]
    assert [_port(0, 2), _port(None, 2)] == [["--metrics-port", "0"], []]


def test_the_page_lists_every_metric() -> None:
    """docs/telemetry.md lists each metric with its type and labels, and the bound on the series."""
    page = (ROOT / "docs/telemetry.md").read_text(encoding="utf-8")
    rows = [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in page.splitlines()
            if line.startswith("| `tallybook_")]  # fmt: skip
    assert [(name, kind, labels.replace("`", "")) for name, kind, labels, _ in rows] == [
        (name, kind, ", ".join(labels)) for name, (kind, labels, _) in METRICS.items()
    ]
    assert f"{MOST} " in page and f"`{OTHERS}`" in page
