"""Truncating a queue: all its jobs are cancelled, in bulk, and none is lost, run after its end, or ended twice."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString

import psycopg
import pytest

from support.broken import without
from support.database import Connect, Connection, call, miscounted, one
from support.hands import Hands, child, put, put_many, states
from support.sessions import behind, is_blocked
from support.subjects import end, push
from support.waiting import wait_until

LATER = datetime.now(UTC) + timedelta(days=1)


def truncate(db: Connection, **more: Any) -> tuple[int, int, bool]:
    """Truncate batch by batch; return the jobs cancelled, the jobs asked to stop, and whether others held some."""
    cancelled, cancelling, mark = 0, 0, None
    for _ in range(1000):
        (row,) = call(db, "queue_truncate", "mark, cancelled, cancelling, busy, remain", queue="q", mark=mark, **more)
        mark, cancelled, cancelling = row[0], cancelled + row[1], cancelling + row[2]
        if not row[4]:
            return cancelled, cancelling, row[3]
    raise AssertionError("truncate does not end")


@pytest.mark.servers
def test_all_that_does_not_run_is_cancelled(db: Connection, hands: Hands) -> None:
    """S3-36: truncate ends available, scheduled, retrying and waiting jobs; the rest stays, as the status shows."""
    failed = put(db)
    (job,) = hands.start()
    hands.fail(job, "1 day")
    runs = put(db)
    (running,) = hands.start()
    gone = [
        failed,
        put(db),
        put(db, priority=7),
        put(db, run_at=LATER),
        put(db, order_key="k"),
        put(db, unique_key="u"),
    ]
    parent = put(db, queue="other")
    gone.append(child(db, parent))
    gone.append(put(db, options={"fair_key": "x"}))
    status: LiteralString = """
select available, scheduled, retrying, waiting, running, cancelled from tallybook.queue_stats where queue = 'q'"""
    assert db.execute(status).fetchall() == [(4, 1, 1, 2, 1, 0)]
    assert truncate(db, by="ada") == (len(gone), 0, False)
    assert set(states(db, *gone)) == {"cancelled"}
    assert db.execute(status).fetchall() == [(0, 0, 0, 0, 1, 8)]
    assert states(db, runs, parent) == ["running", "available"]
    rows = db.execute(
        "select distinct reason, attempts > 0 from tallybook.job where id = any (%s)", (gone[1:],)
    ).fetchall()
    assert rows == [("truncated", False)]
    errors = db.execute(
        "select distinct error from tallybook.attempt"
        " where job_id = any (%s) and error is not null and state = 'cancelled'",
        (gone,),
    )
    assert errors.fetchall() == [({"message": "truncated", "by": "ada"},)]
    for table in ("scheduled", "waiting", "tombstone", "order_line", "parent", "concurrency_line"):
        assert hands.one(f"select count(*) from tallybook.{table}") == 0, table  # noqa: S608
    assert miscounted(db) == [], "and the counters know it"
    hands.complete(running)
    assert hands.run_all() == []
    assert put(db, unique_key="u") not in gone  # its key is free
    assert len(hands.run_all()) == 1


def test_states_can_be_chosen_and_what_runs_can_be_told(db: Connection, hands: Hands) -> None:
    """S3-36: only the named states end; with running, running jobs are asked to stop; a person's reason stays."""
    runs = put(db)
    (running,) = hands.start()
    line, later, mine = put(db), put(db, run_at=LATER), put(db, run_at=LATER)
    db.execute("select tallybook.cancel(%s, 'mine')", (mine,))
    assert truncate(db, states=["retrying", "waiting"]) == (0, 0, False)
    assert truncate(db, states=["available"])[0] == 1
    assert states(db, line, later, runs) == ["cancelled", "scheduled", "running"]
    assert truncate(db, running=True) == (2, 1, False), "the one that a person had cancelled has its end now, too"
    assert states(db, line, later, mine) == ["cancelled"] * 3
    reasons = db.execute("select id, reason from tallybook.job where id in (%s, %s)", (later, mine)).fetchall()
    assert dict(reasons) == {later: "truncated", mine: "mine"}
    assert hands.claimed_jobs(running.lease)[0].cancelled
    hands.say("cancel_running", running)
    assert hands.one("select tallybook.retry(%s)", later) == 2
    assert hands.run_all() == [later], "a person may retry what was truncated"


