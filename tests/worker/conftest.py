"""Fixtures of the worker's tests."""

from collections.abc import Iterator
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from support.pooler import Pooler
from tallybook import App


@pytest.fixture
def note(app: App) -> Any:
    """A task that does nothing."""

    @app.task
    async def note(n: int = 0) -> None:
        pass

    return note


@pytest.fixture(params=["transaction"])
def pooled(request: pytest.FixtureRequest, dsn: str) -> Iterator[str]:
    """The test's database through a PgBouncer with few, shared sessions; "rotating" takes them in turn."""
    rotate = request.param == "rotating"
    with Pooler(dsn, mode="transaction" if rotate else request.param, pool_size=4, rotate=rotate) as pooler:
        yield pooler.dsn(str(conninfo_to_dict(dsn)["dbname"]))
