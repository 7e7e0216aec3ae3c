"""Order keys and conflicts of unique keys under every order of concurrent steps, with controls that remove a guard.

Each schedule has its own queue and keys. Starts and ends are recorded as a program outside would see them: a start
after its answer, an end before its commit is sent, so each overlap that is found is real.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from support import interleave
from support.broken import without
from support.database import Connection as Db
from support.interleave import Connection, Step, claim, commit, end, missed, promised, rows, start, step, unless

pytestmark = pytest.mark.direct("watches which session waits for which")


@dataclass
class Scene(interleave.Scene):
    jobs: list[int] = field(default_factory=list)
    """Those with the order key, which exist before the first step."""


@step
async def cancel(conn: Connection, scene: Scene, which: int) -> None:
    await rows(conn, "select tallybook.cancel(%s)", scene.jobs[which])


@step
async def retry(conn: Connection, scene: Scene, which: int) -> None:
    await unless(["TB005"], conn, "select tallybook.retry(%s)", scene.jobs[which])


@step
async def produce(conn: Connection, scene: Scene, n: int) -> None:
    """Ask for work number n, and all before it, to be done by one queued job."""
    query = (
        "select tallybook.enqueue(%s, 't', jsonb_build_object('n', %s::int), unique_key => %s,"
        " unique_while => 'queued', on_conflict => 'replace_args')"
    )
    ((job,),) = await rows(conn, query, scene.queue, n, scene.queue)
    promised(conn, scene, job, n)


@dataclass(frozen=True)
class Scenario:
    sessions: Sequence[Sequence[Step]]
    keyed: int = 0
    unique: bool = False
    heal: bool = False
    """Whether a rescue may be needed."""


def play(dsn: str, scenario: Scenario) -> tuple[list[str], int]:
    async def begin(conn: Connection, queue: str) -> Scene:
        scene = Scene(queue, await interleave.two_workers(conn, queue), ordered=scenario.keyed > 0)
        for _ in range(scenario.keyed):
            query = "select tallybook.enqueue(%s, 't', order_key => %s)"
            scene.jobs.append((await rows(conn, query, queue, queue))[0][0])
        if scenario.unique:
            await produce(1)(conn, scene)
        return scene

    async def judge(conn: Connection, scene: Scene) -> list[str]:
        for name in scene.workers:
            await end(name)(conn, scene)
        for _ in range(12):
            if scenario.heal:
                await conn.execute("select tallybook.rescue()")
            await conn.execute("select tallybook.promote()")
            for name in scene.workers:
                await interleave.work(conn, scene, name)
        left = "select id, state from tallybook.job where queue = %s and state <> all ('{completed,cancelled,dead}')"
        wrong = scene.wrong + missed(scene, {job: n for job, n, _ in scene.told})
        wrong += [f"job {job} is {state} for ever" for job, state in await rows(conn, left, scene.queue)]
        first = list(dict.fromkeys(scene.starts))
        if scenario.keyed and not scenario.heal and first != sorted(first):
            wrong.append(f"started in the order {first}")
        return wrong

    return interleave.play(dsn, scenario.sessions, begin, judge, interleave.some(scenario.sessions))


ONE: list[Step] = [claim("one"), start("one"), end("one")]
TWO: list[Step] = [claim("two"), start("two"), end("two")]
LATE: list[Step] = [claim("one", 1), start("one"), end("one", begin=True), commit("one")]
SCENARIOS: dict[str, Scenario] = {
    "two workers, one key": Scenario([ONE, TWO], keyed=3),
    "an end that commits late": Scenario([LATE, [claim("two"), start("two"), start("two"), end("two")]], keyed=3),
    "a snooze": Scenario([[claim("one"), start("one"), end("one", "snooze", ", '0'")], TWO], keyed=2),
    "a cancel of who is next": Scenario(
        [ONE, [cancel(1, begin=True), claim("two"), commit("two")]], keyed=3, heal=True
    ),
    "a cancel of the first": Scenario([ONE, TWO, [cancel(0)]], keyed=3, heal=True),
    "a cancel that is retried": Scenario(
        [ONE, [cancel(1), retry(1, begin=True), commit("two")], [start("two")]], keyed=3, heal=True
    ),
    "a producer and a worker": Scenario([[produce(2, begin=True), produce(3), commit()], ONE], unique=True),
    "two producers and a worker": Scenario(
        [[produce(2, begin=True), commit()], [produce(3, begin=True), commit()], ONE], unique=True
    ),
    "a producer, a snooze": Scenario(
        [[produce(2, begin=True), commit()], [claim("one"), start("one"), end("one", "snooze", ", '0'"), claim("one")]],
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
