"""Subjects under every order of concurrent steps, with controls that remove a guard.

Promises to producers and the args at the starts are recorded as a program outside would see them: a start after its
answer, a promise after its commit.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

import psycopg
import pytest

from support import interleave
from support.broken import without
from support.database import Connect
from support.database import Connection as Db
from support.hands import Hands
from support.interleave import Connection, Step, commit, missed, promised, rows, start, step, two_workers, unless
from support.sessions import behind, crossed, is_blocked
from support.subjects import call, clock, end, forget, many, push, seen, start_one, state, upsert
from support.waiting import wait_until

pytestmark = pytest.mark.direct("watches which session waits for which")


@dataclass
class Scene(interleave.Scene):
    """One subject in a queue of its own, which has the queue's name."""

    freed: int = 0


@step
async def claim(conn: Connection, scene: Scene, name: str) -> None:
    await conn.execute("select tallybook.promote()")
    await interleave.claim(name)(conn, scene)


finish = partial(interleave.end, verb="subject_complete")


@step
async def produce(conn: Connection, scene: Scene, n: int, *, verb: str = "upsert") -> None:
    """Ask for the subject to work on number n."""
    ran = set().union(*scene.running.values())
    said = "report" if verb == "upsert" else "case when created then 'created' else 'kept' end"
    query = f"select job_id, {said} from tallybook.subject_{verb}(%s, 't', %s, jsonb_build_object('n', %s::int))"  # noqa: S608
    for job, report in await unless(["TB005"], conn, query, scene.queue, scene.queue, n):
        if report == "updated" and job in ran:
            scene.wrong.append(f"job {job} was changed while it ran")
        promised(conn, scene, job, n, report)


@step
async def free(conn: Connection, scene: Scene) -> None:
    ((said,),) = await rows(conn, "select tallybook.subject_forget('t', %s)", scene.queue)
    scene.freed += said == "forgotten"


async def cancel(conn: Connection, scene: Scene) -> None:
    await rows(conn, "select tallybook.cancel(job_id) from tallybook.subject_job where subject = %s", scene.queue)
    scene.freed += 1


@step
async def retry(conn: Connection, scene: Scene) -> None:
    scene.freed -= len(await unless(["TB005", "TB002"], conn, "select tallybook.retry(%s)", scene.told[0][0]))


@dataclass(frozen=True)
class Scenario:
    sessions: Sequence[Sequence[Step]]
    first: str = ""
    """The subject's state at the beginning: pending, planned or completed; empty: there is none."""


OPEN_UPSERT: Sequence[Step] = [produce(2, begin=True), commit()]
WORK: Sequence[Step] = [claim("one"), start("one"), finish("one")]
ITERATE: Sequence[Step] = [claim("one"), start("one"), finish("one", verb="subject_reschedule", more=", run_in => '0'")]
SCENARIOS: dict[str, Scenario] = {
    "an upsert and a claim": Scenario([OPEN_UPSERT, WORK], "pending"),
    "an upsert of a planned one and a claim": Scenario([OPEN_UPSERT, WORK], "planned"),
    "an upsert that says more and a worker": Scenario(
        [[produce(2, begin=True), produce(3), commit()], ITERATE], "pending",
    ),
    "two upserts and a worker": Scenario([OPEN_UPSERT, [produce(3, begin=True), commit()], WORK], "pending"),
    "an upsert and an end": Scenario(
        [OPEN_UPSERT, [claim("one"), start("one"), finish("one", begin=True), commit("one")]], "pending"
    ),
    "two that make one": Scenario([OPEN_UPSERT, [produce(3, begin=True), commit()], [produce(4, verb="push")]]),
    "two that revive one": Scenario([OPEN_UPSERT, [produce(3, begin=True), commit()], WORK], "completed"),
    "forgotten and made anew": Scenario(
        [[free(begin=True), produce(2, verb="push"), commit()],
         [claim("one"), start("one"), start("one"), finish("one")], [claim("two"), start("two")]],
        "pending",
    ),
    "retried and made anew": Scenario(
        [[cancel, retry(begin=True), commit()], [produce(2, verb="push", begin=True), commit()], WORK], "planned",
    ),
}  # fmt: skip


