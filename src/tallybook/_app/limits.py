"""app.rate_limits and app.concurrency_limits: the verbs that steer limits, those of the code and those of the database."""

from __future__ import annotations

from datetime import datetime, timedelta

from tallybook._db import rates
from tallybook._db.verb import ListOf, Noun, Verb
from tallybook._model.rate import ConcurrencyInfo, ConcurrencyRule, RateInfo, RateRule


class RateLimits(Noun):
    """The rate limits of the app's database. `app.rate_limit(...)` declares one in code."""

    def list(self) -> Verb[ListOf[RateInfo]]:
        """List the keys of rate limits that are in use: their rule, their calls, how many jobs wait, when the next may start.

        for rate in await app.rate_limits.list(): print(rate.name, rate.waiting)
        """
        return self._verb(rates.rates())

    def set(self, name: str, calls: int, *, per: timedelta | str, burst: int = 1) -> Verb[str]:
        """Make or change a rate limit that lives in the database; "created", "changed" or "unchanged".

        One that an app declares in code becomes a person's by it, and stays as it is said here. Options as in `app.rate_limit`.

            await app.rate_limits.set("provider:acme", 30, per="1 min", burst=5)
        """
        return self._verb(rates.set_(RateRule.checked(name, calls, per, burst)))

    def drop(self, name: str) -> Verb[bool]:
        """Remove a rate limit; False: there is none. Jobs that still name it fail: take the name out of them first."""
        return self._verb(rates.drop(name))

    def push(self, name: str, until: datetime) -> Verb[datetime]:
        """Let no call of this key start before `until` (aware); returns when the next one may. It never brings one forward.

        await app.rate_limits.push("provider:acme", datetime.now(UTC) + timedelta(minutes=5))
        """
        return self._verb(rates.push(name, until))


class ConcurrencyLimits(Noun):
    """The concurrency limits of the app's database. `app.concurrency_limit(...)` declares one in code."""

    def list(self) -> Verb[ListOf[ConcurrencyInfo]]:
        """List the keys of concurrency limits: their rule, how many permits are held, how many jobs wait for one.

        for key in await app.concurrency_limits.list(): print(key.name, key.held, key.waiting)
        """
        return self._verb(rates.concurrency())

    def set(self, name: str, most: int) -> Verb[str]:
        """Make or change a concurrency limit that lives in the database; "created", "changed" or "unchanged".

        A lower one stops nobody who runs.

            await app.concurrency_limits.set("customer:42", 5)
        """
        return self._verb(rates.set_concurrency(ConcurrencyRule(name, most)))

    def drop(self, name: str) -> Verb[bool]:
        """Remove a concurrency limit; False: there is none. Who waits for a permit goes on."""
        return self._verb(rates.drop_concurrency(name))
