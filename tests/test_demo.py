"""The demo, run as a user runs it: a separate process, of which nothing may be left."""

import asyncio
import csv
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from support.database import Connection
from support.waiting import wait_until
from tallybook._db.driver import connect
from tallybook.extra.demo import MOST, SHIPPED, InputError, _Interrupted, _interruptible, read
from tallybook.extra.demo import app as demo_app
from tallybook.extra.demo.receiver import verdict

ODD = ["Łukasz, 美咲 👍", 'said "hi"', "two\nlines", "tab\there", "it's \\ 100 %", "", "\u202eright to left", "é́"]


class Demo:
    """A run of the demo: its output, and all that it started."""

    def __init__(self, folder: Path, **env: str) -> None:
        program = "from tallybook.extra.demo import run; raise SystemExit(run())"
        self._output, self._errors = folder / "demo.output", folder / "demo.errors"
        with self._output.open("wb") as out, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program], env={**os.environ, **env}, stdout=out, stderr=errors
            )
        self.started: set[tuple[int, str]] = set()
        self.directories: set[Path] = set()

    @property
    def lines(self) -> list[str]:
        return self._output.read_text(encoding="utf-8").splitlines()

    @property
    def errors(self) -> str:
        return self._errors.read_text(encoding="utf-8")

    def look(self) -> bool:
        """Record its current processes and directories; return whether it has ended."""
        for pid in _descendants(self.process.pid):
            if birth := _birth(pid):
                self.started.add((pid, birth))
                self.directories |= set(map(Path, re.findall(r"/[^\0 ]*/tallybook-run-[^/\0 ]+", _command(pid))))
        return self.process.poll() is not None

    def finish(self) -> int:
        wait_until(self.look, "the demo ends", seconds=100)
        return int(self.process.returncode)

    def left(self) -> list[str]:
        """Its processes and directories that still exist."""
        processes = [f"{pid} {_command(pid)}" for pid, birth in self.started if _birth(pid) == birth]
        return processes + [str(path) for path in self.directories if path.exists()]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)


def _descendants(pid: int) -> list[int]:
    found = [pid]
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                found += _descendants(int(child))
    return found


def _birth(pid: int) -> str | None:
    """The start time of a process, which tells it from a later one with its id; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    """Start the demo; it is always stopped at the end."""
    with ExitStack() as stack:
        yield lambda **env: stack.enter_context(closing(Demo(tmp_path, **env)))


def _write(path: Path, rows: int) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "E-Mail", "zpráva, vzkaz"])
        writer.writerows(
            [f"{number} {ODD[number % len(ODD)]}", "a@example.org", ODD[-number % len(ODD)]] for number in range(rows)
        )
    return path


@pytest.mark.slow
def test_nothing_is_lost_when_a_worker_is_killed(demo: Callable[..., Demo], tmp_path: Path) -> None:
    """S1-11, S4-01: a receiver that fails and a worker that dies by SIGKILL lose no submission, not even odd ones."""
    last_line = re.compile(
        r"demo: (\d+) submissions, (\d+) delivered, (\d+) lost, (\d+) retries, (\d+) duplicate deliveries,"
        r" rate (\d+)/s, pickup p50 (\d+\.\d) ms p99 (\d+\.\d) ms"
    )
    rows = 150
    run = demo(DEMO_INPUT=str(_write(tmp_path / "odd rows.csv", rows)))
    status = run.finish()
    text = "\n".join(run.lines)
    assert (status, run.errors) == (0, ""), text
    found = last_line.fullmatch(run.lines[-1])
    assert found, text
    submissions, delivered, lost, retries, duplicates, rate = map(int, found.groups()[:6])
    assert (submissions, delivered, lost) == (rows, rows, 0)
    killed = re.search(r"worker [AB] is killed with SIGKILL: it runs (\d+) job", text)
    assert killed and "rescued after" in text, text
    held = int(killed[1])
    on_purpose = sum(
        verdict(f"submission-{number}", attempt)[0] == 500 for number in range(1, rows + 1) for attempt in (1, 2)
    )
    assert on_purpose <= retries <= on_purpose + held
    assert 0 <= duplicates <= held
    assert rate > 0 and 0 < float(found[7]) <= float(found[8])
    assert run.started and run.directories, "the test saw none of its processes"
    assert run.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupt_leaves_nothing(demo: Callable[..., Demo], tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, SIGTERM and SIGKILL during a run leave no process and no directory."""
    run = demo(DEMO_INPUT=str(_write(tmp_path / "rows.csv", 400)))
    words = "form submissions arrive"
    wait_until(lambda: run.look() or any(words in line for line in run.lines), "submissions arrive", seconds=60)
    run.process.send_signal(number)
    status = run.finish()
    if number == signal.SIGKILL:
        assert status == -number
    else:
        assert status == 128 + number
        assert f"stopped by {number.name}" in run.errors and "Traceback" not in run.errors
        assert run.left() == []
    wait_until(lambda: not run.left(), "all of it is gone")


