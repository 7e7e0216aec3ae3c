"""Limits of an App: those that its code declares, and the verbs that steer any."""

from __future__ import annotations

from datetime import datetime, timedelta

from tallybook._db import rates
from tallybook._model.rate import ConcurrencyInfo, ConcurrencyRule, RateInfo, RateRule
from tallybook._run import run, run_sync
from tallybook.errors import ConfigError

__all__ = ["Limits"]


class Limits:
    """Mixed into App."""

    name: str
    rate_limits: dict[str, RateRule]
    concurrency_limits: dict[str, ConcurrencyRule]

    def concurrency_limit(self, name: str, most: int) -> None:
        """Declare a concurrency limit: at most `most` jobs of a key run at once, over all workers.

        Names are those of `rate_limit`; a name may have a rule of both kinds. What is over it waits (state waiting) and goes on, by
        priority, then as it came, when one that runs has ended or its worker has died. ConfigError.

            app.concurrency_limit("customer", 2)
        """
        rule = ConcurrencyRule(name, most)
        if name in self.concurrency_limits:
            raise ConfigError("concurrency_limit", name, "declared twice", hint="Give one of them another name")
        self.concurrency_limits[name] = rule

    async def concurrency_limit_set(self, conn: object, name: str, most: int) -> str:
        """Make or change a concurrency limit that lives in the database; "created", "changed" or "unchanged".

        A lower one stops nobody who runs.

            await app.concurrency_limit_set(conn, "customer:42", 5)
        """
        return await run(conn, rates.set_concurrency(ConcurrencyRule(name, most)))

    def concurrency_limit_set_sync(self, conn: object, name: str, most: int) -> str:
        """Make or change a concurrency limit; concurrency_limit_set without an event loop."""
        return run_sync(conn, rates.set_concurrency(ConcurrencyRule(name, most)))

    async def concurrency_limit_drop(self, conn: object, name: str) -> bool:
        """Remove a concurrency limit; False: there is none. Who waits for a permit goes on."""
        return await run(conn, rates.drop_concurrency(name))

    def concurrency_limit_drop_sync(self, conn: object, name: str) -> bool:
        """Remove a concurrency limit; concurrency_limit_drop without an event loop."""
        return run_sync(conn, rates.drop_concurrency(name))

    async def concurrency(self, conn: object) -> list[ConcurrencyInfo]:
        """List the keys of concurrency limits: their rule, how many permits are held, how many jobs wait for one.

        for key in await app.concurrency(conn): print(key.name, key.held, key.waiting)
        """
        return await run(conn, rates.concurrency())

    def concurrency_sync(self, conn: object) -> list[ConcurrencyInfo]:
        """List the keys of concurrency limits; concurrency without an event loop."""
        return run_sync(conn, rates.concurrency())

    def rate_limit(self, name: str, calls: int, *, per: timedelta | str, burst: int = 1) -> None:
        """Declare a rate limit: at most `calls` in any window of `per`, over all workers and restarts.

        Of the jobs that name it (`limits=("provider:acme",)`), or whose handlers call `ctx.limit("provider:acme")`, each key
        `NAME:...` is held by itself. The name "queue:mail" holds all jobs of a queue, "task:send_welcome" all of a task.
        They start one after the other, `per / calls` apart; with a `burst` so many start at once where there was room.
        Workers put it on record at their start, change it where it differs, and remove it when it has left the code. ConfigError.

            app.rate_limit("provider", 8, per="1 min")
        """
        rule = RateRule.checked(name, calls, per, burst)
        if name in self.rate_limits:
            raise ConfigError("rate_limit", name, "declared twice", hint="Give one of them another name")
        self.rate_limits[name] = rule

    async def rate_limit_set(self, conn: object, name: str, calls: int, *, per: timedelta | str, burst: int = 1) -> str:
        """Make or change a rate limit that lives in the database; "created", "changed" or "unchanged".

        One that an app declares in code becomes a person's by it, and stays as it is said here. Options as in `rate_limit`.

            await app.rate_limit_set(conn, "provider:acme", 30, per="1 min", burst=5)
        """
        return await run(conn, rates.set_(RateRule.checked(name, calls, per, burst)))

    def rate_limit_set_sync(self, conn: object, name: str, calls: int, *, per: timedelta | str, burst: int = 1) -> str:
        """Make or change a rate limit that lives in the database; rate_limit_set without an event loop."""
        return run_sync(conn, rates.set_(RateRule.checked(name, calls, per, burst)))

    async def rate_limit_drop(self, conn: object, name: str) -> bool:
        """Remove a rate limit; False: there is none. Jobs that still name it fail: take the name out of them first."""
        return await run(conn, rates.drop(name))

    def rate_limit_drop_sync(self, conn: object, name: str) -> bool:
        """Remove a rate limit; rate_limit_drop without an event loop."""
        return run_sync(conn, rates.drop(name))

    async def rate_limit_push(self, conn: object, name: str, until: datetime) -> datetime:
        """Let no call of this key start before `until` (aware); returns when the next one may. It never brings one forward.

        await app.rate_limit_push(conn, "provider:acme", datetime.now(UTC) + timedelta(minutes=5))
        """
        return await run(conn, rates.push(name, until))

    def rate_limit_push_sync(self, conn: object, name: str, until: datetime) -> datetime:
        """Let no call of this key start before `until`; rate_limit_push without an event loop."""
        return run_sync(conn, rates.push(name, until))

    async def rates(self, conn: object) -> list[RateInfo]:
        """List the keys of rate limits that are in use: their rule, their calls, how many jobs wait, when the next may start.

        for rate in await app.rates(conn): print(rate.name, rate.waiting)
        """
        return await run(conn, rates.rates())

    def rates_sync(self, conn: object) -> list[RateInfo]:
        """List the keys of rate limits that are in use; rates without an event loop."""
        return run_sync(conn, rates.rates())
