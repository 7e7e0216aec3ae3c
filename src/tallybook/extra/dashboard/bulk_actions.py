"""Actions on many jobs. A preview lists the ids; the action changes these, in batches, each with an audit row."""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from tallybook._app import App
from tallybook._app.jobs import STATES
from tallybook._db.driver import QueryCanceled, Rollback
from tallybook._model.job_info import JobDone
from tallybook.errors import InvalidArgument, QueueUnavailable, TallybookError
from tallybook.extra.dashboard.database import IN_THE_WAY, Conn, rows
from tallybook.extra.dashboard.nodes import At
from tallybook.extra.dashboard.texts import id_of, number_of, text_of
from tallybook.extra.dashboard.view import Act, Pages, View

MOST = 10_000  # jobs of a preview and its action
PIECE = 250  # jobs that one step of a preview finds; the page appears at once and requests further steps
_LOOKS = 200  # steps of a preview, which bounds the search if hardly anything matches
BATCH = 200  # jobs per transaction: nobody waits long for one of them, and the audit row names all of them
_LONGEST = 20.0  # seconds in which a request may begin batches
_LONGEST_FILTER = 500  # in the audit row, which has the ids, so nothing is lost


@dataclass(frozen=True, slots=True)
class Verb:
    """An action on many jobs, with the states in which it applies."""

    name: str
    states: tuple[str, ...]
    run: Callable[[App, Conn, list[int], str | None], Awaitable[list[JobDone]]]
    danger: bool
    effect: str
    if_asked: tuple[str, ...] = ()
    """The states that a filter must name; a filter without a state does not include them."""


VERBS = {
    one.name: one
    for one in (
        Verb("retry", ("dead", "cancelled"), lambda app, conn, ids, _: app.jobs.retry(ids).on(conn), False,
             "Each gets another attempt, at once."),
        Verb("cancel", ("scheduled", "retrying", "waiting", "available", "running", "dead"),
             lambda app, conn, ids, why: app.jobs.cancel(ids, why).on(conn), True,
             "None of them will start; running ones are asked to stop. Dead ones leave the dead letters.",
             if_asked=("dead",)),
        Verb("drop", ("dead",), lambda app, conn, ids, _: app.jobs.drop(ids).on(conn), True,
             "Their dead letters are deleted: the jobs cannot be retried."),
    )
}  # fmt: skip
_NOW = "select j.id, j.state from tallybook.job j where j.id = any(cast(%s as bigint[]))"
_SAID = {"retried": "retried", "cancelled": "cancelled", "cancelling": "asked to stop", "dropped": "dropped"}


@dataclass(slots=True)
class Preview:
    """The jobs that an action would change: those of one step, and the sums of all steps so far."""

    verb: Verb
    asked: dict[str, Any] = field(default_factory=dict)  # the filter as texts
    said: dict[str, Any] = field(default_factory=dict)  # the filter as values
    ids: list[int] = field(default_factory=list)  # the jobs of this step
    states: Counter[str] = field(default_factory=Counter)  # the number of jobs by state, of all steps so far
    looks: int = 0  # the number of steps before this one
    sample: Sequence[Any] = ()
    looked_to: datetime | None = None
    after: str | None = None  # where the next step begins in the list
    next: str = ""  # the address of the next step
    more: bool = False  # whether there may be more jobs, which this preview does not cover
    problem: str = ""  # why the search stopped

    @property
    def count(self) -> int:
        return self.states.total()

    @property
    def previewed(self) -> list[str]:
        """The states of the jobs found so far: the action leaves jobs alone that have left them."""
        return [state for state in STATES if self.states[state]]

    @property
    def room(self) -> int:
        return max(1, min(PIECE, MOST - self.count))


async def do(act: Act, verb: Verb) -> str:
    """Apply a verb to the jobs that the form names, node by node. Return the notice for the user."""
    # One by its own button, those of a preview, or the checked ones.
    form = act.form("only") or " ".join(act.form_all("jobs"))
    named = form.split() if form else act.form_all("job")
    if not named:
        raise InvalidArgument("No job is chosen. Nothing was changed.")
    chosen = [job for one in dict.fromkeys(named) if (job := id_of(one)) is not None]
    if len(chosen) > MOST or len(chosen) < len(set(named)):
        raise InvalidArgument(f"The form must name 1 to {MOST:,} jobs. Nothing was changed.")
    by_node: dict[str, tuple[At, list[int]]] = {}
    for job in chosen:
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
    reason, about = text_of("the reason", act.form("reason")), act.form("about")
    if len(about) > _LONGEST_FILTER:
        about = f"{about[:_LONGEST_FILTER]}…"
    states = act.form("states").split()
    if unknown := set(states) - {*STATES}:
        raise InvalidArgument(f"{min(unknown)[:40]!r} is not a state of a job. Nothing was changed.")
    said: Counter[str] = Counter()
    refusals: list[str] = []
    met, left_alone, stopped = 0, 0, ""
    while met < len(ids) and time.monotonic() < until:
        batch = ids[met : met + BATCH]
        try:
            async with act.step(at) as conn:
                meant, done = await _run(act.app, conn, verb, batch, states, reason)
                became = Counter(one.done for one in done)
                target: dict[str, Any] = {"jobs": meant} | ({"filter": about} if about else {})
                if verb.name == "cancel" and reason:
                    target["reason"] = reason
                changed = any(one.changed for one in done)
                await act.audit(f"jobs.{verb.name}", target, dict(became), changed=changed)
        except (TallybookError, QueryCanceled, *IN_THE_WAY) as error:
            if not met:
                raise
            stopped = f" Then it stopped: {act.site.explain(error)[1].removesuffix(' Nothing was changed.')}"
            break
        met += len(batch)
        left_alone += len(batch) - len(done)
        said += became
        refusals += [one.detail for one in done if not one.changed and one.detail]
    told = ", ".join(f"{_jobs(said[key])} {word}" for key, word in _SAID.items() if said[key])
    answer = f"{told}." if told else "Nothing was changed."
    if refusals:
        answer += f" {_jobs(len(refusals))} unchanged: {refusals[0][:200]}"
        answer += f", and {len(refusals) - 1:,} more." if len(refusals) > 1 else "."
    if left_alone:
        answer += f" {_jobs(left_alone)} no longer {' or '.join(states)}."
    left = len(ids) - met
    return answer + stopped + (f" {_jobs(left)} not processed yet: repeat the action." if left else "")


