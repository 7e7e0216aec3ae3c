"""Versions of args side by side: newer jobs wait for newer workers, older args are upgraded, old names are found."""

import json
import signal
from datetime import timedelta
from typing import Any

import anyio
import psycopg
import pytest

from support.releases import Releases, release
from support.waiting import wait_until
from tallybook import App, Constant
from tallybook.errors import ConfigError, DuplicateTask, PayloadError
from tallybook.testing import drain

SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


def first() -> App:
    """Release 1."""
    app = App("shop")

    @app.task(name="send")
    async def send(to: str) -> None:
        SEEN.append(("v1", to))

    return app


def third(*, upgrades: tuple[int, ...] = (1, 2), alias: tuple[str, ...] = ()) -> App:
    """Release 3: args of version 3, with an upgrade from each older one."""
    app = App("shop")

    @app.task(name="send", version=3, aliases=alias)
    async def send(address: str, lang: str) -> None:
        SEEN.append(("v3", address, lang))

    def from_1(args: dict[str, Any]) -> dict[str, Any]:
        return {"address": args["to"]}

    def from_2(args: dict[str, Any]) -> dict[str, Any]:
        args["lang"] = "en"
        return args

    for version, fn in ((1, from_1), (2, from_2)):
        if version in upgrades:
            send.upgrade(version)(fn)
    return app


# One worker


def test_older_args_are_upgraded_step_by_step(dsn: str, db: Any) -> None:
    """S3-39, F31: a worker upgrades args of versions 1 and 2 to version 3, in memory; the row stays as it was."""
    first().tasks["send"].enqueue_sync(db, "a")
    db.execute("""select tallybook.enqueue('default', 'send', '{"address": "b"}', options => '{"version": 2}')""")
    third().tasks["send"].enqueue_sync(db, "c", "de")
    assert drain(third(), dsn=dsn).completed == 3
    assert SEEN == [("v3", "a", "en"), ("v3", "b", "en"), ("v3", "c", "de")]
    rows = db.execute("select args from tallybook.job order by id").fetchall()
    assert rows[:2] == [({"to": "a"},), ({"address": "b"},)]


def test_a_version_travels_with_the_job_and_costs_nothing_without(dsn: str, db: Any) -> None:
    """S3-39: jobs of version 1 have no options; others store their version, however enqueued, beside a retry policy."""
    first().tasks["send"].enqueue_sync(db, "a")
    send = third().tasks["send"]
    send.enqueue_sync(db, "b", "en")
    third().enqueue_many_sync(db, [send.with_(retry=Constant(timedelta(seconds=1))).job("c", "en")])
    send.with_(unique="k").enqueue_sync(db, "d", "en")
    retry = {"constant": {"every": "1 s"}}
    options = db.execute("select options from tallybook.job order by id").fetchall()
    assert options == [(None,), ({"version": 3},), ({"version": 3, "retry": retry},), ({"version": 3},)]


def test_newer_args_are_left_to_newer_workers(dsn: str, db: Any) -> None:
    """S3-39, P12: an older worker sets a newer job aside, once and without a failure; a newer worker runs it."""
    job = third().tasks["send"].enqueue_sync(db, "a", "de")
    done = drain(first(), dsn=dsn)
    assert (done.moved, done.processed) == (1, 0)
    assert drain(first(), dsn=dsn).moved == 0  # it is not set aside again
    found = first().get(job).sync(db)
    assert (found.state, found.attempts, found.failures, found.unserved) == ("available", 0, 0, True)
    assert drain(third(), dsn=dsn).completed == 1
    assert SEEN == [("v3", "a", "de")]
    assert third().get(job).sync(db).attempts == 1


def test_a_job_of_a_task_and_version_that_nobody_knows_waits_for_its_worker(dsn: str, db: Any) -> None:
    """F30, S3-39: a job of an unknown task, of any version, is set aside and runs as soon as a worker knows it."""
    other = App("other")
    for version in (None, 1, 2, 3):
        said = None if version is None else json.dumps({"version": version})
        args = {1: {"to": "x"}, 2: {"address": "x"}, 3: {"address": "x", "lang": "en"}}[version or 1]
        db.execute("select tallybook.enqueue('default', 'send', %s, options => %s)", (json.dumps(args), said))
    assert drain(other, dsn=dsn).moved == 4
    assert {row[0] for row in db.execute("select unserved from tallybook.job")} == {True}
    assert drain(third(), dsn=dsn).completed == 4
    assert db.execute("select max(failures), max(attempts) from tallybook.job").fetchone() == (0, 1)


