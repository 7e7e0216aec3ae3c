"""Jobs and dead letters: lists with filters, whose pages read a limited number of rows, and actions on what matches."""

import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from itertools import chain
from typing import Any

from starlette.datastructures import QueryParams
from starlette.responses import Response

from tallybook._app.jobs import DEAD_LETTERS, REASONS, STATES
from tallybook._db.declared import Declared
from tallybook._db.numbers import COUNTS
from tallybook._model.job_info import JobLine, JobPage
from tallybook._model.merged import END, Part, goes_on, merged, places
from tallybook.errors import InvalidArgument
from tallybook.extra.dashboard import bulk_actions
from tallybook.extra.dashboard.database import Conn, rows
from tallybook.extra.dashboard.live import MOST_TOPICS
from tallybook.extra.dashboard.nodes import Question
from tallybook.extra.dashboard.texts import WRONG, id_of, links_of, text_of, when_of
from tallybook.extra.dashboard.view import Pages, Shared, View

pages = Pages()
_PAGE = 50
_LOOKED = 20_000  # rows of the ledger that one page reads at most: it appears at once; the user can read further
_SAMPLE = 10
_SHARE = 20
_TEXTS = ("queue", "task", "error", "since", "before", "unserved")
OPEN = ("scheduled", "retrying", "waiting", "available", "running", "dead")
"""States with a count of current jobs; the counters of the other states are totals."""
_MORE = Declared("_args_of(p_ids bigint[]) -> rows (id bigint, args jsonb, took interval)")
_SUMS = ", ".join(f"cast(coalesce(sum(c.{state}) filter (where m.meant), 0) as bigint) as {state}" for state in OPEN)
_COUNTS = f"""\
select array_agg(distinct c.queue collate "C") as queues, array_agg(distinct c.task collate "C") as tasks, {_SUMS}
  from {COUNTS.called()} as c,
       lateral (select %(queue)s in ('', c.queue) and %(task)s in ('', c.task) as meant) as m"""  # noqa: S608


def _filter(asked: dict[str, Any]) -> dict[str, Any]:
    if unknown := [state for state in asked["state"] if state not in STATES]:
        raise InvalidArgument(f"{unknown[0][:40]!r} is not a state of a job: they are {', '.join(STATES)}")
    said: dict[str, Any] = {name: text_of(name, asked[name]) for name in ("queue", "task", "error")}
    said |= {name: when_of(name, asked[name]) for name in ("since", "before")}
    said |= {"states": asked["state"] or None, "links": links_of(asked["link"]), "unserved": bool(asked["unserved"])}
    return said


