"""PL/Proxy on Debian's PostgreSQL 15: the output of `tallybook node plproxy`, run in a proxy database for 3 nodes."""

import subprocess
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from support import plproxy
from support.cli import run
from support.database import one
from support.fleet import Asides, Fleet
from support.pages import code
from tallybook import App
from tallybook._cli.errors import Problem
from tallybook._cli.node import script
from tallybook._db.nodes import Node
from tallybook.embedded import temporary_server
from tallybook.testing import drain

ORDERS = "create table orders (tenant int, item text, unique (tenant, item) deferrable initially deferred)"
ON_NODE, ON_PROXY = code("docs/nodes.md", "PL/Proxy", "plpgsql")


def psql(dsn: str, text: str, error: str = "") -> None:
    """Run a script as a user would; it stops at its first error, which must be this one."""
    words = ["psql", "--quiet", "--no-psqlrc", "--set=ON_ERROR_STOP=1", dsn]
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode != 0) == bool(error) and error in done.stderr, done.stderr


@pytest.fixture(scope="module")
def cluster(asides: Asides) -> Iterator[tuple[Fleet, str]]:
    """Three nodes, and a proxy database in which the command's output was run twice."""
    plproxy.needed()
    with temporary_server(15) as server:
        fleet = Fleet(asides, 3, apart=dict.fromkeys((1, 2, 3), server))
        proxy = server.create_database("proxy")
        printed = run("node", "plproxy", dsn=fleet.dsn)
        psql(proxy, printed)
        psql(proxy, printed)
        for number in (1, 2, 3):
            fleet.run(number, ORDERS)
            fleet.run(number, ON_NODE)
        with psycopg.connect(proxy) as conn:
            conn.execute(ON_PROXY)
        yield fleet, proxy


@pytest.fixture
def proxy(cluster: tuple[Fleet, str]) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(cluster[1], autocommit=True) as conn:
        yield conn


def test_jobs_of_a_key_lie_on_one_node_and_keys_on_all(proxy: psycopg.Connection[Any]) -> None:
    """Enqueue by key: the same key gets the same node each time, and forty keys reach all three."""
    put = "select tallybook_proxy.enqueue(%s, 'mail', 'confirm', '{}', priority => 1)"
    nodes = {key: {one(proxy, put, key) >> 43 for _ in range(3)} for key in (f"tenant:{n}" for n in range(40))}
    assert all(len(found) == 1 for found in nodes.values())
    assert set.union(*nodes.values()) == {1, 2, 3}


def test_many_are_split_over_the_nodes_of_their_keys(proxy: psycopg.Connection[Any]) -> None:
    """Bulk by SPLIT: one row per job with its key, each on the node of the key's other jobs."""
    many = """\
select m.* from (select array_agg('tenant:' || g) as keys, array_agg('mail'::text) as queues,
                        array_agg('confirm'::text) as tasks,
                        array_agg(json_build_object('tenant', g)::text) as args from generate_series(1, 40) g) a,
       tallybook_proxy.enqueue_many(a.keys, a.queues, a.tasks, a.args) m"""
    found = proxy.execute(many.encode()).fetchall()
    assert {key for key, _, _ in found} == {f"tenant:{n}" for n in range(1, 41)} and len(found) == 40
    assert all(created for *_, created in found)
    again = "select tallybook_proxy.enqueue(%s, 'mail', 'confirm')"
    assert all(one(proxy, again, key) >> 43 == job >> 43 for key, job, _ in found)


def test_an_id_leads_to_its_node(proxy: psycopg.Connection[Any]) -> None:
    """State and job are read on the id's node; a missing job or id is null, and an unknown node a clear error."""
    jobs = [one(proxy, "select tallybook_proxy.enqueue(%s, 'mail', 'confirm')", f"tenant:{n}") for n in range(40)]
    assert {one(proxy, "select tallybook_proxy.state(%s)", job) for job in jobs} == {"available"}
    assert one(proxy, "select tallybook_proxy.job(%s)", jobs[0])["task"] == "confirm"
    assert one(proxy, "select tallybook_proxy.job(%s)", jobs[0] + 1_000_000) is None
    assert one(proxy, "select tallybook_proxy.state(null)") is one(proxy, "select tallybook_proxy.job(null)") is None
    with pytest.raises(psycopg.Error, match="no node of this cluster has job") as raised:
        one(proxy, "select tallybook_proxy.state(%s)", (99 << 43) + 1)
    assert raised.value.sqlstate == "TB002" and "node 99" in str(raised.value)


