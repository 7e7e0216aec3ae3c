"""`django.tasks` on both sides: a job as Django's TaskResult, and each task as one of ours.

A task's handler does what Django expects. A name in the database runs only declared tasks: those that our Backend
validated when their module was imported.
"""

import builtins
import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from asgiref.sync import sync_to_async
from django.apps import apps
from django.conf import settings
from django.db import connections
from django.utils import timezone

from tallybook import Cancel, Context, Dead, Snooze
from tallybook import Task as Declared
from tallybook._db import sync
from tallybook._db.declared import Call
from tallybook._db.texts import instant, loads
from tallybook._worker.run.ending import after_failure
from tallybook.contrib.django import _api
from tallybook.contrib.django._app import App

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


def _result(backend: Any, task: _api.Task, job: dict[str, Any], attempts: list[dict[str, Any]]) -> _api.TaskResult:
    count = ((job["headers"] or {}).get("django") or {}).get("args", 0)
    args, kwargs = unpacked(task.func, int(task.takes_context), job["args"], count if isinstance(count, int) else 0)
    status = _STATUS.get(job["state"], _READY)
    result = _api.TaskResult(
        task=task.using(priority=max(priority(job["priority"]), -100), queue_name=job["queue"], backend=backend.alias),
        id=str(job["id"]), status=status, args=args, kwargs=kwargs, backend=backend.alias,
        errors=[_error(one) for one in job["errors"] or ()],
        worker_ids=[attempt["worker"] or "" for attempt in attempts],
        enqueued_at=_instant(job["enqueued_at"]),
        started_at=_instant(attempts[0]["started_at"]) if attempts else None,
        last_attempted_at=_instant(attempts[-1]["started_at"]) if attempts else None,
        finished_at=_instant(job["ended_at"]) if job["state"] in ("completed", "cancelled", "dead") else None,
    )  # fmt: skip
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


_MAX_ATTEMPTS = 5  # of a job whose task and queue set none
_LIMIT = """\
select cast((select q.max_attempts from tallybook.queues q where q.name = cast(%(queue)s as text)) as text)"""
_apart = App("django.tasks")

declared: dict[str, Declared[..., Any]] = _apart.tasks  # the tasks that workers serve, by the path of the function


def declare(task: _api.Task, options: Mapping[str, Any]) -> None:
    """Make it one of our tasks, once; repeated calls and variants by `using` do nothing. Raises ConfigError."""
    path = task.module_path
    if path in declared:
        return
    said = {name: getattr(task, name, None) for name in ("max_attempts", "retry", "timeout")}
    given: dict[str, Any] = {name: value if value is not None else options.get(name) for name, value in said.items()}
    handler = _async_handler(task) if inspect.iscoroutinefunction(task.func) else _handler(task)
    handler.__doc__ = task.func.__doc__
    _apart.task(name=path, queue=task.queue_name, priority=priority(task.priority), **given)(handler)
    known[path] = task


def _handler(task: _api.Task) -> Any:
    def handler(_context: Context, /, **args: Any) -> Any:
        run = _Run(task, _context)
        try:
            value = _api.normalize_json(task.func(*run.first, *run.result.args, **run.result.kwargs))
        except Exception as error:
            run.failed(error)  # here, because receivers of signals read the exception that is being handled
            raise
        run.succeeded(value)
        return value

    return handler


def _async_handler(task: _api.Task) -> Any:
    async def handler(_context: Context, /, **args: Any) -> Any:
        run = await sync_to_async(_Run)(task, _context)
        try:
            value = _api.normalize_json(await task.func(*run.first, *run.result.args, **run.result.kwargs))
        except Exception as error:
            await sync_to_async(run.failed)(error)
            raise
        await sync_to_async(run.succeeded)(value)
        return value

    return handler


class _Run:
    """One attempt in terms of Django, and its signals."""

    def __init__(self, task: _api.Task, context: Context) -> None:
        self._context = context
        alias = (context.headers.get("django") or {}).get("backend")
        is_known = isinstance(alias, str) and alias in _api.task_backends.settings
        self.backend = _api.task_backends[alias if is_known else task.backend]
        self.result = read(self.backend, str(context.job_id))
        self.first = [_api.TaskContext(task_result=self.result)] if task.takes_context else []
        _api.task_started.send_robust(type(self.backend), task_result=self.result)

    def succeeded(self, value: Any) -> None:
        self._finished(status=_api.TaskResultStatus.SUCCESSFUL, _return_value=value)

    def failed(self, error: Exception) -> None:
        """Record a failure if it is the last. Otherwise the task is ready again, and has not finished."""
        if isinstance(error, Snooze) or (not isinstance(error, (Cancel, Dead)) and not self._is_last(error)):
            return
        path = f"{type(error).__module__}.{type(error).__qualname__}"
        text = "".join(traceback.format_exception(error))
        self.result.errors.append(_api.TaskError(exception_class_path=path, traceback=text))
        self._finished(status=_api.TaskResultStatus.FAILED)

    def _is_last(self, error: Exception) -> bool:
        job = self._context._job()
        task = self._context.app._names[self._context.task]
        limit = job.max_attempts or task.max_attempts or self._queue_limit()
        return job.failures + 1 >= limit or after_failure(job, task, error).final

    def _queue_limit(self) -> int:
        call = Call("queues", _LIMIT, {"queue": self._context.queue}, lambda found: int(found or _MAX_ATTEMPTS))
        try:
            return sync.run(connections[self.backend.database], call)
        except Exception:  # the handler may have left a broken connection: its own error must be the one on record
            return _MAX_ATTEMPTS

    def _finished(self, **values: Any) -> None:
        for name, value in {**values, "finished_at": timezone.now()}.items():
            object.__setattr__(self.result, name, value)  # it is frozen; Django does the same
        _api.task_finished.send_robust(type(self.backend), task_result=self.result)
