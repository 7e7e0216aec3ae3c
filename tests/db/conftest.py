"""Fixtures for the tests of the database's rights."""

from collections.abc import Iterator

import pytest

from support.roles import House, house


@pytest.fixture
def at(empty_dsn: str) -> Iterator[House]:
    """A database with a plain owner and the five roles."""
    with house(empty_dsn) as made:
        made.give()
        yield made
