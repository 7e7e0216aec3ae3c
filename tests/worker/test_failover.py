"""The server dies for good and its standby takes over; and the first seconds after a server's start."""

import time
from contextlib import ExitStack
from datetime import timedelta

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from support.clusters import streaming
from support.database import one
from support.waiting import wait_until
from support.worker_process import Workers, app, rest
from tallybook._db.migrate import migrate
from tallybook.embedded import Server, temporary_server


def dsn_of(*servers: Server) -> str:
    """Return the DSN of the one of these servers that accepts writes."""
    parts = [conninfo_to_dict(server.dsn("shop")) for server in servers]
    hosts, ports = (",".join(str(part[key]) for part in parts) for key in ("host", "port"))
    user = str(parts[0]["user"])
    return make_conninfo(host=hosts, port=ports, user=user, dbname="shop", target_session_attrs="read-write")


@pytest.mark.slow
def test_a_worker_follows_a_failover() -> None:
    """F13 F14 P1 P10: primary killed, standby promoted: a worker with both hosts resumes within 10 s, none is lost.

    Negative control: a worker whose DSN has only the old primary does nothing more.
    """
    with ExitStack() as stack:
        primary, standby = stack.enter_context(streaming())
        with psycopg.connect(primary.dsn("postgres"), autocommit=True) as conn:
            conn.execute("alter system set synchronous_standby_names = '*'")
            conn.execute("select pg_reload_conf()")
            shown = "select count(*) from pg_stat_replication where sync_state = 'sync'"
            wait_until(lambda: conn.execute(shown).fetchone() == (1,), "a commit is also on the standby")
        both = dsn_of(primary, standby)
        app.dsn = both
        db = psycopg.connect(both, autocommit=True)
        workers = stack.enter_context(Workers(both, db))
        lonely = stack.enter_context(Workers(dsn_of(primary), db))
        worker = workers.start(queues={"default": 10})
        lonely.start(queues={"lonely": 10})
        put = []
        for n in range(300):
            put.append(rest.enqueue_sync(app, n))
        first = rest.with_(queue="lonely").enqueue_sync(app, 0)
        wait_until(lambda: app.get(first).sync(db).state == "completed", "the lonely one works")
        primary.kill()
        with psycopg.connect(standby.dsn("shop"), autocommit=True) as conn:
            conn.execute("select pg_promote()")
        promoted = time.monotonic()
        with psycopg.connect(both, autocommit=True) as db:
            workers.db = lonely.db = db
            later = [rest.enqueue_sync(app, n) for n in range(1000, 1020)]
            alone = rest.with_(queue="lonely").enqueue_sync(app, 1)
            wait_until(lambda: app.get(later[0]).sync(db).state == "completed", "it goes on")
            took = time.monotonic() - promoted
            for job in [*put, *later]:
                wait_until(
                    lambda job=job: app.get(job).sync(db).state == "completed",  # type: ignore[misc]
                    f"{job} ends",
                    seconds=30,
                )
            ends = "select count(*), count(distinct (entry_xid, entry_seq)) from tallybook.outcome"
            assert db.execute(ends + " where state = 'completed'").fetchone() == (321, 321)
            assert app.get(alone).sync(db).state == "available"
            assert worker.process.poll() is None
            print(f"went on {took:.1f} s after the promotion")
            assert took < 10


def test_after_a_start_of_the_server_everybody_has_a_lease_to_come_back() -> None:
    """F4 F5 P6: a worker that starts right after the server rescues none whose session is slow to return.

    A worker that was heard after the start and then lost has the short grace; a silent one is rescued after its lease.
    """
    with temporary_server() as server:
        dsn = server.create_database("shop")
        claim = "select jobs from tallybook.claim(%s, array['default'], array[1], gen_random_uuid())"
        with psycopg.connect(dsn) as conn:
            migrate(conn)
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("select tallybook.enqueue('default', 'note') from generate_series(1, 2)")
            start = "select tallybook.worker_start(%s, array['default'], session => true, lease => '30 s')"
            workers = ("silent", "heard")
            silent, heard = (conn.execute(start, (name,)).fetchone()[0] for name in workers)  # type: ignore[index]
            for worker in (silent, heard):
                assert conn.execute(claim, (worker,)).fetchone() == (1,)
        server.kill()
        server.start()
        with psycopg.connect(dsn, autocommit=True) as conn:
            (started,) = conn.execute("select pg_postmaster_start_time()").fetchone() or (None,)
            conn.execute("select tallybook.renew(%s, 0)", (heard,))

            def look(seconds: float) -> tuple[int, str]:
                at = started + timedelta(seconds=seconds)
                lost = one(conn, "select lost from tallybook.rescue(grace => '1 s', at => %s)", at)
                names = conn.execute("select name from tallybook.worker where ended_at is null order by 1").fetchall()
                return lost, ",".join(name for (name,) in names)

            assert look(3) == (0, "heard,silent")  # noticed
            assert look(5) == (1, "silent")  # the one that was heard, and has no session any more
            assert look(29) == (0, "silent")
            assert look(31) == (0, "silent")  # noticed
            assert look(43) == (1, "")
