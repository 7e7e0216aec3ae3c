"""Models for the admin over views of the schema `tallybook`. They are read-only; Django never creates or changes them.

`Job.objects` and the others read the database that a queryset sets with `using()`. To change things, use the App's
verbs.
"""

from typing import Any

from django.db import models


class _Nothing(models.Manager):
    """The default manager: `dumpdata` uses that of every model, and jobs do not belong in a dump of your data."""

    def get_queryset(self) -> Any:
        return super().get_queryset().none()


class _View(models.Model):
    nothing = _Nothing()
    objects = models.Manager()

    class Meta:
        abstract = True
        managed = False
        app_label = "tallybook"
        default_permissions = ("view", "change")

    def __str__(self) -> str:
        return str(self.pk)


class Job(_View):
    """One job: a row of the view `tallybook.job`."""

    id = models.BigIntegerField("id", primary_key=True)
    task = models.TextField()
    queue = models.TextField()
    state = models.TextField()
    reason = models.TextField()
    priority = models.IntegerField()
    attempts = models.IntegerField()
    failures = models.IntegerField()
    crashes = models.IntegerField()
    max_attempts = models.IntegerField()
    enqueued_at = models.DateTimeField()
    run_at = models.DateTimeField()
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    worker = models.TextField()
    unique_key = models.TextField()
    order_key = models.TextField()
    subject = models.TextField()
    progress = models.FloatField()
    progress_message = models.TextField()
    summary = models.TextField()
    last_error = models.TextField()
    args = models.JSONField()
    headers = models.JSONField()
    result = models.JSONField()
    errors = models.JSONField()

    class Meta(_View.Meta):
        db_table = '"tallybook"."job"'


class DeadLetter(Job):
    """A dead job; a separate model with its own permissions."""

    class Meta(_View.Meta):
        proxy = True
        verbose_name = "dead letter"


class Queue(_View):
    """One queue with the numbers of its jobs: a row of the view `tallybook.queue_stats`."""

    queue = models.TextField(primary_key=True)
    available = models.BigIntegerField()
    running = models.BigIntegerField()
    scheduled = models.BigIntegerField()
    retrying = models.BigIntegerField()
    waiting = models.BigIntegerField()
    dead = models.BigIntegerField()
    completed = models.BigIntegerField()
    failed = models.BigIntegerField()
    cancelled = models.BigIntegerField()
    unserved = models.BigIntegerField()
    oldest = models.DateTimeField()
    paused_at = models.DateTimeField(null=True)
    paused_by = models.TextField()

    class Meta(_View.Meta):
        db_table = '"tallybook"."queue_stats"'


class Schedule(_View):
    """One schedule: a row of the view `tallybook.schedules`."""

    name = models.TextField(primary_key=True)
    source = models.TextField()
    app = models.TextField()
    task = models.TextField()
    queue = models.TextField()
    priority = models.IntegerField()
    max_attempts = models.IntegerField()
    args = models.JSONField()
    headers = models.JSONField()
    query = models.TextField()
    cron = models.TextField()
    every = models.DurationField()
    tz = models.TextField()
    jitter = models.DurationField()
    missed = models.TextField()
    catch_up = models.IntegerField()
    overlap = models.BooleanField()
    tick = models.DateTimeField("next tick")
    due_at = models.DateTimeField()
    last_job_id = models.BigIntegerField("last job")
    paused_at = models.DateTimeField(null=True)
    paused_by = models.TextField()
    fired_count = models.BigIntegerField("fired")
    skipped_count = models.BigIntegerField("skipped")
    missed_count = models.BigIntegerField("missed ticks")
    failed_count = models.BigIntegerField("failed")
    problem = models.TextField()
    created_at = models.DateTimeField()
    changed_at = models.DateTimeField()

    class Meta(_View.Meta):
        db_table = '"tallybook"."schedules"'
