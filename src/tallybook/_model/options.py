"""The options of one job, checked once and shared by all jobs made with them."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Self, cast

from tallybook._model.backoff import Backoff, as_policy, to_json
from tallybook._model.durations import parse_duration
from tallybook.errors import ConfigError

Unique = str | bool | tuple[str, ...]  # a key; or True: from all args; or the names of the args to derive it from

ON_CONFLICT = ("skip", "raise", "replace_args", "raise_priority", "push_run_at")
"""The effect of an enqueue on the live job that has its unique key."""

_INVISIBLE = re.compile(
    r"[\u0001-\u001f\u007f-\u009f\u00ad\u034f\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u115f\u1160\u17b4"
    r"\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\U000110bd\U000110cd"
    r"\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
    r"|^[\u0020\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]|[\u0020\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]$"
)
"""Characters that no name may contain. `sql/checks/_check_name.sql` has the same list."""

_LONGEST_DELAY = timedelta(days=366_000)  # about a thousand years; an interval holds less than a timedelta


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a job: its queue, its time, and so on. Raises ConfigError, which names the option."""

    queue: str = "default"
    priority: int = 2
    unique: Unique | None = None
    run_at: datetime | None = None
    delay: timedelta | None = None
    max_attempts: int | None = None
    headers: str | None = None  # as JSON text
    on_conflict: str = "skip"
    unique_while: str = "running"
    order_key: str | None = None
    expires_at: datetime | None = None
    retry: str | Backoff | None = None  # the name of a policy, or a policy that a row can store
    version: int = 1  # the version of the task's args
    after: tuple[Any, ...] = ()  # the jobs that it waits for: ids, and descriptions of jobs of the same call
    on_parent: str | None = None  # completed or any; None: completed, but any for a follow-up
    limits: tuple[str, ...] = ()  # keys of limits; `{name}` is replaced by an arg when the job is described
    fair_key: str | None = None  # its jobs alternate with those of other keys in the queue; `{name}` as in limits

    def __post_init__(self) -> None:
        check_name("queue", self.queue, 64)
        check_number("priority", self.priority, 0, hint="0 runs first, 2 is the default")
        if self.max_attempts is not None:
            check_number("max_attempts", self.max_attempts, 1)
        if isinstance(self.retry, str):
            check_name("retry", self.retry, 64)
        elif self.retry is not None:
            to_json(as_policy(self.retry))
        if isinstance(self.unique, list):
            object.__setattr__(self, "unique", tuple(self.unique))
        _check_unique(self.unique)
        if self.on_conflict not in ON_CONFLICT:
            raise ConfigError("on_conflict", self.on_conflict, f"must be one of {', '.join(ON_CONFLICT)}")
        if self.unique_while not in ("running", "queued"):
            raise ConfigError("unique_while", self.unique_while, "must be running or queued")
        if self.unique in (None, False) and (self.on_conflict != "skip" or self.unique_while != "running"):
            option = "on_conflict" if self.on_conflict != "skip" else "unique_while"
            raise ConfigError(option, getattr(self, option), "there is no unique key", hint="Pass unique=... as well")
        if self.on_conflict == "push_run_at" and self.run_at is None and self.delay is None:
            hint = "Pass the delay or run_at to which the job is pushed"
            raise ConfigError("on_conflict", self.on_conflict, "there is no time to push it to", hint=hint)
        if self.on_parent not in (None, "completed", "any"):
            raise ConfigError("on_parent", self.on_parent, "must be completed or any")
        if self.order_key is not None:
            check_text("order_key", self.order_key, 512)
        if self.limits:
            check_limits(self.limits)
        _check_fair(self.fair_key, self.order_key)

    def replaced(self, given: Mapping[str, Any]) -> Self:
        """Return a copy updated with the non-None values of `given`. `delay` may be text; it excludes `run_at`."""
        given = {name: value for name, value in given.items() if value is not None}
        if "run_at" in given:
            check_instant("run_at", given["run_at"])
            if "delay" in given:
                raise ConfigError("delay", given["delay"], "run_at is also set", hint="Pass one of them")
        if "expires_at" in given:
            check_instant("expires_at", given["expires_at"])
        if "delay" in given:
            given["delay"] = parse_duration(given["delay"], option="delay")
            if given["delay"] > _LONGEST_DELAY:
                raise ConfigError("delay", given["delay"], "longer than a thousand years")
        return replace(self, **given)

    @property
    def options_text(self) -> str | None:
        """The rarely used options, as JSON text of one object; None if the job has none of them."""
        said: dict[str, object] = {}
        if self.retry is not None:
            said["retry"] = self.retry if isinstance(self.retry, str) else to_json(self.retry)
        if self.version != 1:
            said["version"] = self.version
        if self.limits:
            said["limits"] = list(self.limits)
        if self.fair_key is not None:
            said["fair_key"] = self.fair_key
        return json.dumps(said) if said else None


