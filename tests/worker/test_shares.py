"""The slots of one process, shared by its nodes' workers: none is given twice, none is idle, and no node starves."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tallybook._worker.claim import shares as _shares
from tallybook._worker.claim.shares import SharedBook, Shares
from tallybook._worker.jobs import Lease, Running

Q = "default"


def _jobs(book: SharedBook, count: int, queue: str = Q) -> list[Running]:
    """Claim this many jobs, as the claimer does with an answer."""
    lease = Lease("l", random.randrange(1 << 60), queue)
    book.opened(lease, count)
    row = (1, "t", "{}", None, 0, 0, None, None, None, None)
    jobs = [Running((random.randrange(1 << 60), *row), lease, "w") for _ in range(count)]
    book.running |= {job.job_id: job for job in jobs}
    return jobs


def _claim(book: SharedBook, there: int = 1 << 30) -> list[Running]:
    """Make one claim, answered at once, with this many jobs available."""
    most = book.room(Q)
    asked = book.asks({Q: most})
    asked()
    return _jobs(book, min(there, most)) if min(there, most) else []


async def test_one_node_with_work_gets_all_slots() -> None:
    """A node with endless work has all slots after its second claim, while the other nodes have nothing to do."""
    shares = Shares({Q: 10})
    busy, *_ = [shares.book() for _ in range(3)]
    first = _claim(busy)
    assert len(first) == 3, "a node without known work asks for its share only"
    assert len(_claim(busy)) == 7
    assert shares.free == {Q: 0}


async def test_a_waiting_node_gets_its_share() -> None:
    """Freed slots go to a waiting node until it has its share; then each node reuses what it frees."""
    shares = Shares({Q: 10})
    busy, other = shares.book(), shares.book()
    running = _claim(busy) + _claim(busy)
    held: list[Running] = []
    for _ in range(5):
        assert not other.has_room()
        busy.freed(running.pop())
        assert other.changed.is_set(), "it is told that there may be room"
        assert busy.room(Q) == 0 and other.has_room()
        held += _claim(other)
    other.has_room()
    busy.freed(running.pop())
    assert (busy.room(Q), other.room(Q)) == (1, 0)
    assert (busy.used[Q], other.used[Q]) == (4, 5)


@pytest.mark.parametrize("slots", [1, 2, 3, 10, 64])
@pytest.mark.parametrize("nodes", [2, 3, 8])
async def test_endless_work_on_all_nodes_starves_none(slots: int, nodes: int) -> None:
    """With endless long jobs, each node starts about as many as the others, even with fewer slots than nodes."""
    rng = random.Random(slots * nodes)
    shares = Shares({Q: slots})
    books = [shares.book() for _ in range(nodes)]
    running: list[tuple[SharedBook, Running]] = []
    started: Counter[int] = Counter()
    rounds = 200 * nodes
    for _ in range(rounds):
        moved = True
        while moved:
            moved = False
            for at in rng.sample(range(nodes), nodes):
                if books[at].has_room():
                    for job in _claim(books[at]):
                        running.append((books[at], job))
                        started[at] += 1
                    moved = True
        assert shares.free[Q] == 0, "a slot lies idle although all nodes have work"
        book, job = running.pop(rng.randrange(len(running)))
        book.freed(job)
    assert min(started.values()) > 0.5 * max(started.values())


async def test_a_claim_without_an_answer_keeps_its_slots_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots of a claim to a stopped server are free after a moment, and nothing is kept for its node."""
    monkeypatch.setattr(_shares, "PATIENCE", 0.01)
    shares = Shares({Q: 4})
    stopped, other = shares.book(), shares.book()
    stopped.hungry.add(Q)
    asked = stopped.asks({Q: 4})
    assert not other.has_room()
    async with asyncio.timeout(5):
        await other.changed.wait()
    other.hungry.add(Q)
    jobs = _claim(other)
    asked()
    late = _jobs(stopped, 4)
    assert len(stopped.surplus(late)) == 4 and not late, "no handler more than there are slots"
    assert len(jobs) == 4


