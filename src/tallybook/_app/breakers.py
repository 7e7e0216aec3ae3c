"""app.breakers: the verbs for circuit breakers, declared in code or in the database."""

from __future__ import annotations

from datetime import datetime, timedelta

from tallybook._db import breakers
from tallybook._db.verb import ListOf, Noun, Verb
from tallybook._model.breaker import BreakerInfo, BreakerRule


class Breakers(Noun):
    """The circuit breakers of the app's database. `app.breaker(...)` declares one in code."""

    def list(self) -> Verb[ListOf[BreakerInfo]]:
        """List the keys of circuit breakers with their rule, state, failures and number of waiting jobs.

        for breaker in await app.breakers.list(): print(breaker.name, breaker.state)
        """
        return self._verb(breakers.breakers)

    def set(self, name: str, failures: int, *, per: timedelta | str, open_for: timedelta | str) -> Verb[str]:
        """Create or change a breaker in the database; return "created", "changed" or "unchanged".

        Options as in `app.breaker`.

        await app.breakers.set("provider:acme", 3, per="1 min", open_for="5 min")
        """
        return self._verb(breakers.set_(BreakerRule.checked(name, failures, per, open_for)))

    def drop(self, name: str) -> Verb[bool]:
        """Remove a breaker; False: there is none.

        Its jobs no longer wait. A job that names a key without any rule fails, so remove the name from jobs first.
        """
        return self._verb(breakers.drop(name))

    def open(self, name: str, duration: timedelta | str | None = None) -> Verb[datetime]:
        """Open the breaker of a key by hand; return the time at which a probe starts.

        Until then none of its jobs starts. `duration` defaults to that of the rule. Raises InvalidArgument if there is
        no such breaker.

            await app.breakers.open("provider:acme", "2 h")
        """
        return self._verb(breakers.open_(name, duration))

    def close(self, name: str) -> Verb[bool]:
        """Close the breaker of a key by hand; its jobs start and its failures are reset. False: it was closed.

        Raises InvalidArgument if there is no such breaker.
        """
        return self._verb(breakers.close(name))
