"""Exceptions after which another attempt cannot help."""

from __future__ import annotations

from typing import cast

from tallybook.errors import ConfigError

NoRetry = type[BaseException] | tuple[type[BaseException], ...]
"""A class of exceptions, or several."""

_MOST = 10_000


def checked(no_retry: object) -> tuple[type[BaseException], ...]:
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
        while left and seen < _MOST:
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
