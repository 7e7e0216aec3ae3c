"""--nodes: lists are read from all nodes concurrently and merged; changes are made on one node after the other."""

import io
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from typing import Any, TypeVar

import click

from tallybook._cli.database import Db
from tallybook._cli.errors import Problem, problem
from tallybook._cli.text import clean
from tallybook._db.driver import Connection, Error
from tallybook._db.nodes import Answer, Node, asked
from tallybook._db.texts import loads
from tallybook._model import merged
from tallybook.errors import TallybookError

T = TypeVar("T")
Found = list[tuple[str, Any]]
"""Rows, each with the name of its node before it."""
Merge = Callable[[Found, Mapping[str, Any]], Found]
"""A function that merges the lists of all nodes, in the order of the nodes; it also receives the options."""
ANSWER = 10.0
"""The timeout of a node, in seconds."""

nodes_option = click.option(
    "--nodes", "nodes_", metavar="NAMES", help="Use these nodes: all, or names like north,south. [one database]"
)

Said = tuple[T | None, TallybookError | None]
"""The answer of a node, or the error that it returned."""


def answers(db: Db, fn: Callable[[Db], T], *, seconds: float = ANSWER) -> list[Answer[Said[T]]]:
    """Call `fn` for each node concurrently, and return the answers."""

    def ask(node: Node) -> Answer[Said[T]]:  # one call per node: each has its own database
        def question(conn: Connection) -> Said[T]:
            one = db.over(conn, node)
            try:
                return fn(one), None
            except TallybookError as error:
                return None, error

        return asked((node,), question, seconds=seconds)[0]

    with ThreadPoolExecutor(len(db.nodes)) as threads:
        return list(threads.map(ask, db.nodes))


def gathered(db: Db, fn: Callable[[Db], T]) -> list[tuple[str, T]]:
    """Return the result of `fn` for each node that answers; print a line on stderr for each other node.

    Raises Problem if no node has answered, or the error of Tallybook if every answer is an error.
    """
    found, refusal = [], None
    for answer in answers(db, fn):
        if answer.value is None:
            click.echo(f"node {answer.node.name} did not answer: {clean(answer.error)}", err=True)
            continue
        value, refused = answer.value
        refusal = refusal or refused
        if refused is None:
            found.append((answer.node.name, value))
    if not found:
        raise refusal or Problem("no node has answered", hint="See `tallybook node check`")
    return found  # type: ignore[return-value]  # it is None where fn returns None


def newest(time: str, number: str) -> Merge:
    """Merge by this time, then by this id, newest first, up to --limit."""

    def merge(found: Found, given: Mapping[str, Any]) -> Found:
        found.sort(key=lambda pair: (getattr(pair[1], time), getattr(pair[1], number)), reverse=True)
        return found[: given["limit"]]

    return merge


def summed(found: Found, _: Mapping[str, Any]) -> Found:
    """Merge to one row per name, with the sums, and list the nodes."""
    rows: dict[str, tuple[str, dict[str, Any]]] = {}
    for node, text in found:
        row = loads(text)
        on, sums = rows.get(row["name"], ("", None))
        rows[row["name"]] = (node, row) if sums is None else (f"{on}, {node}", merged.summed(sums, row))
    return [pair for _, pair in sorted(rows.items())]


def each(db: Db, fn: Callable[[Db], str | None], *, as_json: bool = False) -> str | None:
    """Run a command on this database, or on each of the nodes in turn, and report per node.

    After a failure of a node it continues with the others; exit code 1 if any failed. `as_json` prints one document.
    """
    if not db.nodes:
        return fn(db)
    failed, documents = False, []
    for node in db.nodes:
        written, error, line = io.StringIO(), None, None
        try:
            with redirect_stdout(written):
                line = fn(db.at(node))
        except (TallybookError, Error, Problem) as raised:
            failed, error = True, problem(raised)
        except SystemExit as ended:
            failed |= bool(ended.code)
        text = "\n".join(part for part in (written.getvalue().rstrip("\n"), line) if part)
        if as_json:
            document = f', "answer": {text}' if text else ""
            told = f', "error": {json.dumps(error.message)}' if error else ""
            documents.append(f'{{"node": {json.dumps(node.name)}{document}{told}}}')
            continue
        for shown in text.splitlines():
            click.echo(f"{node.name}: {shown}")
        if error:
            click.echo(f"{node.name}: error: {clean(error.message)}", err=True)
    if as_json:
        click.echo("[" + ",\n ".join(documents) + "]")
    if failed:
        raise SystemExit(1)
    return None
