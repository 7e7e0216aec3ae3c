"""What is done to many jobs: a preview names them by their ids, and what is done is done to these, in batches, each on record."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from tallybook._app import App
from tallybook._db.calls import STATE
from tallybook._db.driver import QueryCanceled
from tallybook._db.jobs import STATES
from tallybook._model.lists import JobDone
from tallybook.errors import InvalidArgument, QueueUnavailable, TallybookError
from tallybook.extra.dashboard.asked import job_of, number_of, text_of
from tallybook.extra.dashboard.database import IN_THE_WAY, Conn
from tallybook.extra.dashboard.nodes import At
from tallybook.extra.dashboard.view import Act, Pages, View

MOST = 10_000
"""Jobs of one preview, and of what is done after it."""
PIECE = 250
"""Jobs that one look of a preview finds at most: the page is there at once, and looks further by itself."""
_LOOKS = 200
"""Looks of one preview: so far back it goes where next to nothing matches."""
BATCH = 200
"""Jobs of one transaction: nobody waits long for one of them, and the audit's row names all of them."""
_LONGEST = 20.0  # seconds that a request may go on beginning batches
_LONGEST_FILTER = 500
_OPEN = ("scheduled", "retrying", "waiting", "available", "running")


@dataclass(frozen=True, slots=True)
class Verb:
    """What can be done to many jobs, and to which."""

    name: str
    states: tuple[str, ...]
    run: Callable[[App, Conn, list[int], str | None], Awaitable[list[JobDone]]]
    danger: bool
    effect: str
    if_asked: tuple[str, ...] = ()
    """Those of the states that have to be asked for: what matches whatever its state does not mean them."""


VERBS = {
    one.name: one
    for one in (
        Verb("retry", ("dead", "cancelled"), lambda app, conn, ids, _: app.jobs.retry(ids).on(conn), False,
             "Each gets another attempt, at once."),
        Verb("cancel", (*_OPEN, "dead"), lambda app, conn, ids, why: app.jobs.cancel(ids, why).on(conn), True,
             "None of them will start; running ones are asked to stop. Dead ones leave the dead letters.", if_asked=("dead",)),
        Verb("drop", ("dead",), lambda app, conn, ids, _: app.jobs.drop(ids).on(conn), True,
             "Their dead letters are deleted: the jobs cannot be retried."),
    )
}  # fmt: skip
_CANCELLED = f"select i from unnest(cast(%s as bigint[])) as i where {STATE.called(job_id='i')} = 'cancelled'"  # noqa: S608
_SAID = {
    "retried": "{} retried",
    "cancelled": "{} cancelled",
    "cancelling": "{} asked to stop",
    "dropped": "{} dropped",
}


@dataclass(slots=True)
class Preview:
    """Which jobs it would be done to: what one look has found, and the sums of all looks so far."""

    verb: Verb
    ids: list[int] = field(default_factory=list)
    """Of this look."""
    states: Counter[str] = field(default_factory=Counter)
    """How many, by state, of all looks so far."""
    looks: int = 0
    """Before this one."""
    sample: list[dict[str, Any]] = field(default_factory=list)
    looked_to: datetime | None = None
    next: str = ""
    """The address of the next look."""
    more: bool = False
    """Whether there may be more, which this is not about."""
    problem: str = ""
    """Why it does not look on."""

    @property
    def count(self) -> int:
        return self.states.total()

    @property
    def room(self) -> int:
        return max(1, min(PIECE, MOST - self.count))


def begun(view: View, verb: Verb) -> Preview:
    """A preview as the looks before this one have left it; the address of a further look carries their sums."""
    if not _is_further(view):
        return Preview(verb)
    found = Preview(verb, looks=number_of("looks", view.asked("looks"), 0, _LOOKS, 0))
    for said in view.asked_all("found")[: len(STATES)]:
        state, _, n = said.partition(":")
        if state not in STATES:
            raise InvalidArgument(f"{state[:40]!r} is no state of a job")
        found.states[state] = number_of("found", n, 0, MOST, 0)
    return found


@contextmanager
def looking(view: View, found: Preview) -> Iterator[None]:
    """Around one look: where a further one fails, what was found before it stays, and the page says why there is no more."""
    try:
        yield
    except (QueueUnavailable, QueryCanceled, *IN_THE_WAY) as error:
        if not _is_further(view):
            raise
        found.problem = view.site.explain(error)[1]


