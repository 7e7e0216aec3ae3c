"""What a handler may return, or raise, to end its attempt in another way than completed or failed.

    return Snooze(timedelta(minutes=1))      again later; this is no failure
    raise Cancel("the order is gone")        nothing left to do; ends as cancelled
    raise Dead("account closed for good")    no other attempt can help; ends among the dead letters

They are exceptions, so that a helper deep in a handler can raise what the handler itself would return, and they are
compared, hashed and printed by value. They are not frozen dataclasses: `contextlib` assigns `__traceback__` to an
exception that passes a `with` block, which a frozen class refuses. They derive from Exception, as a handler's own
errors do, so a handler's `except Exception` takes them too: return them where that is in the way.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from tallybook.errors import ConfigError


class Outcome(Exception):
    """The common class, for `except Outcome` and `isinstance`; use one of the three below."""

    __match_args__: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Outcome) and self.args == other.args

    def __hash__(self) -> int:
        return hash((type(self), self.args))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.args))})"


class Snooze(Outcome):
    """Run the job again after `delay`, or at the instant `until`; attempts grows, failures does not.

    Exactly one of the two. ConfigError for a negative delay, a naive datetime or a bare number.
    """

    __match_args__ = ("delay", "until")

    def __init__(self, delay: timedelta | None = None, until: datetime | None = None) -> None:
        if (delay is None) == (until is None):
            raise ConfigError("Snooze", delay, "takes either a delay or until")
        if delay is not None and not isinstance(delay, timedelta):
            raise ConfigError("Snooze.delay", delay, "not a timedelta", hint="Write Snooze(timedelta(minutes=1))")
        if delay is not None and delay < timedelta(0):
            raise ConfigError("Snooze.delay", delay, "a delay cannot be negative")
        if until is not None and (not isinstance(until, datetime) or until.utcoffset() is None):
            raise ConfigError("Snooze.until", until, "not an aware datetime", hint="Write datetime.now(UTC) + ...")
        super().__init__(delay, until)

    @property
    def delay(self) -> timedelta | None:
        """How long from the end of this attempt, or None where `until` was given."""
        delay: timedelta | None = self.args[0]
        return delay

    @property
    def until(self) -> datetime | None:
        """The instant, aware, or None where a delay was given."""
        until: datetime | None = self.args[1]
        return until

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
        """Why, in words for people; kept in the job's history. Empty where none was given."""
        return str(self.args[0])


class Cancel(_WithReason):
    """End the job as cancelled: there is nothing left to do. It is not retried, and not counted as a failure."""


class Dead(_WithReason):
    """End the job as dead, whatever attempts are left: another one cannot help, a person should look."""
