"""The backend for `django.tasks`: its tasks are ordinary jobs, enqueued on Django's own connection."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils import timezone

from tallybook._db import calls, sync
from tallybook._model.backoff import Retry
from tallybook._model.options import check_name
from tallybook.contrib.django import _api, _settings, _tasks
from tallybook.contrib.django._tasks import packed, priority, read
from tallybook.errors import ConfigError

_OPTIONS = ("database", "max_attempts", "retry", "timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(_api.Task):
    """A task of `django.tasks` with three more options of App.task: `@task(max_attempts=3, timeout="30 s")`."""

    max_attempts: int | None = None
    retry: Retry | str | None = None
    timeout: timedelta | str | None = None


class Backend(_api.BaseTaskBackend):
    """Enqueue tasks of `django.tasks` in the open transaction of Django's connection, and read their results.

    OPTIONS: `database`, the alias (by default that of settings.TALLYBOOK); `max_attempts`, `retry` and `timeout` as
    defaults for all tasks. Django's priorities run from -100 to 100, higher first; priority 0 becomes 100 of the job.
        TASKS = {"default": {"BACKEND": "tallybook.contrib.django.Backend", "QUEUES": ["default", "mail"]}}
    """

    task_class = Task
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        if unknown := sorted(set(self.options) - set(_OPTIONS)):
            text = f"TASKS[{alias!r}]['OPTIONS'] has no key {unknown[0]!r}; it has {', '.join(_OPTIONS)}"
            raise ImproperlyConfigured(text)

    @property
    def database(self) -> str:
        """The alias of the database with its jobs."""
        return str(self.options.get("database") or _settings.read().database)

    def validate_task(self, task: _api.Task) -> None:
        """Raise InvalidTaskError for a task that cannot be a job. Workers of this process then know a valid task."""
        super().validate_task(task)
        try:
            _tasks.declare(task, self.options)
        except ConfigError as error:
            raise _api.InvalidTaskError(str(error)) from error

    def enqueue(self, task: _api.Task, args: Any, kwargs: Any) -> _api.TaskResult:
        """Enqueue a job in the open transaction of Django's connection; without a transaction it commits at once.

        Raises TypeError if the function does not accept these arguments, or JSON cannot store them.
        """
        self.validate_task(task)
        stored = packed(task.func, int(task.takes_context), _api.normalize_json(args), _api.normalize_json(kwargs))
        run_at = task.run_after
        if run_at is not None and timezone.is_naive(run_at):
            run_at = timezone.make_aware(run_at)
        ours, headers = _tasks.declared[task.module_path], {"django": {"backend": self.alias, "args": len(args)}}
        bound = ours.with_(queue=task.queue_name, priority=priority(task.priority), run_at=run_at, headers=headers)
        job = sync.run(connections[self.database], calls.enqueue(bound.job(**stored)))
        result = _api.TaskResult(
            task=task, args=args, kwargs=kwargs, id=str(job.id), status=_api.TaskResultStatus.READY,
            enqueued_at=timezone.now(), started_at=None, last_attempted_at=None, finished_at=None, backend=self.alias,
            errors=[], worker_ids=[],
        )  # fmt: skip
        _api.task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> _api.TaskResult:
        """Return a job's result. Raises TaskResultDoesNotExist if it is missing, pruned, or not of `django.tasks`."""
        return read(self, result_id)

    def check(self, **_: Any) -> Iterable[checks.CheckMessage]:
        """Check that its database is PostgreSQL, its queue names are valid, and our app is installed."""
        where = f"TASKS[{self.alias!r}]"
        if not apps.is_installed("tallybook.contrib.django"):
            text = f"{where}: Tallybook's own checks and commands are missing"
            yield checks.Warning(text, hint='Add "tallybook.contrib.django" to INSTALLED_APPS', id="tallybook.W003")
        try:
            alias = self.database
        except ImproperlyConfigured as error:
            yield checks.Error(f"{where}: {error}", id="tallybook.E004")
            return
        if alias not in settings.DATABASES:
            yield checks.Error(f"{where} names the database {alias!r}, which is not in DATABASES", id="tallybook.E004")
        elif (vendor := connections[alias].vendor) != "postgresql":
            yield checks.Error(f"{where}: the database {alias!r} is {vendor}, not PostgreSQL", id="tallybook.E002")
        for queue in sorted(self.queues, key=str):
            try:
                check_name("queue", queue, 64)
            except ConfigError as error:
                yield checks.Error(f"{where}['QUEUES']: {error}", id="tallybook.E005")


def queues() -> set[str]:
    ours = (backend for backend in _api.task_backends.all() if isinstance(backend, Backend))
    return {str(name) for backend in ours for name in backend.queues}
