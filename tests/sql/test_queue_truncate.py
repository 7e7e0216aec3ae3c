"""Truncating a queue: all that it holds is cancelled, in bulk, and nobody is lost, run or ended twice beside it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from support.broken import without
from support.hands import Hands, put, states

Connection = psycopg.Connection[tuple[Any, ...]]
Connect = Callable[..., Connection]
LATER = datetime.now(UTC) + timedelta(days=1)


def truncate(db: Connection, queue: str = "q", **more: Any) -> tuple[int, int, bool]:
    """Batch by batch to the end: how many were cancelled, how many told, whether others held some."""
    cancelled = cancelling = 0
    mark = None
    names = "".join(f", {name} => %({name})s" for name in more)
    for _ in range(1000):
        row = db.execute(
            f"select mark, cancelled, cancelling, busy, remain from tallybook.queue_truncate(%(queue)s, mark => %(mark)s{names})",  # type: ignore[arg-type]
            {"queue": queue, "mark": mark and psycopg.types.json.Jsonb(mark), **more},
        ).fetchone()
        assert row is not None
        mark = row[0]
        cancelled, cancelling = cancelled + row[1], cancelling + row[2]
        if not row[4]:
            return cancelled, cancelling, row[3]
    raise AssertionError("truncate does not end")


@pytest.fixture
def hands(db: Connection) -> Hands:
    return Hands(db)


@pytest.mark.servers
def test_all_that_does_not_run_is_cancelled(db: Connection, hands: Hands) -> None:
    """S3-36: truncate ends what is in line, scheduled, retrying and waiting; what runs goes on, other queues are not touched."""
    failed = put(db)
    (job,) = hands.start()
    hands.fail(job, "1 day")
    runs = put(db)
    (running,) = hands.start()
    gone = [failed, put(db), put(db, priority=7), put(db, run_at=LATER), put(db, order_key="k"), put(db, unique_key="u")]
    parent = put(db, queue="other")
    gone.append(int(hands.one("select tallybook.enqueue_after('q', 't', after => array[%s::bigint])", parent)))
    gone.append(put(db, options=psycopg.types.json.Jsonb({"fair_key": "x"})))
    assert truncate(db, by="ada") == (len(gone), 0, False)
    assert set(states(db, *gone)) == {"cancelled"}
    assert states(db, runs, parent) == ["running", "available"]
    rows = db.execute("select distinct reason, attempts > 0 from tallybook.job where id = any (%s)", (gone[1:],)).fetchall()
    assert rows == [("truncated", False)]
    errors = db.execute("select distinct error from tallybook.attempt where job_id = any (%s) and error is not null and state = 'cancelled'", (gone,))
    assert errors.fetchall() == [({"message": "truncated", "by": "ada"},)]
    for table in ("scheduled", "waiting", "tombstone", "order_line", "parent", "concurrency_line"):
        assert hands.one(f"select count(*) from tallybook.{table}") == 0, table
    hands.complete(running)
    assert hands.run_all() == []
    assert put(db, unique_key="u") not in gone  # its key is free
    assert len(hands.run_all()) == 1
