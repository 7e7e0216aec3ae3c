"""The example of a price feed, in parts and as a whole."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest
from fastapi.testclient import TestClient

from examples.price_feed.collectors import Busy, Quote, ask
from examples.price_feed.jobs import app
from examples.price_feed.money import PriceRefused, minor_units
from examples.price_feed.world import FUNDS, World, missing, most_in_a_minute, providers, wrong
from tallybook.extra.providers import Provider, Secret, new_key
from tallybook.testing import drain

HERE = Path(__file__).parents[1]
DAY = timedelta(days=1)


@pytest.fixture
def world() -> Iterator[World]:
    with World("key-of-twelve-data", "A3=cookie-of-yahoo") as world:
        yield world


@pytest.fixture
def db(tallybook_dsn: str, world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[psycopg.Connection[Any]]:
    """The application's database, with providers and routes but no assets; drained once to store the schedules."""
    monkeypatch.setenv("TALLYBOOK_KEYS", new_key("k1"))
    monkeypatch.setenv("ADMIN_PASSWORD", "right")
    monkeypatch.setattr("examples.price_feed.jobs.TIMEOUT", 1.5)
    monkeypatch.setattr(app, "dsn", tallybook_dsn)
    monkeypatch.setattr(app.providers, "fresh_for", timedelta(0))
    app.providers.forget()
    with psycopg.connect(tallybook_dsn, autocommit=True, prepare_threshold=None) as conn:
        conn.execute((HERE / "schema.sql").read_bytes())
        asyncio.run(providers(tallybook_dsn, world))
        drain(app, dsn=tallybook_dsn)
        yield conn


@pytest.fixture
def client(db: psycopg.Connection[Any]) -> Iterator[TestClient]:
    from examples.price_feed.web import api

    with TestClient(api, follow_redirects=False) as client:
        yield client


def hold(db: psycopg.Connection[Any], symbol: str, data_type: str = "stock", currency: str = "USD") -> int:
    """Insert an asset that Ada holds, and return its id."""
    asset = one(
        db, "insert into asset (symbol, data_type, currency) values (%s, %s, %s) returning id",
        symbol, data_type, currency,
    )  # fmt: skip
    db.execute("insert into holding (owner, asset, units) values ('ada', %s, 3)", (asset,))
    return int(asset)


def one(db: psycopg.Connection[Any], query: str, *values: object) -> Any:
    found = db.execute(query.encode(), values).fetchone()
    return found[0] if found else None


def work(db: psycopg.Connection[Any], world: World, most: int = 60) -> None:
    """Run due jobs and move the clock to the next due one, until no job is open."""
    for _ in range(most):
        drain(app, dsn=app.conninfo())
        if not one(db, "select count(*) from tallybook.job where state not in ('completed', 'dead', 'cancelled')"):
            return
        ahead = one(
            db, "select min(run_at) - clock_timestamp() from tallybook.job where state in ('scheduled', 'retrying')"
        )
        world.move(db, max(ahead or timedelta(0), timedelta(0)))
    raise AssertionError("it does not come to an end")


