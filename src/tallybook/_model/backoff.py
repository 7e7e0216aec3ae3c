"""Backoff: how long a job waits after a failure before its next attempt.

A policy is a value with one method, `delay(failures)`. `failures` counts the failures so far, this one included, so it
is 1 after the first. Snoozes, rate limits and crashes are not failures and do not lengthen the delay.

The three classes have a JSON form, in which a job's row stores them for programs in any language:

    {"exponential": {"first": "5 min", "factor": 2, "cap": "6 h", "jitter": false}}
    {"constant": {"every": "30 s"}}
    {"linear": {"first": "1 min", "step": "1 min", "cap": "6 h"}}

Also here: the exceptions after which another attempt cannot help (`no_retry`).
"""

import inspect
import math
import random
from collections.abc import Callable
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from datetime import timedelta
from typing import Any, Protocol, cast, get_args

from tallybook._model.durations import format_duration, parse_duration
from tallybook.errors import ConfigError

_SIX_HOURS = timedelta(hours=6)
_HINT = "Write retry=Exponential(timedelta(minutes=5)), the name of a policy, or a function of (failures, error)"


class Backoff(Protocol):
    """Anything that computes a delay: one of the classes here, or the user's own."""

    def delay(self, failures: int, rng: Callable[[], float] = random.random) -> timedelta | None:
        """Return the delay after the `failures`-th failure, or None for no further attempt.

        `rng` returns a number in [0, 1) and is for tests; the worker passes only `failures`.
        """


Retry = Backoff | Callable[[int], timedelta | None] | Callable[[int, BaseException], timedelta | None]
"""What a policy may be declared as: a value with `delay`, or a function of (failures) or (failures, error)."""


@dataclass(frozen=True, slots=True)
class Exponential:
    """first x factor^(failures - 1), at most `cap`.

    With `jitter` the delay is uniformly random in [0, that value] ("full jitter"). This spreads the retries of jobs
    that failed together, for example when a service they all call went down. Without it the delays are exact.
    """

    first: timedelta = timedelta(seconds=5)
    _: KW_ONLY
    factor: float = 2
    cap: timedelta = _SIX_HOURS
    jitter: bool = False

    def __post_init__(self) -> None:
        _check("Exponential", first=self.first, cap=self.cap)
        if isinstance(self.factor, bool) or not isinstance(self.factor, int | float):
            raise ConfigError("Exponential.factor", self.factor, "not a number")
        if not (self.factor >= 1 and (isinstance(self.factor, int) or math.isfinite(self.factor))):
            raise ConfigError("Exponential.factor", self.factor, "must be a finite number, at least 1")
        if not isinstance(self.jitter, bool):
            raise ConfigError("Exponential.jitter", self.jitter, "not True or False")

    def delay(self, failures: int, rng: Callable[[], float] = random.random) -> timedelta:
        """Return the delay after the `failures`-th failure (1 is the first), at most `cap`."""
        try:
            full = min(self.first * float(self.factor) ** (max(failures, 1) - 1), self.cap)
        except OverflowError:  # of the power or of the timedelta: far above any cap, unless `first` is zero
            full = self.cap if self.first else self.first
        return full * rng() if self.jitter else full


@dataclass(frozen=True, slots=True)
class Constant:
    """The same delay after every failure."""

    every: timedelta

    def __post_init__(self) -> None:
        _check("Constant", every=self.every)

    def delay(self, failures: int, rng: Callable[[], float] = random.random) -> timedelta:
        """Return `every`."""
        return self.every


@dataclass(frozen=True, slots=True)
class Linear:
    """first, plus `step` after every further failure (by default `first`: 1, 2, 3 min, ...), at most `cap`."""

    first: timedelta
    step: timedelta | None = None
    cap: timedelta = _SIX_HOURS

    def __post_init__(self) -> None:
        _check("Linear", first=self.first, cap=self.cap)
        if self.step is not None:
            _check("Linear", step=self.step)

    def delay(self, failures: int, rng: Callable[[], float] = random.random) -> timedelta:
        """Return the delay after the `failures`-th failure (1 is the first), at most `cap`."""
        step = self.first if self.step is None else self.step
        try:
            return min(self.first + step * (max(failures, 1) - 1), self.cap)
        except OverflowError:
            return self.cap


@dataclass(frozen=True, slots=True)
class ByFunction:
    """A policy that calls a function of the user's with (failures) or (failures, error)."""

    function: Callable[..., timedelta | None]
    wants_error: bool

    def delay(
        self, failures: int, rng: Callable[[], float] = random.random, *, error: BaseException | None = None
    ) -> timedelta | None:
        """Return the result of the function; None means no further attempt."""
        return self.function(failures, error) if self.wants_error else self.function(failures)


def as_policy(retry: object, *, option: str = "retry") -> Backoff:
    """Return the policy for a user's `retry`: an object with `delay` unchanged, a function wrapped. Raises ConfigError.

    A function gets the error if its second parameter has no default or is named `error`.
    """
    if isinstance(retry, type):
        raise ConfigError(option, retry, "a class, not a policy", hint=f"Write {retry.__name__}(...)")
    if callable(getattr(retry, "delay", None)):
        return retry  # type: ignore[return-value]
    if not callable(retry):
        raise ConfigError(option, retry, "not a retry policy", hint=_HINT)
    if inspect.iscoroutinefunction(retry):
        raise ConfigError(option, retry, "an async function; a policy has to be a plain one", hint=_HINT)
    return ByFunction(retry, _wants_error(option, retry))


