"""`tallybook top`: what it reads, how it shows it, and that it leaves the terminal as it was."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from rich.cells import cell_len

from support.cli import invoke
from support.database import Connection
from support.roles import house
from tallybook._cli.top import _signals
from tallybook._cli.top_screen import screen
from tallybook._db.top import Rates, Reading, Runs, rates, read

NOW = datetime(2031, 1, 1, 12, tzinfo=UTC)
STATES = ("available", "running", "scheduled", "retrying", "waiting", "dead", "completed", "failed", "cancelled")


def queue(name: str, **states: Any) -> dict[str, Any]:
    return {"name": name, **dict.fromkeys(STATES, 0), "oldest": None, "paused_at": None, **states}


def reading(*queues: dict[str, Any], **more: Any) -> Reading:
    empty: dict[str, Any] = {"alive": 0, "workers": [], "failures": [], "runs": Runs()}
    named = {one["name"]: one for one in queues}
    return Reading(now=NOW, database="shop", server="18.1", queues=named, **{**empty, **more})


def shown(of: Reading, rate: Rates | None = None, *, width: int = 80, height: int = 24, **more: Any) -> list[str]:
    """The screen's lines as text; none is wider, and there are no more, than fit."""
    lines = [line.plain for line in screen(of, rate or Rates(), width=width, height=height, **more)]
    assert len(lines) <= height and max(map(cell_len, lines)) <= width
    return lines


@pytest.mark.parametrize("width, height", [(80, 24), (120, 40), (40, 10), (200, 100)])
def test_a_hundred_queues_with_long_names(width: int, height: int) -> None:
    """The busiest queues come first, names are cut but not numbers, and hidden queues are counted."""
    queues = [queue(f"queue-{n:03}-" + "long" * 60, available=n, running=n % 10) for n in range(100)]
    lines = shown(reading(*queues), width=width, height=height)
    rows = [line for line in lines if line.startswith("queue-")]
    assert f"... {100 - len(rows)} more queues" in lines
    busiest = sorted(range(100), key=lambda n: (-(n % 10), -n))[: len(rows)]
    assert [int(row[6:9]) for row in rows if row[6:9].isdigit()] == busiest[: len(rows)] or width == 40
    for n, row in zip(busiest, rows, strict=True):
        if width >= 80:
            assert re.search(rf"…\s+{n}\s+{n % 10}\s+0\s+0\s+0\s+0\s+-", row), row


def test_every_part_has_its_place() -> None:
    """Even with many queues the screen has workers, running jobs and failures, with their details."""
    since = (NOW - timedelta(minutes=5)).isoformat()
    found = reading(
        *(queue(f"q{n}", available=1, oldest=since, paused_at=since if n == 0 else None) for n in range(50)),
        alive=1,
        workers=[{"id": 1, "name": "till-3", "queues": ["mail", "default"], "seen_at": since, "silent": True,
                  "lag": 0.0021, "memory": 90 * 2**20}],
        runs=Runs(2, [{"job_id": n, "task": f"send_{n}", "worker": "till-3", "started_at": since} for n in range(2)],
                  {1: 2}),
        failures=[{"ended_at": since, "job_id": 7, "task": "charge", "type": "ValueError", "message": "no money",
                   "state": "dead"}],
        horizon={"who": "pid 42 (psql)", "since": since, "transactions": 3},
    )  # fmt: skip
    text = "\n".join(shown(found))
    for words in (
        "shop on PostgreSQL 18.1", "1 worker  2 running", "50 queues", "horizon pinned for 5 min by pid 42 (psql)",
        "till-3", "mail, default", "send_1", "ValueError: no money", "paused", "5 min", "2 ms", "90 MiB",
    ):  # fmt: skip
        assert words in text, words
    assert "horizon" not in "\n".join(shown(replace(found, horizon=None)))
    assert "connection lost" in "\n".join(shown(found, trouble="connection lost"))


def test_an_empty_database() -> None:
    """An empty database is described as empty."""
    text = "\n".join(shown(reading()))
    assert all(words in text for words in ("no queues yet", "no live worker", "nothing runs", "no failures"))


