"""The display of the running demo, live on a terminal and plain lines elsewhere; and the figures at its end.

The receiver and the database count them, not the demo's own bookkeeping.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tallybook._db.driver import Connection
from tallybook.extra.demo.receiver import Note

if TYPE_CHECKING:
    from rich.console import RenderableType

_JOBS = """select 'submission-' || (args ->> 'submission_id'), state, attempts, extract(epoch from enqueued_at)::float8
             from tallybook.job where task = 'deliver'"""
_SUBMISSIONS = "select id, encode(sha256(convert_to(data::text, 'UTF8')), 'hex') from submission"


class Figures(NamedTuple):
    submissions: int  # rows of the business table
    duplicates: int  # 2xx answers beyond each key's first
    problems: list[str]
    line: str


def measure(conn: Connection, notes: Sequence[Note]) -> Figures:
    saved = {f"submission-{number}": sha256 for number, sha256 in conn.execute(_SUBMISSIONS)}
    jobs = conn.execute(_JOBS).fetchall()
    taken = [note for note in notes if note.taken and saved.get(note.key) == note.sha256]  # exactly the saved bytes
    delivered = len({note.key for note in taken})
    lost, open_ = len(saved) - delivered, sum(state != "completed" for _, state, *_ in jobs)
    retries = sum(max(0, attempts - 1) for *_, attempts, _ in jobs)
    duplicates = len(taken) - delivered
    seconds = max(note.at for note in taken) - min(note.at for note in taken) if taken else 0.0
    rate = len(taken) / seconds if seconds else 0.0
    started: dict[str, float] = {}  # of the first handler that reached the receiver
    for note in notes:
        started[note.key] = min(note.started_at, started.get(note.key, note.started_at))
    # From the enqueue, before its commit.
    p50, p99 = percentiles(started[key] - at for key, *_, at in jobs if key in started)
    line = (
        f"demo: {len(saved)} submissions, {delivered} delivered, {lost} lost, {retries} retries,"
        f" {duplicates} duplicate deliveries, rate {rate:.0f}/s, pickup p50 {p50:.1f} ms p99 {p99:.1f} ms"
    )
    problems = {
        f"{lost} submissions were not delivered": lost,
        f"{len(saved)} submissions but {len(jobs)} jobs": len(jobs) != len(saved),
        f"{open_} jobs are not completed": open_,
    }
    return Figures(len(saved), duplicates, [problem for problem, is_there in problems.items() if is_there], line)


def percentiles(seconds: Iterable[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile in milliseconds; zeros if there are no values."""
    ordered = sorted(seconds) or [0.0]
    return ordered[len(ordered) // 2] * 1000, ordered[int(0.99 * len(ordered))] * 1000


@dataclass
class Board:
    planned: int
    saved: int = 0
    delivered: int = 0
    refused: int = 0  # requests that the receiver answered with a 500
    states: Counter[str] = field(default_factory=Counter)  # the states of the jobs that are not completed
    workers: dict[str, str] = field(default_factory=dict)  # the status of each worker, by name
    pickup: deque[float] = field(default_factory=lambda: deque(maxlen=500))  # the most recent pickup times in seconds

    @property
    def latency(self) -> str:
        p50, p99 = percentiles(self.pickup)
        return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms" if self.pickup else "-"


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