async def _judge(conn: Connection, scene: Scene) -> list[str]:
    """Let the workers do what is left; return what is wrong then."""
    for name in [*scene.workers] * 3:
        await conn.execute("select tallybook.promote()")
        await interleave.work(conn, scene, name)
    seen = await rows(conn, "select job_id, state from tallybook.subject where subject = %s", scene.queue)
    made = sum(report == "created" for _, _, report in scene.told)
    wrong = list(scene.wrong)
    if not scene.freed:
        kept = ("created", "updated", "unchanged")
        wrong += missed(scene, {job: n for job, n, report in scene.told if report in kept})
    if made > 1 + scene.freed:
        wrong.append(f"{made} were told that they made it")
    if len(seen) > 1 or scene.told and not seen and not scene.freed:  # noqa: RUF021
        wrong.append(f"the view has {seen}")
    wrong += [f"it is left {row}" for row in seen if row[1] != "completed"]
    return wrong


def play(dsn: str, scenario: Scenario) -> tuple[list[str], int]:
    async def begin(conn: Connection, queue: str) -> Scene:
        scene = Scene(queue, await two_workers(conn, queue))
        if scenario.first:
            await produce(1)(conn, scene)
        if scenario.first == "planned":  # due, but still in scheduled
            await conn.execute("select tallybook.subject_forget('t', %s)", [queue])
            planned = "select tallybook.subject_upsert(%s, 't', %s, '{\"n\": 1}', run_at => now() + interval '1 h')"
            await conn.execute(planned, [queue, queue])
            due = "update tallybook.scheduled set run_at = clock_timestamp() where unique_key = %s returning job_id"
            ((job,),) = await rows(conn, due, queue)
            scene.told[:] = [(job, 1, "created")]
        if scenario.first == "completed":
            await interleave.work(conn, scene, "one")
        return scene

    return interleave.play(dsn, scenario.sessions, begin, _judge, interleave.some(scenario.sessions))


def test_an_upsert_against_a_claim(dsn: str) -> None:
    """S3-25: in every order of an upsert's and a worker's steps an active subject is never changed.

    The subject works on what the upsert was told.
    """
    for name in ("an upsert and a claim", "an upsert of a planned one and a claim"):
        found, played = play(dsn, SCENARIOS[name])
        assert not found, name
        assert played >= 5


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCENARIOS if not name.endswith("and a claim")])
def test_in_every_order(dsn: str, name: str) -> None:
    """S3-02, S3-25: a subject has one job and one running attempt, and no promise is broken, in any interleaving."""
    found, played = play(dsn, SCENARIOS[name])
    assert not found
    assert played >= 3


@pytest.mark.slow
@pytest.mark.parametrize("probed", [True, False])
def test_a_crowd_and_a_claim(dsn: str, db: Db, probed: bool) -> None:
    """An upsert without locks for single jobs keeps its promise by the task's lock; without its probe it does not."""
    db.execute(f"alter database {db.info.dbname} set tallybook.jobs_locked = '1000'")  # type: ignore[arg-type]
    if not probed:
        without(db, "_amendment_state", "or p_crowd and not (", "or false and not (")
    assert bool(play(dsn, SCENARIOS["an upsert and a claim"])[0]) is not probed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "function", "changes"),
    [
        pytest.param(
            "an upsert and a claim", "_amendment_state",
            {"k.busy := not (pg_try_advisory_lock": "k.busy := false and not (pg_try_advisory_lock"},
            id="a start that does not look for producers",
        ),
        pytest.param(
            "an upsert and a claim", "_subject_now", {"when not v_open then 'active'": "when false then 'active'"},
            id="an upsert that does not look whether it runs",
        ),
        pytest.param(
            "two that revive one", "_subject_again",
            {"x.subject = p_subject\n         and x.job_id = p_job_id for update;": "x.subject = p_subject;"},
            id="a revival that does not lock the name",
        ),
        pytest.param(
            "retried and made anew", "_subject_retaken",
            {"j.scope = v_scope for update;": "j.scope = v_scope;",
             "perform tallybook._subject_lives(e.task, e.unique_key, v_other, e.job_id);": "null;"},
            id="a name that is free while a retry is on its way",
        ),
    ],
)  # fmt: skip
def test_control(dsn: str, db: Db, scenario: str, function: str, changes: dict[str, str]) -> None:
    """Control: without a guard a promise is broken, or one subject has two jobs."""
    for change in changes.items():
        without(db, function, *change)
    found, _ = play(dsn, SCENARIOS[scenario])
    assert found


