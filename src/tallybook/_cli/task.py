"""tallybook task list, show: the catalogue."""

import json
from difflib import get_close_matches
from typing import Any

import click

from tallybook._cli.common import command, listing
from tallybook._cli.database import Db
from tallybook._cli.loading import load_app
from tallybook._cli.output import Columns, clean, local, print_json, print_pairs, yes_no
from tallybook._db.texts import loads
from tallybook.errors import UnknownTask

# Unregistered tasks that a worker serves (in another language, an older release) are listed, too.
_LIST = """\
with live as (
  select w.name, w.queues, unnest(w.tasks) as task from tallybook.workers w where w.ended_at is null)
select json_build_object(
  'name', n.name, 'app', t.app, 'summary', t.summary, 'version', t.version, 'aliases', t.aliases, 'alias_of', a.name,
  'on_dead', t.on_dead_task, 'definition', t.definition, 'registered_at', t.registered_at,
  'max_attempts', coalesce(t.definition -> 'max_attempts', to_jsonb(q.max_attempts), '5'),
  'workers', (select coalesce(json_agg(json_build_object('name', s.name, 'queues', s.queues) order by s.name), '[]')
                from (select distinct l.name, l.queues from live l where l.task = n.name) s))::text
  from (select k.name from tallybook.tasks k union select l.task from live l) n
  left join tallybook.tasks t using (name)
  left join tallybook.queues q on q.name = t.definition ->> 'queue'
  left join lateral (
    select k.name from tallybook.tasks k where n.name = any (k.aliases) order by k.name limit 1) a on true
 where t.name is not null or a.name is null
 order by n.name"""

_SAYS = "Show the tasks in the code of this App instead of the recorded ones."
_app_option = click.option("-A", "--app", "target", metavar="MODULE:APP", help=_SAYS)

task = click.Group(
    "task", help="Show the tasks that workers know.\n\nThis includes arguments, policies, aliases and workers.\n\n"
    "Workers record their tasks when they start.",
)  # fmt: skip


def _found(db: Db, target: str | None) -> list[dict[str, Any]]:
    if target is not None:
        from tallybook._task.catalogue import catalogue, check_tasks

        app = load_app(target)
        check_tasks(app)
        unknown = {"workers": None, "registered_at": None}
        return [{"aliases": [], **one, "on_dead": one.get("on_dead_task"), **unknown} for one in catalogue(app)]
    return [loads(row) for row in db.texts(_LIST)]


def _said(one: dict[str, Any]) -> dict[str, Any]:
    return one.get("definition") or {}


def _named(one: dict[str, Any]) -> str:
    name = f"{clean(one['name'])}({_signature(_said(one).get('args'))})"
    if (one.get("version") or 1) > 1:
        name += f" v{one['version']}"
    if one["aliases"]:
        name += f", was {', '.join(map(clean, one['aliases']))}"
    if one.get("alias_of"):
        name += f", an alias of {clean(one['alias_of'])}"
    return name


def _attempts(one: dict[str, Any]) -> object:
    """Return how many failures end a job of the task in its queue. The queue's own limit is only in the database."""
    if not (said := _said(one)):
        return "-"
    return one.get("max_attempts") or said.get("max_attempts") or "of the queue, or 5"


_COLUMNS: Columns = {
    "task": _named,
    "app": lambda one: one.get("app") or "-",
    "queue": lambda one: _said(one).get("queue") or "-",
    "prio": lambda one: _said(one).get("priority", "-"),
    "retry": lambda one: _retry(_said(one)),
    "attempts": _attempts,
    "workers": lambda one: "" if one["workers"] is None else len(one["workers"]),
}


@listing(_COLUMNS, of=task, empty="no tasks: workers register theirs when they start")
@_app_option
def list_(db: Db, target: str | None) -> list[dict[str, Any]]:
    """List the tasks, one per line."""
    return _found(db, target)


def _signature(args: Any) -> str:
    if not isinstance(args, list):
        return "..."
    marks = {"name": "", "type": ": ", "default": " = "}
    return ", ".join("".join(f"{mark}{arg[of]}" for of, mark in marks.items() if of in arg) for arg in args)


def _retry(said: dict[str, Any]) -> str:
    policy = said.get("retry")
    if not isinstance(policy, dict) or len(policy) != 1:
        return "-"
    ((form, values),) = policy.items()
    name = f"{said['retry_name']}: " if said.get("retry_name") else ""
    match form, values:
        case "exponential", {"first": first, "factor": factor, "cap": cap, **more}:
            jitter = ", drawn from 0 to that" if more.get("jitter") else ""
            return f"{name}{first} x {factor:g}^(failures - 1), at most {cap}{jitter}"
        case "linear", {"first": first, "cap": cap, **more}:
            return f"{name}{first}, then {more.get('step', first)} more each time, at most {cap}"
        case "constant", {"every": every}:
            return f"{name}every {every}"
        case _:
            return f"{name}{values}"


@command(of=task, json=True)
@_app_option
def show(db: Db, name: str, target: str | None, as_json: bool) -> None:
    """Show all details of one task."""
    found = _found(db, target)
    # An alias leads to its task, even if older releases have registered the old name.
    by_name = {one["name"]: one for one in found} | {alias: one for one in found for alias in one["aliases"] or ()}
    if name not in by_name:
        error = UnknownTask(name, by_name)
        if not get_close_matches(name, by_name, 1):
            error.hint = "`tallybook task list` shows the registered ones"
        raise error
    one = by_name[name]
    if as_json:
        print_json(json.dumps(one, ensure_ascii=False, indent=1))
        return
    said = _said(one)
    pairs: dict[str, object] = {
        "task": one["name"], "app": one.get("app") or "-", "arguments": f"({_signature(said.get('args'))})",
        "version of args": one.get("version") or 1, "aliases": ", ".join(one["aliases"] or ()) or "-",
        "summary": one.get("summary") or "-", "queue": said.get("queue") or "-", "priority": said.get("priority", "-"),
        "retry": _retry(said), "max attempts": _attempts(one), "on dead": one.get("on_dead") or "-",
    }  # fmt: skip
    told = ("args", "queue", "priority", "retry", "retry_name", "max_attempts")
    for key, value in said.items():
        if key not in told:
            text = ", ".join(map(str, value)) if isinstance(value, list) else yes_no(value)
            pairs[key.replace("_", " ")] = text
    if one["workers"] is not None:
        served = [f"{worker['name']} ({', '.join(worker['queues'])})" for worker in one["workers"]]
        pairs |= {"served by": ", ".join(served) or "nobody", "registered": local(one["registered_at"]) or "-"}
    print_pairs(pairs)
