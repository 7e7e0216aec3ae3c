"""rebase, in SQL alone, on databases that were restored from a real dump of another cluster."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from support.askers import Asker, S, T
from support.clusters import next_xid
from support.database import one
from support.shop import BELIEVE, Shop, catch_up, claim, furnish, moved, put

pytestmark = pytest.mark.direct("holds transactions open beside one another and watches which waits")


@pytest.mark.slow
@pytest.mark.parametrize("claimed", [False, True])
def test_without_the_rebase_a_lower_counter_loses_jobs(
    shop: Callable[..., Shop], tmp_path: Path, claimed: bool
) -> None:
    """Negative control: a cluster that keeps the lanes as its own never sees their jobs, or a cursor raises TB004."""
    old, new = shop("far"), shop("fresh", empty=True)
    put(old.db)
    if claimed:
        claim(old.db, one(old.db, "select tallybook.worker_start('old', '{default}')"), "default", 10)
    moved(old, new, tmp_path)
    new.db.execute(BELIEVE)
    put(new.db)
    worker = one(new.db, "select tallybook.worker_start('new', '{default}')")
    if claimed:
        with pytest.raises(psycopg.Error) as refused:
            claim(new.db, worker, "default", 10)
        assert refused.value.sqlstate == "TB004"
    else:
        assert claim(new.db, worker, "default", 10)[1] == []
        assert one(new.db, "select count(*) from tallybook.job where state = 'available'") == 2
    assert new.db.execute("select rebased, moved + lost from tallybook.rebase(cursors => true)").fetchone() == (True, 2)


@pytest.mark.slow
def test_without_the_rebase_jobs_between_the_ids_of_the_dump_are_lost(
    shop: Callable[..., Shop], tmp_path: Path
) -> None:
    """Negative control: a lane does not see a job enqueued below its cursor once the counter has passed the cursor."""
    old, new = shop("near"), shop("fresh", empty=True)
    catch_up(old, new, 5000)
    put(old.db)
    worker = one(old.db, "select tallybook.worker_start('old', '{default}')")
    assert len(claim(old.db, worker, "default", 10)[1]) == 1
    moved(old, new, tmp_path)
    new.db.execute(BELIEVE)
    lost = put(new.db)
    catch_up(new, old, 1000)
    worker = one(new.db, "select tallybook.worker_start('new', '{default}')")
    assert claim(new.db, worker, "default", 10)[1] == []  # no error either: the counter is ahead of every cursor
    new.db.execute("update tallybook.installation set system_identifier = 1")
    found = new.db.execute("select rebased, moved, lost from tallybook.rebase()").fetchone()
    assert found == (True, 1, 1)
    assert lost in claim(new.db, one(new.db, "select tallybook.worker_start('new', '{default}')"), "default", 10)[1]


@pytest.mark.slow
def test_many_at_once_rebase_once(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """Rebase: of eight sessions that start at the same moment one rebases; the others wait for it and find it done."""
    old, new = shop("far"), shop("fresh", empty=True)
    for _ in range(300):
        put(old.db)
    moved(old, new, tmp_path)
    found: list[Any] = []
    together = threading.Barrier(8)

    def start() -> None:
        conn = new.connect()
        together.wait()
        found.append(conn.execute("select rebased, moved from tallybook.rebase()").fetchone())

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(False, 0)] * 7 + [(True, 300)]
    assert one(new.db, "select count(*) from tallybook.job where state = 'available'") == 300


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_a_transaction_older_than_the_rebase_loses_no_job(
    shop: Callable[..., Shop], tmp_path: Path, level: str
) -> None:
    """Rebase waits for no producer; a job that an older transaction commits later is moved once."""
    old, new = shop("far"), shop("fresh", empty=True)
    put(old.db)
    moved(old, new, tmp_path)
    before, after = new.connect(), new.connect()
    for producer in (before, after):
        producer.execute(f"begin isolation level {level}")
        producer.execute("select count(*) from tallybook.lane")  # takes its snapshot, if it has only one
    late = [put(before)]
    cancelled = put(before)
    before.execute("select tallybook.cancel(%s)", (cancelled,))
    assert one(new.db, "select moved from tallybook.rebase()") == 1
    late.append(put(after))
    before.execute("commit")
    after.execute("commit")
    worker = one(new.db, "select tallybook.worker_start('new', '{default}')")
    seen = set(claim(new.db, worker, "default", 10)[1])
    assert late[0] in seen or one(new.db, "select state from tallybook.job where id = %s", late[0]) == "available"
    for _ in range(3):
        one(new.db, "select late from tallybook.rebase()")
        while jobs := claim(new.db, worker, "default", 10)[1]:
            assert seen.isdisjoint(jobs)
            seen |= set(jobs)
    assert {*late} < seen and cancelled not in seen and len(seen) == 3
    assert one(new.db, "select state from tallybook.job where id = %s", cancelled) == "cancelled"


def test_without_the_later_looks_a_late_job_is_lost(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """Negative control: a job that is committed into a retired lane is not claimed until rebase runs again."""
    old, new = shop("far"), shop("fresh", empty=True)
    put(old.db)
    moved(old, new, tmp_path)
    producer = new.connect()
    producer.execute("begin")
    late = put(producer)
    new.db.execute("select tallybook.rebase()")
    worker = one(new.db, "select tallybook.worker_start('new', '{default}')")
    producer.execute("commit")
    assert late not in claim(new.db, worker, "default", 10)[1]
    assert claim(new.db, worker, "default", 10)[1] == []
    assert one(new.db, "select late from tallybook.rebase()") == 1
    assert claim(new.db, worker, "default", 10)[1] == [late]


@pytest.mark.slow
def test_the_counter_climbs_through_the_old_ids(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """Rebase: when the new cluster reaches the transaction ids of the dump, no job of the old lanes runs again."""
    old, new = shop("near"), shop("fresh", empty=True)
    catch_up(old, new, 5000)
    jobs = {put(old.db) for _ in range(5)}
    moved(old, new, tmp_path)
    worker = one(new.db, "select tallybook.worker_start('new', '{default}')")
    assert set(claim(new.db, worker, "default", 10)[1]) == jobs
    catch_up(new, old, 1000)
    assert one(new.db, "select late from tallybook.rebase()") == 0
    assert one(new.db, "select min(born::text::bigint) from tallybook.lane where retired_at is not null") > next_xid(
        old.db
    )
    assert claim(new.db, worker, "default", 10)[1] == []


def test_every_column_of_a_job_moves(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """Rebase: only an entry's place in its lane changes. Add each new column of entry here and in rebase."""
    old, new = shop("far"), shop("fresh", empty=True)
    options = {"unique_key": "k", "max_attempts": 7, "headers": '{"trace": "x"}', "priority": 3}
    options |= {"order_key": "o", "expires_at": "2900-01-01", "options": '{"version": 2}'}
    job = put(old.db, **options)
    worker = one(old.db, "select tallybook.worker_start('old', '{default}')")
    lease, _ = claim(old.db, worker, "default", 1)
    old.db.execute(
        "select tallybook.fail(%s::uuid, %s::bigint, 1, '{\"message\": \"no\"}', retry_in => '0 s')", (lease, job)
    )
    moved(old, new, tmp_path)
    new.db.execute("select tallybook.rebase()")
    before, after = (
        row[0]
        for row in new.db.execute(
            "select to_jsonb(e) from tallybook.entry e where attempt > 1 order by attempt"
        ).fetchall()
    )
    assert None not in before.values(), f"a column without a value is not tested: {before}"
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"xid", "seq", "lane_id", "attempt"}


