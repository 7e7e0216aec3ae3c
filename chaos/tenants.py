"""Tenants on Citus: they order all the time, and a fault moves one of them to another node meanwhile.

Each order and its job are one transaction, on the tenant's node. Every third call is part of an expression, so that it
runs on the coordinator, and its job changes a row of another node. The same happens to the open jobs of a tenant that
was moved. At the end, every order that was acknowledged must exist, and every order must be confirmed exactly once.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import psycopg

from chaos.app import TWO_PHASE

_TENANTS = 24
_SECONDS_EACH = 0.04
_SCHEMA = """
create table orders (tenant int, number bigint, confirmed int default 0, primary key (tenant, number));
select create_distributed_table('orders', 'tenant', shard_count => 12);
create function place_order(p_tenant int, p_number bigint) returns bigint language plpgsql as $$ begin
  insert into orders (tenant, number) values (p_tenant, p_number);
  return tallybook.enqueue('default', 'confirm', jsonb_build_object('tenant', p_tenant, 'number', p_number)); end $$;
select create_distributed_function('place_order(int, bigint)', 'p_tenant', colocate_with => 'orders',
                                   force_delegation => true);"""
_PLACES = """
select p.shardid, n.nodename, n.nodeport
  from pg_dist_placement p join pg_dist_shard using (shardid) join pg_dist_node n using (groupid)
 where logicalrelid = 'orders'::regclass"""


class Tenants:
    """A thread that places orders through `proxied`; all else is read and moved through `direct`, the coordinator."""

    def __init__(self, direct: str, proxied: str, log: Path) -> None:
        self._direct, self._proxied, self._log = direct, proxied, log
        self._acknowledged: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._order_all)
        self.moves = 0
        for statement in _SCHEMA.replace(";\n  ", ";  ").split(";\n"):  # Citus needs a transaction for each
            self._ask(statement)

    def _ask(self, statement: str, params: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._direct, autocommit=True) as conn:
            cursor = conn.execute(statement.encode(), params or None)
            return cursor.fetchall() if cursor.description else []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Place no more orders."""
        self._ended.set()
        self._thread.join()

    def _order_all(self) -> None:
        conn: psycopg.Connection[Any] | None = None
        number = 0
        while not self._ended.wait(_SECONDS_EACH):
            number += 1
            try:
                if conn is None or conn.closed:
                    conn = psycopg.connect(self._proxied, application_name="chaos tenants")
                if number % 3:
                    conn.execute("select place_order(%s, %s)", (number % _TENANTS, number))
                else:
                    conn.execute(TWO_PHASE)
                    conn.execute("select place_order(%s, %s) + 0", (number % _TENANTS, number))
                conn.commit()
                self._acknowledged.append(number)
            except psycopg.Error as error:
                with self._log.open("a") as log:
                    log.write(f"{time.time():.1f} order {number}: {type(error).__name__} {error}\n")
                if conn is not None:
                    conn.close()
                conn = None
                self._ended.wait(0.2)
        if conn is not None:
            conn.close()

    def move(self, rng: random.Random) -> str:
        """Let Citus move the orders of a few tenants to another node; return what it did."""
        places = self._ask(_PLACES)
        shard, host, port = rng.choice(places)
        to_host, to_port = rng.choice(sorted({place[1:] for place in places} - {(host, port)}))
        since = time.monotonic()
        self._ask("select citus_move_shard_placement(%s, %s, %s, %s, %s)", (shard, host, port, to_host, to_port))
        self.moves += 1
        return f"Citus moved shard {shard} in {time.monotonic() - since:.1f} s"

    def judge(self) -> tuple[dict[str, int], list[str]]:
        """Return figures like those of the judge, and what is wrong."""
        confirmed = dict(self._ask("select number, confirmed from orders"))
        lost = [number for number in self._acknowledged if not confirmed.get(number)]
        lost += [number for number, times in confirmed.items() if not times and number not in self._acknowledged]
        second = [number for number, times in confirmed.items() if times > 1]
        wrong = [
            f"orders {what}: {len(found)}, the first are {sorted(found)[:10]}"
            for what, found in (("lost or not confirmed", lost), ("confirmed more than once", second))
            if found
        ]
        numbers = {"orders": len(self._acknowledged), "moves": self.moves, "lost": len(lost)}
        return {**numbers, "second_effects": sum(confirmed[number] - 1 for number in second)}, wrong
