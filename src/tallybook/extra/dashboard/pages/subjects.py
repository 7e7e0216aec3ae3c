"""Subjects: named jobs that run repeatedly. A list by task and name, those that stopped and why, and one subject."""

from typing import Any

from starlette.responses import RedirectResponse, Response

from tallybook._app.subjects import STATES
from tallybook._db import subjects as calls
from tallybook._db.verb import run
from tallybook.errors import InvalidArgument
from tallybook.extra.dashboard.database import Conn, rows
from tallybook.extra.dashboard.pages.job import cancelled, events_of
from tallybook.extra.dashboard.texts import WRONG, text_of, time_to_come
from tallybook.extra.dashboard.view import Act, Pages, View

pages = Pages()
_NONE = "There is no such subject."
_PAGE = 100
_LOOKED = 500  # subjects that one page reads at most
_COLUMNS = """\
s.task, s.subject, s.job_id, s.queue, s.state, s.iterations, s.failures, s.attempts, s.next_run_at, s.last_at,
       s.ended_at, s.last_error, s.error, s.scope"""
# The primary key gives the order; the other filters apply to a limited number of rows from there on.
_PLAN = "select set_config('enable_seqscan', 'off', true), set_config('enable_hashjoin', 'off', true)"
_LIST = f"""\
select k.*, (%(state)s::text is null or k.state = %(state)s::text
             or %(state)s::text = 'stopped' and k.state in ('completed', 'killed', 'dead'))
         and (%(prefix)s::text is null or starts_with(k.subject, %(prefix)s::text)) as matches
  from (select {_COLUMNS} from tallybook.subject as s
         where (%(task)s::text is null or s.task = %(task)s::text)
           and (s.task, s.subject, s.scope)
               > (coalesce(%(after_task)s::text, ''), coalesce(%(after_name)s::text, ''),
                  coalesce(%(after_scope)s::text, ''))
         order by s.task, s.subject, s.scope limit %(looked)s) as k"""  # noqa: S608
_ONE = f"""\
select {_COLUMNS}, s.args, s.priority, s.made_at from tallybook.subject as s
 where s.task = %(task)s and s.subject = %(subject)s and (%(queue)s::text is null or s.scope in ('', %(queue)s))
 order by s.scope desc limit 2"""  # noqa: S608


@pages.page("/subjects")
async def subjects(view: View) -> Response:
    asked = {name: view.asked(name) for name in ("task", "state", "prefix")}
    place = {name: view.request.query_params.get(name) for name in ("after_task", "after_name", "after_scope")}
    found, after, looked_to, problem = list[dict[str, Any]](), None, None, None
    try:
        found, after, looked_to = await _page(view, asked, place)
    except WRONG as error:
        problem = str(error)
    return view.render(
        "subjects.html", subjects=found, asked=asked, states=("stopped", *STATES), problem=problem, after=after,
        further=asked | (after or {}), looked_to=looked_to, first=place["after_task"] is place["after_name"] is None,
    )  # fmt: skip


async def _page(
    view: View, asked: dict[str, str], place: dict[str, str | None]
) -> tuple[list[dict[str, Any]], dict[str, str] | None, dict[str, Any] | None]:
    """Return the matches, one node after another; the start of the next page, if any; the last subject that was read,
    if a limit has ended the list.
    """
    if asked["state"] and asked["state"] not in (*STATES, "stopped"):
        raise InvalidArgument(f"state must be one of stopped, {', '.join(STATES)}")
    said: dict[str, Any] = {name: text_of(name, asked[name]) for name in asked}
    begin, last = dict[str, Any](), view.asked("after_node")
    if place["after_task"] is not None and place["after_name"] is not None:
        begin = {name: text_of("the page", value or "") for name, value in place.items()}
    names = [at.name for at in await view.site.nodes.known()]
    passed = names[: names.index(last)] if last in names else []
    most = _LOOKED if said["state"] or said["prefix"] else _PAGE + 1

    async def read(conn: Conn, node: str) -> list[dict[str, Any]]:
        if node in passed:
            return []
        await conn.execute(_PLAN)
        given = dict.fromkeys(place) | said | (begin if node == last else {})
        return [one | {"node": node} for one in await rows(conn, _LIST, **given, looked=most)]

    found: list[dict[str, Any]] = []
    for looked in (await view.ask(read)).values():
        found += [one for one in looked if one["matches"]]
        if len(found) > _PAGE:
            return found[:_PAGE], _place(found[_PAGE - 1]), None
        if len(looked) == most:
            return found, _place(looked[-1]), looked[-1]
    return found, None, None


