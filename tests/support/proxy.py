"""A small TCP proxy between a test and its server, which can fail like a network.

with Proxy(dsn) as proxy:
    psycopg.connect(proxy.dsn)
    proxy.silent = True            # sockets stay open, data is dropped
    proxy.cut()                    # every connection is closed; new ones are accepted
    proxy.cut_at(b"commit")        # the client that sends this is cut off, after the server has it
    proxy.cut_at(b"commit", deliver=False)   # ... and the server never sees it
"""

import math
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from psycopg.conninfo import conninfo_to_dict, make_conninfo


def upstream(dsn: str) -> Callable[[], str | tuple[str, int]]:
    """Return a function with the address of this DSN's server, for chaos.proxy."""
    parts = conninfo_to_dict(dsn)
    host, port = str(parts["host"]), int(parts.get("port") or 5432)
    return lambda: f"{host}/.s.PGSQL.{port}" if host.startswith("/") else (host, port)


class Proxy:
    """Listens on 127.0.0.1; `dsn` is the same database through the proxy."""

    def __init__(self, dsn: str) -> None:
        self._target = upstream(dsn)()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=self._listening.getsockname()[1], sslmode="disable")
        self.silent = False
        self.refusing = False
        self.accepts = math.inf
        """How many connections it accepts before it refuses all."""
        self.accepted = 0
        self.times_cut = 0
        self._cut_at: tuple[bytes, bool] | None = None
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # a mere close() would leave the thread in accept() for ever
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        """Cut every connection. Its threads close the sockets, so none of them meets a number that is in use again."""
        with self._lock:
            for one in self._open:
                self._end(one)

    def cut_at(self, words: bytes, *, deliver: bool = True) -> None:
        """Cut off the next client that sends these bytes; with `deliver` the server gets them first."""
        self._cut_at = (words, deliver)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self.accepted += 1
            if self.refusing or self.accepted > self.accepts:
                client.close()
                continue
            server = socket.socket(socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET)
            try:
                server.connect(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            threading.Thread(target=self._serve, args=(client, server), daemon=True).start()

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        back = threading.Thread(target=self._pump, args=(server, client, False), daemon=True)
        back.start()
        self._pump(client, server, True)
        back.join()
        with self._lock:
            self._open -= {client, server}
            client.close()
            server.close()

    def _pump(self, source: socket.socket, to: socket.socket, from_client: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if self.silent:
                    continue
                if from_client and self._cut_at and self._cut_at[0] in data:
                    deliver, self._cut_at = self._cut_at[1], None
                    self.times_cut += 1
                    self._end(source)  # before the server can answer
                    if not deliver:
                        self._end(to)
                        return
                    to.sendall(data)
                    with suppress(OSError):  # drop the answer, then close, as the kernel would
                        to.settimeout(0.5)
                        to.recv(1)
                    self._end(to)
                    return
                to.sendall(data)
        self._end(to)

    def _end(self, one: socket.socket) -> None:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
