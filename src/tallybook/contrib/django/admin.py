"""The Django admin for jobs, dead letters, queues and schedules: read-only, except for actions that run verbs.

It is active if django.contrib.admin is. `view_*` allows people to see it, `change_*` to use the actions.
"""

from typing import Any

from django.contrib import admin
from django.utils.html import format_html, format_html_join

from tallybook._db import queues, sync
from tallybook._model.schedule import rule_text
from tallybook.contrib.django import _admin_parts as parts
from tallybook.contrib.django.models import DeadLetter, Job, Queue, Schedule
from tallybook.extra.dashboard.redact import error_views, shown

_FACTS = ("id", "task", "queue", "state", "reason", "why", "summary", "progress", "progress_message")
_LONGEST = 120  # characters of a text in a list


def _data(name: str) -> Any:
    """Return a field with the JSON of a column, with possible secrets redacted."""

    @admin.display(description=name.capitalize())
    def field(self: Any, row: Any) -> str:
        value = getattr(row, name)
        return "-" if value is None else str(format_html("<pre>{}</pre>", shown(value)))

    return field


class _Jobs(parts.JobActs):
    only_state: str | None = None  # for a list of jobs in one state
    search_fields = ("id", "task")
    search_help_text = "An id, or the whole name of a task."
    sortable_by = ()
    fieldsets = (
        (None, {"fields": _FACTS}),
        ("Times", {"fields": ("enqueued_at", "run_at", "started_at", "ended_at", "expires_at", "worker")}),
        ("Attempts", {"fields": ("attempts", "failures", "crashes", "max_attempts", "error_history")}),
        ("Data", {"fields": ("shown_args", "shown_result", "shown_headers")}),
        ("Keys", {"fields": ("priority", "unique_key", "order_key", "subject")}),
    )

    def get_changelist(self, request: Any, **kwargs: Any) -> Any:
        return parts.JobList

    @admin.display(description="Why")
    def why(self, job: Job) -> str:
        reasons = parts.app.jobs.why(job.pk).sync(parts.alias())
        return str(format_html_join("", "{}<br>", ((reason.explanation,) for reason in reasons)))

    @admin.display(description="Errors")
    def error_history(self, job: Job) -> str:
        parts = ((f"{one['type']}: {one['message']}", one["traceback"]) for one in error_views(job.errors))
        return str(format_html_join("", "<p>{}</p><pre>{}</pre>", parts)) or "-"

    shown_args, shown_result, shown_headers = _data("args"), _data("result"), _data("headers")

    @admin.display(description="Note")
    def note(self, job: Job) -> str:
        """Return the last error, the reason why it waits, or its summary."""
        text = job.last_error or job.reason or job.summary or ""
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


@admin.register(Job)
class JobAdmin(_Jobs):
    list_display = ("id", "task", "queue", "state", "attempts", "enqueued_at", "ended_at", "note")
    list_filter = (parts.StateFilter, parts.QueueFilter, parts.TaskFilter)
    actions = ("retry", "cancel")


@admin.register(DeadLetter)
class DeadLetterAdmin(_Jobs):
    only_state = "dead"
    list_display = ("id", "task", "queue", "reason", "failures", "ended_at", "note")
    list_filter = (parts.QueueFilter, parts.TaskFilter)
    actions = ("retry", "drop")

    def get_queryset(self, request: Any) -> Any:
        return super().get_queryset(request).filter(state="dead")


@admin.register(Queue)
class QueueAdmin(parts.QueueActs):
    list_display = ("queue", "paused_by", "available", "running", "scheduled", "retrying", "waiting", "dead",
                    "completed")  # fmt: skip
    list_filter = (parts.PausedFilter,)
    ordering = search_fields = ("queue",)
    actions = ("pause", "resume", "empty")
    fieldsets = (
        (None, {"fields": ("queue", "paused_at", "paused_by", "oldest")}),
        ("Jobs", {"fields": ("available", "running", "scheduled", "retrying", "waiting", "dead", "unserved")}),
        ("Ended", {"fields": ("completed", "failed", "cancelled")}),
        ("Settings", {"fields": ("retention", "max_attempts", "notify")}),
    )

    def get_queryset(self, request: Any) -> Any:
        """Leave out a value that needs a search per line; the page of one queue reads it."""
        return super().get_queryset(request).defer("oldest")

    def get_object(self, request: Any, object_id: str, from_field: Any = None) -> Any:
        found = super().get_object(request, object_id, from_field)
        if found is not None:
            (found.settings,) = sync.run(parts.alias(), queues.queues(found.pk))
        return found

    retention = admin.display(description="Retention class")(lambda self, queue: str(queue.settings.retention))
    max_attempts = admin.display(description="Max attempts")(
        lambda self, queue: str(queue.settings.max_attempts or "-")
    )
    notify = admin.display(description="Notify", boolean=True)(lambda self, queue: bool(queue.settings.notify))


@admin.register(Schedule)
class ScheduleAdmin(parts.ScheduleActs):
    list_display = ("name", "rule", "task", "queue", "tick", "last_job_id", "fired_count", "failed_count", "paused_at",
                    "problem")  # fmt: skip
    list_filter = (parts.PausedFilter, parts.QueueFilter, parts.TaskFilter)
    search_fields = ("name", "task")
    ordering = ("name",)
    actions = ("run", "pause", "resume")
    fieldsets = (
        (None, {"fields": ("name", "rule", "task", "queue", "source", "app", "problem")}),
        ("Ticks", {"fields": ("tick", "due_at", "jitter", "missed", "catch_up", "overlap", "paused_at", "paused_by")}),
        ("So far", {"fields": ("fired_count", "skipped_count", "missed_count", "failed_count", "last_job_id")}),
        ("Job", {"fields": ("shown_args", "shown_headers", "priority", "max_attempts", "query")}),
        ("Changes", {"fields": ("created_at", "changed_at")}),
    )

    rule = admin.display(description="Rule", ordering="name")(lambda self, row: rule_text(row.cron, row.every, row.tz))
    shown_args, shown_headers = _data("args"), _data("headers")