def _place(one: dict[str, Any]) -> dict[str, str]:
    names = {"node": "node", "task": "task", "name": "subject", "scope": "scope"}
    return {f"after_{name}": one[column] for name, column in names.items()}


@pages.page("/subject")
async def subject(view: View) -> Response:
    """Show one subject, its state and the events of its jobs; for a name in several queues, the list of them."""
    task, name = view.asked("task"), view.request.query_params.get("name", "")
    wanted: dict[str, Any] = {"task": text_of("task", task), "subject": text_of("name", name)}
    queue = text_of("queue", view.asked("queue"))
    found, events = None, []
    if wanted["task"] and wanted["subject"]:
        async with view.read() as conn:
            named = await rows(conn, _ONE, **wanted, queue=queue)
            if len(named) > 1 and not queue:
                return RedirectResponse(view.url("/subjects", task=task, prefix=name), 303)
            found = named[0] if named else None
            trace = await view.app.jobs.trace(**wanted, max_events=200, newest_first=True).on(conn)
            own = found["scope"] if found else ""
            events = events_of([event for event in trace if not own or event.queue == own])
    status = 200 if found or events else 404
    return view.render("subject.html", status=status, one=found, task=task, name=name, events=events)


def _subject(act: Act) -> tuple[str, str, str | None]:
    task, name = text_of("task", act.form("task")), text_of("name", (act.visit.form.get("name") or [""])[0])
    if not task or not name:
        raise InvalidArgument("The form names no subject.")
    return task, name, text_of("queue", act.form("queue"))


@pages.action("/subject/forget")
async def forget(act: Act) -> str:
    task, name, queue = _subject(act)
    became = await run(act.conn, calls.forget(task, name, queue))
    done = became == "forgotten"
    await act.audit("subject.forget", {"task": task, "subject": name}, {"forgotten": done}, changed=done)
    if not done:
        return "It runs: cancel its job first. Nothing was changed." if became == "active" else _NONE
    act.then = "/subjects"
    return "The subject is forgotten: the next push creates a new one."


@pages.action("/subject/move")
async def move(act: Act) -> str:
    task, name, queue = _subject(act)
    run_at = time_to_come(act.form("run_at"))
    became = await run(act.conn, calls.move(task, name, run_at, queue))
    done, target = became == "moved", {"task": task, "subject": name, "run_at": run_at.isoformat()}
    await act.audit("subject.move", target, {"moved": done}, changed=done)
    if done:
        return f"It runs at {run_at:%Y-%m-%d %H:%M:%S} UTC."
    why = {"unknown": _NONE, "pending": "It is already in line: it runs once a worker claims it."}
    return why.get(became, f"It is {became}: only a planned subject can be moved.")


async def _job_of(act: Act) -> tuple[int, dict[str, Any]]:
    """Return the job of a subject, and the target of an action on it for the audit."""
    task, name, queue = _subject(act)
    found = await run(act.conn, calls.get(task, name, queue))
    if found is None:
        raise InvalidArgument(_NONE)
    return found.job_id, {"task": task, "subject": name, "job": found.job_id}


@pages.action("/subject/retry")
async def retry(act: Act) -> str:
    job, target = await _job_of(act)
    attempt = await act.app.retry(job).on(act.conn)
    await act.audit("subject.retry", target, {"attempt": attempt})
    return "It is active again and runs at once."


@pages.action("/subject/cancel")
async def cancel(act: Act) -> str:
    """Cancel the job of a subject, which ends the subject until its next push."""
    job, target = await _job_of(act)
    return await cancelled(act, job, "Its job", "subject.cancel", target)
