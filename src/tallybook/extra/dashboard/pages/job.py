"""One job, live: its facts, its history and why it waits; and the trace of a link, subject or unique key."""

from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any

from starlette.responses import Response

from tallybook._app import App
from tallybook._db.calls import STATE
from tallybook._db.driver import InsufficientPrivilege
from tallybook._model.job_info import JobInfo, Reason, TraceEvent
from tallybook.errors import InvalidArgument, TallybookError, UnknownJob
from tallybook.extra.dashboard.database import Conn, rows
from tallybook.extra.dashboard.nodes import At
from tallybook.extra.dashboard.redact import error_view, error_views
from tallybook.extra.dashboard.texts import WRONG, id_of, links_of, number_of, text_of
from tallybook.extra.dashboard.view import Act, Pages, Shared, View

pages = Pages()
_MOST_EVENTS = 200
_ATTEMPTS = """\
select a.attempt, a.state, a.worker, a.worker_id, a.started_at, a.ended_at from tallybook.attempt as a
 where a.job_id = %s order by a.attempt desc limit 100"""
_PARENTS = f"""\
select p.parent_id as id, p.ended_as, {STATE.called(job_id="p.parent_id")} as state from tallybook.parents as p
 where p.child_id = %s order by p.place limit 50"""  # noqa: S608
_CHILDREN = f"""\
select p.child_id as id, {STATE.called(job_id="p.child_id")} as state from tallybook.parents as p
 where p.parent_id = %s and p.ended_as is null order by p.child_id limit 50"""  # noqa: S608


def events_of(found: list[TraceEvent]) -> list[dict[str, Any]]:
    """Return a trace for a page, newest first, with the time `after` the previous event of the job."""
    before: dict[int, datetime] = {}
    events: list[dict[str, Any]] = []
    for one in reversed(found):
        said = {key: value for key, value in (one.details or {}).items() if value is not None}
        run_at, reason = said.pop("run_at", None), said.pop("reason", None)
        events.append({
            "at": one.at, "job": one.job, "queue": one.queue, "task": one.task, "attempt": one.attempt,
            "name": one.event, "worker": one.worker, "after": one.at - before[one.job] if one.job in before else None,
            "run_at": run_at if isinstance(run_at, str) else None, "reason": None if reason is None else str(reason),
            "details": said or None, "error": None if one.error is None else error_view(one.error),
        })  # fmt: skip
        before[one.job] = one.at
    return events[::-1]


async def standing(app: App, conn: Conn, job: int) -> dict[str, Any]:
    """Read a job for its page; `info` is None if the job does not exist, or no longer: it may have a history."""
    info: JobInfo | None = None
    with suppress(UnknownJob):
        info = await app.get(job).on(conn)
    reasons = await app.jobs.why(job).on(conn)
    found = await app.jobs.trace(job=job, max_events=_MOST_EVENTS, newest_first=True).on(conn)
    events, errors = events_of(found), error_views(info.errors if info else None)
    for event in events:  # each error is shown once: events and reasons do not repeat it
        if event["attempt"] in (one["attempt"] for one in errors):
            event["error"] = None
    if errors:
        said = f": {errors[0]['message'][:200]}"
        reasons = [replace(one, explanation=one.explanation.replace(said, "")) for one in reasons]
    attempts = await rows(conn, _ATTEMPTS, job)
    return {"id": job, "info": info, "reasons": reasons, "events": events, "attempts": attempts, "errors": errors}


def topics(site: Shared) -> None:
    async def job(conn: Conn, rest: str) -> str | None:
        if (wanted := id_of(rest)) is None:
            return None
        try:
            async with conn.transaction():  # an error here must not affect the other topics
                found = await standing(site.app, conn, wanted)
        except (TallybookError, InsufficientPrivilege):
            return None
        return site.fragment("job_live.html", site.node_name(wanted), now=found)

    async def place(rest: str) -> At:
        wanted = id_of(rest)
        return await (site.nodes.named("") if wanted is None else site.nodes.of_job(wanted))

    site.live.topic("job", job, place=place)


