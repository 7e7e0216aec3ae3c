"""What the ready-made tasks share: their app until `app.include` adds them to yours, and the access to providers."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import wraps
from importlib import import_module
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast
from urllib.parse import quote, quote_plus, urlsplit

from tallybook._app import App, ContextTask
from tallybook._model.backoff import Backoff
from tallybook._model.durations import parse_duration
from tallybook._model.provider import STARS, Provider
from tallybook._worker.run.context import Context
from tallybook.errors import ConfigError, NotSupported

P = ParamSpec("P")
R = TypeVar("R")

shelf = App("tallybook.tasks")
_LONGEST = timedelta(minutes=5)
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")


def ready_made(
    name: str, *, summary: str | None = None, retry: Backoff | None = None, max_attempts: int | None = None
) -> Callable[[Callable[Concatenate[Context, P], R]], ContextTask[P, R]]:
    """`shelf.task` for functions with a Context. An Any in an annotation makes mypy infer Any for an overload."""
    made: Any = shelf.task(name=name, summary=summary, retry=retry, max_attempts=max_attempts)
    return cast(Callable[[Callable[Concatenate[Context, P], R]], ContextTask[P, R]], made)


def bare(error: Exception) -> Exception:
    """Return the error without its traceback: its frames hold secrets, and error trackers show local variables."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def quiet(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that has a secret in a variable: its errors are raised from a frame without secrets."""

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
    """Import a module that an extra installs. Raises NotSupported, with the command that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        hint = f"For your workers: pip install 'tallybook[{extra}]'"
        raise NotSupported(f"{who} without the package {error.name}", hint=hint) from None


class Registry(Protocol):
    """The part of `app.providers` that the tasks use."""

    async def get(self, name: str) -> Provider:
        """Return the active provider of this name, with its secrets. Raises an error if there is none.

        A job is then retried: it is right, and succeeds once the provider is there.
        """

    async def set(self, name: str, *, active: bool) -> str:
        """Set the provider active or inactive."""

    def forget(self) -> None:
        """Clear the cache."""


def option(provider: Provider, name: str) -> str:
    """Return the name of a provider's field for errors."""
    return f"{name} of provider {provider.name!r}"


def text_setting(provider: Provider, name: str, default: str | None = None) -> str:
    """Return a setting that is a text. ConfigError if it is missing or not a text."""
    found = provider.settings.get(name, default)
    if not isinstance(found, str) or not found:
        raise ConfigError(option(provider, name), found, "must be a text")
    return found


def seconds(provider: Provider, default: float) -> float:
    """Return the setting `timeout` in seconds: a number of seconds or a text like "20 s", at most five minutes."""
    said = provider.settings.get("timeout")
    if said is None:
        return default
    where = option(provider, "timeout")
    if isinstance(said, str):
        found = parse_duration(said, option=where)
    elif isinstance(said, int | float) and not isinstance(said, bool):
        found = timedelta(seconds=max(0.0, min(said, 1e6)))
    else:
        raise ConfigError(where, said, "neither seconds nor a text like 20 s")
    if not timedelta(0) < found <= _LONGEST:
        raise ConfigError(where, said, "must be above 0 and at most 5 min")
    return found.total_seconds()


@quiet
def auth_headers(provider: Provider) -> dict[str, str]:
    """Return the authentication headers, from the secret `token`, or from `password` and the setting `user`."""
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
            raise ConfigError(option(provider, "token_header"), name, "it or the secret is not valid in a header")
    return made


def is_header_value(text: object) -> bool:
    """Return whether this is a valid header value: printable ASCII. A line break would add another header."""
    return isinstance(text, str) and text.isascii() and (text.isprintable() or not text) and text.strip() == text


class Mask:
    """Replaces every secret by stars in answers, which may echo it: unchanged, in JSON, in a URL, in base64."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        forms: set[str] = set()
        for text in texts:
            plain = base64.b64encode(text.encode()).decode()
            forms |= {text, quote(text), quote(text, safe=""), quote_plus(text), json.dumps(text)[1:-1], plain}
            forms |= {json.dumps(text, ensure_ascii=False)[1:-1], text.removeprefix("whsec_")}
        known = sorted(filter(None, forms), key=len, reverse=True)  # longest first: one may be part of another
        self._pattern = re.compile("|".join(map(re.escape, known))) if known else None

    @classmethod
    def of(cls, provider: Provider, *others: str) -> Mask:
        """Return a mask for all secrets of a provider, previous ones included, and for `others` derived from them."""
        texts = list(others)
        if (url := provider.secrets.get("url")) is not None:
            # A server knows its own host, so an echo of the path alone shows the secret.
            with suppress(ValueError):
                parts = urlsplit(url.reveal())
                texts += [parts.path.rstrip("/"), parts.query]
        for secret in provider.secrets.values():
            texts += [one.reveal() for one in (secret, secret.previous) if one is not None]
        return cls(texts)

    def text(self, text: str) -> str:
        return text if self._pattern is None else self._pattern.sub(STARS, text)

    def value(self, value: Any) -> Any:
        """Return a JSON value with the secrets in all its texts, keys included, replaced by stars."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(one) for one in value]
        if isinstance(value, dict):
            return {self.text(key): self.value(one) for key, one in value.items()}
        return value
