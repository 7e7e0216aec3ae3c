"""The jobs that this process holds: which run, their claims, and which claims are still open."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from tallybook._maintenance.service import happens
from tallybook._task import Task

if TYPE_CHECKING:
    from tallybook._db.ends import SubjectEnd
    from tallybook._worker.deadline import Guard

log = logging.getLogger("tallybook.worker")

AnyTask: TypeAlias = Task[..., Any]

current_job: ContextVar[Running | None] = ContextVar("tallybook_job", default=None)
"""The job that runs in this context: each log line of a job is marked with it."""


def spawn(kept: set[asyncio.Task[None]], running: Coroutine[Any, Any, None], name: str | None = None) -> None:
    """Run this in an asyncio task of its own; the set keeps the task until it ends."""
    task = asyncio.get_running_loop().create_task(running, name=name)
    kept.add(task)
    task.add_done_callback(kept.discard)


def _nothing(*_: object) -> None: ...


@dataclass(slots=True)
class Callbacks:
    """Notifications between the parts of a worker. Each part sets the callbacks that it needs."""

    room: Callable[[], object] = _nothing
    """A queue that was full has a free slot: the last claim did not ask for it."""
    missed: Callable[[Running], object] = _nothing
    """A limit admitted this job, but it could not start in time."""
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
    """This many jobs with fair keys were claimed; whether that was fewer than the free slots."""


@dataclass(slots=True, eq=False)
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
    """One attempt that this process holds. It has plain slots, because one is made for every job."""

    __slots__ = (
        "args", "attempt", "blocked_by", "cancel_reason", "crashes", "failures", "guard", "handle", "headers",
        "in_doubt", "interrupt", "job_id", "latest", "lease", "lost", "max_attempts", "options", "order_key",
        "own_end", "permits", "queue", "raised", "recorded", "task_name", "told", "worker_name",
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
        """Keys of the limits whose permits it may hold."""
        if self.blocked_by is None and self.options and "turn" in self.options:  # it was queued with its permits
            self.holds_permits()
        self.latest: float | None = None
        """A limit lets it start until this time of the loop's clock."""
        self.guard: Guard | None = None
        self.in_doubt = False
        """Its end may be stored already, or be about to commit, in a transaction other than the finisher's."""
        self.own_end: SubjectEnd | None = None
        """The end that its handler set in its own transaction; None while in doubt: completed."""
        self.interrupt: Callable[[], object] | None = None
        """Cancels the database statement that its thread waits for."""
        self.told: Callable[[str, Mapping[str, Any] | None], object] | None = None
        """Called with the verb and a failure's error when the end is known; not for a normal completion."""
        self.raised: BaseException
        """The error that ended it; not set before, since nearly all jobs complete."""
        self.recorded: Callable[[str], object]
        """Called with the state after its failure; set by a tracer only."""

    def changed(self, args: Any, options: str | None) -> None:
        """Apply a producer's changes to the job since it was claimed."""
        self.args = args
        subject = (self.options or {}).get("subject_name")
        self.options = _options(options, self.job_id) if options else None
        if self.options is not None and subject is not None:
            self.options = {**self.options, "subject_name": subject}

    def holds_permits(self) -> None:
        """Note that it may hold permits of every limit that applies to it."""
        self.holds([*(self.options or {}).get("limits", ()), f"queue:{self.queue}", f"task:{self.task_name}"])

    def holds(self, keys: Iterable[str]) -> None:
        """Note that it may hold permits of these keys; other jobs may wait for them to be free."""
        self.permits = [*(self.permits or ()), *keys]
        self.lease.permits = True

    def __repr__(self) -> str:
        return f"<{self.task_name} {self.job_id} attempt {self.attempt}>"


def _options(text: str, job_id: int) -> dict[str, Any]:
    """Parse a job's options. A claim survives what only SQL can read: 5000 digits, 1000 levels."""
    try:
        return _parsed(text)
    except (ValueError, RecursionError) as error:
        log.error("job %s: its options cannot be read, so it runs without them: %s", job_id, error)
        return {}


@lru_cache(maxsize=1024)  # jobs of one task mostly have equal options; callers must not change the result
def _parsed(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


@dataclass(slots=True, eq=False)
class Book:
    """Jobs that this process has claimed and not seen end. Only the event loop changes it; the heartbeat reads it."""

    free: dict[str, int]
    running: dict[int, Running] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    last_claim: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    on: Callbacks = field(default_factory=Callbacks)
    """Shared by all parts that have the book."""
    held: Mapping[int, Running] = field(default_factory=dict)
    """Jobs that are claimed and wait to start; they belong to the admission."""

    def room(self, queue: str) -> int:
        """Return how many slots of a queue the next claim may ask for."""
        return max(0, self.free[queue])

    def has_room(self) -> bool:
        return any(free > 0 for free in self.free.values())

    def surplus(self, jobs: list[Running]) -> Sequence[Running]:
        """Remove from the list, and return, the claimed jobs that have no slot."""
        return ()

    def rests(self) -> None:
        """Note that the worker claims nothing for now."""

    def take_turn(self) -> bool:
        """Return whether a job that has to run alone may run now."""
        return True

    def end_turn(self) -> None:
        """Note that the job that ran alone has ended."""

    async def until(self, condition: Callable[[], bool], limit: float | None, stops: Callable[[], bool]) -> bool:
        """Wait for a condition that holds after some change; False at `limit`, on the monotonic clock, or at a stop."""
        while not condition():
            left = None if limit is None else limit - time.monotonic()
            if stops() or (left is not None and left <= 0):
                return False
            self.changed.clear()
            if not await happens(self.changed, left):
                return condition()
        return True

    @property
    def open_from(self) -> int:
        """The watermark: every attempt of this process's claims with a lower id has been seen to end, committed."""
        # A server crash can reset the ids. So the first open claim need not have the lowest id, and the last claim
        # before the crash does not bound the next one: see `forget`.
        last = self.last_claim  # read this first: a claim that opens later has a higher id
        return min(tuple(self.leases), default=last + 1 if last else 0)

    def forget(self) -> None:
        """Reset the last claim's id after the claim connection was lost: the next claim may have a lower id."""
        self.last_claim = 0

    def opened(self, lease: Lease, jobs: int) -> None:
        """Record a claim that returned this many jobs."""
        lease.left = jobs
        self.leases[lease.claim_id] = lease  # before last_claim: the heartbeat may read in between
        self.last_claim = lease.claim_id
        self.free[lease.queue] -= jobs

    def ended(self, lease: Lease, jobs: int = 1) -> None:
        """Count this many attempts of the claim as ended in the database."""
        lease.left -= jobs
        # After a crash or a failover, ids may repeat.
        if lease.left <= 0 and self.leases.get(lease.claim_id) is lease:
            del self.leases[lease.claim_id]

    def freed(self, running: Running) -> None:
        """Free the slot of a handler that has returned, even if its end is not in the database yet."""
        # A worker that was given up for dead may already run the job's next attempt.
        if self.running.get(running.job_id) is running:
            del self.running[running.job_id]
        self.free[running.queue] += 1
        self.changed.set()
        if self.free[running.queue] == 1:
            self.on.room()

    def rested(self, running: Running) -> None:
        """Free the slot of a handler that returned a while ago."""
        self.freed(running)
