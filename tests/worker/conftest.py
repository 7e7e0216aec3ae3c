"""Fixtures of the worker's tests."""

from __future__ import annotations

from typing import Any

import pytest

from tallybook import App


@pytest.fixture
def note(app: App) -> Any:
    """A task that does nothing."""

    @app.task
    async def note(n: int = 0) -> None:
        pass

    return note
