"""How jobs are put in, traced or not."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tallybook._db.declared import Call
from tallybook._db.verb import run, run_sync
from tallybook._model.tracing import Tracing, What

T = TypeVar("T")


def send(
    tracing: Tracing | None, conn: object, what: What, verb: Callable[[What], Call[T]], *, keeps: bool = False
) -> Coroutine[Any, Any, T]:
    """Put this in by a verb: run, with a trace around it where the App is traced. `keeps` as in Tracing.sending."""
    return run(conn, verb(what)) if tracing is None else _traced(tracing, conn, what, verb, keeps)


async def _traced(tracing: Tracing, conn: object, what: What, verb: Callable[[What], Call[T]], keeps: bool) -> T:
    with tracing.sending(what, keeps=keeps) as sending:
        reports = await run(conn, verb(sending.what))
        sending.sent(reports)
    return reports


def send_sync(
    tracing: Tracing | None, conn: object, what: What, verb: Callable[[What], Call[T]], *, keeps: bool = False
) -> T:
    """The same on a synchronous connection."""
    if tracing is None:
        return run_sync(conn, verb(what))
    with tracing.sending(what, keeps=keeps) as sending:
        reports = run_sync(conn, verb(sending.what))
        sending.sent(reports)
    return reports