def test_lists_are_of_all_nodes(cluster: tuple[Fleet, str], proxy: psycopg.Connection[Any]) -> None:
    """Counters and dead letters come from each node, with its number."""
    app = App("shop")

    @app.task(queue="bad", max_attempts=1)
    def fall() -> None:
        raise LookupError("nobody home")

    for dsn in cluster[0].dsns:
        with psycopg.connect(dsn) as conn:
            fall.enqueue_sync(conn)
        assert drain(app, dsn=dsn, queues=["bad"]).dead == 1
    dead = proxy.execute("select node, job_id, queue, task, last_error from tallybook_proxy.dead_letters(5)").fetchall()
    assert sorted(node for node, *_ in dead) == [1, 2, 3]
    assert all(job >> 43 == node and error["message"] == "nobody home" for node, job, _, _, error in dead)
    counted = proxy.execute("select node, dead from tallybook_proxy.counts() where queue = 'bad'").fetchall()
    assert sorted(counted) == [(1, 1), (2, 1), (3, 1)]


def test_times_do_not_depend_on_the_date_style(cluster: tuple[Fleet, str], proxy: psycopg.Connection[Any]) -> None:
    """A time is the same on the node and on the proxy if they write dates otherwise, and zones without an offset."""
    proxy.execute("set datestyle = 'SQL, DMY'; set timezone = 'Asia/Shanghai'")
    later = "select tallybook_proxy.enqueue(%s, 'later', 't', run_at => '2031-02-01 10:00+00')"
    jobs = [one(proxy, later, f"tenant:{n}") for n in range(9)]
    times = {one(proxy, "select tallybook_proxy.job(%s) ->> 'run_at'", job) for job in jobs}
    assert times == {"2031-02-01T10:00:00+00:00"}
    fleet, app = cluster[0], App("shop")

    @app.task(queue="late", max_attempts=1)
    def fall() -> None:
        raise LookupError("nobody home")

    with psycopg.connect(fleet.dsn) as conn:
        fall.enqueue_sync(conn)
    assert drain(app, dsn=fleet.dsn, queues=["late"]).dead == 1
    fleet.run(1, f"alter database {conninfo_to_dict(fleet.dsn)['dbname']} set datestyle = 'SQL, DMY'")
    with psycopg.connect(cluster[1]) as new:  # PL/Proxy has one more connection to the node for it
        new.execute("set datestyle = 'SQL, MDY'")
        died = "select now() - died_at < '1 min' from tallybook_proxy.dead_letters() where queue = 'late'"
        assert one(new, died)


def test_an_order_and_its_job_are_one_transaction_on_the_node(
    cluster: tuple[Fleet, str], proxy: psycopg.Connection[Any]
) -> None:
    """A function on the node writes both or neither; a rollback on the proxy is too late: PL/Proxy has committed."""

    def orders() -> tuple[int, int]:
        found = [0, 0]
        for dsn in cluster[0].dsns:
            with psycopg.connect(dsn) as conn:
                found[0] += one(conn, "select count(*) from orders")
                found[1] += one(conn, "select count(*) from tallybook.job where args ? 'tenant' and queue = 'mail'")
        return found[0], found[1]

    before = orders()
    for tenant in range(10):
        one(proxy, "select place_order(%s, 'pen')", tenant)
    assert orders() == (before[0] + 10, before[1] + 10)
    with pytest.raises(psycopg.Error, match="duplicate key"):  # at COMMIT on the node, after the enqueue
        one(proxy, "select place_order(3, 'pen')")
    assert orders() == (before[0] + 10, before[1] + 10)
    with proxy.transaction(force_rollback=True):
        one(proxy, "select place_order(3, 'ink')")
    assert orders() == (before[0] + 11, before[1] + 11)


