"""make example-fleet: tenants order, a node is killed and comes back, and every order is confirmed once."""

from __future__ import annotations

from collections import Counter

import httpx2
import psycopg

from examples.fleet.shop import Order, Shop
from examples.fleet.spread import NAMES, OnCitus, Plain
from examples.stage import SERVE, SHORT, Stage, free_port, listens
from tools import citus

TENANTS, ORDERS = 60, 1_500 if SHORT else 6_000
SOUTH = 1
"""The node that is killed."""


def main() -> int:
    """Run the example and return the exit status."""
    with Stage("fleet", nodes=3) as stage:
        spread = OnCitus(stage) if citus.given() else Plain(stage)
        holders = {tenant: spread.holder(tenant) for tenant in range(TENANTS)}
        shop = Shop(TENANTS, ORDERS, lambda tenant: spread.dsn(holders[tenant]))
        for name in ("one", "two"):
            stage.worker(name, "examples.fleet.jobs:app", "--nodes", "all")
        url = stage.web("web", "examples.fleet.web:web", free_port())
        stage.say(f"{TENANTS} tenants on {len(stage.dsns)} nodes place {ORDERS} orders; {url} shows the fleet")
        shop.start()
        stage.until(lambda: len(shop.placed) >= ORDERS // 4, "a quarter of the orders")

        stage.servers[SOUTH].kill()
        stage.say(f"the server of {NAMES[SOUTH]} is killed; the shop and the workers continue with the other nodes")
        others = {order for order in shop.orders if holders[order[0]] != SOUTH}
        running = [dsn for at, dsn in enumerate(stage.dsns) if at != SOUTH]
        stage.until(lambda: others <= shop.placed and stage.ends(running)[3] == 0, "the orders of the other nodes")
        stage.say(f"{len(others)} orders on the other nodes are confirmed; {NAMES[SOUTH]} refused {shop.refused} times")
        shows(url, down=1)

        stage.servers[SOUTH].start()
        stage.say(f"{NAMES[SOUTH]} is back")
        stage.until(lambda: not shop.is_alive() and stage.is_idle(), "all orders")
        shows(url, down=0)
        lost = account(spread.shown_by, shop.orders)
        stage.say(f"{ORDERS} orders: {ORDERS - lost} are confirmed exactly once")
        if SERVE:
            port = free_port()
            stage.process("dashboard", "tallybook", "web", "--nodes", "all", "--port", str(port))
            stage.until(lambda: listens(port), "the dashboard")
            stage.say(
                f"open {url}, the dashboard of all nodes at http://127.0.0.1:{port}/, or a node: psql '{stage.dsn}'"
            )
        return stage.end(lost)


def shows(url: str, down: int) -> None:
    """Check that the page lists each node and marks `down` of them as not answering."""
    page = httpx2.get(url).raise_for_status().text
    assert page.count("<tr") == 4 and page.count("does not answer") == down, page


def account(shown_by: list[str], orders: set[Order]) -> int:
    """Count orders that are missing, not confirmed exactly once, or never placed by the shop."""
    confirmed: Counter[Order] = Counter()
    for dsn in shown_by:
        with psycopg.connect(dsn) as conn:
            for tenant, number, times in conn.execute("select tenant, number, confirmed from orders"):
                confirmed[tenant, number] += times
    return sum(confirmed[order] != 1 for order in orders) + len(confirmed.keys() - orders)


if __name__ == "__main__":
    raise SystemExit(main())
