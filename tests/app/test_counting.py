"""The counters in Python and on the command line, and after a move to another cluster."""

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import Result

from support.broken import without
from support.cli import invoke
from support.crowd import SEED, Crowd
from support.database import Connection
from support.hands import Hands, put
from support.shop import Shop, moved
from tallybook import App, Constant, Counts, Difference
from tallybook.errors import ConfigError, InvalidArgument
from tallybook.testing import drain

pytestmark = pytest.mark.servers
Run = Callable[..., Result]


@pytest.fixture
def run(dsn: str) -> Run:
    """Run a command on the test's database."""
    return partial(invoke, to=dsn)


@pytest.fixture
def app() -> App:
    """An app with one task that completes and one that fails."""
    made = App("shop")

    @made.task(queue="mail")
    def send(n: int) -> None: ...

    @made.task(queue="mail", max_attempts=2, retry=Constant(timedelta(hours=1)))
    def breaks() -> None:
        raise ValueError("no luck")

    return made


def work(app: App, dsn: str, db: Connection) -> None:
    """Leave three completed jobs, one that is retrying and one available."""
    with db.transaction():
        app.enqueue_many_sync(db, [app.tasks["send"].job(n) for n in range(3)] + [app.tasks["breaks"].job()])
    drain(app, dsn=dsn)
    put(db, queue="other", task="nobody")


async def test_the_counters_in_python(app: App, dsn: str, db: Connection) -> None:
    """S3-14, S3-33, S4-16: counts, throughput, timings, levels, completed_since: states, totals, rates, percentiles."""
    names = (
        "scheduled", "retrying", "waiting", "available", "running", "dead", "completed", "failed", "snoozed",
        "cancelled", "lost", "moved", "died",
    )  # fmt: skip

    def counted(**numbers: int) -> dict[str, int]:
        fields = asdict(Counts(queue="", task="", **dict.fromkeys(names, 0)))
        return {name: numbers.get(name, 0) for name in fields if name in names}

    await asyncio.to_thread(work, app, dsn, db)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        found = {(one.queue, one.task): one for one in await app.counts.list().on(conn)}
        numbers = {key: {name: getattr(one, name) for name in names} for key, one in found.items()}
        assert numbers == {
            ("mail", "send"): counted(completed=3),
            ("mail", "breaks"): counted(failed=1, retrying=1),
            ("other", "nobody"): counted(available=1),
        }
        assert [found["mail", task].open for task in ("send", "breaks")] == [0, 1]
        midnight = datetime.now(UTC) - timedelta(hours=1)
        assert await app.counts.completed_since(midnight).on(conn) == {("mail", "send"): 3}
        per_task = {one.task: one for one in await app.counts.throughput("5 min").on(conn)}
        assert (per_task["send"].came, per_task["send"].completed_per_s, per_task["breaks"].failed) == (3, 0.01, 1)
        (times,) = await app.counts.timings().on(conn)
        assert times.jobs == 3 and 0 < times.took_p50 <= times.took_p99 and 0 < times.waited_p50 <= times.waited_p95
        *_, now = await app.counts.levels(since=timedelta(minutes=5), queue="mail").on(conn)
        assert (now.open, now.retrying, now.begins.second) == (0, 1, 0)
        assert sum(one.completed for one in await app.counts.levels(since="5 min").on(conn)) == 3
        assert await app.counts.verify().on(conn) == []
        assert await app.counts.recount().on(conn) > 0
    assert {(one.queue, one.task): one for one in app.counts.list().sync(db)} == found
    assert app.counts.verify().sync(db) == [] and app.counts.recount().sync(db) > 0
    assert app.counts.completed_since(midnight).sync(db) == {("mail", "send"): 3}
    assert sum(one.completed for one in app.counts.levels().sync(db)) == 3
    assert [one.jobs for one in app.counts.timings().sync(db)] == [3]
    assert {one.task for one in app.counts.throughput().sync(db)} >= {"send", "breaks"}


