"""The faults, one after the other, each healed before the next."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Literal

from chaos.crew import LEASE, Crew, Worker
from chaos.judge import Fault
from chaos.places import Place
from chaos.proxy import DIRECTIONS, Proxy
from chaos.servers import Servers

_OURS = """
select pid from pg_stat_activity
 where backend_type = 'client backend' and datname = 'chaos' and application_name ~ '^(tallybook|chaos)'"""
_ON_RECORD = """
select w.name from tallybook.worker w
 where w.ended_at is null and w.seen_at > clock_timestamp() - interval '2.5 s'"""
# An effect that has run for 0.4 s will run a little longer, so it still runs when the signal arrives. It runs in a
# thread, which cannot be cancelled.
_HOLDS_EFFECTS = """
select count(*) from tallybook.worker w, lateral tallybook._open_attempts(w.id, w.open_from) o
  join tallybook.entry e using (lane_id, retention, xid, seq),
       lateral tallybook._claim_of(o.lane_id, o.retention, o.xid, o.seq) c
 where w.name = %s and w.ended_at is null and e.task = 'effect_in_thread'
   and c.claimed_at between clock_timestamp() - interval '1 s' and clock_timestamp() - interval '0.4 s'"""
# Each batch that is held has jobs of this queue.
_PASSED = """
select exists (select from tallybook.claim c join tallybook.lane l using (lane_id)
                where l.queue = 'default' and c.pos_xid > %s::xid8)"""
_LIVING = "select count(*) from tallybook.worker where name = any (%s::text[]) and ended_at is null"
# Killed workers that are not rescued yet, and rescued jobs that are available and not claimed.
_NOT_GOING_ON = """
select (select count(*) from tallybook.worker where name = any (%s::text[]) and ended_at is null)
     + (select count(*) from tallybook.outcome o
          join tallybook.entry e on e.retention = o.retention and e.xid = o.entry_xid and e.seq = o.entry_seq
          join tallybook.entry x on x.job_id = e.job_id and x.attempt = e.attempt + 1
         where o.state = 'lost' and o.ended_at > to_timestamp(%s)
           and not exists (select from tallybook._claim_of(x.lane_id, x.retention, x.xid, x.seq)))"""
_OPEN_TRANSACTIONS = """
select application_name, state, coalesce(wait_event, 'nothing'),
       extract(epoch from clock_timestamp() - xact_start)::int, left(query, 60)
  from pg_stat_activity
 where datname = 'chaos' and backend_type = 'client backend' and xact_start < clock_timestamp() - interval '5 s'"""
_LONGEST_OUTAGE = 20.0
_SECONDS_TO_HEAL = 45.0


class Stage:
    """The state of a run for its nemeses."""

    def __init__(
        self,
        servers: Servers,
        proxy: Proxy,
        crew: Crew,
        place: Place,
        rng: random.Random,
        say: Callable[[str], None],
    ) -> None:
        self.servers = servers
        self.proxy = proxy
        self.crew = crew
        self.place = place
        self.rng = rng
        self.say = say
        self.faults: list[Fault] = []
        self.now = "healthy"
        self.quiet_since = time.time()
        self.problems: list[str] = []
        self.not_run: list[str] = []

    async def ask(self, sql: str, *params: object) -> list[tuple[Any, ...]]:
        """Return rows from the primary, without a proxy."""
        return await asyncio.to_thread(self.servers.ask, sql, params)

    async def until(self, condition: Callable[[], Awaitable[bool]], seconds: float) -> bool:
        """Wait for the condition; return whether it came true within `seconds`."""
        until = time.monotonic() + seconds
        while not await condition():
            if time.monotonic() > until:
                return False
            await asyncio.sleep(0.1)
        return True

    async def nap(self, shortest: float, longest: float) -> None:
        """Sleep for a random time between these seconds."""
        await asyncio.sleep(self.rng.uniform(shortest, longest))

    async def strike(self, name: str) -> None:
        """Run one nemesis and heal the system."""
        self.now = name
        self.faults.append(Fault(name, time.time()))
        self.say(f"nemesis {name}")
        try:
            await NEMESES[name](self)
        finally:
            await self._mend()
            self.now = f"healing after {name}"
        await self.healthy(name)
        if name != "kill_worker":
            self.quiet_since = time.time()
        self.now = "healthy"
        await self.nap(0.5, 1.5)

    def mark(self) -> None:
        """Set the start of the current fault to now, after its preparations."""
        self.faults[-1] = Fault(self.faults[-1].name, time.time())

    async def _mend(self) -> None:
        self.proxy.heal()
        self.place.empty()
        self.crew.commit()
        for worker in self.crew.workers:
            if worker.stopped:
                self.crew.go_on(worker)
        # A postmaster exits when its disk is full; in production it would be restarted.
        if await asyncio.to_thread(self.servers.ensure_up):
            self.say("the server had exited and was restarted")

    async def healthy(self, after: str) -> None:
        """Wait until all workers are registered again; add a problem for those that are late."""

        async def all_beat() -> bool:
            await asyncio.to_thread(self.servers.ensure_up)
            seen = {name for (name,) in await self.ask(_ON_RECORD)}
            missing[:] = [worker.name for worker in self.crew.workers if worker.name not in seen]
            return not missing

        missing: list[str] = []
        started = time.monotonic()
        if not await self.until(all_beat, _SECONDS_TO_HEAL):
            self.problems.append(f"{_SECONDS_TO_HEAL:g} s after {after} {', '.join(missing)} were still missing")
            self.say(self.problems[-1])
        elif time.monotonic() - started > 5:
            self.say(f"all workers were back {time.monotonic() - started:.0f} s after {after}")

    def proxied(self) -> list[Worker]:
        return [worker for worker in self.crew.workers if worker.proxied]


async def kill_worker(stage: Stage) -> None:
    """Send SIGKILL to one or two workers. The run measures their rescues, while nothing else is wrong."""
    # For a lease after an outage, or after losing their own connections, the other workers let sessions return first.
    # That delay is not measured here.
    await asyncio.sleep(max(0.0, stage.quiet_since + LEASE + 1 - time.time()))
    stage.mark()
    killed = stage.rng.sample(stage.crew.workers, stage.rng.choice((1, 1, 2)))
    names, since = [worker.name for worker in killed], time.time()
    for worker in killed:
        await stage.until(lambda worker=worker: _holds_effects(stage, worker), 2)  # type: ignore[misc]
        stage.crew.kill(worker)
    await stage.nap(1, 3)
    for _ in range(int(_LONGEST_OUTAGE)):  # otherwise the next fault would count as part of this rescue
        if await stage.ask(_NOT_GOING_ON, names, since) == [(0,)]:
            return
        await stage.nap(0.5, 0.5)


async def _holds_effects(stage: Stage, worker: Worker) -> bool:
    ((count,),) = await stage.ask(_HOLDS_EFFECTS, worker.name)
    return bool(count)


async def kill_backend(stage: Stage) -> None:
    """Send SIGKILL to one backend: the server drops all sessions and recovers."""
    found = await stage.ask(_OURS)
    if found:
        with suppress(ProcessLookupError):
            os.kill(stage.rng.choice(found)[0], signal.SIGKILL)
    await stage.nap(0.5, 2)


async def kill_postmaster(stage: Stage) -> None:
    """Send SIGKILL to all processes of the server, and restart it after a while."""
    await asyncio.to_thread(stage.servers.kill)
    await stage.nap(0.2, 4)


async def terminate_backend(stage: Stage) -> None:
    """Run pg_terminate_backend on random sessions of workers, handlers and producers."""
    for _ in range(stage.rng.randint(3, 12)):
        found = await stage.ask(_OURS)
        if found:
            await stage.ask("select pg_terminate_backend(%s)", stage.rng.choice(found)[0])
        await stage.nap(0.05, 0.4)


async def pause_worker(stage: Stage) -> None:
    """Send SIGSTOP to a worker until the others have given it up and run its jobs; then wake the zombie by SIGCONT."""
    worker = stage.rng.choice(stage.crew.workers)
    # It must be running effects, which a zombie could do twice.
    stage.crew.linger()
    in_hand = await stage.until(lambda: _lingers(stage, worker), 30)
    stage.mark()
    stage.crew.stop(worker)
    stage.crew.commit()
    stage.say(f"{worker.name} is stopped, {'in' if in_hand else 'perhaps not in'} the middle of an effect")
    ok = await stage.until(lambda: _given_up(stage, [worker]), LEASE + _LONGEST_OUTAGE)
    if not ok:
        stage.problems.append(f"{worker.name} was stopped for {LEASE + _LONGEST_OUTAGE:g} s and not given up")
        for name, state, waits, age, query in await stage.ask(_OPEN_TRANSACTIONS):
            stage.say(f"session {name} is {state}, waits for {waits}, its transaction is {age} s old: {query}")
    await stage.nap(0.3, 2)
    stage.crew.go_on(worker)


async def _lingers(stage: Stage, worker: Worker) -> bool:
    return stage.crew.lingers(worker)


async def _given_up(stage: Stage, workers: list[Worker]) -> bool:
    names = [worker.name for worker in workers]
    ((count,),) = await stage.ask(_LIVING, names)
    return bool(count == 0)


async def blackhole(stage: Stage) -> None:
    """Block the proxy in one direction or both, for a moment or until the lease is lost."""
    to_server, to_client = stage.rng.choice(((True, True), (True, False), (False, True)))
    stage.proxy.blackhole(to_server=to_server, to_client=to_client)
    if stage.rng.random() < 0.4:
        await stage.nap(0.5, 3)
    else:
        await stage.until(lambda: _given_up(stage, stage.proxied()), _LONGEST_OUTAGE)
        await stage.nap(0.2, 2)


async def half_open(stage: Stage) -> None:
    """Keep sockets open and drop data; the connections of that time stay dead."""
    stage.proxy.half_open()
    await stage.nap(1, 10)


async def delay(stage: Stage) -> None:
    """Delay all data by up to 300 ms."""
    stage.proxy.delay(stage.rng.uniform(0.05, 0.3))
    await stage.nap(3, 6)


async def cut_bytes(stage: Stage) -> None:
    """Reset every connection through the proxy after a few thousand bytes, repeatedly."""
    # Short enough to hit the middle of a message, long enough for some connections to do work.
    stage.proxy.cut_after(lambda: int(stage.rng.expovariate(1 / 6000)) + 200, stage.rng.choice(DIRECTIONS))
    await stage.nap(3, 6)


async def cut_commit(stage: Stage) -> None:
    """Reset connections at COMMIT or at the end of a job, before the server gets the statement or after it has run."""
    when: Literal["before", "after"] = stage.rng.choice(("before", "after"))
    share = stage.rng.uniform(0.2, 0.6)

    def matches(text: str) -> bool:
        hit = text.strip().rstrip(";").lower() == "commit" or "tallybook.complete" in text or "tallybook.fail" in text
        return hit and stage.rng.random() < share

    stage.proxy.cut_at(matches, when)
    await stage.nap(3, 6)


async def failover(stage: Stage) -> None:
    """Kill the primary, whose last commits the standby does not have, and promote the standby."""
    await stage.servers.failover(stage.say, stage.mark, dark=stage.rng.uniform(0.5, 2.0))


async def full_disk(stage: Stage) -> None:
    """Fill the disk with the server's data and log completely."""
    if stage.place.small is not None:
        if not stage.not_run:
            stage.not_run.append(f"full_disk: {stage.place.small}")
        stage.say(f"NOT RUN: {stage.not_run[0]}")
        return
    filled = await asyncio.to_thread(stage.place.fill)
    stage.mark()
    stage.say(f"the disk is full, with a filler of {filled >> 20} MB")
    until = time.monotonic() + stage.rng.uniform(3, 6)
    while time.monotonic() < until:
        await asyncio.sleep(0.3)
        await asyncio.to_thread(stage.place.fill)  # also the space that the server has freed meanwhile


