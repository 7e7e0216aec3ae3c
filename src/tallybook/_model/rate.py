"""Rate limits: a rule as code and people say it, and a key as it stands."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from tallybook._model.durations import parse_duration
from tallybook._model.options import check_name, whole
from tallybook.errors import ConfigError

_MOST = 100_000


def check_limit_name(option: str, name: str) -> None:
    """Refuse what no rule may be named. ConfigError."""
    check_name(option, name, 200)
    if name.rstrip(":") in ("queue", "task"):
        raise ConfigError(option, name, "no name of a limit", hint="Write 'queue:NAME' or 'task:NAME'")


@dataclass(frozen=True, slots=True)
class RateRule:
    """At most `calls` in any window of `per`, `burst` of them at once. ConfigError for what cannot be."""

    name: str
    calls: int
    per: timedelta
    burst: int = 1
    per_node: bool = False

    @classmethod
    def checked(
        cls, name: str, calls: int, per: timedelta | str, burst: int = 1, *, per_node: bool = False
    ) -> RateRule:
        """A rule with a duration in words, too."""
        return cls(name, calls, parse_duration(per, option="per"), burst, per_node)

    @property
    def size(self) -> int:
        """What several nodes divide."""
        return self.calls

    def part(self, at: int, of: int) -> RateRule:
        """The part of one of several nodes, the first of them at 0. ConfigError: it cannot be divided."""
        if self.per_node or of == 1:
            return self
        calls = _part("rate limit", self.name, self.calls, at, of)
        return replace(self, calls=calls, burst=min(calls, max(1, self.burst // of)))

    def __post_init__(self) -> None:
        check_limit_name("rate_limit", self.name)
        for option, value, most in (("calls", self.calls, _MOST), ("burst", self.burst, self.calls)):
            whole(option, value, 1, most)
        if not timedelta(seconds=1) <= self.per <= timedelta(days=366):
            raise ConfigError("per", self.per, "goes from 1 s to 366 days")


@dataclass(frozen=True, slots=True)
class ConcurrencyRule:
    """At most `most` at once. ConfigError for what cannot be."""

    name: str
    most: int
    per_node: bool = False
    skips: bool = False
    """A job that finds the permits taken is cancelled."""

    def __post_init__(self) -> None:
        check_limit_name("concurrency_limit", self.name)
        whole("most", self.most, 1, 10_000)

    @property
    def size(self) -> int:
        """What several nodes divide."""
        return self.most

    def part(self, at: int, of: int) -> ConcurrencyRule:
        """The part of one of several nodes, the first of them at 0. ConfigError: it cannot be divided."""
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
    """A key of a concurrency limit that is in use, or a rule that is not, as the view tallybook.concurrency shows it."""

    name: str
    """The key: `customer:42`."""
    rule: str | None
    """The rule that it has: `customer`. None: there is none any more."""
    most: int | None
    held: int = 0
    """How many permits are taken: by what runs, and by what is next."""
    waiting: int = 0
    """How many jobs wait for a permit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateInfo:
    """A rule, or one key of it that is in use, as the view tallybook.rate shows it. Instants are aware, in UTC."""

    name: str
    """The key: `provider:acme`."""
    rule: str | None
    """The rule that it has: `provider`. None: there is none any more."""
    calls: int | None
    per: timedelta | None
    burst: int | None
    calls_ever: int = 0
    calls_in_window: int = 0
    waiting: int = 0
    """How many jobs stand in scheduled until their turn comes."""
    last_call_at: datetime | None = None
    next_call_at: datetime | None = None
    """No call starts before."""
    pushed_to: datetime | None = None
    """Until when it was pushed back, where that is not over."""