@pytest.mark.direct("watches for the query by the process id of its session")
def test_an_interrupt_cancels_the_query_that_runs(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    """Ctrl-C in the middle of a query of the demo cancels the query, so the driver writes no warning."""
    with connect(dsn, autocommit=True) as other, _interruptible(), connect(dsn) as conn:
        runs = "select from pg_stat_activity where pid = %s and state = 'active' and query ~ 'sleep'"  # not BEGIN

        def interrupt() -> None:
            wait_until(lambda: other.execute(runs, (conn.info.backend_pid,)).fetchone() is not None, "the query runs")
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        with pytest.raises(_Interrupted):
            conn.execute("select pg_sleep(60)")
    assert not caplog.records


def test_a_wrong_input_is_said_in_one_line(demo: Callable[..., Demo], tmp_path: Path) -> None:
    """A missing file ends the demo before it starts anything, with status 2 and no traceback."""
    run = demo(DEMO_INPUT=str(tmp_path / "nothing.csv"))
    assert run.finish() == 2
    assert run.lines == []
    assert run.errors.startswith(f"demo: error: {tmp_path}/nothing.csv: there is no such file")
    assert "Traceback" not in run.errors


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"\n\n", "the first line is blank"),
        (b"name,email\n", "no row after the header"),
        (b"Ada,ada@example.org\nBob,bob@example.org\n", "line 1: there is no header: 'ada@example.org' is a value"),
        (b"name,,email\n1,2,3\n", "line 1: there is no header: column 2 has no name"),
        (b"name,2024-05-01\nx,y\n", "line 1: there is no header: '2024-05-01' is a value"),
        (b"name,name\n1,2\n", "line 1: two columns have the name 'name'"),
        (b'name,text\nAda,"a\nb"\n\nBob,x,y\n', "line 5: 3 columns, the header names 2"),
        (b"name,text\nAda,x\nJ\xf6rg,y\n", "line 3: not UTF-8: byte 0xf6 at position 2"),
        ("name,text\nAda,x\n".encode("utf-16"), "line 1: not UTF-8: byte 0xff at position 1"),
        (b'name,text\nAda,"open\nBob,x\n', "line 2: not CSV"),
        (b"name,text\nAda,a\0b\n", "line 2: 'text' contains a NUL character"),
        (b"name,text\nAda," + b"x" * 200_000 + b"\n", "line 2: not CSV: field larger than field limit"),
    ],
)
def test_each_wrong_file_is_named_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    """The error for a wrong input file names the file and the line."""
    path = tmp_path / "in.csv"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_a_directory_is_no_input(tmp_path: Path) -> None:
    """A directory is refused with the system's message."""
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (
            '\ufeffname,text\r\nAda,x\r\n\r\nBob,"1,2"\r\n',
            [{"name": "Ada", "text": "x"}, {"name": "Bob", "text": "1,2"}],
        ),
        ("name;text\nAda;1,5\n", [{"name": "Ada", "text": "1,5"}]),
        ("name,text\nAda\n", [{"name": "Ada"}]),
        ("name\nAda", [{"name": "Ada"}]),
    ],
)
def test_spreadsheets_own_forms_are_read(tmp_path: Path, content: str, rows: list[dict[str, str]]) -> None:
    """A byte order mark, CRLF, semicolons, blank lines and missing last columns are accepted."""
    path = tmp_path / "in.csv"
    path.write_text(content, encoding="utf-8", newline="")
    assert read(path) == rows


