"""Jobs in the hands of this process: which run, of which claim, and which claims are still open."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from tallybook._db.subject_ends import SubjectEnd
    from tallybook._worker.deadline import Guard

log = logging.getLogger("tallybook.worker")

current_job: ContextVar[Running | None] = ContextVar("tallybook_job", default=None)
"""The job that runs in this context: what every log line of a job is marked with."""


def _nothing(*_: object) -> None:
    """What is called until somebody wants to know."""


@dataclass(slots=True)
class Callbacks:
    """What the parts of a worker tell each other. Whoever wants to know sets its own function."""

    room: Callable[[], object] = _nothing
    """A queue that was full has a free slot: the last claim did not ask for it."""
    missed: Callable[[Running], object] = _nothing
    """A limit has let this job through, and it could not start in time."""
    abandoned: Callable[[], object] = _nothing
    """The number of abandoned handlers has changed."""
    scheduled: Callable[[timedelta], object] = _nothing
    """A job was scheduled to run after this delay."""
    followed: Callable[[Iterable[int]], object] = _nothing
    """These jobs, for which others may wait, have ended in the database."""
    permits: Callable[[Iterable[str]], object] = _nothing
    """Permits of these limits may be free, once the ends are in the database."""
    many: Callable[[], object] = _nothing
    """Many claims were made since the last heartbeat."""
    fair: Callable[[int, bool], object] = _nothing
    """So many jobs with fair keys were claimed; whether that was less than there are free slots for."""


@dataclass(slots=True)
class Lease:
    """One claim of this process, until all its attempts have ended in the database."""

    lease: str
    claim_id: int
    queue: str
    left: int = 0
    followed: bool = False
    permits: bool = False
    """Whether other jobs may wait for one of its jobs."""


class Running:
    """One attempt that this process holds. Plain slots: one is made for every job."""

    __slots__ = (
        "args", "attempt", "blocked_by", "cancel_reason", "crashes", "failures", "guard", "handle", "headers", "in_doubt",
        "interrupt", "job_id", "latest", "lease", "lost", "max_attempts", "options", "order_key", "own_end", "permits", "queue",
        "raised", "recorded", "task_name", "told", "worker_name",
    )  # fmt: skip

    job_id: int
    attempt: int
    task_name: str
    args: dict[str, Any]
    headers: dict[str, Any] | None
    failures: int
    crashes: int
    max_attempts: int | None
    blocked_by: str | None
    order_key: str | None

    def __init__(self, row: tuple[Any, ...], lease: Lease, worker_name: str) -> None:
        (
            self.job_id, self.attempt, self.task_name, self.args, self.headers, self.failures, self.crashes,
            self.max_attempts, self.blocked_by, self.order_key, options,
        ) = row  # fmt: skip
        self.options: dict[str, Any] | None = _options(options, self.job_id) if options else None
        self.queue = lease.queue
        self.lease = lease
        self.worker_name = worker_name
        if self.options and self.options.get("followed") is True:
            lease.followed = True
        self.handle: asyncio.Task[None] | None = None
        self.cancel_reason: str | None = None
        self.lost = False
        self.permits: list[str] | None = None
        """The keys of the limits of which it may hold a permit."""
        if self.blocked_by is None and self.options and "turn" in self.options:  # it came into line with them
            self.holds_permits()
        self.latest: float | None = None
        """A limit lets it start until then, on the loop's clock."""
        self.guard: Guard | None = None
        self.in_doubt = False
        """Its end may be in the database already, or be on its way there, in a transaction other than the finisher's."""
        self.own_end: SubjectEnd | None = None
        """The end that its handler has said in a transaction of its own; None, and in doubt: completed."""
        self.interrupt: Callable[[], object] | None = None
        """Cancels what its thread waits for in the database."""
        self.told: Callable[[str, Mapping[str, Any] | None], object] | None = None
        """Told how it ends, the verb and a failure's error, by whoever says so first; not that it completes as most do."""
        self.raised: BaseException
        """What ended it; not set before, since nearly all jobs complete."""
        self.recorded: Callable[[str], object]
        """Called with the state that its failure has led to; set by a tracer only."""

    def changed(self, args: Any, options: str | None) -> None:
        """What a producer has made of it since it was claimed."""
        self.args = args
        subject = (self.options or {}).get("subject_name")
        self.options = _options(options, self.job_id) if options else None
        if self.options is not None and subject is not None:
            self.options = {**self.options, "subject_name": subject}

    def holds_permits(self) -> None:
        """It may hold permits of all limits that can hold it."""
        self.holds([*(self.options or {}).get("limits", ()), f"queue:{self.queue}", f"task:{self.task_name}"])

    def holds(self, keys: Iterable[str]) -> None:
        """It may hold permits of these keys, which others wait for when it has ended."""
        self.permits = [*(self.permits or ()), *keys]
        self.lease.permits = True

    def __repr__(self) -> str:
        return f"<{self.task_name} {self.job_id} attempt {self.attempt}>"


