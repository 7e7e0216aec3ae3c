"""Output for people and for programs: tables and pairs, JSON, progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, is_dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TextIO

import click

from tallybook._cli.text import Columns, clean, columns, json_safe, local
from tallybook._db.texts import loads
from tallybook._model.durations import format_duration

if TYPE_CHECKING:
    from rich.console import Console


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
    """Print a table of cleaned texts, or `empty` if there are no rows."""
    cells = [[clean(cell) for cell in row] for row in rows]
    if not cells:
        click.echo(empty)
        return
    console = _console(sys.stdout)
    if console is None:
        click.echo("\n".join(columns(titles, cells)))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for at, title in enumerate(titles):
        numeric = all(row[at].lstrip("-").isdigit() for row in cells)
        table.add_column(title, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def print_pairs(pairs: Sequence[tuple[str, object]]) -> None:
    width = max(len(name) for name, _ in pairs)
    for name, value in pairs:
        click.echo(f"{name.ljust(width)}  {clean(value)}".rstrip())


def print_json(found: Any) -> None:
    """Print one JSON document: one row, or an array of rows, one per line.

    Texts of the server are not parsed, since numbers of jsonb are exact and Python's floats are not.
    """
    rows = [json_safe(row_json(row)) for row in (found if isinstance(found, list | tuple) else [found])]
    click.echo("[" + ",\n ".join(rows) + "]" if isinstance(found, list | tuple) else rows[0])
