"""Schedules: the list with the result of the last tick; one schedule with its next ticks and its stored fires."""

from datetime import UTC, datetime
from itertools import chain, islice
from typing import Any

from starlette.responses import Response

from tallybook._db.calls import STATE
from tallybook._model.cron import rule
from tallybook._model.subject import instant
from tallybook.errors import ConfigError, UnknownSchedule
from tallybook.extra.dashboard.database import Conn, rows
from tallybook.extra.dashboard.view import Act, Pages, View

pages = Pages()
_PAGE = 100
_FIRES = 50
_LOOK = 5000  # ticks that a filtered page of fires reads at most: a schedule that fires every second has millions
_WHAT = {"enqueued": "ran", "skipped": "skipped", "missed": "missed", "failed": "failed"}
_NEXT = 8
# Only columns that the reader's role may see; a separate query reads the rest.
_COLUMNS = """\
s.name, s.source, s.app, s.task, s.queue, s.priority, s.cron, s.every, s.tz, s.missed,
s.overlap, s.paused_at, s.paused_by, s.tick, s.due_at, s.fired_count, s.skipped_count, s.missed_count, s.failed_count"""
_LIST = f"""\
select {_COLUMNS}, {{by_query}} as by_query, f.tick as last_tick, f.what as last_what, f.job_id as last_job
  from (
    select x.name from tallybook.schedules as x
     where position(lower(%(part)s) in lower(x.name)) > 0 and x.name collate "C" > %(after)s
     order by x.name collate "C" limit %(most)s) as n  -- as Python sorts those of several nodes
  join tallybook.schedules as s on s.name = n.name
  left join lateral (
    select k.tick, k.what, k.job_id from tallybook.fires as k where k.schedule = s.name
     order by k.tick desc limit 1) as f on true
 order by (s.name collate "C")"""  # noqa: S608 - columns of ours
_ONE = f"select {_COLUMNS} from tallybook.schedules as s where s.name = %s"  # noqa: S608 - columns of ours
_CARRIED = """\
select s.args, s.headers, s.max_attempts, s.query, s.jitter, s.catch_up, s.problem, s.since, s.created_at, s.changed_at
  from tallybook.schedules as s where s.name = %s"""
_MAY_SEE = """\
select has_column_privilege('tallybook.schedules', 'args', 'select')
   and has_column_privilege('tallybook.fires', 'reason', 'select') as yes"""
# Newest ticks first, by their key. Returns the wanted ones among those that were read, and how far it has read.
_FIRES_OF = """\
with looked as materialized (
  select f.tick, f.fired_at, f.what, {reason} as reason, f.job_id, f.jobs, f.ticks from tallybook.fires as f
   where f.schedule = %(name)s and f.tick < %(before)s order by f.tick desc limit %(look)s)
select l.*, (select min(x.tick) from looked as x) as looked_to, (select count(*) from looked) as looked,
       case when l.job_id is not null then {state} end as job_state
  from (select null) as one left join (
    select * from looked where %(what)s = '' or looked.what = %(what)s
     order by looked.tick desc limit %(most)s) as l on true
 order by l.tick desc"""
# Both must follow the key of fires: without statistics the planner would read and sort the whole table.
_WALK = "select set_config('enable_bitmapscan', 'off', true), set_config('enable_sort', 'off', true)"
_FAR = datetime(9999, 1, 1, tzinfo=UTC)


@pages.page("/schedules")
async def schedules(view: View) -> Response:
    part, after = view.asked("q"), view.asked("after")

    async def read(conn: Conn, node: str) -> list[dict[str, Any]]:
        await conn.execute(_WALK)
        may_see = (await rows(conn, _MAY_SEE))[0]["yes"]
        query = _LIST.replace("{by_query}", "s.query is not null" if may_see else "false")
        found = await rows(conn, query, part=part, after=after, most=_PAGE + 1)
        return [one | {"node": node} for one in found]

    found = sorted(chain(*(await view.ask(read)).values()), key=lambda one: one["name"])
    last = found[_PAGE - 1]["name"] if len(found) > _PAGE else None  # a name of several nodes stays on one page
    page = found if last is None else [one for one in found if one["name"] <= last]
    return view.render(
        "schedules.html", schedules=page, more=len(found) > len(page), part=part, after=after, what=_WHAT
    )


@pages.page("/schedule")
async def schedule(view: View) -> Response:
    name, what = view.asked("name"), view.asked("what")
    what = what if what in _WHAT else ""
    before = instant(view.asked("before")) or _FAR
    async with view.read() as conn:
        await conn.execute(_WALK)
        found = await rows(conn, _ONE, name)
        if not found:
            raise UnknownSchedule(name)
        may_see = (await rows(conn, _MAY_SEE))[0]["yes"]
        carried = (await rows(conn, _CARRIED, name))[0] if may_see else None
        reason = "f.reason" if may_see else "cast(null as text)"
        query = _FIRES_OF.replace("{reason}", reason).replace("{state}", STATE.called(job_id="l.job_id"))
        looked = await rows(conn, query, name=name, before=before, what=what, look=_LOOK, most=_FIRES + 1)
    fires = [one for one in looked if one["tick"] is not None]  # one more than a page has
    looked_to = looked[0]["looked_to"] if looked[0]["looked"] == _LOOK else None
    more = fires[_FIRES - 1]["tick"] if len(fires) > _FIRES else looked_to
    return view.render(
        "schedule.html", schedule=found[0], carried=carried, fires=fires[:_FIRES], more=more,
        looked_to=looked_to, what=what, whats=_WHAT, before=before, next=_next(found[0]),
    )  # fmt: skip


def _next(one: dict[str, Any]) -> list[datetime]:
    """Return its next ticks, as if it were not paused."""
    now = datetime.now(UTC)
    try:
        ticks = rule(one["cron"], one["every"], one["tz"])
    except ConfigError:  # this machine cannot read the expression; the stored problem has the reason
        return []
    first = one["tick"] if one["tick"] is not None and one["tick"] > now else ticks.after(now)
    return [] if first is None else [first, *islice(ticks.following(first), _NEXT - 1)]


@pages.action("/schedule/run")
async def run_now(act: Act) -> str:
    """Fire the schedule now, with the same guard against overlap as its ticks."""
    name = act.form("name")
    fired = await act.app.schedules.run(name).on(act.conn)
    await act.audit("schedule.run", {"schedule": name}, {"what": fired.what, "job": fired.job_id, "jobs": fired.jobs})
    if fired.what == "skipped":
        return f"Schedule {name} was skipped: the job of its last fire has not ended, or its query runs."
    if fired.what == "failed":
        return f"Schedule {name} failed; its newest fire shows the reason."
    return f"Schedule {name} enqueued {f'job {fired.job_id}' if fired.job_id else f'{fired.jobs} jobs'}."


pages.form(
    "/schedule/pause", "schedule.pause", lambda app, name, who: app.schedules.pause(name, who), "paused",
    ("Schedule {} is paused.", "Schedule {} was already paused."),
)  # fmt: skip
pages.form(
    "/schedule/resume", "schedule.resume", lambda app, name, _: app.schedules.resume(name), "resumed",
    ("Schedule {} ticks again.", "Schedule {} was not paused."),
)  # fmt: skip
pages.form(
    "/schedule/drop", "schedule.drop", lambda app, name, _: app.schedules.drop(name), "dropped",
    ("Schedule {} is dropped.", "There is no schedule {}."), then="/schedules",
)  # fmt: skip
