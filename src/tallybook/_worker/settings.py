"""All settings of a worker, in one frozen value."""

import os
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeAlias

from tallybook._model.durations import parse_duration
from tallybook._model.options import check_name
from tallybook.errors import ConfigError

Queues: TypeAlias = Mapping[str, int] | Iterable[str] | str | None
SLOTS = 10
# Seconds. The most that a start, once admitted by a limit, is put ahead for slow answers; it may be late by as much.
FAR_AHEAD = 1.0
LOOPBACK = "127.0.0.1"
_DURATIONS = (
    "poll", "slot_pause", "heartbeat", "lease", "rescue_look", "stop_timeout", "abort_timeout", "suspect_wait",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Options of a worker, each with its default. Durations are `timedelta` or text: "500 ms"."""

    queues: Mapping[str, int] = field(default_factory=lambda: {"default": SLOTS})
    """Queue name to slots: the number of its jobs that run at the same time in this process."""
    name: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}")
    """The worker's name wherever it is shown. By default it is unique, and host and process id lead to the process."""
    notify: bool = True
    """Hold a session: notifications wake the worker, and the others notice at once when the session ends.
    False, or behind a pooler in transaction mode (detected): only poll; the others notice the death after the lease."""
    direct_dsn: str | None = None
    """A DSN of the same database that bypasses a pooler, for the session; None: TALLYBOOK_DIRECT_DSN, if set."""
    poll: timedelta = timedelta(seconds=1)
    """How often an idle worker checks for jobs, jittered by half; the fallback behind notifications."""
    slot_pause: timedelta = timedelta(0)
    """How long a slot rests after a job before the next one; a stop does not wait for it."""
    children: int | None = None
    """Maximum child processes for tasks with process=True; more such jobs wait in their slots. None: one per slot."""
    heartbeat: timedelta = timedelta(seconds=10)
    """How often the worker sends its heartbeat."""
    lease: timedelta = timedelta(seconds=30)
    """The other workers treat a worker as dead after this time without a heartbeat."""
    maintenance: bool = True
    """Run maintenance and schedules, too. False: only claim and run; other workers, or a program, must do the rest."""
    rescue_look: timedelta | None = None
    """The longest interval between checks for dead workers' jobs; with few workers it checks more often. None: see the
    rescue service in https://github.com/tallybook/tallybook/blob/main/docs/services.md."""
    stop_timeout: timedelta = timedelta(seconds=25)
    """How long a stop waits for running jobs."""
    abort_timeout: timedelta = timedelta(seconds=5)
    """How long handlers may take to end after an abort or their deadline, and child processes after a cancel."""
    suspect_wait: timedelta = timedelta(seconds=60)
    """How long claiming pauses for the process to become idle, for a job that has to run alone."""
    max_abandoned: int | None = None
    """This many handlers that do not end after their deadline stop the worker, to be started again; None: its slots."""
    metrics_port: int | None = None
    """Serve /metrics, /healthz and /readyz on this port; 0: any free port; None: no endpoint."""
    metrics_host: str = LOOPBACK
    """The address to listen on. There is no password: anyone who reaches it can read the names of queues and tasks."""

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
            hint = "Else one late heartbeat loses all jobs"
            raise ConfigError("lease", self.lease, "must be at least twice the heartbeat", hint=hint)

    def _check_metrics(self) -> None:
        port, host = self.metrics_port, self.metrics_host
        if port is None and host != LOOPBACK:
            raise ConfigError("metrics_host", host, "needs a metrics_port")
        if port is not None and (not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65_535):
            raise ConfigError("metrics_port", port, "must be from 0 to 65535")
        if not host.strip():
            raise ConfigError("metrics_host", host, "must be an address of this machine", hint="0.0.0.0 means all")

    @property
    def slots(self) -> int:
        """Return how many jobs of all queues run at the same time."""
        return sum(self.queues.values())


def parse_queues(queues: Queues) -> dict[str, int]:
    """Parse `{"mail": 10}`, `["mail", "default=5"]` or `"mail=10,default"`; None: the queue default."""
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
