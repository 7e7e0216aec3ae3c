"""The check of every job, from the producers' journals, the workers' files of runs, and the database.

attempted        keys that producers tried to enqueue
acknowledged     keys whose commit was acknowledged
lost             acknowledged keys whose job does not exist, has not ended, or completed without its effect
unexpected       keys with a job that were never tried, were rolled back, exist twice, or lack the rest of their
                 transaction; and effects of attempts that did not complete
duplicate_runs   starts of handlers beyond the first and one for each stored failure: at least once allows them
recovered        keys with an unknown outcome and a job
second_effects   effects of a job beyond its first, and ends of a job beyond its first
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.crew import Kill

_JOBS = """
select e.job_id, (e.args ->> 'key')::bigint, e.task,
       count(*) filter (where o.state = 'completed'), count(*) filter (where o.state in ('cancelled', 'dead')),
       count(*) filter (where o.state = 'failed'),
       count(*) filter (where o.state is null), max(e.attempt) filter (where o.state = 'completed'),
       exists (select from tallybook.dead d where d.job_id = e.job_id and d.reason = 'crashed')
  from tallybook.entry e
  left join tallybook.outcome o on o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq
 where e.args ? 'key'
 group by e.job_id, 2, e.task"""
_SCHEDULED = "select job_id, (args ->> 'key')::bigint, task from tallybook.scheduled where args ? 'key'"
_DEAD = "select job_id, reason, errors -> -1 ->> 'message' from tallybook.dead"
_EFFECTS = "select job_id, attempt, key from effect"
_RESCUES = """
select w.name, extract(epoch from o.ended_at)::float8, extract(epoch from n.claimed_at)::float8
  from tallybook.outcome o
  join tallybook.entry e on e.retention = o.retention and e.xid = o.entry_xid and e.seq = o.entry_seq
  cross join lateral tallybook._claim_of(e.lane_id, e.retention, e.xid, e.seq) c
  join tallybook.worker w on w.id = c.worker_id
  left join lateral (
    select k.claimed_at from tallybook.entry x
      cross join lateral tallybook._claim_of(x.lane_id, x.retention, x.xid, x.seq) k
     where x.job_id = e.job_id and x.attempt = e.attempt + 1) n on true
 where o.state = 'lost'"""
OPEN = """
select (select count(*) from tallybook.entry e left join tallybook.outcome o
          on o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq where o.state is null),
       (select count(*) from tallybook.scheduled),
       (select count(*) from tallybook.outcome where state = 'completed')"""
STUCK = """
select case when w.id is null then 'available'
            else 'running, of worker ' || w.name ||
                 case when w.ended_at is not null then ', which has ended'
                      when w.seen_at < clock_timestamp() - interval '10 s' then ', which is silent'
                      else ', which lives' end ||
                 case when k.id < w.open_from then ' and counts this claim as ended' else '' end end,
       count(*), min(e.job_id)
  from tallybook.entry e left join tallybook.outcome o
    on o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq
  left join lateral tallybook._claim_of(e.lane_id, e.retention, e.xid, e.seq) c on true
  left join lateral (select x.id from tallybook.claim x
                      where x.worker_id = c.worker_id and x.lane_id = e.lane_id and x.claimed_at = c.claimed_at
                      limit 1) k on true
  left join tallybook.worker w on w.id = c.worker_id
 where o.state is null group by 1"""

SLOW = 4.0
"""Seconds after which a rescue is reported in full."""
_WITH_EFFECT = ("effect", "effect_in_thread")
_STEPS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24)


@dataclass(frozen=True)
class Fault:
    """A nemesis and its start, in seconds of the clock."""

    name: str
    at: float


@dataclass
class Journals:
    """The keys in the producers' journals."""

    attempted: set[int] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    batches: list[range] = field(default_factory=list)

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Journals:
        """Read all journals; ignore an incomplete line at the end."""
        found = cls()
        into = {"K": found.acknowledged, "R": found.refused}
        for path in paths:
            text = path.read_text() if path.exists() else ""
            for line in text[: text.rfind("\n") + 1].splitlines():
                word, first, count = line.split()
                keys = range(int(first), int(first) + int(count))
                if word == "A":
                    found.attempted.update(keys)
                    found.batches.append(keys)
                else:
                    into[word].update(keys)
        return found


