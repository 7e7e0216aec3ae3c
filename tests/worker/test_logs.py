"""A worker's logging: every line of a job names it, and no value breaks a line."""

import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tallybook._worker.jobs import Lease, Running, current_job
from tallybook._worker.logs import JobFilter, JsonFormatter, TextFormatter
from tallybook._worker.run.context import Context


class Unprintable:
    def __str__(self) -> str:
        raise ValueError("no")

    __repr__ = __str__


class Lines(logging.Handler):
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.addFilter(JobFilter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture(params=[TextFormatter, JsonFormatter], ids=["text", "json"])
def lines(request: pytest.FixtureRequest) -> Iterator[Lines]:
    handler = Lines(request.param())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel("INFO")
    yield handler
    root.setLevel(level)
    root.removeHandler(handler)


@pytest.fixture
def job() -> Iterator[Running]:
    """A job called `50%` that runs in this context."""
    running = Running((42, 3, "50%", {}, None, 2, 0, None, None, None, None), Lease("x", 1, "mail"), "w")
    token = current_job.set(running)
    yield running
    current_job.reset(token)


def test_any_logger_of_a_job_is_marked(lines: Lines, job: Running) -> None:
    """A line that any library logs while a job runs names the job, its task, queue and attempt."""
    logging.getLogger("httpx").info("GET %s", "/")
    (line,) = lines.lines
    if isinstance(lines.formatter, JsonFormatter):
        found = json.loads(line)
        assert (found["job"], found["task"], found["queue"], found["attempt"]) == (42, "50%", "mail", 3)
        assert (found["message"], found["logger"], found["level"]) == ("GET /", "httpx", "info")
    else:
        assert line.endswith("INFO    httpx: [50% 42] GET /")


def test_context_log_names_the_job_once(lines: Lines, job: Running, caplog: pytest.LogCaptureFixture) -> None:
    """ctx.log puts the job in its text, for programs with their own logging; a worker's lines name it once."""
    from types import SimpleNamespace

    log = Context(SimpleNamespace(), job).log
    log.info("100 %% of %s", "it")
    log.info("50 %")
    assert caplog.messages == ["[50% 42] 100 % of it", "[50% 42] 50 %"]
    assert all("[50% 42] [50% 42]" not in line for line in lines.lines)
    if isinstance(lines.formatter, JsonFormatter):
        assert [json.loads(line)["message"] for line in lines.lines] == ["100 % of it", "50 %"]
    else:
        assert lines.lines[0].endswith("tallybook.job: [50% 42] 100 % of it")


def test_line_outside_of_a_job_has_no_mark(lines: Lines) -> None:
    """A line logged outside a job names none."""
    logging.getLogger("shop").info("ready")
    assert "[" not in lines.lines[0] and '"job"' not in lines.lines[0]


@pytest.mark.parametrize(
    ("message", "args"),
    [
        ("%d", ("no number",)),
        ("%s", (Unprintable(),)),
        (Unprintable(), ()),
        ("\udc80 \x1b[31m", ()),
        ("\0", ()),
    ],
)
def test_no_value_breaks_a_line(lines: Lines, job: Running, message: Any, args: tuple[Any, ...]) -> None:
    """Wrong formats, values that cannot be printed, lone surrogates and control characters still give one line."""
    extra = {"value": Unprintable(), "nan": float("nan")}
    lines.handle(logging.getLogger("shop").makeRecord("shop", 20, "shop.py", 1, message, args, None, extra=extra))
    (line,) = lines.lines
    line.encode()
    assert not set("\0\x1b") & set(line)
    if isinstance(lines.formatter, JsonFormatter):
        assert json.loads(line)["job"] == 42


def test_exceptions_are_text(lines: Lines) -> None:
    """An exception follows its line as text; in JSON it stays in the line; an unprintable one is named."""
    for value in ("boo\nfake", Unprintable()):
        try:
            raise ValueError(value)
        except ValueError:
            made = logging.getLogger("shop").makeRecord("shop", 40, "shop.py", 1, "a\nb", (), sys.exc_info())
            lines.handle(made)
    assert all("ValueError" in line for line in lines.lines)
    if isinstance(lines.formatter, JsonFormatter):
        assert "\n" not in lines.lines[0] and "ValueError: boo" in json.loads(lines.lines[0])["exception"]
    else:
        assert "a\n  b\nTraceback" in lines.lines[0]