def _check_fair(fair_key: str | None, order_key: str | None) -> None:
    if fair_key is None:
        return
    check_name("fair_key", fair_key, 200)
    if order_key is not None:
        hint = "An order key already sets their order; for one job at a time, add a concurrency limit of 1"
        raise ConfigError("fair_key", fair_key, "cannot be combined with an order key", hint=hint)


def check_limits(limits: object) -> None:
    """Raise ConfigError unless these are up to 8 different keys of limits."""
    if not isinstance(limits, tuple):
        raise ConfigError("limits", limits, "not a tuple of names", hint='Write limits=("provider:acme",)')
    for name in limits:
        check_name("limits", name, 200)
        if name.startswith(("queue:", "task:")):
            hint = "The limit of a queue or a task applies without being named"
            raise ConfigError("limits", name, "is the limit of a queue or a task", hint=hint)
    if len(limits) > 8 or len(set(limits)) < len(limits):
        raise ConfigError("limits", limits, "must be up to 8 different names")


def check_name(option: str, name: object, max_bytes: int) -> None:
    """Raise ConfigError unless the server accepts the name: no invisible characters, no space at its ends."""
    if _INVISIBLE.search(check_text(option, name, max_bytes, "")):
        raise ConfigError(option, name, "has control or invisible characters, or space at its ends")


def check_arguments(option: str, value: object, task: str, names: Iterable[str], arguments: Collection[str]) -> None:
    """Raise ConfigError, which shows `value`, for a name that is not an argument of the task."""
    for name in names:
        if name not in arguments:
            known = ", ".join(sorted(arguments)) or "none"
            raise ConfigError(option, value, f"task {task!r} has no argument {name!r}", hint=f"It has {known}")


def text_problem(text: str) -> str | None:
    """Return the reason why PostgreSQL cannot store `text`, or None."""
    if "\0" in text:
        return "contains a NUL character, which PostgreSQL cannot store"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "contains a lone surrogate, which is not a character"
    return None


def check_number(option: str, value: object, least: int, most: int = 32_767, hint: str | None = None) -> None:
    """Raise ConfigError unless this is a whole number within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(option, value, "not a whole number")
    if not least <= value <= most:
        raise ConfigError(option, value, f"must be from {least} to {most}", hint=hint)


def whole(option: str, value: int, least: int, most: int) -> int:
    """Return a whole number. Raises ConfigError for another value or one out of bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(option, value, f"must be a whole number from {least} to {most}")
    return value


def check_instant(option: str, value: object, hint: str = "Write datetime.now(UTC) + ...") -> None:
    """Raise ConfigError unless the value is an aware datetime."""
    if not isinstance(value, datetime) or value.utcoffset() is None:
        raise ConfigError(option, value, "not an aware datetime", hint=hint)
    try:
        value.astimezone(UTC)
    except OverflowError:
        raise ConfigError(option, value, "out of range in UTC") from None


def check_text(option: str, text: object, most: int, what: str = "a key ", hint: str | None = None) -> str:
    """Return a text of 1 to `most` bytes that PostgreSQL can store. Raises ConfigError for any other value."""
    if not isinstance(text, str):
        raise ConfigError(option, text, "not a text", hint=hint)
    if problem := text_problem(text):
        raise ConfigError(option, text, problem)
    if not 1 <= len(text.encode()) <= most:
        raise ConfigError(option, text, f"{what}must have 1 to {most} bytes, but has {len(text.encode())}")
    return text


def _check_unique(unique: object) -> None:
    if unique is None or isinstance(unique, bool):
        return
    if isinstance(unique, str):
        check_text("unique", unique, 512)
        return
    if not isinstance(unique, tuple) or not all(isinstance(name, str) for name in cast("tuple[object, ...]", unique)):
        hint = "Write unique=('user_id',), or True for all args"
        raise ConfigError("unique", unique, "not a key, True or a tuple of argument names", hint=hint)


def checked_links(links: Mapping[str, object]) -> dict[str, str]:
    """Return the links of a job in the form for headers, with keys as text. Raises ConfigError for invalid links."""
    if not isinstance(links, Mapping) or not links:
        raise ConfigError("links", links, "not a mapping of kinds and keys", hint="Write links={'submission': 42}")
    if len(links) > 10:
        raise ConfigError("links", sorted(map(str, links)), f"a job has at most 10 links, not {len(links)}")
    found = {}
    for kind, key in links.items():
        if not isinstance(kind, str) or not re.fullmatch("[a-z0-9_]{1,50}", kind):
            raise ConfigError("links", kind, "a kind must be 1 to 50 of a to z, 0 to 9 and _")
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise ConfigError("links", key, f"the key of {kind!r} is neither text nor a whole number")
        text = str(key)
        if problem := text_problem(text):
            raise ConfigError("links", key, f"the key of {kind!r} {problem}")
        if not 1 <= len(text.encode()) <= 200:
            raise ConfigError("links", text[:100], f"the key of {kind!r} must have 1 to 200 bytes")
        found[kind] = text
    return found


# Names from other queues, for errors that give ours.
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
