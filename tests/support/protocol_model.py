"""A model of the protocol: one job, two worker processes, a rescuer, a user who cancels, and a server that may crash.

Read it together with sql/README.md. A step here is an atomic action there: a committed transaction, or a look. The
server has two copies of the ledger: `memory`, which every session sees, and `disk`, which survives a crash. A durable
commit also writes all earlier commits to disk, because the WAL is sequential; an asynchronous commit does not.

`Rules` are the guards. With all of them the promises hold in every state; for each of them, a test shows which promise
breaks without it, and how.

Ghosts (`ticket`, `exact`, `acknowledged`) are for the checks only: no rule reads them. A ticket is the true identity of
one request to claim, which no crash undoes. A random lease is as good as a ticket, a counter is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from support.explore import Explored, Step, explore

MAX_FAILURES = 2
MAX_CRASHES = 2
FINAL = ("completed", "cancelled", "dead")


@dataclass(frozen=True)
class Rules:
    """The guards of the protocol."""

    random_lease: bool = True
    """A lease is random. Otherwise it is the number of the stored claim."""
    checks_lease: bool = True
    """The end of an attempt must name its lease. Otherwise job and attempt are enough."""
    names_attempt: bool = True
    """... and the attempt. Otherwise it is `where id = ...`, as in most queues."""
    gate: bool = True
    """A rescue waits until no claim of that worker is running."""
    looks_again: bool = True
    """`claimed_jobs` checks for cancels again after the claim has committed."""
    one_outcome: bool = True
    """The first end of an attempt counts. Otherwise the last one does."""
    durable_ends: bool = True
    """Ends commit durably; claims never need to."""
    durable_numbers: bool = True
    """A worker registers durably, so that its number cannot be reused after a crash."""
    lasting_cancel: bool = True
    """A cancel applies to all later attempts. Otherwise it applies only to the current one."""
    cancel_reaches_back: bool = True
    """... and to earlier ones that a worker begins to read only now. Otherwise not to those."""


class Attempt(NamedTuple):
    """An entry, with its claim and its outcome, which are empty until they exist."""

    lease: int = 0
    worker: int = 0
    end: str = ""
    ticket: int = 0


class Ledger(NamedTuple):
    """The stored rows."""

    attempts: tuple[Attempt, ...] = (Attempt(),)
    scheduled: bool = False
    failures: int = 0
    crashes: int = 0
    cancel: int = 0
    """The attempt (from 1) at the time of the cancel."""
    workers: tuple[int, ...] = (1, 2)
    last_worker: int = 2
    """The sequence that numbers them."""

    @property
    def newest(self) -> Attempt:
        return self.attempts[-1]

    @property
    def state(self) -> str:
        """The state of the job."""
        if self.scheduled:
            return "scheduled"
        if self.newest.end:
            return self.newest.end
        return "running" if self.newest.lease else "available"

    def end(self, attempt: int, how: str) -> Ledger:
        """Return the ledger with this outcome (attempts count from 1). The attempt's worker no longer matters."""
        ended = self.attempts[attempt - 1]._replace(end=how, worker=0)
        return self._replace(attempts=(*self.attempts[: attempt - 1], ended, *self.attempts[attempt:]))

    def enter(self) -> Ledger:
        """Return the ledger with the next attempt available."""
        return self._replace(attempts=(*self.attempts, Attempt()), scheduled=False)


class Process(NamedTuple):
    """A worker process: its own state, and the transaction that the server runs for it."""

    number: int
    doing: str = "idle"  # idle, asking, reading, running, ending, dead
    lease: int = 0
    attempt: int = 0
    verb: str = ""
    ticket: int = 0
    flight: str = ""
    """The claim's transaction, with the worker's gate and the lane's lock, after its look: it takes or skips."""

    def rests(self) -> Process:
        return Process(self.number)


class World(NamedTuple):
    memory: Ledger = Ledger()
    disk: Ledger = Ledger()
    processes: tuple[Process, ...] = (Process(1), Process(2))
    faults: int = 0
    """Number of faults of any kind that may still happen."""
    user: str = "may cancel"
    exact: bool = False
    """The cancel committed before the current attempt's handler began, which must not begin any more."""
    acknowledged: int = 0
    """The attempt whose final end was acknowledged to a worker."""
    broken: str = ""

    def durably(self, memory: Ledger) -> World:
        return self._replace(memory=memory, disk=memory)

    def set(self, who: int, process: Process) -> World:
        first, second = self.processes
        return self._replace(processes=(process, second) if who == 0 else (first, process))