def _options(text: str, job_id: int) -> dict[str, Any]:
    """What a job asks for. SQL may have put in what Python cannot read: 5000 digits, 1000 levels; it must not stop a claim."""
    try:
        return _parsed(text)
    except (ValueError, RecursionError) as error:
        log.error("job %s: its options cannot be read, so it runs without them: %s", job_id, error)
        return {}


@lru_cache(maxsize=1024)  # the jobs of one task say mostly the same; whoever gets it leaves it as it is
def _parsed(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


class Reservation(Protocol):
    """Slots that a claim on its way has asked for."""

    def over(self) -> None: ...


@dataclass(slots=True, eq=False)
class Book:
    """What this process has claimed and not yet seen ended. Only touched from the event loop, read by the heartbeat."""

    free: dict[str, int]
    running: dict[int, Running] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    last_claim: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    on: Callbacks = field(default_factory=Callbacks)
    """Shared by all that have the book."""
    held: Mapping[int, Running] = field(default_factory=dict)
    """What is claimed and waits until it may start: the admission's."""
    shared: ClassVar[bool] = False
    """Whether other nodes' workers take slots from the same count, see shares.py. What follows is simple where none do."""

    def room(self, queue: str) -> int:
        """How many slots of a queue the next claim may ask for."""
        return max(0, self.free[queue])

    def has_room(self) -> bool:
        """Whether any queue has a slot for the next claim."""
        return any(free > 0 for free in self.free.values())

    def asks(self, slots: Mapping[str, int]) -> Reservation | None:
        """Take the slots that the next claim asks for; None: nobody else could take them."""
        return None

    def surplus(self, jobs: list[Running]) -> Sequence[Running]:
        """Those of these claimed jobs that have no slot; they are taken out of the list."""
        return ()

    def rests(self) -> None:
        """It claims nothing for now."""

    def lend(self) -> None:
        """The server has not answered for a while."""

    def take_turn(self) -> bool:
        """Whether a job that has to run alone may do so now."""
        return True

    def end_turn(self) -> None:
        """It has ended."""

    @property
    def open_from(self) -> int:
        """The watermark: no claim of this process with a lower id has an attempt whose end was not seen committed."""
        # A crash of the server can set the numbers back, so the first that is open need not be the lowest, and what was
        # claimed last before it says nothing about the next one: see `forget`.
        last = self.last_claim  # before the look: a claim that is opened after it has a higher number
        return min(tuple(self.leases), default=last + 1 if last else 0)

    def forget(self) -> None:
        """The connection of the claims was lost: the next claim's number may be lower than the last one's."""
        self.last_claim = 0

    def opened(self, lease: Lease, jobs: int) -> None:
        """A claim came back with so many jobs."""
        lease.left = jobs
        self.leases[lease.claim_id] = lease  # before last_claim: the heartbeat may look in between
        self.last_claim = lease.claim_id
        self.free[lease.queue] -= jobs

    def ended(self, lease: Lease, jobs: int = 1) -> None:
        """The database has seen the end of so many attempts of this claim."""
        lease.left -= jobs
        # A number can be given out twice, where a crash or a failover has set the numbers back.
        if lease.left <= 0 and self.leases.get(lease.claim_id) is lease:
            del self.leases[lease.claim_id]

    def freed(self, running: Running) -> None:
        """A handler has returned: its slot is free, whether or not the end is in the database already."""
        # A worker that was given up may run the job's next attempt by now.
        if self.running.get(running.job_id) is running:
            del self.running[running.job_id]
        self.free[running.queue] += 1
        self.changed.set()
        if self.free[running.queue] == 1:
            self.on.room()

    def rested(self, running: Running) -> None:
        """A handler returned a while ago: its slot is free now."""
        self.freed(running)
