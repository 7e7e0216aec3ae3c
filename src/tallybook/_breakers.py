"""Circuit breakers of an App: those that its code declares, and the verbs that steer any."""

from __future__ import annotations

from datetime import datetime, timedelta

from tallybook._db import breakers
from tallybook._model.breaker import BreakerInfo, BreakerRule
from tallybook._run import run, run_sync
from tallybook.errors import ConfigError

__all__ = ["Breakers"]


class Breakers:
    """Mixed into App."""

    breaker_rules: dict[str, BreakerRule]

    def breaker(self, name: str, failures: int, *, per: timedelta | str, open_for: timedelta | str) -> None:
        """Declare a circuit breaker: after `failures` of a key within `per` its jobs wait for `open_for`.

        Then one job is let through as a probe: if it completes the others go on, and if it fails they wait once more. Names are
        those of `rate_limit`; a name may have rules of all kinds. ConfigError.

            app.breaker("provider", 5, per="1 min", open_for="30 s")
        """
        rule = BreakerRule.checked(name, failures, per, open_for)
        if name in self.breaker_rules:
            raise ConfigError("breaker", name, "declared twice", hint="Give one of them another name")
        self.breaker_rules[name] = rule

    async def breaker_set(
        self, conn: object, name: str, failures: int, *, per: timedelta | str, open_for: timedelta | str
    ) -> str:
        """Make or change a breaker that lives in the database; "created", "changed" or "unchanged". Options as in `breaker`.

        await app.breaker_set(conn, "provider:acme", 3, per="1 min", open_for="5 min")
        """
        return await run(conn, breakers.set_(BreakerRule.checked(name, failures, per, open_for)))

    def breaker_set_sync(
        self, conn: object, name: str, failures: int, *, per: timedelta | str, open_for: timedelta | str
    ) -> str:
        """Make or change a breaker that lives in the database; breaker_set without an event loop."""
        return run_sync(conn, breakers.set_(BreakerRule.checked(name, failures, per, open_for)))

    async def breaker_drop(self, conn: object, name: str) -> bool:
        """Remove a breaker; False: there is none. Who waits for it goes on; jobs fail that name it where it has no other rule."""
        return await run(conn, breakers.drop(name))

    def breaker_drop_sync(self, conn: object, name: str) -> bool:
        """Remove a breaker; breaker_drop without an event loop."""
        return run_sync(conn, breakers.drop(name))

    async def breaker_open(self, conn: object, name: str, duration: timedelta | str | None = None) -> datetime:
        """Open the breaker of a key by hand: no job of it starts before the instant that is returned; then a probe does.

        `duration` is what the rule says, unless it is given. SqlError TB005: there is no such breaker.

            await app.breaker_open(conn, "provider:acme", "2 h")
        """
        return await run(conn, breakers.open_(name, duration))

    def breaker_open_sync(self, conn: object, name: str, duration: timedelta | str | None = None) -> datetime:
        """Open the breaker of a key by hand; breaker_open without an event loop."""
        return run_sync(conn, breakers.open_(name, duration))

    async def breaker_close(self, conn: object, name: str) -> bool:
        """Close the breaker of a key by hand; its jobs go on, and its failures are forgotten. False: it was closed."""
        return await run(conn, breakers.close(name))

    def breaker_close_sync(self, conn: object, name: str) -> bool:
        """Close the breaker of a key by hand; breaker_close without an event loop."""
        return run_sync(conn, breakers.close(name))

    async def breakers(self, conn: object) -> list[BreakerInfo]:
        """List the keys of circuit breakers: their rule, their state, their failures, how many jobs wait.

        for breaker in await app.breakers(conn): print(breaker.name, breaker.state)
        """
        return await run(conn, breakers.breakers())

    def breakers_sync(self, conn: object) -> list[BreakerInfo]:
        """List the keys of circuit breakers; breakers without an event loop."""
        return run_sync(conn, breakers.breakers())
