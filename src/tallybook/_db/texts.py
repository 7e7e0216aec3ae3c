"""Values as the texts that go to the server and come from it: see declared.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from tallybook._db.stored import edge, loads
from tallybook._model.options import check_instant, text_problem
from tallybook.errors import ConfigError

T = TypeVar("T")


def instant(text: str | None) -> datetime | None:
    """An instant of the server's JSON, in UTC; one that Python does not know becomes the nearest that it knows."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):  # infinity, or a year that Python does not know
        return edge(text)


def at(text: str) -> datetime:
    """The same for one that is there."""
    found = instant(text)
    assert found is not None
    return found


def record(made: type[T], row: dict[str, Any], *instants: str, seconds: Sequence[str] = (), **names: str) -> T:
    """A row of JSON as an object of a dataclass: these columns as instants, those as durations, some by other names.

    A column that the class does not know, of a newer release, is left out.
    """
    lengths = {name: None if row[name] is None else timedelta(seconds=row[name]) for name in seconds}
    found = row | {name: instant(row.get(name)) for name in instants} | lengths
    known: dict[str, Any] = made.__dataclass_fields__  # type: ignore[attr-defined]
    return made(**{to: value for name, value in found.items() if (to := names.get(name, name)) in known})


def records(made: type[T], *instants: str, seconds: Sequence[str] = (), **names: str) -> Callable[[str], list[T]]:
    """Reads a list of such rows."""
    return lambda text: [record(made, row, *instants, seconds=seconds, **names) for row in loads(text)]


def some_of(option: str, given: str | Sequence[str] | None, all_: Sequence[str]) -> list[str] | None:
    """Some of a few words, or a single one; ConfigError for any other."""
    words = [given] if isinstance(given, str) else None if given is None else list(given)
    if words is not None and (not words or not set(words) <= set(all_)):
        raise ConfigError(option, words, f"are some of {', '.join(all_)}")
    return words


def checked(option: str, value: str | None) -> str | None:
    """A text that a name can be; ConfigError for what is none."""
    if value is not None and (not isinstance(value, str) or (problem := text_problem(value))):
        raise ConfigError(option, value, "not a text" if not isinstance(value, str) else problem)
    return value


def moment(option: str, value: datetime | None, hint: str = "Write datetime.now(UTC) - ...") -> str | None:
    """An instant for the server; ConfigError for a time without its zone."""
    if value is not None:
        check_instant(option, value, hint)
    return None if value is None else value.astimezone(UTC).isoformat()


def text_array(items: Sequence[str | None]) -> str:
    """PostgreSQL's array literal for these texts."""
    if None in items:
        return "{" + ",".join("NULL" if item is None else quoted(item) for item in items) + "}"
    # One pass of C over the whole text; items with the separator in them (no JSON has it) go the slow way.
    joined = _SEPARATOR.join(items)  # type: ignore[arg-type]
    if joined.count(_SEPARATOR) != len(items) - 1:
        return "{" + ",".join(map(quoted, items)) + "}"  # type: ignore[arg-type]
    escaped = joined.replace("\\", "\\\\").replace('"', '\\"').replace(_SEPARATOR, '","')
    return '{"' + escaped + '"}'


_SEPARATOR = "\x1f"


def quoted(item: str) -> str:
    """An item of an array literal."""
    return '"' + item.replace("\\", "\\\\").replace('"', '\\"') + '"'