def steps(rules: Rules, world: World) -> Iterator[Step[World]]:
    """Yield all possible next steps."""
    for who, process in enumerate(world.processes):
        yield from _claims(rules, world, who, process)
        yield from _works(rules, world, who, process)
    if world.disk.state in FINAL:
        return  # no crash undoes this end: only further steps of workers can matter
    for who, process in enumerate(world.processes):
        yield from _goes_on_record(rules, world, who, process)
    yield from _maintenance(rules, world)
    yield from _user(world)
    if world.faults:
        yield from _faults(rules, world._replace(faults=world.faults - 1))


# A claim: the worker's gate, the lane, a look, an asynchronous commit; then claimed_jobs, in its own statement.


def _claims(rules: Rules, world: World, who: int, p: Process) -> Iterator[Step[World]]:
    ledger, name = world.memory, f"w{who + 1}"
    asks = p.doing == "asking" or (p.doing == "idle" and ledger.state == "available")
    if asks and not p.flight and p.number in ledger.workers:
        ticket = p.ticket or _unused(world)
        counted = 1 + sum(a.lease > 0 for a in ledger.attempts)
        lease = (p.lease or ticket) if rules.random_lease else counted
        asking = p._replace(doing="asking", lease=lease, ticket=ticket)
        if any(a.lease == lease and a.ticket == ticket for a in ledger.attempts):
            yield Step(f"{name} asks again: its claim is stored", world.set(who, asking._replace(doing="reading")))
        elif ledger.state != "available":
            yield Step(f"{name} asks again: there is nothing", world.set(who, p.rests()))
        elif not any(other.flight for other in world.processes):
            flight = "skips" if _is_cancelled(rules, ledger, len(ledger.attempts)) else "takes"
            yield Step(f"{name} claims with lease {lease}: {flight}", world.set(who, asking._replace(flight=flight)))
    if p.flight:
        after, said = _committed_claim(world, p)
        yield Step(f"{name}'s claim commits", after.set(who, said))
        if world.faults and p.doing == "asking":
            deaf = after._replace(faults=world.faults - 1).set(who, p._replace(flight=""))
            yield Step(f"{name}'s claim commits, the answer is lost", deaf, progress=False)
    if p.flight and p.doing == "dead":
        yield Step(f"the server ends {name}'s claim", world.set(who, _gone(p)))
    if p.doing == "reading":
        yield _leased(rules, world, who, p, name)


def _unused(world: World) -> int:
    """Return a number that is used nowhere, like a random draw."""
    ledgers = world.memory.attempts + world.disk.attempts
    used = {a.ticket for a in ledgers} | {p.ticket for p in world.processes}
    return min(set(range(1, len(used) + 2)) - used)


def _committed_claim(world: World, p: Process) -> tuple[World, Process]:
    ledger = world.memory
    if p.flight == "skips":
        after, said = ledger.end(len(ledger.attempts), "cancelled"), p.rests()
    else:
        taken = Attempt(lease=p.lease, worker=p.number, ticket=p.ticket)
        after, said = ledger._replace(attempts=(*ledger.attempts[:-1], taken)), p._replace(doing="reading", flight="")
    if p.doing == "dead":
        said = _gone(p)
    return world._replace(memory=after), said


def _leased(rules: Rules, world: World, who: int, p: Process, name: str) -> Step[World]:
    ledger = world.memory
    held = [n for n, a in enumerate(ledger.attempts, 1) if a.lease == p.lease]
    if not held:
        return Step(f"{name} reads: its claim was forgotten", world.set(who, p.rests()))
    if rules.looks_again and _is_cancelled(rules, ledger, held[0]):
        told = p._replace(doing="ending", verb="cancelled", attempt=held[0])
        return Step(f"{name} reads: cancelled, it does not start", world.set(who, told))
    starts = world.set(who, p._replace(doing="running", attempt=held[0]))
    if world.exact:
        starts = starts._replace(broken="I16: a job started that was cancelled before")
    return Step(f"{name} starts attempt {held[0]}", starts)


