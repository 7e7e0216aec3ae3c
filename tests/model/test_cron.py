"""Ticks: as cronsim gives them in one uninterrupted iteration, from any start; intervals; unreadable expressions."""

import random
from bisect import bisect_right
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import islice, pairwise, takewhile
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim

from tallybook._model.cron import Cron, Every, rule, zone
from tallybook.errors import ConfigError, ExpressionError

BERLIN_SPRING = datetime(2026, 3, 29, 1, tzinfo=UTC)
BERLIN_AUTUMN = datetime(2026, 10, 25, 1, tzinfo=UTC)
# Zones with odd changes: by half an hour, at midnight, in the southern hemisphere, by two hours.
CHANGES = [
    ("Europe/Berlin", BERLIN_SPRING),
    ("Europe/Berlin", BERLIN_AUTUMN),
    ("Australia/Lord_Howe", datetime(2026, 4, 4, 15, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2026, 10, 3, 15, 30, tzinfo=UTC)),
    ("Africa/Cairo", datetime(2026, 4, 23, 22, tzinfo=UTC)),
    ("America/Santiago", datetime(2026, 9, 6, 4, tzinfo=UTC)),
    ("Antarctica/Troll", datetime(2026, 10, 25, 1, tzinfo=UTC)),
]
EXPRESSIONS = [
    "30 2 * * *", "*/30 * * * *", "45 * * * *", "15,45 1-3 * * *", "0,20,40 2,3 * * *", "0 0 * * *", "5 0 * * SUN",
    "*/30 */2 * * *", "*/7 2 * * *", "0 0 0 * * FRI", "0 0 0 * * *", "0 15 23 * * *", "0 30 1 * * *", "0 46 * * * *",
    "30 */20 1,2 * * *",
]  # fmt: skip


def by_cronsim(expression: str, tz: str, start: datetime, end: datetime) -> list[datetime]:
    """The ticks of one uninterrupted cronsim iteration; ticks at the same instant count once."""
    ticks = (tick.astimezone(UTC) for tick in CronSim(expression, start.astimezone(ZoneInfo(tz))))
    return list(dict.fromkeys(takewhile(lambda tick: tick <= end, ticks)))


@pytest.mark.parametrize(
    ("expression", "start", "expected"),
    [
        ("30 2 * * *", BERLIN_SPRING, ["29 03:00+0200", "30 02:30+0200"]),
        ("30 2 * * *", BERLIN_AUTUMN, ["25 02:30+0200", "26 02:30+0100"]),
        ("0 30 2 * * *", BERLIN_SPRING, ["30 02:30+0200", "31 02:30+0200"]),
        ("0 30 2 * * *", BERLIN_AUTUMN, ["25 02:30+0200", "25 02:30+0100"]),
        ("*/30 * * * *", BERLIN_SPRING, ["29 01:00+0100", "29 01:30+0100", "29 03:00+0200"]),
        ("*/30 * * * *", BERLIN_AUTUMN, ["25 02:00+0200", "25 02:30+0200", "25 02:00+0100", "25 02:30+0100"]),
    ],
)
def test_the_changes_of_berlin(expression: str, start: datetime, expected: list[str]) -> None:
    """Five fields at a fixed time fire once in the gap and once in the fold; others skip the gap, double the fold."""

    def local(tick: datetime, tz: str) -> str:
        return tick.astimezone(ZoneInfo(tz)).strftime("%d %H:%M%z")

    cron = Cron(expression, "Europe/Berlin")
    first = cron.after(start - timedelta(hours=1, seconds=1))
    assert first is not None
    found = [first, *islice(cron.following(first), len(expected) - 1)]
    assert [local(tick, "Europe/Berlin") for tick in found] == expected


def disagreements(after: Callable[[Cron, datetime], datetime | None], changes: list[tuple[str, datetime]]) -> list[str]:
    """Instants around a change at which `after` disagrees with the uninterrupted iteration."""
    luck = random.Random(4)
    found = []
    for tz, change in changes:
        around = [-3601, -3600, -61, -60, -2, -1, -0.5, 0, 1, 59, 60, 1799, 1800, 1801, 3599, 3600, 3601, 7200]
        around += [luck.uniform(-7300, 7300) for _ in range(6)] + [luck.uniform(-100_000, 100_000) for _ in range(6)]
        for expression in EXPRESSIONS:
            cron = Cron(expression, tz)
            ticks = by_cronsim(expression, tz, change - timedelta(days=8), change + timedelta(days=8))
            for seconds in around:
                at = change + timedelta(seconds=seconds)
                if after(cron, at) != ticks[bisect_right(ticks, at)]:
                    found.append(f"{tz} {expression} {at}")
    return found


@pytest.mark.slow
def test_wherever_one_begins_the_ticks_are_those_of_an_uninterrupted_iteration() -> None:
    """From any instant near an offset change, even in a fold, the next tick is that of the uninterrupted iteration."""
    assert disagreements(Cron.after, CHANGES) == []


def test_control_cronsim_started_in_the_middle_disagrees() -> None:
    """Negative control: cronsim started at the instant itself gives other ticks around such a change."""

    def naive(cron: Cron, at: datetime) -> datetime | None:
        return next(CronSim(cron.expression, at.astimezone(cron.zone))).astimezone(UTC)

    assert len(disagreements(naive, CHANGES[2:3])) > 20