async def test_events_of_your_own(app: App, dsn: str, db: Connection) -> None:
    """S3-16, S3-33: events.count counts up and down, in the caller's transaction and on the caller's connection."""
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        await app.events.count("invoice.sent", 3).on(conn)
        async with conn.transaction(force_rollback=True):
            await app.events.count("invoice.sent").on(conn)
        await app.events.count("invoice.sent", -1).on(conn)
        assert await app.events.list().on(conn) == {"invoice.sent": 2}
        (step,) = await app.events.series("invoice.sent", since="10 min", step="1 h").on(conn)
        assert step[1] == 2 and step[0].minute == 0
    app.events.count("paid").sync(db)
    assert app.events.list().sync(db) == {"invoice.sent": 2, "paid": 1}
    assert [n for _, n in app.events.series("paid").sync(db)] == [1]
    assert app.events.set("paid", 9).sync(db) == 1 and app.events.set("invoice.sent").sync(db) == 2
    assert app.events.list().sync(db) == {"paid": 9}
    assert (app.counts.keep(60, "7 days").sync(db), app.counts.keep(60, "7 days").sync(db)) == (True, False)
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        assert await app.counts.keep(60, "2 days").on(conn) is True


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda app, db: app.events.count("").sync(db), ConfigError),
        (lambda app, db: app.events.count("e", 0).sync(db), InvalidArgument),
        (lambda app, db: app.events.count("e", True).sync(db), InvalidArgument),
        (lambda app, db: app.events.set("e", 1 << 63).sync(db), InvalidArgument),
        (lambda app, db: app.counts.completed_since(datetime(2026, 1, 1)).sync(db), InvalidArgument),
        (lambda app, db: app.counts.levels(step="soon").sync(db), ConfigError),
        (lambda app, db: app.counts.levels(step="90 s").sync(db), InvalidArgument),
        (lambda app, db: app.counts.throughput(timedelta(0)).sync(db), InvalidArgument),
        (lambda app, db: app.counts.keep(61, "1 h").sync(db), InvalidArgument),
    ],
)
def test_what_does_not_fit(app: App, db: Connection, call: Any, error: type[Exception]) -> None:
    """S3-33: a wrong argument raises ConfigError or InvalidArgument."""
    with pytest.raises(error):
        call(app, db)


def test_queue_counts(run: Run, app: App, dsn: str, db: Connection) -> None:
    """S3-14, S4-15: `count list` shows states, age, throughput and percentiles, per queue or per task, also as JSON."""
    assert run("count", "list").output == "no counts: no job was ever enqueued\n"
    work(app, dsn, db)
    put_in = time.monotonic()
    titles, *lines = run("count", "list").output.splitlines()
    mail, other = (next(line for line in lines if line.split()[0] == name) for name in ("mail", "other"))
    assert titles.split()[:3] == ["queue", "oldest", "scheduled"]
    assert mail.split() == ["mail", "0", "1", "0", "0", "0", "0"]
    later = lines[lines.index("") + 1 :]
    assert later[0].split()[:3] == ["queue", "completed/s", "failed/s"]
    assert any(line.split()[:3] == ["mail", "0.1", "0.0"] and line.endswith(" ms") for line in later)
    name, age, unit = other.split()[:3]
    assert (name, unit) == ("other", "s") and 0 <= int(age) <= time.monotonic() - put_in + 1
    rows = {row["queue"]: row for row in json.loads(run("count", "list", "--json").output)}
    assert (rows["mail"]["completed"], rows["mail"]["retrying"], rows["mail"]["completed_per_s"]) == (3, 1, 0.05)
    assert rows["mail"]["took_p95"] > 0 and rows["mail"]["oldest"] is None and rows["other"]["oldest"] >= 0
    tasks = {row["task"]: row for row in json.loads(run("count", "list", "--by-task", "--json").output)}
    assert (tasks["send"]["completed"], tasks["breaks"]["failed"], tasks["nobody"]["available"]) == (3, 1, 1)
    assert "breaks" in run("count", "list", "--by-task").output


def test_a_round_time_is_shown_as_well(run: Run, db: Connection) -> None:
    """S3-33: `count list` shows a percentile of whole milliseconds like any other."""
    put(db)
    db.execute(
        "insert into tallybook.tally (lane_id, n, attempts, what, took, waited, task)"
        " select min(lane_id), 1, 1, 'completed', 28, 24, 't' from tallybook.lane"
    )
    db.execute("select tallybook.fold()")
    assert run("count", "list").output.split()[-8:] == ["64", "ms", "64", "ms", "128", "ms", "128", "ms"]


