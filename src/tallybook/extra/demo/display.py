"""The display of the running demo, live on a terminal and plain lines elsewhere; and the figures at its end.

The receiver and the database count them, not the demo's own bookkeeping.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tallybook._db.driver import Connection
from tallybook.extra.demo.processes import Note

if TYPE_CHECKING:
    from rich.console import RenderableType

_JOBS = """select (args ->> 'submission_id')::bigint, state, attempts, extract(epoch from enqueued_at)::float8
             from tallybook.job where task = 'deliver'"""
_SUBMISSIONS = "select id, encode(sha256(convert_to(data::text, 'UTF8')), 'hex') from submission"


@dataclass(frozen=True, kw_only=True)
class Figures:
    submissions: int  # rows of the business table
    jobs: int
    completed: int
    delivered: int  # submissions for which the receiver answered 2xx to exactly the bytes in the business table
    retries: int  # attempts beyond each job's first
    duplicates: int  # 2xx answers beyond each key's first
    rate: float  # deliveries per second, from the first to the last
    pickup: Sequence[float]
    """Seconds from the enqueue, before its commit, to the start of the first handler that reached the receiver."""

    @property
    def lost(self) -> int:
        return self.submissions - self.delivered

    @property
    def problems(self) -> list[str]:
        found = [f"{self.lost} submissions were not delivered"] if self.lost else []
        if self.jobs != self.submissions:
            found.append(f"{self.submissions} submissions but {self.jobs} jobs")
        if self.completed != self.jobs:
            found.append(f"{self.jobs - self.completed} jobs are not completed")
        return found

    @property
    def line(self) -> str:
        return (
            f"demo: {self.submissions} submissions, {self.delivered} delivered, {self.lost} lost,"
            f" {self.retries} retries, {self.duplicates} duplicate deliveries, rate {self.rate:.0f}/s,"
            f" pickup p50 {percentile(self.pickup, 0.5) * 1000:.1f} ms"
            f" p99 {percentile(self.pickup, 0.99) * 1000:.1f} ms"
        )


def measure(conn: Connection, notes: Sequence[Note]) -> Figures:
    saved = {f"submission-{number}": sha256 for number, sha256 in conn.execute(_SUBMISSIONS)}
    jobs = conn.execute(_JOBS).fetchall()
    enqueued = {f"submission-{number}": at for number, *_, at in jobs}
    taken = [note for note in notes if note.taken and saved.get(note.key) == note.sha256]
    by_key = Counter(note.key for note in taken)
    started: dict[str, float] = {}
    for note in notes:
        started[note.key] = min(note.started_at, started.get(note.key, note.started_at))
    times = sorted(note.at for note in taken)
    seconds = times[-1] - times[0] if times else 0.0
    return Figures(
        submissions=len(saved),
        jobs=len(jobs),
        completed=sum(state == "completed" for _, state, *_ in jobs),
        delivered=len(by_key),
        retries=sum(max(0, attempts - 1) for *_, attempts, _ in jobs),
        duplicates=by_key.total() - len(by_key),
        rate=len(taken) / seconds if seconds else 0.0,
        pickup=sorted(started[key] - at for key, at in enqueued.items() if key in started),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that this share of all values does not exceed; 0 if there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass
class Board:
    planned: int
    saved: int = 0
    delivered: int = 0
    refused: int = 0  # requests that the receiver answered with a 500
    states: Counter[str] = field(default_factory=Counter)  # the states of the jobs that are not completed
    workers: dict[str, str] = field(default_factory=dict)  # the status of each worker, by name
    pickup: Sequence[float] = ()  # the most recent pickup times in seconds, sorted

    @property
    def latency(self) -> str:
        if not self.pickup:
            return "-"
        return f"p50 {percentile(self.pickup, 0.5) * 1000:.1f} ms, p99 {percentile(self.pickup, 0.99) * 1000:.1f} ms"


class Display:
    """The plain display: one line per event and one per second, with the seconds since the start."""

    def __init__(self) -> None:
        self._started = self._shown = time.monotonic()

    def event(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:5.1f} s] {text}", flush=True)

    def show(self, board: Board) -> None:
        if time.monotonic() - self._shown < 1:
            return
        self._shown = time.monotonic()
        states = " ".join(f"{board.states[state]:4} {state}" for state in ("running", "available", "retrying"))
        done = f"{board.saved:6} saved {board.delivered:6} delivered {states}"
        self.event(f"{done}   {board.refused} refused   pickup {board.latency}")


_WORKERS = {"killed": "red", "works": "green"}


class Live(Display):
    """The live display: bars, counts and workers that change in place, with the last events below."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        super().__init__()
        self._events: list[str] = []
        self._board: Board | None = None
        self.screen = RichLive(console=Console(), auto_refresh=False, vertical_overflow="visible")

    def event(self, text: str) -> None:
        self._events.append(f"[dim]{time.monotonic() - self._started:5.1f} s[/]  {text}")
        self._draw()

    def show(self, board: Board) -> None:
        self._board = board
        self._draw()

    def _draw(self) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        parts: list[RenderableType] = [Text("Tallybook, live", style="bold"), Text()]
        if board := self._board:
            bars, facts = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 2))
            rows = (("submissions saved", board.saved, "cyan"), ("webhooks delivered", board.delivered, "green"))
            for name, done, style in rows:
                bar = ProgressBar(board.planned, done, width=44, complete_style=style, finished_style=style)
                bars.add_row(name, bar, f"{done} of {board.planned}")
            states = [f"{state} [b]{board.states[state]}[/]" for state in ("available", "running", "retrying")]
            facts.add_row("jobs", "   ".join([*states, f"refused by the receiver [b]{board.refused}[/]"]))
            facts.add_row("pickup", board.latency)
            workers = [f"{name} [{_WORKERS.get(what, 'yellow')}]{what}[/]" for name, what in board.workers.items()]
            facts.add_row("workers", "   ".join(workers))
            parts += [bars, Text(), facts, Text()]
        events = [Text.from_markup(text) for text in self._events[-12:]]
        self.screen.update(Group(*parts, *events, Text()), refresh=True)


@contextmanager
def chosen(plain: bool | None) -> Iterator[Display]:
    """Yield the live display if the terminal supports it. None decides by standard output."""
    live = None
    if plain is None:
        plain = not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb"
    if not plain:
        with suppress(ImportError):
            live = Live()
    with nullcontext() if live is None else live.screen:
        yield live or Display()
