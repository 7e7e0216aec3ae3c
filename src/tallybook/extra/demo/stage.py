"""The run of the demo: a server, a receiver, two workers, a stream of submissions, and a SIGKILL in the middle."""

import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from tallybook._db.driver import Connection, connect
from tallybook._db.migrate import migrate
from tallybook.embedded import temporary_server
from tallybook.errors import TallybookError
from tallybook.extra.demo import app as demo_app
from tallybook.extra.demo.display import Board, Display, Figures, measure, percentiles
from tallybook.extra.demo.receiver import SLOW, Receiver
from tallybook.extra.demo.worker import Worker, stop

Rows = Sequence[dict[str, str]]
RATE = 200.0  # submissions per second, unless there are few or very many
SHORTEST, LONGEST = 2.5, 20.0  # the limits, in seconds, of the time in which they arrive
_AT_MOST = 27.0  # no more submissions arrive after this time, on a slow machine
_DELIVERED_BY = 40.0  # arrivals also stop when the open jobs would not be delivered by this time
_DEADLINE = 48.0  # the demo gives up at this time
_SAVING = 4  # threads
_KILL_AT = 0.4
_TICK = 0.1

_LOOK = """select id, state, worker, crashes, extract(epoch from enqueued_at)::float8,
                  'submission-' || (args ->> 'submission_id')
             from tallybook.job where id = any(%s::bigint[])"""

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
    key: str


class Kill(NamedTuple):
    worker: str
    at: float
    held: set[int]
    rescued: set[int]


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
        rate = len(rows) / min(max(len(rows) / RATE, SHORTEST), LONGEST)
        # With few submissions, hardly any would be running when the worker is killed, so the receiver is slower.
        receiver = stack.enter_context(Receiver(min(max(SLOW, 6 / (0.115 * rate)), 0.9)))
        display.event(f"a receiver listens on {receiver.url}; some requests fail on purpose, some are slow")
        stage = _Stage(conn, dsn, receiver, Arrivals(dsn, rows, rate), display)
        stack.callback(stage.stop)
        figures = stage.run()
        return figures, stage.summary(figures)


class Arrivals:
    """Saves these rows, each with its job, at this rate; after `close` no more of them.

    A few threads save one row after another at a steady rate, as in a web application. A queue that is filled at once
    would measure a backlog, not how soon a job is picked up.
    """

    def __init__(self, dsn: str, rows: Rows, rate: float) -> None:
        self._dsn, self.rows, self.rate = dsn, rows, rate
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(at,), daemon=True) for at in range(_SAVING)]
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
        self._closed.set()

    def stop(self) -> None:
        """Start no more saves and wait until the running ones have ended."""
        self.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(5)

    def _run(self, first: int) -> None:
        try:
            with connect(self._dsn, autocommit=True, application_name="tallybook demo web") as conn:
                for at in range(first, len(self.rows), _SAVING):
                    if self._closed.wait(max(0.0, self._started + at / self.rate - time.monotonic())):
                        return
                    begun = time.monotonic()
                    job = demo_app.save(conn, self.rows[at])
                    self.took.append(time.monotonic() - begun)
                    self.jobs.append(job.id)
        except Exception as error:
            self.error = error
            self.close()