def _is_cancelled(rules: Rules, ledger: Ledger, attempt: int) -> bool:
    if ledger.cancel < attempt:
        return bool(ledger.cancel) and rules.lasting_cancel
    return ledger.cancel == attempt or rules.cancel_reaches_back


# The handler, and the end of its attempt, which is sent until there is an answer.


def _works(rules: Rules, world: World, who: int, p: Process) -> Iterator[Step[World]]:
    name = f"w{who + 1}"
    if p.doing == "running":
        for verb in ("completed", "failed"):
            yield Step(f"{name}'s handler: {verb}", world.set(who, p._replace(doing="ending", verb=verb)))
        if world.memory.cancel and p.number in world.memory.workers:
            told = p._replace(doing="ending", verb="cancelled")
            yield Step(f"{name}'s heartbeat brings the cancel", world.set(who, told))
    if p.doing == "ending":
        after, said = _ended(rules, world, p)
        yield Step(f"{name} says {p.verb} of attempt {p.attempt}: {said}", after.set(who, p.rests()))
        if world.faults:
            deaf = _ended(rules, world, p)[0]._replace(faults=world.faults - 1, acknowledged=world.acknowledged)
            yield Step(f"{name} says {p.verb}, the answer is lost ({said})", deaf, progress=False)


def _ended(rules: Rules, world: World, p: Process) -> tuple[World, str]:
    ledger = world.memory
    attempt = p.attempt if rules.names_attempt else len(ledger.attempts)
    a = ledger.attempts[attempt - 1] if attempt <= len(ledger.attempts) else Attempt()
    held = a.lease == p.lease if rules.checks_lease and rules.names_attempt else a.lease > 0
    if held and a.end == p.verb == "completed":  # sent twice, accepted twice, stored once
        return world._replace(acknowledged=attempt), "accepted, again"
    if not held or (a.end and rules.one_outcome):
        return world, "refused"
    if p.verb == "failed":
        failures = ledger.failures + 1
        how = "dead" if failures >= MAX_FAILURES else "failed"
        after = ledger.end(attempt, how)._replace(failures=failures, scheduled=how == "failed")
    else:
        how = p.verb
        after = ledger.end(attempt, how)
    accepted = world.durably(after) if rules.durable_ends else world._replace(memory=after)
    if how in FINAL:
        accepted = accepted._replace(acknowledged=attempt)
    if a.end:
        accepted = accepted._replace(broken="P5: a second end of one attempt was accepted")
    elif a.ticket != p.ticket:
        accepted = accepted._replace(broken="I4: an end was accepted from one who does not hold the attempt")
    elif p.verb == "completed" and world.exact:
        accepted = accepted._replace(broken="I16: a job completed that was cancelled before it began")
    return accepted, "accepted"


def _goes_on_record(rules: Rules, world: World, who: int, p: Process) -> Iterator[Step[World]]:
    """Register a process that was restarted, given up or forgotten; its handlers are stopped."""
    ledger, name = world.memory, f"w{who + 1}"
    if p.flight or (p.doing != "dead" and p.number in ledger.workers):
        return
    if rules.durable_numbers:  # never reused; the model uses the lowest number that is used nowhere
        used = {n for known in (world.memory, world.disk) for n in (*known.workers, known.newest.worker)}
        number = min(set(range(1, 9)) - used - {other.number for other in world.processes})
        on_record = world.durably(ledger._replace(workers=tuple(sorted((*ledger.workers, number)))))
    else:
        number = ledger.last_worker + 1
        on_record = world._replace(memory=ledger._replace(workers=(*ledger.workers, number), last_worker=number))
    yield Step(f"{name} starts as worker {number}", on_record.set(who, Process(number)))


# Promote, rescue, the WAL writer. They may happen at any time.


