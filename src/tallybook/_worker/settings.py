"""Everything that a worker can be told, in one frozen value."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from tallybook._model.durations import parse_duration
from tallybook._model.options import check_name
from tallybook.errors import ConfigError

SLOTS = 10
# A start that a limit lets through is put ahead by what the answers take, and may be late by as much, up to so many seconds.
FAR_AHEAD = 1.0
LOOPBACK = "127.0.0.1"
_DURATIONS = (
    "poll", "slot_pause", "heartbeat", "lease", "rescue_look", "stop_timeout", "abort_timeout", "suspect_wait",
)  # fmt: skip


def default_name() -> str:
    """Host, process and a random tail: unique, and a person finds the process by it."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}"


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Options of a worker, each with its default. Durations are `timedelta`, or words: "500 ms"."""

    queues: Mapping[str, int] = field(default_factory=lambda: {"default": SLOTS})
    """Queue name to slots: how many jobs of it run at once in this process."""
    name: str = field(default_factory=default_name)
    """Shown wherever the worker appears."""
    notify: bool = True
    """Hold a session: sleep on it and be woken, be missed at once when it ends. False, or behind a pooler in transaction
    mode, which is noticed: only poll, and be missed after the lease."""
    direct_dsn: str | None = None
    """Past a pooler, to the same database: the session is held there; None: TALLYBOOK_DIRECT_DSN, else none."""
    poll: timedelta = timedelta(seconds=1)
    """How often an idle worker looks for jobs, jittered by half; the backstop behind notifications."""
    slot_pause: timedelta = timedelta(0)
    """How long a slot rests when its job has ended, before the next one; a stop does not wait for it."""
    children: int | None = None
    """At most this many child processes for tasks with process=True; more such jobs wait in their slots. None: one a slot."""
    heartbeat: timedelta = timedelta(seconds=10)
    """How often the worker says that it lives."""
    lease: timedelta = timedelta(seconds=30)
    """After this time without a heartbeat a worker is dead to the others."""
    maintenance: bool = True
    """Run the services and schedules beside jobs. False: only claim and run; other workers, or a program, have to do it."""
    rescue_look: timedelta | None = None
    """How often at least this worker looks for the work of dead ones, more often where workers are few; None: as the service
    rescue says, see https://github.com/tallybook/tallybook/blob/main/docs/services.md."""
    stop_timeout: timedelta = timedelta(seconds=25)
    """How long a stop waits for running jobs."""
    abort_timeout: timedelta = timedelta(seconds=5)
    """How long handlers have to end that were aborted, cancelled, or are past their deadline."""
    suspect_wait: timedelta = timedelta(seconds=60)
    """How long claiming rests until the process is idle, for a job that has to run alone."""
    max_abandoned: int | None = None
    """So many handlers that do not end after their deadline make the worker stop, to be started again; None: its slots."""
    metrics_port: int | None = None
    """Answer /metrics, /healthz and /readyz on this port, 0: on any free one; None: listen to nothing."""
    metrics_host: str = LOOPBACK
    """On this address. Who reaches it can read the names of queues and tasks: there is no password."""

    def __post_init__(self) -> None:
        if not self.queues:
            raise ConfigError("queues", {}, "a worker needs at least one queue")
        for queue, slots in self.queues.items():
            if not isinstance(slots, int) or isinstance(slots, bool) or not 1 <= slots <= 100_000:
                raise ConfigError("queues", f"{queue}={slots}", "slots must be from 1 to 100000")
            check_name("queues", queue, 64)
        for option in _DURATIONS:
            if getattr(self, option) is not None:
                object.__setattr__(self, option, parse_duration(getattr(self, option), option=option))
        for option in ("poll", "heartbeat", "lease", "rescue_look"):
            if (given := getattr(self, option)) is not None and given <= timedelta(0):
                raise ConfigError(option, getattr(self, option), "must be above 0")
        for option in ("children", "max_abandoned"):
            if (given := getattr(self, option)) is not None and given < 1:
                raise ConfigError(option, given, "must be at least 1")
        self._check_metrics()
        if self.lease < 2 * self.heartbeat:
            raise ConfigError(
                "lease",
                self.lease,
                "must be at least twice the heartbeat",
                hint="Else one late heartbeat loses all jobs",
            )

    def _check_metrics(self) -> None:
        port, host = self.metrics_port, self.metrics_host
        if port is None and host != LOOPBACK:
            raise ConfigError("metrics_host", host, "needs a metrics_port")
        if port is not None and (not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65_535):
            raise ConfigError("metrics_port", port, "must be from 0 to 65535")
        if not host.strip():
            raise ConfigError("metrics_host", host, "must be an address of this machine", hint="0.0.0.0 means all")

    @property
    def most_abandoned(self) -> int:
        """`max_abandoned`, or as many as there are slots."""
        return self.slots if self.max_abandoned is None else self.max_abandoned

    @property
    def most_children(self) -> int:
        """`children`, or as many as there are slots."""
        return self.slots if self.children is None else min(self.children, self.slots)

    @property
    def slots(self) -> int:
        """How many jobs of all queues run at once."""
        return sum(self.queues.values())


def parse_queues(queues: Mapping[str, int] | Iterable[str] | str | None) -> dict[str, int]:
    """`{"mail": 10}`, `["mail", "default=5"]` or `"mail=10,default"`; None: the queue default."""
    if queues is None:
        return {"default": SLOTS}
    if isinstance(queues, Mapping):
        return dict(queues)
    parts = queues.split(",") if isinstance(queues, str) else list(queues)
    found: dict[str, int] = {}
    for part in parts:
        name, equals, slots = part.strip().partition("=")
        name, slots = name.strip(), slots.strip()
        if equals and not slots.isdecimal():
            raise ConfigError("queues", part, f"{slots!r} is not a number of slots", hint="Write mail=10,default")
        if not name:
            raise ConfigError("queues", part, "a queue needs a name", hint="Write mail=10,default")
        if name in found:
            raise ConfigError("queues", part, f"queue {name!r} is named twice")
        found[name] = int(slots) if equals else SLOTS
    return found
