"""The figures of the demo, counted by the receiver and the database, not by the demo's own bookkeeping."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tallybook._db.driver import Connection
from tallybook.extra.demo.processes import Note

_JOBS = """select (args ->> 'submission_id')::bigint, state, attempts, extract(epoch from enqueued_at)::float8
             from tallybook.job where task = 'deliver'"""
_SUBMISSIONS = "select id, encode(sha256(convert_to(data::text, 'UTF8')), 'hex') from submission"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of the last line, and whether they agree."""

    submissions: int
    """Rows of the business table."""
    jobs: int
    completed: int
    delivered: int
    """Submissions for which the receiver answered 2xx to exactly the bytes in the business table."""
    retries: int
    """Attempts beyond each job's first."""
    duplicates: int
    """2xx answers beyond each key's first."""
    rate: float
    """Deliveries per second, from the first to the last."""
    pickup: Sequence[float]
    """Seconds from the enqueue, before its commit, to the start of the first handler that reached the receiver."""

    @property
    def lost(self) -> int:
        return self.submissions - self.delivered

    @property
    def problems(self) -> list[str]:
        """The figures that do not agree, as sentences."""
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
