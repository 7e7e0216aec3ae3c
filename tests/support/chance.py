"""Seeds of the tests that do things at random, and how much they try."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck

THOROUGH = bool(os.environ.get("TALLYBOOK_THOROUGH"))
QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


def seeds(many: int, quick: int = 2) -> list[Any]:
    """0 up to `many`, for parametrize: `make test` tries the first `quick`, `make test-all` those marked slow as well."""
    return [pytest.param(n, marks=() if n < quick else pytest.mark.slow) for n in range(many)]
