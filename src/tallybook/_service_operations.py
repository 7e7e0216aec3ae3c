"""The verbs of an App over services; a mixin of App like _operations."""

from __future__ import annotations

from datetime import timedelta

from tallybook._db import services as calls
from tallybook._model.durations import parse_duration
from tallybook._model.service import ServiceInfo
from tallybook._task import run, run_sync

__all__ = ["ServiceOperations"]


class ServiceOperations:
    """Mixed into App."""

    async def services(self, conn: object) -> list[ServiceInfo]:
        """List the services: how often each is looked after, and its last run, how long that took and what it did.

        for service in await app.services(conn): print(service.name, service.last_run_at)
        """
        return await run(conn, calls.services())

    def services_sync(self, conn: object) -> list[ServiceInfo]:
        """List the services; services without an event loop."""
        return run_sync(conn, calls.services())

    async def service_every(self, conn: object, name: str, every: str | timedelta) -> bool:
        """Change how often a service is looked after at least, 100 ms to 1 day; False: it was so already.

        Running workers follow at their next look, within 5 s. InvalidArgument for a service that there is not, or a time
        out of range; ConfigError for what is no duration.

            await app.service_every(conn, "rescue", "10 s")
        """
        return await run(conn, calls.service_every(name, parse_duration(every, option="every")))

    def service_every_sync(self, conn: object, name: str, every: str | timedelta) -> bool:
        """Change how often a service is looked after; service_every without an event loop."""
        return run_sync(conn, calls.service_every(name, parse_duration(every, option="every")))
