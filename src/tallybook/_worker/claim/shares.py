"""The slots of one process, shared by the workers of its nodes.

Each node's worker has its own book, and all books share one count of free slots. A claim takes the slots that it asks
for before it is sent, so that two claims never count on the same slot. The answer gives back the slots not needed.

A node takes every free slot while no other node wants one. While others want slots, each has an equal share. Of the
nodes below their share, the one that claimed longest ago comes first. A node without known work asks for its share
only: if its server has stopped, the others have the rest.

A claim without an answer gives its slots back after `PATIENCE`. If its jobs arrive later and no longer fit, they are
given back. The same holds for claimed jobs that wait for a limit or another job, when that question gets no answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count

from tallybook._worker.jobs import Book, Lease, Running

PATIENCE = 0.5
"""Seconds that an open claim keeps the slots that it asked for."""


class Shares:
    """The free slots of this process, and the books that take from them."""

    def __init__(self, slots: Mapping[str, int]) -> None:
        self.slots = dict(slots)
        self.free = dict(slots)
        self.books: list[SharedBook] = []
        self.listeners: set[SharedBook] = set()
        """Books that want to know of free slots. Mostly there are none, and the end of a job costs one check."""
        self.turns = count(1)
        self.alone: SharedBook | None = None
        """The book whose suspect runs: one at a time in a process, see suspects.py."""

    def book(self) -> SharedBook:
        made = SharedBook(self.free, shares=self)
        self.books.append(made)
        return made

    def leave(self, book: SharedBook) -> None:
        """Remove the book of a node whose worker has ended, and free all slots that it still held."""
        self.books.remove(book)
        self.listeners.discard(book)
        book.end_turn()
        for queue, held in book.used.items():
            self.free[queue] += held
        self.wake(*self.slots)

    def wake(self, *queues: str) -> None:
        """Notify claimers that wait, or found no slot in these queues, that there may be room."""
        for book in list(self.listeners):
            if book.waits:
                book.changed.set()
            elif not book.short.isdisjoint(queues):
                book.short.clear()
                book.listen()
                book.on.room()


@dataclass(slots=True, kw_only=True, eq=False)
class SharedBook(Book):
    """The book of one node among several."""

    shares: Shares
    used: Counter[str] = field(default_factory=Counter)
    """By queue: slots that its jobs hold, and those that its open claim has asked for."""
    waits: bool = False
    """Its claimer waits for a slot of any queue."""
    hungry: set[str] = field(default_factory=set)
    """Queues whose last claim returned all that it asked for: there is more."""
    short: set[str] = field(default_factory=set)
    """Queues for which its last claim had no slot."""
    turn: int = 0
    """When it claimed last, counted in the claims of all books."""
    lent: set[int] = field(default_factory=set)
    """Jobs that are claimed but not started, whose slots others may use until the server answers."""
    _most: Mapping[str, int] = field(default_factory=dict)

    def take(self, queue: str, slots: int) -> None:
        """Count this many more slots of a queue as this node's."""
        self.free[queue] -= slots
        self.used[queue] += slots

    def _wants(self, queue: str) -> bool:
        return self.waits or queue in self.hungry or queue in self.short

    def room(self, queue: str) -> int:
        free, slots, used = self.free[queue], self.shares.slots[queue], self.used[queue]
        if free <= 0:
            return 0
        rivals = [book for book in self.shares.books if book is not self and book._wants(queue)]
        if not rivals:
            return free if self._wants(queue) else min(free, max(1, slots // len(self.shares.books)))
        share = max(1, slots // (len(rivals) + 1))
        due = [book for book in rivals if book.used[queue] < share]
        if used >= share:
            return max(0, free - sum(share - book.used[queue] for book in due))
        return max(0, min(share - used, free - sum(book.turn < self.turn for book in due)))

    def has_room(self) -> bool:
        """Return whether any queue has a slot for its next claim; if not, be notified when one is free."""
        found = any(self.room(queue) > 0 for queue in self.free)
        self.waits = not found
        self.listen()
        return found

    def listen(self) -> None:
        """Subscribe to free slots while it waits for some; else unsubscribe."""
        change = self.shares.listeners.add if self.waits or self.short else self.shares.listeners.discard
        change(self)

    def asks(self, slots: Mapping[str, int]) -> Callable[[], None]:
        """Reserve the next claim's slots. Call the result at its answer to free them; `opened` counts its jobs."""
        self.waits, self.turn, self._most = False, next(self.shares.turns), slots
        self.short = {queue for queue, most in slots.items() if not most}
        self.listen()
        held = dict(slots)
        for queue, most in held.items():
            self.take(queue, most)

        def over() -> None:
            timer.cancel()
            if not held:  # given back already, when no answer came in time
                return
            given = dict(held)
            held.clear()
            for queue, most in given.items():
                self.take(queue, -most)
                self.hungry.discard(queue)
            self.shares.wake(*(queue for queue, most in given.items() if most))

        def lapse() -> None:
            over()
            self.lend()

        timer = asyncio.get_running_loop().call_later(PATIENCE, lapse)
        return over

    def opened(self, lease: Lease, jobs: int) -> None:
        Book.opened(self, lease, jobs)
        self.used[lease.queue] += jobs
        if jobs >= self._most.get(lease.queue, 0):
            self.hungry.add(lease.queue)

    def surplus(self, jobs: list[Running]) -> list[Running]:
        """Remove from the list, and return, the claimed jobs that have no slot because the answer was late."""
        for job in jobs:
            self._take_back(job)
        over = {queue: -free for queue, free in self.free.items() if free < 0}
        if not over:
            return []
        start: list[Running] = []
        found: list[Running] = []
        for job in reversed(jobs):
            is_over = over.get(job.queue, 0) > 0
            over[job.queue] = over.get(job.queue, 0) - is_over
            (found if is_over else start).append(job)
        jobs[:] = reversed(start)
        return found

    def lend(self) -> None:
        """Lend the slots of jobs that have not started, and claim nothing: the server has not answered for a while."""
        for job in self.held.values():
            if job.job_id not in self.lent:
                self.lent.add(job.job_id)
                self.take(job.queue, -1)
        self.rests()

    def _take_back(self, job: Running) -> None:
        if job.job_id in self.lent:
            self.lent.remove(job.job_id)
            self.take(job.queue, 1)

    def freed(self, running: Running) -> None:
        if self.lent:
            self._take_back(running)
        self.used[running.queue] -= 1
        Book.freed(self, running)
        if self.shares.listeners:
            self.shares.wake(running.queue)

    def rested(self, running: Running) -> None:
        """Free a slot that has rested, unless its node's worker has ended: then all of its slots are free already."""
        if self in self.shares.books:
            self.freed(running)

    def rests(self) -> None:
        """Claim nothing for now, and reserve nothing for this node."""
        self.waits = False
        self.hungry.clear()
        self.short.clear()
        self.listen()
        self.shares.wake(*self.free)

    def take_turn(self) -> bool:
        """Return whether a suspect of this node may run alone now, because no other node's does."""
        self.shares.alone = self.shares.alone or self
        return self.shares.alone is self

    def end_turn(self) -> None:
        if self.shares.alone is self:
            self.shares.alone = None
