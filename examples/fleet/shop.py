"""The shop: tenants place orders all the time. Orders that meet a dead node are placed again until they succeed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import psycopg

ITEMS = ("pen", "paper", "ink", "stamp")
Order = tuple[int, int]
"""A tenant and a number."""


class Shop(threading.Thread):
    """A thread that places all orders, one after the other. `dsn_of` returns the DSN for a tenant's orders."""

    def __init__(self, tenants: int, orders: int, dsn_of: Callable[[int], str]) -> None:
        super().__init__(daemon=True)
        self.orders: set[Order] = {(number % tenants, number) for number in range(orders)}
        self.placed: set[Order] = set()
        self.refused = 0
        self._dsn_of = dsn_of
        self._sessions: dict[str, psycopg.Connection] = {}

    def run(self) -> None:
        """Place all orders. An order that meets a dead node moves to the end of the line."""
        line = deque(sorted(self.orders, key=lambda order: order[1]))
        while line:
            order = line.popleft()
            try:
                self.place(*order)
            except (psycopg.OperationalError, psycopg.InternalError):  # Citus reports a broken connection as the latter
                self.refused += 1
                line.append(order)
                time.sleep(0.01)

    def place(self, tenant: int, number: int) -> None:
        """Place an order and enqueue its job with one statement, in one transaction, on the tenant's node."""
        dsn = self._dsn_of(tenant)
        session = self._sessions.get(dsn)
        if session is None or session.closed:
            session = self._sessions[dsn] = psycopg.connect(dsn, autocommit=True, connect_timeout=5)
        session.execute("select place_order(%s, %s, %s)", (tenant, number, ITEMS[number % len(ITEMS)]))
        self.placed.add((tenant, number))
