"""Run the steps of two or three sessions in every order, or in a seeded sample of the orders.

A session is a list of steps on its own connection; a schedule lists the sessions in the order of their steps. One event
loop runs all: while a step waits for a lock, the schedule continues with the others, and the step resumes when the lock
is free. A schedule with a step of a session that still waits cannot happen, so it is skipped: another schedule has the
possible order.

    async def begin(conn, queue):
        return Scene(queue)                                 # the state that the steps read and write

    async def judge(conn, scene):
        return [...]                                        # the findings in the result

    found, played = play(dsn, [first, second], begin, judge, interleavings([3, 2]))
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, Concatenate, LiteralString, ParamSpec, TypeAlias
from uuid import UUID, uuid4

import psycopg

Connection: TypeAlias = psycopg.AsyncConnection[tuple[Any, ...]]
Step: TypeAlias = LiteralString | Callable[[Connection, Any], Awaitable[object]]
Schedule: TypeAlias = tuple[int, ...]
P = ParamSpec("P")

_QUICK = 0.004  # seconds in which almost every step without a lock wait answers
_LIMIT = 60.0  # seconds; PostgreSQL ends a deadlock after one
_WAITS = """
select pid from pg_stat_activity
 where pid = any (%s) and wait_event_type = 'Lock' and pg_blocking_pids(pid) <> '{}'"""


class StepFailed(AssertionError):
    """A step raised an error. The text has the schedule, so that you can run it alone."""


def interleavings(lengths: Sequence[int]) -> Iterator[Schedule]:
    """Yield every order of the steps of sessions with these numbers of steps."""
    if not any(lengths):
        yield ()
    for session, left in enumerate(lengths):
        if left:
            rest = [n - (i == session) for i, n in enumerate(lengths)]
            for schedule in interleavings(rest):
                yield (session, *schedule)


def sample(lengths: Sequence[int], size: int, seed: int) -> list[Schedule]:
    """Draw `size` different orders, the same ones for the same seed."""
    line = [session for session, n in enumerate(lengths) for _ in range(n)]
    source = random.Random(seed)
    found: dict[Schedule, None] = {}
    for _ in range(size * 10):
        source.shuffle(line)
        found[tuple(line)] = None
        if len(found) == size:
            break
    return list(found)


def some(sessions: Sequence[Sequence[Step]], most: int = 30) -> list[Schedule]:
    """Return every order, or a sample of `most`."""
    lengths = [len(session) for session in sessions]
    schedules = list(interleavings(lengths))
    return schedules if len(schedules) <= most else sample(lengths, most, 1)


def step(play: Callable[Concatenate[Connection, Any, P], Awaitable[object]]) -> Callable[P, Any]:
    """Let a coroutine function make steps: a call with the arguments after connection and scene returns a step.

    With begin=True, which it does not get, the step begins a transaction first.
    """

    def make(*args: P.args, begin: bool = False, **kwargs: P.kwargs) -> Step:
        async def made(conn: Connection, scene: Any) -> None:
            if begin:
                await conn.execute("begin")
            await play(conn, scene, *args, **kwargs)

        return made

    return make


def is_idle(conn: Connection) -> bool:
    """Whether no transaction is open."""
    return conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


async def connect(dsn: str) -> Connection:
    return await psycopg.AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=0)


async def rows(conn: Connection, query: Any, *params: object) -> list[tuple[Any, ...]]:
    return await (await conn.execute(query, params)).fetchall()


async def claimed(conn: Connection, worker: int, queue: str, most: int = 10) -> list[tuple[int, UUID, int]]:
    """Claim available jobs, past cancelled ones; return job, lease and attempt of each."""
    while True:
        lease = uuid4()
        query = "select claim_id, jobs from tallybook.claim(%s, %s, %s, %s)"
        ((claim_id, jobs),) = await rows(conn, query, worker, [queue], [most], lease)
        if claim_id is None or jobs:
            return await rows(conn, "select job_id, %s::uuid, attempt from tallybook.claimed_jobs(%s)", lease, lease)


def play(
    dsn: str,
    sessions: Sequence[Sequence[Step]],
    begin: Callable[[Connection, str], Awaitable[Any]],
    judge: Callable[[Connection, Any], Awaitable[list[str]]],
    schedules: Iterable[Schedule],
) -> tuple[list[str], int]:
    """Run the schedules, each with its own scene and queue.

    Return findings and failures with their schedules, and the number of schedules that could happen.
    """

    async def play_all() -> tuple[list[str], int]:
        found, played = [], 0
        async with AsyncExitStack() as stack:
            conn, watcher, *theirs = [await stack.enter_async_context(await connect(dsn)) for _ in (0, 0, *sessions)]
            runner = Interleaver(theirs, watcher)
            for number, schedule in enumerate(schedules):
                scene = await begin(conn, f"q{number}")
                try:
                    if not await runner.run(schedule, sessions, scene):
                        continue
                except StepFailed as error:
                    found.append(str(error))
                    continue
                played += 1
                found += [f"{schedule}: {what}" for what in await judge(conn, scene)]
        return found, played

    return asyncio.run(play_all())


@dataclass
class Interleaver:
    """Connections reused for all schedules, and one that watches for lock waits."""

    sessions: list[Connection]
    watcher: Connection

    async def run(self, schedule: Schedule, sessions: Sequence[Sequence[Step]], scene: Any) -> bool:
        """Run one schedule; return False if it cannot happen. Raises StepFailed. No transaction stays open."""
        done = [0] * len(sessions)
        pending: dict[int, asyncio.Task[object]] = {}
        try:
            for session in schedule:
                if session in pending:
                    return False
                step = sessions[session][done[session]]
                pending[session] = asyncio.create_task(self._play(self.sessions[session], step, scene))
                done[session] += 1
                await self._settle(schedule, pending, done)
            await self._settle(schedule, pending, done, to_the_end=True)
            return True
        finally:
            await self._clean_up(pending)

    async def _play(self, conn: Connection, step: Step, scene: Any) -> object:
        return await (conn.execute(step) if isinstance(step, str) else step(conn, scene))

    async def _settle(
        self, schedule: Schedule, pending: dict[int, asyncio.Task[object]], done: list[int], to_the_end: bool = False
    ) -> None:
        """Wait until each started step has ended or waits for a lock; at the end, until all have ended."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LIMIT
        while pending:
            await asyncio.wait(pending.values(), timeout=_QUICK, return_when=asyncio.ALL_COMPLETED)
            for session, running in list(pending.items()):
                if running.done():
                    del pending[session]
                    if error := running.exception():
                        where = f"schedule {schedule}: step {done[session]} of session {session}"
                        raise StepFailed(f"{where}: {type(error).__name__}: {error}")
            if not to_the_end and await self._all_wait(pending):
                return
            if loop.time() > deadline:
                raise AssertionError(f"schedule {schedule}: sessions {sorted(pending)} did not end in {_LIMIT:g} s")

    async def _all_wait(self, pending: dict[int, asyncio.Task[object]]) -> bool:
        if not pending:
            return True
        pids = [self.sessions[session].info.backend_pid for session in pending]
        waiting = await (await self.watcher.execute(_WAITS, [pids])).fetchall()
        return len(waiting) == len(pids) and not any(step.done() for step in pending.values())

    async def _clean_up(self, pending: dict[int, asyncio.Task[object]]) -> None:
        for session, step in pending.items():
            await self.watcher.execute("select pg_cancel_backend(%s)", [self.sessions[session].info.backend_pid])
            with suppress(psycopg.Error):
                await step
        for conn in self.sessions:
            if not is_idle(conn):
                await conn.execute("rollback")
