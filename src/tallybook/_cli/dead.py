"""tallybook dead list, show, retry, drop."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from tallybook._cli.common import (
    Conn,
    agreed,
    connect,
    dsn_option,
    json_object,
    json_option,
    print_json,
    print_table,
)
from tallybook._cli.job import MANY, show
from tallybook._cli.job_list import WHEN
from tallybook._cli.text import clean, local
from tallybook._db import calls, filters, sync
from tallybook._db.filters import DeadFilter
from tallybook._model.job import DeadLetter
from tallybook.errors import TallybookError

REASONS = ("failed", "crashed", "expired", "killed")
F = TypeVar("F", bound=Callable[..., Any])


@click.group()
def dead() -> None:
    """List, show, retry and drop dead letters.

    A dead letter is a job that no attempt is left for.
    """


def _filters(command: F) -> F:
    for option in reversed(
        (
            click.option("--queue", help="Of this queue."),
            click.option("--task", help="Of this task."),
            click.option("--reason", type=click.Choice(REASONS), metavar="REASON", help=f"{', '.join(REASONS)}."),
            click.option("--error", metavar="TEXT", help="Whose last error contains this, whatever the case."),
            click.option("--args", metavar="JSON", help="Whose args contain this JSON object."),
            click.option(
                "--since", type=WHEN, metavar="WHEN", help="Died since then: '2 hours' ago, or 2026-01-31T09:00Z."
            ),
            click.option("--before", type=WHEN, metavar="WHEN", help="Died before then."),
        )
    ):
        command = option(command)
    return command


def _which(given: dict[str, Any]) -> DeadFilter:
    args = given.pop("args")
    return DeadFilter(**given, args=None if args is None else json_object("--args", args))


@dead.command("list")
@_filters
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=50, show_default=True, help="At most so many.")
@dsn_option
@json_option
def list_(dsn: str | None, limit: int, as_json: bool, **given: Any) -> None:
    """List dead letters, newest first."""
    with connect(dsn) as conn:
        letters = sync.run(conn, filters.dead_letters(_which(given), limit))
    if as_json:
        print_json([_json(letter) for letter in letters])
        return
    titles = ("job", "died", "queue", "task", "reason", "failures", "error")
    print_table(titles, [_line(letter) for letter in letters], empty="no such dead letters")
    if len(letters) == limit:
        click.echo(f"the newest {limit}; --limit shows more", err=True)


def _line(letter: DeadLetter) -> tuple[object, ...]:
    error = letter.error or {}
    text = ": ".join(str(error[key]) for key in ("type", "message") if error.get(key))
    if letter.summary:
        text = f"{letter.summary} - {text}"
    text = clean(text)
    return (
        letter.job, local(letter.died_at.isoformat()), letter.queue, letter.task, letter.reason, letter.failures,
        text if len(text) <= 100 else text[:97] + "...",
    )  # fmt: skip


def _json(letter: DeadLetter) -> str:
    columns = {name: getattr(letter, name) for name in DeadLetter.__dataclass_fields__}
    return json.dumps(columns, default=lambda value: value.isoformat(), ensure_ascii=False)


# All about one job, dead or not: one command, found under both nouns.
dead.add_command(show)


@dead.command()
@click.argument("job_ids", metavar="[ID...]", type=int, nargs=-1)
@_filters
@click.option("--all", "everything", is_flag=True, help="All dead letters.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@dsn_option
def retry(job_ids: Sequence[int], everything: bool, yes: bool, dsn: str | None, **given: Any) -> None:
    """Give dead letters another attempt, at once: these jobs, or all that match every filter given."""
    which = _one_way(job_ids, everything, given)
    with connect(dsn) as conn:
        if which is None:
            _each(conn, job_ids, lambda job_id: f"back in line, attempt {sync.run(conn, calls.retry(job_id))}")
            return
        if _many_agreed(conn, which, "retry", yes):
            done = sync.run(conn, filters.retry_dead(which, MANY))
            click.echo(f"{done.retried} jobs are back in line", nl=not done.refused)
            if done.refused:
                click.echo(f", {done.refused} are not: another live job has their unique key")


@dead.command()
@click.argument("job_ids", metavar="[ID...]", type=int, nargs=-1)
@_filters
@click.option("--all", "everything", is_flag=True, help="All dead letters.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@dsn_option
def drop(job_ids: Sequence[int], everything: bool, yes: bool, dsn: str | None, **given: Any) -> None:
    """Throw dead letters away for good: these jobs, or all that match every filter given."""
    which = _one_way(job_ids, everything, given)
    with connect(dsn) as conn:
        if which is None:
            said = {True: "dropped", False: "nothing done: it is not dead"}
            _each(conn, job_ids, lambda job_id: said[sync.run(conn, filters.drop_dead(job_id))])
        elif _many_agreed(conn, which, "drop", yes):
            click.echo(f"{sync.run(conn, filters.drop_dead_many(which, MANY))} dead letters dropped")


def _one_way(job_ids: Sequence[int], everything: bool, given: dict[str, Any]) -> DeadFilter | None:
    """The filter, or None where ids are given; exactly one of ids, filters and --all makes sense."""
    filtered = any(value is not None for value in given.values())
    if bool(job_ids) + filtered + everything != 1:
        raise click.UsageError(
            "give ids, or filters (--queue, --task, --reason, --error, --args, --since, --before), or --all"
        )
    return None if job_ids else _which(given)


def _many_agreed(conn: Conn, which: DeadFilter, verb: str, yes: bool) -> bool:
    if yes:
        return True
    shown = sync.run(conn, filters.dead_letters(which, 1001))
    count = f"{len(shown)}" if len(shown) <= 1000 else "more than 1000"
    if not shown:
        click.echo("no such dead letters")
        return False
    if not agreed(f"{verb} {count} dead letters?", yes):
        click.echo("nothing done", err=True)
        return False
    return True


def _each(conn: Conn, job_ids: Sequence[int], verb: Callable[[int], str]) -> None:
    failed = False
    for job_id in dict.fromkeys(job_ids):
        try:
            click.echo(f"job {job_id}: {verb(job_id)}")
        except TallybookError as error:
            failed = True
            click.echo(f"job {job_id}: {clean(error)}", err=True)
    if failed:
        raise SystemExit(1)
