"""Order keys and conflicts of unique keys under every order of concurrent steps, with controls that remove a guard.

Each schedule has its own queue and keys. Starts and ends are recorded as a program outside would see them: a start
after its answer, an end before its commit is sent, so each overlap that is found is real.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from uuid import UUID

import psycopg
import pytest

from support import interleave
from support.broken import without
from support.database import Connection as Db
from support.interleave import Connection, Step, claimed, is_idle, rows, step

pytestmark = pytest.mark.direct("watches which session waits for which")


@dataclass
class Scene:
    queue: str
    workers: dict[str, int]
    jobs: list[int] = field(default_factory=list)
    claimed: dict[str, dict[int, tuple[UUID, int]]] = field(default_factory=dict)
    """Per worker: job -> lease, attempt."""
    running: dict[str, set[int]] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    ordered: bool = True
    relied: dict[Connection, list[tuple[int, int]]] = field(default_factory=dict)
    told: list[tuple[int, int]] = field(default_factory=list)
    """The job that would do a committed producer's work, as the producer was told, and the number of that work."""
    did: dict[int, int] = field(default_factory=dict)
    """The number that each job had when it started."""


@step
async def claim(conn: Connection, scene: Scene, name: str, max_jobs: int = 10) -> None:
    for job, lease, attempt in await claimed(conn, scene.workers[name], scene.queue, max_jobs):
        scene.claimed.setdefault(name, {})[job] = (lease, attempt)


@step
async def start(conn: Connection, scene: Scene, name: str) -> None:
    """Check all jobs that are claimed and not started: end the cancelled ones, ask for the turns of the free ones."""
    mine = scene.claimed.setdefault(name, {})
    free = []
    for job, (lease, attempt) in list(mine.items()):
        if job in scene.running.get(name, set()):
            continue
        query = (
            "select coalesce(blocked_by = 'cancelled', false), coalesce(blocked_by = 'changing', false),"
            " args ->> 'n' from tallybook.claimed_jobs(%s, %s)"
        )
        ((cancelled, busy, n),) = await rows(conn, query, lease, job)
        if cancelled:
            await rows(conn, "select tallybook.cancel_running(%s, %s, %s)", lease, job, attempt)
            del mine[job]
        elif not busy:
            free.append((lease, job, attempt, n))
    if not free:
        return
    leases, jobs, attempts, numbers = map(list, zip(*free, strict=True))
    ((ready, busy),) = await rows(
        conn, "select ready, busy from tallybook.order_admit(%s, %s, %s)", leases, jobs, attempts
    )
    for job, n in zip(jobs, numbers, strict=True):
        if job in ready:
            if scene.ordered and (others := set().union(*scene.running.values()) if scene.running else set()):
                scene.wrong.append(f"job {job} started while {others} ran")
            scene.running.setdefault(name, set()).add(job)
            scene.starts.append(job)
            scene.did[job] = int(n or 0)
        elif job not in busy:
            del mine[job]


@step
async def end(conn: Connection, scene: Scene, name: str, verb: str = "complete") -> None:
    at_once = is_idle(conn)
    if at_once:
        scene.running.pop(name, None)
    mine = scene.claimed.get(name, {})
    for job in [job for job in mine if job in scene.starts]:
        lease, attempt = mine[job]
        if not at_once or job not in set().union(*scene.running.values(), set()):
            more = ", '0'" if verb == "snooze" else ""
            await rows(conn, f"select tallybook.{verb}(%s, %s, %s{more})", lease, job, attempt)
            if at_once:
                del mine[job]


@step
async def commit(conn: Connection, scene: Scene, name: str) -> None:
    for job in scene.running.pop(name, ()):
        scene.claimed[name].pop(job, None)
    await conn.execute("commit")
    scene.told += scene.relied.pop(conn, [])


@step
async def cancel(conn: Connection, scene: Scene, which: int) -> None:
    await rows(conn, "select tallybook.cancel(%s)", scene.jobs[which])


@step
async def retry(conn: Connection, scene: Scene, which: int) -> None:
    try:
        await rows(conn, "select tallybook.retry(%s)", scene.jobs[which])
    except psycopg.Error as error:
        if error.sqlstate != "TB005":
            raise
        await conn.execute("rollback")


@step
async def produce(conn: Connection, scene: Scene, n: int) -> None:
    """Ask for work number n, and all before it, to be done by one queued job."""
    query = (
        "select tallybook.enqueue(%s, 't', jsonb_build_object('n', %s::int), unique_key => %s,"
        " unique_while => 'queued', on_conflict => 'replace_args')"
    )
    ((job,),) = await rows(conn, query, scene.queue, n, scene.queue)
    if is_idle(conn):
        scene.told.append((job, n))
    else:
        scene.relied.setdefault(conn, []).append((job, n))


@dataclass(frozen=True)
class Scenario:
    sessions: Sequence[Sequence[Step]]
    keyed: int = 0
    unique: bool = False
    heal: bool = False
    """Whether a rescue may be needed."""


async def _complete(conn: Connection, scene: Scene, name: str) -> None:
    for job in scene.running.pop(name, ()):
        lease, attempt = scene.claimed[name].pop(job)
        await rows(conn, "select tallybook.complete(%s, %s, %s)", lease, job, attempt)


