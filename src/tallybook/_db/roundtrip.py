"""Several prepared statements in one round trip, each committed before the next one starts.

This reduces the latency of a claim: `execute` of an asyncio connection waits for its socket several times per
statement, 0.2 ms each, and a claim is two statements. Here libpq's pipeline mode and the watch on its socket last as
long as the connection, and one future waits for the last answer. Only this object uses the connection.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import adapt, errors, pq

Params = Sequence[bytes | None]
_OK = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)


class RoundTrips:
    """Statements by name over one connection, prepared unless there is a pooler. One call at a time."""

    def __init__(self, conn: psycopg.AsyncConnection[Any], statements: dict[str, str], *, prepared: bool) -> None:
        self._conn = conn
        self._pg = conn.pgconn
        self._statements = statements
        self._prepared = prepared
        self._answer: asyncio.Future[list[Any]] | None = None
        self._results: list[Any] = []
        self._left = 0
        self._loop = asyncio.get_running_loop()
        self._socket = conn.fileno()
        self._watching = False

    async def open(self) -> None:
        """Prepare the statements; from now on nothing else may use the connection."""
        self._pg.enter_pipeline_mode()
        self._loop.add_reader(self._socket, self._readable)
        self._watching = True
        if not self._prepared:  # a pooler may run each transaction on another session, which does not have the name
            return
        for name, text in self._statements.items():
            self._pg.send_prepare(name.encode(), text.encode())
        self._rows(await self._wait(1))

    def close(self) -> None:
        """Stop watching the socket. Call it before the connection is closed."""
        self._end(psycopg.OperationalError("the connection was closed"))

    def _unwatch(self) -> None:
        # Once, and immediately: libpq closes a lost socket itself, and any new socket may get the same number.
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._socket)

    async def run(self, *calls: tuple[str, Params]) -> list[list[tuple[Any, ...]]]:
        """Return the rows of each call, in order. Raises the first error among them; earlier calls are committed."""
        try:
            for place, (name, params) in enumerate(calls):
                if place:
                    self._pg.pipeline_sync()
                if self._prepared:
                    self._pg.send_query_prepared(name.encode(), list(params))
                else:
                    self._pg.send_query_params(self._statements[name].encode(), list(params))
        except psycopg.Error:
            self._unwatch()
            raise
        return self._rows(await self._wait(len(calls)))

    def _rows(self, results: list[Any]) -> list[list[tuple[Any, ...]]]:
        rows = []
        for result in results:
            if result.status not in _OK:
                raise errors.error_from_result(result)
            transformer = adapt.Transformer(self._conn)
            transformer.set_pgresult(result)
            rows.append(transformer.load_rows(0, result.ntuples, tuple))
        return rows

    async def _wait(self, syncs: int) -> list[Any]:
        try:
            self._pg.pipeline_sync()
        except psycopg.Error:
            self._unwatch()
            raise
        self._results, self._left = [], syncs
        self._answer = self._loop.create_future()
        self._flush()
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.close()  # an unread answer is coming, so the connection is unusable
            await self._conn.close()
            raise

    def _flush(self) -> None:
        # The data is small: it fits into the socket's buffer unless the server has stopped reading.
        try:
            if self._watching and self._pg.flush():
                self._loop.call_later(0.001, self._flush)
        except psycopg.Error as error:
            self._end(error)

    def _readable(self) -> None:
        try:
            self._pg.consume_input()
            while self._left and not self._pg.is_busy():
                result = self._pg.get_result()
                if result is None:
                    continue
                if result.status == pq.ExecStatus.PIPELINE_SYNC:
                    self._left -= 1
                elif result.status != pq.ExecStatus.PIPELINE_ABORTED:
                    self._results.append(result)
        except psycopg.Error as error:
            self._end(error)
            return
        if self._pg.status != pq.ConnStatus.OK:
            self._end(psycopg.OperationalError("the connection was lost"))
        elif not self._left:
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self._unwatch()
        if self._answer and not self._answer.done():
            if error is None:
                self._answer.set_result(self._results)
            else:
                self._answer.set_exception(error)
