"""tallybook dead list, show, retry, drop."""

from collections.abc import Callable
from typing import Any, cast

import click

from tallybook._app.jobs import REASONS, DeadWhich, dead_count
from tallybook._cli.common import agreed, command, json_object, limit_option, listing, options, text
from tallybook._cli.database import APP, Db, each, newest
from tallybook._cli.job import MANY, said_of, show, when
from tallybook._cli.output import Columns, clean, short
from tallybook._db import calls
from tallybook._model.job_info import DeadLetter
from tallybook.errors import TallybookError, UnknownJob

dead = click.Group(
    "dead",
    help="List, show, retry and drop dead letters.\n\nA dead letter is a dead job. It runs again only if you retry it.",
)

# The same command under both nouns: it shows any job, dead or not.
dead.add_command(show)

_filters = options(
    click.option("--queue", type=text, help="Only this queue."),
    click.option("--task", type=text, help="Only this task."),
    click.option("--reason", type=click.Choice(REASONS), metavar="REASON", help=f"{', '.join(REASONS)}."),
    click.option(
        "--error", metavar="TEXT", type=text, help="Only if the last error contains this text, ignoring case."
    ),
    click.option("--args", metavar="JSON", type=text, help="Only if the args contain this JSON object."),
    click.option("--since", type=when, help="Died since then, like '2 hours' (ago) or 2026-01-31T09:00Z."),
    click.option("--before", type=when, help="Died before then."),
)


def _which(given: dict[str, Any]) -> DeadWhich:
    args = None if given["args"] is None else json_object("--args", given["args"])
    return cast(DeadWhich, given | {"args": args})


def _error(letter: DeadLetter) -> str:
    text = said_of(letter.error or {})
    return short(f"{letter.summary} - {text}" if letter.summary else text)


_COLUMNS: Columns = {
    "job": "job", "died": "died_at", "queue": "queue", "task": "task", "reason": "reason", "failures": "failures",
    "error": _error,
}  # fmt: skip


@listing(_COLUMNS, of=dead, empty="no such dead letters", newest=True, merge=newest("died_at", "job"))
@_filters
@limit_option()
def list_(db: Db, limit: int, **given: Any) -> list[DeadLetter]:
    """List dead letters, newest first."""
    return db.run(APP.dead.list(**_which(given), max_jobs=limit))


_chosen = options(
    click.argument("job_ids", metavar="[ID...]", type=int, nargs=-1),
    _filters,
    click.option("--all", "everything", is_flag=True, help="All dead letters."),
)


@command(of=dead, nodes=True)
@_chosen
def retry(db: Db, yes: bool, **given: Any) -> str | None:
    """Retry dead letters now: by id, or all that match every filter."""

    def one(job_id: int) -> str:
        return f"retried, attempt {db.of(job_id).run(calls.retry(job_id))}"

    def many(db: Db, which: DeadWhich) -> str:
        done = db.run(APP.dead.retry(**which, max_jobs=MANY))
        refused = f", {done.refused} are not: another live job has their unique key" if done.refused else ""
        return f"{done.retried} jobs are retried{refused}"

    return _change(db, "retry", one, many, yes, **given)


@command(of=dead, nodes=True)
@_chosen
def drop(db: Db, yes: bool, **given: Any) -> str | None:
    """Drop dead letters for good: by id, or all that match every filter."""

    def one(job_id: int) -> str:
        (done,) = db.of(job_id).run(APP.jobs.drop([job_id]))
        if done.done == "unknown":
            raise UnknownJob(job_id)
        return "dropped" if done.done == "dropped" else "not changed: it is not dead"

    def many(db: Db, which: DeadWhich) -> str:
        return f"{db.run(APP.dead.drop_matching(**which, max_jobs=MANY))} dead letters dropped"

    return _change(db, "drop", one, many, yes, **given)


def _change(
    db: Db, verb: str, one: Callable[[int], str], many: Callable[[Db, DeadWhich], str], yes: bool, **given: Any
) -> str | None:
    """Change each of these jobs, or on each node all that match. Exactly one of ids, filters and --all is allowed."""
    job_ids, everything = given.pop("job_ids"), given.pop("everything")
    filtered = any(value is not None for value in given.values())
    if bool(job_ids) + filtered + everything != 1:
        filters_ = "--queue, --task, --reason, --error, --args, --since, --before"
        raise click.UsageError(f"pass ids, or filters ({filters_}), or --all")
    if not job_ids:
        which = _which(given)
        return each(db, lambda at: many(at, which) if _may_change(at, which, verb, yes) else None)
    _ = db.nodes or db.conn  # a problem of the database is not an error of one job
    failed = False
    for job_id in dict.fromkeys(job_ids):
        try:
            click.echo(f"job {job_id}: {one(job_id)}")
        except TallybookError as error:
            failed = True
            click.echo(f"job {job_id}: {clean(error)}", err=True)
    if failed:
        raise SystemExit(1)
    return None


def _may_change(db: Db, which: DeadWhich, verb: str, yes: bool) -> bool:
    found = 0 if yes else db.run(dead_count(which, 1001))
    if not yes and not found:
        click.echo("no such dead letters")
    elif not (yes := agreed(db.named(f"{verb} {found if found <= 1000 else 'more than 1000'} dead letters?"), yes)):
        click.echo("nothing done", err=True)
    return yes
