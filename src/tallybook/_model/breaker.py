"""Circuit breakers: a rule as code and people write it, and the state of a key."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from tallybook._model.durations import parse_duration
from tallybook._model.options import whole
from tallybook._model.rate import check_limit_name
from tallybook.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BreakerRule:
    """After `failures` within `per`, the jobs of a key wait for `open_for`. Raises ConfigError for invalid values."""

    name: str
    failures: int
    per: timedelta
    open_for: timedelta

    @classmethod
    def checked(cls, name: str, failures: int, per: timedelta | str, open_for: timedelta | str) -> BreakerRule:
        """Return a rule; durations may be text."""
        return cls(name, failures, parse_duration(per, option="per"), parse_duration(open_for, option="open_for"))

    def __post_init__(self) -> None:
        check_limit_name("breaker", self.name)
        whole("failures", self.failures, 1, 1000)
        for option, value in (("per", self.per), ("open_for", self.open_for)):
            if not timedelta(seconds=1) <= value <= timedelta(days=366):
                raise ConfigError(option, value, "must be from 1 s to 366 days")


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
