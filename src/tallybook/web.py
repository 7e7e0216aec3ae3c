"""The dashboard and the operator API, to be mounted in your application or run by `tallybook web`. Needs `tallybook[web]`."""

from __future__ import annotations

__all__: list[str] = []
