"""Values that a handler may return or raise to end its attempt, or its iteration of a subject.

See https://github.com/tallybook/tallybook/blob/main/docs/subjects.md for those of subjects. Their `args=` sets the
subject's args, by name, for its next iteration (or to be kept). They are checked against the task's signature and
stored as args of its version. An ordinary job may also end with Complete, Kill or Reject; it is dead, with NotASubject,
after Reschedule, Drop or `args=`.

They are exceptions, so that a helper deep in a handler can raise what the handler would return. They are compared,
hashed and printed by value. They are not frozen dataclasses, because `contextlib` assigns `__traceback__` to an
exception that passes a `with` block, and a frozen class refuses that. They derive from Exception, as a handler's own
errors do, so a handler's `except Exception` also catches them: return them in such places.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from tallybook._model.durations import parse_duration
from tallybook._model.options import check_text
from tallybook.errors import ConfigError

_LONGEST = timedelta(days=36_500)  # 'For ever' has to be an instant that PostgreSQL can store


class Outcome(Exception):
    """The common base, for `except Outcome` and `isinstance`; use one of the classes below."""

    __match_args__: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Outcome) and self.args == other.args

    def __hash__(self) -> int:
        return hash((type(self), self.args))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.args))})"


class Snooze(Outcome):
    """Run the job again after `delay`, or at the instant `until`. This counts as an attempt, not as a failure.

    Pass exactly one of the two; a delay is a timedelta, or text like "5 min". Raises ConfigError for a negative delay,
    a naive datetime or a bare number.
    """

    __match_args__ = ("delay", "until")

    def __init__(self, delay: timedelta | str | None = None, until: datetime | None = None) -> None:
        if (delay is None) == (until is None):
            raise ConfigError("Snooze", delay, "takes either a delay or until")
        if delay is not None:
            delay = parse_duration(delay, option="Snooze.delay")
        if until is not None and (not isinstance(until, datetime) or until.utcoffset() is None):
            raise ConfigError("Snooze.until", until, "not an aware datetime", hint="Write datetime.now(UTC) + ...")
        super().__init__(delay, until)

    @property
    def delay(self) -> timedelta | None:
        """The delay from the end of this attempt, or None if `until` is set."""
        return cast("timedelta | None", self.args[0])

    @property
    def until(self) -> datetime | None:
        """The instant, aware, or None if a delay is set."""
        return cast("datetime | None", self.args[1])

    def __repr__(self) -> str:
        return f"Snooze({self.delay!r})" if self.until is None else f"Snooze(until={self.until!r})"

    def __str__(self) -> str:
        return repr(self)


class _WithReason(Outcome):
    __match_args__ = ("reason",)

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)

    @property
    def reason(self) -> str:
        """The reason for people; stored in the job's history. Empty by default."""
        return str(self.args[0])


class Cancel(_WithReason):
    """End the job as cancelled: there is nothing left to do. It is not retried, and this is not a failure."""


class Dead(_WithReason):
    """End the job as dead, even if attempts are left: another one cannot help, so a person has to decide."""


class SubjectOutcome(Outcome):
    """The common base of outcomes that end an iteration of a subject."""

    @property
    def new_args(self) -> dict[str, Any] | None:
        """The subject's new args by name; None: unchanged."""
        return dict(zip(self.__match_args__, self.args, strict=False)).get("new_args")

    def __hash__(self) -> int:  # args and details cannot be hashed
        return hash((type(self), tuple(value for value in self.args if isinstance(value, str | timedelta | datetime))))

    def __reduce__(self) -> tuple[object, ...]:  # BaseException would call the class with all args by position
        return type(self).__new__, (type(self), *self.args)

    def __repr__(self) -> str:
        shown = [repr(getattr(self, name)) for name in self.__match_args__ if name != "new_args"]
        shown += [] if self.new_args is None else [f"args={self.new_args!r}"]
        return f"{type(self).__name__}({', '.join(shown)})"

    def __str__(self) -> str:
        return repr(self)


