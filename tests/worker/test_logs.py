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


@pytest.fixture(params=[TextFormatter, JsonFormatter], ids=["text", "json"])
def handler(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """The handler of caplog, with the formatter and the filter of a worker's log."""
    caplog.set_level("INFO")
    monkeypatch.setattr(caplog.handler, "formatter", request.param())
    with caplog.filtering(JobFilter()):
        yield caplog.handler


@pytest.fixture
def job() -> Iterator[Running]:
    """A job called `50%` that runs in this context."""
    running = Running((42, 3, "50%", {}, None, 2, 0, None, None, None, None), Lease("x", 1, "mail"), "w")
    token = current_job.set(running)
    yield running
    current_job.reset(token)


def test_any_logger_of_a_job_is_marked(handler: Any, job: Running) -> None:
    """A line that any library logs while a job runs names the job, its task, queue and attempt."""
    logging.getLogger("httpx").info("GET %s", "/")
    (line,) = handler.stream.getvalue().splitlines()
    if isinstance(handler.formatter, JsonFormatter):
        found = json.loads(line)
        assert (found["job"], found["task"], found["queue"], found["attempt"]) == (42, "50%", "mail", 3)
        assert (found["message"], found["logger"], found["level"]) == ("GET /", "httpx", "info")
    else:
        assert line.endswith("INFO    httpx: [50% 42] GET /")


def test_context_log_names_the_job_once(handler: Any, job: Running, caplog: pytest.LogCaptureFixture) -> None:
    """ctx.log puts the job in its text, for programs with their own logging; a worker's lines name it once."""
    from types import SimpleNamespace

    log = Context(SimpleNamespace(), job).log
    log.info("100 %% of %s", "it")
    log.info("50 %")
    assert caplog.messages == ["[50% 42] 100 % of it", "[50% 42] 50 %"]
    lines = handler.stream.getvalue().splitlines()
    assert all("[50% 42] [50% 42]" not in line for line in lines)
    if isinstance(handler.formatter, JsonFormatter):
        assert [json.loads(line)["message"] for line in lines] == ["100 % of it", "50 %"]
    else:
        assert lines[0].endswith("tallybook.job: [50% 42] 100 % of it")


def test_line_outside_of_a_job_has_no_mark(handler: Any) -> None:
    """A line logged outside a job names none."""
    logging.getLogger("shop").info("ready")
    (line,) = handler.stream.getvalue().splitlines()
    assert "[" not in line and '"job"' not in line


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
def test_no_value_breaks_a_line(handler: Any, job: Running, message: Any, args: tuple[Any, ...]) -> None:
    """Wrong formats, values that cannot be printed, lone surrogates and control characters still give one line."""
    extra = {"value": Unprintable(), "nan": float("nan")}
    handler.handle(logging.getLogger("shop").makeRecord("shop", 20, "shop.py", 1, message, args, None, extra=extra))
    (line,) = handler.stream.getvalue().removesuffix("\n").split("\n")
    line.encode()
    assert not set("\0\x1b") & set(line)
    if isinstance(handler.formatter, JsonFormatter):
        assert json.loads(line)["job"] == 42


def test_exceptions_are_text(handler: Any) -> None:
    """An exception follows its line as text; in JSON it stays in the line; an unprintable one is named."""
    texts = []
    for value in ("boo\nfake", Unprintable()):
        try:
            raise ValueError(value)
        except ValueError:
            made = logging.getLogger("shop").makeRecord("shop", 40, "shop.py", 1, "a\nb", (), sys.exc_info())
            handler.handle(made)
            texts.append(handler.stream.getvalue().removesuffix("\n"))
            handler.reset()
    assert all("ValueError" in text for text in texts)
    if isinstance(handler.formatter, JsonFormatter):
        assert "\n" not in texts[0] and "ValueError: boo" in json.loads(texts[0])["exception"]
    else:
        assert "a\n  b\nTraceback" in texts[0]
