"""Two ways to spread the tenants over the nodes: by the program or by Citus. Both call the same SQL function."""

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
    """Plain databases. The program gets a tenant's node from `app.nodes.of` and connects to it."""

    def __init__(self, stage: Stage) -> None:
        self.dsns = self.shown_by = stage.dsns  # together they show all orders
        for number, dsn in enumerate(self.dsns, 1):
            with psycopg.connect(dsn) as conn:
                migrate(conn, node=number)
                conn.execute(SCHEMA)
        # The processes of the example also find the nodes by this variable.
        os.environ["TALLYBOOK_NODES"] = "\n".join(map("=".join, zip(NAMES, self.dsns, strict=True)))
        os.environ["TALLYBOOK_DSN"] = stage.dsn

    def holder(self, tenant: int) -> int:
        """Return the index of the node with this tenant's data: 0, 1 or 2."""
        return NAMES.index(app.nodes.of(f"tenant:{tenant}").sync().name)

    def dsn(self, holder: int) -> str:
        """Return the DSN for orders of this node's tenants: the node itself."""
        return self.dsns[holder]


class OnCitus(Plain):
    """A Citus cluster. The coordinator sends each call to the tenant's node; pg_dist_node lists the nodes."""

    def __init__(self, stage: Stage) -> None:
        self.dsns, self.shown_by, self.db = stage.dsns, stage.dsns[:1], stage.db
        for number, dsn in enumerate(self.dsns, 1):
            with psycopg.connect(dsn) as conn:
                conn.execute("set citus.enable_ddl_propagation = off")
                migrate(conn, node=number)
        for statement in (SCHEMA, SPREAD, DELEGATED):  # Citus requires a transaction for each
            self.db.execute(statement)

    def holder(self, tenant: int) -> int:
        """Return the index of the node with this tenant's data, from Citus' own tables."""
        found = self.db.execute(HOLDER, (tenant,)).fetchone()
        assert found is not None
        return [conninfo_to_dict(dsn)["host"] for dsn in self.dsns].index(found[0])

    def dsn(self, holder: int) -> str:
        """Return the DSN of the coordinator, where every order is placed."""
        return self.dsns[0]