class Reschedule(SubjectOutcome):
    """Iterate again at `when`: an aware datetime, or from now a timedelta, or text like "+1 week".

    A past instant means now. Raises ConfigError for a naive datetime, a negative duration, a bare number, and a month
    or a year, whose length depends on its start: pass the datetime instead.
    """

    __match_args__ = ("when", "new_args")

    def __init__(self, when: timedelta | datetime | str, *, args: Mapping[str, Any] | None = None) -> None:
        if isinstance(when, datetime):
            if when.utcoffset() is None:
                hint = "Write datetime.now(UTC) + ..."
                raise ConfigError("Reschedule.when", when, "not an aware datetime", hint=hint)
        else:
            text = when.strip().removeprefix("+") if isinstance(when, str) else when
            when = parse_duration(text, option="Reschedule.when")
        super().__init__(when, _checked(args, "Reschedule"))

    @property
    def when(self) -> timedelta | datetime:
        """The instant, or the delay from the end of this iteration."""
        return cast("timedelta | datetime", self.args[0])

    @property
    def run_at(self) -> datetime | None:
        """The instant in UTC, or None if a duration was passed."""
        if not isinstance(self.when, datetime):
            return None
        try:
            return self.when.astimezone(UTC)
        except OverflowError:
            return datetime.max.replace(tzinfo=UTC)

    @property
    def run_in(self) -> timedelta | None:
        """The duration, at most a hundred years, or None if an instant was passed."""
        return min(self.when, _LONGEST) if isinstance(self.when, timedelta) else None

    @property
    def delay(self) -> timedelta:
        """The delay from now, by this machine's clock."""
        run_at = self.run_at
        return self.run_in or timedelta(0) if run_at is None else max(timedelta(0), run_at - datetime.now(UTC))


class Complete(SubjectOutcome):
    """Done: no further iteration, and the name is kept. A handler that returns None has the same effect."""

    __match_args__ = ("new_args",)

    def __init__(self, *, args: Mapping[str, Any] | None = None) -> None:
        super().__init__(_checked(args, "Complete"))


class Drop(SubjectOutcome):
    """Done and forgotten: the next push of the name creates a new subject."""

    def __init__(self) -> None:
        super().__init__()


class Kill(SubjectOutcome):
    """Give the subject up, even if attempts are left: a dead letter with the reason `killed`, for people to check."""

    __match_args__ = ("reason", "new_args")

    def __init__(self, reason: str = "", *, args: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason, _checked(args, "Kill"))

    @property
    def reason(self) -> str:
        """The reason, for people."""
        return str(self.args[0])


class Reject(SubjectOutcome):
    """This iteration failed: `message` for people, `details` any JSON value, `ref_id` a reference of yours (200 bytes).

    All of it is in the view tallybook.error. The next attempt starts after `retry_in` (a timedelta, or text like "5
    min"), by default after the delay of the task's retry policy. After max_attempts consecutive failures the subject is
    dead.
    """

    __match_args__ = ("message", "details", "ref_id", "retry_in")

    def __init__(
        self,
        message: str,
        details: object = None,
        *,
        ref_id: str | None = None,
        retry_in: timedelta | str | None = None,
    ) -> None:
        if ref_id is not None:
            check_text("Reject.ref_id", ref_id, 200, "it ")
        delay = None if retry_in is None else parse_duration(retry_in, option="Reject.retry_in")
        super().__init__(message, details, ref_id, delay)

    @property
    def message(self) -> str:
        """The error message."""
        return str(self.args[0])

    @property
    def details(self) -> Any:
        """Further details."""
        return self.args[1]

    @property
    def ref_id(self) -> str | None:
        """Your reference to it elsewhere, such as a request or a process."""
        return cast("str | None", self.args[2])

    @property
    def retry_in(self) -> timedelta | None:
        """The delay before the next attempt; None: the retry policy decides."""
        return None if self.args[3] is None else min(self.args[3], _LONGEST)

    def __repr__(self) -> str:
        named = {"details": self.details, "ref_id": self.ref_id, "retry_in": self.retry_in}
        more = [f"{name}={value!r}" for name, value in named.items() if value is not None]
        return f"Reject({', '.join([repr(self.message), *more])})"


def _checked(args: object, outcome: str) -> dict[str, Any] | None:
    if args is None:
        return None
    if not isinstance(args, Mapping) or not all(isinstance(name, str) for name in args):
        hint = f'Write {outcome}(..., args={{**ctx.args, "page": 4}})'
        raise ConfigError(f"{outcome}.args", args, "not a mapping of argument names to values", hint=hint)
    return dict(args)
