"""The run of the demo: a server, a receiver, two workers, a stream of submissions, and a SIGKILL in the middle."""

import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

from tallybook._db.driver import Connection, connect
from tallybook._db.migrate import migrate
from tallybook.embedded import temporary_server
from tallybook.errors import TallybookError
from tallybook.extra.demo import app as demo_app
from tallybook.extra.demo.display import Board, Display, Figures, measure, percentile
from tallybook.extra.demo.processes import Process, Processes, ReceiverLog
from tallybook.extra.demo.receiver import SLOW

Rows = Sequence[dict[str, str]]
RATE = 200.0  # submissions per second, unless there are few or very many
SHORTEST, LONGEST = 2.5, 20.0  # the limits, in seconds, of the time in which they arrive
_AT_MOST = 27.0  # no more submissions arrive after this time, on a slow machine
_DELIVERED_BY = 40.0  # arrivals also stop when the open jobs would not be delivered by this time
_DEADLINE = 48.0  # the demo gives up at this time
_SAVING = 4  # threads
_KILL_AT = 0.4
_TICK = 0.1

_LOOK = """select id, state, worker, crashes, extract(epoch from enqueued_at)::float8, args ->> 'submission_id'
             from tallybook.job where id = any(%s::bigint[])"""
_LIVE = "select count(*) from tallybook.worker where ended_at is null"

QUERIES = (  # for a newcomer to try, shown with the answers of this run
    "select state, count(*) from tallybook.job group by state",
    "select worker, state, count(*) from tallybook.attempt group by worker, state order by worker, state",
    "select id, attempts, crashes, last_error from tallybook.job where attempts > 1 order by attempts desc, id limit 3",
)


class Seen(NamedTuple):
    id: int
    state: str
    worker: str | None
    crashes: int
    enqueued_at: float
    submission: str


@dataclass
class Kill:
    worker: str
    at: float
    held: set[int]
    rescued: set[int]
    rescued_after: float = 0.0


def play(rows: Rows, display: Display) -> tuple[Figures, list[str]]:
    """Set up, run, measure and always clean up. Return the figures, and lines about the run for people."""
    with ExitStack() as stack:
        display.event("starting an embedded PostgreSQL, which is removed at the end")
        server = stack.enter_context(temporary_server(durable=True))
        dsn = server.create_database("demo")
        # Never prepare: a plan for empty tables would be kept when they are full.
        conn = stack.enter_context(connect(dsn, autocommit=True, prepare_threshold=None))
        migrate(conn)
        conn.execute(demo_app.TABLE)
        display.event(f"PostgreSQL {server.version} is up, with the schema tallybook and the table submission")
        processes = stack.enter_context(Processes())
        stage = _Stage(conn, dsn, rows, processes, display)
        stack.callback(stage.arrivals.stop)
        return stage.run()


class Arrivals:
    """Saves these rows within `seconds`, each with its job; on a slow machine, fewer of them (see `close`).

    A few threads save one row after another at a steady rate, as in a web application. A queue that is filled at once
    would measure a backlog, not how soon a job is picked up.
    """

    def __init__(self, dsn: str, rows: Rows, *, seconds: float) -> None:
        self._dsn = dsn
        self._every = seconds / len(rows)
        self._next: Iterator[tuple[int, dict[str, str] | None]] = enumerate(rows)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(_SAVING)]
        self._started = 0.0
        self.jobs: list[int] = []  # the ids of the jobs that were enqueued and committed
        self.took: list[float] = []  # the seconds that each save took, from the begin of the transaction to its commit
        self.error: Exception | None = None

    def start(self) -> None:
        self._started = time.monotonic()
        for thread in self._threads:
            thread.start()

    @property
    def over(self) -> bool:
        """Whether all have arrived or were abandoned."""
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        self._stop.set()

    def stop(self) -> None:
        """Start no more saves and wait until the running ones have ended."""
        self.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(5)

    def _run(self) -> None:
        try:
            with connect(self._dsn, autocommit=True, application_name="tallybook demo web") as conn:
                while True:
                    with self._lock:
                        at, row = next(self._next, (0, None))
                    due = self._started + at * self._every
                    if row is None or self._stop.wait(max(0.0, due - time.monotonic())):
                        return
                    begun = time.monotonic()
                    job = demo_app.save(conn, row)
                    self.took.append(time.monotonic() - begun)
                    self.jobs.append(job.id)
        except Exception as error:
            self.error = error
            self._stop.set()


