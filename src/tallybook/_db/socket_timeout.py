"""A time limit for answers, for peers that are silent but not gone.

TCP's own time-outs (CONNECT in link.py) do not detect a proxy, a pooler or a NAT that keeps the socket but drops its
data. Cancelling the waiting coroutine would not help either: psycopg then asks the server over another connection to
cancel the statement, and waits for that. So the socket is shut down, as if the peer had done it.
"""

import asyncio
import os
import socket
import threading
from contextlib import suppress
from typing import Any, Self

import psycopg


class NoAnswer(psycopg.OperationalError):
    """The peer was silent for too long; the connection was cut."""


def cut(conn: Any) -> None:
    """Shut down both directions of this connection's socket; waiting calls find it closed."""
    with suppress(psycopg.Error, OSError, ValueError), socket.socket(fileno=os.dup(conn.pgconn.socket)) as same:
        same.shutdown(socket.SHUT_RDWR)


class _Limit:
    __slots__ = ("_conn", "_seconds", "_timer", "passed")

    _timer: asyncio.TimerHandle | threading.Timer

    def __init__(self, conn: Any, seconds: float) -> None:
        self._conn = conn
        self._seconds = seconds
        self.passed = False

    def _cut(self) -> None:
        self.passed = True
        cut(self._conn)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._timer.cancel()
        if self.passed and isinstance(error, psycopg.Error | OSError):
            raise NoAnswer(f"no answer within {self._seconds:g} s") from error


class SocketTimeout(_Limit):
    """`with SocketTimeout(conn, 5.0): await ...`: cut the connection after the given seconds, and raise NoAnswer."""

    __slots__ = ("_due",)

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + self._seconds
        self._timer = loop.call_at(self._due, self._over)
        return self

    def _over(self) -> None:
        # Late by more than a second: the loop was blocked. The answer may already be there.
        if asyncio.get_running_loop().time() > self._due + 1.0:
            self.__enter__()
        else:
            self._cut()


class ThreadSocketTimeout(_Limit):
    """The same for a synchronous connection in a thread."""

    def __enter__(self) -> Self:
        self._timer = threading.Timer(self._seconds, self._cut)
        self._timer.daemon = True
        self._timer.start()
        return self
