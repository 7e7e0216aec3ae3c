"""The Django admin for jobs, dead letters, queues and schedules: read-only, except for actions that run verbs.

It is active if django.contrib.admin is. `view_*` allows people to see it, `change_*` to use the actions.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.utils.html import format_html, format_html_join

from tallybook._app.queues import QUEUES, truncate_batch
from tallybook._db import sync
from tallybook._db.calls import STATE
from tallybook._db.verb import Verb
from tallybook._model.job_info import JobDone
from tallybook._model.schedule import rule_text
from tallybook.contrib.django import _admin_parts as parts
from tallybook.contrib.django.models import DeadLetter, Job, Queue, Schedule
from tallybook.extra.dashboard.redact import error_views, shown

_FACTS = ("id", "task", "queue", "state", "reason", "why", "summary", "progress", "progress_message")
_LONGEST = 120  # characters of a text in a list
_SECONDS = 20.0  # during which a request starts new batches
_CANCELLED = f"""\
select i from unnest(cast(%s as bigint[])) as i where {STATE.called(job_id="i")} = 'cancelled'"""  # noqa: S608
_JobVerb = Callable[[list[int]], Verb[list[JobDone]]]


def _data(name: str) -> Any:
    """Return a field with the JSON of a column, with possible secrets redacted."""

    @admin.display(description=name.capitalize())
    def field(self: Any, row: Any) -> str:
        value = getattr(row, name)
        return "-" if value is None else str(format_html("<pre>{}</pre>", shown(value)))

    return field


class _Jobs(parts.Shown):
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

    @parts.act(description="Retry")
    def retry(self, request: Any, queryset: Any) -> Any:
        return self._do(request, "retry", parts.app.jobs.retry)

    @parts.act(description="Cancel")
    def cancel(self, request: Any, queryset: Any) -> Any:
        effect = "None of them will start; running ones are asked to stop. Dead ones leave the dead letters."
        return self._do(request, "cancel", parts.app.jobs.cancel, "Cancel jobs?", effect)

    @parts.act(description="Drop")
    def drop(self, request: Any, queryset: Any) -> Any:
        effect = "They are deleted and cannot be retried any more."
        return self._do(request, "drop", parts.app.jobs.drop, "Drop dead letters?", effect)

    def _do(self, request: Any, verb: str, run: _JobVerb, title: str = "", effect: str = "") -> Any:
        """Run a verb for the checked jobs; with a title, ask for confirmation first."""
        if title and (page := self.confirmed(request, verb, title, effect)):
            return page
        ids = [int(one) for one in parts.chosen(request) if one.isdecimal() and len(one) < 19]
        with self.step(request):
            # Another cancel of those that are already cancelled changes nothing.
            before = set(parts.column(_CANCELLED, ids)) if verb == "cancel" else set()
            done = run([job for job in ids if job not in before]).sync(parts.alias())
            became = Counter(one.done for one in done if one.changed)
            if became:
                self.record(request, f"jobs.{verb}", {"jobs": [one.job for one in done if one.changed]}, dict(became))
            for kind, n in became.items():
                self.message_user(request, f"{n} {'job' if n == 1 else 'jobs'}: {kind}.", messages.SUCCESS)
            left = [one.detail or f"there is no job {one.job}" for one in done if not one.changed]
            for why in [*left, *(f"job {job} is cancelled already" for job in sorted(before))][:10]:
                self.message_user(request, f"Not changed: {why}", messages.WARNING)
        return None


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
class QueueAdmin(parts.Shown):
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
            (found.settings,) = sync.run(parts.alias(), QUEUES(found.pk))
        return found

    retention = admin.display(description="Retention class")(lambda self, queue: str(queue.settings.retention))
    max_attempts = admin.display(description="Max attempts")(
        lambda self, queue: str(queue.settings.max_attempts or "-")
    )
    notify = admin.display(description="Notify", boolean=True)(lambda self, queue: bool(queue.settings.notify))

    @parts.act(description="Pause")
    def pause(self, request: Any, queryset: Any) -> None:
        self.each(request, "queue", "pause", "paused", parts.app.queues.pause, "was paused already")

    @parts.act(description="Resume")
    def resume(self, request: Any, queryset: Any) -> None:
        self.each(request, "queue", "resume", "resumed", parts.app.queues.resume, "was not paused")

    @parts.act(description="Empty")
    def empty(self, request: Any, queryset: Any) -> Any:
        """Cancel all jobs that have not started, after a confirmation; in batches, so that claims wait only briefly."""
        effect = "All their jobs that have not started are cancelled. Running jobs continue; dead letters stay."
        if page := self.confirmed(request, "empty", "Empty queues?", effect):
            return page
        until = time.monotonic() + _SECONDS
        for name in parts.chosen(request):
            mark: str | None = None
            remain, cancelled = True, 0
            while remain and time.monotonic() < until:
                remain = False
                with self.step(request):
                    batch = sync.run(parts.alias(), truncate_batch(name, mark, by=parts.who(request)))
                    if batch.done.cancelled:
                        self.record(request, "queue.truncate", {"queue": name}, {"cancelled": batch.done.cancelled})
                    mark, remain = batch.mark, batch.remain
                    cancelled += batch.done.cancelled
            if mark is not None:
                more = " More are left: empty it again." if remain else ""
                self.message_user(request, f"Queue {name}: {cancelled} cancelled.{more}", messages.SUCCESS)
        return None


@admin.register(Schedule)
class ScheduleAdmin(parts.Shown):
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

    @parts.act(description="Pause")
    def pause(self, request: Any, queryset: Any) -> None:
        self.each(request, "schedule", "pause", "paused", parts.app.schedules.pause, "was paused already")

    @parts.act(description="Resume")
    def resume(self, request: Any, queryset: Any) -> None:
        self.each(
            request, "schedule", "resume", "resumed", lambda name, _: parts.app.schedules.resume(name), "was not paused"
        )

    @parts.act(description="Run now")
    def run(self, request: Any, queryset: Any) -> None:
        for name in parts.chosen(request):
            with self.step(request):
                fired = parts.app.schedules.run(name).sync(parts.alias())
                done = {"what": fired.what, "job": fired.job_id, "jobs": fired.jobs}
                self.record(request, "schedule.run", {"schedule": name}, done)
                about = f"job {fired.job_id}" if fired.job_id else fired.reason or f"{fired.jobs} jobs"
                level = messages.SUCCESS if fired.what == "enqueued" else messages.WARNING
                self.message_user(request, f"Schedule {name}: {fired.what}, {about}.", level)
