"""Values that a handler may return or raise to end its attempt neither completed nor failed.

    return Snooze(timedelta(minutes=1))      run again later; this is not a failure
    raise Cancel("the order is gone")        nothing left to do; ends as cancelled
    raise Dead("account closed for good")    another attempt cannot help; becomes a dead letter

They are exceptions, so that a helper deep in a handler can raise what the handler would return. They are compared,
hashed and printed by value. They are not frozen dataclasses, because `contextlib` assigns `__traceback__` to an
exception that passes a `with` block, and a frozen class refuses that. They derive from Exception, as a handler's own
errors do, so a handler's `except Exception` also catches them: return them in such places.
"""

from datetime import datetime, timedelta
from typing import cast

from tallybook._model.durations import parse_duration
from tallybook.errors import ConfigError


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
