"""Comparison of job lists with the view job, after any operations and with any filter."""

import random
from typing import Any, cast

from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from support.database import Connection

STATES = ("scheduled", "retrying", "waiting", "available", "running", "completed", "cancelled", "dead")

_VIEW = """
select j.id, j.queue, j.task, j.state, j.priority, j.attempts, j.failures, j.max_attempts, j.enqueued_at, j.run_at,
       j.started_at, j.ended_at, j.worker, j.summary, j.reason, j.last_error, j.subject, j.unique_key, j.progress
  from tallybook.job j
 where (%(queue)s::text is null or j.queue = %(queue)s) and (%(task)s::text is null or j.task = %(task)s)
   and (%(states)s::text[] is null or j.state = any (%(states)s))
   and not exists (select from jsonb_each_text(%(links)s) k where j.links ->> k.key is distinct from k.value)
   and (%(error)s::text is null
        or concat_ws(' ', j.errors -> -1 ->> 'type', j.last_error) ilike '%%' || %(error)s || '%%')
   and (not %(unserved)s or j.unserved)
   and (%(since)s::timestamptz is null or j.enqueued_at >= %(since)s)
   and (%(before)s::timestamptz is null or j.enqueued_at < %(before)s)"""


def page(db: Connection, **named: Any) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return the rows of one page, and the last row if there may be more."""
    given = {name: Jsonb(value) if isinstance(value, dict) else value for name, value in named.items()}
    names = ", ".join(f"{name} => %({name})s" for name in given)
    with db.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(cast("Any", f"select * from tallybook.jobs({names})"), given).fetchall()  # noqa: S608
    more = rows.pop() if rows and rows[-1]["id"] is None else None
    assert all(row["id"] is not None and row["looked_to"] is None for row in rows)
    return rows, more


def pages(db: Connection, **named: Any) -> list[list[dict[str, Any]]]:
    """Return all pages of a list."""
    found: list[list[dict[str, Any]]] = []
    after: str | None = None
    while True:
        rows, more = page(db, **named, after=after)
        found.append(rows)
        if more is None:
            return found
        assert more["cursor"] != after, "each page has a new cursor"
        after = more["cursor"]


def ids(db: Connection, **named: Any) -> list[int]:
    return [row["id"] for rows in pages(db, **named) for row in rows]


def differences(db: Connection, **named: Any) -> str:
    """Return the differences between all pages and the view, or an empty string."""
    given: dict[str, Any] = (
        dict.fromkeys(("queue", "task", "states", "links", "error", "since", "before")) | {"unserved": False} | named
    )
    most, looked = given.pop("max_jobs", 3), given.pop("max_looked", 1000)
    shown = {row[0]: row for row in db.execute(_VIEW, {**given, "links": given["links"] and Jsonb(given["links"])})}
    rows = [row for rows in pages(db, **given, max_jobs=most, max_looked=looked) for row in rows]
    listed = [row["id"] for row in rows]
    problems = []
    if len(set(listed)) != len(listed):
        problems.append(f"twice: {sorted(job for job in set(listed) if listed.count(job) > 1)}")
    if missing := sorted(set(shown) - set(listed)):
        problems.append(f"missing: {[shown[job][:4] for job in missing]}")
    if strange := sorted(set(listed) - set(shown)):
        problems.append(f"not in the view: {strange}")
    problems += [
        f"otherwise: {row} instead of {shown[row['id']]}"
        for row in rows
        if row["id"] in shown and tuple(row.values())[:-2] != shown[row["id"]]
    ]
    return f"{named}: {', '.join(problems)}" if problems else ""


def some_filters(rng: random.Random, **values: list[Any]) -> dict[str, Any]:
    """Return a random filter: each of these names with one of its values or left out, and some states."""
    found = {name: rng.choice(those) for name, those in values.items() if those and rng.random() < 0.3}
    kind = rng.random()
    if kind < 0.4:
        found["states"] = [rng.choice(STATES)]
    elif kind < 0.7:
        found["states"] = rng.sample(STATES, rng.randint(2, len(STATES)))
    return found | {"max_jobs": rng.choice([1, 2, 3, 10, 1000])}
