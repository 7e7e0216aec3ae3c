"""Seeds of the tests that do things at random."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(many: int, quick: int = 2) -> list[Any]:
    """0 up to `many`, for parametrize: `make test` tries the first `quick`, `make test-all` those marked slow as well."""
    return [pytest.param(n, marks=() if n < quick else pytest.mark.slow) for n in range(many)]
