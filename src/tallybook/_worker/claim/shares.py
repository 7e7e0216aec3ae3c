"""The slots of one process, shared by the workers of its nodes.

Each node's worker has a book of its own; what is free is one count for all. A claim takes the slots that it asks for before
it is sent, so that two claims never hope for the same slot. What it did not need it gives back with the answer.

A node takes everything that is free while no other wants it. While others want more, each has an equal share, and of those
below their share the one that claimed longest ago comes first. A node without known work asks for its share only: if its
server has stopped, the others have the rest. A claim without an answer gives its slots back after `PATIENCE`; if its jobs come
after all and do not fit any more, those are given back. The same holds for what was claimed and has not started yet, since a
limit or another job has to let it, when that question has no answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar

from tallybook._worker.jobs import Book, Lease, Running

PATIENCE = 0.5
"""For so many seconds a claim on its way keeps the slots that it asked for."""


class Shares:
    """What is free in this process, and the books that take from it."""

    def __init__(self, slots: Mapping[str, int]) -> None:
        self.slots = dict(slots)
        self.free = dict(slots)
        self.books: list[SharedBook] = []
        self.listeners: set[SharedBook] = set()
        """Books that want to know of free slots: mostly none, and then a job that ends costs one look."""
        self.turns = count(1)
        self.alone: SharedBook | None = None
        """Whose suspect runs: one at a time in a process, see suspects.py."""

    def book(self) -> SharedBook:
        """A book for one more node."""
        made = SharedBook(self.free, shares=self)
        self.books.append(made)
        return made

    def leave(self, book: SharedBook) -> None:
        """A node's worker has ended: whatever it still held is free."""
        self.books.remove(book)
        self.listeners.discard(book)
        book.end_turn()
        for queue, held in book.used.items():
            self.free[queue] += held
        self.wake(*self.slots)

    def wake(self, *queues: str) -> None:
        """There may be room in these queues, for claimers that wait or that got none of it."""
        for book in list(self.listeners):
            if book.waits:
                book.changed.set()
            elif not book.short.isdisjoint(queues):
                book.short.clear()
                book.listen()
                book.on.room()


class Asked:
    """Slots that a claim on its way has asked for."""

    __slots__ = ("_book", "_slots", "_timer")

    def __init__(self, book: SharedBook, slots: Mapping[str, int]) -> None:
        self._book = book
        self._slots: Mapping[str, int] | None = slots
        for queue, most in slots.items():
            book.take(queue, most)
        self._timer = asyncio.get_running_loop().call_later(PATIENCE, self._lapse)

    def _lapse(self) -> None:
        self.over()
        self._book.lend()

    def over(self) -> None:
        """There is an answer: what it brought is counted by `opened`."""
        self._timer.cancel()
        slots, self._slots = self._slots, None
        if slots is not None:
            for queue, most in slots.items():
                self._book.take(queue, -most)
                self._book.hungry.discard(queue)
            self._book.shares.wake(*(queue for queue, most in slots.items() if most))


@dataclass(slots=True, kw_only=True, eq=False)
class SharedBook(Book):
    """The book of one node among several."""

    shared: ClassVar[bool] = True
    shares: Shares
    used: Counter[str] = field(default_factory=Counter)
    """By queue: slots that its jobs hold, and those that its claim on the way has asked for."""
    waits: bool = False
    """Its claimer waits for a slot of any queue."""
    hungry: set[str] = field(default_factory=set)
    """Queues whose last claim brought all that it had asked for: there is more."""
    short: set[str] = field(default_factory=set)
    """Queues for which its last claim had no slot."""
    turn: int = 0
    """When it claimed last, counted in claims of all."""
    lent: set[int] = field(default_factory=set)
    """Jobs that are claimed and have not started, whose slots others may have until the server answers."""
    _most: Mapping[str, int] = field(default_factory=dict)

    def take(self, queue: str, slots: int) -> None:
        """Count so many more slots of a queue as this node's."""
        self.free[queue] -= slots
        self.used[queue] += slots

    def _wants(self, queue: str) -> bool:
        return self.waits or queue in self.hungry or queue in self.short

    def room(self, queue: str) -> int:
        """How many slots of a queue its next claim may ask for."""
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
        """Whether any queue has a slot for its next claim; if not it is told when that changes."""
        found = any(self.room(queue) > 0 for queue in self.free)
        self.waits = not found
        self.listen()
        return found

    def listen(self) -> None:
        """Be told of free slots, or not, as it waits for some."""
        change = self.shares.listeners.add if self.waits or self.short else self.shares.listeners.discard
        change(self)

    def asks(self, slots: Mapping[str, int]) -> Asked:
        """Take the slots that the next claim asks for."""
        self.waits, self.turn, self._most = False, next(self.shares.turns), slots
        self.short = {queue for queue, most in slots.items() if not most}
        self.listen()
        return Asked(self, slots)

    def opened(self, lease: Lease, jobs: int) -> None:
        """A claim came back with so many jobs."""
        Book.opened(self, lease, jobs)
        self.used[lease.queue] += jobs
        if jobs >= self._most.get(lease.queue, 0):
            self.hungry.add(lease.queue)

    def surplus(self, jobs: list[Running]) -> list[Running]:
        """Those of these claimed jobs that have no slot, since the answer came late; they are taken out of the list."""
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
        """The server has not answered for a while: leave to others what its jobs hold that have not started, and claim nothing."""
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
        """A handler has returned: its slot is free for all."""
        if self.lent:
            self._take_back(running)
        self.used[running.queue] -= 1
        Book.freed(self, running)
        if self.shares.listeners:
            self.shares.wake(running.queue)

    def rested(self, running: Running) -> None:
        """A slot is free, unless its node's worker has ended meanwhile: then it was given back with all others."""
        if self in self.shares.books:
            self.freed(running)

    def rests(self) -> None:
        """It claims nothing for now: nothing is kept for it."""
        self.waits = False
        self.hungry.clear()
        self.short.clear()
        self.listen()
        self.shares.wake(*self.free)

    def take_turn(self) -> bool:
        """Whether a suspect of this node may run alone now: no other node's does."""
        self.shares.alone = self.shares.alone or self
        return self.shares.alone is self

    def end_turn(self) -> None:
        """Its suspect has ended."""
        if self.shares.alone is self:
            self.shares.alone = None
