"""What is done to many jobs: a preview names them by their ids, and what is done is done to these, in batches, each on record."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psycopg

from tallybook._model.lists import JobDone
from tallybook._web.asked import job_of, text_of
from tallybook._web.database import Conn
from tallybook._web.view import Act, View
from tallybook.errors import InvalidArgument, TallybookError

if TYPE_CHECKING:
    from starlette.responses import Response

    from tallybook._app import App

__all__ = ["MOST", "VERBS", "Preview", "Verb", "do", "ids_of", "preview"]

MOST = 10_000
"""Jobs of one preview, and of what is done after it."""
BATCH = 200
"""Jobs of one transaction: nobody waits long for one of them, and the audit's row names all of them."""
_LONGEST = 20.0  # seconds that a request may go on beginning batches
_OPEN = ("scheduled", "retrying", "waiting", "available", "running")


@dataclass(frozen=True, slots=True)
class Verb:
    """What can be done to many jobs, and to which."""

    name: str
    states: tuple[str, ...]
    run: Callable[[App, Conn, list[int], str | None], Awaitable[list[JobDone]]]
    danger: bool
    effect: str


VERBS = {
    one.name: one
    for one in (
        Verb("retry", ("dead", "cancelled"), lambda app, conn, ids, _: app.retry_jobs(conn, ids), False,
             "Each gets another attempt, at once."),
        Verb("cancel", _OPEN, lambda app, conn, ids, why: app.cancel_jobs(conn, ids, why), True,
             "None of them will start; those that run are told to stop."),
        Verb("drop", ("dead",), lambda app, conn, ids, _: app.drop_jobs(conn, ids), True,
             "Their dead letters are thrown away: they cannot be retried any more."),
    )
}  # fmt: skip
_SAID = {
    "retried": "{} retried",
    "cancelled": "{} cancelled",
    "cancelling": "{} that run are told to stop",
    "dropped": "{} dropped",
}


@dataclass(slots=True)
class Preview:
    """Which jobs it would be done to."""

    verb: Verb
    ids: list[int] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    sample: list[dict[str, Any]] = field(default_factory=list)
    more: bool = False
    """Whether there may be more, which this is not about."""


def preview(view: View, found: Preview, *, to: str, back: str, about: str) -> Response:
    """The page that says how many there are, shows some, and asks."""
    why_not = "" if view.may_operate else view.site.why_read_only(view.visit.user)
    return view.render("preview.html", found=found, to=to, back=back, about=about, why_not=why_not)


def ids_of(act: Act) -> list[int]:
    """The jobs that a form names: one by its own button, those of a preview, or those that are checked."""
    said = act.form("only") or act.form("jobs")
    named = said.split() if said else act.form_all("job")
    if not named:
        raise InvalidArgument("No job is chosen. Nothing was changed.")
    ids = [job_of(one) for one in dict.fromkeys(named)]
    if len(ids) > MOST or None in ids:
        raise InvalidArgument(f"The form has to name up to {MOST:,} jobs. Nothing was changed.")
    return [one for one in ids if one is not None]


async def do(act: Act, verb: Verb) -> str:
    """Do it to the jobs that the form names; what to tell the person."""
    ids, reason, about = (
        ids_of(act),
        text_of("the reason", act.form("reason")),
        text_of("the filter", act.form("about")),
    )
    said: Counter[str] = Counter()
    refusals: list[str] = []
    begun, at, stopped = time.monotonic(), 0, ""
    while at < len(ids) and time.monotonic() - begun < _LONGEST:
        batch = ids[at : at + BATCH]
        try:
            async with act.step() as conn:
                done = await verb.run(act.app, conn, batch, reason)
                became = Counter(one.done for one in done)
                target: dict[str, Any] = {"jobs": batch} | ({"filter": about} if about else {})
                if verb.name == "cancel" and reason:
                    target["reason"] = reason
                if any(one.changed for one in done):
                    await act.audit(f"jobs.{verb.name}", target, dict(became))
                else:
                    act.nothing()
        except (TallybookError, psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable) as error:
            if not at:
                raise
            stopped = f" Then it stopped: {act.site.explain(error)[1]}"
            break
        at += len(batch)
        said += became
        refusals += [one.detail for one in done if not one.changed and one.detail]
    changed = ", ".join(text.format(_jobs(said[key])) for key, text in _SAID.items() if said[key])
    answer = f"{changed}." if changed else "Nothing was changed."
    if refusals:
        answer += f" {_jobs(len(refusals))} left as they are: {refusals[0][:200]}"
        answer += f", and {len(refusals) - 1:,} more." if len(refusals) > 1 else "."
    left = len(ids) - at
    return answer + stopped + (f" {_jobs(left)} were not met: do it again." if left else "")


def _jobs(n: int) -> str:
    return f"{n:,} job" if n == 1 else f"{n:,} jobs"