def test_an_upgrade_that_fails_makes_the_job_dead_and_a_person_retries_it(dsn: str, db: Any) -> None:
    """F31: an upgrade that raises would raise again: the job is dead at once with step and cause; it can be retried."""
    db.execute("select tallybook.enqueue('default', 'send', '{\"whom\": 1}')")
    assert drain(third(), dsn=dsn).dead == 1
    (letter,) = App("shop").dead.list().sync(db)
    assert letter.error["type"] == "tallybook.errors.PayloadError"
    assert "the upgrade from version 1 to 2 failed: KeyError: 'to'" in letter.error["message"]
    assert "from_1" in letter.error["traceback"]

    mended = App("shop")

    @mended.task(name="send", version=2)
    async def send(address: str) -> None:
        SEEN.append(address)

    send.upgrade(1)(lambda args: {"address": str(args["whom"])})
    mended.retry(letter.job).sync(db)
    assert drain(mended, dsn=dsn).completed == 1
    assert SEEN == ["1"]


def test_an_upgrade_that_returns_nonsense_is_told(dsn: str, db: Any) -> None:
    """F31: an upgrade to values that no row can hold makes the job dead; the error names the step."""
    app = App("shop")

    async def send(address: str) -> None: ...

    nonsense: list[Any] = [None, [1], {"address": object()}, {"address": float("nan")}, {1: 2}]
    for n, returned in enumerate(nonsense):
        app.task(name=f"send-{n}", version=2)(send).upgrade(1)(lambda args, returned=returned: returned)
        db.execute("select tallybook.enqueue('default', %s)", [f"send-{n}"])
    assert drain(app, dsn=dsn).dead == len(nonsense)
    told = [dead.error["message"] for dead in app.dead.list().sync(db)]
    assert ["the upgrade from version 1 to 2 failed" in message for message in told] == [True] * len(nonsense)


@pytest.mark.parametrize("version", ["0", "1000", "-1", "2.0", '"2"', "null", "true", "[2]"])
def test_a_version_that_is_none_is_refused_where_it_comes_in(db: Any, version: str) -> None:
    """S3-39: SQL producers get an error for a version that no task can have (TB005)."""
    with pytest.raises(psycopg.Error) as caught:
        db.execute("select tallybook.enqueue('default', 'send', options => %s)", (f'{{"version": {version}}}',))
    assert caught.value.sqlstate == "TB005"


def test_a_version_that_came_in_by_other_ways_is_a_dead_letter(dsn: str, db: Any) -> None:
    """F31: invalid options written directly into the table stop nothing: such a job is dead, others run."""
    first().tasks["send"].enqueue_sync(db, "a")
    for version in ("0", "2.5", '"2"', "[2]", "12345678901234567890"):
        db.execute("select tallybook.enqueue('default', 'send', options => '{\"retry\": \"x\"}')")
        db.execute(
            "update tallybook.entry set options = %s where options ->> 'retry' = 'x'", (f'{{"version": {version}}}',)
        )
    assert drain(first(), dsn=dsn).dead == 5
    assert SEEN == [("v1", "a")]


def test_replaced_args_bring_their_version_along(dsn: str, db: Any) -> None:
    """S3-39, S1-07: args that replace those of a queued job have their own version, newer or older."""
    old, new = first().tasks["send"], third().tasks["send"]
    replace = {"unique": "k", "on_conflict": "replace_args"}
    old.with_(unique="k").enqueue_sync(db, "old")
    new.with_(**replace).enqueue_sync(db, "newer", "de")
    assert drain(first(), dsn=dsn).moved == 1
    assert drain(third(), dsn=dsn).completed == 1
    new.with_(unique="k", delay="1 h").enqueue_sync(db, "new", "de")
    old.with_(**replace).enqueue_sync(db, "older")
    assert db.execute("select options from tallybook.job order by id desc limit 1").fetchone() == (None,)
    db.execute("update tallybook.scheduled set run_at = clock_timestamp()")
    assert drain(first(), dsn=dsn).completed == 1
    assert SEEN == [("v3", "newer", "de"), ("v1", "older")]


