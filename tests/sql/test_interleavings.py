"""Exactness of the claim under every order of concurrent steps, and controls that fail without a fence.

Each schedule has a queue of its own in one database. Afterwards everything is drained and the ledger is read: a job
whose transaction committed has ended exactly once, one that rolled back was never seen, and no attempt was handed out
twice.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import pytest

from support import interleave
from support.broken import source, without
from support.database import Connection as Db
from support.interleave import Connection, Schedule, Step, interleavings, is_idle, rows, sample, step, unless

pytestmark = pytest.mark.direct("watches which session waits for which")

RESCUED = ["TB006"]
"""Of a worker that was rescued before it came to its claim."""
FAR = "clock_timestamp() + interval '1 day'"


@dataclass
class Scene:
    """The objects of one schedule, and the answers that its sessions got."""

    queue: str
    workers: dict[str, int]
    committed: set[int] = field(default_factory=set)
    rolled_back: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)
    undecided: dict[Connection, list[int]] = field(default_factory=dict)
    leases: dict[str, UUID] = field(default_factory=dict)
    held: dict[str, list[tuple[int, int, bool]]] = field(default_factory=dict)
    ended_by: list[tuple[int, UUID]] = field(default_factory=list)
    """The job and the lease of each caller that was told that it has ended the job for good."""
    prepared: list[int] = field(default_factory=list)
    """The jobs that existed before the first step."""


# --- steps: each is one step of a schedule, of one or a few statements ---------------------------------------------


@step
async def enqueue(conn: Connection, scene: Scene, *, savepoint: bool = False) -> None:
    if savepoint:
        await conn.execute("savepoint s")
    job = await _value(conn, "select tallybook.enqueue(%s, 'work')", scene.queue)
    if savepoint:
        await conn.execute("rollback to savepoint s")
        scene.rolled_back.add(job)
    elif is_idle(conn):
        scene.committed.add(job)
    else:
        scene.undecided.setdefault(conn, []).append(job)


async def commit(conn: Connection, scene: Scene) -> None:
    await conn.execute("commit")
    scene.committed.update(scene.undecided.pop(conn, []))


async def rollback(conn: Connection, scene: Scene) -> None:
    await conn.execute("rollback")
    scene.rolled_back.update(scene.undecided.pop(conn, []))


@step
async def claim(conn: Connection, scene: Scene, name: str, *, read: bool = False, max_jobs: int = 2) -> None:
    # An id and no jobs: it met only cancelled jobs, and has to be called again.
    query = "select case when jobs > 0 or claim_id is null then jobs end from tallybook.claim(%s, %s, %s, %s)"
    taken: int | None = None
    while taken is None:
        lease = uuid4()
        asked = (scene.workers[name], [scene.queue], [max_jobs], lease)
        ((taken,),) = await unless(RESCUED, conn, query, *asked) or [(0,)]
    if taken:
        scene.leases[name] = lease
        if read:
            await _read(conn, scene, name)


@step
async def claim_by_id(conn: Connection, scene: Scene, name: str) -> None:
    lease, query = uuid4(), f"select tallybook.claim_job(%s, %s, %s, {FAR})"
    if await unless(RESCUED, conn, query, scene.workers[name], scene.prepared[0], lease) == [(True,)]:
        scene.leases[name] = lease


@step
async def finish(conn: Connection, scene: Scene, name: str, *, verb: str = "complete") -> None:
    """Read what was claimed, unless that was done before, and end it."""
    if name in scene.leases and name not in scene.held:
        await _read(conn, scene, name)
    held, lease = scene.held.pop(name, []), scene.leases.get(name)
    to_complete = []
    for job, attempt, cancelled in held:
        if cancelled:
            said = await _value(conn, "select tallybook.cancel_running(%s, %s, %s)", lease, job, attempt)
            scene.ended_by += [(job, lease)] if said == "cancelled" and lease else []
        elif verb == "fail":
            await conn.execute("select tallybook.fail(%s, %s, %s, '{}', '1 s')", [lease, job, attempt])
        elif verb == "snooze":
            await conn.execute("select tallybook.snooze(%s, %s, %s, '0')", [lease, job, attempt])
        else:
            to_complete.append((job, attempt))
    if to_complete and lease:
        jobs, attempts = map(list, zip(*to_complete, strict=True))
        refused = await _value(conn, "select tallybook.complete_many(%s, %s, %s)", [lease] * len(jobs), jobs, attempts)
        scene.ended_by += [(job, lease) for job in jobs if job not in refused]
    if is_idle(conn) and lease:
        # The heartbeat of a worker with nothing open: rescue need not read this claim anymore.
        query = """
        select count(r) from tallybook.claim c, tallybook.renew(%s, c.id + 1, at => '-infinity') r where c.lease = %s"""
        await unless(RESCUED, conn, query, scene.workers[name], lease)


@step
async def cancel(conn: Connection, scene: Scene, which: int) -> None:
    await conn.execute("select tallybook.cancel(%s)", [scene.prepared[which]])


@step
async def rescue(conn: Connection, scene: Scene, name: str) -> None:
    await conn.execute(f"select tallybook.rescue(at => {FAR}, only_worker => %s)", [scene.workers[name]])


PROMOTE = f"select tallybook.promote(at => {FAR})"


async def _value(conn: Connection, query: str, *params: object) -> Any:
    return (await rows(conn, query, *params))[0][0]


async def _read(conn: Connection, scene: Scene, name: str) -> None:
    query = "select job_id, attempt, coalesce(blocked_by = 'cancelled', false) from tallybook.claimed_jobs(%s)"
    scene.held[name] = await rows(conn, query, scene.leases[name])
    scene.seen.update(job for job, _, _ in scene.held[name])


# --- the checker ---------------------------------------------------------------------------------------------------


async def judge(conn: Connection, scene: Scene) -> list[str]:
    """Drain the queue, later, and return what is wrong with it; nothing if every promise was kept."""
    scene.held.clear()
    await conn.execute(PROMOTE)
    await conn.execute(f"select tallybook.rescue(at => {FAR})")
    for _ in range(20):
        await claim("drainer", read=True, max_jobs=100)(conn, scene)
        if "drainer" not in scene.leases:
            return await _violations(conn, scene)
        await finish("drainer")(conn, scene)
        del scene.leases["drainer"]
    raise AssertionError(f"queue {scene.queue} does not become empty")


_ENTRIES = """
select e.job_id, e.attempt, array_agg(o.state::text) filter (where o.state is not null),
       exists (select from tallybook.dead d where d.job_id = e.job_id)
  from tallybook.entry e join tallybook.lane l on l.lane_id = e.lane_id
  left join tallybook.outcome o on o.entry_xid = e.xid and o.entry_seq = e.seq
 where l.queue = %s group by e.job_id, e.attempt order by 1, 2"""
_HANDED_OUT = """
select c.id, c.jobs, h.job_id, h.attempt from tallybook.lane l join tallybook.claim c on c.lane_id = l.lane_id,
       tallybook.claimed_jobs(c.lease) h where l.queue = %s and c.lease is not null"""


async def _violations(conn: Connection, scene: Scene) -> list[str]:
    found: list[str] = []
    ends: Counter[int] = Counter()
    attempts: dict[int, list[int]] = {}
    for job, attempt, states, dead in await rows(conn, _ENTRIES, scene.queue):
        states = states or []
        attempts.setdefault(job, []).append(attempt)
        ends[job] += sum(state in ("completed", "cancelled", "dead") or (state == "lost" and dead) for state in states)
        if not states:
            found.append(f"lost: job {job}, attempt {attempt} was left open")
        if len(states) > 1:
            found.append(f"doubly ended: job {job}, attempt {attempt} has the outcomes {states}")
    for job, numbers in attempts.items():
        if job not in scene.committed:
            found.append(f"ghost: job {job} was rolled back and is there")
        if numbers != list(range(1, len(numbers) + 1)):
            found.append(f"doubly put back: job {job} has the attempts {numbers}")
        if ends[job] > 1:
            found.append(f"doubly ended: job {job} has {ends[job]} final outcomes")
    found += [f"lost: job {job} never ended" for job in scene.committed if not ends[job]]
    found += [f"ghost: job {job} was rolled back and seen" for job in scene.rolled_back & scene.seen]
    scheduled = "select s.job_id from tallybook.scheduled s join tallybook.lane l using (lane_id) where l.queue = %s"
    waiting = await rows(conn, scheduled, scene.queue)
    found += [f"lost: job {job} is still scheduled" for (job,) in waiting]
    handed = await rows(conn, _HANDED_OUT, scene.queue)
    times = Counter((job, attempt) for _, _, job, attempt in handed)
    found += [f"doubly claimed: job {job}, attempt {attempt}" for (job, attempt), n in times.items() if n > 1]
    sizes = Counter((claim_id, jobs) for claim_id, jobs, _, _ in handed)
    found += [f"not what was claimed: {jobs} jobs, then {n}" for (_, jobs), n in sizes.items() if n != jobs]
    told = Counter(job for job, _ in set(scene.ended_by))
    found += [f"doubly ended: {n} leases were told that they ended job {job}" for job, n in told.items() if n > 1]
    return found


# --- scenarios -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    sessions: Sequence[Sequence[Step]]
    available: int = 0
    """The number of jobs in line before the first step."""
    scheduled: int = 0
    """The number of jobs before these that are not due yet."""


TAKE: list[Step] = [enqueue(), claim("one"), finish("one")]
LATE: list[Step] = [enqueue(begin=True), enqueue(), commit]
CLAIM: list[Step] = [claim("one", begin=True), commit, finish("one")]
OTHER: list[Step] = [claim("two", begin=True), commit, finish("two")]
RESCUE: list[Step] = [rescue("one"), claim("two"), finish("two")]
PROMOTED: list[Step] = [PROMOTE, claim("two"), finish("two")]
CANCEL: list[Step] = [cancel(0, begin=True), cancel(-1), commit]
BY_ID: list[Step] = [claim_by_id("one", begin=True), commit, finish("one")]
FAIL: list[Step] = [claim("one", read=True), finish("one", begin=True, verb="fail"), commit]
SNOOZE: list[Step] = [claim("one", read=True), finish("one", begin=True, verb="snooze"), commit]
FORGOTTEN: list[Step] = [claim("one", begin=True, read=True), rollback, finish("one")]

TWO: dict[str, Scenario] = {
    "a commit that comes late": Scenario([LATE, TAKE], available=1),
    "a commit that comes late to a new lane": Scenario([LATE, TAKE]),
    "a rollback": Scenario([[enqueue(begin=True), enqueue(), rollback], TAKE], available=1),
    "a savepoint rolled back": Scenario([[enqueue(begin=True), enqueue(savepoint=True), commit], TAKE], available=1),
    "two producers, one of which claims": Scenario([LATE, [enqueue(begin=True), claim("one"), commit]]),
    "a worker that dies, and rescue": Scenario([[claim("one", begin=True), commit], RESCUE], available=2),
    "two claimers": Scenario([CLAIM, OTHER], available=3),
    "a claimer in its producer's transaction": Scenario(
        [[enqueue(begin=True), claim("one"), enqueue(), claim("one"), commit], [enqueue(), claim("two"), finish("two")]]
    ),
    "a claim that is rolled back": Scenario([FORGOTTEN, [claim("two"), finish("two")]], available=2),
    "claim and rescue": Scenario([CLAIM, RESCUE], available=2),
    "an end that commits late, and rescue": Scenario(
        [[claim("one", read=True), finish("one", begin=True), commit], RESCUE], available=2
    ),
    "two rescues": Scenario([[claim("one"), rescue("one"), finish("one")], RESCUE], available=2),
    "claim and cancel": Scenario([CLAIM, CANCEL], available=2),
    "fail and cancel": Scenario([FAIL, CANCEL], available=2),
    "snooze and rescue": Scenario([SNOOZE, RESCUE], available=2),
    "promote and cancel": Scenario([PROMOTED, CANCEL], scheduled=2),
    "two promotes": Scenario([["begin", PROMOTE, commit], PROMOTED], scheduled=2),
    "two claims of one job by its id": Scenario([BY_ID, [claim_by_id("two", begin=True), commit, finish("two")]], 1),
    "a claim by id and one of the line": Scenario([BY_ID, OTHER], available=2),
    "a claim by id and a promote": Scenario([BY_ID, PROMOTED], scheduled=2),
    "a claim by id and a cancel": Scenario([BY_ID, CANCEL], available=2),
    "a claim by id and rescue": Scenario([BY_ID, RESCUE], available=2),
}


def play(dsn: str, scenario: Scenario, schedules: Iterable[Schedule] | None = None) -> tuple[list[str], int]:
    """Return what the checker found, with the schedule it came from, and how many of these, or all, could happen."""

    async def begin(conn: Connection, queue: str) -> Scene:
        query = "select tallybook.worker_start(%s, %s, at => %s)"
        workers = ("one", [queue], "-infinity"), ("two", [queue], "-infinity"), ("drainer", [], "infinity")
        scene = Scene(queue, {worker[0]: await _value(conn, query, *worker) for worker in workers})
        query = (
            "select tallybook.enqueue(%s, 'work', run_at => case when n <= %s then now() + '1 h' end)"
            " from generate_series(1, %s) n"
        )
        jobs = await rows(conn, query, queue, scenario.scheduled, scenario.scheduled + scenario.available)
        scene.prepared = [job for (job,) in jobs]
        scene.committed.update(scene.prepared)
        return scene

    return interleave.play(dsn, scenario.sessions, begin, judge, schedules or interleavings(scenario.sessions))


@pytest.mark.parametrize("name", TWO)
def test_two_sessions_in_every_order(dsn: str, name: str) -> None:
    """S1-10, S3-08, S5-10: in every order of the steps of two sessions each job ends exactly once."""
    found, played = play(dsn, TWO[name])
    assert not found
    assert played >= 5


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
@pytest.mark.parametrize("scenario", [
    pytest.param(Scenario([LATE, CLAIM, RESCUE], available=1), id="claim, complete, rescue"),
    pytest.param(Scenario([CLAIM, CANCEL, PROMOTED], available=1, scheduled=1), id="claim, cancel, promote"),
])  # fmt: skip
def test_three_sessions_in_every_order(dsn: str, scenario: Scenario, part: int) -> None:
    """S1-10, S1-11, S3-08: in every order of three sessions of three steps each job ends exactly once."""
    schedules = list(interleavings(scenario.sessions))[part::6]
    found, played = play(dsn, scenario, schedules)
    assert not found
    assert played > len(schedules) / 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_long_sessions_in_sampled_orders(dsn: str, seed: int) -> None:
    """S1-10, S5-10: in a seeded sample of the orders of three longer sessions each job ends exactly once."""
    source = random.Random(seed)
    one: list[list[Step]] = [CLAIM, BY_ID, FORGOTTEN, FAIL, SNOOZE]
    two: list[list[Step]] = [OTHER, RESCUE, PROMOTED]
    three: list[list[Step]] = [
        CANCEL,
        LATE,
        [enqueue(begin=True), enqueue(savepoint=True), rollback],
        ["begin", PROMOTE, commit],
    ]
    sessions = [[step for part in source.sample(parts, 2) for step in part] for parts in (one, two, three)]
    scenario = Scenario(sessions, available=2, scheduled=2)
    found, played = play(dsn, scenario, sample(scenario.sessions, 30, seed))
    assert not found
    assert played


# --- negative controls: without a fence the checker finds the fault that it prevents -------------------------------


def test_control_without_holes_jobs_are_lost(dsn: str, db: Db) -> None:
    """Control: a claim that ignores transactions still running loses jobs, and the checker says so."""
    fence = "if h.holes <> '{}' or pg_snapshot_xmin(s) <> pg_snapshot_xmax(s) or v_own is not null then"
    without(db, "_window", fence, "if false then")
    found, _ = play(dsn, TWO["a commit that comes late"])
    assert any("lost" in wrong for wrong in found)


def test_control_without_the_lease_check_jobs_end_twice(dsn: str, db: Db) -> None:
    """Control: if ends are accepted from a lease that is not on record, two leases end one job."""
    text = source("_lease_entries")
    body = """language sql stable as $$
      select e.lane_id, e.retention, e.xid, e.seq, e.job_id, e.attempt, e.order_key, e.task, e.enqueued_at,
        e.enqueued_at
        from unnest(p_job_ids, p_attempts) u(job_id, attempt)
        join tallybook.entry e on e.job_id = u.job_id and e.attempt = u.attempt $$;"""
    db.execute(text[: text.index("language plpgsql stable")] + body)
    found, _ = play(dsn, TWO["a claim that is rolled back"])
    assert any("doubly ended" in wrong for wrong in found)


def test_control_without_the_workers_gate_jobs_are_lost(dsn: str, db: Db) -> None:
    """Control: a rescue that does not wait for an open claim leaves its jobs open forever."""
    without(db, "_lock_worker", "pg_advisory_xact_lock(1413565442, p_worker)", "null")
    found, _ = play(dsn, TWO["a worker that dies, and rescue"])
    assert any("lost" in wrong for wrong in found)


def test_control_without_the_lanes_lock_jobs_are_claimed_twice(dsn: str, db: Db) -> None:
    """Control: two claims of one lane that do not wait for each other hand out the same attempts."""
    without(db, "claim", "perform pg_advisory_xact_lock(1413565441, v.lane_id);", "null;")
    found, _ = play(dsn, TWO["two claimers"])
    assert any("doubly claimed" in wrong for wrong in found)