class _Stage:
    def __init__(self, conn: Connection, dsn: str, rows: Rows, processes: Processes, display: Display) -> None:
        self._conn, self._dsn, self._processes, self._display = conn, dsn, processes, display
        self._seconds = min(max(len(rows) / RATE, SHORTEST), LONGEST)
        # With few submissions, hardly any would be running when the worker is killed, so the receiver is slower.
        rate = len(rows) / self._seconds
        slow = min(max(SLOW, 6 / (0.115 * rate)), 0.9)
        self._receiver = processes.start("the receiver", "receiver", f"{slow:.3f}")
        self._log = ReceiverLog(self._receiver)
        self.arrivals = Arrivals(dsn, rows, seconds=self._seconds)
        self._board = Board(len(rows))
        self._workers: dict[str, Process] = {}
        self._kill: Kill | None = None
        self._looked_at = 0
        self._open: dict[int, Seen | None] = {}
        self._started = 0.0
        self._starts: dict[str, float] = {}
        self._notes_read = 0
        self._pickup: deque[float] = deque(maxlen=500)

    def run(self) -> tuple[Figures, list[str]]:
        self._started = time.monotonic()
        deadline = self._started + _DEADLINE
        self._display.event(f"a receiver listens on {self._log.url}; some requests fail on purpose, some are slow")
        for name in ("worker A", "worker B"):
            self._start_worker(name)
        while self._conn.execute(_LIVE).fetchone() != (2,):
            self._processes.check()
            if time.monotonic() > deadline:
                raise TallybookError(f"not done within {_DEADLINE:.0f} s: both workers are up")
            time.sleep(0.05)
        self._display.event("worker A and worker B are up")
        rate = self._board.planned / self._seconds
        self._display.event(f"{self._board.planned} form submissions arrive, {rate:.0f} per second")
        self.arrivals.start()
        while not (self.arrivals.over and not self._open and self._kill):
            if time.monotonic() > deadline:
                self._display.event(f"giving up: not done after {_DEADLINE:.0f} s")
                break
            began = time.monotonic()
            self._tick()
            # Watching must not become the load: it takes at most a third of the time.
            time.sleep(max(_TICK, 2 * (time.monotonic() - began)))
        return self._end()

    def _start_worker(self, name: str) -> None:
        env = {"TALLYBOOK_DSN": self._dsn, "WEBHOOK_URL": self._log.url}
        self._workers[name] = self._processes.start(name, "worker", name, env=env)
        self._board.workers[name] = "starts"

    def _tick(self) -> None:
        self._processes.check()
        if self.arrivals.error:
            raise self.arrivals.error
        self._look()
        # The arrivals stop if this machine could not deliver more in time.
        gone = time.monotonic() - self._started
        rate = len(self._log.taken) / max(gone, 0.1)
        if gone > _AT_MOST or (gone > 10 and len(self._open) > rate * (_DELIVERED_BY - gone)):
            self.arrivals.close()
        if self._kill is None:
            self._maybe_kill()
        elif not self._kill.rescued_after and not (self._kill.held - self._kill.rescued) & set(self._open):
            self._kill.rescued_after = time.monotonic() - self._kill.at
            if self._kill.rescued:
                what = f"{_jobs(len(self._kill.rescued))} of {self._kill.worker} rescued"
                after = f"after {self._kill.rescued_after:.1f} s"
                self._display.event(f"{what} {after}: other workers noticed and requeued them")
        self._update_board()
        self._display.show(self._board)

    def _look(self) -> None:
        """Read the open jobs by their ids: index look-ups, regardless of the length of the history."""
        over = self.arrivals.over
        new = self.arrivals.jobs[self._looked_at :]
        self._looked_at += len(new)
        self._open.update(dict.fromkeys(new))
        for row in self._conn.execute(_LOOK, [list(self._open)]).fetchall():
            seen = Seen(*row)
            self._starts.setdefault(f"submission-{seen.submission}", seen.enqueued_at)
            if self._kill and seen.id in self._kill.held and seen.crashes:
                self._kill.rescued.add(seen.id)
            if seen.state in ("completed", "cancelled", "dead"):
                del self._open[seen.id]
            else:
                self._open[seen.id] = seen
        if over and self._looked_at < len(self.arrivals.jobs):
            self._look()

    def _held_by(self, worker: str) -> set[int]:
        return {seen.id for seen in self._open.values() if seen and seen.state == "running" and seen.worker == worker}

    def _maybe_kill(self) -> None:
        """Kill the worker with the most running jobs, once enough are delivered. Require fewer jobs as time passes."""
        share = len(self._log.taken) / self._board.planned
        if share < _KILL_AT:
            return
        wanted = 3 if share < 0.6 else 1
        nothing_left = self.arrivals.over and not self._open
        victim = max(self._workers, key=lambda name: len(self._held_by(name)))
        if len(self._held_by(victim)) < wanted and not nothing_left:
            return
        process = self._workers[victim]
        # Its running jobs can be counted while it is stopped; its last statements finish in a moment.
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.03)
        self._look()
        held = self._held_by(victim)
        if len(held) < wanted and not nothing_left:
            process.send_signal(signal.SIGCONT)
            return
        process.kill()
        self._kill = Kill(victim, time.monotonic(), held, set())
        self._board.workers[victim] = "killed"
        self._display.event(f"{victim} is killed with SIGKILL: it runs {_jobs(len(held))}")
        self._start_worker("worker C")
        self._display.event("worker C starts in its place")

    def _update_board(self) -> None:
        board, notes = self._board, self._log.notes
        board.saved, board.delivered = len(self.arrivals.jobs), len(self._log.taken)
        for note in notes[self._notes_read :]:
            self._notes_read += 1
            board.refused += not note.taken
            if note.attempt == 1 and note.key in self._starts:
                self._pickup.append(note.started_at - self._starts[note.key])
        board.pickup = sorted(self._pickup)
        board.states.clear()
        board.states.update(seen.state if seen else "available" for seen in self._open.values())
        live = {name for (name,) in self._conn.execute("select name from tallybook.worker where ended_at is null")}
        for name in self._workers:
            if name in live and board.workers[name] == "starts":
                board.workers[name] = "works"

    def _end(self) -> tuple[Figures, list[str]]:
        self.arrivals.stop()
        self._processes.stop(*(process for process in self._workers.values() if not process.killed))
        self._processes.stop(self._receiver)
        self._log.reader.join(5)  # until all its output is read
        figures = measure(self._conn, self._log.notes)
        if figures.submissions < self._board.planned:
            left = self._board.planned - figures.submissions
            self._display.event(f"this machine is slow: the last {left} submissions were skipped")
        self._update_board()
        self._display.show(self._board)
        return figures, self._summary(figures)

    def _summary(self, figures: Figures) -> list[str]:
        kill, took = self._kill, sorted(self.arrivals.took)
        p50, p99 = percentile(took, 0.5) * 1000, percentile(took, 0.99) * 1000
        lines = [
            "",
            "What you saw",
            "- Each submission was saved together with its job, in one transaction: both or neither.",
            f"  That took {p50:.1f} ms (p99 {p99:.1f} ms), independent of the receiver.",
            f"- The receiver refused {self._board.refused} requests on purpose: each was retried after a backoff.",
        ]
        if kill and kill.rescued:
            lines += [
                f"- {kill.worker} was killed with SIGKILL. Its {_jobs(len(kill.rescued))} went to the other"
                f" workers after {kill.rescued_after:.1f} s.",
                f"  {figures.duplicates} deliveries reached the receiver twice: their idempotency key identifies them.",
            ]
        lines += ["", "You can query the queue in SQL. In this run:"]
        for query in QUERIES:
            lines += ["", f"  {query};", *_table(self._conn.execute(query))]
        return [*lines, "", f"The code is {demo_app.__file__}, one page long.", ""]


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count or 'no'} jobs"


def _table(found: Any) -> list[str]:
    cells = [[column.name for column in found.description or ()]]
    cells += [[("" if value is None else str(value))[:60] for value in row] for row in found]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = (map(str.ljust, line, widths) for line in cells)
    return ["    " + "  ".join(line).rstrip() for line in padded]
