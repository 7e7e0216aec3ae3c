"""Logging of a worker process: every line written while a job runs names the job, whichever code logged it."""

import json
import logging
import math
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from tallybook._model.at_node import at_node
from tallybook._worker.jobs import current_job

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "job_line"}
_MARKS = ("job", "task_name", "queue", "attempt")
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def setup(format: Literal["text", "json"] | str = "text", level: int | str = "info") -> None:  # noqa: A002 - the option
    """Send all logging of this process to stderr, in one of the two formats. Replaces any earlier setup."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(JobFilter())
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper() if isinstance(level, str) else level)


def current() -> dict[str, Any]:
    """Return this process's log format and level, for a child process to use."""
    root = logging.getLogger()
    as_json = any(isinstance(handler.formatter, JsonFormatter) for handler in root.handlers)
    return {"log_format": "json" if as_json else "text", "log_level": root.level}


class JobFilter(logging.Filter):
    """Marks each record made while a job runs with `job`, `task_name`, `queue`, `attempt`; drops none."""

    def filter(self, record: logging.LogRecord) -> bool:
        if (at := at_node.get()) is not None and not hasattr(record, "node"):
            record.node = at.name
        running = current_job.get()
        if running is not None:
            marks = (running.job_id, running.task_name, running.queue, running.attempt)
            for name, value in zip(_MARKS, marks, strict=True):
                if not hasattr(record, name):
                    setattr(record, name, value)
            record.job_line = f"[{running.task_name} {running.job_id}] "
        return True


def _message(record: logging.LogRecord) -> str:
    """Return the record's text without the prefix of Context.log; an unprintable value does not lose the line."""
    try:
        text = record.getMessage()
    except Exception as error:
        text = f"{_shown(record.msg)} {_shown(record.args)} (not formatted: {type(error).__name__})"
    return text.removeprefix(getattr(record, "job_line", ""))


def _shown(value: object) -> str:
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__} that cannot be printed>"


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = []
    if record.exc_info and record.exc_info[0] is not None:
        try:
            parts.append(formatter.formatException(record.exc_info))
        except Exception:  # its __str__ fails
            parts.append(f"{record.exc_info[0].__name__} that cannot be printed")
    elif record.exc_text:
        parts.append(record.exc_text)
    if record.stack_info:
        parts.append(record.stack_info)
    return "\n".join(parts)


class TextFormatter(logging.Formatter):
    """`12:00:00.123 INFO    shop.mail: [send_welcome 42] sent`; control characters are shown escaped."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).astimezone().isoformat(sep=" ", timespec="milliseconds")
        text = _message(record).replace("\n", "\n  ")  # no line inside a message can pass for a log line
        where = f"[{node}] " if (node := getattr(record, "node", None)) else ""
        line = f"{at} {record.levelname:<7} {record.name}: {where}{getattr(record, 'job_line', '')}{text}"
        if exception := _exception(self, record):
            line += f"\n{exception}"
        return _printable(line.translate(_VISIBLE))


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, process, message; then job, task, queue, attempt, exception, extras."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": _message(record),
        }
        for name in _MARKS:
            if hasattr(record, name):
                line["task" if name == "task_name" else name] = _plain(getattr(record, name))
        if exception := _exception(self, record):
            line["exception"] = exception
        for name, value in vars(record).items():
            if name not in _STANDARD and name not in _MARKS:
                line.setdefault(name, _plain(value))
        return _printable(json.dumps(line, ensure_ascii=False))


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if type(value) is str else _shown(value)


def _printable(line: str) -> str:
    """Escape lone surrogates, also in JSON, so that no stream refuses the line."""
    return line.encode("utf-8", "backslashreplace").decode()
