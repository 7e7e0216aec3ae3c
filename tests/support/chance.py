"""Seeds of the random tests, and the number of their tries."""

import os
from typing import Any

import pytest
from hypothesis import HealthCheck

THOROUGH = bool(os.environ.get("TALLYBOOK_THOROUGH"))
QUIET = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]


def seeds(many: int, quick: int = 2) -> list[Any]:
    """Return 0 to `many` - 1 for parametrize; all after the first `quick` are marked slow, for `make test-all`."""
    return [pytest.param(n, marks=() if n < quick else pytest.mark.slow) for n in range(many)]