# --- a forget that commits while a worker looks ---------------------------------------------------------------------


@pytest.mark.parametrize("guarded", [True, False], ids=["guard", "control"])
def test_a_forget_that_commits_while_a_worker_looks(db: Db, connect: Connect, guarded: bool) -> None:
    """A forgotten subject does not start, even if the forget commits after claimed_jobs has taken its snapshot."""
    if not guarded:  # with only the tombstones of claimed_jobs' own snapshot, it starts
        without(db, "claimed_jobs", "or (e.a).cancelled")
    hands = Hands(db)
    first, _ = push(db, "a")
    push(db, "b")
    stop = f"if p_job_id = {first} then perform pg_advisory_lock(99), pg_advisory_unlock(99); end if;"
    without(db, "_amendment_state", "  k.busy := not (pg_try", f"  {stop}\n  k.busy := not (pg_try")
    gate, forgetter, worker = connect(), connect(), connect()
    gate.execute("select pg_advisory_lock(99)")
    forgetter.execute("begin")
    assert forget(forgetter, "b") == "forgotten"
    lease = uuid4()
    worker.execute("select tallybook.claim(%s, '{q}', '{10}', %s)", (hands.worker, lease))
    query = "select coalesce(blocked_by in ('cancelled', 'changing'), false) from tallybook.claimed_jobs(%s)"
    with behind(worker) as pool:
        looking = pool.submit(lambda: worker.execute(query, (lease,)).fetchall())
        wait_until(lambda: is_blocked(db, worker), "claimed_jobs waits")
        forgetter.execute("commit")
        gate.execute("select pg_advisory_unlock(99)")
        assert looking.result(timeout=20) == [(False,), (guarded,)], "which are blocked"


# --- batches --------------------------------------------------------------------------------------------------------


BACKWARDS = "case when current_setting('application_name') = 'two' then -{0} else {0} end"
UNORDERED = {
    "new": (
        "_subjects_put",
        "where u.kind = 'n' order by u.subject collate \"C\"",
        f"where u.kind = 'n' order by {BACKWARDS.format('length(u.subject)')}",
    ),
    "planned": (
        "_subjects_change", "from want w order by w.job_id) q",
        f"from want w order by {BACKWARDS.format('w.job_id')}) q",
    ),
}  # fmt: skip