def test_a_long_file_is_taken_in_part(tmp_path: Path) -> None:
    """Of a file that is too long for a minute's run, the first rows are read."""
    path = tmp_path / "in.csv"
    path.write_text("n\n" + "".join(f"{number}\n" for number in range(MOST + 5)), encoding="utf-8")
    assert len(read(path)) == MOST


def test_the_shipped_submissions_are_varied() -> None:
    """At least 2,000 rows are shipped, with invented addresses and all that makes CSV hard."""
    rows = read(SHIPPED)
    assert len(rows) >= 2000
    assert all(re.fullmatch(r"[a-z0-9._-]+@example\.(com|org|net)", row["email"]) for row in rows)
    text = "\n\n".join(row["message"] + row["name"] + row["company"] for row in rows)
    assert all(mark in text for mark in [",", '"', "'", ";", "\n", "é", "美", "👍"])
    assert len({row["message"] for row in rows}) > 500


def test_the_receiver_fails_the_same_requests_in_every_run() -> None:
    """Key and attempt decide which requests fail: about 8 % of the keys at first, a quarter of them twice."""
    keys = [f"submission-{number}" for number in range(1, 2401)]
    failed = [sum(verdict(key, attempt)[0] == 500 for key in keys) for attempt in (1, 2, 3)]
    assert 0.06 < failed[0] / len(keys) < 0.10
    assert 0.01 < failed[1] / len(keys) < 0.03
    assert failed[2] == 0
    assert 0.17 < sum(verdict(key, 1)[1] >= 0.03 for key in keys) / len(keys) < 0.23
    assert max(verdict(key, 1, 0.9)[1] for key in keys) <= 0.2


def test_a_submission_and_its_job_are_saved_together(db: Connection) -> None:
    """S4-21, S1-01: a submission and its delivery are committed or rolled back together."""
    db.execute(demo_app.TABLE)
    with db.transaction(force_rollback=True):
        demo_app.save(db, {"name": "Ada"})
    count = "select (select count(*) from submission), (select count(*) from tallybook.job)"
    assert db.execute(count).fetchone() == (0, 0)
    job = demo_app.save(db, {"name": "Łukasz"})
    assert db.execute(count).fetchone() == (1, 1)
    joined = (
        "select j.id, j.state, s.data ->> 'name' from submission s"
        " join tallybook.job j on (j.args ->> 'submission_id')::bigint = s.id"
    )
    assert db.execute(joined).fetchall() == [(job.id, "available", "Łukasz")]


def test_a_deleted_submission_cancels_its_delivery(db: Connection, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery whose submission was deleted ends as cancelled, with the reason on record."""
    monkeypatch.setenv("TALLYBOOK_DSN", dsn)
    monkeypatch.setenv("WEBHOOK_URL", "http://127.0.0.1:9/webhook")
    db.execute(demo_app.TABLE)
    job = demo_app.save(db, {"name": "Ada"})
    db.execute("delete from submission")
    report = asyncio.run(demo_app.app.drain(queues=["webhooks"]))
    assert (report.processed, report.cancelled) == (1, 1)
    row = db.execute("select state, reason from tallybook.job where id = %s", [job.id]).fetchone()
    assert row == ("cancelled", "the submission was deleted")
