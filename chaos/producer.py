"""One producer: it enqueues jobs and logs each try and its outcome.

    python -m chaos.producer DSN LOG FIRST_KEY SEED RATE PACE

Lines of LOG, each on disk before the next step: `A first count` it will try these keys in one transaction;
`K first count` the commit was acknowledged; `R first count` it never sent a commit. A try without `K` or `R` has an
unknown outcome. PACE is a file of one byte: 1 run, 0 hold, 2 end.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import psycopg

from chaos.app import app, task_of

_MOST = 160
_LEAST_HELD = 10


class Journal:
    """The log file."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, word: str, first: int, count: int) -> None:
        """Write one line, which is on disk when this returns."""
        os.write(self._file, f"{word} {first} {count}\n".encode())
        os.fdatasync(self._file)


class Producer:
    """The producer's loop."""

    def __init__(self, dsn: str, journal: Journal, first_key: int, seed: int, rate: float, pace: str) -> None:
        self._dsn = dsn
        self._journal = journal
        self._key = first_key
        self._random = random.Random(seed)
        self._rate = rate
        self._pace = os.open(pace, os.O_RDONLY)
        self._conn: psycopg.Connection[tuple[object, ...]] | None = None

    def run(self) -> None:
        """Enqueue until PACE is 2."""
        allowance, last = 0.0, time.monotonic()
        while (word := os.pread(self._pace, 1, 0)) != b"2":
            now = time.monotonic()
            # After an outage it catches up, but with at most the jobs of 20 s.
            allowance, last = min(allowance + (now - last) * self._rate, 20 * self._rate), now
            if word == b"0" or allowance < _MOST:
                time.sleep(0.02)
                continue
            count = 1 if self._random.random() < 0.1 else self._random.randint(2, _MOST)
            allowance -= count
            first, self._key = self._key, self._key + count
            self._journal.write("A", first, count)
            try:
                self._try(first, count)
            except psycopg.Error as error:
                print(
                    f"{time.time():.1f} {first}: {type(error).__name__} {error}".rstrip(), file=sys.stderr, flush=True
                )
                if self._conn is not None:
                    self._conn.close()
                self._conn = None
                time.sleep(self._random.uniform(0.05, 0.4))

    def _try(self, first: int, count: int) -> None:
        # A failure before the commit was sent means that nothing was committed; after it, only an answer shows it.
        asked = False
        try:
            if self._conn is None or self._conn.closed:
                self._conn = psycopg.connect(self._dsn, application_name="chaos producer")
            if count == 1:
                task_of(first).enqueue_sync(self._conn, first)
            else:
                keys = range(first, first + count)
                app.enqueue_many_sync(self._conn, [task_of(key).job(key) for key in keys])
            self._linger()
            held = count >= _LEAST_HELD and self._hold()
            if self._random.random() < 0.03 and not held:
                self._conn.rollback()
                self._journal.write("R", first, count)
                return
            asked = True
            self._conn.commit()
        except psycopg.Error:
            if not asked:
                self._journal.write("R", first, count)
            raise
        self._journal.write("K", first, count)

    def _linger(self) -> None:
        """Sometimes commit late: claims continue meanwhile and must return to these jobs."""
        chance = self._random.random()
        if chance < 0.02:
            time.sleep(self._random.uniform(1.0, 3.0))
        elif chance < 0.25:
            time.sleep(self._random.uniform(0.01, 0.2))

    def _hold(self) -> bool:
        """Wait while the file named by CHAOS_HOLD exists: a nemesis decides when to commit. Return whether it did."""
        named = os.environ.get("CHAOS_HOLD")
        if named is None or self._conn is None or not (hold := Path(named)).exists():
            return False
        (xid,) = self._conn.execute("select pg_current_xact_id()::text").fetchone() or ("",)
        held = hold.with_name("held")
        held.write_text(str(xid))
        while hold.exists():
            time.sleep(0.02)
        held.unlink()
        return True


def main(dsn: str, log: str, first_key: str, seed: str, rate: str, pace: str) -> None:
    Producer(dsn, Journal(log), int(first_key), int(seed), float(rate), pace).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
