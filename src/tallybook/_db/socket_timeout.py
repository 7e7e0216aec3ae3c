"""A time limit for answers, for peers that are silent but not gone.

TCP's own time-outs (CONNECT in link.py) do not detect a proxy, a pooler or a NAT that keeps the socket but drops its
data. Cancelling the waiting coroutine would not help either: psycopg then asks the server over another connection to
cancel the statement, and waits for that. So the socket is shut down, as if the peer had done it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import psycopg


class NoAnswer(psycopg.OperationalError):
    """The peer was silent for too long; the connection was cut."""


def cut(conn: Any) -> None:
    """Shut down both directions of this connection's socket; waiting calls find it closed."""
    with suppress(psycopg.Error, OSError, ValueError), socket.socket(fileno=os.dup(conn.pgconn.socket)) as same:
        same.shutdown(socket.SHUT_RDWR)


class SocketTimeout:
    """`with SocketTimeout(conn, 5.0): await ...`: cut the connection after the given seconds, and raise NoAnswer."""

    __slots__ = ("_conn", "_due", "_loop", "_seconds", "_timer", "passed")

    def __init__(self, conn: Any, seconds: float) -> None:
        self._conn = conn
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self.passed = False

    def __enter__(self) -> Self:
        self._due = self._loop.time() + self._seconds
        self._timer = self._loop.call_at(self._due, self._over)
        return self

    def _over(self) -> None:
        # Late by more than a second: the loop was blocked. The answer may already be there.
        if self._loop.time() > self._due + 1.0:
            self.__enter__()
            return
        self.passed = True
        cut(self._conn)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self.passed and isinstance(error, psycopg.Error | OSError):
            raise NoAnswer(f"no answer within {self._seconds:g} s") from error


class ThreadSocketTimeout:
    """The same for a synchronous connection in a thread."""

    def __init__(self, conn: Any, seconds: float) -> None:
        self._conn = conn
        self._seconds = seconds
        self._passed = threading.Event()
        self._timer = threading.Timer(seconds, self._over)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def _over(self) -> None:
        self._passed.set()
        cut(self._conn)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._passed.is_set() and isinstance(error, psycopg.Error | OSError):
            raise NoAnswer(f"no answer within {self._seconds:g} s") from error
