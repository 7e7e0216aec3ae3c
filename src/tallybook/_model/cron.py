"""The ticks of a schedule: a cron expression in a time zone, or an interval. Pure functions of instants in UTC.

    Cron("*/5 9-17 * * MON-FRI", "Europe/Berlin").after(datetime.now(UTC))   the first tick after an instant
    Every(timedelta(minutes=10))                                             ticks at multiples since 1970-01-01 UTC

The reference is cronsim's output when it is iterated without a pause, also across a change of the zone's offset. When
it is started in between, it can differ for up to a day after such a change, because it steps in local time from its
start. So a start in that time begins before the change; see `_restart`.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from functools import lru_cache
from itertools import islice, takewhile
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from cronsim import CronSim, CronSimError

from tallybook.errors import ConfigError, ExpressionError

NAMES = {
    "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *", "@monthly": "0 0 1 * *", "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@hourly": "0 * * * *",
}  # fmt: skip
SHORTEST, LONGEST = timedelta(seconds=1), timedelta(days=366)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIELDS = ("second", "minute", "hour", "day-of-month", "month", "day-of-week")
# Steps of cronsim can be off local time while it walks by hours: at most until the day after the change.
_ASKEW = timedelta(hours=26)
_BEFORE = timedelta(minutes=1)


class _Ticks:
    """The common base; subclasses need only `after`."""

    def after(self, instant: datetime) -> datetime | None:
        """Return the first tick after `instant`, or None."""
        raise NotImplementedError

    def following(self, tick: datetime) -> Iterator[datetime]:
        """Yield the ticks after `tick`, which is a tick itself, without end."""
        found = self.after(tick)
        while found is not None:
            yield found
            found = self.after(found)

    def until(self, tick: datetime, end: datetime) -> Iterator[datetime]:
        """Return the ticks after `tick`, which is a tick itself, up to `end`."""
        return takewhile(lambda found: found <= end, self.following(tick))

    def last(self, first: datetime, end: datetime) -> datetime:
        """Return the latest tick from `first`, a tick, up to `end`. Takes about 60 steps at most, at any distance."""
        low, high, step = first, end, timedelta(seconds=1)
        while (start := high - step) > low:  # backwards from the end, in growing steps
            found = self.after(start)
            if found is not None and found <= end:
                low = found
                break
            high, step = start, step * 2
        while high - low > timedelta(seconds=2):
            middle = low + (high - low) / 2
            found = self.after(middle)
            if found is None or found > end:
                high = middle
            else:
                low = found
        return max(self.until(low, end), default=low)

    def count(self, first: datetime, end: datetime, most: int) -> int:
        """Return the number of ticks from `first`, a tick, up to `end`, at most `most`."""
        return 1 + sum(1 for _ in islice(self.until(first, end), most - 1))


class Cron(_Ticks):
    """A cron expression in a zone. Raises ExpressionError, which names the wrong field, or ConfigError for the zone."""

    def __init__(self, expression: str, tz: str = "UTC", *, option: str = "cron") -> None:
        self.zone = zone(tz)
        self.expression = _checked(expression, option)

    def after(self, instant: datetime) -> datetime | None:
        """Return the first tick after `instant`, or None if there is none within 50 years."""
        return next((tick for tick in self._steps(self._restart(instant)) if tick > instant), None)

    def following(self, tick: datetime) -> Iterator[datetime]:
        """Yield the ticks after `tick`, a tick itself; from there cronsim continues as if it had not stopped."""
        for found in self._steps(tick):
            if found > tick:
                tick = found
                yield found

    def _steps(self, start: datetime) -> Iterator[datetime]:
        try:
            for found in CronSim(self.expression, start.astimezone(self.zone)):
                yield found.astimezone(UTC)
        except OverflowError:  # past the year 9999
            return

    def _restart(self, instant: datetime) -> datetime:
        """Return where to start: `instant`, or before a recent change of the offset if nothing has ticked since."""
        change = None if self.zone is UTC else _change(self.zone, instant)
        if change is None:
            return instant
        start = change - _BEFORE
        for tick in self._steps(start):
            if tick >= change:
                return instant if tick <= instant else start
        return instant


class Every(_Ticks):
    """An interval. Its ticks are multiples of its length since 1970-01-01 UTC, so a restart does not move them."""

    def __init__(self, every: timedelta, *, option: str = "every") -> None:
        if not SHORTEST <= every <= LONGEST:
            raise ConfigError(option, every, "must be from 1 s to 366 days")
        self.every = every

    def after(self, instant: datetime) -> datetime | None:
        try:
            return _EPOCH + ((instant - _EPOCH) // self.every + 1) * self.every
        except OverflowError:
            return None

    def count(self, first: datetime, end: datetime, most: int) -> int:
        return min(most, (end - first) // self.every + 1)


Rule = Cron | Every


@lru_cache(maxsize=20_000)
def rule(cron: str | None, every: timedelta | None, tz: str) -> Rule:
    """Return the rule of a schedule's columns. Raises ConfigError if they cannot be read."""
    if (cron is None) == (every is None):
        raise ConfigError("schedule", cron, "a schedule has a cron expression or an interval")
    return Every(every) if every is not None else Cron(cron or "", tz)


