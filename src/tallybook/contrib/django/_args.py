"""Conversion of a function's arguments to one JSON object by name, as in all jobs, and back to positional ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parameters(fn: Callable[..., Any], skip: int) -> list[inspect.Parameter]:
    return list(inspect.signature(fn).parameters.values())[skip:]


def packed(fn: Callable[..., Any], skip: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name; `*args` as a list under its own name. Raises TypeError for an invalid call.

    The caller does not pass the first `skip` parameters.
    """
    parameters = _parameters(fn, skip)
    bound = inspect.Signature(parameters).bind(*args, **kwargs).arguments
    found: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.name not in bound:
            continue
        value = bound[parameter.name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            if taken := found.keys() & value.keys():
                raise TypeError(f"{fn.__qualname__} gets {taken.pop()!r} twice, by position and by name")
            found |= value
        else:
            found[parameter.name] = list(value) if parameter.kind is inspect.Parameter.VAR_POSITIONAL else value
    return found


def unpacked(
    fn: Callable[..., Any], skip: int, stored: Mapping[str, Any], count: int
) -> tuple[list[Any], dict[str, Any]]:
    """Return args and kwargs, `count` of them positional. Jobs from SQL (count 0) use names as far as possible."""
    parameters, named, positional = _parameters(fn, skip), dict(stored), list[Any]()
    star = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL and p.name in named), None)
    for parameter in parameters:
        if parameter.name not in named:
            continue
        if parameter.name == star:
            positional += named.pop(star)
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY or (
            parameter.kind in _BY_POSITION and (star or len(positional) < count)
        ):
            positional.append(named.pop(parameter.name))
    return positional, named