def play(dsn: str, scenario: Scenario) -> tuple[list[str], int]:
    async def begin(conn: Connection, queue: str) -> Scene:
        query = "select tallybook.worker_start('one', %s), tallybook.worker_start('two', %s)"
        ((one, two),) = await rows(conn, query, [queue], [queue])
        scene = Scene(queue, {"one": one, "two": two}, ordered=scenario.keyed > 0)
        for _ in range(scenario.keyed):
            query = "select tallybook.enqueue(%s, 't', order_key => %s)"
            scene.jobs.append((await rows(conn, query, queue, queue))[0][0])
        if scenario.unique:
            await produce(1)(conn, scene)
        return scene

    async def judge(conn: Connection, scene: Scene) -> list[str]:
        for name in scene.workers:
            await _complete(conn, scene, name)
        for _ in range(12):
            if scenario.heal:
                await conn.execute("select tallybook.rescue()")
            await conn.execute("select tallybook.promote()")
            for name in scene.workers:
                await claim(name)(conn, scene)
                await start(name)(conn, scene)
                await _complete(conn, scene, name)
        left = "select id, state from tallybook.job where queue = %s and state <> all ('{completed,cancelled,dead}')"
        stuck = [f"job {job} is {state} for ever" for job, state in await rows(conn, left, scene.queue)]
        wrong = scene.wrong + stuck
        first = list(dict.fromkeys(scene.starts))
        if scenario.keyed and not scenario.heal and first != sorted(first):
            wrong.append(f"started in the order {first}")
        wrong += [
            f"work {n} was told to job {job}, which did {scene.did.get(job)}"
            for job, n in dict(scene.told).items()  # the last number for each job
            if scene.did.get(job) != n
        ]
        return wrong

    return interleave.play(dsn, scenario.sessions, begin, judge, interleave.some(scenario.sessions))


ONE: list[Step] = [claim("one"), start("one"), end("one")]
TWO: list[Step] = [claim("two"), start("two"), end("two")]
LATE: list[Step] = [claim("one", 1), start("one"), end("one", begin=True), commit("one")]
SCENARIOS: dict[str, Scenario] = {
    "two workers, one key": Scenario([ONE, TWO], keyed=3),
    "an end that commits late": Scenario([LATE, [claim("two"), start("two"), start("two"), end("two")]], keyed=3),
    "a snooze": Scenario([[claim("one"), start("one"), end("one", "snooze")], TWO], keyed=2),
    "a cancel of who is next": Scenario(
        [ONE, [cancel(1, begin=True), claim("two"), commit("two")]], keyed=3, heal=True
    ),
    "a cancel of the first": Scenario([ONE, TWO, [cancel(0)]], keyed=3, heal=True),
    "a cancel that is retried": Scenario(
        [ONE, [cancel(1), retry(1, begin=True), commit("two")], [start("two")]], keyed=3, heal=True
    ),
    "a producer and a worker": Scenario([[produce(2, begin=True), produce(3), commit("-")], ONE], unique=True),
    "two producers and a worker": Scenario(
        [[produce(2, begin=True), commit("-")], [produce(3, begin=True), commit("-")], ONE], unique=True
    ),
    "a producer, a snooze": Scenario(
        [[produce(2, begin=True), commit("-")], [claim("one"), start("one"), end("one", "snooze"), claim("one")]],
        unique=True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_in_every_order(dsn: str, name: str) -> None:
    """S1-07, S3-08: per key one job runs at a time, in the order of the line, and none is stuck.

    No work that was promised to a producer is missed.
    """
    found, played = play(dsn, SCENARIOS[name])
    assert not found
    assert played >= 5


def _crowded(db: Db) -> None:
    """Let each producer act as one that changes more jobs than it has locks for; see _start_waits."""
    db.execute(f"alter database {db.info.dbname} set tallybook.jobs_locked = '1000'")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.unique])
def test_a_crowd_in_every_order(dsn: str, db: Db, name: str) -> None:
    """A producer that has run out of locks for single jobs keeps its promises by the lock of their task."""
    _crowded(db)
    assert not play(dsn, SCENARIOS[name])[0]


@pytest.mark.slow
def test_control_of_a_crowd(dsn: str, db: Db) -> None:
    """Control: without the probe of the task's lock, promised work is missed."""
    _crowded(db)
    without(db, "_amendment_state", "or p_crowd and not (", "or false and not (")
    assert play(dsn, SCENARIOS["a producer and a worker"])[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "function", "guard", "instead"),
    [
        pytest.param(
            "an end that commits late", "order_admit",
            "v_locked := pg_try_advisory_xact_lock(1413565448, hashtext(h.order_key));", "v_locked := true;",
            id="a turn without the key's lock",
        ),
        pytest.param(
            "an end that commits late", "_release",
            "while not pg_try_advisory_xact_lock(1413565448, hashtext(p_key)) loop", "while false loop",
            id="a release without the key's lock",
        ),
        pytest.param(
            "two workers, one key", "order_admit", "or not tallybook._job_open(v_holder))", "or true)",
            id="a turn that does not ask whether its holder is open",
        ),
        pytest.param(
            "a producer and a worker", "_amendment_state",
            "busy := not (pg_try_advisory_lock(1413565447, hashint8(p_job_id)) and", "busy := false and not (",
            id="a start that does not look for producers",
        ),
    ],
)  # fmt: skip
def test_control(dsn: str, db: Db, scenario: str, function: str, guard: str, instead: str) -> None:
    """Control: without a guard the checker finds an overlap, a stuck job or missed work."""
    without(db, function, guard, instead)
    found, _ = play(dsn, SCENARIOS[scenario])
    assert found
