"""--nodes: a list is asked of all nodes side by side and merged, a change is made on one node after the other."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from typing import Any, TypeVar

import click

from tallybook._cli.database import Conn, Db
from tallybook._cli.errors import Problem, problem
from tallybook._cli.text import clean
from tallybook._db.driver import Error
from tallybook._db.nodes import Answer, Node, asked
from tallybook._db.stored import loads
from tallybook.errors import TallybookError

T = TypeVar("T")
Found = list[tuple[str, Any]]
"""Rows, each after the name of its node."""
Merge = Callable[[Found, Mapping[str, Any]], Found]
"""What makes one list of the lists of all nodes, in the order of the nodes; it is passed the options, too."""
ANSWER = 10.0
"""Seconds that a node has for its answer."""

nodes_option = click.option(
    "--nodes", "nodes_", metavar="NAMES", help="Over these nodes: all, or names like north,south. [one database]"
)


Said = tuple[T | None, TallybookError | None]
"""What a node has answered, or the error with which it refuses."""


def answers(db: Db, fn: Callable[[Db], T], *, seconds: float = ANSWER) -> list[Answer[Said[T]]]:
    """What `fn` returns for each node, side by side."""

    def question(node: Node, conn: Conn) -> Said[T]:
        one = db.over(conn, node)
        try:
            return fn(one), None
        except TallybookError as error:
            return None, error

    def ask(node: Node) -> Answer[Said[T]]:  # one question a node: each knows where it is asked
        return asked((node,), partial(question, node), seconds=seconds)[0]

    with ThreadPoolExecutor(len(db.nodes)) as threads:
        return list(threads.map(ask, db.nodes))


def gathered(db: Db, fn: Callable[[Db], T]) -> list[tuple[str, T]]:
    """What `fn` returns for each node that answers. A node that does not is one line on stderr.

    A Problem where no node has answered; an error of Tallybook's own where each that answers refuses with one.
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
    """The newest of all by this time, and this id where that is the same, as many as --limit says."""

    def merge(found: Found, given: Mapping[str, Any]) -> Found:
        found.sort(key=lambda pair: (getattr(pair[1], time), getattr(pair[1], number)), reverse=True)
        return found[: given["limit"]]

    return merge


def summed(name: str, *numbers: str, latest: Sequence[str] = ()) -> Merge:
    """One row for each name: the numbers are added, of `latest` the first value that there is, the nodes are named."""

    def merge(found: Found, _: Mapping[str, Any]) -> Found:
        rows: dict[str, tuple[list[str], dict[str, Any]]] = {}
        for node, text in found:
            row = loads(text)
            on, sums = rows.setdefault(row[name], ([], dict.fromkeys(row)))
            on.append(node)
            sums |= {key: row[key] for key in (name, *latest) if sums[key] is None}
            sums |= {key: (sums[key] or 0) + row[key] for key in numbers}
        return [(", ".join(on), sums) for _, (on, sums) in sorted(rows.items())]

    return merge


def with_node(node: str, text: str) -> str:
    """The JSON of an object, with the node before the rest; the server's own text stays as it is."""
    rest = text.lstrip().removeprefix("{").lstrip()
    return f'{{"node": {json.dumps(node)}{"" if rest == "}" else ", "}{rest}'


def each(db: Db, fn: Callable[[Db], str | None], *, as_json: bool = False) -> str | None:
    """Run a command on this database, or on each of the nodes in turn, and report by node.

    A node that fails keeps none of the others from it; exit code 1 if any did. With `as_json` it is one document.
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
