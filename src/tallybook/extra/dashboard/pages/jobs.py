"""Jobs: a list by filter, in pages that look at a bounded number of rows; some of them, or all that match, changed at once."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import QueryParams
from starlette.responses import Response

from tallybook._db.jobs import STATES
from tallybook._model.counting import Counts
from tallybook._model.lists import JobPage
from tallybook._model.merged import goes_on, merged, places
from tallybook.errors import InvalidArgument, TallybookError
from tallybook.extra.dashboard import bulk_actions
from tallybook.extra.dashboard.asked import links_of, text_of, when_of
from tallybook.extra.dashboard.bulk_actions import VERBS
from tallybook.extra.dashboard.database import Conn
from tallybook.extra.dashboard.live import MOST_TOPICS
from tallybook.extra.dashboard.pages.queues import rows
from tallybook.extra.dashboard.redact import error_view
from tallybook.extra.dashboard.shared import Shared
from tallybook.extra.dashboard.view import Pages, View

pages = Pages()

_PAGE = 50
_LOOKED = 20_000
"""Rows of the ledger that one answer may pass over: the page is there at once, and one can look further."""
_SAMPLE = 10
_SHARE = 20
OPEN = ("scheduled", "retrying", "waiting", "available", "running", "dead")
"""States whose jobs the counters count; of others they count how many there have ever been."""
# Args of more than 4 kB are not read for a list.
_MORE = """\
select i.id, j.args, j.took from unnest(%s::bigint[]) as i(id) cross join lateral (
  select case when pg_column_size(x.args) <= 4000 then x.args end as args, x.ended_at - x.last_attempt_at as took
    from tallybook.job as x where x.id = i.id limit 1) as j"""
Ask = Callable[[Callable[[Conn, str], Awaitable[JobPage]]], Awaitable[dict[str, JobPage]]]
"""Puts a question to the nodes: the answers by their names."""


def _asked(params: QueryParams) -> dict[str, Any]:
    """The filter, as the address says it."""
    said: dict[str, Any] = {
        name: params.get(name, "").strip() for name in ("queue", "task", "error", "since", "before", "unserved")
    }
    return said | {name: [one.strip() for one in params.getlist(name) if one.strip()] for name in ("state", "link")}


def _filter(asked: dict[str, Any]) -> dict[str, Any]:
    """The same, as the verb takes it."""
    if unknown := [state for state in asked["state"] if state not in STATES]:
        raise InvalidArgument(f"{unknown[0][:40]!r} is no state of a job: they are {', '.join(STATES)}")
    said: dict[str, Any] = {name: text_of(name, asked[name]) for name in ("queue", "task", "error")}
    said |= {name: when_of(name, asked[name]) for name in ("since", "before")}
    said |= {"states": asked["state"] or None, "links": links_of(asked["link"]), "unserved": bool(asked["unserved"])}
    return said


class List:
    """The jobs of all nodes, or of the one database, that match what an address asks for."""

    def __init__(self, site: Shared, ask: Ask, params: QueryParams) -> None:
        self._app, self._many, self._ask = site.app, site.nodes.many, ask
        self.asked = _asked(params)
        self._after = params.get("after", "").strip()
        self._more: dict[int, dict[str, Any]] = {}
        self._counts: list[Counts] = []

    async def page(self, said: dict[str, Any], most: int, *, whole: bool = False) -> JobPage:
        """One page of them; `whole`: with what the rows of a list show besides, and with the counts of the tabs."""
        after = text_of("after", self._after)
        place = places(after) if self._many else {"": after or ""}

        async def read(conn: Conn, node: str) -> JobPage:
            found = JobPage([], None, None)
            if goes_on(place, node):
                jobs = self._app.jobs.list(**said, after=place.get(node) or None, max_jobs=most, max_looked=_LOOKED)
                found = await jobs.on(conn)
            if whole:
                self._more |= {one["id"]: one for one in await rows(conn, _MORE, [one.id for one in found.jobs])}
                self._counts += await self._app.counts.list().on(conn)
            return found

        found = await self._ask(read)
        if not self._many:
            return found[""]
        pairs, after, looked_to = merged(
            {name: (one.jobs, one.next, one.looked_to) for name, one in found.items()}, place, most
        )
        return JobPage([one for _, one in pairs], after, looked_to)

    async def shown(self) -> dict[str, Any]:
        """What the live part of the page shows."""
        page = await self.page(_filter(self.asked), _PAGE, whole=True)
        queue, task = self.asked["queue"], self.asked["task"]
        meant = [one for one in self._counts if queue in ("", one.queue) and task in ("", one.task)]
        sums = {state: sum(getattr(one, state) for one in meant) for state in OPEN}
        is_counted = not any(value for name, value in self.asked.items() if name not in ("queue", "task", "state"))
        return {
            "jobs": page.jobs, "more": self._more, "states": STATES, "after": page.next, "first": not self._after,
            "looked_to": page.looked_to if len(page.jobs) < _PAGE else None, "counts": sums if is_counted else None,
            "asked": self.asked, "queues": {one.queue for one in self._counts}, "tasks": {one.task for one in self._counts},
        }  # fmt: skip


def topics(site: Shared) -> None:
    until: dict[str, float] = {}

    async def live(address: str) -> str | None:
        """The list as it is now; one that takes long is read less often, so that it costs 5 % of a core at most."""
        began = time.monotonic()
        if began < until.get(address, 0.0):
            return None
        params = QueryParams(address)
        only = params.get("node", "")

        async def ask(question: Callable[[Conn, str], Awaitable[JobPage]]) -> dict[str, JobPage]:
            return (await site.nodes.answered(question, only))[0]

        found = List(site, ask, params)
        try:
            return site.fragment("jobs_live.html", only, **await found.shown())
        except InvalidArgument:
            return None
        finally:
            if len(until) >= MOST_TOPICS:
                until.clear()
            until[address] = time.monotonic() + _SHARE * (time.monotonic() - began)

    site.live.over("jobs", live, each=True)


@pages.page("/jobs")
async def jobs(view: View) -> Response:
    found = List(view.site, view.ask, view.request.query_params)
    shown: dict[str, Any] = {}
    asked, problem = found.asked, None
    try:
        shown = await found.shown()
    except TallybookError as error:
        problem = str(error)
    verbs = [verb for verb in VERBS.values() if {*verb.states} & {*(asked["state"] or verb.states)}]
    topic = f"jobs:{view.request.url.query}"
    is_live = shown.get("first") and view.site.live.knows(topic)
    return view.render(
        "jobs.html", status=400 if problem else 200, problem=problem, filtered=any(asked.values()), verbs=verbs,
        topic=topic if is_live else None, **{"asked": asked, "queues": (), "tasks": (), **shown},
    )  # fmt: skip


async def preview(view: View) -> Response:
    """How many match, by state, and some of them, before anything is done to them."""
    verb = VERBS.get(view.asked("verb"))
    if verb is None:
        raise InvalidArgument(f"What can be done to jobs is {', '.join(VERBS)}.")
    found, after = bulk_actions.begun(view, verb), None
    matching = List(view.site, view.ask, view.request.query_params)
    asked = dict(matching.asked)
    said = _filter(asked)
    meant = said["states"] or [state for state in STATES if state not in verb.if_asked]
    said["states"] = [state for state in verb.states if state in meant]
    if said["states"]:
        with bulk_actions.looking(view, found):
            page = await matching.page(said, found.room)
            after, found.looked_to = page.next, page.looked_to
            found.ids = [one.id for one in page.jobs]
            found.states.update(one.state for one in page.jobs)
            for one in page.jobs[:_SAMPLE]:
                error = error_view({"message": one.last_error}) if one.last_error else None
                named = {name: getattr(one, name) for name in ("id", "state", "task", "queue", "enqueued_at")}
                found.sample.append(named | {"error": error})
    # "2 hours" is to mean the same two hours at every look.
    asked |= {name: said[name].isoformat() for name in ("since", "before") if said[name]}
    return bulk_actions.preview(
        view, found, at="/jobs/preview", to=f"/jobs/{verb.name}", back=view.url("/jobs", **matching.asked), asked=asked, after=after
    )  # fmt: skip


bulk_actions.serve(pages, "/jobs", preview)
