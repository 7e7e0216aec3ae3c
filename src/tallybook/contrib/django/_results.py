"""A job as Django's TaskResult, its args by name as in all jobs, and the declared tasks of `django.tasks`."""

import builtins
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from django.apps import apps
from django.conf import settings
from django.db import connections
from django.utils import timezone

from tallybook._db import sync
from tallybook._db.declared import Call
from tallybook._db.texts import instant, loads
from tallybook.contrib.django import _api

known: dict[str, _api.Task] = {}  # the tasks that this program has declared, by the path of their function


def priority(given: int) -> int:
    """Convert Django's priority 100 (first) to -100 to ours, 0 (first) to 200, and back."""
    return 100 - given


def found(path: str) -> _api.Task | None:
    """Return the task whose function has this path; imports its module if it belongs to an installed app."""
    module = path.rpartition(".")[0]
    if path not in known and apps.get_containing_app_config(module) is not None:
        try:
            importlib.import_module(module)
        except ImportError:
            return None
    return known.get(path)


# No error for an unknown id: it would end the caller's transaction.
_SQL = """\
select cast((
  select json_build_object('job', to_json(j), 'attempts', (
           select coalesce(
             json_agg(json_build_object('started_at', a.started_at, 'worker', a.worker) order by a.attempt), '[]')
             from tallybook.attempt a where a.job_id = j.id and a.started_at is not null))
    from tallybook.job j where j.id = cast(cast(%(id)s as text) as bigint)) as text)"""
_READY = _api.TaskResultStatus.READY
_STATUS = {
    "running": _api.TaskResultStatus.RUNNING,
    "completed": _api.TaskResultStatus.SUCCESSFUL,
    "cancelled": _api.TaskResultStatus.FAILED,
    "dead": _api.TaskResultStatus.FAILED,
}


def read(backend: Any, result_id: str) -> _api.TaskResult:
    """Read the result of this job on the database of a Backend. Raises TaskResultDoesNotExist."""
    try:
        number = int(result_id)
    except (TypeError, ValueError):
        number = 0
    if not 0 < number < 2**63:
        raise _api.TaskResultDoesNotExist(result_id)
    call = Call("get_result", _SQL, {"id": str(number)}, lambda text: loads(text) if text else None)
    row = sync.run(connections[backend.database], call)
    task = found(row["job"]["task"]) if row is not None else None
    if row is None or task is None:
        raise _api.TaskResultDoesNotExist(result_id)
    return _result(backend, task, row["job"], row["attempts"])


def made(backend: Any, **values: Any) -> _api.TaskResult:
    """Return a result with these values; what they leave out has not happened."""
    never = dict.fromkeys(("started_at", "last_attempted_at", "finished_at"))
    return _api.TaskResult(**{**never, "errors": [], "worker_ids": [], **values}, backend=backend.alias)


def _result(backend: Any, task: _api.Task, job: dict[str, Any], attempts: list[dict[str, Any]]) -> _api.TaskResult:
    count = ((job["headers"] or {}).get("django") or {}).get("args", 0)
    args, kwargs = unpacked(task.func, int(task.takes_context), job["args"], count if isinstance(count, int) else 0)
    status = _STATUS.get(job["state"], _READY)
    result = made(
        backend,
        task=task.using(priority=max(priority(job["priority"]), -100), queue_name=job["queue"], backend=backend.alias),
        id=str(job["id"]),
        status=status,
        enqueued_at=_instant(job["enqueued_at"]),
        started_at=_instant(attempts[0]["started_at"]) if attempts else None,
        last_attempted_at=_instant(attempts[-1]["started_at"]) if attempts else None,
        finished_at=_instant(job["ended_at"]) if job["state"] in ("completed", "cancelled", "dead") else None,
        args=args,
        kwargs=kwargs,
        errors=[_error(one) for one in job["errors"] or ()],
        worker_ids=[attempt["worker"] or "" for attempt in attempts],
    )
    if status == _api.TaskResultStatus.SUCCESSFUL:
        object.__setattr__(result, "_return_value", job["result"])
    return result


def _error(said: dict[str, Any]) -> _api.TaskError:
    """Return an error with an importable path of its class, which our error list names without `builtins`."""
    path = str(said.get("type"))
    if isinstance(getattr(builtins, path, None), type):
        path = f"builtins.{path}"
    elif "." not in path:
        path = "tallybook.Dead" if path == "Dead" else "builtins.RuntimeError"
    return _api.TaskError(exception_class_path=path, traceback=str(said.get("traceback") or ""))


def _instant(text: str | None) -> datetime | None:
    at = instant(text)
    if at is None:
        return None
    return at.astimezone(UTC) if settings.USE_TZ else timezone.make_naive(at)


def _parameters(fn: Callable[..., Any], skip: int) -> list[inspect.Parameter]:
    return list(inspect.signature(fn).parameters.values())[skip:]


def packed(fn: Callable[..., Any], skip: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, after the first `skip`; `*args` as a list. TypeError for an invalid call."""
    signature = inspect.Signature(_parameters(fn, skip))
    found: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            if taken := found.keys() & value.keys():
                raise TypeError(f"{fn.__qualname__} gets {taken.pop()!r} twice, by position and by name")
            found |= value
        else:
            found[name] = list(value) if kind is inspect.Parameter.VAR_POSITIONAL else value
    return found


def unpacked(
    fn: Callable[..., Any], skip: int, stored: Mapping[str, Any], count: int
) -> tuple[list[Any], dict[str, Any]]:
    """Return args and kwargs, `count` of them positional. Jobs from SQL (count 0) use names as far as possible."""
    parameters, named, positional = _parameters(fn, skip), dict(stored), list[Any]()
    star = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL and p.name in named), None)
    for parameter in parameters:
        if parameter.name not in named:
            continue
        if parameter.name == star:
            positional += named.pop(star)
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY or (
            parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and (star or len(positional) < count)
        ):
            positional.append(named.pop(parameter.name))
    return positional, named
