"""Break something in a test's database: a function without its guard, a session that is lost at its commit."""

from __future__ import annotations

import re
from typing import Any, SupportsIndex

import psycopg

from tallybook._db.migrate import routines

# The outcome of this commit is unknown to its client.
DIES_AT_COMMIT = """
create function dies() returns trigger language plpgsql as $$
begin
  perform pg_terminate_backend(pg_backend_pid());
  return null;
end $$;
create constraint trigger dies after insert on tallybook.audit deferrable initially deferred
  for each row execute function dies()"""


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
