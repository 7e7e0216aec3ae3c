"""app.rate_limits, app.concurrency_limits and app.breakers: the verbs for limits in code or in the database."""

from datetime import datetime, timedelta

from tallybook._db import rates
from tallybook._db.verb import ListOf, Noun, Verb
from tallybook._model.rate import BreakerInfo, BreakerRule, ConcurrencyInfo, ConcurrencyRule, RateInfo, RateRule


class RateLimits(Noun):
    """The rate limits of the app's database. `app.rate_limit(...)` declares one in code."""

    def list(self) -> Verb[ListOf[RateInfo]]:
        """List the rate-limit keys in use: their rule, calls, number of waiting jobs, and the time of the next start.

        for rate in await app.rate_limits.list(): print(rate.name, rate.waiting)
        """
        return self._verb(rates.rates())

    def set(self, name: str, calls: int, *, per: timedelta | str, burst: int = 1) -> Verb[str]:
        """Create or change a rate limit in the database; return "created", "changed" or "unchanged".

        It overrides a limit of the same name in code permanently. Options as in `app.rate_limit`.

            await app.rate_limits.set("provider:acme", 30, per="1 min", burst=5)
        """
        return self._verb(rates.set_(RateRule.checked(name, calls, per, burst)))

    def drop(self, name: str) -> Verb[bool]:
        """Remove a rate limit; False: there is none.

        Its jobs no longer wait. A job that names a key without any rule fails, so remove the name from jobs first.
        """
        return self._verb(rates.drop(name))

    def push(self, name: str, until: datetime | timedelta | str) -> Verb[datetime]:
        """Delay all calls of this key until `until` (aware), or by a duration; return the time of the next call.

        It never makes a call earlier. Raises InvalidArgument if there is no such limit.

            await app.rate_limits.push("provider:acme", "5 min")
        """
        return self._verb(rates.push(name, until))


class ConcurrencyLimits(Noun):
    """The concurrency limits of the app's database. `app.concurrency_limit(...)` declares one in code."""

    def list(self) -> Verb[ListOf[ConcurrencyInfo]]:
        """List the keys of concurrency limits: their rule, held permits and number of waiting jobs.

        for key in await app.concurrency_limits.list(): print(key.name, key.held, key.waiting)
        """
        return self._verb(rates.concurrency())

    def set(self, name: str, most: int) -> Verb[str]:
        """Create or change a concurrency limit in the database; return "created", "changed" or "unchanged".

        A lower limit does not stop running jobs.

            await app.concurrency_limits.set("customer:42", 5)
        """
        return self._verb(rates.set_concurrency(ConcurrencyRule(name, most)))

    def drop(self, name: str) -> Verb[bool]:
        """Remove a concurrency limit; False: there is none.

        Its jobs no longer wait. A job that names a key without any rule fails, so remove the name from jobs first.
        """
        return self._verb(rates.drop_concurrency(name))


class Breakers(Noun):
    """The circuit breakers of the app's database. `app.breaker(...)` declares one in code."""

    def list(self) -> Verb[ListOf[BreakerInfo]]:
        """List the keys of circuit breakers with their rule, state, failures and number of waiting jobs.

        for breaker in await app.breakers.list(): print(breaker.name, breaker.state)
        """
        return self._verb(rates.breakers)

    def set(self, name: str, failures: int, *, per: timedelta | str, open_for: timedelta | str) -> Verb[str]:
        """Create or change a breaker in the database; return "created", "changed" or "unchanged".

        Options as in `app.breaker`.

        await app.breakers.set("provider:acme", 3, per="1 min", open_for="5 min")
        """
        return self._verb(rates.set_breaker(BreakerRule.checked(name, failures, per, open_for)))

    def drop(self, name: str) -> Verb[bool]:
        """Remove a breaker; False: there is none.

        Its jobs no longer wait. A job that names a key without any rule fails, so remove the name from jobs first.
        """
        return self._verb(rates.drop_breaker(name))

    def open(self, name: str, duration: timedelta | str | None = None) -> Verb[datetime]:
        """Open the breaker of a key by hand; return the time at which a probe starts.

        Until then none of its jobs starts. `duration` defaults to that of the rule. Raises InvalidArgument if there is
        no such breaker.

            await app.breakers.open("provider:acme", "2 h")
        """
        return self._verb(rates.open_breaker(name, duration))

    def close(self, name: str) -> Verb[bool]:
        """Close the breaker of a key by hand; its jobs start and its failures are reset. False: it was closed.

        Raises InvalidArgument if there is no such breaker.
        """
        return self._verb(rates.close_breaker(name))
