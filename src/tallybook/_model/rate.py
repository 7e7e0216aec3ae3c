"""Rate limits, concurrency limits and breakers: a rule as code and people write it, and the state of a key."""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Self

from tallybook._model.options import check_name, whole
from tallybook.errors import ConfigError

_MOST = 100_000


def _check_limit_name(option: str, name: str) -> None:
    check_name(option, name, 200)
    if name.rstrip(":") in ("queue", "task"):
        raise ConfigError(option, name, "not the name of a limit", hint="Write 'queue:NAME' or 'task:NAME'")


def _check_span(option: str, value: timedelta) -> None:
    if not timedelta(seconds=1) <= value <= timedelta(days=366):
        raise ConfigError(option, value, "must be from 1 s to 366 days")


@dataclass(frozen=True, slots=True)
class RateRule:
    """At most `calls` in any window of `per`, `burst` of them at once. Raises ConfigError for invalid values."""

    name: str
    calls: int
    per: timedelta
    burst: int = 1
    per_node: bool = False

    @property
    def size(self) -> int:
        """The number that several nodes divide."""
        return self.calls

    def part(self, at: int, of: int) -> Self:
        """Return the share of one of several nodes, the first at 0. Raises ConfigError if it cannot be divided."""
        if self.per_node or of == 1:
            return self
        calls = _part("rate limit", self.name, self.calls, at, of)
        return replace(self, calls=calls, burst=min(calls, max(1, self.burst // of)))

    def __post_init__(self) -> None:
        _check_limit_name("rate_limit", self.name)
        for option, value, most in (("calls", self.calls, _MOST), ("burst", self.burst, self.calls)):
            whole(option, value, 1, most)
        _check_span("per", self.per)


@dataclass(frozen=True, slots=True)
class ConcurrencyRule:
    """At most `most` running jobs. Raises ConfigError for invalid values."""

    name: str
    most: int
    per_node: bool = False
    skips: bool = False  # a job that finds no free permit is cancelled

    def __post_init__(self) -> None:
        _check_limit_name("concurrency_limit", self.name)
        whole("most", self.most, 1, 10_000)

    @property
    def size(self) -> int:
        """The number that several nodes divide."""
        return self.most

    def part(self, at: int, of: int) -> Self:
        """Return the share of one of several nodes, the first at 0. Raises ConfigError if it cannot be divided."""
        if self.per_node or of == 1:
            return self
        return replace(self, most=_part("concurrency limit", self.name, self.most, at, of))


def _part(kind: str, name: str, total: int, at: int, of: int) -> int:
    if total < of:
        hint = "Raise it, or route its jobs to one node by its key and declare it with per_node=True"
        raise ConfigError(f"{kind} {name!r}", total, f"cannot be divided among {of} nodes", hint=hint)
    return total // of + (at < total % of)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrencyInfo:
    """A used key of a concurrency limit, or an unused rule, as the view tallybook.concurrency shows it."""

    name: str
    """The key: `customer:42`."""
    rule: str | None
    """The rule of the key: `customer`. None: the rule does not exist any more."""
    most: int | None
    held: int = 0
    """The number of taken permits: by running jobs, and by the next ones."""
    waiting: int = 0
    """The number of jobs that wait for a permit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateInfo:
    """A rule, or a used key of it, as the view tallybook.rate shows it. Datetimes are aware, in UTC."""

    name: str
    """The key: `provider:acme`."""
    rule: str | None
    """The rule of the key: `provider`. None: the rule does not exist any more."""
    calls: int | None
    per: timedelta | None
    burst: int | None
    calls_ever: int = 0
    calls_in_window: int = 0
    waiting: int = 0
    """The number of scheduled jobs that wait for their turn."""
    last_call_at: datetime | None = None
    next_call_at: datetime | None = None
    """No call starts before this."""
    pushed_to: datetime | None = None
    """The end of a push-back that is still in force."""


@dataclass(frozen=True, slots=True)
class BreakerRule:
    """After `failures` within `per`, the jobs of a key wait for `open_for`. Raises ConfigError for invalid values."""

    name: str
    failures: int
    per: timedelta
    open_for: timedelta

    def __post_init__(self) -> None:
        _check_limit_name("breaker", self.name)
        whole("failures", self.failures, 1, 1000)
        _check_span("per", self.per)
        _check_span("open_for", self.open_for)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerInfo:
    """A rule, or a used key of it, as the view tallybook.breaker shows it. Datetimes are aware, in UTC."""

    name: str
    """The key: `provider:acme`."""
    rule: str
    """The rule of the key: `provider`."""
    failures: int
    per: timedelta
    open_for: timedelta
    state: str
    """closed: jobs start; open: they wait; half-open: one job runs as a probe."""
    failed_in_window: int = 0
    changed_at: datetime | None = None
    """The start of this state; None: the state has never changed."""
    open_until: datetime | None = None
    probe: int | None = None
    """The job that runs as a probe."""
    waiting: int = 0
    """The number of jobs that wait for it."""
