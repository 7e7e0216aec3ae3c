"""What tests of the core share."""

from __future__ import annotations

import pytest

from support.database import Connection
from support.hands import Hands


@pytest.fixture
def hands(db: Connection) -> Hands:
    """A worker made of SQL alone, on queue q."""
    return Hands(db)