def test_a_list_of_all_nodes_fails_where_one_does_not_answer(cluster: tuple[Fleet, str]) -> None:
    """If a node is missing, lists of all nodes fail, but keys and ids still lead to the other nodes."""
    first, *others = cluster[0].nodes
    with psycopg.connect(first.dsn, autocommit=True) as conn:
        conn.execute("create database wider")
    wider = make_conninfo(first.dsn, dbname="wider")
    psql(wider, script([first, *others, Node("east", 4, make_conninfo(first.dsn, dbname="nobody"))], "wider"))
    with psycopg.connect(wider, autocommit=True) as proxy:
        job = one(proxy, "select tallybook_proxy.enqueue('tenant:1', 'mail', 'confirm')")
        assert one(proxy, "select tallybook_proxy.state(%s)", job) == "available"
        with pytest.raises(psycopg.Error, match="nobody"):
            proxy.execute("select * from tallybook_proxy.counts()")


def test_another_number_of_partitions_is_refused(cluster: tuple[Fleet, str], proxy: psycopg.Connection[Any]) -> None:
    """It would move every key: the script stops before any change, and names the number that fits."""
    before = proxy.execute("select srvoptions from pg_foreign_server").fetchall()
    psql(cluster[1], script(cluster[0].nodes, partitions=8), error="cluster tallybook has 16 partitions")
    psql(cluster[1], script(cluster[0].nodes, partitions=32), error="--partitions 16")
    assert proxy.execute("select srvoptions from pg_foreign_server").fetchall() == before


def three(**more: Any) -> list[Node]:
    dsn = make_conninfo(host="db.example", dbname="shop", user="shop", password="open sesame", sslmode="verify-full")
    return [Node(name, number, dsn, **more) for number, name in enumerate(("north", "south", "west"), 1)]


def test_secrets_are_not_printed() -> None:
    """Addresses, users and TLS settings are printed; a password never, and the text says where it goes."""
    printed = script(three())
    assert "host=db.example" in printed and "sslmode=verify-full" in printed and "user=shop" in printed
    assert "sesame" not in printed and "password file" in printed


def test_addresses_have_what_the_environment_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """PGHOST and its like are printed, where the DSN has no such value: the proxy's server does not have them."""
    for name, value in (("PGHOST", "db.example"), ("PGUSER", "shop"), ("PGPORT", "1"), ("PGPASSWORD", "sesame")):
        monkeypatch.setenv(name, value)
    printed = script([Node("north", 1, "dbname=shop port=2")])
    assert all(word in printed for word in ("host=db.example", "user=shop", "dbname=shop", "port=2"))
    assert "sesame" not in printed and "port=1" not in printed


@pytest.mark.parametrize(
    ("nodes", "asked", "count"), [(3, None, 16), (2, None, 2), (1, None, 1), (3, 4, 4), (3, 64, 64)]
)
def test_partitions_are_a_power_of_two_dealt_to_the_nodes(nodes: int, asked: int | None, count: int) -> None:
    """A power of two: one per node if their number is one, else 4 times the next, or as many as asked for."""
    printed = script(three()[:nodes], "shop", asked)
    assert printed.count("  set p") == count and f"hashtext(key) & {count - 1}" in printed
    assert all(f"({one.name}): p{at}" in printed for at, one in enumerate(three()[:nodes]))


@pytest.mark.parametrize(("cluster", "asked", "problem"), [
    ("shop", 3, "--partitions: 3 does not fit"), ("shop", 2, "each of 3 nodes needs one"),
    ("shop", -4, "--partitions: -4"), ("shop", 0, "--partitions: 0"), ("Shop'; drop", 4, "is not a plain name"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(cluster: str, asked: int, problem: str) -> None:
    """No power of two, fewer partitions than nodes, or a name that needs quotes: one line and a hint."""
    with pytest.raises(Problem) as raised:
        script(three(), cluster, asked)
    assert problem in f"{raised.value.message} {raised.value.hint}" and raised.value.code == 2


def test_a_node_that_retires_is_named() -> None:
    """It keeps its partitions until its keys are moved, and the script says so."""
    assert "is retiring: move its keys" in script(three(state="retiring"))
