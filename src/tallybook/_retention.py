"""The verbs of an App over history; a mixin of App like _operations."""

from __future__ import annotations

from datetime import timedelta

from tallybook._db import retention as calls
from tallybook._model.durations import parse_duration
from tallybook._model.retention import HeldRange, RetentionInfo
from tallybook._run import run, run_sync

__all__ = ["Retentions"]


class Retentions:
    """Mixed into App."""

    async def retentions(self, conn: object) -> list[RetentionInfo]:
        """List how long what is kept: ended jobs by the class of their queue, dead letters, ticks of schedules.

        for kept in await app.retentions(conn): print(kept.name, kept.keep)
        """
        return await run(conn, calls.retentions())

    def retentions_sync(self, conn: object) -> list[RetentionInfo]:
        """List how long what is kept; retentions without an event loop."""
        return run_sync(conn, calls.retentions())

    async def retention(self, conn: object, name: str, keep: str | timedelta) -> bool:
        """Change how long something is kept, 1 minute to 100 years; False: it was so already.

        Running workers follow within a minute. With a shorter time goes what is past it, for ever. InvalidArgument for a class
        that there is not, or a time out of range; ConfigError for what is no duration.

            await app.retention(conn, "default", "14 days")
        """
        return await run(conn, calls.set_(name, parse_duration(keep, option="keep")))

    def retention_sync(self, conn: object, name: str, keep: str | timedelta) -> bool:
        """Change how long something is kept; retention without an event loop."""
        return run_sync(conn, calls.set_(name, parse_duration(keep, option="keep")))

    async def held_ranges(self, conn: object) -> list[HeldRange]:
        """List the ranges of history that stay although their time is over, and why.

        for held in await app.held_ranges(conn): print(held.name, held.open_jobs, held.why)
        """
        return await run(conn, calls.held())

    def held_ranges_sync(self, conn: object) -> list[HeldRange]:
        """List the ranges of history that stay; held_ranges without an event loop."""
        return run_sync(conn, calls.held())