def preview(
    view: View, found: Preview, *, at: str, to: str, back: str, asked: dict[str, Any], after: str | None
) -> Response:
    """The page that says how many there are, shows some, and asks; or, for a look after the first, the part that is new."""
    about = urlencode({name: value for name, value in asked.items() if value}, doseq=True)
    why_not = "" if view.may_operate else view.site.why_read_only(view.visit.user)
    if after and found.count < MOST and found.looks < _LOOKS:
        sums = [f"{state}:{n}" for state, n in found.states.items() if n]
        found.next = view.url(
            f"{at}/further", verb=found.verb.name, **asked, after=after, found=sums, looks=found.looks + 1
        )
    found.more = bool(found.problem) or (after is not None and not found.next)
    template = "preview_found.html" if _is_further(view) else "preview.html"
    return view.render(template, found=found, to=to, back=back, about=about, why_not=why_not, most=MOST)


def _is_further(view: View) -> bool:
    return view.request.url.path.endswith("/further")


def ids_of(act: Act) -> list[int]:
    """The jobs that a form names: one by its own button, those of a preview, or those that are checked."""
    said = act.form("only") or " ".join(act.form_all("jobs"))
    named = said.split() if said else act.form_all("job")
    if not named:
        raise InvalidArgument("No job is chosen. Nothing was changed.")
    ids = [job_of(one) for one in dict.fromkeys(named)]
    if len(ids) > MOST or None in ids:
        raise InvalidArgument(f"The form has to name up to {MOST:,} jobs. Nothing was changed.")
    return [one for one in ids if one is not None]


async def do(act: Act, verb: Verb) -> str:
    """Do it to the jobs that the form names, node by node; what to tell the person."""
    by_node: dict[str, tuple[At, list[int]]] = {}
    for job in ids_of(act):
        at = await act.site.nodes.of_job(job)
        by_node.setdefault(at.name, (at, []))[1].append(job)
    until, said = time.monotonic() + _LONGEST, []
    for at, ids in by_node.values():
        try:
            told = await _do(act, verb, at, ids, until)
        except (TallybookError, QueryCanceled, *IN_THE_WAY) as error:
            if len(by_node) == 1:
                raise
            told = act.site.explain(error)[1]
        said.append(f"{at.name}: {told}" if act.site.nodes.many else told)
    return " ".join(said)


async def _do(act: Act, verb: Verb, at: At, ids: list[int], until: float) -> str:
    """The same for the jobs of one node."""
    reason, about = text_of("the reason", act.form("reason")), _filter_of(act)
    said: Counter[str] = Counter()
    refusals: list[str] = []
    met, stopped = 0, ""
    while met < len(ids) and time.monotonic() < until:
        batch = ids[met : met + BATCH]
        try:
            async with act.step(at) as conn:
                over = await _cancelled(conn, batch) if verb.name == "cancel" else []
                meant = [job for job in batch if job not in over]
                done = await verb.run(act.app, conn, meant, reason)
                done += [JobDone(job, "refused", f"job {job} is cancelled already") for job in over]
                became = Counter(one.done for one in done)
                target: dict[str, Any] = {"jobs": meant} | ({"filter": about} if about else {})
                if verb.name == "cancel" and reason:
                    target["reason"] = reason
                if any(one.changed for one in done):
                    await act.audit(f"jobs.{verb.name}", target, dict(became))
                else:
                    act.nothing()
        except (TallybookError, QueryCanceled, *IN_THE_WAY) as error:
            if not met:
                raise
            why = act.site.explain(error)[1].removesuffix(" Nothing was changed.")
            stopped = f" Then it stopped: {why}"
            break
        met += len(batch)
        said += became
        refusals += [one.detail for one in done if not one.changed and one.detail]
    changed = ", ".join(text.format(_jobs(said[key])) for key, text in _SAID.items() if said[key])
    answer = f"{changed}." if changed else "Nothing was changed."
    if refusals:
        answer += f" {_jobs(len(refusals))} left as they are: {refusals[0][:200]}"
        answer += f", and {len(refusals) - 1:,} more." if len(refusals) > 1 else "."
    left = len(ids) - met
    return answer + stopped + (f" {_jobs(left)} were not met: do it again." if left else "")


def serve(pages: Pages, at: str, preview: Callable[[View], Awaitable[Response]]) -> None:
    """The preview of a list, and what is done after it."""
    pages.page(f"{at}/preview")(preview)
    pages.page(f"{at}/preview/further")(preview)
    for verb in VERBS.values():
        pages.action(f"{at}/{verb.name}", steps=True)(partial(do, verb=verb))


def _filter_of(act: Act) -> str:
    """For the audit, whose rows have little room: what matched is named by ids, so a long filter need not be there as a whole."""
    about = act.form("about")
    return about if len(about) <= _LONGEST_FILTER else f"{about[:_LONGEST_FILTER]}…"


async def _cancelled(conn: Conn, jobs: list[int]) -> list[int]:
    """Those that somebody has cancelled before: doing it again says `cancelled`, too, and changes nothing."""
    cursor = await conn.execute(_CANCELLED, (jobs,))
    return [row[0] for row in await cursor.fetchall()]


def _jobs(n: int) -> str:
    return f"{n:,} job" if n == 1 else f"{n:,} jobs"
