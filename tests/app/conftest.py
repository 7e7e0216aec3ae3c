"""Every kind of connection that a user may have, to one database."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from support.callers import KINDS, Caller, connected
from support.database import fresh


@pytest.fixture(scope="package")
def shared(server: Any, template: str) -> Iterator[str]:
    """One database for all kinds of connections: a fresh one each would take most of the time."""
    with fresh(server, template) as dsn:
        yield dsn


@pytest.fixture
def look(shared: str) -> Iterator[Any]:
    """A second connection to the shared database, emptied of jobs."""
    with psycopg.connect(shared, autocommit=True) as conn:
        for table in ("entry", "scheduled", "unique_key", "subject_job", "tombstone"):
            conn.execute(sql.SQL("delete from tallybook.{}").format(sql.Identifier(table)))
        yield conn


@pytest.fixture(params=KINDS)
def caller(request: pytest.FixtureRequest, shared: str, look: Any) -> Iterator[Caller]:
    with connected(request.param, shared) as caller:
        yield caller
