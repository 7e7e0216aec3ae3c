"""Durations in PostgreSQL's syntax (durations.py)."""

import contextlib
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallybook._model.durations import format_duration, iso_duration, parse_duration, parse_iso_duration
from tallybook.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5 min", 300),
        ("1 hour 30 min", 5400),
        ("1h30m", 5400),
        ("90 s", 90),
        ("2 days", 172_800),
        ("1 week", 604_800),
        ("500 ms", 0.5),
        ("250us", 0.000_25),
        ("1.5 HOURS", 5400),
        (" 0 s ", 0),
        ("1 day 02:00:30.5", 93_630.5),
        ("00:05", 300),
        ("PT1H30M", 5400),
        ("P1DT0.5S", 86_400.5),
    ],
)
def test_words_of_postgresql_are_read(text, seconds):
    """Options and settings accept PostgreSQL's duration syntax, in any case, with fractions."""
    assert parse_duration(text) == timedelta(seconds=seconds)


def test_timedelta_is_passed_through():
    """A timedelta is returned unchanged."""
    assert parse_duration(timedelta(days=1)) == timedelta(days=1)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "not a duration"),
        ("soon", "not a duration"),
        ("300", "needs a unit"),
        ("5 min later", "not a duration"),
        ("5 fortnights", "unknown unit 'fortnights'"),
        ("1 month", "no fixed length"),
        ("2 years", "no fixed length"),
        ("P1Y", "not a duration"),
        ("-5 min", "not a duration"),
        ("٥ min", "not a duration"),
        ("PT", "not a duration"),
        ("9" * 60 + " days", "longer than a timedelta"),
        ("1 s" * 100, "not a duration"),
        ("PT-5S", "cannot be negative"),
        (timedelta(seconds=-1), "cannot be negative"),
        (300, "not a duration"),
        (None, "not a duration"),
    ],
)
def test_bad_durations_name_the_option_and_the_value(value, reason):
    """A value that is no duration, such as a bare number, raises ConfigError with option, value and reason."""
    with pytest.raises(ConfigError) as caught:
        parse_duration(value, option="timeout")
    assert caught.value.option == "timeout"
    assert caught.value.value == value
    assert reason in str(caught.value)


@given(st.timedeltas(timedelta(0)))
def test_what_is_formatted_is_read_back(duration):
    """Format and parse are exact to the microsecond, from zero to the longest timedelta."""
    assert parse_duration(format_duration(duration)) == duration


@given(st.timedeltas())
def test_iso_text_is_read_back(duration):
    """The ISO text stored in args is exact, including negative durations."""
    assert parse_iso_duration(iso_duration(duration)) == duration


def test_format_is_short():
    """Empty parts are left out, and each part of a negative duration has a minus, as `interval` needs it."""
    assert format_duration(timedelta(minutes=5)) == "5 min"
    assert format_duration(timedelta(days=1, hours=2, microseconds=1500)) == "1 day 2 hours 1 ms 500 us"
    assert format_duration(timedelta(0)) == "0 s"
    assert format_duration(timedelta(seconds=-90)) == "-1 min -30 s"


@given(st.text(max_size=30) | st.text("0123456789 .:PTHMSDWhdmsuaye-", max_size=12))
def test_any_text_is_a_duration_or_config_error(text):
    """No text makes the parser raise anything but ConfigError."""
    with contextlib.suppress(ConfigError):
        assert parse_duration(text) >= timedelta(0)
