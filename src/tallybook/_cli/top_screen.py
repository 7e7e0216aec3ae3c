"""The screen of `tallybook top` as lines of text: pure, for tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import inf

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from tallybook._cli.output import clean
from tallybook._db.texts import instant
from tallybook._db.top import Rates, Reading

_GAP = 2
_STATES = ("available", "running", "scheduled", "retrying", "waiting", "dead")


@dataclass(frozen=True)
class _Column:
    title: str
    share: int = 0  # share of the remaining width; 0: as wide as its content
    right: bool = False


@dataclass(frozen=True)
class _Part:
    """One table: its rows, the busiest first, and the noun for rows that do not fit."""

    columns: Sequence[_Column]
    rows: Sequence[tuple[Sequence[str], str]]  # cells, and the style of the line
    what: str
    empty: str
    beyond: int = 0  # the number of further rows


def screen(reading: Reading, rates: Rates, *, width: int, height: int, trouble: str | None = None) -> list[Text]:
    """Return at most `height` lines of at most `width` columns."""
    lines = _head(reading, rates, width, trouble)
    parts = [_queues(reading, rates), _workers(reading), _longest(reading), _failures(reading)]
    left = height - len(lines) - 2 * len(parts)  # each part has a title and an empty line
    for part, room in zip(parts, _rooms([max(1, len(part.rows)) for part in parts], left), strict=True):
        lines += [Text(""), *_table(part, width, room)]
    return lines[:height]


def _rooms(wanted: list[int], left: int) -> list[int]:
    """Return the number of lines of each part: as wanted, else small parts first, and the others share the rest."""
    rooms = [0] * len(wanted)
    for share, at in enumerate(sorted(range(len(wanted)), key=lambda at: wanted[at])):
        rooms[at] = max(1, min(wanted[at], left // (len(wanted) - share)))
        left -= rooms[at]
    rooms[0] += max(0, min(left, wanted[0] - rooms[0]))
    return rooms


def _head(reading: Reading, rates: Rates, width: int, trouble: str | None) -> list[Text]:
    clock = reading.now.astimezone().strftime("%H:%M:%S")
    first = f"tallybook  {clean(reading.database)} on PostgreSQL {clean(reading.server)}  {clock}"
    shown = [
        f"{reading.alive} worker{'' if reading.alive == 1 else 's'}",
        f"{_scaled(reading.runs.jobs)} running",
        f"in {_rate(rates.entered)}/s",
        f"done {_rate(rates.completed)}/s",
        f"failed {_rate(rates.failed)}/s",
        f"{len(reading.queues)} queues",
    ]
    lines = [_fit(first, width, "bold"), _fit("  ".join(shown), width, "")]
    if trouble:
        lines.append(_fit(clean(trouble), width, "bold red"))
    if reading.horizon:
        since = _age(reading.now, reading.horizon["since"])
        held = f" for {since}" if since else ""
        lines.append(_fit(f"horizon pinned{held} by {clean(reading.horizon['who'])}: see doctor", width, "yellow"))
    return lines


def _queues(reading: Reading, rates: Rates) -> _Part:
    def busy(name: str) -> tuple[float, ...]:
        one = reading.queues[name]
        total = sum(one[state] for state in _STATES)
        return (-rates.of_queues.get(name, 0.0), -one["running"], -one["available"], -total)

    rows = []
    for name in sorted(reading.queues, key=lambda name: (*busy(name), name)):
        one = reading.queues[name]
        done = _rate(rates.of_queues.get(name)) if rates.completed is not None else "-"
        counts = [_scaled(one[state]) for state in _STATES]
        paused, style = ("paused", "yellow") if one["paused_at"] else ("", "")
        rows.append(([clean(name), *counts, done, _age(reading.now, one["oldest"]), paused], style))
    titles = ("avail", "run", "sched", "retry", "wait", "dead", "done/s", "oldest")
    columns = [_Column("QUEUE", 1), *(_Column(title, right=True) for title in titles), _Column("")]
    return _Part(columns, rows, "queues", "no queues yet")


def _workers(reading: Reading) -> _Part:
    rows = []
    of = reading.runs.of_workers
    for one in sorted(reading.workers, key=lambda one: (-of.get(one["id"], 0), one["id"])):
        cells = [
            clean(one["name"]),
            _scaled(of.get(one["id"], 0)),
            clean(", ".join(one["queues"])),
            _scaled(one["lag"], _LAG),
        ]
        cells += [_scaled(one["memory"], _BYTES), _age(reading.now, one["seen_at"])]
        rows.append((cells, "red" if one["silent"] else ""))
    columns = [_Column("WORKER", 2), _Column("run", right=True), _Column("queues", 3)]
    columns += [_Column(title, right=True) for title in ("lag", "memory", "seen")]
    return _Part(columns, rows, "workers", "no live worker: start one with `tallybook worker`")


def _longest(reading: Reading) -> _Part:
    rows = [
        ([str(one["job_id"]), clean(one["task"]), clean(one["worker"]), _age(reading.now, one["started_at"])], "")
        for one in reading.runs.longest
    ]
    columns = [_Column("RUNNING", right=True), _Column("task", 3), _Column("worker", 2), _Column("for", right=True)]
    return _Part(columns, rows, "running jobs", "nothing runs", max(0, reading.runs.jobs - len(rows)))


def _failures(reading: Reading) -> _Part:
    rows = []
    for one in reading.failures:
        said = ": ".join(clean(part) for part in (one["type"], one["message"]) if part) or clean(one["state"])
        cells = [str(one["job_id"]), clean(one["task"]), said, _age(reading.now, one["ended_at"])]
        rows.append((cells, "red" if one["state"] == "dead" else ""))
    columns = [_Column("FAILED", right=True), _Column("task", 2), _Column("error", 5), _Column("ago", right=True)]
    return _Part(columns, rows, "failures", "no failures")


def _table(part: _Part, width: int, room: int) -> list[Text]:
    """Return a title line and at most `room` lines."""
    shown = part.rows if len(part.rows) <= room and not part.beyond else part.rows[: max(0, room - 1)]
    titles = [column.title for column in part.columns]
    widths = _widths(part.columns, [titles, *(cells for cells, _ in shown)], width)
    lines = [_line(part.columns, titles, widths, width, "bold reverse")]
    lines += [_line(part.columns, cells, widths, width, style) for cells, style in shown]
    if not part.rows:
        lines.append(_fit(part.empty, width, "dim"))
    elif hidden := len(part.rows) + part.beyond - len(shown):
        lines.append(_fit(f"... {hidden} more {part.what}", width, "dim"))
    return lines


def _widths(columns: Sequence[_Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    content = [max(cell_len(row[at]) for row in rows) for at in range(len(columns))]
    fixed = sum(size for size, column in zip(content, columns, strict=True) if not column.share)
    left = width - _GAP * (len(columns) - 1) - fixed
    shares = sum(column.share for column in columns)
    widths = []
    for size, column in zip(content, columns, strict=True):
        if column.share:
            given = max(6, left * column.share // shares)
            shares -= column.share
            # A short column leaves its rest to the next one, except for the last, whose neighbour stays at the edge.
            size = min(size, given) if shares else given
            left -= size
        widths.append(size)
    return widths


def _line(columns: Sequence[_Column], cells: Sequence[str], widths: Sequence[int], width: int, style: str) -> Text:
    shown = []
    for column, cell, size in zip(columns, cells, widths, strict=True):
        text = _cut(cell, size)
        space = " " * (size - cell_len(text))
        shown.append(space + text if column.right else text + space)
    return _fit((" " * _GAP).join(shown), width, style)


def _cut(text: str, size: int) -> str:
    return text if cell_len(text) <= size else set_cell_size(text, max(0, size - 1)).rstrip() + "…"


def _fit(text: str, width: int, style: str) -> Text:
    return Text(_cut(text, width), style=style, no_wrap=True, overflow="crop", end="")


_NUMBER = ((100_000, 1, "{:.0f}"), (1_000_000, 1e3, "{:.3g}k"), (1_000_000_000, 1e6, "{:.3g}M"), (inf, 1e9, "{:.3g}G"))
_BYTES = ((2**30, 2**20, "{:.0f} MiB"), (inf, 2**30, "{:.1f} GiB"))
_LAG = ((1, 1e-3, "{:.0f} ms"), (inf, 1, "{:.1f} s"))  # in seconds


def _scaled(value: float | None, scale: Sequence[tuple[float, float, str]] = _NUMBER) -> str:
    """Format a value by the first step of a scale whose limit is above it: its divisor and its text."""
    return "-" if value is None else next(text.format(value / by) for limit, by, text in scale if value < limit)


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if 0 < value < 10 else _scaled(round(value))


def _age(now: datetime, text: str | None) -> str:
    """Return the time since an instant of the server's JSON."""
    if (then := instant(text)) is None:
        return ""
    seconds = max(0.0, (now - then).total_seconds())
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{int(seconds // divisor)} {unit}"
    return f"{int(seconds // 86400)} d"