def test_what_a_job_carries_is_text() -> None:
    """Control sequences and rich markup in names and errors never reach the terminal, and color nothing."""
    evil = "[bold red]x[/]\x1b[2J\x1b]0;title\x07\n\u202eabc\x9b31m"
    found = reading(
        queue(evil),
        workers=[
            {"id": 1, "name": evil, "queues": [evil], "seen_at": None, "silent": False, "lag": None, "memory": None}
        ],
        runs=Runs(1, [{"job_id": 1, "task": evil, "worker": evil, "started_at": None}]),
        failures=[{"ended_at": None, "job_id": 1, "task": evil, "type": evil, "message": evil, "state": "failed"}],
        horizon={"who": evil, "since": None, "transactions": 1},
    )
    lines = screen(replace(found, database=evil, server=evil), Rates(), width=200, height=50, trouble=evil)
    text = "".join(line.plain for line in lines)
    assert "[bold red]x[/]" in text and not re.search("[\x00-\x1f\x7f-\x9f\u202e]", text)
    assert not any(line.spans for line in lines)


def test_wide_characters() -> None:
    """Names with characters of two columns are cut at the screen's end, and the numbers stay aligned."""
    lines = shown(reading(queue("請求書" * 20, available=12345), queue("abc", available=7)))
    first, second = (line for line in lines if "請" in line or line.startswith("abc"))
    assert cell_len(first[: first.index("12345")]) + 4 == cell_len(second[: second.index("7")])


def test_rates_are_differences() -> None:
    """Jobs enqueued and ended between two readings, per second; a decrease is no negative rate."""
    before = reading(queue("mail", available=10, completed=100, failed=3), queue("gone", available=5))
    after = replace(
        reading(queue("mail", available=10, running=2, completed=120, failed=5), queue("new", completed=2)),
        now=NOW + timedelta(seconds=2),
    )
    found = rates(before, after)
    assert (found.entered, found.completed, found.failed) == ((24 - 5) / 2, 11, 1)
    assert found.of_queues == {"mail": 10, "new": 1}
    assert rates(None, after) == Rates()
    assert rates(replace(after, now=NOW), replace(before, now=NOW + timedelta(seconds=1))).completed == 0
    assert "in 9.5/s  done 11/s  failed 1.0/s" in shown(after, found)[1]


def put(db: Connection, n: int = 1, name: str = "mail") -> None:
    db.execute("select tallybook.enqueue(%s, 'send') from generate_series(1, %s)", [name, n])


def test_a_reading(db: Connection) -> None:
    """A reading has states, workers with their jobs, the longest jobs, the newest failures, and pauses."""
    put(db, 4)
    worker, lease = (
        db.execute("select tallybook.worker_start('till-3', '{mail}', '{send}')").fetchone()[0],
        uuid.uuid4(),
    )
    db.execute("select tallybook.claim(%s, '{mail}', '{3}', %s)", [worker, lease])
    db.execute("select tallybook.complete(%s, 1, 1)", [lease])
    db.execute("""select tallybook.fail(%s, 2, 1, '{"type": "ValueError", "message": "no money"}')""", [lease])
    db.execute("select tallybook.pause('mail', 'ada')")
    found = read(db)
    mail = found.queues["mail"]
    expected = {
        "available": 1,
        "running": 1,
        "retrying": 1,
        "completed": 1,
        "failed": 1,
        "dead": 0,
        "scheduled": 0,
        "waiting": 0,
    }
    assert {name: mail[name] for name in expected} == expected and mail["paused_at"] and mail["oldest"]
    assert (found.alive, found.runs.jobs, found.horizon) == (1, 1, None)
    assert [(one["name"], one["silent"]) for one in found.workers] == [("till-3", False)]
    assert found.runs.of_workers == {worker: 1}
    assert [(one["job_id"], one["task"], one["worker"]) for one in found.runs.longest] == [(3, "send", "till-3")]
    assert [(one["job_id"], one["type"], one["message"]) for one in found.failures] == [(2, "ValueError", "no money")]
    db.execute("select tallybook.complete(%s, 3, 1)", [lease])
    after = read(db)
    assert (after.runs.jobs, after.runs.longest, after.queues["mail"]["completed"]) == (0, [], 2)
    assert rates(found, after).of_queues["mail"] > 0


