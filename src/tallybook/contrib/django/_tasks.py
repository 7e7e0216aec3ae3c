"""The worker's side of `django.tasks`: each task becomes one of ours, with a handler that does what Django expects.

A name in the database runs only declared tasks: those that our Backend validated when their module was imported.
"""

import inspect
import traceback
from collections.abc import Mapping
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connections
from django.utils import timezone

from tallybook import Cancel, Context, Dead, Snooze
from tallybook import Task as Declared
from tallybook._db import sync
from tallybook._db.declared import Call
from tallybook._worker.run.ending import after_failure
from tallybook.contrib.django import _api
from tallybook.contrib.django._app import App
from tallybook.contrib.django._results import known, priority, read

_MAX_ATTEMPTS = 5  # of a job whose task and queue set none
_LIMIT = """\
select cast((select q.max_attempts from tallybook.queues q where q.name = cast(%(queue)s as text)) as text)"""
_apart = App("django.tasks")

declared: dict[str, Declared[..., Any]] = _apart.tasks
"""The tasks that workers serve, by the path of the function."""


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
        _api.task_started.send_robust(type(run.backend), task_result=run.result)
        try:
            value = _api.normalize_json(task.func(*run.first, *run.result.args, **run.result.kwargs))
        except Exception as error:
            if run.has_failed(error):  # here, because receivers read the exception that is being handled
                _api.task_finished.send_robust(type(run.backend), task_result=run.result)
            raise
        run.has_succeeded(value)
        _api.task_finished.send_robust(type(run.backend), task_result=run.result)
        return value

    return handler


def _async_handler(task: _api.Task) -> Any:
    async def handler(_context: Context, /, **args: Any) -> Any:
        run = await sync_to_async(_Run)(task, _context)
        await _api.task_started.asend_robust(type(run.backend), task_result=run.result)
        try:
            value = _api.normalize_json(await task.func(*run.first, *run.result.args, **run.result.kwargs))
        except Exception as error:
            if await sync_to_async(run.has_failed)(error):
                await _api.task_finished.asend_robust(type(run.backend), task_result=run.result)
            raise
        run.has_succeeded(value)
        await _api.task_finished.asend_robust(type(run.backend), task_result=run.result)
        return value

    return handler


class _Run:
    """One attempt in terms of Django."""

    def __init__(self, task: _api.Task, context: Context) -> None:
        self._context = context
        alias = (context.headers.get("django") or {}).get("backend")
        is_known = isinstance(alias, str) and alias in _api.task_backends.settings
        self.backend = _api.task_backends[alias if is_known else task.backend]
        self.result = read(self.backend, str(context.job_id))
        self.first = [_api.TaskContext(task_result=self.result)] if task.takes_context else []

    def has_succeeded(self, value: Any) -> None:
        self._set(status=_api.TaskResultStatus.SUCCESSFUL, finished_at=timezone.now(), _return_value=value)

    def has_failed(self, error: Exception) -> bool:
        """Record a failure; returns whether it is the last. Otherwise the task is ready again, and has not finished."""
        if isinstance(error, Snooze) or (not isinstance(error, (Cancel, Dead)) and not self._is_last(error)):
            return False
        path = f"{type(error).__module__}.{type(error).__qualname__}"
        text = "".join(traceback.format_exception(error))
        self.result.errors.append(_api.TaskError(exception_class_path=path, traceback=text))
        self._set(status=_api.TaskResultStatus.FAILED, finished_at=timezone.now())
        return True

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

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self.result, name, value)  # it is frozen; Django does the same
