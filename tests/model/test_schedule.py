"""A worker's plan for a due schedule: the ticks to fire, the ticks to count as missed, and the next tick."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tallybook import App
from tallybook._model.cron import rule
from tallybook._model.schedule import Plan, Timing, described, due, plan
from tallybook._task.catalogue import check_tasks
from tallybook.errors import ConfigError, ExpressionError

NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
NONE = timedelta(0)


def planned(
    at: datetime, *, cron: str = "* * * * *", missed: str = "once", catch_up: int = 100, jitter: timedelta = NONE
) -> Plan:
    """The plan for a schedule whose next tick is at noon."""
    return plan("s", rule(cron, None, "UTC"), NOON, at, jitter=jitter, missed=missed, catch_up=catch_up)


def test_a_tick_in_time_is_fired() -> None:
    """S2-04: a tick is fired up to 60 s after its time, whatever the policy; the next tick is the one after it."""
    for missed in ("once", "skip", "all"):
        assert planned(NOON, missed=missed) == Plan([NOON], next=NOON + MINUTE, due=NOON + MINUTE)
        assert planned(NOON + timedelta(seconds=59), missed=missed).ticks == [NOON]
    assert planned(NOON - timedelta(seconds=1)) == Plan([], next=NOON, due=NOON)


def test_several_ticks_in_time_are_all_fired() -> None:
    """A per-second schedule that is checked 3 s late has four ticks to fire."""
    found = planned(NOON + timedelta(seconds=3), cron="* * * * * *")
    assert [tick.second for tick in found.ticks] == [0, 1, 2, 3] and not found.late


@pytest.mark.parametrize(
    ("missed", "late", "missed_ticks"), [("once", 1, 9), ("skip", 0, 10), ("all", 10, 0)], ids=["once", "skip", "all"]
)
def test_what_was_missed_alone(missed: str, late: int, missed_ticks: int) -> None:
    """Of ten missed ten-minute ticks with none in time, the latest, none or all are fired; the rest are counted."""
    found = planned(NOON + timedelta(minutes=95), cron="*/10 * * * *", missed=missed)
    assert found.ticks == [] and found.next == NOON + timedelta(minutes=100)
    assert found.late == [NOON + timedelta(minutes=90 - 10 * n) for n in range(late)][::-1]
    assert (found.missed_from, found.missed_ticks) == (NOON if missed_ticks else None, missed_ticks)


def test_what_was_missed_beside_a_tick_in_time() -> None:
    """If a tick in time is due as well, `once` fires no missed tick and `all` fires both."""
    at = NOON + timedelta(minutes=30, seconds=5)
    once = planned(at, cron="*/10 * * * *")
    assert (once.ticks, once.late, once.missed_ticks) == ([NOON + timedelta(minutes=30)], [], 3)
    both = planned(at, cron="*/10 * * * *", missed="all", catch_up=2)
    assert both.ticks == [NOON + timedelta(minutes=30)]
    assert both.late == [NOON + timedelta(minutes=10), NOON + timedelta(minutes=20)]
    assert (both.missed_from, both.missed_ticks) == (NOON, 1)


@pytest.mark.parametrize("missed", ["once", "skip", "all"])
def test_a_year_of_downtime_of_a_schedule_for_each_second(missed: str) -> None:
    """31 million missed ticks are skipped in less than 2 s and counted up to 1000."""
    began = time.monotonic()
    at = NOON + timedelta(days=365, milliseconds=500)
    found = planned(at, cron="* * * * * *", missed=missed, catch_up=50)
    assert time.monotonic() - began < 2
    last = at - timedelta(seconds=60, milliseconds=500)
    assert found.late == {"once": [], "skip": [], "all": [last - timedelta(seconds=n) for n in range(50)][::-1]}[missed]
    assert len(found.ticks) == 60 and found.ticks[-1] == at - timedelta(milliseconds=500)
    assert (found.missed_from, found.missed_ticks) == (NOON, 1000)


def test_jitter_follows_from_name_and_tick() -> None:
    """Every worker derives the same jitter for a tick, within its bound and never past the next tick."""
    ticks = rule("* * * * *", None, "UTC")
    delays = [due(f"s{n}", ticks, NOON, timedelta(seconds=30)) - NOON for n in range(200)]
    assert all(NONE <= delay <= timedelta(seconds=30) for delay in delays)
    assert len(set(delays)) > 150 and max(delays) > timedelta(seconds=25) and min(delays) < timedelta(seconds=5)
    assert delays == [due(f"s{n}", ticks, NOON, timedelta(seconds=30)) - NOON for n in range(200)]
    assert all(due(f"s{n}", ticks, NOON, timedelta(hours=5)) <= NOON + MINUTE for n in range(200))


def test_jitter_is_not_lateness() -> None:
    """A tick that jitter delays for longer than a minute is in time when it is fired then."""
    delay = due("s", rule("0 * * * *", None, "UTC"), NOON, timedelta(minutes=50)) - NOON
    assert delay > 2 * MINUTE
    found = planned(NOON + delay, cron="0 * * * *", jitter=timedelta(minutes=50))
    assert (found.ticks, found.late, found.missed_ticks) == ([NOON], [], 0)
    waiting = planned(NOON + MINUTE, cron="0 * * * *", jitter=timedelta(minutes=50))
    assert waiting == Plan([], next=NOON, due=NOON + delay)
    late = planned(NOON + delay + 2 * MINUTE, cron="0 * * * *", jitter=timedelta(minutes=50), missed="skip")
    assert (late.ticks, late.missed_ticks) == ([], 1)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, ConfigError, "pass either cron or every"),
        ({"cron": "@daily", "every": "5 min"}, ConfigError, "pass either cron or every"),
        ({"every": "0.5 s"}, ConfigError, "every: .*1 s to 366 days"),
        ({"every": "1 month"}, ConfigError, "every: '1 month': 'month' has no fixed length"),
        ({"every": "5 min", "tz": "UTC"}, ConfigError, "an interval has no time zone"),
        ({"cron": "* * * * x"}, ExpressionError, "cron: .*day-of-week"),
        ({"cron": "@daily", "tz": "Mars/Base"}, ConfigError, "tz: 'Mars/Base'"),
        ({"cron": "@daily", "jitter": "2 days"}, ConfigError, "jitter"),
        ({"cron": "@daily", "missed": "twice"}, ConfigError, "missed: 'twice': must be one of once, skip, all"),
        ({"cron": "@daily", "catch_up": 0}, ConfigError, "catch_up"),
        ({"cron": "@daily", "overlap": "yes"}, ConfigError, "overlap"),
    ],
)
def test_wrong_options_name_themselves(given: dict[str, Any], error: type[Exception], words: str) -> None:
    """Every wrong option of a schedule is refused where it is written, by name."""
    with pytest.raises(error, match=words):
        Timing.checked(**given)


def test_declarations_are_checked_where_they_are_written() -> None:
    """S2-11: a wrong expression, a duplicate name, options without a schedule and jobs that it cannot have fail."""
    app = App("shop")

    @app.task
    async def report(lang: str = "en") -> None: ...

    with pytest.raises(ExpressionError, match=r"schedule: '61 .*'61' does not fit the field minute"):
        app.task(schedule="61 * * * *")(lambda: None)
    with pytest.raises(ConfigError, match="jitter: '5 s': there is no schedule"):
        app.task(jitter="5 s")
    with pytest.raises(ConfigError, match="unique"):
        app.schedule("one", report.with_(unique="k").job(), cron="@daily")
    with pytest.raises(ConfigError, match="delay"):
        app.schedule("one", report.with_(delay="5 min").job(), cron="@daily")
    app.schedule("one", report.job(), cron="@daily")
    with pytest.raises(ConfigError, match="declared twice"):
        app.schedule("one", report.job("de"), cron="@daily")
    assert described("x", report.job("de")).args == '{"lang":"de"}'


def test_a_scheduled_task_needs_no_args() -> None:
    """S2-11: a worker refuses to start if a scheduled task has args without defaults; the error shows the way out."""
    app = App("shop")

    @app.task(schedule="@daily")
    async def report(lang: str) -> None: ...

    with pytest.raises(ConfigError, match=r"app\.schedule\('report', report\.job"):
        check_tasks(app)
