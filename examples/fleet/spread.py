"""Who spreads the tenants over the nodes: the program itself, or Citus. Both call the same function for an order."""

from __future__ import annotations

import os
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict

from examples.fleet.jobs import app
from examples.stage import Stage
from tallybook import migrate

SCHEMA = (Path(__file__).parent / "schema.sql").read_bytes()
NAMES = ("north", "south", "west")
SPREAD = "select create_distributed_table('orders', 'tenant', shard_count => 12)"
DELEGATED = """\
select create_distributed_function('place_order(int, int, text)', 'p_tenant', colocate_with => 'orders',
                                   force_delegation => true)"""
HOLDER = """\
select n.nodename from pg_dist_placement p join pg_dist_node n using (groupid)
 where p.shardid = get_shard_id_for_distribution_column('orders', %s)"""


class Plain:
    """Plain databases. The program asks `app.nodes.of` where a tenant lives, and connects there."""

    def __init__(self, stage: Stage) -> None:
        self.dsns = self.shown_by = stage.dsns  # together they show all orders
        for number, dsn in enumerate(self.dsns, 1):
            with psycopg.connect(dsn) as conn:
                migrate(conn, node=number)
                conn.execute(SCHEMA)
        # The processes of the example find the nodes by it, too.
        os.environ["TALLYBOOK_NODES"] = "\n".join(map("=".join, zip(NAMES, self.dsns, strict=True)))
        os.environ["TALLYBOOK_DSN"] = stage.dsn

    def holder(self, tenant: int) -> int:
        """Which node has this tenant's data: 0, 1 or 2."""
        return NAMES.index(app.nodes.of(f"tenant:{tenant}").sync().name)

    def dsn(self, holder: int) -> str:
        """Where an order of this node's tenants is placed: there."""
        return self.dsns[holder]


class OnCitus(Plain):
    """A Citus cluster. The coordinator sends the call to the node that has the tenant; the nodes are found in pg_dist_node."""

    def __init__(self, stage: Stage) -> None:
        self.dsns, self.shown_by, self.db = stage.dsns, stage.dsns[:1], stage.db
        for number, dsn in enumerate(self.dsns, 1):
            with psycopg.connect(dsn) as conn:
                conn.execute("set citus.enable_ddl_propagation = off")
                migrate(conn, node=number)
        for statement in (SCHEMA, SPREAD, DELEGATED):  # Citus wants a transaction for each
            self.db.execute(statement)

    def holder(self, tenant: int) -> int:
        """Which node has this tenant's data, by Citus' own tables."""
        found = self.db.execute(HOLDER, (tenant,)).fetchone()
        assert found is not None
        return [conninfo_to_dict(dsn)["host"] for dsn in self.dsns].index(found[0])

    def dsn(self, holder: int) -> str:
        """Every order is placed on the coordinator."""
        return self.dsns[0]
