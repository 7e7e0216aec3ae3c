"""Databases on separate clusters, which move from one to another, and their jobs before the move.

    house = furnish(old.db, old.connect)
    moved(old, new, tmp_path)
    house.later(new.db, "after the restore")
    worked_off(new)
    assert house.wrongs(new.db) == []

The transaction ids of the cluster `far` are an epoch ahead; those of `near` and `fresh` begin at 700. If `near` must be
some ids ahead of `fresh`, the test uses ids up: jobs enqueued on `fresh` can then get ids between those of the dump.
"""

import secrets
import signal
import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from support.clusters import burn, dump, next_xid, restore
from support.database import Connection, one
from support.waiting import wait_until
from support.worker_process import TABLES, Workers
from tallybook._db.migrate import migrate
from tallybook.embedded import Server

QUEUES = ["default", "mail", "reports", "never"]
OPEN = (
    "select count(*) from tallybook.job where state in ('available', 'running', 'waiting')"
    " or state = 'scheduled' and run_at < now() + interval '1 day'"
)
BELIEVE = "update tallybook.installation set system_identifier = (select system_identifier from pg_control_system())"
WAYS = {
    "to a lower counter": ("far", "fresh"),
    "to a higher counter": ("fresh", "far"),
    "into the ids of the dump": ("near", "fresh"),
}


class Shop:
    """One database, and connections to it."""

    def __init__(self, server: Server, stack: ExitStack, *, empty: bool = False) -> None:
        self.dsn = server.create_database(f"shop_{secrets.token_hex(4)}")
        self._stack = stack
        self.db = self.connect()
        if not empty:
            migrate(self.db)
            self.db.execute(TABLES)

    def connect(self) -> Connection:
        conn = psycopg.connect(self.dsn, autocommit=True)
        self._stack.callback(conn.close)
        return conn


def catch_up(shop: Shop, other: Shop, ids: int) -> None:
    """Use up transaction ids until this cluster's counter is `ids` ahead of the other's."""
    burn(shop.db, max(0, next_xid(other.db) + ids - next_xid(shop.db)))


def moved(old: Shop, new: Shop, folder: Path, *options: str) -> None:
    """Move the whole database by pg_dump and pg_restore."""
    dump(old.dsn, folder / "shop.dump", *options)
    restore(folder / "shop.dump", new.dsn)


def worked_off(new: Shop, *, count: int = 1) -> list[str]:
    """Run `count` worker processes until no job is left; return their output."""
    begun = one(new.db, "select clock_timestamp()")
    there = "select count(*) from tallybook.worker where ended_at is null and started_at > %s"
    with Workers(new.dsn, new.db) as workers:
        started = [workers.start(wait=False, queues=QUEUES) for _ in range(count)]
        # Wait for all of them: a worker that gets the signal before it handles signals is killed by it.
        wait_until(lambda: one(new.db, there, begun) == count, "the workers are there")
        wait_until(lambda: one(new.db, OPEN) == 0, "all jobs have ended", seconds=90)
        for worker in started:
            worker.signal(signal.SIGTERM)
        assert [worker.ends() for worker in started] == [0] * count
        return [worker.said for worker in started]


# The handlers of worker_process write a row for each start; the old cluster's workers are SQL and write none.
RAN = "select count(*), coalesce(max(attempt), 0) from ran where job_id = %s"


def put(conn: Connection, queue: str = "default", **options: object) -> int:
    """Enqueue one job for the handler `note` and return its id."""
    named = "".join(f", {name} => %s" for name in options)
    return int(one(conn, f"select tallybook.enqueue(%s, 'note', '{{\"n\": 1}}'{named})", queue, *options.values()))


def claim(conn: Connection, worker: int, queue: str, most: int) -> tuple[str, list[int]]:
    """Claim at most `most` jobs; return the lease and the jobs."""
    lease = str(uuid.uuid4())
    conn.execute("select tallybook.claim(%s, %s::text[], %s::int[], %s::uuid)", (worker, [queue], [most], lease))
    return lease, [row[0] for row in conn.execute("select job_id from tallybook.claimed_jobs(%s)", (lease,)).fetchall()]


def end(conn: Connection, verb: str, lease: str, job: int, *more: object, attempt: int = 1) -> None:
    """End an attempt with this verb."""
    marks = ", %s" * len(more)
    conn.execute(f"select tallybook.{verb}(%s::uuid, %s::bigint, %s::int{marks})", (lease, job, attempt, *more))


