"""The arrival of the submissions: a few threads, as in a web application, each save one after another on schedule.

They arrive at a steady rate. A queue that is filled at once would measure a backlog, not how soon a job is picked up.
"""

import threading
import time
from collections.abc import Iterator, Sequence

from tallybook._db.driver import connect
from tallybook.extra.demo.app import save
from tallybook.extra.demo.rows import Row

_THREADS = 4


class Arrivals:
    """Saves these rows within `seconds`, each with its job; on a slow machine, fewer of them (see `close`)."""

    def __init__(self, dsn: str, rows: Sequence[Row], *, seconds: float) -> None:
        self._dsn = dsn
        self._every = seconds / len(rows)
        self._next: Iterator[tuple[int, Row | None]] = enumerate(rows)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(_THREADS)]
        self._started = 0.0
        self.jobs: list[int] = []
        """The ids of the jobs that were enqueued and committed."""
        self.took: list[float] = []
        """The seconds that each save took, from the begin of the transaction to its commit."""
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
                while (row := self._wait_for_one()) is not None:
                    begun = time.monotonic()
                    job = save(conn, row)
                    self.took.append(time.monotonic() - begun)
                    self.jobs.append(job.id)
        except Exception as error:
            self.error = error
            self._stop.set()

    def _wait_for_one(self) -> Row | None:
        with self._lock:
            at, row = next(self._next, (0, None))
        due = self._started + at * self._every
        return None if row is None or self._stop.wait(max(0.0, due - time.monotonic())) else row
