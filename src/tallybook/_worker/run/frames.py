"""Messages between a worker and its child processes: JSON objects over a socket, each after its length.

An outcome is sent as the name of its class and its values.
"""

import json
import socket
import struct
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from tallybook._model.failure import safe_text
from tallybook._model.outcome import (
    Cancel,
    Complete,
    Dead,
    Drop,
    Kill,
    Outcome,
    Reject,
    Reschedule,
    Snooze,
    SubjectOutcome,
)
from tallybook._model.payload import encode
from tallybook._worker.run.ending import details_text
from tallybook._worker.run.verbs import Postponed

_HEAD = struct.Struct("!I")
HEAD = _HEAD.size
MOST = 64 << 20
"""Maximum bytes of one message: args, a result and a checkpoint are far smaller."""


def pack(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    if len(body) > MOST:
        raise ValueError(f"a message of {len(body)} bytes")
    return _HEAD.pack(len(body)) + body


def size(head: bytes) -> int:
    (length,) = _HEAD.unpack(head)
    if length > MOST:
        raise ValueError(f"a message of {length} bytes")
    return int(length)


def receive(sock: socket.socket) -> dict[str, Any] | None:
    """Wait for the next message; None: the other side has closed its socket, or is gone."""
    head = _exactly(sock, HEAD)
    body = None if head is None else _exactly(sock, size(head))
    return None if body is None else json.loads(body)


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = sock.recv(min(count - len(parts), 1 << 20))
        except OSError:  # reset, or closed by a handler that closes every file
            return None
        if not part:
            return None
        parts += part
    return bytes(parts)


KINDS = (Snooze, Cancel, Dead, Postponed, Reschedule, Complete, Drop, Kill, Reject)
# Which of an outcome's values are times. In JSON a duration is [days, seconds, microseconds], and an instant is text.
_TIMES: dict[str, tuple[int, ...]] = {"Snooze": (0, 1), "Reschedule": (0,), "Reject": (3,)}


def to_frame(outcome: Outcome, task: str) -> dict[str, Any]:
    """Return JSON values. Raises PayloadError for args that cannot be stored; the worker checks them with the task."""
    kind = next(kind.__name__ for kind in KINDS if isinstance(outcome, kind))
    values: list[Any] = [] if isinstance(outcome, Postponed) else list(outcome.args)
    for at in _TIMES.get(kind, ()):
        when = values[at]
        if isinstance(when, timedelta):
            values[at] = [when.days, when.seconds, when.microseconds]
        elif when is not None:
            values[at] = when.isoformat()
    if isinstance(outcome, Cancel | Dead | Kill | Reject):
        values[0] = safe_text(values[0])
    if isinstance(outcome, Reject):
        values[1] = json.loads(details_text(outcome, task))
    elif isinstance(outcome, SubjectOutcome) and outcome.new_args is not None:
        values[-1] = json.loads(encode(outcome.new_args, task=task))
    return {"kind": kind, "values": values}


def from_frame(frame: dict[str, Any]) -> Outcome:
    """Rebuild the outcome; its values were checked when it was made."""
    kind = next(kind for kind in KINDS if kind.__name__ == frame["kind"])
    values = list(frame["values"])
    for at in _TIMES.get(frame["kind"], ()):
        if values[at] is not None:
            values[at] = timedelta(*values[at]) if isinstance(values[at], list) else datetime.fromisoformat(values[at])
    outcome = kind.__new__(kind)
    Exception.__init__(outcome, *values)
    return outcome