@dataclass
class House:
    """Job ids by their expected results."""

    runs: dict[int, str] = field(default_factory=dict)
    """Jobs open at the copy, or enqueued since: each must run once, to its end, in the new cluster."""
    stays: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Ended, cancelled or later jobs, which must not run: a description and the expected state of each."""
    had_run: set[int] = field(default_factory=set)
    """Jobs of `runs` that a worker of the old cluster had started."""
    open_transactions: list[tuple[Connection, int]] = field(default_factory=list)

    def started(self, what: str, *jobs: int) -> None:
        """Expect a run of jobs that the old cluster has started."""
        self.runs |= dict.fromkeys(jobs, what)
        self.had_run |= {*jobs}

    def wrongs(self, conn: Connection) -> list[str]:
        """Return the deviations from the expected results."""
        found = [f"counted: {row}" for row in conn.execute("select * from tallybook.verify()")]
        for job, what in self.runs.items():
            runs, _ = conn.execute(RAN, (job,)).fetchone() or (0, 0)
            state, attempts, crashes = conn.execute(
                "select state, attempts, crashes from tallybook.job where id = %s", (job,)
            ).fetchone() or ("gone", 0, 0)
            if (runs, state, attempts, crashes) != (1, "completed", 1 + (job in self.had_run), 0):
                found.append(f"{what} ({job}): ran {runs} times, {state} after {attempts} attempts, {crashes} crashes")
        for job, (what, state) in self.stays.items():
            runs, _ = conn.execute(RAN, (job,)).fetchone() or (0, 0)
            states = [row[0] for row in conn.execute("select state from tallybook.job where id = %s", (job,))]
            if runs or states != [state]:
                found.append(f"{what} ({job}): ran {runs} times, {states}")
        for job, what in self.runs.items():
            if "other args" in what and one(conn, "select n from ran where job_id = %s", job) != 7:
                found.append(f"{what} ({job}): ran with the old ones")
        turns = (
            "select array_agg(r.job_id order by o.ended_at) from ran r join tallybook.entry e using (job_id, attempt)"
            " join tallybook.outcome o on o.entry_xid = e.xid and o.entry_seq = e.seq where e.order_key = %s"
        )
        for key in ("k", "l"):
            mine = [job for job, what in self.runs.items() if what.startswith(f"order key {key},")]
            if (order := one(conn, turns, key)) != sorted(mine):
                found.append(f"the jobs of order key {key} ran in the order {order}")
        ids = [row[0] for row in conn.execute("select id from tallybook.job group by id having count(*) > 1")]
        return found + [f"job {job} is on view more than once" for job in ids]

    def later(self, conn: Connection, what: str) -> None:
        """Enqueue some more jobs before the rebase."""
        for queue in QUEUES:
            for priority in (1, 2):
                self.runs[put(conn, queue, priority=priority)] = f"put in {what}, {queue} {priority}"
        soon = put(conn, run_at="2900-01-01")
        conn.execute("update tallybook.scheduled set run_at = clock_timestamp() where job_id = %s", (soon,))
        self.runs[soon] = f"put in {what}, scheduled and due"
        gone = put(conn, "mail")
        conn.execute("select tallybook.cancel(%s, 'no')", (gone,))
        self.stays[gone] = (f"put in {what} and cancelled", "cancelled")


def furnish(conn: Connection, connect: Any) -> House:  # noqa: PLR0912, PLR0915  one job after the other
    """Fill the schema of `conn` with jobs of every kind; `connect` opens further connections to it.

    The claim of the first two jobs of `runs` is an interval of more than 3,000 transaction ids.
    """
    house = House()
    worker = int(one(conn, "select tallybook.worker_start('old', %s::text[], %s::text[])", QUEUES, ["note"]))
    conn.execute("insert into tallybook.queue (name, retention) values ('reports', 'brief') on conflict (name)"
                 " do update set retention = 'brief'")  # fmt: skip

    # Jobs that ended in every way.
    for queue in QUEUES[:3]:
        for _ in range(4):
            put(conn, queue)
        lease, jobs = claim(conn, worker, queue, 3)
        end(conn, "complete", lease, jobs[0])
        house.stays[jobs[0]] = ("completed", "completed")
        end(conn, "fail", lease, jobs[1], '{"message": "no"}', "0 s", None, True)
        house.stays[jobs[1]] = ("dead", "dead")
        end(conn, "cancel_running", lease, jobs[2])
        house.stays[jobs[2]] = ("cancelled while it ran", "cancelled")
        lease, (left,) = claim(conn, worker, queue, 9)
        end(conn, "fail", lease, left, '{"message": "no"}', "1 day")
        house.stays[left] = ("in backoff", "retrying")

    # Two open transactions with later windows over them: one commits before the dump, one after.
    def hole(name: str) -> tuple[Connection, int]:
        other = connect()
        other.execute("begin")
        job = put(other)
        house.runs[job] = name
        return other, job

    ends_before, ends_unseen, taken_late = (
        hole(f"a hole that {n}") for n in ("ends before", "ends unseen", "is taken")
    )
    open_still = hole("open during the dump")
    del house.runs[open_still[1]]
    put(conn)
    burn(conn, 3000)
    for _ in range(5):
        put(conn)
    # Running jobs: of a window, one claimed by its id, former holes.
    lease, jobs = claim(conn, worker, "default", 2)
    house.started("running", *jobs)
    by_id = put(conn)
    one(conn, "select tallybook.claim_job(%s, %s, gen_random_uuid())", worker, by_id)
    house.started("running, taken by its id", by_id)
    cancelled_by_id = put(conn)
    one(conn, "select tallybook.claim_job(%s, %s, gen_random_uuid())", worker, cancelled_by_id)
    conn.execute("select tallybook.cancel(%s)", (cancelled_by_id,))
    house.stays[cancelled_by_id] = ("taken by its id, told to stop", "cancelled")
    skipped = put(conn)
    conn.execute("select tallybook.cancel(%s, 'skip me')", (skipped,))
    house.stays[skipped] = ("cancelled, met by a claim", "cancelled")
    behind = [put(conn) for _ in range(3)]
    lease, jobs = claim(conn, worker, "default", 4 + 3)
    told = jobs[0]
    conn.execute("select tallybook.cancel(%s)", (told,))
    house.stays[told] = ("running, told to stop", "cancelled")
    end(conn, "complete", lease, jobs[1])
    house.stays[jobs[1]] = ("completed beside running ones", "completed")
    house.started("running", *jobs[2:])
    taken_late[0].execute("commit")
    for job in (behind[-1], put(conn)):
        house.runs.setdefault(job, "available")
    lease, jobs = claim(conn, worker, "default", 50)
    while jobs:  # the remaining jobs, and the hole that has ended
        house.started("running", *jobs)
        lease, jobs = claim(conn, worker, "default", 50)
    assert taken_late[1] in house.had_run
    ends_before[0].execute("commit")
    ends_unseen[0].execute("commit")
    house.open_transactions.append(open_still)

    # Available jobs: in every lane, one in a lane without claims, one set aside, unique keys.
    for queue in QUEUES:
        for priority in (1, 2, 7):
            house.runs[put(conn, queue, priority=priority)] = f"available, {queue} {priority}"
    for key in ("a", "b"):
        house.runs[put(conn, unique_key=key)] = f"available, with the unique key {key}"
    aside = put(conn, "never", priority=0)
    lease, _ = claim(conn, worker, "never", 1)
    end(conn, "move", lease, aside)
    house.runs[aside] = "put aside for a worker that knows its task"
    snoozed = put(conn, "mail", priority=0)
    lease, jobs = claim(conn, worker, "mail", 1)
    assert jobs == [snoozed]
    end(conn, "snooze", lease, snoozed, "0 s")
    house.started("given back", snoozed)
    # Cancelled jobs without a claim since; one of them retried later, one retried and cancelled again.
    for what, then in (("", ()), (", retried", ("retry",)), (", retried, cancelled", ("retry", "cancel"))):
        job = put(conn, "reports")
        for verb in ("cancel", *then):
            conn.execute(f"select tallybook.{verb}(%s)", (job,))
        if then == ("retry",):
            house.runs[job] = f"cancelled before its start{what}"
        else:
            house.stays[job] = (f"cancelled before its start{what}", "cancelled")
    # One order key: one job runs, one waits, one is available; a job of another key is cancelled during its turn.
    for key, queue in (("k", "reports"), ("l", "default")):
        for what in ("has its turn", "waits", "is in line"):
            job = put(conn, queue, priority=0, order_key=key)
            house.runs[job] = f"order key {key}, {what}"
            if what != "is in line":
                lease, jobs = claim(conn, worker, queue, 1)
                assert jobs == [job]
                one(conn, "select tallybook.order_admit(array[%s::uuid], array[%s::bigint], array[1])", lease, job)
            if what == "has its turn":
                if key == "k":
                    house.had_run.add(job)
                else:
                    conn.execute("select tallybook.cancel(%s)", (job,))
                    house.stays[job] = (house.runs.pop(job), "cancelled")
    # A conflict of unique keys has changed the args of an available job.
    amended = put(conn, "mail", unique_key="amended")
    conn.execute(
        "select tallybook.enqueue('mail', 'note', '{\"n\": 7}', unique_key => 'amended', on_conflict => 'replace_args')"
    )
    house.runs[amended] = "available, with other args by now"
    house.runs[put(conn, "default", run_at="2001-01-01")] = "was scheduled"
    due = put(conn, "mail", run_at="2900-01-01", unique_key="due")
    conn.execute("update tallybook.scheduled set run_at = clock_timestamp() where job_id = %s", (due,))
    house.runs[due] = "scheduled and due"
    later = put(conn, "mail", run_at="2900-01-01", unique_key="later")
    house.stays[later] = ("scheduled", "scheduled")
    gone = put(conn, "mail", run_at="2900-01-01")
    conn.execute("select tallybook.cancel(%s)", (gone,))
    house.stays[gone] = ("scheduled and cancelled", "cancelled")
    return house