def test_queue_series(run: Run, app: App, dsn: str, db: Connection) -> None:
    """S3-33: `count series` prints a line per step, and all steps as charts of one line; also as JSON."""
    work(app, dsn, db)
    lines = run("count", "series", "mail", "--since", "3 min").output.splitlines()
    assert lines[0].split()[:3] == ["from", "open", "completed"] and "█" in lines[-1]
    minutes = json.loads(run("count", "series", "mail", "--since", "3 min", "--json").output)
    most = max(step["completed"] for step in minutes)  # 3, unless a minute began between two of them
    assert lines[-1].startswith("completed") and lines[-1].endswith(f"at most {most}")
    assert sum(step["completed"] for step in minutes) == 3
    steps = json.loads(run("count", "series", "--step", "1 h", "--since", "3 h", "--json").output)
    assert len(steps) == 4 and sum(step["completed"] for step in steps) == 3 and steps[-1]["open"] == 1
    wrong = run("count", "series", "mial")
    assert wrong.exit_code == 2 or "mail" in wrong.output
    assert run("count", "series", "--step", "90 s").exit_code != 0


def test_verify_and_recount(run: Run, app: App, dsn: str, db: Connection) -> None:
    """S3-33: `verify` reports agreement, or differences with advice and exit code 1; `recount` corrects them."""
    work(app, dsn, db)
    agreed = run("count", "verify")
    assert (agreed.exit_code, agreed.stdout) == (0, "the counters agree\n")
    assert json.loads(run("count", "verify", "--json").stdout) == []
    db.execute("select tallybook.recount(); update tallybook.total set n = n + 4 where what = 'completed'")
    wrong = run("count", "verify")
    assert wrong.exit_code == 1 and "tallybook count recount" in wrong.stderr
    assert ["(all)", "(all)", "completed", "7", "3"] in [line.split() for line in wrong.stdout.splitlines()]
    expected = Difference(queue=None, task=None, what="completed", counted=7, found=3)
    assert asdict(expected) in json.loads(run("count", "verify", "--json").stdout)
    assert run("count", "recount").stdout.startswith("recounted: ")
    assert run("count", "verify").exit_code == 0


def test_events_on_the_command_line(run: Run) -> None:
    """S3-16, S3-33: `event count` adds and subtracts, `event set` sets, `event list` shows the counts."""
    assert run("event", "list").output.startswith("no events")
    assert run("event", "count", "paid").output == "event 'paid' is counted\n"
    assert run("event", "count", "paid", 4).output == "event 'paid' is counted 4 times\n"
    assert run("event", "count", "paid", "--", -2).output == "event 'paid' is counted back by 2\n"
    assert json.loads(run("event", "list", "--json").output) == [{"name": "paid", "n": 3}]
    assert run("event", "list").output.splitlines()[1].split() == ["paid", "3"]
    assert run("event", "count", "").exit_code == 2
    assert run("event", "set", "paid", 7).output == "event 'paid' is set to 7; it was 3\n"
    assert run("event", "set", "paid", 0).output == "event 'paid' is forgotten; it was 7\n"


def test_queue_list_reads_the_counters(run: Run, db: Connection) -> None:
    """S3-15: `queue list` reads the counters; a job is unserved until a worker knows its task."""
    put(db, queue="mail", task="known")
    put(db, queue="mail", task="unknown")
    hands = Hands(db, "mail")
    jobs = hands.start()
    hands.say("move", jobs[1])
    (row,) = json.loads(run("queue", "list", "--json").output)
    assert {name: row[name] for name in ("name", "available", "running", "unserved", "workers")} == {
        "name": "mail", "available": 1, "running": 1, "unserved": 1, "workers": 1,
    }  # fmt: skip
    db.execute("select tallybook.worker_start('second', '{mail}', '{unknown}')")
    (row,) = json.loads(run("queue", "list", "--json").output)
    assert (row["available"], row["unserved"]) == (1, 0)


