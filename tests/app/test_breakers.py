"""Circuit breakers in Python, in running workers and on the command line. sql/test_circuits.py covers the rules."""

import json
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from support.cli import invoke
from support.workers import Jobs, eventually, working
from tallybook import App, Dead
from tallybook.errors import ConfigError, InvalidArgument


@pytest.fixture
def app(dsn: str) -> App:
    return App("shop", dsn=dsn)


async def test_a_provider_that_is_down_is_left_alone(app: App, dsn: str, db: Any) -> None:
    """After two failures a key's jobs wait; after open_for one probe runs, and once it succeeds all others run."""
    app.breaker("provider", 2, per="1 min", open_for="1 h")
    jobs, down, calls = Jobs(app, db), True, list[int]()

    @app.task(limits=("provider:{name}",))
    async def call(name: str, n: int) -> Dead | None:
        calls.append(n)
        return Dead("down") if down else None

    async with working(app, dsn):
        for n in range(2):
            job = call.enqueue_sync(db, "acme", n)
            await eventually(lambda job=job: jobs(job).state == "dead", "it has failed")
        rest = app.enqueue_many_sync(db, [call.job("acme", n) for n in range(2, 22)])
        await eventually(lambda: {jobs(job).state for job in rest} == {"waiting"}, "they wait")
        assert jobs(rest[0]).reason == 'the breaker of "provider:acme" is open'
        (key,) = [key for key in app.breakers.list().sync(db) if key.name == "provider:acme"]
        assert (key.rule, key.state, key.waiting, key.failed_in_window) == ("provider", "open", 20, 2)
        assert calls == [0, 1]
        down = False
        app.breakers.open("provider:acme", timedelta(0)).sync(db)  # end its hour
        await eventually(lambda: {jobs(job).state for job in rest} == {"completed"}, "all have run")
    assert calls == list(range(22)), "the first of them alone, as a probe, then the others as they came"
    (key,) = [key for key in app.breakers.list().sync(db) if key.name == "provider:acme"]
    assert (key.state, key.waiting, key.open_until) == ("closed", 0, None)


async def test_closing_it_by_hand_is_heard_at_once(app: App, dsn: str, db: Any) -> None:
    """While a breaker is open by hand nothing starts; closed by hand, waiting jobs start at once."""
    jobs, began = Jobs(app, db), list[int]()
    app.breaker("queue:default", 5, per="1 min", open_for="1 h")

    @app.task
    async def work() -> None:
        began.append(1)

    async with working(app, dsn):
        await eventually(lambda: len(app.breakers.list().sync(db)) == 1, "the worker has put it on record")
        until = await app.breakers.open("queue:default", "1 day")
        assert (await app.breakers.list())[0].open_until == until
        job = work.enqueue_sync(db)
        await eventually(lambda: jobs(job).state == "waiting", "it waits")
        assert await app.breakers.close("queue:default") is True
        await eventually(lambda: began == [1], "it has run")


def test_by_hand(dsn: str, db: Any, app: App) -> None:
    """Breakers are created, listed, opened, closed and removed in Python and by command; a typo is a clear error."""

    run = partial(invoke, "breaker", to=dsn)

    assert run("list").output == "no breakers\n"
    assert run("set", "provider", "5", "1min", "30s").output == "breaker 'provider' is created\n"
    assert app.breakers.set("provider:acme", 2, per="1 min", open_for="5 min").sync(db) == "created"
    assert run("open", "provider:acme", "2h").output.startswith("the breaker of 'provider:acme' is open until ")
    shown = run("list").output.splitlines()
    assert shown[1].split()[:8] == ["provider", "5", "per", "1", "min,", "for", "30", "s"]
    assert "open" in shown[2].split()
    first, second = json.loads(run("list", "--json").output)
    assert (first["per"], first["state"], second["open_for"], second["state"]) == (60.0, "closed", 300.0, "open")
    assert run("close", "provider:acme").output == "the breaker of 'provider:acme' is closed\n"
    assert run("close", "provider:acme").output == "the breaker of 'provider:acme' is closed, as it was\n"
    assert app.breakers.close("provider:acme").sync(db) is False
    assert run("close", "provider:acne").output == "the breaker of 'provider:acne' is closed, as it was\n"
    assert "acne" not in run("list").output, "a typo makes no key"
    assert run("drop", "provider").output == "breaker 'provider' is removed\n"
    missing = run("drop", "provider")
    assert (missing.exit_code, missing.output) == (1, "there is no breaker 'provider'\n")
    assert app.breakers.drop("provider:acme").sync(db) is True
    assert run("set", "provider", "0", "1min", "30s").exit_code == 2
    assert run("open", "provder").exit_code != 0
    with pytest.raises(InvalidArgument, match="there is no breaker provder"):
        app.breakers.open("provder").sync(db)
    with pytest.raises(ConfigError, match="from 1 to 1000"):
        app.breaker("a", 0, per="1 s", open_for="1 s")
    with pytest.raises(ConfigError, match="from 1 s to 366 days"):
        app.breaker("a", 1, per="1 s", open_for=timedelta(0))
    app.breaker("a", 1, per="1 s", open_for="1 s")
    with pytest.raises(ConfigError, match="declared twice"):
        app.breaker("a", 1, per="1 s", open_for="1 s")