def _wants_error(option: str, function: Callable[..., Any]) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    by_place = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    wants = len(by_place) > 1 and (by_place[1].default is inspect.Parameter.empty or by_place[1].name == "error")
    try:
        inspect.signature(function).bind(*([1, None] if wants else [1]))
    except TypeError:
        raise ConfigError(option, function, "must accept (failures) or (failures, error)", hint=_HINT) from None
    return wants


def delay_after(policy: Backoff, failures: int, error: BaseException) -> timedelta | None:
    """Return the policy's delay after the `failures`-th failure, `error`; None: no further attempt. Its errors pass."""
    return policy.delay(failures, error=error) if isinstance(policy, ByFunction) else policy.delay(failures)


_Stored = Exponential | Constant | Linear
_FORMS: dict[str, type[_Stored]] = {cls.__name__.lower(): cls for cls in get_args(_Stored)}


def to_json(policy: object) -> dict[str, dict[str, object]]:
    """Return a policy of the three classes as a JSON object, with every value, so that all releases read it alike.

    Raises ConfigError for anything else: a row cannot store code, only the name of a policy.
    """
    for form, cls in _FORMS.items():
        if type(policy) is cls:
            given = ((field.name, getattr(policy, field.name)) for field in fields(cls))
            text = {key: format_duration(v) if isinstance(v, timedelta) else v for key, v in given if v is not None}
            return {form: text}
    hint = "Declare it with app.retry_policy('ours', ...) and write retry='ours'; the row stores its name"
    raise ConfigError("retry", policy, "not one of Exponential, Constant, Linear", hint=hint)


def from_json(value: object) -> Backoff:
    """Return the policy of a JSON object. Missing values have the defaults of the class. Raises ConfigError."""
    if not isinstance(value, dict) or len(value) != 1:
        raise ConfigError("retry", value, "not one of exponential, constant, linear with its options")
    ((form, options),) = value.items()
    cls = _FORMS.get(form)
    if cls is None:
        raise ConfigError("retry", form, "no such policy", hint=f"Policies: {', '.join(_FORMS)}")
    if not isinstance(options, dict):
        raise ConfigError(f"retry.{form}", options, "its options must be an object")
    for field in fields(cls):
        if field.default is MISSING and field.name not in options:
            raise ConfigError(f"retry.{form}", options, f"{field.name} is missing")
    return cls(**{key: _read(form, key, given) for key, given in options.items()})


def _read(form: str, key: object, given: object) -> Any:
    option, known = f"retry.{form}.{key}", [field.name for field in fields(_FORMS[form])]
    if key not in known:
        raise ConfigError(option, given, "no such option", hint=f"Options: {', '.join(known)}")
    if key == "jitter" and not isinstance(given, bool):
        raise ConfigError(option, given, "not true or false")
    if key in ("factor", "jitter"):
        return given
    if not isinstance(given, str):
        raise ConfigError(option, given, "not a duration", hint="Write '5 min'")
    return parse_duration(given, option=option)


def _check(policy: str, **durations: timedelta) -> None:
    for name, value in durations.items():
        if not isinstance(value, timedelta):
            raise ConfigError(f"{policy}.{name}", value, "not a timedelta", hint="Write timedelta(minutes=5)")
        if value < timedelta(0):
            raise ConfigError(f"{policy}.{name}", value, "a delay cannot be negative")
    if "cap" in durations and durations["cap"] < durations["first"]:
        # Cutting the first delay silently would hide the mistake in Exponential(timedelta(days=1)).
        raise ConfigError(f"{policy}.cap", durations["cap"], f"less than the first delay, {durations['first']}")


DEFAULT: Backoff = Exponential(timedelta(seconds=5), jitter=True)  # the policy of a task that names none

NoRetry = type[BaseException] | tuple[type[BaseException], ...]  # a class of exceptions, or several

_MOST_MEMBERS = 10_000


def checked_no_retry(no_retry: object) -> tuple[type[BaseException], ...]:
    """The classes as a tuple; ConfigError for anything that is no class of exceptions."""
    found = tuple(no_retry) if isinstance(no_retry, tuple | list | set | frozenset) else (no_retry,)
    for cls in found:
        if not (isinstance(cls, type) and issubclass(cls, BaseException)):
            hint = "Write no_retry=(ValueError, KeyError)"
            raise ConfigError("no_retry", cls, "not a class of exceptions", hint=hint)
    return cast("tuple[type[BaseException], ...]", found)


def is_final(error: BaseException, classes: tuple[type[BaseException], ...]) -> bool:
    """Whether `error` is of one of the classes, or has an attribute `no_retry` that is True.

    For an exception group this must hold for all members, at any depth: one temporary error is worth another attempt.
    Never raises, whatever the attributes of the error do; an error that cannot be checked is retried.
    """
    try:
        left, seen = [error], 0
        while left and seen < _MOST_MEMBERS:
            seen += 1
            one = left.pop()
            if isinstance(one, classes) or getattr(one, "no_retry", None) is True:
                continue
            if not isinstance(one, BaseExceptionGroup):
                return False
            left.extend(one.exceptions)
        return not left
    except BaseException:  # a property of a crafted exception may raise anything
        return False