def _maintenance(rules: Rules, world: World) -> Iterator[Step[World]]:
    ledger = world.memory
    if world.disk != ledger:
        yield Step("the WAL writer flushes", world.durably(ledger))
    if ledger.scheduled:
        yield Step("promote", world.durably(ledger.enter()))
    for number in ledger.workers:
        if not any(p.number == number and p.doing != "dead" for p in world.processes):
            yield from _rescue(rules, world, number, "dead", progress=True)


def _rescue(rules: Rules, world: World, number: int, why: str, *, progress: bool) -> Iterator[Step[World]]:
    if rules.gate and any(p.flight and p.number == number for p in world.processes):
        return
    ledger = world.memory
    after = ledger._replace(workers=tuple(n for n in ledger.workers if n != number))
    if ledger.newest.worker == number and not ledger.newest.end:
        crashes = ledger.crashes + 1
        after = after.end(len(after.attempts), "dead" if crashes >= MAX_CRASHES else "lost")._replace(crashes=crashes)
        if crashes < MAX_CRASHES:
            after = after.enter()
    yield Step(f"rescue of worker {number}, {why}", world.durably(after), progress)


# The user: one cancel, in its own transaction.


def _user(world: World) -> Iterator[Step[World]]:
    ledger = world.memory
    if world.user == "may cancel" and ledger.state not in FINAL:
        met = len(ledger.attempts) + ledger.scheduled
        runs = any(p.doing in ("running", "ending") and p.ticket == ledger.newest.ticket for p in world.processes)
        after = world.durably(ledger._replace(cancel=met))._replace(user="has cancelled", exact=not runs)
        yield Step(f"the user cancels attempt {met}", after, progress=False)


# Faults.


def _faults(rules: Rules, world: World) -> Iterator[Step[World]]:
    for who, p in enumerate(world.processes):
        if p.doing != "dead":
            dead = p._replace(doing="dead", attempt=0, verb="") if p.flight else _gone(p)
            yield Step(f"w{who + 1} is killed", world.set(who, dead), progress=False)
            if p.number in world.memory.workers:  # stopped or cut off for longer than its lease, without knowing it
                yield from _rescue(rules, world, p.number, "which lives", progress=False)
    # A worker repeats its claim with the same lease, and its end.
    processes = tuple(_gone(p) if p.doing == "dead" else p._replace(flight="") for p in world.processes)
    crashed = world._replace(memory=world.disk, processes=processes)
    yield Step("the server crashes and starts again", crashed, progress=False)


def _gone(p: Process) -> Process:
    return Process(p.number, "dead")


def check(world: World) -> str:
    """Return the promise that this state breaks, or an empty string."""
    ledger = world.memory
    opened = sum(not a.end for a in ledger.attempts)
    final = sum(a.end in FINAL for a in ledger.attempts)
    held = [p.lease for p in world.processes if p.doing in ("reading", "running", "ending")]
    claimed = [a.lease for a in ledger.attempts if a.lease]
    forgotten = world.acknowledged and not ledger.attempts[world.acknowledged - 1].end
    promises = (
        (opened + final + ledger.scheduled != 1, "I1, I2: the job is not in exactly one state"),
        (any(a.end in FINAL for a in ledger.attempts[:-1]), "I1: something came after the end"),
        (not all(a.lease for a in ledger.attempts[:-1]), "I5: an attempt that nobody claimed was followed by another"),
        (len(ledger.attempts) > MAX_FAILURES + ledger.crashes, "I5: more attempts than failures and crashes explain"),
        (len({*held}) < len(held) or len({*claimed}) < len(claimed), "I3: one lease, twice"),
        (forgotten, "P3: an end that a worker was told of is forgotten"),
    )
    return world.broken or next((promise for is_broken, promise in promises if is_broken), "")


NOTHING_YET = World(
    memory=Ledger(workers=(), last_worker=0),
    disk=Ledger(workers=(), last_worker=0),
    processes=(Process(0, "dead"), Process(0, "dead")),
    user="stays out of it",
)
"""The state before the two processes register."""


def explore_protocol(rules: Rules | None = None, *, faults: int = 2, start: World | None = None) -> Explored:
    """Explore all states under these rules, with `faults` faults of any kind."""
    given = rules or Rules()
    return explore(
        (start or World())._replace(faults=faults),
        lambda world: steps(given, world),
        check,
        lambda world: world.memory.state in FINAL,
    )
