"""Fences taken away, in the run's own database: a run on them must fail, or the harness is good for nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psycopg


@dataclass(frozen=True)
class Break:
    """How a fence is taken away, and the nemesis that finds it missing: a run without the fence strikes no other one."""

    apply: Callable[[psycopg.Connection[Any]], None]
    shown_by: str


def _replace(conn: psycopg.Connection[Any], function: str, old: str, new: str) -> None:
    """Change one function of the schema; an error where it does not hold what is to be changed."""
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
    """The cursor forgets which transactions were running when its window was opened."""
    _replace(
        conn,
        "_window",
        "if h.holes <> '{}' or pg_snapshot_xmin(s) <> pg_snapshot_xmax(s) or v_own is not null then",
        "if false then",
    )


def _fence(conn: psycopg.Connection[Any]) -> None:
    """complete says yes to everybody, whoever has ended the attempt."""
    _replace(conn, "complete", " = '{}'", " is not null")


BREAKS: Mapping[str, Break] = {"fence": Break(_fence, "pause_worker"), "holes": Break(_holes, "long_transaction")}
