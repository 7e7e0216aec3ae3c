"""Stores how attempts ended, in batches that form without a timer.

While one flush runs, the next ends gather. Under load a flush carries hundreds of ends; with one job at a time it
starts at once, so batching adds no latency.
"""

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import accumulate
from typing import Any

from tallybook._db.declared import Declared
from tallybook._db.driver import AsyncConnection
from tallybook._db.ends import CANCEL_RUNNING, COMPLETE_MANY, COMPLETE_MANY_WITH, CRASH, FAIL, MOVE, SNOOZE, UNCLAIM
from tallybook._db.link import Link
from tallybook._worker.finish.doubtful_ends import DoubtfulEnds, End
from tallybook._worker.jobs import Book, Running
from tallybook.errors import QueueUnavailable

log = logging.getLogger("tallybook.worker")

# The jobs of one flush are mostly of one claim: its lease is sent once.
_ONE = {"leases": "array_fill({lease:uuid}, array[cardinality(x.j)])", "job_ids": "x.j", "attempts": "x.a"}
_COMPLETE_ONE = f"""\
select {COMPLETE_MANY.called("order", **_ONE)} from (select %s::bigint[] as j, %s::int[] as a) x"""  # noqa: S608
# Store the ends first, then release the jobs that wait for their permits: one commit covers both.
_RELEASE = Declared("concurrency_release(names text[], quiet text[]) -> row (released int)")
_AND_RELEASE = f"select refused, ({_RELEASE.called('order')}).released from ({{}} offset 0) done(refused)"  # noqa: S608

_LARGEST_FLUSH = 2000
# A flush ends when its results have more characters than this: the server accepts no message of 1 GB.
_MOST_RESULTS = 1 << 24
# Each order key of a flush holds a server lock until it commits, and the server has room for some thousands in all.
_LARGEST_ORDERED = 200
# Verbs in one statement: its columns are limited, and a large plan is costly. At most _LARGEST_ORDERED.
_MOST_VERBS = 200
# Ends release the jobs that wait for their permits only if few limits are involved: more would delay the ends.
_MOST_LIMITS = 20


@dataclass(frozen=True, slots=True)
class How:
    """How an attempt ends, if not completed: the verb, and its values after lease, job and attempt, in its order."""

    verb: str
    declared: Declared
    values: Mapping[str, Any] = field(default_factory=dict)
    wake_in: timedelta | None = None
    error: dict[str, Any] | None = None
    """The error of a failure."""


SET_ASIDE = How("move", MOVE)
"""This worker does not know the task."""


def snooze(delay: timedelta) -> How:
    """Run the job again after `delay`, without a failure."""
    return How("snooze", SNOOZE, {"delay": delay}, delay)


def unclaim(delay: timedelta) -> How:
    return How("unclaim", UNCLAIM, {"delay": delay}, delay)


def cancel(reason: str | None) -> How:
    return How("cancel", CANCEL_RUNNING, {"reason": reason})


def fail(error: dict[str, Any], delay: timedelta | None = None, limit: int | None = None, *, final: bool) -> How:
    """Fail the attempt: back off by `delay` (None: the server's own), or make it dead after `limit` failures."""
    values = {"error": json.dumps(error), "retry_in": delay, "max_attempts": limit, "final": final}
    return How("fail", FAIL, values, None if final else delay, error)


def crash(error: dict[str, Any]) -> How:
    """Record that the attempt took its own process with it: retry after the server's delay, or dead as crashed."""
    return How("crash", CRASH, {"error": json.dumps(error)}, timedelta(seconds=1), error)


