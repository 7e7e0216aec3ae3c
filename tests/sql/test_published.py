"""A publication of all tables, for logical replication, changes nothing at the source.

Every test runs with the tables of the schema published (see conftest.py), and so do all verbs and services.
"""

from contextlib import ExitStack

import psycopg
import pytest

from support.clusters import cluster
from support.database import Connection
from support.hands import Hands, put
from support.waiting import wait_until
from tallybook._db.migrate import migrate


def serve(db: Connection, days: int) -> int:
    """Run each service, then prune at a later time until nothing is left to do; return how many rows went."""
    services = "promote rescue rebase concurrency_release fair_release parents_resolve fold recount"
    for name in services.split():
        db.execute(f"select tallybook.{name}()".encode())
    prune = "select effect, again from tallybook.prune(clock_timestamp() + make_interval(days => %s))"
    dropped = 0
    for _ in range(200):
        effect, again = db.execute(prune, [days]).fetchone() or (0, False)
        dropped += effect
        if not again:
            return dropped
    raise AssertionError("it does not come to an end")


def test_every_table_has_a_replica_identity(db: Connection) -> None:
    """Every table has a primary key or all its columns as its replica identity, even a table of a new range."""
    without = """
select c.oid::regclass::text from pg_class c
 where c.relnamespace = 'tallybook'::regnamespace and c.relkind in ('r', 'p') and c.relreplident <> 'f'
   and not (c.relreplident = 'd' and exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary))
 order by 1"""
    assert db.execute(without).fetchall() == []
    put(db)
    for days in (0, 1):
        serve(db, days)
    ranges = "select count(*) from tallybook._ranges('tallybook.entry_default')"
    assert db.execute(ranges).fetchone() == (2,)
    assert db.execute(without).fetchall() == []


def test_control_without_an_identity_a_row_cannot_be_deleted(db: Connection) -> None:
    """Control: the tests' databases are published; without its identity, concurrency_holder refuses a delete."""
    db.execute("alter table tallybook.concurrency_holder replica identity default")
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="does not have a replica identity"):
        db.execute("delete from tallybook.concurrency_holder")


def test_history_comes_and_goes_where_changes_are_decoded() -> None:
    """With wal_level = logical, all tables published and a slot that reads them, everything works.

    Jobs, limits, routes, services and prune work, ranges are cut and emptied, and the slot delivers all of it.
    """
    with cluster(wal_level="logical", max_wal_senders="2") as server, ExitStack() as stack:
        db = stack.enter_context(psycopg.connect(server.create_database("shop"), autocommit=True))
        with psycopg.connect(server.dsn("shop")) as conn:
            migrate(conn)
        db.execute("create publication everything for all tables")
        db.execute("select pg_create_logical_replication_slot('reader', 'pgoutput')")
        db.execute("select tallybook.concurrency_limit_set('one', 1)")
        db.execute("select tallybook.rate_limit_set('calls', 5, '1 s')")
        db.execute("select tallybook.provider_set('acme', 'http')")
        for symbol in (None, "X"):
            db.execute("select tallybook.route_set('prices', 'acme', %s)", [symbol])
            db.execute("select tallybook.route_drop('prices', %s)", [symbol])
        hands = Hands(db)
        for n in range(5):
            put(db, args={"n": n}, unique_key=str(n), order_key="o", priority=n % 3)
        hands.run_all()
        dead = put(db)
        hands.fail(hands.start()[0], final=True)
        db.execute("select tallybook.retry(%s)", [dead])
        assert hands.run_all() == [dead]
        serve(db, 0)
        serve(db, 1)
        last = db.execute("select pg_snapshot_xmax(pg_current_snapshot())::text").fetchone()
        wait_until(
            lambda: (
                db.execute("select pg_snapshot_xmin(pg_current_snapshot()) >= %s::xid8", last).fetchone() == (True,)
            ),
            "all have ended",
        )
        assert serve(db, 30) > 5
        seen = db.execute(
            "select count(*) from pg_logical_slot_get_binary_changes('reader', null, null,"
            " 'proto_version', '1', 'publication_names', 'everything')"
        ).fetchone()
        assert seen is not None and seen[0] > 50
