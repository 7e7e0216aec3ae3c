"""Names from other queues, for errors that give ours."""

METHODS = dict.fromkeys(
    ("delay", "apply_async", "defer", "defer_async", "send", "kiq", "enqueue_async", "perform_async", "si", "s"),
    "enqueue(conn, ...), or .enqueue_sync(conn, ...) without an event loop",
) | {"apply": "(...): a task is called as the function that it is", "configure": "with_(...)", "signature": "job(...)"}
"""Methods of other queues' tasks, and what to write instead."""

OF_APP = frozenset(("enqueue", "enqueue_sync", "send_task", "delay", "defer", "add_job", "enqueue_job", "queue"))
"""Names under which the apps of other queues enqueue; here a task does that."""

OPTIONS = {
    "countdown": "delay", "schedule_in": "delay", "defer_by": "delay", "eta": "run_at", "schedule_at": "run_at",
    "scheduled_at": "run_at", "at": "run_at", "expires": "expires_at", "expires_in": "expires_at", "lock": "order_key",
    "queueing_lock": "unique", "unique_key": "unique", "dedupe_key": "unique", "max_retries": "max_attempts",
    "retries": "max_attempts", "queue_name": "queue",
}  # fmt: skip
"""Options of other queues, and ours."""


def as_option(name: str) -> str | None:
    """Return what to write for an option of another queue, or None for an unknown name."""
    ours = OPTIONS.get(name)
    return None if ours is None else f"Pass options of a job by with_: with_({ours}=...)"
