"""Dead letters: a filtered list, newest first. Retry, cancel or drop one, some, or all that match."""

from datetime import datetime
from itertools import chain
from typing import Any

from starlette.responses import Response

from tallybook._db.declared import Declared
from tallybook._db.filters import REASONS
from tallybook.errors import InvalidArgument
from tallybook.extra.dashboard import bulk_actions
from tallybook.extra.dashboard.asked import WRONG, job_of, text_of, when_of
from tallybook.extra.dashboard.database import rows
from tallybook.extra.dashboard.redact import error_view
from tallybook.extra.dashboard.view import Pages, View

pages = Pages()

_PAGE = 50
_LOOKED = 20_000  # dead letters that one page reads at most
_ASKED = ("queue", "task", "reason", "error", "since", "before")
_DEAD_LETTERS = Declared("""
  dead_letters(queue task reason text text, since before timestamptz, max_jobs int, before_id bigint, max_looked int)
  -> rows (job_id bigint, died_at timestamptz, queue_name task_name why text, failures attempt int,
           enqueued_at timestamptz, summary text, last_error jsonb)""", text="{error:text}")  # fmt: skip
_LETTERS = f"""\
select d.job_id as id, d.died_at, d.queue_name as queue, d.task_name as task, d.why as reason, d.failures, d.attempt,
       d.enqueued_at, d.summary, d.last_error as error, d.why is null as mark
  from {_DEAD_LETTERS.called("pyformat")} as d"""  # noqa: S608
_IDS = _LETTERS.replace("d.last_error", "null").replace("d.summary", "null")


def _filter(asked: dict[str, str]) -> dict[str, Any]:
    if asked["reason"] and asked["reason"] not in REASONS:
        raise InvalidArgument(f"reason must be one of {', '.join(REASONS)}")
    said: dict[str, Any] = {name: text_of(name, asked[name]) for name in ("queue", "task", "reason", "error")}
    return said | {name: when_of(name, asked[name]) for name in ("since", "before")} | {"before_id": None}


def _after(text: str) -> dict[str, Any]:
    """Return the start of a page: after the dead letter with this time and id."""
    at, _, job = text.rpartition("~")
    try:
        return {"before": datetime.fromisoformat(at), "before_id": job_of(job)} if text else {}
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
        letters, end = await _letters(view, _LETTERS, _PAGE, _filter(asked) | _after(view.asked("after")))
        if end is not None:
            after, looked_to = _place(end), end["died_at"] if end["mark"] else None
        for one in letters:
            one["error"] = error_view(one["error"] or {})
    except WRONG as error:
        problem = str(error)
    return view.render(
        "dead.html", status=400 if problem else 200, letters=letters, asked=asked, reasons=REASONS, problem=problem,
        after=after, looked_to=looked_to, first=not view.asked("after"),
    )  # fmt: skip


async def preview(view: View) -> Response:
    verb = bulk_actions.VERBS.get(view.asked("verb"))
    if verb is None or "dead" not in verb.states:
        raise InvalidArgument("A dead letter can be retried, cancelled or dropped.")
    asked, found, after = {name: view.asked(name) for name in _ASKED}, bulk_actions.begun(view, verb), None
    filters = _filter(asked)
    said = filters | _after(view.asked("after"))
    letters: list[dict[str, Any]] = []
    end: dict[str, Any] | None = None
    with bulk_actions.looking(view, found):
        letters, end = await _letters(view, _IDS, found.room, said)
        if not found.looks:
            found.sample, _ = await _letters(view, _LETTERS, 10, said)
    for one in found.sample:
        one["error"], one["state"] = error_view(one["error"] or {}), "dead"
    if end is not None:
        after, found.looked_to = _place(end), end["died_at"]
    found.ids = [one["id"] for one in letters]
    found.states["dead"] += len(letters)
    return bulk_actions.preview(view, found, "/dead", asked, filters, after)


bulk_actions.serve(pages, "/dead", preview)