async def long_transaction(stage: Stage) -> None:
    """A producer commits seconds after claims have passed its transaction, which pins the horizon until then."""
    stage.crew.hold_commit()
    held = await stage.until(lambda: _is_held(stage), 30)
    stage.mark()
    passed = held and await stage.until(lambda: _is_passed(stage), 30)
    await stage.nap(4, 8)
    stage.say(f"claims have {'passed' if passed else 'perhaps not passed'} a transaction that commits now")


async def _is_held(stage: Stage) -> bool:
    return stage.crew.held_transaction() is not None


async def _is_passed(stage: Stage) -> bool:
    ((passed,),) = await stage.ask(_PASSED, stage.crew.held_transaction())
    return bool(passed)


NEMESES: dict[str, Callable[[Stage], Awaitable[None]]] = {
    function.__name__: function
    for function in (
        kill_worker, kill_backend, kill_postmaster, terminate_backend, pause_worker, blackhole, half_open, delay,
        cut_bytes, cut_commit, failover, full_disk, long_transaction,
    )
}  # fmt: skip


def schedule(names: list[str], rng: random.Random) -> Callable[[], str]:
    """Return a function that draws the next nemesis: all in random order, round after round; every third kills workers.

    The first is a kill, so that the shortest run has rescue figures.
    """
    bag: list[str] = []
    drawn = 0

    def draw() -> str:
        nonlocal drawn
        if not bag:
            bag.extend(name for name in names if name != "kill_worker")
            rng.shuffle(bag)
        drawn += 1
        if "kill_worker" in names and (drawn % 3 == 1 or not bag):
            return "kill_worker"
        return bag.pop()

    return draw
