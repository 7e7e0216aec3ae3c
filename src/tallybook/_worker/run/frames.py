"""Messages between a worker and its child processes: JSON objects over a socket, each with its length in front."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

_HEAD = struct.Struct("!I")
HEAD = _HEAD.size
MOST = 64 << 20
"""Bytes of one message: args, a result and a checkpoint are far smaller."""


def pack(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    if len(body) > MOST:
        raise ValueError(f"a message of {len(body)} bytes")
    return _HEAD.pack(len(body)) + body


def size(head: bytes) -> int:
    """How long the message after this head is."""
    (length,) = _HEAD.unpack(head)
    if length > MOST:
        raise ValueError(f"a message of {length} bytes")
    return int(length)


def unpack(body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(body)
    return found


def receive(sock: socket.socket) -> dict[str, Any] | None:
    """Wait for the next message; None: the other side has closed, or is gone."""
    head = _exactly(sock, HEAD)
    body = None if head is None else _exactly(sock, size(head))
    return None if body is None else unpack(body)


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = sock.recv(min(count - len(parts), 1 << 20))
        except OSError:  # reset, or closed by a handler that closes all that it finds
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)