@pytest.mark.direct("holds a transaction open beside another")
def test_all_queues_are_truncated_in_turn(db: Connection, connect: Connect, hands: Hands) -> None:
    """S3-36: truncate_all ends one batch of one queue per call; the last call reports what was left of the first."""
    locked = put(db, queue="a", run_at=LATER)
    jobs = [put(db, queue=queue) for queue in "abbbz"]
    runs = put(db)
    assert [job.id for job in hands.start()] == [runs]
    other = connect(autocommit=False)
    other.execute("select from tallybook.scheduled where job_id = %s for update", [locked])
    calls: list[tuple[Any, ...]] = []
    mark, remain = None, True
    while remain:
        query = (
            "select mark, remain, queue, cancelled, busy from tallybook.queue_truncate_all(mark => %s, max_jobs => 2)"
        )
        mark, remain, *said = db.execute(query, [mark and psycopg.types.json.Jsonb(mark)]).fetchone() or (None, False)
        calls.append(tuple(said))
    assert {queue for queue, *_ in calls} == {"a", "b", "q", "z", None}
    assert calls[:-1] == sorted(calls[:-1], key=lambda said: said[0])
    assert sum(cancelled for _, cancelled, _ in calls) == len(jobs) and calls[-1] == (None, 0, True)
    assert max(cancelled for _, cancelled, _ in calls) == 2
    assert states(db, locked, runs, *jobs) == ["scheduled", "running"] + ["cancelled"] * 5
    with pytest.raises(psycopg.Error, match="is not a mark"):
        db.execute("select tallybook.queue_truncate_all(mark => '{}')")


@pytest.mark.direct("holds a transaction open beside another")
def test_what_others_hold_stays_theirs(db: Connection, connect: Connect, hands: Hands) -> None:
    """S3-36: a job claimed by its id, one being enqueued and a locked row are left; truncate waits for none."""
    taken, later = put(db), put(db, run_at=LATER)
    lease = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
    assert hands.one("select tallybook.claim_job(%s, %s, %s)", hands.worker, taken, lease)
    line = [put(db) for _ in range(3)]
    other = connect(autocommit=False)
    coming = put(other)
    other.execute("select from tallybook.scheduled where job_id = %s for update", (later,))
    assert truncate(db) == (3, 0, True)
    assert states(db, taken, later, *line) == ["running", "scheduled", *["cancelled"] * 3]
    other.commit()
    assert states(db, coming) == ["available"]
    assert truncate(db) == (2, 0, False)
    (job,) = hands.claimed_jobs(lease)  # type: ignore[arg-type]
    hands.complete(job)
    assert states(db, taken, later, coming) == ["completed", "cancelled", "cancelled"]


@pytest.mark.direct("holds a transaction open beside another")
def test_a_cancel_that_has_not_committed_is_not_waited_for(db: Connection, connect: Connect, hands: Hands) -> None:
    """A scheduled job whose cancel is not committed is left, the others end, and busy reports it."""
    jobs = [put(db, run_at=LATER) for _ in range(5)]
    other = connect(autocommit=False)
    other.execute("select tallybook.cancel(%s, 'mine')", (jobs[2],))
    assert truncate(db) == (4, 0, True)
    other.rollback()
    assert truncate(db) == (1, 0, False)
    assert states(db, *jobs) == ["cancelled"] * 5


def test_who_waits_for_the_truncated_goes_on(db: Connection, hands: Hands) -> None:
    """S3-36: after a truncate the next job of an order key starts, and a child of a truncated job is cancelled."""
    first = put(db, order_key="k")
    (job,) = hands.start()
    hands.fail(job, "1 day")  # it keeps its turn
    other = Hands(db, "other")
    behind = put(db, queue="other", order_key="k")
    assert other.start() == []
    after = child(db, first, queue="other")
    assert states(db, first, behind, after) == ["retrying", "waiting", "waiting"]
    assert truncate(db)[0] == 1
    db.execute("select tallybook.parents_resolve()")
    assert states(db, first, behind, after) == ["cancelled", "available", "cancelled"]
    assert [job.id for job in other.start()] == [behind]


def test_many_at_once_go_in_bulk(db: Connection, hands: Hands) -> None:
    """Truncate passes a lane with one claim row per batch, which hands out no job; other queues are not touched."""
    put_many(db, 2500)
    keep = put(db, queue="other")
    assert truncate(db, max_jobs=1000) == (2500, 0, False)
    assert hands.one("select count(*) from tallybook.claim") == 3
    assert hands.one("select sum(jobs) from tallybook.claim") == 0
    assert hands.one("select count(*) from tallybook.outcome where state = 'cancelled'") == 2500
    assert states(db, keep) == ["available"]
    assert hands.claim() == []