def test_what_runs_is_looked_at_less_often_where_that_takes_long(db: Connection) -> None:
    """The running jobs are read again only after `good_until`; the rest is read each time."""
    first = read(db)
    put(db)
    db.execute("select tallybook.worker_start('till-3', '{mail}')")
    db.execute("select tallybook.claim(1, '{mail}', '{1}', gen_random_uuid())")
    slow = replace(first, runs=replace(first.runs, good_until=time.monotonic() + 60))
    assert read(db, slow).runs is slow.runs and read(db, slow).alive == 1
    assert read(db, replace(first, runs=replace(first.runs, good_until=time.monotonic()))).runs.jobs == 1


def test_the_newest_failures_cost_the_same_however_many_there_are(db: Connection) -> None:
    """900 failures cost as many pages as 450; control: the view, which sorts them all, costs more."""

    def pages(query: str) -> int:
        db.execute(query)  # planned, and in memory
        plan = db.execute("explain (analyze, buffers, timing off, format json) " + query).fetchone()
        return int(plan[0][0]["Plan"]["Shared Hit Blocks"] + plan[0][0]["Plan"]["Shared Read Blocks"])

    newest = "select * from tallybook._failures_said(50)"
    view = "select max(task) from tallybook.error"  # control: all of them
    db.execute("select tallybook.worker_start('till-3', '{mail}')")
    costs = []
    for _ in range(2):
        lease = uuid.uuid4()
        put(db, 450)
        db.execute("select tallybook.claim(1, '{mail}', '{450}', %s)", [lease])
        db.execute(
            "select tallybook.fail(%s, l.job_id, l.attempt, '{}') from tallybook.claimed_jobs(%s) l", [lease, lease]
        )
        costs.append((pages(newest), pages(view)))
    assert len(db.execute(newest).fetchall()) == 50
    assert costs[1][0] <= costs[0][0] * 1.1 + 5
    assert costs[1][1] > costs[0][1] * 1.1 + 5


@pytest.mark.direct("logins of their own")
def test_a_reader_looks(empty_dsn: str) -> None:
    """S10: the reader role is enough; only an operator sees the text of errors."""
    with house(empty_dsn) as at:
        at.give()
        put(at.db)
        at.db.execute("select tallybook.worker_start('till-3', '{mail}')")
        at.db.execute("select tallybook.claim(1, '{mail}', '{1}', '9f1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d')")
        at.db.execute(
            "select tallybook.fail('9f1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d', 1, 1,"
            """ '{"type": "T", "message": "secret"}')"""
        )
        assert [(one["type"], one["message"]) for one in read(at.as_("reader")).failures] == [("T", None)]
        assert [one["message"] for one in read(at.as_("operator")).failures] == ["secret"]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            read(at.as_("metrics"))


def test_once(dsn: str, db: Connection) -> None:
    """--once prints one screen without a terminal, in the given size, and ends."""
    put(db, 3)
    found = invoke("top", "--once", "--dsn", dsn, COLUMNS="90", LINES="20")
    assert found.exit_code == 0 and "\x1b" not in found.output
    assert re.search(r"^mail\s+3 +0 ", found.output, re.MULTILINE)
    assert len(found.output.splitlines()) <= 20


