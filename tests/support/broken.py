"""Remove a guard from a SQL function, for negative controls."""

from __future__ import annotations

import re
from typing import Any, SupportsIndex

import psycopg

from tallybook._db.migrate import routines


class Sql(str):
    """A function's text in which `in` and `replace` ignore line breaks."""

    __slots__ = ()

    def __contains__(self, words: object) -> bool:
        return isinstance(words, str) and _pattern(words).search(self) is not None

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> Sql:
        """Replace `count` occurrences of the words `old` (0 or less: all)."""
        return Sql(_pattern(old).sub(lambda _: new, self, max(0, count.__index__())))


def _pattern(words: str) -> re.Pattern[str]:
    return re.compile(r"\s+".join(re.escape(word) for word in re.split(r"\s+", words)))


def source(function: str) -> Any:
    """Return the text of this function's file, to run a copy without a guard in a test's database."""
    made = re.compile(rf"^create or replace function tallybook\.{function}\(", re.MULTILINE)
    (found,) = (text for _, text in routines() if made.search(text))
    return Sql(found)


def without(db: psycopg.Connection[tuple[Any, ...]], function: str, guard: str, instead: str = "") -> None:
    """Replace the text `guard`, which must exist, in the function's definition, in this database only."""
    row = db.execute(
        "select pg_get_functiondef(oid) from pg_proc where pronamespace = 'tallybook'::regnamespace and proname = %s",
        [function],
    ).fetchone()
    assert row is not None, f"there is no function {function}"
    text = Sql(row[0])
    assert guard in text, f"{function} does not contain {guard!r}"
    db.execute(text.replace(guard, instead).encode())
