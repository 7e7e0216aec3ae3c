"""Run the steps of two or three sessions in every order, or in a seeded sample of the orders.

A session is a list of steps on its own connection; a schedule lists the sessions in the order of their steps. One event
loop runs all: while a step waits for a lock, the schedule continues with the others, and the step resumes when the lock
is free. A schedule with a step of a session that still waits cannot happen, so it is skipped: another schedule has the
possible order.

    async def begin(conn, queue):
        return Scene(queue)                                 # the state that the steps read and write

    async def judge(conn, scene):
        return [...]                                        # the findings in the result

    found, played = play(dsn, [first, second], begin, judge, interleavings([first, second]))
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
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


def interleavings(sessions: Sequence[Sequence[Step]]) -> Iterator[Schedule]:
    """Yield every order of the steps of these sessions."""
    if not any(sessions):
        yield ()
    for number, steps in enumerate(sessions):
        if steps:
            for schedule in interleavings([left[1:] if i == number else left for i, left in enumerate(sessions)]):
                yield (number, *schedule)


def sample(sessions: Sequence[Sequence[Step]], size: int, seed: int) -> list[Schedule]:
    """Draw `size` different orders, the same ones for the same seed."""
    line = [number for number, steps in enumerate(sessions) for _ in steps]
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
    schedules = list(interleavings(sessions))
    return schedules if len(schedules) <= most else sample(sessions, most, 1)


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


async def rows(conn: Connection, query: Any, *params: object) -> list[tuple[Any, ...]]:
    return await (await conn.execute(query, params)).fetchall()


async def unless(sqlstates: Sequence[str], conn: Connection, query: Any, *params: object) -> list[tuple[Any, ...]]:
    """Return the rows of a query, or none, after a rollback, if it fails with one of these."""
    try:
        return await rows(conn, query, *params)
    except psycopg.Error as error:
        if error.sqlstate not in sqlstates:
            raise
        await conn.execute("rollback")
        return []


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
            conns = []
            for _ in range(len(sessions) + 2):
                opened = await psycopg.AsyncConnection.connect(dsn, autocommit=True, prepare_threshold=0)
                conns.append(await stack.enter_async_context(opened))
            conn, runner = conns.pop(), Interleaver(conns, conns.pop())
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


class Interleaver:
    """Connections reused for all schedules, and one that watches for lock waits."""

    def __init__(self, sessions: list[Connection], watcher: Connection) -> None:
        self.sessions, self._watcher = sessions, watcher

    async def run(self, schedule: Schedule, sessions: Sequence[Sequence[Step]], scene: Any) -> bool:
        """Run one schedule; return False if it cannot happen. Raises StepFailed. No transaction stays open."""
        done = [0] * len(sessions)
        pending: dict[int, asyncio.Task[object]] = {}
        try:
            for session in schedule:
                if session in pending:
                    return False
                conn, step = self.sessions[session], sessions[session][done[session]]
                playing = conn.execute(step) if isinstance(step, str) else step(conn, scene)
                pending[session] = asyncio.ensure_future(playing)
                done[session] += 1
                await self._settle(schedule, pending, done)
            await self._settle(schedule, pending, done, to_the_end=True)
            return True
        finally:
            await self._clean_up(pending)

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
                        step = f"schedule {schedule}: step {done[session]} of session {session}"
                        raise StepFailed(f"{step}: {type(error).__name__}: {error}") from error
            if not to_the_end and await self._all_wait(pending):
                return
            if loop.time() > deadline:
                raise AssertionError(f"schedule {schedule}: sessions {sorted(pending)} did not end in {_LIMIT:g} s")

    async def _all_wait(self, pending: dict[int, asyncio.Task[object]]) -> bool:
        if not pending:
            return True
        pids = [self.sessions[session].info.backend_pid for session in pending]
        waiting = await rows(self._watcher, _WAITS, pids)
        return len(waiting) == len(pids) and not any(step.done() for step in pending.values())

    async def _clean_up(self, pending: dict[int, asyncio.Task[object]]) -> None:
        for session, step in pending.items():
            await self._watcher.execute("select pg_cancel_backend(%s)", [self.sessions[session].info.backend_pid])
            with suppress(psycopg.Error):
                await step
        for conn in self.sessions:
            if not is_idle(conn):
                await conn.execute("rollback")


# --- a scene of two workers as a program outside sees it: a start after its answer, an end before its commit --------


@dataclass
class Scene:
    queue: str
    workers: dict[str, int]
    claimed: dict[str, dict[int, tuple[UUID, int]]] = field(default_factory=lambda: defaultdict(dict))
    """Per worker: job -> lease, attempt."""
    running: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    ordered: bool = True
    """Whether only one job may run at a time."""
    starts: list[int] = field(default_factory=list)
    did: dict[int, int] = field(default_factory=dict)
    """The number in the args of each job when it last started."""
    open: dict[Connection, list[tuple[int, int, str]]] = field(default_factory=lambda: defaultdict(list))
    told: list[tuple[int, int, str]] = field(default_factory=list)
    """What committed producers were told: the job that does their work, its number, a report."""
    wrong: list[str] = field(default_factory=list)


async def two_workers(conn: Connection, queue: str) -> dict[str, int]:
    query = "select tallybook.worker_start('one', %s), tallybook.worker_start('two', %s)"
    ((one, two),) = await rows(conn, query, [queue], [queue])
    return {"one": one, "two": two}


@step
async def claim(conn: Connection, scene: Scene, name: str, most: int = 10) -> None:
    """Claim available jobs, past cancelled ones."""
    claim_id, jobs, query = -1, 0, "select claim_id, jobs from tallybook.claim(%s, %s, %s, %s)"
    while claim_id is not None and not jobs:
        lease = uuid4()
        ((claim_id, jobs),) = await rows(conn, query, scene.workers[name], [scene.queue], [most], lease)
    for job, attempt in await rows(conn, "select job_id, attempt from tallybook.claimed_jobs(%s)", lease):
        scene.claimed[name][job] = (lease, attempt)


@step
async def start(conn: Connection, scene: Scene, name: str) -> None:
    """Look at all jobs that are claimed and not started: end those that must not start, ask for the others' turns."""
    mine, free = scene.claimed[name], []
    for job, (lease, attempt) in list(mine.items()):
        if job in scene.running[name]:
            continue
        query = "select blocked_by, (args ->> 'n')::int from tallybook.claimed_jobs(%s, %s)"
        ((blocked_by, n),) = await rows(conn, query, lease, job)
        if blocked_by in ("cancelled", "postponed"):
            verb = "cancel_running" if blocked_by == "cancelled" else "postpone"
            await rows(conn, f"select tallybook.{verb}(%s, %s, %s)", lease, job, attempt)
            del mine[job]
        elif blocked_by != "changing":
            free.append((lease, job, attempt, n))
    if not free:
        return
    *asked, numbers = map(list, zip(*free, strict=True))
    ((ready, busy),) = await rows(conn, "select ready, busy from tallybook.order_admit(%s, %s, %s)", *asked)
    for job, n in zip(asked[1], numbers, strict=True):
        if job in ready:
            if scene.ordered and (others := set().union(*scene.running.values())):
                scene.wrong.append(f"job {job} started while {others} ran")
            if changing := [n for told in scene.open.values() for j, n, how in told if (j, how) == (job, "updated")]:
                scene.wrong.append(f"job {job} started while {changing} were being promised of it")
            scene.running[name].add(job)
            scene.starts.append(job)
            scene.did[job] = n
        elif job not in busy:
            del mine[job]