@pytest.mark.parametrize(("tz", "change"), CHANGES, ids=[f"{tz} {at:%m}" for tz, at in CHANGES])
def test_from_tick_to_tick(tz: str, change: datetime) -> None:
    """The tick after a recorded one is the iteration's next tick."""
    for expression in EXPRESSIONS:
        ticks = by_cronsim(expression, tz, change - timedelta(days=2), change + timedelta(days=2))
        cron = Cron(expression, tz)
        for tick, following in pairwise(ticks):
            assert next(cron.following(tick)) == following, (expression, tick)


def test_seconds_and_names() -> None:
    """Six fields put seconds first; month and day names, L, # and @ names are read, in any case and spacing."""
    start = datetime(2026, 1, 1, tzinfo=UTC)
    said = {
        "*/20 * * * * *": "2026-01-01 00:00:20",
        "0 9 * feb MON": "2026-02-02 09:00:00",
        "0 0 L * *": "2026-01-31 00:00:00",
        "0 9 * * MON#2": "2026-01-12 09:00:00",
        "0 0 * * 5L": "2026-01-30 00:00:00",
        "@daily": "2026-01-02 00:00:00",
        " @Hourly ": "2026-01-01 01:00:00",
        "@weekly": "2026-01-04 00:00:00",
        "@monthly": "2026-02-01 00:00:00",
        "@yearly": "2027-01-01 00:00:00",
        "  0   0 29   2 *": "2028-02-29 00:00:00",
    }
    for expression, expected in said.items():
        assert str(Cron(expression).after(start))[:19] == expected, expression


@pytest.mark.parametrize(
    ("expression", "field", "words"),
    [
        ("61 * * * *", "minute", "'61' does not fit the field minute"),
        ("* 24 * * *", "hour", "'24' does not fit the field hour"),
        ("* * * * 8-9", "day-of-week", "'8-9'"),
        ("*/0 * * * *", "minute", "'*/0'"),
        ("60 * * * * *", "second", "'60' does not fit the field second"),
        ("0 0 30 2 *", "day-of-month", "'30'"),
        ("0 0 ? * MON", "day-of-month", r"Write \* for any value"),
        ("* * *", None, "it has 3 fields"),
        ("5 min", None, "an interval is a timedelta"),
        ("", None, "it has 0 fields"),
        ("@reboot", None, "Names: @yearly"),
        ("9" * 5000 + " * * * *", None, "longer than 200"),
        (5, None, "not a cron expression"),
    ],
)
def test_what_cannot_be_read_names_the_field(expression: Any, field: str | None, words: str) -> None:
    """An unreadable expression raises ExpressionError with the field, the text found and what to write."""
    with pytest.raises(ExpressionError, match=words.replace("*/0", r"\*/0")) as error:
        Cron(expression)
    assert error.value.field == field
    assert isinstance(error.value, ConfigError)


def test_an_impossible_date_ends_the_search() -> None:
    """A date that never comes has no next tick, and the search ends."""
    assert Cron("0 0 */31 * FRI#2").after(BERLIN_SPRING) is None


@pytest.mark.parametrize(
    ("tz", "words"),
    [
        ("Europe/Atlantis", "an unknown time zone"),
        ("berlin", "Europe/Berlin"),
        ("../etc/passwd", "unknown"),
        ("", "unknown"),
    ],
)
def test_an_unknown_zone_is_a_clear_error(tz: str, words: str) -> None:
    """An unknown zone or a path raises ConfigError; a near miss gets a suggestion."""
    with pytest.raises(ConfigError, match=words):
        zone(tz)


def test_intervals_tick_at_multiples() -> None:
    """An interval of 1 s to 366 days ticks at multiples of its length since 1970 in UTC, so no restart moves it."""
    at = datetime(2026, 3, 29, 10, 3, 7, 500, tzinfo=UTC)
    assert Every(timedelta(minutes=5)).after(at) == datetime(2026, 3, 29, 10, 5, tzinfo=UTC)
    assert Every(timedelta(minutes=5)).after(datetime(2026, 3, 29, 10, 5, tzinfo=UTC)) == datetime(
        2026, 3, 29, 10, 10, tzinfo=UTC
    )
    assert Every(timedelta(days=7)).after(at) == datetime(2026, 4, 2, tzinfo=UTC)
    for bad in (timedelta(0), timedelta(milliseconds=999), timedelta(days=367)):
        with pytest.raises(ConfigError, match="1 s to 366 days"):
            Every(bad)


@pytest.mark.parametrize(
    ("cron", "every"),
    [
        ("* * * * * *", None),
        ("0 4 * * *", None),
        ("0 0 29 2 *", None),
        ("*/5 3 * * MON", None),
        (None, timedelta(seconds=7)),
    ],
)
def test_the_last_tick_before_an_instant(
    cron: str | None, every: timedelta | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest tick up to an instant is correct and takes under 120 steps to find, however many ticks precede it."""
    ticks = rule(cron, every, "Europe/Berlin" if cron else "UTC")
    first = ticks.after(datetime(2024, 1, 1, tzinfo=UTC))
    assert first is not None
    steps: list[datetime] = []
    plain: Any = type(ticks).after
    monkeypatch.setattr(type(ticks), "after", lambda self, at: (steps.append(at), plain(self, at))[1])
    for end in (
        first,
        first + timedelta(seconds=1),
        datetime(2025, 6, 1, 3, 2, 1, 5, tzinfo=UTC),
        BERLIN_AUTUMN + timedelta(seconds=1),
    ):
        steps.clear()
        last = ticks.last(first, end)
        assert len(steps) < 120
        following = plain(ticks, last)
        assert last <= end and (following is None or following > end)
