"""What the ready-made tasks ask of the app's providers, and what their settings say."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import wraps
from importlib import import_module
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from tallybook._model.durations import parse_duration
from tallybook._model.provider import Provider
from tallybook._worker.run.context import Context
from tallybook.errors import ConfigError, NotSupported

P = ParamSpec("P")
R = TypeVar("R")

_LONGEST = timedelta(minutes=5)
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")


def bare(error: Exception) -> Exception:
    """The error without the frames that it came through: they hold secrets, and error trackers show local variables."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def quiet(function: Callable[P, R]) -> Callable[P, R]:
    """For functions that have a secret in a variable: what they raise is raised by a frame that has none."""

    def outcome(*args: P.args, **kwargs: P.kwargs) -> R | Exception:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            return bare(error)

    @wraps(function)
    def quietly(*args: P.args, **kwargs: P.kwargs) -> R:
        found = outcome(*args, **kwargs)
        if isinstance(found, Exception):
            raise found
        return found

    return quietly


def needed(who: str, module: str, extra: str) -> Any:
    """The module, which is there with an extra. NotSupported, with what to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        hint = f"Where its jobs run: pip install 'tallybook[{extra}]'"
        raise NotSupported(f"{who} without the package {error.name}", hint=hint) from None


class Registry(Protocol):
    """Where the providers are: `app.providers`."""

    async def get(self, name: str) -> Provider:
        """The active provider of this name, with its secrets; an error where there is none."""

    async def set(self, name: str, *, active: bool) -> str:
        """Set it active or not."""

    def forget(self) -> None:
        """Read anew what is asked for next."""


def registry_of(ctx: Context) -> Registry:
    return cast(Registry, ctx.app.providers)


async def provider_of(ctx: Context, name: str) -> Provider:
    """The provider of this name. Raises what the registry raises where there is none, or none that is active.

    That is tried again: the job is right, and goes when the provider is there.
    """
    return await registry_of(ctx).get(name)


def option(provider: Provider, name: str) -> str:
    """How an error names one field of a provider."""
    return f"{name} of provider {provider.name!r}"


def text_setting(provider: Provider, name: str, default: str | None = None) -> str:
    """A setting that is a text. ConfigError: it is not there, or something else."""
    found = provider.settings.get(name, default)
    if not isinstance(found, str) or not found:
        raise ConfigError(option(provider, name), found, "a text is wanted")
    return found


def seconds(provider: Provider | None, default: float) -> float:
    """The setting `timeout`, a number of seconds or a text like "20 s"; at most five minutes."""
    said = provider.settings.get("timeout") if provider is not None else None
    if provider is None or said is None:
        return default
    where = option(provider, "timeout")
    if isinstance(said, str):
        found = parse_duration(said, option=where)
    elif isinstance(said, int | float) and not isinstance(said, bool):
        found = timedelta(seconds=max(0.0, min(said, 1e6)))
    else:
        raise ConfigError(where, said, "neither seconds nor a text like 20 s")
    if not timedelta(0) < found <= _LONGEST:
        raise ConfigError(where, said, "goes up to 5 min")
    return found.total_seconds()


@quiet
def auth_headers(provider: Provider) -> dict[str, str]:
    """The headers by which the provider knows us, made of its secrets `token`, or `password` and the setting `user`."""
    made = {}
    token, password = provider.secrets.get("token"), provider.secrets.get("password")
    if token is not None and "token_query" not in provider.settings:
        name = text_setting(provider, "token_header", "Authorization")
        made[name] = f"Bearer {token.reveal()}" if name.lower() == "authorization" else token.reveal()
    elif password is not None:
        user = text_setting(provider, "user")
        made["Authorization"] = "Basic " + base64.b64encode(f"{user}:{password.reveal()}".encode()).decode()
    for name, value in made.items():
        if not HEADER_NAME.fullmatch(name) or not is_header_value(value):
            raise ConfigError(option(provider, "token_header"), name, "it, or the secret, cannot stand in a header")
    return made


def is_header_value(text: object) -> bool:
    """Whether this can be the value of a header: printable ASCII. A line break would be another header."""
    return isinstance(text, str) and text.isascii() and (text.isprintable() or not text) and text.strip() == text


def static_headers(provider: Provider) -> Mapping[str, Any]:
    found = provider.settings.get("headers", {})
    if not isinstance(found, Mapping):
        raise ConfigError(option(provider, "headers"), found, "not an object of names and texts")
    return found
