"""The example fleet: its account, an order that is placed twice, and the whole run with a killed node."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from examples.fleet.__main__ import account
from examples.fleet.jobs import app
from examples.fleet.shop import Shop
from examples.fleet.spread import SCHEMA
from tallybook.testing import FreshDatabases, drain
from tools import citus

ROOT = Path(__file__).parents[3]


@pytest.fixture
def dsns(tallybook_server: FreshDatabases) -> Iterator[list[str]]:
    """Three databases with the shop's schema."""
    with ExitStack() as stack:
        found = [stack.enter_context(tallybook_server.fresh()) for _ in range(3)]
        for dsn in found:
            with psycopg.connect(dsn) as conn:
                conn.execute(SCHEMA)
        yield found


def test_each_order_is_confirmed_once_on_its_tenants_node(dsns: list[str]) -> None:
    """Orders of three tenants on three nodes, one placed twice; the account finds missing and doubled orders."""

    def spoil(node: int, statement: bytes) -> int:
        with psycopg.connect(dsns[node]) as conn:
            conn.execute(statement)
        return account(dsns, shop.orders)

    shop = Shop(3, 30, lambda tenant: dsns[tenant])
    shop.run()
    shop.place(1, 1)
    for dsn in dsns:
        assert drain(app, dsn=dsn, queues=["mail"]).completed == 10
    assert account(dsns, shop.orders) == 0
    assert spoil(0, b"update orders set confirmed = 2 where number = 0") == 1, "a second effect is found"
    assert spoil(1, b"delete from orders where number = 1") == 2, "a missing order is found"
    assert spoil(2, b"insert into orders values (0, 3, 'pen', 1), (2, 99, 'pen', 1)") == 4, (
        "an order on two nodes and an unknown order are found"
    )


def the_run(**more: str) -> list[str]:
    """Run the short form, which must succeed, and return its lines."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TALLYBOOK_", "PG", "PYTEST_", "CITUS_"))
    }
    done = subprocess.run(
        [sys.executable, "-m", "examples.fleet"], cwd=ROOT, env={**env, "SHORT": "1", **more},
        capture_output=True, text=True, timeout=290, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.direct("has servers of its own")
def test_the_whole_run_loses_nothing() -> None:
    """A node's server is killed and comes back while tenants order: the shop met it, and 0 are lost."""
    lines = the_run()
    assert re.fullmatch(r"fleet: 1500 processed, 0 failed, \d+ retried, 0 lost", lines[-1])
    met = re.search(r"south refused (\d+) times", "\n".join(lines))
    assert met is not None and int(met[1]) > 0


@pytest.mark.slow
@pytest.mark.direct("has servers of its own")
@pytest.mark.skipif(not citus.given(), reason=f"not given: {citus.WANTED}")
@pytest.mark.timeout(900)
def test_the_whole_run_on_citus_loses_nothing() -> None:
    """The same on a Citus cluster: the coordinator sends each order to its tenant's node."""
    lines = the_run(CITUS_BIN=str(citus.binaries()))
    assert re.fullmatch(r"fleet: 1500 processed, 0 failed, \d+ retried, 0 lost", lines[-1])