@pytest.mark.parametrize("guarded", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["guard", "control"])
@pytest.mark.parametrize("kind", UNORDERED)
def test_batches_do_not_deadlock(db: Db, connect: Connect, kind: str, guarded: bool) -> None:
    """S3-12: two concurrent upserts of the same subjects in opposite orders both end, with one job per subject."""
    if not guarded:  # each batch takes its locks in its own order
        without(db, *UNORDERED[kind])

    def opposite(names: list[str], turn: int) -> None:
        def batch(conn: Db, who: str, mine: list[str]) -> None:
            conn.execute(f"set application_name = {who}".encode())
            many(conn, "subject_upsert_many", mine, args=[f'{{"{who}": {turn}}}'] * len(mine))

        crossed(
            db, connect, lambda third: upsert(third, names[len(names) // 2], args={"third": turn}),
            lambda conn: batch(conn, "one", names), lambda conn: batch(conn, "two", names[::-1]),
        )  # fmt: skip

    names = ["x" * n for n in range(1, 400)]
    if kind == "planned":
        many(db, "subject_push_many", names, run_ats=[clock(db, "1 h")] * len(names))
    with nullcontext() if guarded else pytest.raises(psycopg.errors.DeadlockDetected):
        for turn in range(4 if guarded else 1):
            opposite([f"{turn} {name}" for name in names] if kind == "new" else names, turn)
        jobs = db.execute("select count(*), count(distinct unique_key) from (select unique_key from tallybook.scheduled"
                          " union all select unique_key from tallybook.entry) j").fetchone()  # fmt: skip
        assert jobs == ((4 if kind == "new" else 1) * 399,) * 2


def test_the_old_time_is_exact(db: Db, connect: Connect) -> None:
    """S3-13: an upsert that waited for another one reports the time that one left as old, not an earlier one."""
    push(db, "a", run_at=clock(db, "1 h"))
    first, second = clock(db, "2 h"), clock(db, "3 h")
    other, waiter = connect(autocommit=False), connect()
    upsert(other, "a", run_at=first)
    with behind(waiter) as pool:
        said = pool.submit(upsert, waiter, "a", run_at=second)
        wait_until(lambda: is_blocked(db, waiter), "the second waits")
        other.commit()
        assert said.result(timeout=20)[1:] == ("updated", first, second)


def test_nobody_waits_for_an_open_upsert_but_the_same_subject(db: Db, connect: Connect) -> None:
    """While a transaction with upserts stays open, claims, ends and other producers continue; its subjects wait."""
    hands = Hands(db)
    for name in ("active", "done", "pending", "planned"):
        push(db, name, **({"run_at": clock(db, "1 h")} if name == "planned" else {}))
        if name in ("active", "done"):
            job = start_one(hands)
            if name == "done":
                end(hands, "subject_complete", job)
            else:
                active = job
    other = connect()
    other.execute("begin")
    rows = many(other, "subject_upsert_many", ["active", "pending", "planned", "done", "new"], args=['{"n": 1}'] * 5)
    assert [row[2] for row in rows] == ["active", "updated", "updated", "updated", "created"]
    db.execute("set lock_timeout = '1s'")
    assert end(hands, "subject_complete", active) == "completed"
    push(db, "another")
    assert push(db, "planned")[1] is False
    assert call(db, "promote", at=clock(db, "2 h"))[0][0] == 0  # what is locked is left
    jobs = {job.id: job for job in hands.claim()}
    pending = next(job for job in jobs.values() if job.changing)
    assert len(jobs) == 2
    other.execute("commit")
    (again,) = hands.claimed_jobs(pending.lease, pending.id)
    assert (again.changing, again.args) == (False, {"n": 1})


@pytest.mark.parametrize(("last", "guarded"), [(2, True), (3, True), (3, False)], ids=["2", "3", "control"])
def test_a_change_that_meets_a_worker_that_stops(db: Db, connect: Connect, last: int, guarded: bool) -> None:
    """A change while the worker gives the subject back for later is not lost, and does not undo later changes."""
    if not guarded:  # the older change stays beside the planned job, and undoes the newer one
        without(db, "_subjects_read", "where v_special and u.kind = 'p'", "where false")
    hands = Hands(db)
    push(db, "a")
    upsert(db, "a", args={"n": 1})
    producer = connect()
    producer.execute("begin")
    assert upsert(producer, "a", args={"n": 2})[1] == "updated"
    (job,) = hands.claim()
    assert job.changing
    assert hands.say("unclaim", job, "1 h") == "scheduled"
    producer.execute("commit")
    if guarded:
        found = seen(db)
        assert (found["state"], found["args"]) == ("planned", {"n": 2})
    said = upsert(db, "a", args={"n": last})[1]
    assert said == ("unchanged" if last == 2 else "updated") or not guarded
    assert start_one(hands, "2 h").args == {"n": last if guarded else 2}


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_other_isolation_levels(db: Db, connect: Connect, level: str) -> None:
    """At REPEATABLE READ, planned and new subjects are upserted; a pending one is TB003 unless nothing changes."""
    push(db, "pending")
    push(db, "planned", run_at=clock(db, "1 h"))
    other = connect()
    other.execute(f"begin isolation level {level}")  # type: ignore[arg-type]
    rows = many(other, "subject_upsert_many", ["planned", "new", "pending"], args=['{"n": 1}', "{}", "{}"])
    assert [row[2] for row in rows] == ["updated", "created", "unchanged"]
    with pytest.raises(psycopg.Error) as caught:
        upsert(other, "pending", args={"n": 1})
    assert caught.value.sqlstate == "TB003"
    other.execute("rollback")
    other.execute(f"begin isolation level {level}")  # type: ignore[arg-type]
    with pytest.raises(psycopg.Error) as caught:
        forget(other, "pending")
    assert caught.value.sqlstate == "TB003"
    other.execute("rollback")
    assert (state(db, "pending"), seen(db, "pending")["args"]) == ("pending", {})