def zone(tz: object) -> tzinfo:
    """Return the IANA time zone of this name. Raises ConfigError for an unknown one."""
    if not isinstance(tz, str):
        raise ConfigError("tz", tz, "not the name of a time zone", hint="Write tz='Europe/Berlin'")
    if tz == "UTC":
        return UTC
    try:
        return ZoneInfo(tz)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        known = available_timezones()
        near = [name for name in known if name.lower().endswith(tz.lower().replace(" ", "_"))][:1] if tz else []
        hint = f"Did you mean {near[0]!r}?" if near else "Write a name of the IANA database, like 'Europe/Berlin'"
        if not known:
            hint = "This machine has no time zones: install the package tzdata"
        raise ConfigError("tz", tz, "an unknown time zone", hint=hint) from None


def _checked(expression: object, option: str) -> str:
    if not isinstance(expression, str):
        raise ExpressionError(option, expression, "not a cron expression", hint="Write '*/5 * * * *'")
    text = NAMES.get(expression.strip().lower(), expression.strip())
    if text.startswith("@"):
        raise ExpressionError(option, expression, "an unknown name", hint=f"Names: {', '.join(NAMES)}")
    parts = text.split()
    if len(text) > 200:
        raise ExpressionError(option, expression, "longer than 200 characters")
    if len(parts) not in (5, 6):
        reason = f"it has {len(parts)} fields; a cron expression has 5, or 6 with seconds first"
        raise ExpressionError(option, expression, reason, hint="Write '*/5 * * * *'; an interval is a timedelta")
    try:
        CronSim(text, _EPOCH)
    except (CronSimError, ValueError) as error:
        field = str(error).removeprefix("Bad ")
        if field not in _FIELDS:
            raise ExpressionError(option, expression, str(error)) from None
        part = parts[_FIELDS.index(field) - (len(parts) == 5)]
        hint = "Write * for any value" if "?" in part else None
        reason = f"{part!r} does not fit the field {field}"
        raise ExpressionError(option, expression, reason, field=field, hint=hint) from None
    return " ".join(parts)


def _change(tz: tzinfo, instant: datetime) -> datetime | None:
    """Return the latest change of the zone's offset in the last 26 hours, to the second, or None."""
    low, high = instant - _ASKEW, instant + timedelta(seconds=2)  # cronsim's first step crosses the next second, too
    now = high.astimezone(tz).utcoffset()
    if low.astimezone(tz).utcoffset() == now:
        return None
    while high - low > timedelta(seconds=1):
        middle = low + (high - low) / 2
        if middle.astimezone(tz).utcoffset() == now:
            high = middle
        else:
            low = middle
    return high.replace(microsecond=0)
