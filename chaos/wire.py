"""The part of PostgreSQL's protocol that the fault proxy needs: the ends of messages, and their statements."""

from __future__ import annotations

import struct

# Requests that a client may send before its first typed message, by the number in place of the protocol version.
_SSL, _GSS, _CANCEL = 80877103, 80877104, 80877102
_HEAD = struct.Struct("!I")


class Requests:
    """Parser of one client's messages; it stores the names of prepared statements."""

    def __init__(self) -> None:
        self._unread = bytearray()
        self._statements: dict[bytes, str] = {}
        self._started = False
        self.opaque = False
        """Whether messages cannot be parsed (any more): encrypted, or not this protocol."""

    def feed(self, chunk: bytes) -> list[tuple[bytes, str | None]]:
        """Return each complete message, with the text of the statement that it runs, or None.

        An incomplete message is kept: the server could not use half a message either.
        """
        if self.opaque:
            return [(chunk, None)]
        self._unread += chunk
        found: list[tuple[bytes, str | None]] = []
        while (size := self._size()) and len(self._unread) >= size:
            message = bytes(self._unread[:size])
            del self._unread[:size]
            found.append((message, self._read(message)))
        if self.opaque:
            found.append((bytes(self._unread), None))
            self._unread.clear()
        return found

    def rest(self) -> bytes:
        """Return the received part of an incomplete message."""
        return bytes(self._unread)

    def encrypted(self) -> None:
        """Stop parsing, because the server has agreed to encrypt."""
        self.opaque = True

    def _size(self) -> int:
        at = 1 if self._started else 0
        if len(self._unread) < at + 4:
            return 0
        size: int = at + _HEAD.unpack_from(self._unread, at)[0]
        if size < at + 4:
            self.opaque = True
            return 0
        return size

    def _read(self, message: bytes) -> str | None:
        if not self._started:
            code = _HEAD.unpack_from(message, 4)[0] if len(message) >= 8 else 0
            self._started = code not in (_SSL, _GSS, _CANCEL)
            return None
        kind, body = message[:1], message[5:]
        if kind == b"Q":
            return body.rstrip(b"\0").decode(errors="replace")
        if kind == b"P":
            name, _, rest = body.partition(b"\0")
            self._statements[name] = rest.partition(b"\0")[0].decode(errors="replace")
        elif kind == b"B":
            return self._statements.get(body.partition(b"\0")[2].partition(b"\0")[0])
        return None


def is_ready(answer: bytes) -> bool:
    """Return whether a server's answer ends with ReadyForQuery, so that all requests are done, also a commit."""
    return answer[-6:-1] == b"Z\0\0\0\5"