def test_args_that_replaced_others_in_line_are_upgraded_from_their_version(dsn: str, db: Any) -> None:
    """S3-39, S1-07: the same for an available job, whose new args are stored beside the entry, several times."""
    replace = {"unique": "k", "on_conflict": "replace_args"}
    third().tasks["send"].with_(unique="k").enqueue_sync(db, "new", "de")
    first().tasks["send"].with_(**replace).enqueue_sync(db, "older")
    third().tasks["send"].with_(**replace).enqueue_sync(db, "newest", "fr")
    first().tasks["send"].with_(**replace).enqueue_sync(db, "oldest")
    assert drain(first(), dsn=dsn).completed == 1
    assert SEEN == [("v1", "oldest")]


# Declarations


def test_a_version_without_a_way_to_it_is_told_when_the_worker_starts(dsn: str) -> None:
    """S3-39: no worker starts if a step has no upgrade function; the error shows it."""
    with pytest.raises(ConfigError, match=r"no upgrade of args from version 2 to 3\. Write @send\.upgrade\(2\)"):
        drain(third(upgrades=(1,)), dsn=dsn)


@pytest.mark.parametrize("version", [0, -1, 1000, True, 2.0, "2", None])
def test_versions_are_whole_numbers(version: Any) -> None:
    """A version is a whole number from 1 to 999."""
    with pytest.raises(ConfigError, match="version"):
        App("a").task(version=version)


@pytest.mark.parametrize("version", [0, 2, 3, True, "1"])
def test_an_upgrade_takes_an_older_version(version: Any) -> None:
    """An upgrade starts from an older version than the task's."""
    task = App("a").task(name="t", version=2)(lambda: None)
    with pytest.raises(ConfigError, match="upgrade"):
        task.upgrade(version)(dict)


@pytest.mark.parametrize("fn", [42, anyio.sleep, lambda: {}, lambda args, more: {}])
def test_an_upgrade_is_a_plain_function_of_the_args(fn: Any) -> None:
    """It takes the args and nothing else, and is not async."""
    with pytest.raises(ConfigError, match="upgrade"):
        App("a").task(name="t", version=2)(lambda: None).upgrade(1)(fn)


def test_one_way_from_each_version() -> None:
    """Two upgrade functions for one step are an error."""
    task = App("a").task(name="t", version=2)(lambda: None)
    assert task.upgrade(1)(dict) is dict
    with pytest.raises(ConfigError, match="already"):
        task.upgrade(1)(dict)


# Names


def test_jobs_of_an_old_name_run_with_the_task_that_has_it_as_alias(dsn: str, db: Any) -> None:
    """S2-15: a rename with aliases loses no job: neither available ones nor those that old producers still enqueue."""
    jobs = [db.execute("select tallybook.enqueue('default', %s, '{\"to\": \"a\"}')", (n,)) for n in ("send", "post")]
    app = third(alias=("post", "dispatch"))
    assert drain(app, dsn=dsn).completed == 2 == len(jobs)
    (tasks,) = db.execute("select tasks from tallybook.worker order by id desc limit 1").fetchone()
    assert sorted(tasks) == ["dispatch", "post", "send"]


def test_without_the_alias_jobs_of_the_old_name_wait(dsn: str, db: Any) -> None:
    """S2-15, F30: control: without the alias the job is set aside; with it, it is found and runs."""
    db.execute("select tallybook.enqueue('default', 'post', '{\"to\": \"a\"}')")
    assert drain(third(), dsn=dsn).moved == 1
    assert drain(third(alias=("post",)), dsn=dsn).completed == 1
    assert SEEN == [("v3", "a", "en")]


def test_results_of_an_alias_are_read_by_its_task(dsn: str, db: Any) -> None:
    """S2-15: app.result of a job with an old name has the type that the renamed task returns."""
    app = App("shop")

    @app.task(name="new", aliases=("old",))
    async def new() -> tuple[int, ...]:
        return (1, 2)

    (job,) = db.execute("select tallybook.enqueue('default', 'old')").fetchone()
    drain(app, dsn=dsn)
    assert app.result(job).sync(db) == (1, 2)


@pytest.mark.parametrize(("name", "aliases"), [("send", ()), ("post", ()), ("new", ("send",)), ("new", ("x", "post"))])
def test_a_name_belongs_to_one_task(name: str, aliases: tuple[str, ...]) -> None:
    """S2-15: a name that a task or alias already has is a DuplicateTask, and nothing of the new task is declared."""
    app = third(alias=("post",))
    with pytest.raises(DuplicateTask):
        app.task(name=name, aliases=aliases)(lambda: None)
    assert set(app._names) == {"send", "post"}


