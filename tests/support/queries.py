"""Helpers for tests of jobs from a query."""

from typing import Any, LiteralString

from support.database import Connection, call


def enqueue_from(db: Connection, query: str | None, **more: Any) -> tuple[int, int]:
    """Enqueue jobs from a query, by default of task t to queue q; return the numbers of rows and of new jobs."""
    ((seen, created),) = call(
        db, "enqueue_from", "seen, created", **{"query": query, "queue": "q", "task": "t", **more}
    )
    return seen, created


def values(*keys: str) -> str:
    """Return a query with these keys, in this order."""
    rows = ", ".join(f"('{key}')" for key in keys)
    return f"select key, jsonb_build_object('key', key) as args from (values {rows}) v(key)"  # noqa: S608


def keys(db: Connection, where: LiteralString | str = "true") -> list[str | None]:
    """Return the unique keys of these jobs, in the order of their enqueue."""
    query = f"select unique_key from tallybook.job where {where} order by id"  # noqa: S608
    return [row[0] for row in db.execute(query)]  # type: ignore[arg-type]
