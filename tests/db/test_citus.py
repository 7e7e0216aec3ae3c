"""Citus: orders and jobs of a tenant on one node, in one transaction. Needs a Citus: see tools/citus.py."""

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from support.cli import run
from support.pages import code
from support.waiting import wait_until
from tallybook import App, Constant
from tallybook._db.migrate import script, uninstall
from tallybook._db.nodes import nodes
from tallybook.embedded import Server
from tallybook.testing import drain
from tools import citus

pytestmark = [
    pytest.mark.skipif(not citus.given(), reason=f"not given: {citus.WANTED}"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.direct("has servers of its own"),
]
PAGE, TWO_PHASE, QUIET = code("docs/nodes.md", "Citus", "plpgsql")
*SHOP, PLACE = re.split(r";\n+(?=\S)", PAGE.strip().removesuffix(";"))  # Citus needs a transaction per statement
WHERE = """\
select n.nodename, n.nodeport, get_shard_id_for_distribution_column('orders', %(tenant)s)
  from pg_dist_placement p join pg_dist_node n using (groupid)
 where p.shardid = get_shard_id_for_distribution_column('orders', %(tenant)s)"""
Conn = psycopg.Connection[Any]


class Cluster:
    """Three nodes, the first is the coordinator, and an app whose job confirms an order."""

    def __init__(self, dsns: list[str], conns: list[Conn], servers: list[Server]) -> None:
        self.dsns, self.conns, self.coordinator, self.servers = dsns, conns, conns[0], servers
        self.two_phase = ""
        node = "select node from tallybook.installed"
        self.numbers = [int(conn.execute(node).fetchone()[0]) for conn in conns]  # type: ignore[index]
        self.app = App("shop", dsn=dsns[0])

        @self.app.task(queue="mail", atomic=True, max_attempts=30, retry=Constant(timedelta(milliseconds=50)))
        async def confirm(tx: psycopg.AsyncConnection[Any], tenant: int, number: int) -> None:
            if self.two_phase:
                await tx.execute(self.two_phase.encode())
            await tx.execute(
                "update orders set confirmed = confirmed + 1 where tenant = %s and number = %s", (tenant, number)
            )

    def place(self, tenant: int, item: str = "pen") -> int:
        """Place an order by the function on the coordinator; return the job's id."""
        row = self.coordinator.execute("select place_order(%s, %s)", (tenant, item)).fetchone()
        return int(row[0])  # type: ignore[index]

    def holder(self, tenant: int) -> int:
        """Which of the nodes has the tenant's orders: 0, 1 or 2."""
        host = self.coordinator.execute(WHERE, {"tenant": tenant}).fetchone()[0]  # type: ignore[index]
        return [conninfo_to_dict(dsn)["host"] for dsn in self.dsns].index(host)

    def move(self, tenant: int, to: int) -> None:
        """Let Citus move the tenant's shard to another node."""
        host, port, shard = self.coordinator.execute(WHERE, {"tenant": tenant}).fetchone()  # type: ignore[misc]
        target = conninfo_to_dict(self.dsns[to])
        there = (shard, host, port, target["host"], int(str(target["port"])))
        self.coordinator.execute("select citus_move_shard_placement(%s, %s, %s, %s, %s)", there)

    def counted(self) -> tuple[int, list[int]]:
        """All orders, and the jobs of each node."""
        count = "select count(*) from tallybook.job"
        jobs = [conn.execute(count).fetchone()[0] for conn in self.conns]  # type: ignore[index]
        return self.coordinator.execute("select count(*) from orders").fetchone()[0], jobs  # type: ignore[index]

    def work(self) -> bool:
        """Run the jobs of each node, at that node's address. Returns False if some wait for another attempt."""
        for dsn in self.dsns:
            drain(self.app, dsn=dsn, queues=["mail"])
        return all(
            conn.execute("select from tallybook.job where state = 'retrying'").rowcount == 0 for conn in self.conns
        )

    def unconfirmed(self) -> list[Any]:
        """Orders that were not confirmed exactly once."""
        return self.coordinator.execute("select tenant, number, confirmed from orders where confirmed <> 1").fetchall()


@pytest.fixture(scope="module")
def shop() -> Iterator[Cluster]:
    """The cluster, migrated by the command, with the shop's table and function."""
    with citus.cluster(3, "shop", {"fsync": "on", "citus.recover_2pc_interval": "1s"}) as servers, ExitStack() as stack:
        dsns = [server.dsn("shop") for server in servers]
        conns = [stack.enter_context(psycopg.connect(dsn, autocommit=True)) for dsn in dsns]
        run("migrate", "--nodes", "all", dsn=dsns[0])
        for statement in (*SHOP, "alter table orders add column confirmed int default 0", PLACE):
            conns[0].execute(statement.encode())
        yield Cluster(dsns, conns, servers)


@pytest.fixture
def clean(shop: Cluster) -> Iterator[Cluster]:
    """The cluster, without open jobs at the end."""
    yield shop
    shop.work()


def test_the_nodes_are_found_and_installed_without_propagation(shop: Cluster) -> None:
    """pg_dist_node names three nodes, each installed with its own number, and Citus manages no table of Tallybook."""
    found = nodes(shop.dsns[0])
    assert len(found) == 3 and found[0].home
    assert len(set(shop.numbers)) == 3
    for conn in shop.conns:
        assert conn.execute(
            "select count(*) from pg_dist_partition where logicalrelid::text like 'tallybook.%'"
        ).fetchone() == (0,)
        assert conn.execute(
            "select count(*) from pg_catalog.pg_dist_object where objid = 'tallybook'::regnamespace"
        ).fetchone() == (0,)
    again = run("migrate", "--nodes", "all", dsn=shop.dsns[0])
    assert again.count("nothing to do") == 3, again


def test_the_list_of_citus_is_not_hidden_by_the_table(shop: Cluster) -> None:
    """A command that would write the first row of the table is refused: the table would hide the other nodes."""
    for words in (("add", "west", "host=/nowhere"), ("retire", "home"), ("remove", "home")):
        assert "pg_dist_node" in run("node", *words, dsn=shop.dsns[0], code=2)
    assert len(nodes(shop.dsns[0])) == 3


def test_a_coordinator_alone_keeps_the_list_of_citus() -> None:
    """On a coordinator without workers, too, the first row of the table would hide the nodes that Citus gets later."""
    with citus.cluster(1, "shop") as (server,):
        dsn = server.dsn("shop")
        run("migrate", "--nodes", "all", dsn=dsn)
        assert "pg_dist_node" in run("node", "add", "west", "host=/nowhere", "--number", "5", dsn=dsn, code=2)
        assert len(nodes(dsn)) == 1


def test_order_and_job_lie_on_the_tenants_node(clean: Cluster) -> None:
    """A distributed function writes both on the tenant's node in one transaction: the job's id names it."""
    holders = {tenant: clean.holder(tenant) for tenant in range(1, 31)}
    assert set(holders.values()) == {0, 1, 2}
    for tenant, holder in holders.items():
        assert clean.place(tenant) >> 43 == clean.numbers[holder]
    clean.work()
    assert clean.unconfirmed() == []


def test_a_rollback_leaves_nothing_on_either_node(clean: Cluster) -> None:
    """One transaction orders for tenants on two nodes: a rollback leaves nothing, a commit a row and a job on each."""
    one, other = (next(t for t in range(1, 99) if clean.holder(t) == holder) for holder in (1, 2))
    orders, jobs = clean.counted()
    with clean.coordinator.transaction(force_rollback=True):
        clean.place(one)
        clean.place(other)
    assert clean.counted() == (orders, jobs)
    with clean.coordinator.transaction():
        clean.place(one)
        clean.place(other)
    assert clean.counted() == (orders + 2, [jobs[0], jobs[1] + 1, jobs[2] + 1])


def test_a_transaction_for_two_nodes_commits_while_workers_sleep(clean: Cluster) -> None:
    """With the statements of the docs; the control without them fails, since a notification cannot be prepared."""
    one, other = (next(t for t in range(1, 99) if clean.holder(t) == holder) for holder in (1, 2))
    with psycopg.connect(clean.dsns[1], autocommit=True) as sleeper:
        assert sleeper.execute("select armed from tallybook.listen_begin('{mail}')").fetchone() == (True,)
        orders, jobs = clean.counted()
        for begin in (QUIET, ""):
            with suppress(psycopg.errors.FeatureNotSupported), clean.coordinator.transaction():
                clean.coordinator.execute(begin.encode())
                clean.place(one)
                clean.place(other)
            assert clean.counted() == (orders + 2, [jobs[0], jobs[1] + 1, jobs[2] + 1])


def test_one_select_for_many_tenants_runs_on_the_coordinator(clean: Cluster) -> None:
    """Only a call that is the whole SELECT goes to its node: other jobs are on the coordinator, and run there."""
    orders, jobs = clean.counted()
    clean.coordinator.execute("select place_order(t, 'pen') from generate_series(1, 20) t")
    clean.coordinator.execute("select place_order(1, 'pen') + 0")
    assert clean.counted() == (orders + 21, [jobs[0] + 21, jobs[1], jobs[2]])
    drain(clean.app, dsn=clean.dsns[0], queues=["mail"])
    assert clean.unconfirmed() == []


def test_a_job_on_a_node_without_workers_is_found(clean: Cluster) -> None:
    """`node check` fails and reports the missing worker."""
    clean.coordinator.execute("select place_order(t, 'pen') from generate_series(1, 5) t")
    checked = run("node", "check", dsn=clean.dsns[0], code=1)
    assert "worker" in checked, checked


def test_a_tenant_that_citus_moves_loses_nothing(clean: Cluster) -> None:
    """A shard moves while its tenant orders: later jobs are on the new node, and every order is confirmed once."""
    tenant = next(t for t in range(1, 99) if clean.holder(t) == 1)
    placed: list[int] = []
    stop = threading.Event()

    def order() -> None:
        with psycopg.connect(clean.dsns[0], autocommit=True) as conn:
            while not stop.is_set():
                row = conn.execute("select place_order(%s, 'pen')", (tenant,)).fetchone()
                assert row is not None
                placed.append(row[0])

    def work() -> None:
        while not stop.is_set():
            clean.work()

    threads = [threading.Thread(target=order), threading.Thread(target=work)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(placed) >= 50, "orders before the move")
        clean.move(tenant, to=2)
        after = len(placed)
        wait_until(lambda: len(placed) >= after + 50, "orders after the move")
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    numbers = [job >> 43 for job in placed]
    assert set(numbers) == {clean.numbers[1], clean.numbers[2]} and set(numbers[-40:]) == {clean.numbers[2]}
    clean.work()
    assert clean.unconfirmed() == []
    found = clean.coordinator.execute("select count(*) from orders where tenant = %s", (tenant,)).fetchone()
    assert found is not None and found[0] >= len(placed)


def test_open_jobs_of_a_tenant_that_was_moved_run_where_they_are(clean: Cluster) -> None:
    """Open jobs stay on the old node, and their handlers reach the moved orders from there."""
    tenant = next(t for t in range(1, 99) if clean.holder(t) == 1)
    jobs = [clean.place(tenant) for _ in range(5)]
    clean.move(tenant, to=2)
    assert clean.holder(tenant) == 2 and {job >> 43 for job in jobs} == {clean.numbers[1]}
    assert drain(clean.app, dsn=clean.dsns[1], queues=["mail"]).completed == 5
    assert clean.unconfirmed() == []


@pytest.mark.parametrize(("two_phase", "times"), [(True, 1), (False, 2)])
def test_a_crash_between_the_commits_of_two_nodes(clean: Cluster, two_phase: bool, times: int) -> None:
    """Node 1 crashes when node 2 has committed or prepared an effect of its job: with the statement of the docs, once.

    Without it, which is the control, Citus commits the other node first, and the effect comes twice.
    """
    clean.two_phase = TWO_PHASE if two_phase else ""
    tenant = next(t for t in range(1, 99) if clean.holder(t) == 1)
    clean.place(tenant)
    newest = "select max(number) from orders where tenant = %s"
    (number,) = clean.coordinator.execute(newest, (tenant,)).fetchone()  # type: ignore[misc]
    clean.move(tenant, to=2)
    prepared = "select exists (select from pg_prepared_xacts)"
    committed = "select confirmed > 0 from orders where tenant = %s and number = %s"
    home, other = clean.servers[1], clean.conns[2]
    for setting in ("commit_siblings = 0", "commit_delay = 100000"):  # its own commit takes 0.1 s
        clean.conns[1].execute(f"alter system set {setting}".encode())
    clean.conns[1].execute("select pg_reload_conf()")

    def work() -> None:
        with suppress(psycopg.OperationalError):
            drain(clean.app, dsn=clean.dsns[1], queues=["mail"])

    thread = threading.Thread(target=work)
    thread.start()
    seen = (prepared,) if two_phase else (committed, (tenant, number))
    while not other.execute(*seen).fetchone()[0]:  # type: ignore[index]
        assert thread.is_alive()
    home.kill()
    home.start()
    clean.conns[1] = psycopg.connect(clean.dsns[1], autocommit=True)
    for setting in ("commit_siblings", "commit_delay"):
        clean.conns[1].execute(f"alter system reset {setting}".encode())
    clean.conns[1].execute("select pg_reload_conf()")
    thread.join(60)
    wait_until(clean.work, "no job waits for another attempt")
    assert clean.unconfirmed() == ([] if times == 1 else [(tenant, number, times)])
    clean.coordinator.execute("delete from orders where tenant = %s", (tenant,))
    clean.two_phase = ""


def test_an_uninstallation_and_the_script_change_one_node(clean: Cluster) -> None:
    """They do so even if Citus has distributed the schema with a function that uses it, and manages new tables."""
    function = """create function place(tenant int) returns bigint begin atomic
                  select tallybook.enqueue('mail', 'x', jsonb_build_object('tenant', tenant)); end"""
    clean.coordinator.execute(function)
    clean.coordinator.execute("select create_distributed_function('place(int)', 'tenant', colocate_with => 'orders')")
    assert uninstall(clean.coordinator)
    there = "select count(*) from pg_tables where schemaname = 'tallybook'"
    assert [conn.execute(there).fetchone() == (0,) for conn in clean.conns] == [True, False, False]
    clean.coordinator.execute("set citus.use_citus_managed_tables = on")
    clean.coordinator.execute(script(node=clean.numbers[0]).encode())
    assert run("node", "check", dsn=clean.dsns[0]).count("is well") == 3