class Finisher:
    """Collects ends and flushes them over its own connection."""

    def __init__(self, link: Link, book: Book) -> None:
        self._link = link
        self.doubtful = DoubtfulEnds(Link(link.dsn, link.name), self.ended)
        self._book = book
        self._completed: list[Running] = []
        self._ends: list[End] = []
        self._results: dict[Running, str] = {}
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.counts: Counter[str] = Counter()
        """Number of attempts by outcome, in the server's words."""
        self.failed: Counter[str] = Counter()
        """The same for attempts that failed."""
        self.keeps_failure = False
        """Whether to keep the first failure, for a drain; its exception keeps everything that its frames hold."""
        self.first_failure: tuple[Running, dict[str, Any]] | None = None

    @property
    def waiting(self) -> int:
        """Ends that no flush has taken yet: the claimer waits while there are too many."""
        return len(self._completed) + len(self._ends)

    def complete(self, running: Running, result: str | None = None) -> None:
        if result is not None:
            self._results[running] = result
        self._completed.append(running)
        self._idle.clear()
        self._work.set()

    def end(self, running: Running, how: How) -> None:
        if self.keeps_failure and how.verb == "fail" and self.first_failure is None:
            self.first_failure = (running, how.error or {})
        params = (running.lease.lease, running.job_id, running.attempt, *how.values.values())
        end = End(running, how.verb, how.declared.worker, params, how.wake_in)
        if running.in_doubt:
            self.doubtful.settle(end)
            return
        if running.told is not None:
            running.told(how.verb, how.error)
        self._ends.append(end)
        self._idle.clear()
        self._work.set()

    async def drained(self) -> None:
        """Wait until every end passed so far is in the database."""
        await self._idle.wait()
        await self.doubtful.settled()

    def ended(self, running: Running, verb: str, said: str, wake_in: timedelta | None = None) -> None:
        """Note an end that was stored elsewhere: by an atomic task's own transaction, or after doubt."""
        if running.told is not None:
            running.told(verb, None)
        self._count(running, verb, said, wake_in)
        self._seen([running])

    async def run(self) -> None:
        """Flush forever; the caller cancels it once `drained` has returned."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self._completed or self._ends:
                completed, self._completed = _next_flush(self._completed, self._results)
                ends, self._ends = self._ends[:_MOST_VERBS], self._ends[_MOST_VERBS:]
                if completed:
                    self._seen(completed, released=await self._say_completed(completed))
                    if self._results:
                        for job in completed:
                            self._results.pop(job, None)
                if ends:
                    await self._say(ends)
                    self._seen([end.running for end in ends])
            self._idle.set()

    async def _say_completed(self, jobs: list[Running]) -> bool:
        """Store completed jobs; return whether their permits were released. If that fails, only ends are stored."""
        try:
            return await self._link.run(lambda conn: self._flush_completed(conn, jobs, release=True))
        except QueueUnavailable:
            raise
        except Exception as error:
            if not any(job.permits for job in jobs):
                raise
            log.error("the permits of ended jobs will be released later: %s", error, extra={"event": "release failed"})
        return await self._link.run(lambda conn: self._flush_completed(conn, jobs, release=False))

    async def _say(self, ends: list[End]) -> None:
        """Store all ends in one transaction; if it is refused, split it, so that one bad end stops no other."""
        try:
            await self._link.run(lambda conn: self._flush_ends(conn, ends))
        except QueueUnavailable:
            raise
        except Exception as error:  # a user's text that cannot be encoded is a ValueError
            if len(ends) > 1:
                half = len(ends) // 2
                await self._say(ends[:half])
                await self._say(ends[half:])
                return
            job = ends[0].running
            log.error("job %s: its end (%s) cannot be stored: %s", job.job_id, ends[0].verb, error)
            failed = ends[0].failed(error)
            await self._link.run(lambda conn: self._flush_ends(conn, [failed]))

    def _seen(self, jobs: list[Running], *, released: bool = False) -> None:
        for lease, count in Counter(job.lease for job in jobs).items():
            self._book.ended(lease, count)
            if lease.permits and not released:
                self._book.on.permits({key for job in jobs if job.lease is lease for key in job.permits or ()})
            if lease.followed:
                self._book.on.followed(
                    [job.job_id for job in jobs if job.lease is lease and job.options and "followed" in job.options]
                )
        self._book.changed.set()  # the claimer may be waiting for unsent ends

    async def _flush_completed(self, conn: AsyncConnection, jobs: list[Running], *, release: bool) -> bool:
        first = jobs[0].lease
        one = all(job.lease is first for job in jobs)
        values: list[Any] = [[job.job_id for job in jobs], [job.attempt for job in jobs]]
        if self._results and any(job in self._results for job in jobs):
            sql, one = COMPLETE_MANY_WITH.worker, False
            values.append([self._results.get(job) for job in jobs])
        else:
            sql = _COMPLETE_ONE if one else COMPLETE_MANY.worker
        values.insert(0, first.lease if one else [job.lease.lease for job in jobs])
        names = {key for job in jobs for key in job.permits or ()} if not one or first.permits else ()
        if release := release and 0 < len(names) <= _MOST_LIMITS:
            free = [queue for queue, slots in self._book.free.items() if slots > 0]
            sql, values = _AND_RELEASE.format(sql), [sorted(names), free, *values]
        refused, *released = await (await conn.execute(sql, values)).fetchone() or ([],)
        if any(released):
            self._book.on.room()  # no other worker is woken
        self.counts["completed"] += len(jobs) - len(refused)
        for job_id in refused:
            self._refused(job_id, "complete")
        return release and released != [None]

    async def _flush_ends(self, conn: AsyncConnection, ends: list[End]) -> None:
        # One statement: a flush that is repeated after a lost connection finds all of it done, or nothing. With
        # several, even in one transaction, a process that is frozen between them leaves the outcomes locked. The
        # server's limit for idle transactions does not apply in a pipeline, so nobody could rescue these jobs.
        ordered = sorted(ends, key=lambda end: (end.running.job_id, end.running.attempt))
        verbs = "select " + ", ".join(end.sql.removeprefix("select ") for end in ordered)
        cursor = await conn.execute(verbs, [value for end in ordered for value in end.params])
        answers = await cursor.fetchone() or ()
        for end, said in zip(ordered, answers, strict=True):
            self._count(end.running, end.verb, said, end.wake_in)

    def _count(self, running: Running, verb: str, said: str, wake_in: timedelta | None) -> None:
        if said == "refused":
            self._refused(running.job_id, verb)
            return
        self.counts["completed" if said == "dropped" else said] += 1
        if verb in ("fail", "crash"):
            self.failed[said] += 1
            if (recorded := getattr(running, "recorded", None)) is not None:
                recorded(said)
        if said == "dead":
            log.error(
                "%s %s is dead: attempt %s was its last", running.task_name, running.job_id, running.attempt,
                extra={"event": "dead", "job": running.job_id, "task_name": running.task_name, "queue": running.queue},
            )  # fmt: skip
        if wake_in is not None and said == "scheduled":
            self._book.on.scheduled(wake_in)

    def _refused(self, job_id: int, verb: str) -> None:
        self.counts["refused"] += 1
        log.warning("job %s: %s was refused, because another worker has taken the job over", job_id, verb)


def _next_flush(jobs: list[Running], results: dict[Running, str]) -> tuple[list[Running], list[Running]]:
    size = min(len(jobs), _LARGEST_FLUSH)
    if size > _LARGEST_ORDERED and any(job.order_key is not None for job in jobs[:size]):
        size = _LARGEST_ORDERED
    if results:
        lengths = accumulate(len(results.get(job, "")) for job in jobs[:size])
        size = min(size, 1 + sum(length <= _MOST_RESULTS for length in lengths))
    return jobs[:size], jobs[size:]