@pytest.mark.parametrize(
    ("code", "words", "call"),
    [
        ("TB002", "there is no queue", "queue_truncate('nobody')"),
        ("TB005", "cannot be truncated", "queue_truncate('q', '{running}')"),
        ("TB005", "cannot be truncated", "queue_truncate('q', '{}')"),
        ("TB005", "max_jobs 0 is out", "queue_truncate('q', max_jobs => 0)"),
        ("TB005", "{} is not a mark", "queue_truncate('q', mark => '{}')"),
        ("TB005", "is not a mark", "queue_truncate('q', mark => '[1]')"),
    ],
)
def test_bad_input(db: Connection, hands: Hands, code: str, words: str, call: str) -> None:
    """Invalid arguments raise a clear error."""
    with pytest.raises(psycopg.Error, match=words) as said:
        db.execute(f"select tallybook.{call}")  # type: ignore[arg-type]
    assert said.value.sqlstate == code


def test_an_old_snapshot_is_refused(db: Connection, connect: Connect, hands: Hands) -> None:
    """A transaction at REPEATABLE READ would read an old cursor, so it raises TB003."""
    other = connect(autocommit=False)
    other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(psycopg.Error, match="READ COMMITTED") as said:
        other.execute("select tallybook.queue_truncate('q')")
    assert said.value.sqlstate == "TB003"


@pytest.mark.direct("several sessions beside one another, some with transactions that stay open")
@pytest.mark.parametrize("seed", [1, 2])
def test_truncates_beside_everybody_else(connect: Connect, seed: int) -> None:  # noqa: PLR0915  threads of three kinds
    """S3-36: beside producers, claimers, failures and promotes no job is lost, run after its end, or ended twice."""
    given: list[int] = []
    ran: list[int] = []
    wrong: list[str] = []
    done, failed = threading.Event(), threading.Event()  # a worker that failed leaves jobs open for ever

    def produce(dice: random.Random, conn: Connection) -> None:
        conn.autocommit = False
        open_: list[int] = []
        for _ in range(80):
            more: dict[str, Any] = {"priority": dice.choice([1, 2])}
            match dice.randrange(6):
                case 0:
                    more["run_at"] = datetime.now(UTC) + timedelta(milliseconds=dice.randrange(50))
                case 1:
                    more["order_key"] = f"k{dice.randrange(3)}"
            open_.append(put(conn, **more))
            match dice.randrange(10):
                case 0:
                    conn.rollback()
                    open_ = []
                case 1 | 2 | 3:
                    continue
                case _:
                    conn.commit()
                    given.extend(open_)
                    open_ = []
        conn.commit()
        given.extend(open_)

    def work(dice: random.Random, conn: Connection) -> None:
        hands = Hands(conn)
        still_open = "select count(*) from tallybook.job where state not in ('completed', 'cancelled')"
        while not (finishing := done.is_set()) or (not failed.is_set() and one(conn, still_open)):
            conn.execute("select tallybook.promote()")
            conn.execute("select tallybook._release_missed()")
            jobs = hands.claim(dice.choice([1, 3, 20]))
            for job in jobs:
                if job.cancelled:
                    hands.say("cancel_running", job)
            jobs = [job for job in jobs if not job.cancelled]
            ready, _ = hands.turn(jobs, patient=False) if jobs else ([], [])
            for job in [job for job in jobs if job.id in ready]:
                if (shown := states(conn, job.id)) != ["running"]:
                    wrong.append(f"job {job.id} was handed out and is {shown}")
                if dice.random() < 0.2 and not finishing:
                    hands.fail(job, "10 ms")
                elif hands.say("complete", job) is True:
                    ran.append(job.id)
                else:
                    wrong.append(f"the end of job {job.id} was refused")

    def cancel(dice: random.Random, conn: Connection) -> int:
        cancelled = 0
        while not done.is_set():
            some = dice.choice([None, ["available"], ["scheduled", "retrying", "waiting"]])
            cancelled += truncate(conn, states=some, max_jobs=dice.choice([1, 7, 100]))[0]
        return cancelled

    db = connect()
    put(db)
    truncate(db)
    with ThreadPoolExecutor(7) as pool:
        producers, workers, truncates = (
            [pool.submit(part, random.Random(first + seed + n), connect()) for n in range(count)]
            for part, first, count in ((produce, 0, 3), (work, 10, 2), (cancel, 20, 2))
        )
        try:
            for producer in producers:
                producer.result()
        finally:
            done.set()
        for worker in workers:
            worker.add_done_callback(lambda ended: failed.set() if ended.exception() else None)
        for worker in workers:
            worker.result(timeout=30)
        assert sum(calls.result() for calls in truncates) > 0
    assert wrong == []
    ends = dict(db.execute("select id, state from tallybook.job").fetchall())
    assert [job for job in given if ends.get(job) not in ("completed", "cancelled")] == [], "they are lost, or open"
    assert len(ran) == len(set(ran))
    assert [job for job in ran if ends.get(job) != "completed"] == []
    ended = "select job_id from tallybook.attempt where state in ('completed', 'cancelled')"
    assert db.execute(f"{ended} group by job_id having count(*) > 1").fetchall() == [], "they have two ends"
    assert miscounted(db) == []