async def _run(
    app: App, conn: Conn, verb: Verb, batch: list[int], states: list[str], reason: str | None
) -> tuple[list[int], list[JobDone]]:
    """Apply a verb to those jobs of a batch whose state is one of `states`, or any state if it is empty.

    Return the jobs that the verb was applied to, and all results; the jobs in other states have none. The states are
    read first, without a lock, which would delay claims. If a job has started since, the batch is rolled back and done
    again without it: an action on jobs that wait stops no running one.
    """
    seen = {one["id"]: one["state"] for one in await rows(conn, _NOW, batch)}
    meant = [job for job in batch if not states or seen.get(job) in (None, *states)]
    # A second cancel also returns `cancelled`, but changes nothing.
    over = [job for job in meant if verb.name == "cancel" and seen.get(job) == "cancelled"]
    meant = [job for job in meant if job not in over]
    while meant:
        async with conn.transaction() as turn:
            done = await verb.run(app, conn, meant, reason)
            started = {one.job for one in done if one.done == "cancelling" and states and "running" not in states}
            if started:
                raise Rollback(turn)
        if not started:
            break
        meant = [job for job in meant if job not in started]
    else:
        done = []
    return meant, done + [JobDone(job, "refused", f"job {job} is cancelled already") for job in over]


def serve(pages: Pages, at: str, search: Callable[[View, Preview], Awaitable[None]], unknown: str) -> None:
    """Register the previews and the actions of a list. `search` finds the jobs of one step of a preview."""

    async def preview(view: View) -> Response:
        verb = VERBS.get(view.asked("verb"))
        if verb is None:
            raise InvalidArgument(unknown)
        found, is_further = Preview(verb), view.request.url.path.endswith("/further")
        if is_further:  # its address has the sums of the steps before
            found.looks = number_of("looks", view.asked("looks"), 0, _LOOKS, 0)
            for said in view.asked_all("found")[: len(STATES)]:
                state, _, n = said.partition(":")
                if state not in STATES:
                    raise InvalidArgument(f"{state[:40]!r} is not a state of a job")
                found.states[state] = number_of("found", n, 0, MOST, 0)
        try:
            await search(view, found)
        except (QueueUnavailable, QueryCanceled, *IN_THE_WAY) as error:
            if not is_further:
                raise
            found.problem = view.site.explain(error)[1]  # the jobs found so far stay
        return _shown(view, found, at, "preview_found.html" if is_further else "preview.html")

    pages.page(f"{at}/preview")(preview)
    pages.page(f"{at}/preview/further")(preview)
    for verb in VERBS.values():
        pages.action(f"{at}/{verb.name}", steps=True)(partial(do, verb=verb))


def _shown(view: View, found: Preview, at: str, template: str) -> Response:
    back, to = view.url(at, **found.asked), f"{at}/{found.verb.name}"
    # "2 hours" must mean the same two hours in every step.
    asked = found.asked | {name: found.said[name].isoformat() for name in ("since", "before") if found.said[name]}
    about = urlencode({name: value for name, value in asked.items() if value}, doseq=True)
    why_not = "" if view.may_operate else view.site.why_read_only(view.visit.user)
    if found.after and found.count < MOST and found.looks < _LOOKS:
        sums = [f"{state}:{n}" for state, n in found.states.items() if n]
        further = {"verb": found.verb.name, **asked, "after": found.after, "found": sums, "looks": found.looks + 1}
        found.next = view.url(f"{at}/preview/further", **further)
    found.more = bool(found.problem) or (found.after is not None and not found.next)
    return view.render(template, found=found, to=to, back=back, about=about, why_not=why_not, most=MOST)


def _jobs(n: int) -> str:
    return f"{n:,} job" if n == 1 else f"{n:,} jobs"