@dataclass
class Verdict:
    """The numbers, the faults in words and the histogram."""

    numbers: dict[str, Any]
    wrong: list[str]
    histogram: list[str]


def _percentile_50(times: Sequence[float]) -> float | None:
    return round(statistics.median(times), 2) if times else None


class Judge:
    """Reads everything once, after all faults, when all processes have ended or are idle."""

    def __init__(
        self,
        ask: Callable[[str], list[tuple[Any, ...]]],
        journals: Iterable[Path],
        runs: Iterable[Path],
        kills: Sequence[Kill],
        faults: Sequence[Fault],
    ) -> None:
        self._journals = Journals.read(journals)
        self._runs = _read_runs(runs)
        self._kills = kills
        self._faults = faults
        self._ask = ask
        self._wrong: list[str] = []

    def verdict(self) -> Verdict:
        """Return the verdict."""
        journals = self._journals
        ended, extra_ends, failures = self._jobs()
        second = extra_ends + self._effects(ended)
        came = set(ended)
        lost = journals.acknowledged - {key for key, done in ended.items() if done}
        self._tell("acknowledged and lost", lost)
        unexpected = self._unexpected(came)
        recovered = {key for key in came - journals.acknowledged - journals.refused if key in journals.attempted}
        duplicates = sum(max(0, runs - 1 - failures[key]) for key, runs in self._runs.items())
        counted, histogram = self._rescues()
        numbers = {
            "attempted": len(journals.attempted),
            "acknowledged": len(journals.acknowledged),
            "lost": len(lost) + self._missing_effects,
            "unexpected": unexpected + self._stray_effects,
            "duplicate_runs": duplicates,
            "recovered": len(recovered),
            "second_effects": second,
            "rescue_p50_s": _percentile_50(counted),
            "rescue_max_s": round(max(counted), 2) if counted else None,
        }
        return Verdict(numbers, self._wrong, histogram)

    def _tell(self, what: str, keys: Iterable[int]) -> None:
        if listed := sorted(keys):
            self._wrong.append(f"{what}: {len(listed)}, the first are {listed[:10]}")

    def _jobs(self) -> tuple[dict[int, bool], int, Counter[int]]:
        """Return whether each key's job has ended, the number of surplus ends, and the failures of each key."""
        ended: dict[int, bool] = {}
        failures: Counter[int] = Counter()
        self._completed: dict[int, tuple[int, str, int]] = {}
        twice: list[int] = []
        extra = 0
        open_keys: list[int] = []
        for job_id, key, task, completed, other, failed, unended, attempt, crashed in self._ask(_JOBS):
            if key in ended:
                twice.append(key)
            finals = completed + other
            # A retried dead letter would have several ends, but nothing retries them here.
            extra += max(0, finals - 1)
            if finals > 1:
                self._wrong.append(f"job {job_id} (key {key}) ended {finals} times")
            ended[key] = ended.get(key, False) or (finals + crashed >= 1 and not unended)
            failures[key] += failed
            if unended:
                open_keys.append(key)
            if completed:
                self._completed[job_id] = (key, task, attempt)
        for _, key, _ in self._ask(_SCHEDULED):
            ended[key] = False
            open_keys.append(key)
        self._tell("not ended", open_keys)
        self._twice = twice
        for job_id, reason, message in self._ask(_DEAD):
            # No handler here kills its process: a job that is dead as crashed was blamed for another death.
            self._wrong.append(f"job {job_id} is dead: {reason}, {message}")
        return ended, extra, failures

    def _effects(self, ended: dict[int, bool]) -> int:
        """Return the number of surplus effects; also count missing effects and effects of attempts not completed."""
        effects: dict[int, list[int]] = defaultdict(list)
        for job_id, attempt, _ in self._ask(_EFFECTS):
            effects[job_id].append(attempt)
        second = sum(len(attempts) - 1 for attempts in effects.values())
        self._tell("jobs with a second effect", (job for job, attempts in effects.items() if len(attempts) > 1))
        missing = [job for job, (_, task, _) in self._completed.items() if task in _WITH_EFFECT and job not in effects]
        self._missing_effects = len(missing)
        self._tell("completed jobs without their effect", missing)
        stray = [
            job for job, done in effects.items() if job not in self._completed or self._completed[job][2] not in done
        ]
        self._stray_effects = len(stray)
        self._tell("effects of jobs that were completed by another attempt or not at all", stray)
        return second

    def _unexpected(self, came: set[int]) -> int:
        journals = self._journals
        never = (came | set(self._runs)) - journals.attempted
        self._tell("never attempted", never)
        rolled_back = (came | set(self._runs)) & journals.refused
        self._tell("rolled back, but present", rolled_back)
        self._tell("present more than once", self._twice)
        torn = [
            key for batch in journals.batches if 0 < len(part := came.intersection(batch)) < len(batch) for key in part
        ]
        self._tell("present without the rest of their transaction", torn)
        return len(never | rolled_back | set(torn)) + len(self._twice)

    def _rescues(self) -> tuple[list[float], list[str]]:
        """Return seconds from each counted kill to the next claim, and the histogram of all rescues by nemesis."""
        kills = {kill.worker: kill for kill in self._kills}
        counted: list[float] = []
        slow: set[str] = set()
        times: dict[str, list[float]] = defaultdict(list)
        for worker, lost_at, claimed_at in self._ask(_RESCUES):
            if claimed_at is None:
                continue
            kill = kills.get(worker)
            if kill is not None and lost_at >= kill.at:
                counted.append(claimed_at - kill.at)
                times["kill_worker"].append(claimed_at - kill.at)
                times["kill_worker, available after"].append(lost_at - kill.at)
                if claimed_at - kill.at > SLOW:
                    slow.add(self._slow(kill, lost_at, claimed_at))
                continue
            before = [fault for fault in self._faults if fault.at <= lost_at]
            fault = before[-1] if before else Fault("none", lost_at)
            times[fault.name].append(claimed_at - fault.at)
        return counted, [*_histogram(times), *sorted(slow)]

    def _slow(self, kill: Kill, lost_at: float, claimed_at: float) -> str:
        """Describe a slow rescue, with the faults that may have delayed it."""
        between = [
            f"{fault.name} at {fault.at - kill.at:+.1f} s" for fault in self._faults if kill.at < fault.at < claimed_at
        ]
        return (
            f"slow: a job of {kill.worker} was available {lost_at - kill.at:.1f} s after the kill and claimed after "
            f"{claimed_at - kill.at:.1f} s; faults since: {', '.join(between) or 'none'}"
        )


def _read_runs(paths: Iterable[Path]) -> Counter[int]:
    """Return how often a handler was started for each key."""
    found: Counter[int] = Counter()
    for path in paths:
        text = path.read_bytes()
        found.update(int(line.split(b" ", 1)[0]) for line in text[: text.rfind(b"\n") + 1].splitlines())
    return found


def _histogram(times: dict[str, list[float]]) -> list[str]:
    """Return a table with one row per nemesis and one column per step of seconds."""
    head = ["".join(f"{f'<{step:g}s':>7}" for step in _STEPS) + "   more"]
    lines = [f"{'rescues, from the fault to the next claim':42}{head[0]}     p50     max"]
    for name in sorted(times):
        left, cells = sorted(times[name]), ""
        edge = 0.0
        for step in (*_STEPS, float("inf")):
            inside = sum(edge <= t < step or (edge == 0.0 and t < 0) for t in left)
            cells += f"{inside or '.':>7}"
            edge = step
        lines.append(f"{name:42}{cells}{statistics.median(left):7.1f}s{left[-1]:7.1f}s")
    return lines
