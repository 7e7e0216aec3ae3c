"""The jobs of a shop before it moves, in every state, and what has to become of each of them after it.

house = furnish(old)                     # on the old cluster
dump, restore, enqueue more: house.later(new)
run workers on the new cluster
assert house.wrongs(new) == []
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from support.clusters import burn
from support.database import Connection, one

QUEUES = ["default", "mail", "reports", "never"]
# The handlers of worker_process leave a row for each start; the old cluster's workers are SQL and leave none.
RAN = "select count(*), coalesce(max(attempt), 0) from ran where job_id = %s"


def put(conn: Connection, queue: str = "default", **options: object) -> int:
    """Enqueue one job for the handler `note`; its id."""
    named = "".join(f", {name} => %s" for name in options)
    return int(one(conn, f"select tallybook.enqueue(%s, 'note', '{{\"n\": 1}}'{named})", queue, *options.values()))


def claim(conn: Connection, worker: int, queue: str, most: int) -> tuple[str, list[int]]:
    """A claim of at most so many: its lease and its jobs."""
    lease = str(uuid.uuid4())
    conn.execute("select tallybook.claim(%s, %s::text[], %s::int[], %s::uuid)", (worker, [queue], [most], lease))
    return lease, [row[0] for row in conn.execute("select job_id from tallybook.claimed_jobs(%s)", (lease,)).fetchall()]


def end(conn: Connection, verb: str, lease: str, job: int, *more: object, attempt: int = 1) -> None:
    """End an attempt by this verb."""
    marks = ", %s" * len(more)
    conn.execute(f"select tallybook.{verb}(%s::uuid, %s::bigint, %s::int{marks})", (lease, job, attempt, *more))


@dataclass
class House:
    """Job ids by what has to become of them."""

    runs: dict[int, str] = field(default_factory=dict)
    """Open when the copy was made, or put in since: each has to run once, to its end, in the new cluster."""
    stays: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Ended, or cancelled, or to run later: never runs; what it is, and the state that it has to be in."""
    had_run: set[int] = field(default_factory=set)
    """Of those that run: a worker of the old cluster had started them."""
    open_transactions: list[tuple[Connection, int]] = field(default_factory=list)

    def wrongs(self, conn: Connection) -> list[str]:
        """What is not as it has to be."""
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
        )
        turns += " join tallybook.outcome o on o.entry_xid = e.xid and o.entry_seq = e.seq where e.order_key = %s"
        for key in ("k", "l"):
            mine = [job for job, what in self.runs.items() if what.startswith(f"order key {key},")]
            if (order := one(conn, turns, key)) != sorted(mine):
                found.append(f"the jobs of order key {key} ran in the order {order}")
        ids = [row[0] for row in conn.execute("select id from tallybook.job group by id having count(*) > 1")]
        return found + [f"job {job} is on view more than once" for job in ids]

    def later(self, conn: Connection, what: str) -> None:
        """Put in some more, before anybody has rebased."""
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

    The claim of the first two that run is an interval of more than 3,000 transaction ids.
    """
    house = House()
    worker = int(one(conn, "select tallybook.worker_start('old', %s::text[], %s::text[])", QUEUES, ["note"]))
    conn.execute("insert into tallybook.queue (name, retention) values ('reports', 'brief') on conflict (name)"
                 " do update set retention = 'brief'")  # fmt: skip

    # Ended in every way.
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

    # Two transactions that are open while claims open windows over them: one commits before the dump, one after.
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
    # Running: a window, one by its id, former holes.
    lease, jobs = claim(conn, worker, "default", 2)
    for job in jobs:
        house.runs[job] = "running"
        house.had_run.add(job)
    by_id = put(conn)
    one(conn, "select tallybook.claim_job(%s, %s, gen_random_uuid())", worker, by_id)
    house.runs[by_id] = "running, taken by its id"
    house.had_run.add(by_id)
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
    for job in jobs[2:]:
        house.runs[job] = "running"
        house.had_run.add(job)
    taken_late[0].execute("commit")
    for job in (behind[-1], put(conn)):
        house.runs.setdefault(job, "available")
    lease, jobs = claim(conn, worker, "default", 50)
    while jobs:  # what is left, and the hole that has ended
        for job in jobs:
            house.runs[job] = "running"
            house.had_run.add(job)
        lease, jobs = claim(conn, worker, "default", 50)
    assert taken_late[1] in house.had_run
    ends_before[0].execute("commit")
    ends_unseen[0].execute("commit")
    house.open_transactions.append(open_still)

    # In line: in every lane, one whose lane was never claimed from, one put aside, unique keys.
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
    house.runs[snoozed] = "given back"
    house.had_run.add(snoozed)
    # Cancelled where no claim has come by; one of them retried since, one retried and cancelled again.
    for what, then in (("", ()), (", retried", ("retry",)), (", retried, cancelled", ("retry", "cancel"))):
        job = put(conn, "reports")
        for verb in ("cancel", *then):
            conn.execute(f"select tallybook.{verb}(%s)", (job,))
        if then == ("retry",):
            house.runs[job] = f"cancelled before its start{what}"
        else:
            house.stays[job] = (f"cancelled before its start{what}", "cancelled")
    # One order key: whose turn it is runs, one waits, one is in line; one of another key is cancelled while it has its turn.
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
    # A conflict of unique keys has changed the args of a job in line.
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