@pages.page("/job/{id}")
async def job(view: View) -> Response:
    wanted = id_of(view.path["id"])
    if wanted is None:
        why = [Reason(state=None, reason="unknown", explanation=f"No job can have the id {view.path['id'][:40]}.")]
        return view.render("job_gone.html", status=404, now={"id": 0, "reasons": why, "events": []})
    async with view.read() as conn:
        now = await standing(view.app, conn, wanted)
        parents, children = await rows(conn, _PARENTS, wanted), await rows(conn, _CHILDREN, wanted)
    if now["info"] is None:
        return view.render("job_gone.html", status=200 if now["events"] else 404, now=now)
    return view.render("job.html", now=now, job=now["info"], parents=parents, children=children)


@pages.page("/trace")
async def trace(view: View) -> Response:
    asked: dict[str, Any] = {name: view.asked(name) for name in ("subject", "unique", "task")}
    asked["link"] = view.asked_all("link")
    problem, events, most = None, None, _MOST_EVENTS
    try:
        most = number_of("the number of events", view.asked("most"), 1, 5000, _MOST_EVENTS)
        links, subject = links_of(asked["link"]), text_of("subject", asked["subject"])
        said = {"links": links, "subject": subject, "unique": text_of("unique key", asked["unique"])}
        given: dict[str, Any] = {key: value for key, value in said.items() if value is not None}
        if len(given) > 1:
            raise InvalidArgument("A trace follows one thing: a link, a subject or a unique key.")
        if given:
            task = text_of("task", asked["task"])

            async def read(conn: Conn, _: str) -> list[TraceEvent]:
                return await view.app.jobs.trace(**given, task=task, max_events=most, newest_first=True).on(conn)

            found = [one for events in (await view.ask(read)).values() for one in events]
            if view.site.nodes.many:
                found = sorted(found, key=lambda one: one.at, reverse=True)[:most]
            events = events_of(found)
    except WRONG as error:
        problem = str(error)
    return view.render("trace.html", events=events, asked=asked, problem=problem, most=most, larger=5000)


def _job(act: Act) -> int:
    if (found := id_of(act.form("job"))) is None:
        raise InvalidArgument("The form names no job.")
    return found


@pages.action("/job/retry")
async def retry(act: Act) -> str:
    wanted = _job(act)
    attempt = await act.app.retry(wanted).on(act.conn)
    await act.audit("job.retry", {"job": wanted}, {"attempt": attempt})
    return f"Job {wanted} gets attempt {attempt}."


@pages.action("/job/cancel")
async def cancel(act: Act) -> str:
    wanted = _job(act)
    return await cancelled(act, wanted, f"Job {wanted}", "job.cancel", {"job": wanted})


async def cancelled(act: Act, job: int, words: str, action: str, target: dict[str, Any]) -> str:
    """Cancel a job, with the audit row of `action`, and return the notice, which calls the job by these words."""
    reason = text_of("the reason", act.form("reason"))
    before = await act.app.jobs.state(job).on(act.conn)
    state = await act.app.cancel(job, reason).on(act.conn)
    changed = state in ("cancelled", "cancelling") and before != "cancelled"
    await act.audit(action, target | ({"reason": reason} if reason else {}), {"state": state}, changed=changed)
    if not changed:
        return f"{words} is already {state}: nothing was changed."
    return f"{words} is cancelled." if state == "cancelled" else f"{words} runs: its worker is asked to stop it."


@pages.action("/job/drop")
async def drop(act: Act) -> str:
    wanted = _job(act)
    dropped = await act.app.dead.drop(wanted).on(act.conn)
    await act.audit("job.drop", {"job": wanted}, {"dropped": dropped}, changed=dropped)
    if not dropped:
        return f"Job {wanted} is not a dead letter: nothing was changed."
    return f"The dead letter of job {wanted} is dropped. Its history stays until it is pruned."
