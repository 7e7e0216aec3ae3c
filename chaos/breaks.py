"""Fences to remove in the database of a run. A run without one must fail, or the harness proves nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg


@dataclass(frozen=True)
class Break:
    """How to remove a fence, and the nemesis that reveals it. A run without the fence uses only that nemesis."""

    apply: Callable[[psycopg.Connection[Any]], None]
    shown_by: str


def _replace(conn: psycopg.Connection[Any], function: str, old: str, new: str) -> None:
    """Change one function of the schema; raise SystemExit if it lacks the text to change."""
    row = conn.execute(
        "select pg_get_functiondef(p.oid) from pg_proc p"
        " where p.pronamespace = 'tallybook'::regnamespace and p.proname = %s",
        (function,),
    ).fetchone()
    words = re.compile(r"\s+".join(re.escape(word) for word in re.split(r"\s+", old)))  # wherever the lines are broken
    if row is None or not words.search(row[0]):
        raise SystemExit(f"chaos: tallybook.{function} has no {old!r} any more; mend chaos/breaks.py")
    conn.execute(words.sub(lambda _: new, row[0]).encode())


def _holes(conn: psycopg.Connection[Any]) -> None:
    """The cursor forgets which transactions were running when its window opened."""
    _replace(
        conn,
        "_window",
        "if h.holes <> '{}' or pg_snapshot_xmin(s) <> pg_snapshot_xmax(s) or v_own is not null then",
        "if false then",
    )


def _fence(conn: psycopg.Connection[Any]) -> None:
    """complete accepts every end, even of an attempt that has ended."""
    _replace(conn, "complete", " = '{}'", " is not null")


BREAKS: Mapping[str, Break] = {"fence": Break(_fence, "pause_worker"), "holes": Break(_holes, "long_transaction")}