class List:
    """The jobs of all nodes, or of the one database, that match the filter of an address."""

    def __init__(
        self, site: Shared, ask: Callable[[Question[Any]], Awaitable[dict[str, Any]]], params: QueryParams
    ) -> None:
        self._app, self._nodes, self._ask = site.app, site.nodes, ask
        self.asked: dict[str, Any] = {name: params.get(name, "").strip() for name in _TEXTS}  # the filter as texts
        for name in ("state", "link"):
            self.asked[name] = [one.strip() for one in params.getlist(name) if one.strip()]
        self._after = params.get("after", "").strip()
        self._more: dict[int, dict[str, Any]] = {}
        self._counts: list[dict[str, Any]] = []

    async def page(self, said: dict[str, Any], most: int, *, whole: bool = False) -> JobPage:
        """Return one page of jobs. With `whole`, also read the other columns of the list and the counts of the tabs."""
        after = text_of("after", self._after)
        if not self._nodes.many:
            return (await self._read(said, most, {"": after or ""}, whole=whole))[""]
        pairs, after, looked_to = await self._merged(said, most, places(after), whole=whole)
        if whole and pairs:

            async def read(conn: Conn, node: str) -> None:
                ids = [job.id for name, job in pairs if name == node]
                self._more |= {one["id"]: one for one in await rows(conn, _MORE.worker, ids)}

            await self._ask(read)
        return JobPage([job for _, job in pairs], after, looked_to)

    async def _merged(
        self, said: dict[str, Any], most: int, place: dict[str, str], *, whole: bool
    ) -> Part[tuple[str, JobLine]]:
        """Return the newest jobs. A node is asked for its share, and if all of it is among these, once more."""
        share = -(-2 * most // max(2, len(self._nodes.read)))
        found = await self._read(said, share, place, whole=whole)
        times = sorted((job.enqueued_at for page in found.values() for job in page.jobs), reverse=True)
        last = times[most - 1] if len(times) >= most else None
        parts: dict[str, Part[JobLine]] = {}
        again: dict[str, str] = {}
        for name, page in found.items():
            is_full = len(page.jobs) == share
            parts[name] = (page.jobs, page.next, None if is_full else page.looked_to)
            if page.next and is_full and share < most and (last is None or page.jobs[-1].enqueued_at >= last):
                again[name] = page.next
        if again:
            for name, page in (await self._read(said, most, {name: again.get(name, END) for name in found})).items():
                if name in again:
                    looked_to = None if len(page.jobs) == most else page.looked_to
                    parts[name] = ([*parts[name][0], *page.jobs], page.next, looked_to)
        return merged(parts, place, most)

    async def _read(
        self, said: dict[str, Any], most: int, place: dict[str, str], *, whole: bool = False
    ) -> dict[str, JobPage]:
        """Return the jobs of each node. With `whole`, also read the counts, and of one database the other columns."""

        async def read(conn: Conn, node: str) -> JobPage:
            if whole:
                self._counts += await rows(conn, _COUNTS, queue=self.asked["queue"], task=self.asked["task"])
            if not goes_on(place, node):
                return JobPage([], None, None)
            jobs = self._app.jobs.list(**said, after=place.get(node) or None, max_jobs=most, max_looked=_LOOKED)
            found = await jobs.on(conn)
            if whole and not self._nodes.many:
                self._more |= {one["id"]: one for one in await rows(conn, _MORE.worker, [one.id for one in found.jobs])}
            return found

        return await self._ask(read)

    async def shown(self) -> dict[str, Any]:
        page = await self.page(_filter(self.asked), _PAGE, whole=True)
        sums = {state: sum(one[state] for one in self._counts) for state in OPEN}
        is_counted = not any(value for name, value in self.asked.items() if name not in ("queue", "task", "state"))
        known = {name: {one for node in self._counts for one in node[name] or ()} for name in ("queues", "tasks")}
        return known | {
            "jobs": page.jobs, "more": self._more, "states": STATES, "after": page.next, "first": not self._after,
            "looked_to": page.looked_to if len(page.jobs) < _PAGE else None, "counts": sums if is_counted else None,
            "asked": self.asked,
        }  # fmt: skip


def topics(site: Shared) -> None:
    until: dict[str, float] = {}

    async def live(address: str) -> str | None:
        """Return the current list. A slow list is read less often, so that it costs at most 5 % of a core."""
        began = time.monotonic()
        if began < until.get(address, 0.0):
            return None
        params = QueryParams(address)
        only = params.get("node", "")

        async def ask(question: Question[Any]) -> dict[str, Any]:
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
    asked, shown, problem = found.asked, {}, None
    try:
        shown = await found.shown()
    except WRONG as error:
        problem = str(error)
    verbs = [verb for verb in bulk_actions.VERBS.values() if {*verb.states} & {*(asked["state"] or verb.states)}]
    topic = f"jobs:{view.request.url.query}"
    is_live = shown.get("first") and view.site.live.knows(topic)
    return view.render(
        "jobs.html", problem=problem, filtered=any(asked.values()), verbs=verbs,
        topic=topic if is_live else None, **{"asked": asked, "queues": (), "tasks": (), **shown},
    )  # fmt: skip


async def _search(view: View, found: bulk_actions.Preview) -> None:
    matching = List(view.site, view.ask, view.request.query_params)
    said, verb = _filter(matching.asked), found.verb
    found.asked, found.said = matching.asked, said
    meant = said["states"] or [state for state in STATES if state not in verb.if_asked]
    said["states"] = [state for state in verb.states if state in meant]
    if said["states"]:
        page = await matching.page(said, found.room)
        found.after, found.looked_to = page.next, page.looked_to
        found.ids = [one.id for one in page.jobs]
        found.states.update(one.state for one in page.jobs)
        found.sample = page.jobs[:_SAMPLE]


bulk_actions.serve(pages, "/jobs", _search, f"The verb must be one of {', '.join(bulk_actions.VERBS)}.")


_ASKED = ("queue", "task", "reason", "error", "since", "before")
_FOUND = DEAD_LETTERS.called("pyformat", text="{error:text}", args="null", max_looked="{max_looked}")
_LETTERS = f"""\
select d.job_id as id, d.died_at, d.queue_name as queue, d.task_name as task, d.why as reason, d.failures, d.attempt,
       d.enqueued_at, d.summary, d.last_error, d.why is null as mark, 'dead' as state
  from {_FOUND} as d"""  # noqa: S608
_IDS = _LETTERS.replace("d.last_error,", "").replace("d.summary,", "")


def _dead_filter(asked: dict[str, str]) -> dict[str, Any]:
    if asked["reason"] and asked["reason"] not in REASONS:
        raise InvalidArgument(f"reason must be one of {', '.join(REASONS)}")
    said: dict[str, Any] = {name: text_of(name, asked[name]) for name in ("queue", "task", "reason", "error")}
    return said | {name: when_of(name, asked[name]) for name in ("since", "before")} | {"before_id": None}


def _after(text: str) -> dict[str, Any]:
    """Return the start of a page: after the dead letter with this time and id."""
    at, _, job = text.rpartition("~")
    try:
        return {"before": datetime.fromisoformat(at), "before_id": id_of(job)} if text else {}
    except ValueError:
        raise InvalidArgument("The parameter after of this address is not valid.") from None


def _place(letter: dict[str, Any]) -> str:
    return f"{letter['died_at'].isoformat()}~{letter['id']}"


async def _letters(
    view: View, query: str, most: int, said: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return the dead letters of all nodes, and the one after which the next page begins: perhaps a mark, see below."""
    asked = said | {"max_jobs": most + 1, "max_looked": _LOOKED}
    every = list(chain(*(await view.ask(lambda conn, _: rows(conn, query, **asked))).values()))
    # If the limit of rows has ended a page, its last row is a mark: the last dead letter that was read.
    mark = max((one for one in every if one["mark"]), key=_when, default=None)
    # If one node read no further, older ones of the other nodes wait for a later page.
    found = [one for one in every if not one["mark"] and (mark is None or _when(one) >= _when(mark))]
    found.sort(key=_when, reverse=True)
    return found[:most], mark if len(found) <= most else found[most - 1]


def _when(letter: dict[str, Any]) -> tuple[datetime, int]:
    return letter["died_at"], letter["id"]


@pages.page("/dead")
async def dead(view: View) -> Response:
    asked = {name: view.asked(name) for name in _ASKED}
    letters: list[dict[str, Any]] = []
    problem, after, looked_to = None, None, None
    try:
        letters, end = await _letters(view, _LETTERS, _PAGE, _dead_filter(asked) | _after(view.asked("after")))
        if end is not None:
            after, looked_to = _place(end), end["died_at"] if end["mark"] else None
    except WRONG as error:
        problem = str(error)
    return view.render(
        "dead.html", letters=letters, asked=asked, reasons=REASONS, problem=problem, after=after, looked_to=looked_to,
        first=not view.asked("after"),
    )  # fmt: skip


async def _search_dead(view: View, found: bulk_actions.Preview) -> None:
    found.asked = {name: view.asked(name) for name in _ASKED}
    found.said = _dead_filter(found.asked)
    said = found.said | _after(view.asked("after"))
    letters, end = await _letters(view, _IDS, found.room, said)
    if not found.looks:
        found.sample, _ = await _letters(view, _LETTERS, _SAMPLE, said)
    if end is not None:
        found.after, found.looked_to = _place(end), end["died_at"]
    found.ids = [one["id"] for one in letters]
    found.states["dead"] += len(letters)


bulk_actions.serve(pages, "/dead", _search_dead, "A dead letter can be retried, cancelled or dropped.")
