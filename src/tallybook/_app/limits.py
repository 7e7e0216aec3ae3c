"""app.rate_limits, app.concurrency_limits and app.breakers: the verbs for limits in code or in the database."""

from dataclasses import asdict
from datetime import datetime, timedelta

from tallybook._db.calls import PUSH
from tallybook._db.declared import Declared, Simple, View
from tallybook._db.texts import at, loads, records, utc
from tallybook._db.verb import ListOf, Noun, Verb
from tallybook._model.durations import format_duration, parse_duration
from tallybook._model.options import check_instant, check_name
from tallybook._model.rate import BreakerInfo, BreakerRule, ConcurrencyInfo, ConcurrencyRule, RateInfo, RateRule
from tallybook.errors import InvalidArgument

_NAME = {"name": ("name", 200)}
# All keys in use, and rules without a used key of their own name; or the one of this name.
RATES = View("rates", "rate", records(RateInfo), which="name", seconds=["per"])
CONCURRENCY = View("concurrency", "concurrency", records(ConcurrencyInfo), which="name")
_BREAKERS = View("breakers", "breaker", records(BreakerInfo), seconds=["per", "open_for"])()
_SET_RATE = Declared("rate_limit_set(name text, calls int, per interval, burst int) -> text")
_DROP_RATE = Simple("rate_limit_drop(name text) -> boolean", bool, names=_NAME)
_LONGEST_PUSH = timedelta(days=36525)
_SET_CONCURRENCY = Declared("concurrency_limit_set(name text, most int) -> text")
_DROP_CONCURRENCY = Simple("concurrency_limit_drop(name text) -> boolean", bool, names=_NAME)
_SET_BREAKER = Declared("breaker_set(name text, failures int, per interval, open_for interval) -> text")
_DROP_BREAKER = Simple("breaker_drop(name text) -> boolean", bool, names=_NAME)


def _at(text: str) -> datetime:
    return at(loads(text))


_OPEN_BREAKER = Simple("breaker_open(name text, duration interval) -> timestamptz", _at, names=_NAME)
_CLOSE_BREAKER = Simple("breaker_close(name text) -> boolean", bool, names=_NAME)


class RateLimits(Noun):
    """The rate limits of the app's database. `app.rate_limit(...)` declares one in code."""

    def list(self) -> Verb[ListOf[RateInfo]]:
        """List the rate-limit keys in use: their rule, calls, number of waiting jobs, and the time of the next start.

        for rate in await app.rate_limits.list(): print(rate.name, rate.waiting)
        """
        return self._verb(RATES())

    def set(self, name: str, calls: int, *, per: timedelta | str, burst: int = 1) -> Verb[str]:
        """Create or change a rate limit in the database; return "created", "changed" or "unchanged".

        It overrides a limit of the same name in code permanently. Options as in `app.rate_limit`.

            await app.rate_limits.set("provider:acme", 30, per="1 min", burst=5)
        """
        rule = RateRule(name, calls, parse_duration(per, option="per"), burst)
        return self._verb(_SET_RATE.call(str, name=rule.name, calls=rule.calls, per=rule.per, burst=rule.burst))

    def drop(self, name: str) -> Verb[bool]:
        """Remove a rate limit; False: there is none.

        Its jobs no longer wait. A job that names a key without any rule fails, so remove the name from jobs first.
        """
        return self._verb(_DROP_RATE(name))

    def push(self, name: str, until: datetime | timedelta | str) -> Verb[datetime]:
        """Delay all calls of this key until `until` (aware), or by a duration; return the time of the next call.

        It never makes a call earlier. Raises InvalidArgument if there is no such limit.

            await app.rate_limits.push("provider:acme", "5 min")
        """
        check_name("name", name, 200)
        ahead = None
        if isinstance(until, datetime):
            check_instant("until", until)
        elif (ahead := parse_duration(until, option="duration")) > _LONGEST_PUSH:
            raise InvalidArgument(f"duration {format_duration(ahead)} is too long", hint="Pass at most 100 years")
        instant = utc(until) if isinstance(until, datetime) else None
        return self._verb(PUSH.call(_at, name=name, until=instant, ahead=ahead))


class ConcurrencyLimits(Noun):
    """The concurrency limits of the app's database. `app.concurrency_limit(...)` declares one in code."""

    def list(self) -> Verb[ListOf[ConcurrencyInfo]]:
        """List the keys of concurrency limits: their rule, held permits and number of waiting jobs.

        for key in await app.concurrency_limits.list(): print(key.name, key.held, key.waiting)
        """
        return self._verb(CONCURRENCY())

    def set(self, name: str, most: int) -> Verb[str]:
        """Create or change a concurrency limit in the database; return "created", "changed" or "unchanged".

        A lower limit does not stop running jobs.

            await app.concurrency_limits.set("customer:42", 5)
        """
        rule = ConcurrencyRule(name, most)
        return self._verb(_SET_CONCURRENCY.call(str, name=rule.name, most=rule.most))

    def drop(self, name: str) -> Verb[bool]:
        """Remove a concurrency limit; False: there is none.

        Its jobs no longer wait. A job that names a key without any rule fails, so remove the name from jobs first.
        """
        return self._verb(_DROP_CONCURRENCY(name))


class Breakers(Noun):
    """The circuit breakers of the app's database. `app.breaker(...)` declares one in code."""

    def list(self) -> Verb[ListOf[BreakerInfo]]:
        """List the keys of circuit breakers with their rule, state, failures and number of waiting jobs.

        for breaker in await app.breakers.list(): print(breaker.name, breaker.state)
        """
        return self._verb(_BREAKERS)

    def set(self, name: str, failures: int, *, per: timedelta | str, open_for: timedelta | str) -> Verb[str]:
        """Create or change a breaker in the database; return "created", "changed" or "unchanged".

        Options as in `app.breaker`.

        await app.breakers.set("provider:acme", 3, per="1 min", open_for="5 min")
        """
        length, opened = parse_duration(per, option="per"), parse_duration(open_for, option="open_for")
        return self._verb(_SET_BREAKER.call(str, **asdict(BreakerRule(name, failures, length, opened))))

    def drop(self, name: str) -> Verb[bool]:
        """Remove a breaker; False: there is none.

        Its jobs no longer wait. A job that names a key without any rule fails, so remove the name from jobs first.
        """
        return self._verb(_DROP_BREAKER(name))

    def open(self, name: str, duration: timedelta | str | None = None) -> Verb[datetime]:
        """Open the breaker of a key by hand; return the time at which a probe starts.

        Until then none of its jobs starts. `duration` defaults to that of the rule. Raises InvalidArgument if there is
        no such breaker.

            await app.breakers.open("provider:acme", "2 h")
        """
        return self._verb(_OPEN_BREAKER(name, duration))

    def close(self, name: str) -> Verb[bool]:
        """Close the breaker of a key by hand; its jobs start and its failures are reset. False: it was closed.

        Raises InvalidArgument if there is no such breaker.
        """
        return self._verb(_CLOSE_BREAKER(name))