async def test_what_comes_late_starts_where_it_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of a late answer start if there are slots for them; the others are given back."""
    monkeypatch.setattr(_shares, "PATIENCE", 0.0)
    shares = Shares({Q: 4})
    slow, other = shares.book(), shares.book()
    slow.hungry.add(Q)
    asked = slow.asks({Q: 4})
    await asyncio.sleep(0.01)
    _claim(other)
    assert shares.free[Q] == 2
    asked()
    late = _jobs(slow, 4)
    for job in slow.surplus(late):
        slow.freed(job)
    assert len(late) == 2 and shares.free[Q] == 0 and slow.used[Q] == 2


async def test_what_waits_for_a_silent_server_holds_no_slot() -> None:
    """Claimed jobs that wait for a silent server lend their slots; later they start if they still fit."""
    shares = Shares({Q: 4})
    silent, other = shares.book(), shares.book()
    silent.hungry.add(Q)
    jobs = _claim(silent)
    silent.running.clear()
    silent.held = {job.job_id: job for job in jobs}
    assert not other.has_room()
    silent.lend()
    silent.lend()
    assert shares.free[Q] == 4 and other.changed.is_set()
    other.hungry.add(Q)
    first, *_ = _claim(other, 3)
    ended, *jobs = jobs
    silent.freed(ended)
    assert shares.free[Q] == 1 and silent.used[Q] == 0
    silent.held = {}
    back = silent.surplus(jobs)
    assert (len(back), len(jobs)) == (2, 1)
    for job in back:
        silent.freed(job)
    assert shares.free[Q] == 0 and silent.used[Q] == 1 and not silent.lent
    other.freed(first)
    assert shares.free[Q] == 1


async def test_a_sleeping_claimer_hears_of_a_slot_that_it_had_not() -> None:
    """A claimer that found one queue full and claimed for another is woken when any node frees a slot of the first."""
    shares = Shares({Q: 1, "mail": 1})
    first, second = shares.book(), shares.book()
    woken: list[str] = []
    second.on.room = lambda: woken.append("second")
    (job,) = _claim(first)
    second.asks({Q: second.room(Q), "mail": second.room("mail")})()
    assert second.short == {Q}
    first.freed(job)
    assert woken == ["second"] and not second.short


async def test_what_a_worker_leaves_behind_is_free() -> None:
    """The slots of an ended worker are free for the other nodes."""
    shares = Shares({Q: 3})
    gone, other = shares.book(), shares.book()
    gone.hungry.add(Q)
    _claim(gone)
    shares.leave(gone)
    assert other.room(Q) == 3 and shares.books == [other]


async def test_one_suspect_runs_in_a_process() -> None:
    """A suspect does not start while another node's suspect runs."""
    shares = Shares({Q: 3})
    first, second = shares.book(), shares.book()
    assert first.take_turn() and not second.take_turn() and first.take_turn()
    second.end_turn()
    assert not second.take_turn()
    first.end_turn()
    assert second.take_turn()


@pytest.mark.parametrize("seed", range(20))
async def test_no_slot_is_given_twice_and_none_is_lost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any order of claims, answers, late answers and ends, the count is right, and some node can continue."""
    rng = random.Random(seed)
    monkeypatch.setattr(_shares, "PATIENCE", 1000.0)
    slots = {Q: rng.randrange(1, 6), "mail": rng.randrange(1, 6)}
    shares = Shares(slots)
    books = [shares.book() for _ in range(rng.randrange(2, 5))]
    flights: dict[int, tuple[Callable[[], None], dict[str, int]]] = {}
    running: list[tuple[SharedBook, Running]] = []

    def answer(at: int) -> None:
        asked, most = flights.pop(at)
        asked()
        queue = rng.choice([Q, "mail"])
        jobs = _jobs(books[at], rng.randrange(most[queue] + 1), queue) if most[queue] else []
        for job in books[at].surplus(jobs):
            books[at].freed(job)
        running.extend((books[at], job) for job in jobs)

    def step(at: int) -> Any:
        kind = rng.randrange(4)
        if at in flights and kind == 0:
            flights[at][0]()  # as when no answer comes in time
            books[at].lend()
        elif at in flights:
            answer(at)
        elif kind < 3 and books[at].has_room():
            most = {queue: books[at].room(queue) for queue in slots}
            flights[at] = (books[at].asks(most), most)
        elif running:
            book, job = running.pop(rng.randrange(len(running)))
            book.freed(job)

    for _ in range(600):
        step(rng.randrange(len(books)))
        for queue, total in slots.items():
            assert shares.free[queue] == total - sum(book.used[queue] for book in books)
            assert sum(job.queue == queue for _, job in running) <= total
        if not flights:
            found = [book.has_room() for book in books]
            assert any(found) or all(free <= 0 for free in shares.free.values()), "room, and nobody may take it"
