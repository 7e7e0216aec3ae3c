"""Output for people and for programs: tables and pairs, JSON, progress.

Text of the database is cleaned for a terminal: it cannot move the cursor, colour the screen or fake a line.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TextIO

import click

from tallybook._db.texts import loads
from tallybook._model.durations import format_duration

if TYPE_CHECKING:
    from rich.console import Console

Columns = Mapping[str, str | Callable[[Any], object]]
"""Columns of a table: a title, and an attribute or a function that makes the cell of a row."""

_NUMBER = re.compile(r"(-?\d+(\.\d+)?( ms)?)?")
_SPACES = re.compile(r"[\t\n\r\v\f\x85\u2028\u2029]+")
_SEQUENCES = re.compile("(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]")
# C0 and C1 controls, and the marks that change the direction of text.
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_C1 = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def clean(value: object) -> str:
    """Return `value` as one line without control characters; None is empty."""
    return "" if value is None else _CONTROLS.sub("", _SPACES.sub(" ", _SEQUENCES.sub("", str(value))))


def json_safe(text: str) -> str:
    """Return equal JSON with control characters as escapes."""
    return _C1.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def local(text: str | datetime | None) -> str:
    """Format a time (or its JSON) in the local zone, to the second."""
    if not text:
        return ""
    try:
        at = text if isinstance(text, datetime) else datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):  # infinity, or a year that Python does not know
        return clean(text)


def yes_no(value: object) -> object:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def short(text: str, most: int = 100) -> str:
    text = clean(text)
    return text if len(text) <= most else text[: most - 3] + "..."


def print_rows(
    shown: Columns,
    rows: Sequence[Any],
    *,
    empty: str,
    nodes: Sequence[str] = (),
    as_json: bool = False,
    plain: Callable[[Any], object] | None = None,
) -> None:
    """Print rows, with their nodes if any, as a table or as JSON; a row may be a JSON text of the server."""
    if as_json:
        texts = [row_json(row, plain) for row in rows]
        print_json([_with_node(*pair) for pair in zip(nodes, texts, strict=True)] if nodes else texts)
        return
    read = [loads(row) if isinstance(row, str) else row for row in rows]
    cells = [[_cell(row, of) for of in shown.values()] for row in read]
    if nodes:
        shown, cells = {"node": "", **shown}, [[node, *row] for node, row in zip(nodes, cells, strict=True)]
    print_table(tuple(shown), cells, empty=empty)


def _cell(row: Any, of: str | Callable[[Any], object]) -> object:
    found: Any = of(row) if callable(of) else row[of] if isinstance(row, dict) else getattr(row, of)
    if isinstance(found, timedelta):
        return format_duration(found)
    return local(found) if isinstance(found, datetime) or (isinstance(of, str) and of.endswith("_at")) else found


def row_json(row: Any, plain: Callable[[Any], object] | None = None) -> str:
    """Return a row of a list as JSON; a text of the server is not changed."""
    if isinstance(row, str):
        return row
    value = asdict(row) if is_dataclass(row) else row  # type: ignore[arg-type]
    return json.dumps(value, default=plain or _plain, ensure_ascii=False)


def _plain(value: datetime | timedelta) -> object:
    return value.total_seconds() if isinstance(value, timedelta) else value.isoformat()


def _with_node(node: str, text: str) -> str:
    """Return the JSON of an object with the node as its first member; the rest of the text is not changed."""
    rest = text.lstrip().removeprefix("{").lstrip()
    return f'{{"node": {json.dumps(node)}{"" if rest == "}" else ", "}{rest}'


def _console(stream: TextIO) -> Console | None:
    """Return Rich's console if it is installed and the stream is a terminal; None: plain text."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, markup=False, highlight=False, emoji=False)


def working(what: str) -> AbstractContextManager[object]:
    """Show progress on stderr: a spinner on a terminal, else a line."""
    console = _console(sys.stderr)
    if console is not None:
        from rich.text import Text

        return console.status(Text(clean(what)))
    click.echo(clean(what), err=True)
    return nullcontext()


def print_table(titles: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
    """Print a table of cleaned texts with numbers on the right, or `empty` if there are no rows."""
    cells = [[clean(cell) for cell in row] for row in rows]
    if not cells:
        click.echo(empty)
        return
    numeric = [all(map(_NUMBER.fullmatch, column)) for column in zip(*cells, strict=True)]
    console = _console(sys.stdout)
    if console is None:
        widths, lines = [max(map(len, column)) for column in zip(titles, *cells, strict=True)], []
        for row in (titles, *cells):
            sized = zip(row, widths, numeric, strict=True)
            texts = (cell.rjust(width) if number else cell.ljust(width) for cell, width, number in sized)
            lines.append("  ".join(texts).rstrip())
        click.echo("\n".join(lines))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)  # as wide as without Rich
    for title, number in zip(titles, numeric, strict=True):
        # A number is never cut in two, nor a word of a title.
        least = max(map(len, [*title.split(), ""]))
        table.add_column(title, justify="right" if number else "left", overflow="fold", no_wrap=number, min_width=least)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def print_pairs(pairs: Mapping[str, object]) -> None:
    width = max(map(len, pairs))
    for name, value in pairs.items():
        click.echo(f"{name.ljust(width)}  {clean(value)}".rstrip())


def print_json(found: Any) -> None:
    """Print one JSON document: one row, or an array of rows, one per line.

    Texts of the server are not parsed, since numbers of jsonb are exact and Python's floats are not.
    """
    rows = [json_safe(row_json(row)) for row in (found if isinstance(found, list | tuple) else [found])]
    click.echo("[" + ",\n ".join(rows) + "]" if isinstance(found, list | tuple) else rows[0])
