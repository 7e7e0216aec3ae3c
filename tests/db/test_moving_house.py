"""A database that moves to another cluster keeps every job. Real dumps, real restores, real workers."""

import random
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from support.clusters import burn, cluster, dump, next_xid, psql, restore
from support.database import one
from support.shop import OPEN, QUEUES, WAYS, Connection, Shop, catch_up, furnish, moved, put, worked_off
from support.waiting import wait_until
from support.worker_process import Workers


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_job_survives_the_move_to_another_cluster(shop: Callable[..., Shop], tmp_path: Path, way: str) -> None:
    """Dump and restore, P1: open jobs run once to their end in the new cluster, ended jobs never again."""
    inside = """
    select count(*) from tallybook.entry e join tallybook.claim c on c.lane_id = e.lane_id and c.jobs > 0
     where e.enqueued_at > c.claimed_at and e.attempt = 1 and (e.xid, e.seq) > (c.from_xid, c.from_seq)
       and (e.xid, e.seq) <= (c.pos_xid, c.pos_seq)"""
    wide = """
    select from_xid::text::bigint from tallybook.claim
     where one_xid is null and closed = '{}' and pos_xid::text::bigint - from_xid::text::bigint > 3000
       and exists (select from tallybook.worker w where w.id = worker_id and w.ended_at is null)"""
    old, new = (shop(name, empty=name != WAYS[way][0]) for name in WAYS[way])
    if way == "into the ids of the dump":
        catch_up(old, new, 5000)
    house = furnish(old.db, old.connect)
    moved(old, new, tmp_path)
    highest = one(new.db, "select max(job_id) from tallybook.entry")
    if way == "into the ids of the dump":
        burn(new.db, one(new.db, wide) + 1000 - next_xid(new.db))
    house.later(new.db, "after the restore")
    # The point of that way: by their numbers alone, some of these look claimed in the old cluster.
    assert (one(new.db, inside) > 0) == (way == "into the ids of the dump")
    said = worked_off(new, count=2)
    assert house.wrongs(new.db) == []
    assert sum(text.count("came from another cluster") for text in said) == 1
    assert put(new.db) > highest
    for conn, job in house.open_transactions:
        conn.execute("rollback")
        assert one(new.db, "select count(*) from tallybook.job where id = %s", job) == 0