def restart_sequences(shop: Shop) -> None:
    """Leave all sequences at their start, as logical replication does."""
    names = shop.db.execute("select sequencename from pg_sequences where schemaname = 'tallybook'").fetchall()
    for (name,) in names:
        shop.db.execute(sql.SQL("alter sequence tallybook.{} restart").format(sql.Identifier(name)))


def test_numbers_that_did_not_come_along_are_set(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """Rebase, logical replication: sequences that restarted are set past every number in use."""
    old, new = shop("far"), shop("fresh", empty=True)
    furnish(old.db, old.connect)
    audit, step = "select tallybook.audit_add('ada', 'cli', 'pause')", "select tallybook._clock_forward('1 min', %s)"
    one(old.db, audit)
    one(old.db, step, "2026-01-01")
    moved(old, new, tmp_path)
    numbers = (
        "select (select max(greatest(job_id, seq)) from tallybook.entry), (select max(id) from tallybook.claim),"
        " (select max(id) from tallybook.worker), (select max(lane_id) from tallybook.lane)"
    )
    job, claimed, worker, lane = new.db.execute(numbers).fetchone() or (0, 0, 0, 0)
    restart_sequences(new)
    assert one(new.db, "select tallybook.worker_start('new', '{default}')") == worker + 1
    assert one(new.db, "select min(lane_id) from tallybook.lane where retired_at is null") == lane + 1
    assert put(new.db) > job
    claim(new.db, worker + 1, "default", 1)
    assert one(new.db, "select min(id) from tallybook.claim where worker_id = %s", worker + 1) == claimed + 1
    assert one(new.db, audit) == 2
    one(new.db, step, "2026-01-02")
    assert one(new.db, "select max(id) from tallybook.clock_step") == 2


@pytest.mark.parametrize("options", ['{"limits": ["k"]}', '{"fair_key": "k"}'])
def test_a_job_that_waits_keeps_its_place_before_a_newer_one(
    shop: Callable[..., Shop], tmp_path: Path, options: str
) -> None:
    """Rebase, logical replication: a job that waits for a permit, or by a fair key, starts before newer jobs."""
    old, new = shop("far"), shop("fresh", empty=True)
    if "limits" in options:
        one(old.db, "select tallybook.concurrency_limit_set('k', 1)")
    asker = Asker(old.db)
    due = T if "limits" in options else T + S
    jobs = [put(old.db, "q", at=T, run_at=due, options=options) for _ in range(3)]
    old.db.execute("select nextval('tallybook.job_id') from generate_series(1, 3000)")  # of producers that rolled back
    asker.look(due)
    assert one(old.db, "select count(*) from tallybook.waiting where job_id = any (%s)", jobs[1:]) == 2
    moved(old, new, tmp_path)
    restart_sequences(new)
    asker = Asker(new.db)
    newer = put(new.db, "q", at=due, options=options)
    order: list[int] = []
    while one(new.db, "select count(*) from tallybook.job where state <> 'completed'"):
        one(new.db, "select released from tallybook.fair_release(max_line => 1, at => %s)", due)
        order += (started := asker.look(due))
        asker.complete(*started)
        one(new.db, "select released from tallybook.concurrency_release(at => %s)", due)
    assert order.index(jobs[1]) < order.index(jobs[2]) < order.index(newer)


def test_a_rebase_needs_read_committed(shop: Callable[..., Shop], tmp_path: Path) -> None:
    """TB003: an old snapshot would overlook jobs; if there is nothing to do, any isolation level works."""
    old, new = shop("far"), shop("fresh", empty=True)
    put(old.db)
    moved(old, new, tmp_path)
    for conn in (old.connect(), new.connect()):
        conn.execute("begin isolation level repeatable read")
        if conn.info.host == old.db.info.host:
            conn.execute("select tallybook.rebase()")
        else:
            with pytest.raises(psycopg.Error) as refused:
                conn.execute("select tallybook.worker_start('new', '{default}')")
            assert refused.value.sqlstate == "TB003"
        conn.execute("rollback")


@pytest.mark.parametrize("inside", [False, True])
def test_the_counters_are_exact_after_a_rebase(shop: Callable[..., Shop], inside: bool) -> None:
    """Rebase recounts the jobs aside that it moves instead of counting each move; in a savepoint it may count them."""
    db = shop("fresh").db
    for n in range(3):
        db.execute("select tallybook.enqueue('q', 't', run_at => now() + '1 day', unique_key => %s)", [str(n)])
    db.execute("update tallybook.installation set system_identifier = 1")
    with db.transaction():
        if inside:
            db.execute("savepoint here")
        assert db.execute("select rebased, scheduled from tallybook.rebase()").fetchone() == (True, 3)
    moves = one(db, "select count(*) from tallybook.tally where what = 'scheduled' and n < 0")
    assert moves == (3 if inside else 0)
    assert db.execute("select * from tallybook.verify()").fetchall() == []
    assert db.execute("select queue, scheduled from tallybook.counts()").fetchall() == [("q", 3)]