@pytest.mark.parametrize("aliases", ["old", ("",), ("a", "a"), ("mine",), 5, (None,)])
def test_aliases_are_names(aliases: Any) -> None:
    """A text alone (a tuple of letters), empty names, duplicates and the task's own name are no aliases."""
    with pytest.raises(ConfigError, match="aliases"):
        App("a").task(name="mine", aliases=aliases)(lambda: None)


def test_a_unique_key_is_of_the_args_that_are_enqueued(db: Any) -> None:
    """S3-39: derived keys come from the args as this release enqueues them, by their current names."""
    app = App("shop")

    @app.task(version=2, unique=("address",))
    async def send(address: str) -> None: ...

    send.upgrade(1)(lambda args: {"address": args["to"]})
    first = send.enqueue_sync(db, "a")
    assert send.enqueue_sync(db, "a").id == first.id
    with pytest.raises(ConfigError, match="no argument 'to'"):
        send.with_(unique=("to",)).job("a")


def test_the_error_of_an_upgrade_has_its_data() -> None:
    """A PayloadError names the task, and its cause is what the function raised."""
    task = third().tasks["send"]
    with pytest.raises(PayloadError) as caught:
        task.contract.upgraded("send", {}, 1)
    assert caught.value.task == "send"
    assert isinstance(caught.value.__cause__, KeyError)


# Two releases side by side


@pytest.mark.slow
def test_a_rolling_deploy_forward(dsn: str, db: Any) -> None:
    """S3-39, S2-15, F32, P12: with workers and producers of two releases, every job runs once, and none moves twice."""
    old, new = release(1), release(2)
    with Releases(dsn, db) as releases:
        before = releases.start(release=1)
        for n in range(0, 40, 4):
            old.tasks["send"].enqueue_sync(db, n, "a@x")
            new.tasks["send"].enqueue_sync(db, n + 1, "b@x", "de")
            old.tasks["tidy"].enqueue_sync(db, n + 2)
            new.tasks["clean_up"].enqueue_sync(db, n + 3)
        wait_until(lambda: len(releases.said()) >= 20, "the old worker does what it knows")
        new_worker = releases.start(release=2)
        for n in range(40, 60, 2):  # both run now
            old.tasks["send"].enqueue_sync(db, n, "a@x")
            new.tasks["send"].enqueue_sync(db, n + 1, "b@x", "de")
        wait_until(lambda: len(releases.said()) >= 60, "every job has run")
        before.signal(signal.SIGTERM)
        before.ends(20)
        assert sorted(n for n, _ in releases.said()) == list(range(60))
        assert releases.most_moves() <= 1
    newer = {n for n in range(40) if n % 4 == 1} | {n for n in range(40, 60) if n % 2}
    by_new = db.execute("select n, said from mail where worker = %s", (new_worker.name,)).fetchall()
    assert newer <= {n for n, _ in by_new}
    assert {said for n, said in by_new if n in newer} == {"b@x de"}
    assert db.execute("select max(failures), count(distinct state) from tallybook.job").fetchone() == (0, 1)


@pytest.mark.slow
def test_a_rolling_deploy_back(dsn: str, db: Any) -> None:
    """S3-39, P12: after a rollback, jobs that the old release cannot read wait as unserved, and run in order later."""
    old, new = release(1), release(2)
    with Releases(dsn, db) as releases:
        newer = releases.start(release=2)
        new.tasks["send"].enqueue_sync(db, 1, "b@x", "de")
        wait_until(lambda: releases.said() == [(1, "b@x de")], "the new one works")
        newer.signal(signal.SIGTERM)
        newer.ends(20)
        older = releases.start(release=1)
        for n in range(2, 22):
            new.tasks["send"].with_(order_key="k" if n % 2 else None).enqueue_sync(db, n, "b@x", "de")
        old.tasks["send"].enqueue_sync(db, 22, "a@x")
        wait_until(lambda: len(releases.said()) == 2, "the old one runs what it knows")
        unserved = "select count(*) from tallybook.job where unserved and state = 'available'"
        wait_until(lambda: db.execute(unserved).fetchone()[0] >= 10, "the newer ones are put aside")
        older.signal(signal.SIGTERM)
        older.ends(20)
        releases.start(release=2)
        wait_until(lambda: len(releases.said()) == 22, "nothing is lost")
        said = [n for n, _ in releases.said()][2:]
        assert releases.most_moves() <= 1
    assert [n for n in said if n % 2] == list(range(3, 22, 2))  # one order key: exactly
    assert [n for n in said if not n % 2] == list(range(2, 22, 2))  # one lane, one slot