@step
async def end(conn: Connection, scene: Scene, name: str, verb: str = "complete", more: str = "") -> None:
    """End what the worker runs; in an open transaction, it runs until the commit."""
    jobs, at_once = list(scene.running[name]), is_idle(conn)
    if at_once:
        del scene.running[name]
    for job in jobs:
        lease, attempt = scene.claimed[name][job]
        await rows(conn, f"select tallybook.{verb}(%s, %s, %s{more})", lease, job, attempt)
        if at_once:
            del scene.claimed[name][job]


async def work(conn: Connection, scene: Scene, name: str) -> None:
    """Claim, start and complete what there is."""
    for play_step in (claim(name), start(name), end(name)):
        await play_step(conn, scene)


@step
async def commit(conn: Connection, scene: Scene, name: str = "") -> None:
    """Commit what a producer or this worker has done."""
    for job in scene.running.pop(name, ()):
        del scene.claimed[name][job]
    await conn.execute("commit")
    scene.told += scene.open.pop(conn, [])


def promised(conn: Connection, scene: Scene, job: int, n: int, report: str = "") -> None:
    """Note what a producer is told, which counts from its commit on."""
    (scene.told if is_idle(conn) else scene.open[conn]).append((job, n, report))


def missed(scene: Scene, told: dict[int, int]) -> list[str]:
    """Return the jobs that did not do the last work that was promised of them, in the end."""
    return [f"{n} was promised of job {job}, which did {scene.did.get(job)}" for job, n in told.items()
            if scene.did.get(job) != n]  # fmt: skip