@pytest.mark.slow
def test_an_upgrade_by_dump_moves_every_job(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """Dump and restore, P1: the same from PostgreSQL 16 to 18, where both counters are at their start."""
    with cluster(16) as server, ExitStack() as stack:
        old, new = Shop(server, stack), shop("fresh", empty=True)
        house = furnish(old.db, old.connect)
        moved(old, new, tmp_path)
        house.later(new.db, "after the restore")
        worked_off(new)
        assert house.wrongs(new.db) == []


@pytest.mark.slow
def test_a_copy_in_the_same_cluster_goes_on_where_it_was(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """Same cluster, other database: ids keep their meaning, nothing is rebased; jobs that ran are rescued here."""
    old, new = shop("fresh"), shop("fresh", empty=True)
    house = furnish(old.db, old.connect)
    moved(old, new, tmp_path)
    house.later(new.db, "after the restore")
    assert one(new.db, "select rebased from tallybook.rebase(cursors => true)") is False
    # The old workers are silent here: one rescue notices it, the next gives them up. Their deaths are counted.
    new.db.execute(
        "select tallybook.rescue(at => clock_timestamp() + make_interval(days => d)) from generate_series(1, 2) d"
    )
    worked_off(new)
    wrongs = [wrong for wrong in house.wrongs(new.db) if "1 crashes" not in wrong]
    assert wrongs == []
    running = [job for job in house.had_run if house.runs[job].startswith(("running", "a hole", "order key"))]
    assert len(house.wrongs(new.db)) == len(running)


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_data_alone_moves_into_a_schema_that_is_there(shop: Callable[..., Shop], tmp_path: Path, known: bool) -> None:
    """A --data-only text dump moves into a migrated schema, with installation's row or by the cursors alone."""
    old, new = shop("far"), shop("fresh")
    house = furnish(old.db, old.connect)
    file = tmp_path / "shop.sql"
    tables = () if known else ("--exclude-table-data=tallybook.installation",)
    dump(old.dsn, file, "--format=plain", "--data-only", "--load-via-partition-root", "--schema=tallybook", *tables)
    if known:
        new.db.execute("delete from tallybook.installation")
    new.db.execute("delete from tallybook.service; delete from tallybook.fold")
    new.db.execute("delete from tallybook.series_step; delete from tallybook.retention_class")
    psql(file, new.dsn)
    house.later(new.db, "after the restore")
    worked_off(new)
    assert house.wrongs(new.db) == []


@pytest.mark.slow
def test_a_worker_that_follows_the_move_goes_on(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """A worker follows its server's name to a new cluster: no restart, no job lost; the running one runs again."""
    old, new = shop("far"), shop("fresh", empty=True)
    there = tmp_path / "server"  # a name for a server, as in the DNS
    there.symlink_to(str(old.db.info.host))
    dsn = f"host={there} port={old.db.info.port} user={old.db.info.user} dbname={old.db.info.dbname}"
    with Workers(dsn, old.db) as workers:
        worker = workers.start(queues=QUEUES, poll=0.2)
        first = put(old.db)
        wait_until(
            lambda: one(old.db, "select state from tallybook.job where id = %s", first) == "completed", "it works"
        )
        held = int(one(old.db, "select tallybook.enqueue('default', 'hold', '{\"n\": 2}')"))
        wait_until(
            lambda: one(old.db, "select count(*) from ran where job_id = %s", held), "a job runs during the move"
        )
        # Nothing is written any more; the copy is made, the name leads to it, and the old server drops the worker. The
        # handlers stay connected to the old server, where they record their runs.
        old.db.execute("update tallybook.queue set paused_at = now()")
        dump(old.dsn, tmp_path / "shop.dump")
        new.db.execute(sql.SQL("create database {}").format(sql.Identifier(old.db.info.dbname)))
        target = new.dsn.replace(new.db.info.dbname, old.db.info.dbname)
        restore(tmp_path / "shop.dump", target)
        with psycopg.connect(target, autocommit=True) as moved_to:
            moved_to.execute("update tallybook.queue set paused_at = null")
            jobs = [put(moved_to) for _ in range(20)]
            (tmp_path / "next").symlink_to(str(new.db.info.host))
            (tmp_path / "next").replace(there)
            old.db.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and application_name like 'tallybook %'"
            )
            wait_until(
                lambda: one(moved_to, "select count(*) from tallybook.worker where ended_at is null"), "it is there"
            )
            wait_until(lambda: one(old.db, "select count(*) from ran where job_id = %s", held) == 2, "it runs again")
            workers.open_gate()
            wait_until(lambda: one(moved_to, OPEN) == 0, "all have ended")
            runs = old.db.execute("select job_id, count(*) from ran group by job_id").fetchall()
            # The job that ran during the move started before the copy and again after it, as after a worker's loss.
            assert dict(runs) == {first: 1, held: 2, **dict.fromkeys(jobs, 1)}
            found = "select state::text, count(*) from tallybook.outcome group by state order by 1"
            assert moved_to.execute(found).fetchall() == [("completed", 22), ("lost", 1), ("moved", 20)]
            worker.signal(signal.SIGTERM)
            assert worker.ends() == 0


@pytest.mark.slow
def test_a_cursor_of_another_cluster_is_mended_under_a_working_worker(shop: Callable[..., Shop]) -> None:
    """TB004: a worker whose data was replaced under its connection, except installation's row, rebases and goes on."""
    new = shop("fresh")
    with Workers(new.dsn, new.db) as workers:
        worker = workers.start(poll=0.2)
        first = put(new.db)
        wait_until(lambda: one(new.db, OPEN) == 0, "it works")
        new.db.execute(
            "update tallybook.claim set hi = (hi::text::bigint + 1000000000)::text::xid8,"
            " lo = (hi::text::bigint + 1000000000)::text::xid8"
        )
        second = put(new.db)
        wait_until(lambda: one(new.db, OPEN) == 0, "it works again")
        assert [
            len(new.db.execute("select from ran where job_id = %s", (job,)).fetchall()) for job in (first, second)
        ] == [1, 1]
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0
        assert "came from another cluster" in worker.said


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(3))
def test_a_dump_in_the_midst_of_work_is_whole(shop: Callable[..., Shop], tmp_path: Path, way: str, seed: int) -> None:
    """A dump during enqueues, rollbacks, cancels and work: in the copy every job ends once."""

    def produce(conn: Connection, seed: int, over: threading.Event) -> None:
        """One producer: transactions of a few jobs, of which some roll back, some take long, some cancel."""
        chance = random.Random(seed)
        while not over.wait(0.002):
            conn.execute("begin")
            for _ in range(chance.randint(1, 4)):
                job = put(conn, chance.choice(QUEUES), priority=chance.choice((1, 2)))
            if chance.random() < 0.1:
                conn.execute("select tallybook.cancel(%s)", (job,))
            if chance.random() < 0.2:
                over.wait(chance.random() * 0.1)
            conn.execute("rollback" if chance.random() < 0.1 else "commit")

    old, new = (shop(name, empty=name != WAYS[way][0]) for name in WAYS[way])
    if way == "into the ids of the dump":
        catch_up(old, new, 5000)
    over = threading.Event()
    producers = [threading.Thread(target=produce, args=(old.connect(), seed * 10 + n, over)) for n in range(3)]
    with Workers(old.dsn, old.db) as workers:
        for _ in range(2):
            workers.start(queues=QUEUES, poll=0.1)
        for thread in producers:
            thread.start()
        wait_until(lambda: one(old.db, "select count(*) from ran") > 200, "they work")
        dump(old.dsn, tmp_path / "shop.dump")
        over.set()
        for thread in producers:
            thread.join()
    restore(tmp_path / "shop.dump", new.dsn)
    ended = "select id, state from tallybook.job where state in ('completed', 'cancelled', 'dead')"
    before = dict(new.db.execute(ended).fetchall())
    ran = set(new.db.execute("select job_id, attempt from ran").fetchall())
    everything = {row[0] for row in new.db.execute("select id from tallybook.job")}
    if way == "into the ids of the dump":
        burn(new.db, max(0, one(new.db, "select min(xid::text::bigint) + 100 from tallybook.entry") - next_xid(new.db)))
    added = {put(new.db, queue) for queue in QUEUES for _ in range(30)}
    worked_off(new, count=2)
    after = dict(new.db.execute(ended).fetchall())
    assert set(after) == everything | added and len(everything) > 200
    assert {job: after[job] for job in before} == before
    again = [job for job, _ in set(new.db.execute("select job_id, attempt from ran").fetchall()) - ran]
    assert set(again).isdisjoint(before)
    completed = {job for job, state in after.items() if state == "completed" and job not in before}
    assert sorted(again) == sorted(completed)  # each once