def test_what_it_refuses(dsn: str, empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal, a readable rate, a schema or rich: an error that says what to do."""
    run = partial(invoke, "top")
    without = run("--dsn", dsn)
    assert without.exit_code == 2 and "pass --once" in without.output
    for wrong in ("0", "0.01", "2 days", "often"):
        assert run("--once", "--every", wrong, "--dsn", dsn).exit_code == 2
    for right in ("2", "0.5", "200 ms"):
        assert run("--once", "--every", right, "--dsn", dsn).exit_code == 0
    missing = run("--once", "--dsn", empty_dsn)
    assert missing.exit_code == 2 and "tallybook migrate" in missing.output
    monkeypatch.setitem(sys.modules, "rich", None)
    bare = run("--once", "--dsn", dsn)
    assert bare.exit_code == 1 and "pip install 'tallybook[rich]'" in bare.output


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number, expected", [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_inside_a_finalizer_is_not_lost(number: signal.Signals, expected: type[BaseException]) -> None:
    """Python drops the exception of such a signal, so top raises it again before it reads."""

    class Final:
        def __del__(self) -> None:
            signal.raise_signal(number)

    with _signals() as check:
        check()
        Final()
        with pytest.raises(expected):
            check()


class Terminal:
    """`tallybook top` on its own terminal: reads what it draws, and types keys."""

    def __init__(self, process: subprocess.Popen[bytes], master: int, slave: int) -> None:
        self.process, self._master, self._slave = process, master, slave
        self.drawn = ""
        self.before = termios.tcgetattr(slave)

    def reads(self, seconds: float = 0.05) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        self.drawn += os.read(self._master, 65536).decode(errors="replace")
        return True

    def shows(self, pattern: str, after: int = 0) -> int:
        """Wait until the pattern is drawn after this position; return where it ends."""
        until = time.monotonic() + 20
        while not (found := re.search(pattern, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.drawn[after:]))):
            assert time.monotonic() < until and self.process.poll() is None, (
                f"{pattern!r} is not in {self.drawn[after:]!r}"
            )
            self.reads()
        return len(self.drawn) if found else after

    def types(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def ends(self) -> int:
        """Return the exit code; check that the terminal's settings, screen and cursor are restored."""
        until = time.monotonic() + 20
        while self.process.poll() is None and time.monotonic() < until:
            self.reads()
        code = self.process.wait(10)
        while self.reads():
            pass
        assert termios.tcgetattr(self._slave) == self.before
        left, shown_again = self.drawn.rfind("\x1b[?1049l"), self.drawn.rfind("\x1b[?25h")
        assert left > self.drawn.rfind("\x1b[?1049h") >= 0 and shown_again > self.drawn.rfind("\x1b[?25l") >= 0
        return code


@contextmanager
def terminal(dsn: str, *words: str) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    # The first terminal that a new session opens controls it: Ctrl-C reaches it.
    command = [sys.executable, "-m", "tallybook", "top", "--dsn", dsn, *words]
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@" <"$TTY" >"$TTY" 2>&1', "sh", *command],
        env={**clean, "TERM": "xterm-256color", "TTY": os.ttyname(slave)}, start_new_session=True,
    )  # fmt: skip
    try:
        yield Terminal(process, master, slave)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        os.close(master)
        os.close(slave)


@pytest.mark.parametrize("key, code", [(b"q", 0), (b"\x03", 0), (None, 128 + signal.SIGTERM)])
def test_it_is_live_and_ends_clean(dsn: str, db: Connection, key: bytes | None, code: int) -> None:
    """The live screen follows changes; q, Ctrl-C and SIGTERM end it, and the terminal is as before."""
    put(db, 3)
    with terminal(dsn, "--every", "0.1") as screen_:
        at = screen_.shows(r"mail +3 +0 ")
        put(db, 4)
        at = screen_.shows(r"mail +7 +0 ", at)
        put(db, 1, "another")
        screen_.shows(r"another +1 +0 ", at)
        if key is None:
            screen_.process.terminate()
        else:
            screen_.types(key)
        assert screen_.ends() == code


@pytest.mark.direct("a pooler would hide the lost session")
def test_a_lost_connection(dsn: str, db: Connection, connect: Callable[..., Connection]) -> None:
    """When its session is lost it says so, keeps its figures, and continues once it can connect again."""
    put(db, 3)
    name = db.info.dbname
    with psycopg.connect(dsn, dbname="postgres", autocommit=True) as admin, terminal(dsn, "--every", "0.1") as screen_:
        at = screen_.shows(r"mail +3 +0 ")
        db.close()
        admin.execute(f"alter database {name} allow_connections false".encode())
        admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name])
        at = screen_.shows(r"no answer: ", at)
        at = screen_.shows(r"mail +3 +0 ", at)
        admin.execute(f"alter database {name} allow_connections true".encode())
        put(connect(), 2)
        screen_.shows(r"mail +5 +0 ", at)
        at = len(screen_.drawn)
        screen_.types(b"q")
        assert screen_.ends() == 0