@pytest.mark.direct("two sessions, one waits for the other's lock")
def test_the_lanes_lock_keeps_claims_and_truncates_apart(db: Connection, connect: Connect) -> None:
    """Truncate waits for an open claim and leaves its jobs; control: without the lane's lock it ends them."""
    for guarded in (True, False):
        if not guarded:
            without(db, "queue_truncate", "perform pg_advisory_xact_lock(1413565441, l.lane_id);")
        db.execute("truncate tallybook.entry, tallybook.claim, tallybook.outcome")
        jobs = [put(db) for _ in range(3)]
        hands = Hands(connect())
        lease = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
        hands.db.execute("begin")
        assert hands.one("select jobs from tallybook.claim(%s, '{q}', '{2}', %s)", hands.worker, lease) == 2
        other = connect()
        with behind(other) as pool:
            begun = pool.submit(truncate, other)
            wait_until(lambda: begun.done() or is_blocked(db, other), "it ends, or waits")  # noqa: B023
            assert begun.done() != guarded
            hands.db.execute("commit")
            assert begun.result(timeout=20)[0] == (1 if guarded else 3)
        ends = [hands.say("complete", job) for job in hands.claimed_jobs(lease)]  # type: ignore[arg-type]
        assert ends == ([True, True] if guarded else [False, False]), states(db, *jobs)


@pytest.mark.parametrize("how", ["truncate", "drop"])
def test_subjects_that_have_stopped_leave_with_their_queue(db: Connection, how: str) -> None:
    """Completed and killed subjects are forgotten, so their names are free; a dead one and other queues' stay."""
    hands, others = Hands(db), Hands(db, "other")
    for who in ("done", "killed", "dead"):
        push(db, who)
        (job,) = hands.start()
        if who == "dead":
            hands.fail(job, final=True)
        else:
            end(hands, "subject_complete" if who == "done" else "subject_kill", job)
    push(db, "other", queue="other")
    (job,) = others.start()
    end(others, "subject_complete", job)
    left = "select subject from tallybook.subject order by 1"
    db.execute("select tallybook.worker_stop(id) from tallybook.worker")
    if how == "drop":
        assert hands.one("select tallybook.queue_drop('q', truncate => true)")
    else:
        truncate(db, states=["scheduled", "available"])
        assert len(db.execute(left).fetchall()) == 4, "they leave with all that the queue holds"
        truncate(db, max_jobs=1)
    assert db.execute(left).fetchall() == [("dead",), ("other",)]
    assert push(db, "done")[1]


def test_a_queue_of_many_lanes_is_truncated_in_few_calls(db: Connection) -> None:
    """A call ends the jobs of up to 100 lanes; queue_drop, which is one transaction, refuses more than 256."""
    db.execute("select tallybook.enqueue('q', 't', priority => i) from generate_series(1, 300) i")
    with pytest.raises(psycopg.errors.Error, match="at most 256 lanes") as error:
        db.execute("select tallybook.queue_drop('q', truncate => true)")
    assert error.value.sqlstate == "TB005"
    ended, mark = [], None
    while mark is None or ended[-1]:
        ((mark, cancelled),) = call(db, "queue_truncate", "mark, cancelled", queue="q", mark=mark)
        ended.append(cancelled)
    assert ended == [100, 100, 100, 0]
    assert db.execute("select tallybook.queue_drop('q')").fetchone() == (True,)