def lined_up(db: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    """Return symbol, state and priority of each open job of a price."""
    return db.execute(
        "select args ->> 'symbol', state, priority from tallybook.job"
        " where task = 'fetch_price' and state not in ('completed', 'dead', 'cancelled') order by 1"
    ).fetchall()


def test_holdings_are_shown_at_once_and_a_price_is_there_at_the_next_load(client: Any, db: Any, world: World) -> None:
    """S1-01 S1-05 S1-27: looks enqueue one job of priority 1 and do not wait; then 2847.50 INR is stored as 284750."""
    hold(db, "RELIANCE.NS", currency="INR")
    for _ in range(2):
        page = client.get("/holdings/ada")
        assert page.status_code == 200 and "being fetched" in page.text
    assert lined_up(db) == [("RELIANCE.NS", "available", 1)]
    assert not world.symbols
    work(db, world)
    assert db.execute("select amount, provider from price").fetchall() == [(284750, "yahoo")]
    page = client.get("/holdings/ada").text
    assert "2,847.50 INR" in page and "8,542.50 INR" in page and "being fetched" not in page
    assert lined_up(db) == []
    assert client.get("/holdings/nobody").status_code == 404


@pytest.mark.slow
def test_a_stale_price_is_shown_and_renewed(client: Any, db: Any, world: World) -> None:
    """S1-01 S1-06 S1-23: an old price is served, its key enqueued again, by the schedule too after yesterday's look."""
    asset = hold(db, "RELIANCE.NS", currency="INR")
    client.get("/holdings/ada")
    work(db, world)
    world.move(db, DAY + timedelta(minutes=1))
    app.schedules.run("wanted-prices").sync(db)
    assert lined_up(db) == [("RELIANCE.NS", "available", 2)]
    page = client.get("/holdings/ada").text
    assert "2,847.50 INR" in page and f'data-asset="{asset}" class="fetching"' in page
    work(db, world)
    assert "2,848.50 INR" in client.get("/holdings/ada").text


@pytest.mark.slow
def test_a_person_goes_before_the_minute(client: Any, db: Any) -> None:
    """S1-07: a look at a price that the schedule has enqueued raises that job's priority, and adds no job."""
    hold(db, "RELIANCE.NS", currency="INR")
    assert app.schedules.run("wanted-prices").sync(db).what == "enqueued"
    assert lined_up(db) == [("RELIANCE.NS", "available", 2)]
    client.get("/holdings/ada")
    db.execute("select tallybook.promote()")  # what workers do all the time: it takes its new place
    assert lined_up(db) == [("RELIANCE.NS", "available", 1)]


OLD, NEW = timedelta(hours=25), timedelta(hours=23)
NEVER: Any = None
CASES: dict[
    str, tuple[str, Any, Any, bool]
] = {  # a change, how long ago it was priced and viewed, whether it is wanted
    "NEW": ("", NEVER, NEVER, True),
    "OLD AND VIEWED": ("", OLD, timedelta(hours=47), True),
    "OLD, VIEWED LONG AGO": ("", OLD, timedelta(hours=49), False),
    "OLD, NEVER VIEWED": ("", OLD, NEVER, False),
    "FRESH": ("", NEW, timedelta(0), False),
    "MANUAL": ("update asset set price_mode = 'manual' where id = %s", NEVER, NEVER, False),
    "DELETED": ("update asset set deleted_at = now() where id = %s", NEVER, NEVER, False),
    "INACTIVE": ("update asset set active = false where id = %s", NEVER, NEVER, False),
    "SOLD": ("update holding set active = false where asset = %s", NEVER, NEVER, False),
    "STOPPED": ("update asset set stopped = true where id = %s", NEVER, NEVER, False),
    "NO ROUTE": ("update asset set data_type = 'bond' where id = %s", NEVER, NEVER, False),
}


@pytest.mark.slow
def test_the_minute_wants_what_is_missing_or_looked_at(db: Any) -> None:
    """S1-16 S1-21 S1-22 S1-23: by mode, life, holding, route, price and look; a second tick enqueues nothing more."""
    for n, (symbol, (change, priced, viewed, _)) in enumerate(CASES.items()):
        asset = hold(db, symbol)
        if change:
            db.execute(change, (asset,))
        if priced is not NEVER:
            db.execute("insert into price values (%s, %s, 1, 'yahoo', now() - %s)", (-n, asset, priced))
        if viewed is not NEVER:
            db.execute("update asset set viewed_at = now() - %s where id = %s", (viewed, asset))
    assert one(db, "select cron from tallybook.schedule where name = 'wanted-prices'") == "* * * * *"
    for _ in range(2):
        app.schedules.run("wanted-prices").sync(db)
        assert lined_up(db) == [(symbol, "available", 2) for symbol in sorted(CASES) if CASES[symbol][3]]


@pytest.mark.slow
def test_what_cannot_be_fetched_is_dead_after_three_attempts_and_the_admin_is_told(
    client: Any, db: Any, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """S1-17 S1-24 S1-25 S1-26: dead, an event, one mail, a line on a page; rerouted by a row, a retry gets it."""
    caplog.set_level(logging.INFO)
    asset = hold(db, "SIVB")
    client.get("/holdings/ada")
    work(db, world)
    dead = "select id, state, failures, jsonb_array_length(errors) from tallybook.job where task = 'fetch_price'"
    (job, *how) = db.execute(dead).fetchone()
    assert how == ["dead", 3, 3]
    name, body = db.execute("select name, body from event").fetchone()
    error = "404: **symbol** or **figi** parameter is missing or invalid."
    assert name == "PRICE_FETCH_FAILED"
    assert body == {"assetId": asset, "symbol": "SIVB", "retries": 3, "error": error, "job": job}
    assert list(world.mails.values()) == [1]

    app.schedules.run("wanted-prices").sync(db)
    assert "we are looking into it" in client.get("/holdings/ada").text
    assert lined_up(db) == []  # neither the minute nor a look puts it in again

    assert client.get("/stopped").status_code == client.post(f"/stopped/{job}/retry").status_code == 401
    client.auth = ("ada", "right")
    page = client.get("/stopped").text
    assert "SIVB" in page and error in page and f"/stopped/{job}/retry" in page
    assert client.post(f"/stopped/{job}/retry", headers={"Origin": "https://evil.example"}).status_code == 403
    asyncio.run(app.providers.route("stock", "yahoo", symbol="SIVB"))
    assert client.post(f"/stopped/{job}/retry").status_code == 303
    assert client.post(f"/stopped/{job}/retry").status_code == 409
    assert client.post("/stopped/999999999/retry").status_code == 404
    work(db, world)
    assert one(db, "select provider from price where asset = %s", asset) == "yahoo"
    assert "No stopped assets" in client.get("/stopped").text

    kept = one(db, "select string_agg(to_jsonb(j)::text, ' ') from tallybook.job j")
    for secret in (world.api_key, world.cookie):
        assert secret not in kept and secret not in caplog.text and secret not in page
    assert "sivb" in kept.lower() and "SIVB" in caplog.text
    assert world.without_key == 0


@pytest.mark.slow
def test_a_job_whose_route_is_gone_is_cancelled(db: Any, world: World) -> None:
    """S1-16: no active route when it runs: it is cancelled, is no failure, and nobody is asked."""
    hold(db, "AAPL")
    app.schedules.run("wanted-prices").sync(db)
    asyncio.run(app.providers.route("stock", "twelvedata", active=False))
    work(db, world)
    found = db.execute("select state, failures, reason from tallybook.job where task = 'fetch_price'").fetchone()
    assert found == ("cancelled", 0, "no active route for stock AAPL") and not world.symbols


@pytest.mark.slow
@pytest.mark.parametrize("calls", [8, 600])
def test_no_provider_sees_more_than_its_calls(db: Any, world: World, calls: int) -> None:
    """S1-18 S1-20: 8 in any minute by the provider's count, the first at once; the control: with a looser rule more."""
    world.has_moods = False
    for code in FUNDS[:10]:
        hold(db, code, "fund", "INR")
    if calls != 8:
        app.rate_limits.set("provider:mfapi", calls, per="1 min").sync(db)
    app.schedules.run("wanted-prices").sync(db)
    drain(app, dsn=app.conninfo())
    assert (len(world.calls["mfapi"]) == 1) == (calls == 8)
    work(db, world)
    assert one(db, "select count(distinct asset) from price") == 10
    assert (most_in_a_minute(world.calls["mfapi"]) <= 8) == (world.over["mfapi"] == 0) == (calls == 8)
    assert (
        wrong(world.said, db.execute("select symbol, amount from price p join asset a on a.id = p.asset").fetchall())
        == set()
    )


CHART = '{"chart": {"result": [{"meta": {"currency": "INR", "symbol": "S", "regularMarketPrice": %s}}], "error": null}}'
DELISTED = '{"chart": {"result": null, "error": {"code": "Not Found", "description": "delisted"}}}'
QUOTE = '{"symbol": "%s", "close": "148.85001", "currency": "USD"}'
PRECISE = "2847.500000000000000001"


@pytest.mark.parametrize(("kind", "status", "content", "expected"), [
    ("twelvedata", 200, QUOTE % "S", Quote("S", "148.85001", "USD")),
    ("twelvedata", 200, QUOTE % "QQQ", PriceRefused("asked for S and answered for QQQ")),
    ("twelvedata", 200, '{"code": 404, "message": "no symbol", "status": "error"}', PriceRefused("404: no symbol")),
    ("twelvedata", 200, '{"code": 429, "message": "no credits", "status": "error"}', Busy(timedelta(minutes=1))),
    ("twelvedata", 429, '{"code": 429, "message": "no credits", "status": "error"}', httpx2.HTTPStatusError),
    ("twelvedata", 500, '{"code": 500, "message": "oh", "status": "error"}', httpx2.HTTPStatusError),
    ("yahoo", 200, CHART % PRECISE, Quote("S", Decimal(PRECISE), "INR")),
    ("yahoo", 200, CHART % "NaN", PriceRefused("NaN is no price")),
    ("yahoo", 404, DELISTED, PriceRefused("Not Found: delisted")),
    ("yahoo", 429, '{"finance": {"error": {"code": "Too Many Requests"}}}', httpx2.HTTPStatusError),
    ("yahoo", 401, "Unauthorized", httpx2.HTTPStatusError),
    ("mfapi", 200, '{"meta": {"scheme_code": 7}, "data": [{"nav": "1.5"}], "status": "SUCCESS"}',
     PriceRefused("answered for 7")),
    ("mfapi", 200, '{"meta": {}, "data": [], "status": "SUCCESS"}', PriceRefused("there is no scheme S")),
    ("mfapi", 200, "<!doctype html>", PriceRefused("not a price in JSON")),
    ("mfapi", 200, "[1]", PriceRefused("not a price in JSON")),
])  # fmt: skip
def test_each_provider_is_understood(kind: str, status: int, content: str, expected: Any) -> None:
    """S1-27: prices as they were said, exact; refusals in each provider's own form; another symbol's price is none."""
    secrets = {"api_key": Secret("k"), "cookie": Secret("c")}
    provider = Provider(
        name=kind, kind=kind, settings={"url": "https://provider.example"}, secrets=secrets, active=True
    )

    async def asked() -> Quote:
        headers = {"Content-Type": "application/json" if content.startswith("{") else "text/plain"}
        answer = httpx2.MockTransport(lambda _: httpx2.Response(status, text=content, headers=headers))
        async with httpx2.AsyncClient(transport=answer) as http:
            found = await ask(http, provider, "S")
            minor_units(found.price, 2)
            return found

    if isinstance(expected, Quote):
        assert asyncio.run(asked()) == expected
        return
    kind_of_error = expected if isinstance(expected, type) else type(expected)
    with pytest.raises(kind_of_error, match=None if isinstance(expected, type) else str(expected)) as raised:
        asyncio.run(asked())
    if isinstance(expected, Busy):
        assert isinstance(raised.value, Busy) and raised.value.retry_after == expected.retry_after


def test_the_account_finds_what_is_lost() -> None:
    """The run's account sees each loss: a price that did not come or is older than promised, one that nobody said."""
    promised = {1: 60.0, 2: 60.0}
    assert missing(promised, {1: 30.0, 2: 10.0, 3: 99.0}, set()) == set()
    assert missing(promised, {1: 30.0}, set()) == {"a price of asset 2"}
    assert missing(promised, {1: 30.0}, {2}) == set()
    assert missing(promised, {1: 90.0, 2: 10.0}, set()) == {"a price of asset 1"}
    assert wrong({"A": [1, 2]}, [("A", 1), ("A", 2)]) == set()
    assert wrong({"A": [1, 2]}, [("A", 1)]) == {"A at 2"}
    assert wrong({"A": [2]}, [("A", 2), ("A", 3), ("B", 1)]) == {"A at 3", "B at 1"}
    assert most_in_a_minute([7.5 * n for n in range(20)]) == 8
    assert most_in_a_minute([6.0 * n for n in range(20)]) == 10


@pytest.mark.slow
def test_the_whole_run_loses_nothing() -> None:
    """S1-11 S1-19: the short run, with a killed worker, ends with 0 lost and no provider called too often."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TALLYBOOK_", "PG", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "examples.price_feed"], cwd=HERE.parents[1], env={**env, "SHORT": "1"},
        capture_output=True, text=True, timeout=290, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("price_feed: ")
    assert done.stdout.endswith("retried, 0 lost\n")
    # The killed worker may have had more than one running call.
    assert re.search(r"; [1-9]\d* jobs rescued", done.stdout), done.stdout
    assert "0 without the right key" in done.stdout
