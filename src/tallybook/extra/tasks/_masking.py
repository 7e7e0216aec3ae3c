"""Replace secrets by stars in the answers of a provider, which may echo what it received."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, quote_plus, urlsplit

from tallybook._model.provider import STARS, Provider, Secret


class Mask:
    """Replaces every secret in the forms in which it may come back: unchanged, in JSON, in a URL, in base64."""

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
            texts += _path_of(url)
        for secret in provider.secrets.values():
            texts += [one.reveal() for one in (secret, secret.previous) if one is not None]
        return cls(texts)

    def text(self, text: str) -> str:
        return text if self._pattern is None else self._pattern.sub(STARS, text)

    def data(self, data: bytes) -> bytes:
        return self.text(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")

    def value(self, value: Any) -> Any:
        """Return a JSON value with the secrets in all its texts, keys included, replaced by stars."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(one) for one in value]
        if isinstance(value, dict):
            return {self.text(key): self.value(one) for key, one in value.items()}
        return value


def _path_of(url: Secret) -> list[str]:
    """Return path and query of a URL. A server knows its own host, so an echo of the path alone shows the secret."""
    try:
        parts = urlsplit(url.reveal())
    except ValueError:
        return []
    return [one for one in (parts.path.rstrip("/"), parts.query) if one]
