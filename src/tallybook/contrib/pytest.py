"""The pytest plugin: fixtures for tests of programs that use Tallybook.

    def test_welcome(tallybook_dsn):
        with psycopg.connect(tallybook_dsn) as conn:
            register(conn, "ada@example.org")
            assert_enqueued(conn, send_welcome, email="ada@example.org")

pytest loads this module in every environment with Tallybook installed. So nothing is imported, and no server is
started, before a test uses one of the fixtures.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tallybook.testing import FreshDatabases


@pytest.fixture(scope="session")
def tallybook_server() -> Iterator[FreshDatabases]:
    """A PostgreSQL for this run: the one of TALLYBOOK_TEST_DSN, else an embedded one.

    Each process of pytest-xdist has its own, unless TALLYBOOK_TEST_DSN is set. Its `fresh()` makes further databases.
    """
    from tallybook.testing import fresh_databases

    with fresh_databases() as databases:
        yield databases


@pytest.fixture
def tallybook_dsn(tallybook_server: FreshDatabases) -> Iterator[str]:
    """The DSN of a database for this test only, with Tallybook installed; dropped when the test ends."""
    with tallybook_server.fresh() as dsn:
        yield dsn
