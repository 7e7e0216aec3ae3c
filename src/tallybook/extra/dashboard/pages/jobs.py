"""Jobs: a list by filter, in pages that look at a bounded number of rows; some of them, or all that match, changed at once."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from tallybook._db.jobs import STATES
from tallybook._model.lists import JobLine, JobPage
from tallybook._model.merged import goes_on, merged, places
from tallybook.errors import InvalidArgument, TallybookError
from tallybook.extra.dashboard import bulk_actions
from tallybook.extra.dashboard.asked import links_of, text_of, when_of
from tallybook.extra.dashboard.bulk_actions import VERBS
from tallybook.extra.dashboard.database import Conn
from tallybook.extra.dashboard.redact import error_view
from tallybook.extra.dashboard.view import Pages, View

pages = Pages()

_PAGE = 50
_LOOKED = 20_000
"""Rows of the ledger that one answer may pass over: the page is there at once, and one can look further."""
_SAMPLE = 10


def _asked(view: View) -> dict[str, Any]:
    """The filter, as the address says it."""
    said: dict[str, Any] = {
        name: view.asked(name) for name in ("queue", "task", "error", "since", "before", "unserved")
    }
    return said | {"state": view.asked_all("state"), "link": view.asked_all("link")}


def _filter(asked: dict[str, Any]) -> dict[str, Any]:
    """The same, as the verb takes it."""
    if unknown := [state for state in asked["state"] if state not in STATES]:
        raise InvalidArgument(f"{unknown[0][:40]!r} is no state of a job: they are {', '.join(STATES)}")
    said: dict[str, Any] = {name: text_of(name, asked[name]) for name in ("queue", "task", "error")}
    said |= {name: when_of(name, asked[name]) for name in ("since", "before")}
    return said | {
        "states": asked["state"] or None,
        "links": links_of(asked["link"]),
        "unserved": bool(asked["unserved"]),
    }


async def _page(view: View, said: dict[str, Any], most: int) -> JobPage:
    """The jobs of all nodes, or of the one database."""
    after = text_of("after", view.asked("after"))
    place = places(after) if view.site.nodes.many else {"": after or ""}

    async def read(conn: Conn, node: str) -> JobPage:
        if not goes_on(place, node):
            return JobPage([], None, None)
        return await view.app.jobs.list(**said, after=place.get(node) or None, max_jobs=most, max_looked=_LOOKED).on(
            conn
        )

    found = await view.ask(read)
    if not view.site.nodes.many:
        return found[""]
    pairs, after, looked_to = merged(
        {name: (one.jobs, one.next, one.looked_to) for name, one in found.items()}, place, most
    )
    return JobPage([one for _, one in pairs], after, looked_to)


@pages.page("/jobs")
async def jobs(view: View) -> Response:
    asked, first = _asked(view), not view.asked("after")
    lines: list[JobLine] = []
    problem, after, looked_to = None, None, None
    try:
        page = await _page(view, _filter(asked), _PAGE)
        lines, after = page.jobs, page.next
        if len(lines) < _PAGE:
            looked_to = page.looked_to
    except TallybookError as error:
        problem = str(error)
    can = {verb.name: any(one.state in verb.states for one in lines) for verb in VERBS.values()}
    return view.render(
        "jobs.html", status=400 if problem else 200, jobs=lines, asked=asked, states=STATES, problem=problem, after=after,
        looked_to=looked_to, first=first, filtered=any(asked.values()), verbs=[verb for verb in VERBS.values() if can[verb.name]],
    )  # fmt: skip


async def preview(view: View) -> Response:
    """How many match, by state, and some of them, before anything is done to them."""
    verb = VERBS.get(view.asked("verb"))
    if verb is None:
        raise InvalidArgument(f"What can be done to jobs is {', '.join(VERBS)}.")
    asked, found, after = _asked(view), bulk_actions.begun(view, verb), None
    said = _filter(asked)
    meant = said["states"] or [state for state in STATES if state not in verb.if_asked]
    said["states"] = [state for state in verb.states if state in meant]
    if said["states"]:
        with bulk_actions.looking(view, found):
            page = await _page(view, said, found.room)
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
        view, found, at="/jobs/preview", to=f"/jobs/{verb.name}", back=view.url("/jobs", **_asked(view)), asked=asked, after=after
    )  # fmt: skip


bulk_actions.serve(pages, "/jobs", preview)
