"""As much of PostgreSQL's protocol as the fault proxy needs: where a message ends, and which statement it runs."""

from __future__ import annotations

import struct

# What a client may say before its first typed message, by the number in the place of the protocol version.
_SSL, _GSS, _CANCEL = 80877103, 80877104, 80877102
_HEAD = struct.Struct("!I")


class Requests:
    """The messages of one client, in the order in which they come; keeps the names of its prepared statements."""

    def __init__(self) -> None:
        self._unread = bytearray()
        self._statements: dict[bytes, str] = {}
        self._started = False
        self.opaque = False
        """Nothing can be told apart (any more): encrypted, or not this protocol."""

    def feed(self, chunk: bytes) -> list[tuple[bytes, str | None]]:
        """What is complete by now: each message, and the text of the statement that it runs, if it runs one.

        What is not complete is kept: the server could do nothing with half a message either.
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
        """What has come of an incomplete message."""
        return bytes(self._unread)

    def encrypted(self) -> None:
        """The server has agreed to encrypt: pass on what comes as it is."""
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
    """Whether a server's answer ends with ReadyForQuery: all that was asked is done, a commit included."""
    return answer[-6:-1] == b"Z\0\0\0\5"