class _Stage:
    def __init__(self, conn: Connection, dsn: str, receiver: Receiver, arrivals: Arrivals, display: Display) -> None:
        self._conn, self._dsn, self._receiver, self._arrivals, self._display = conn, dsn, receiver, arrivals, display
        self._board = Board(len(arrivals.rows))
        self._workers: dict[str, Worker] = {}
        self._kill: Kill | None = None
        self._rescued_after = 0.0
        self._looked_at = self._notes_read = 0
        self._open: dict[int, Seen | None] = {}
        self._enqueued: dict[str, float] = {}
        self._taken: set[str] = set()
        self._started = time.monotonic()

    def run(self) -> Figures:
        for name in ("worker A", "worker B"):
            self._start_worker(name)
        while len(self._live()) < 2:
            self._check()
            if self._late():
                raise TallybookError(f"not done within {_DEADLINE:.0f} s: both workers are up")
            time.sleep(0.05)
        self._display.event("worker A and worker B are up")
        self._display.event(f"{self._board.planned} form submissions arrive, {self._arrivals.rate:.0f} per second")
        self._arrivals.start()
        is_done = False
        while not is_done:
            if self._late():
                self._display.event(f"giving up: not done after {_DEADLINE:.0f} s")
                break
            began, over = time.monotonic(), self._arrivals.over
            self._tick()
            is_done = over and not self._open and self._kill is not None
            # Watching must not become the load: it takes at most a third of the time.
            time.sleep(max(_TICK, 2 * (time.monotonic() - began)))
        self.stop()
        figures = measure(self._conn, self._receiver.notes)
        if (left := self._board.planned - figures.submissions) > 0:
            self._display.event(f"this machine is slow: the last {left} submissions were skipped")
        self._update_board()
        return figures

    def stop(self) -> None:
        self._arrivals.stop()
        stop(self._workers.values())

    def _late(self) -> bool:
        return time.monotonic() - self._started > _DEADLINE

    def _start_worker(self, name: str) -> None:
        self._workers[name] = Worker(name, self._dsn, self._receiver.url)
        self._board.workers[name] = "starts"

    def _live(self) -> set[str]:
        return {name for (name,) in self._conn.execute("select name from tallybook.worker where ended_at is null")}

    def _check(self) -> None:
        for worker in self._workers.values():
            worker.check()
        if self._arrivals.error:
            raise self._arrivals.error

    def _tick(self) -> None:
        self._check()
        self._look()
        # The arrivals stop if this machine could not deliver more in time.
        gone = time.monotonic() - self._started
        rate = len(self._taken) / max(gone, 0.1)
        if gone > _AT_MOST or (gone > 10 and len(self._open) > rate * (_DELIVERED_BY - gone)):
            self._arrivals.close()
        kill = self._kill
        if kill is None:
            self._maybe_kill()
        elif not self._rescued_after and not (kill.held - kill.rescued) & set(self._open):
            self._rescued_after = time.monotonic() - kill.at
            if kill.rescued:
                what = f"{_jobs(len(kill.rescued))} of {kill.worker} rescued after {self._rescued_after:.1f} s"
                self._display.event(f"{what}: other workers noticed and requeued them")
        self._update_board()

    def _look(self) -> None:
        """Read the open jobs by their ids: index look-ups, regardless of the length of the history."""
        new = self._arrivals.jobs[self._looked_at :]
        self._looked_at += len(new)
        self._open.update(dict.fromkeys(new))
        for row in self._conn.execute(_LOOK, [list(self._open)]).fetchall():
            seen = Seen(*row)
            self._enqueued.setdefault(seen.key, seen.enqueued_at)
            if self._kill and seen.id in self._kill.held and seen.crashes:
                self._kill.rescued.add(seen.id)
            if seen.state in ("completed", "cancelled", "dead"):
                del self._open[seen.id]
            else:
                self._open[seen.id] = seen

    def _held_by(self, worker: str) -> set[int]:
        return {seen.id for seen in self._open.values() if seen and seen.state == "running" and seen.worker == worker}

    def _maybe_kill(self) -> None:
        """Kill the worker with the most running jobs, once enough are delivered. Require fewer jobs as time passes."""
        share = len(self._taken) / self._board.planned
        if share < _KILL_AT:
            return
        victim = max(self._workers, key=lambda name: len(self._held_by(name)))
        wanted = 0 if self._arrivals.over and not self._open else 3 if share < 0.6 else 1
        if len(self._held_by(victim)) < wanted:
            return
        worker = self._workers[victim]
        # Its running jobs can be counted while it is stopped; its last statements finish in a moment.
        worker.send_signal(signal.SIGSTOP)
        time.sleep(0.03)
        self._look()
        held = self._held_by(victim)
        if len(held) < wanted:
            worker.send_signal(signal.SIGCONT)
            return
        worker.kill()
        self._kill = Kill(victim, time.monotonic(), held, set())
        stop([self._workers.pop(victim)])
        self._board.workers[victim] = "killed"
        self._display.event(f"{victim} is killed with SIGKILL: it runs {_jobs(len(held))}")
        self._start_worker("worker C")
        self._display.event("worker C starts in its place")

    def _update_board(self) -> None:
        board = self._board
        for note in self._receiver.notes[self._notes_read :]:
            self._notes_read += 1
            board.refused += not note.taken
            if note.taken:
                self._taken.add(note.key)
            if note.attempt == 1 and note.key in self._enqueued:
                board.pickup.append(note.started_at - self._enqueued[note.key])
        board.saved, board.delivered = len(self._arrivals.jobs), len(self._taken)
        board.states = Counter(seen.state if seen else "available" for seen in self._open.values())
        for name in self._live() & self._workers.keys():
            board.workers[name] = "works"
        self._display.show(board)

    def summary(self, figures: Figures) -> list[str]:
        kill, (p50, p99) = self._kill, percentiles(self._arrivals.took)
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
                f" workers after {self._rescued_after:.1f} s.",
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
