"""jobs: lists of jobs by filter, held against the view job; and what is done to many of them."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from support.hands import Hands, put, states

pytestmark = pytest.mark.servers
Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def hands(db: Connection) -> Hands:
    return Hands(db, "q", "r")


def pages(db: Connection, most: int = 3, **named: Any) -> list[list[dict[str, Any]]]:
    """All pages of a list, each with the rows that name a job."""
    named = {name: Jsonb(value) if isinstance(value, dict) else value for name, value in named.items()}
    found: list[list[dict[str, Any]]] = []
    after: str | None = None
    while True:
        given = named | {"after": after, "max_jobs": most}
        names = ", ".join(f"{name} => %({name})s" for name in given)
        rows = [row[0] for row in db.execute(f"select to_jsonb(j) from tallybook.jobs({names}) j", given)]  # type: ignore[arg-type]  # noqa: S608
        more = rows.pop() if rows and rows[-1]["id"] is None else None
        found.append(rows)
        if more is None:
            return found
        assert more["cursor"] != after, "a page goes on"
        after = more["cursor"]


def ids(db: Connection, most: int = 3, **named: Any) -> list[int]:
    return [row["id"] for page in pages(db, most, **named) for row in page]


def test_pages_join_to_the_list(db: Connection, hands: Hands) -> None:
    """Jobs are listed newest first, in pages; of one queue, too."""
    jobs = [put(db, queue="q" if n % 2 else "r", args={"n": n}) for n in range(10)]
    assert ids(db) == jobs[::-1]
    assert ids(db, queue="q") == jobs[::-2]
    assert ids(db, queue="none") == []
    assert [len(page) for page in pages(db, 4)] == [4, 4, 2]


def done(db: Connection, verb: str, jobs: list[int], *more: object) -> list[tuple[Any, ...]]:
    marks = ", %s" * len(more)
    return db.execute(f"select * from tallybook.{verb}(%s::bigint[]{marks})", (jobs, *more)).fetchall()  # type: ignore[arg-type]  # noqa: S608


def test_many_are_cancelled_retried_and_dropped(db: Connection, hands: Hands) -> None:
    """Per job it is said what became of it; one that has ended or is gone keeps no other from it, and is named once."""
    over, runs, dies, stands = (put(db) for _ in range(4))
    first, second, third = hands.start(3)
    hands.complete(first)
    hands.fail(third, final=True)
    assert done(db, "cancel_jobs", [stands, runs, over, 99, over], "no more") == [
        (over, "refused", f"job {over} is completed already"),
        (runs, "cancelling", None),
        (stands, "cancelled", None),
        (99, "unknown", "there is no job 99"),
    ]
    hands.say("cancelled", second)
    assert done(db, "retry_jobs", [dies, stands, over, 99]) == [
        (over, "refused", f"job {over} is not dead or cancelled. It is completed"),
        (dies, "retried", "attempt 2"),
        (stands, "retried", "attempt 2"),
        (99, "unknown", "there is no job 99"),
    ]
    assert states(db, over, runs, dies, stands) == ["completed", "cancelled", "available", "available"]
    for job in hands.start():
        hands.fail(job, final=True)
    assert done(db, "drop_jobs", [stands, over, 99]) == [
        (over, "refused", f"job {over} is completed"),
        (stands, "dropped", None),
        (99, "unknown", "there is no job 99"),
    ]
    assert db.execute("select job_id from tallybook.dead").fetchall() == [(dies,)]


@pytest.mark.parametrize("verb", ["retry_jobs", "cancel_jobs", "drop_jobs"])
def test_at_most_a_thousand_at_once(db: Connection, verb: str) -> None:
    """More than 1000 ids are refused before anything is done to one of them."""
    job = put(db)
    with pytest.raises(psycopg.Error, match="up to 1000 ids") as said:
        done(db, verb, [job, *range(2, 1002)])
    assert said.value.sqlstate == "TB005"
    with pytest.raises(psycopg.Error, match="up to 1000 ids"):
        db.execute(f"select tallybook.{verb}(array[1, null]::bigint[])")  # type: ignore[arg-type]
    assert states(db, job) == ["available"]
