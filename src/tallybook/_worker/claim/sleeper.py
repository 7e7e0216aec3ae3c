"""Sleeping until there is work: a listening session that producers wake, but only while a worker sleeps.

While the worker waits ("armed"), its session holds a shared advisory lock for each of its queues. A producer that finds
the lock taken sends a notification. Under load the worker stops listening, so that producers commit without one.
Polling is the fallback: without a session (a pooler in transaction mode, no server) a job waits one poll at most.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

from tallybook._db.declared import Declared
from tallybook._db.driver import AsyncConnection, Error, OperationalError, connect_async
from tallybook._db.link import CONNECT, SocketTimeout, dsn_for_people
from tallybook._db.policy import Outage
from tallybook._maintenance.service import happens

log = logging.getLogger("tallybook.worker")

PROMOTE = " promote"
CANCEL = " cancel"
SCHEDULE = " schedule"
SETTLE = " parents_resolve"
PLACES = " concurrency_release"
DEAL = " fair_release"
# A listening connection only reads: unless it pings, it would not notice that its peer is gone, or that a pooler's
# reset has ended its listening. The interval plus the limit is the longest that it may be deaf.
_PING_EVERY = 8.0
_PING_LIMIT = 4.0
_ARM_LIMIT = 2.0  # the claimer waits for this one
_HOLD = "select pg_advisory_lock_shared(1413565444, hashtext(w)) from unnest(%s::text[]) w"
_PING = "select exists (select from pg_listening_channels() c where c = 'tallybook')"
_LISTEN_BEGIN = Declared("listen_begin(queues text[], held boolean) -> row (armed clear boolean)")
_LISTEN_END = Declared("listen_end(queues text[]) -> void")


class Sleeper:
    """One listening session; notifications for one of the queues set `woken`, and others call what `heard` has."""

    def __init__(self, dsn: str, name: str, queues: Sequence[str], heard: dict[str, Callable[[], object]]) -> None:
        self._dsn = dsn
        self._name = name
        self._queues = list(queues)
        self.heard = heard
        self._conn: AsyncConnection | None = None
        self._watched: int | None = None
        self._ended = asyncio.Event()
        self._lock = asyncio.Lock()
        self.armed = False
        self.clear = False
        self.woken = asyncio.Event()

    async def run(self) -> None:
        # Polling makes up for a lost session, so nothing is late: the first few failures are not logged.
        outage = Outage(f"cannot listen, database {dsn_for_people(self._dsn)}", quiet=3)
        while True:
            try:
                await self._connect()
                outage.over()
                while True:
                    await happens(self._ended, _PING_EVERY)
                    self._ended.clear()
                    if await self._ask(_PING, ()) != (True,):
                        raise OperationalError("the session does not listen any more")
            except (Error, OSError) as error:
                pause = outage.failed(error, self._conn)
                await self.close()
                await asyncio.sleep(pause)

    async def _connect(self) -> None:
        conn = await connect_async(self._dsn, **CONNECT, application_name=f"tallybook {self._name}"[:63])
        conn.add_notify_handler(lambda notify: self._word(notify.payload))
        conn.prepare_threshold = None
        try:
            with SocketTimeout(conn, _PING_LIMIT):
                await conn.execute("set statement_timeout = 0; set idle_session_timeout = 0; listen tallybook")
                # A busy worker does not sleep but must still promote: it hears promotions while the session lives.
                await conn.execute(_HOLD, ([PROMOTE, SCHEDULE, SETTLE, PLACES, DEAL],))
        except BaseException:
            await conn.close()
            raise
        self._conn = conn
        self._watch(True)
        self.woken.set()  # check at once: jobs committed meanwhile woke nobody, and cancels were not heard
        self._word(CANCEL)

    async def close(self) -> None:
        self._watch(False)
        conn, self._conn = self._conn, None
        self.armed = self.clear = False
        if conn is not None:
            await conn.close()
        self.woken.set()

    def _watch(self, on: bool) -> None:
        # Use the descriptor under which it was added: libpq closes a lost socket, but asyncio would keep its entry. The
        # next socket with that descriptor would then never be heard.
        loop, conn = asyncio.get_running_loop(), self._conn
        if self._watched is not None:
            loop.remove_reader(self._watched)
            self._watched = None
        if on and conn is not None and not conn.closed:
            self._watched = conn.fileno()
            loop.add_reader(self._watched, self._readable)

    def _readable(self) -> None:
        conn = self._conn
        if conn is None:
            return
        try:
            conn.pgconn.consume_input()
            while word := conn.pgconn.notifies():
                self._word(word.extra.decode("utf-8", "replace"))
        except Error:
            self._watch(False)
            self.armed = self.clear = False
            self._ended.set()  # ping now, and reconnect

    def _word(self, word: str) -> None:
        if word in self.heard:
            self.heard[word]()
        elif word in self._queues:
            self.woken.set()

    async def _ask(self, sql: str, params: tuple[Any, ...], *, limit: float = _PING_LIMIT) -> Any:
        async with self._lock:
            conn = self._conn
            if conn is None:
                return None
            self._watch(False)  # psycopg itself watches the socket while it waits for an answer
            try:
                with SocketTimeout(conn, limit):
                    return await (await conn.execute(sql, params)).fetchone()
            finally:
                self._watch(True)
                self._readable()

    async def listen_begin(self) -> bool:
        """Arm the session, or check again whether it is clear. True: every producer's commit now wakes this worker."""
        try:
            said = await self._ask(_LISTEN_BEGIN.worker, (self._queues, self.armed), limit=_ARM_LIMIT)
            self.armed, self.clear = said or (False, False)
        except (Error, OSError):
            self.armed = self.clear = False
        return self.clear

    async def listen_end(self) -> None:
        """Disarm the session: producers need not send notifications any more."""
        if self.armed:
            self.armed = self.clear = False
            try:
                await self._ask(_LISTEN_END.worker, (self._queues,), limit=_ARM_LIMIT)
            except (Error, OSError):
                log.debug("listen_end failed; opening a new session")


def jittered(seconds: float) -> float:
    return seconds * random.uniform(0.5, 1.5)