@pytest.mark.slow
@pytest.mark.direct("dumps and restores on clusters of its own")
@pytest.mark.parametrize("way", [("far", "fresh"), ("fresh", "far")], ids=["to lower ids", "to higher ids"])
def test_the_counters_are_right_after_a_move(shop: Callable[..., Shop], tmp_path: Path, way: tuple[str, str]) -> None:
    """S3-33, P1: a database restored into another cluster has right states, totals and events after its rebase."""
    old, new = shop(way[0]), shop(way[1], empty=True)
    hands = Hands(old.db)
    for n in range(20):
        put(old.db, task=f"t{n % 2}")
    put(old.db, run_at="2100-01-01")
    jobs = hands.start(10)
    hands.complete(*jobs[:4])
    hands.fail(jobs[4], "1 h")
    hands.fail(jobs[5], final=True)
    old.db.execute("select tallybook.count_event('sent', 7), tallybook.fold()")
    for job in jobs[6:]:
        hands.complete(job)
    moved(old, new, tmp_path)
    assert (new.db.execute("select rebased from tallybook.rebase()").fetchone() or (None,))[0] is True
    assert new.db.execute("select * from tallybook.verify()").fetchall() == []
    # The rebase ended the attempts of jobs in line once more, as moved, so that column is left out.
    plain = "select queue, task, scheduled, retrying, available, running, dead, completed, died from tallybook.counts()"
    assert sorted(new.db.execute(plain).fetchall()) == sorted(old.db.execute(plain).fetchall())
    assert new.db.execute("select name, n::int from tallybook.event_counts()").fetchall() == [("sent", 7)]
    Hands(new.db).run_all()
    new.db.execute("select tallybook.fold()")
    assert new.db.execute("select * from tallybook.verify()").fetchall() == []


# Exact while processes commit, roll back, crash and cancel: a recount agrees at every moment

LIVE = pytest.mark.direct("kills processes and waits for the end of their sessions")


def differences(
    dsn: str, crowd: Crowd, also: Callable[[Connection], None] = lambda conn: None
) -> tuple[int, list[Any]]:
    """Run the crowd while folding and verifying; return the number of checks and the differences."""
    found, looks, verify = list[Any](), 0, "select * from tallybook.verify()"
    with psycopg.connect(dsn, autocommit=True) as conn, ThreadPoolExecutor(1) as pool:
        run = pool.submit(crowd.run)
        while not run.done() or looks < 3:
            found += conn.execute(verify).fetchall()
            conn.execute("select tallybook.fold()")
            also(conn)
            looks += 1
        run.result()
        return looks, found + conn.execute(verify).fetchall()


@pytest.mark.slow
@LIVE
def test_a_recount_agrees_with_the_counters_at_every_moment(dsn: str, db: Connection) -> None:
    """S3-17: counters change in the counted transaction: crashes, rollbacks, late commits, cancels leave no error."""
    looks, found = differences(dsn, Crowd(dsn, SEED, seconds=2.0))
    print(looks)
    assert found == []
    (completed,) = db.execute("select sum(completed) from tallybook.counts()").fetchone() or (0,)
    assert (
        completed
        == (db.execute("select count(*) from tallybook.outcome where state = 'completed'").fetchone() or (0,))[0]
    )


@pytest.mark.slow
@LIVE
def test_a_recount_sets_the_counters_right_beside_producers_and_workers(dsn: str) -> None:
    """S3-33: an exact recount is possible at any time, beside producers and workers."""
    looks, found = differences(
        dsn, Crowd(dsn, SEED + 1, seconds=2.0), lambda conn: conn.execute("select tallybook.recount()").close()
    )
    print(looks)
    assert found == []


@pytest.mark.slow
@LIVE
def test_control_a_fold_that_ignores_holes_counts_too_little(dsn: str, db: Connection) -> None:
    """Negative control: if a fold ignores holes, late commits are never counted."""
    without(db, "fold", "values (f.number + 1, at, v_hi, v_holes,", "values (f.number + 1, at, v_hi, '{}',")
    _, found = differences(dsn, Crowd(dsn, SEED, seconds=1.0))
    assert found


@pytest.mark.slow
@LIVE
def test_control_ends_that_tell_nobody_are_found(dsn: str, db: Connection) -> None:
    """Negative control: if two ends are counted as one, verify reports the difference."""
    without(
        db, "_complete_held", "count(*), sum(k.attempt), 'completed'", "(count(*) + 1) / 2, sum(k.attempt), 'completed'"
    )
    _, found = differences(dsn, Crowd(dsn, SEED, seconds=0.5, producers=1, claimers=2))
    assert {"running", "completed"} <= {row[2] for row in found}
