"""`tallybook demo`: a realistic run in less than a minute, with deliberate failures.

The demo saves form submissions in a business table, each with its webhook delivery in the same transaction. Two worker
processes deliver them over HTTP to a receiver that fails some of them. One worker is killed with SIGKILL in the middle.
Start reading at app.py.
"""

import csv
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from itertools import islice
from pathlib import Path
from types import FrameType

from tallybook.errors import TallybookError

__all__ = ["run"]

SHIPPED = Path(__file__).with_name("submissions.csv")
MOST = 10_000  # the maximum number of rows, so that the demo ends within a minute

Row = dict[str, str]


class _Interrupted(KeyboardInterrupt):
    """A signal; its number is the argument. A KeyboardInterrupt, for which psycopg cancels the query that runs."""


def run(input: Path | None = None, *, plain: bool | None = None) -> int:  # noqa: A002 - it is the option's name
    """Run the demo to its end and return its exit status. The last line on standard output has the figures.

    input  a CSV file with a header; None: the variable DEMO_INPUT, or the 2,400 included submissions
    plain  True: lines instead of the live display; None: lines unless standard output is a terminal
    0: nothing was lost and all counts agree. 1: they do not, or the demo could not run. 2: the input cannot be used.
    128 + n: stopped by signal n. Errors go to standard error.
    """
    try:
        rows = read(Path(input or os.environ.get("DEMO_INPUT") or SHIPPED))
        with _interruptible():
            return _play(rows, plain)
    except InputError as error:
        status, problem = 2, str(error)
    except _Interrupted as stopped:
        number = stopped.args[0]
        status, problem = 128 + number, f"stopped by {signal.Signals(number).name}; everything was removed"
    except BrokenPipeError:  # the reader has stopped, as in `make demo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TallybookError as error:
        status, problem = 1, str(error)
    print(f"demo: error: {problem}", file=sys.stderr, flush=True)
    return status


def _play(rows: list[Row], plain: bool | None) -> int:
    from tallybook.extra.demo import stage
    from tallybook.extra.demo.display import chosen

    with chosen(plain) as display:
        if len(rows) == MOST:
            display.event(f"using the first {MOST} rows, so that the demo ends within a minute")
        figures, summary = stage.play(rows, display)
    print("\n".join(summary))
    for problem in figures.problems:
        print(f"demo: error: {problem}", file=sys.stderr)
    print(figures.line, flush=True)
    return 1 if figures.problems else 0


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise the first signal and ignore later ones: a second Ctrl-C must not interrupt the clean-up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(number: int, _: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise _Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class InputError(TallybookError):
    """The file cannot be used; the text has the file, the line and what to do."""


def read(path: Path) -> list[Row]:
    """Return the first MOST rows of the file. Raises InputError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        hint = "Name a CSV file with DEMO_INPUT=file.csv or --input, or omit both for the included rows"
        raise InputError(f"{path}: there is no such file", hint=hint) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        text = data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        *before, start = data[: error.start].split(b"\n")
        what = f"byte 0x{data[error.start]:02x} at position {len(start) + 1}"
        hint = "Save it as UTF-8"
        raise InputError(f"{path}, line {len(before) + 1}: not UTF-8: {what}", hint=hint) from None
    rows = list(islice(_rows(path, StringIO(text, newline="")), MOST))
    if not rows:
        raise InputError(f"{path}: there is no row after the header", hint="Each row becomes one submission")
    return rows


def _rows(path: Path, file: Iterator[str]) -> Iterator[Row]:
    first = next(file, "")
    if not first.strip():
        what = "the first line is blank" if first else "the file is empty"
        raise InputError(f"{path}: {what}", hint="The first line names the columns; each later one is a submission")
    delimiter = max(",;\t", key=first.count)
    header = _header(path, first, delimiter)
    lines = csv.reader(file, delimiter=delimiter, strict=True)
    line = 2
    try:
        for cells in lines:
            if cells:
                yield _row(f"{path}, line {line}", header, cells)
            line = lines.line_num + 2
    except csv.Error as error:
        raise InputError(f"{path}, line {line}: not CSV: {error}") from None


def _header(path: Path, line: str, delimiter: str) -> list[str]:
    try:
        (names,) = csv.reader([line], delimiter=delimiter, strict=True)
    except (csv.Error, ValueError) as error:
        raise InputError(f"{path}, line 1: the header is not CSV: {error}") from None
    names = [name.strip() for name in names]
    for at, name in enumerate(names, 1):
        problem = None
        if not name:
            problem = f"there is no header: column {at} has no name"
        elif "@" in name or "\0" in name or re.fullmatch(r"[-+]?\d[\d.,:/-]*", name):
            problem = f"there is no header: {name[:40]!r} is a value, not a name"
        elif name in names[: at - 1]:
            problem = f"two columns have the name {name!r}"
        if problem:
            hint = "The first line names the columns, as in name,email,message"
            raise InputError(f"{path}, line 1: {problem}", hint=hint)
    return names


def _row(at: str, header: list[str], cells: list[str]) -> Row:
    if len(cells) > len(header):
        hint = 'Put a value that contains a comma in quotes: "a, b"'
        raise InputError(f"{at}: {len(cells)} columns, the header names {len(header)}", hint=hint)
    row = dict(zip(header, cells, strict=False))
    for name, value in row.items():
        if "\0" in value:
            raise InputError(f"{at}: {name!r} contains a NUL character, which PostgreSQL cannot store")
    return row
