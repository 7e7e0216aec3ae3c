"""A turn at a provider: its limits set when the call may start, and a 429 pushes them back."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from tallybook._model.provider import Provider
from tallybook._model.retry_after import retry_after
from tallybook.errors import ConfigError

_UNSAID = timedelta(minutes=1)
"""How long the limits are closed after a 429 without a Retry-After."""


class Turn:
    """Returned by `ctx.provider`: enters when a call may start; for `async with`, or `with` in a plain handler."""

    def __init__(self, ctx: Any, provider: str | Provider) -> None:
        self._ctx = ctx  # a Context, which makes this
        self._provider = provider
        self._limits: tuple[str, ...] = ()

    async def __aenter__(self) -> Provider:
        asked = self._provider
        found = asked if isinstance(asked, Provider) else await self._ctx.providers.get(asked)
        self._limits = _limits_of(found)
        if self._limits:
            await self._ctx.limit(*self._limits)
        return found

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._limits and (wait := _refused_for(error)) is not None:
            for key in self._limits:
                await self._ctx.push_back(key, wait)
            await self._ctx.limit(*self._limits)  # the next turn is not near: the attempt ends here, without a failure

    def __enter__(self) -> Provider:
        asked = self._provider
        found = asked if isinstance(asked, Provider) else self._ctx.providers.get_sync(asked)
        self._limits = _limits_of(found)
        if self._limits:
            self._ctx.limit_sync(*self._limits)
        return found

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._limits and (wait := _refused_for(error)) is not None:
            for key in self._limits:
                self._ctx.push_back_sync(key, wait)
            self._ctx.limit_sync(*self._limits)


def _limits_of(provider: Provider) -> tuple[str, ...]:
    """Return the setting `limits`, a list of names of rate limits. Raises ConfigError for anything else."""
    found = provider.settings.get("limits", [])
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        hint = 'Write ["provider:acme"]'
        raise ConfigError(f"limits of provider {provider.name!r}", found, "not a list of names", hint=hint)
    return tuple(found)


def _refused_for(error: BaseException | None) -> timedelta | None:
    """Return the wait that a 429 error of any HTTP library asks for; None: the error is no 429."""
    with suppress(Exception):  # a property of a foreign exception may raise
        for one in (error, getattr(error, "response", None)):
            if 429 in (getattr(one, name, None) for name in ("status", "status_code", "code")):
                assert error is not None
                wait = retry_after(error, datetime.now(UTC))
                return _UNSAID if wait is None else wait
    return None
