"""The example of portfolio jobs, in parts and as a whole."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import psycopg
import pytest
from flask.testing import FlaskClient

from examples.portfolio_jobs import world as played
from examples.portfolio_jobs.jobs import SCHEDULES, app, refresh_quotes, value
from examples.portfolio_jobs.world import HALTED, NEW, PICTURE, RATES, Operators, World, balance, price
from tallybook import Exponential
from tallybook.errors import OperatorRefused
from tallybook.testing import drain, travel
from tests.support.operator_process import serving

HERE = Path(__file__).parents[1]


@pytest.fixture
def market(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A quick market that answers all requests except for the price of the halted share."""
    with World(calm=True, quotes_take=0.0) as world:
        monkeypatch.setenv("MARKET_URL", world.url)
        yield world


@pytest.fixture
def db(tallybook_dsn: str, market: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[psycopg.Connection[Any]]:
    """The application's tables, with four portfolios per market; the last of each market has no holdings."""
    monkeypatch.setattr(app, "dsn", tallybook_dsn)
    with psycopg.connect(tallybook_dsn, autocommit=True, prepare_threshold=None) as conn:
        conn.execute((HERE / "schema.sql").read_bytes())
        played.seed(conn, 4)
        drain(app)  # stores the schedules; they are paused, because a quarter of an hour may begin within a test
        for name in SCHEDULES:
            app.schedules.pause(name).sync(conn)
        yield conn


@pytest.fixture
def client(db: Any) -> FlaskClient:
    from examples.portfolio_jobs.web import web

    return web.test_client()


def rows(db: Any, query: str, *values: object) -> list[tuple[Any, ...]]:
    return db.execute(query.encode(), values).fetchall()  # type: ignore[no-any-return]


def halt(db: Any, portfolio: int) -> None:
    """Add the halted share, which has no price, to a portfolio."""
    db.execute("insert into holding values (%s, %s, 1)", (portfolio, HALTED))


@pytest.fixture
def operators(db: Any, tallybook_dsn: str, tmp_path: Path) -> Iterator[Operators]:
    """Two clients of an operator API process: one may operate, one may only read."""
    said = {scope: secrets.token_hex(32) for scope in ("operate", "read")}
    with serving(tallybook_dsn, played.write_keys(tmp_path, said)) as url:
        yield Operators(url, said)


DAY = date(2026, 11, 20)
STATE = "select state from tallybook.job where id = %s"


def put(db: Any, *portfolios: int) -> list[int]:
    """Enqueue the jobs that value these portfolios; return their ids."""
    return [value.enqueue_sync(db, portfolio, DAY).id for portfolio in portfolios]


def try_all(db: Any) -> None:
    """Run due jobs, and move the clock until no job waits for a retry."""
    drain(app)
    while rows(db, "select from tallybook.job where state = 'retrying'"):
        travel(db, timedelta(minutes=10))
        drain(app)


@pytest.mark.slow
def test_what_the_clock_does_is_one_table(db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """S2-07 S2-11: the table of schedules is stored; the next release's changes it, and removes its missing ones."""
    listed = "select name, every, fired_count from tallybook.schedules order by name"
    drain(app)
    assert [name for name, _, _ in rows(db, listed)] == sorted(SCHEDULES)
    assert {task.retry for task in app.tasks.values()} == {
        Exponential(timedelta(seconds=10), cap=timedelta(minutes=10))
    }
    app.schedules.run("quotes").sync(db)
    monkeypatch.delitem(app._declared, "statements")
    monkeypatch.delitem(app._declared, "quotes")
    app.schedule("quotes", refresh_quotes.job(), every="1 s")
    drain(app)
    assert ("quotes", timedelta(seconds=1), 1) in rows(db, listed)
    assert [name for name, _, _ in rows(db, listed)] == sorted(SCHEDULES.keys() - {"statements"})


@pytest.mark.slow
def test_what_people_ask_for_goes_first_through_the_same_queue(db: Any, client: FlaskClient) -> None:
    """S2-01 S2-09: an export and valuations are in one queue; the export runs first, whenever it came."""
    jobs = put(db, 1, 2, 3)
    assert client.post("/portfolios/4/export").status_code == 303
    assert {queue for (queue,) in rows(db, "select queue from tallybook.job")} == {"default"}
    assert drain(app, max_jobs=1).completed == 1
    assert rows(db, "select kind from request where done_at is not null") == [("export",)]
    assert [rows(db, STATE, job) for job in jobs] == [[("available",)]] * 3
    assert drain(app).completed == 3


@pytest.mark.slow
def test_a_market_that_closes_twice_a_day_values_each_portfolio_once(db: Any, market: World) -> None:
    """S2-13: an extra run works like a tick; valued portfolios are left alone, dead ones are enqueued anew."""
    halt(db, 1)
    query = "select id from portfolio where market = 'frankfurt' order by id"
    one, *others, empty = (number for (number,) in rows(db, query))
    assert one == 1
    drain(app)
    fired = app.schedules.run("close-frankfurt").sync(db)
    try_all(db)
    assert fired.what == "enqueued" and rows(db, "select state from tallybook.job where id = %s", fired.job_id) == [
        ("completed",)
    ]
    valued = rows(db, "select portfolio, amount, valued_at from valuation order by 1")
    assert [number for number, _, _ in valued] == others
    market.mended = True
    app.schedules.run("close-frankfurt").sync(db)
    try_all(db)
    assert rows(db, "select portfolio, amount, valued_at from valuation order by 1")[1:] == valued
    ((letter,),) = rows(db, "select id from tallybook.job where state = 'dead'")
    before = rows(db, "select * from valuation")
    app.retry(letter).sync(db)
    try_all(db)
    assert rows(db, STATE, letter) == [("completed",)] and rows(db, "select * from valuation") == before
    wrong = played.wrong_valuations(
        rows(db, "select market, day from closing"), rows(db, "select id, market from portfolio"),
        rows(db, "select portfolio, symbol, quantity from holding"),
        rows(db, "select portfolio, day, amount from valuation"),
    )  # fmt: skip
    assert wrong == ["tokyo has not closed", "newyork has not closed"]
    assert empty not in [portfolio for portfolio, *_ in before]


@pytest.mark.slow
def test_each_valuation_has_one_statement(db: Any, market: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """S2-01 S2-13: the schedule of statements finds what has none, however often it is run; a late retry adds none."""
    put(db, 1, 2)
    drain(app)
    for _ in range(2):
        app.schedules.run("statements").sync(db)
        drain(app)
        found = rows(db, "select portfolio, day from statement")
        assert played.wrong_statements([(1, DAY, 0), (2, DAY, 0)], found, market.mails) == []
    put(db, 3)
    drain(app)
    with monkeypatch.context() as fails:
        fails.setattr(market, "verdict", lambda key: ("fails", 0.0))
        app.schedules.run("statements").sync(db)
        try_all(db)
    app.schedules.run("statements").sync(db)
    drain(app)
    assert app.dead.retry(task="send_statement").sync(db).retried == 1  # the other job has sent it already
    try_all(db)
    assert rows(db, "select portfolio from statement order by sent_at")[2:] == [(3,)]


@pytest.mark.slow
def test_a_fire_while_the_last_one_is_open_is_skipped_and_counted(db: Any, operators: Operators, market: World) -> None:
    """S2-02 S2-12 S2-13 S2-16: no error, no job, but stored; the next one fires when the job has ended."""
    operator = operators.operator.call
    drain(app)
    run = "/schedules/quotes/run"
    assert [operator("POST", run)["what"] for _ in range(3)] == ["enqueued", "skipped", "skipped"]
    assert drain(app).completed == 1 and market.asked["/quotes"] == 1
    assert operator("POST", run)["what"] == "enqueued"
    assert drain(app).completed == 1 and market.asked["/quotes"] == 2
    counted = "select fired_count, skipped_count, failed_count from tallybook.schedules where name = 'quotes'"
    assert rows(db, counted) == [(2, 2, 0)]
    fires = rows(db, "select what, reason from tallybook.fires where schedule = 'quotes' order by fired_at")
    assert fires == [("enqueued", None), ("skipped", "overlap"), ("skipped", "overlap"), ("enqueued", None)]


@pytest.mark.slow
@pytest.mark.parametrize(("overlap", "at_once"), [(False, 1), (True, 2)])
def test_two_at_once_are_seen_outside(
    db: Any, market: World, monkeypatch: pytest.MonkeyPatch, overlap: bool, at_once: int
) -> None:
    """S2-02 S2-06 S2-14: the market is asked by one at a time, unless the schedule opts out: the account's control."""
    market.quotes_take = 3.0 if overlap else 0.3  # time for the second to come
    monkeypatch.delitem(app._declared, "quotes")
    app.schedule("quotes", refresh_quotes.job(), every="15 min", overlap=overlap)
    drain(app)
    for _ in range(2):
        app.schedules.run("quotes").sync(db)
    drain(app)
    assert market.most_quoting == at_once


@pytest.mark.slow
def test_wrong_prices_are_not_believed(db: Any, market: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """S2-07: prices of another day, in cents, or not all of them: a failure, another attempt by the named policy."""
    jobs = put(db, *[n for (n,) in rows(db, "select distinct portfolio from holding order by 1")])
    with monkeypatch.context() as wrong:
        wrong.setattr(market, "verdict", lambda key: ("is wrong", 0.0))
        assert drain(app).retrying == len(jobs)
    said = [error for (error,) in rows(db, "select last_error from tallybook.job")]
    kinds = [sum(bool(re.match(kind, one)) for one in said) for kind in ("prices of", r"\w+ at 0,", r"\w+ at [1-9]")]
    assert all(kinds) and sum(kinds) == len(jobs)
    assert rows(db, "select from valuation") == []
    travel(db, timedelta(seconds=10))
    assert drain(app).completed == len(jobs) == len(rows(db, "select from valuation"))


@pytest.mark.slow
def test_dead_letters_are_tried_again_by_signed_calls_only(db: Any, operators: Operators, market: World) -> None:
    """S2-08 S2-12: dead after four failures; altered, repeated, late, unsigned and unentitled calls change nothing."""
    operator = operators.operator.call
    halt(db, 1)
    (job,) = put(db, 1)
    try_all(db)
    assert rows(db, "select state, failures from tallybook.job where id = %s", job) == [("dead", 4)]
    assert operators.refused() == ["late", "replayed", "scope", "signature", "unsigned"]
    assert rows(db, STATE, job) == [("dead",)]
    market.mended = True
    assert operator("POST", "/dead-letters/retry", {"task": "value"})["retried"] == 1
    assert drain(app).completed == 1
    assert rows(db, "select portfolio, day from valuation") == [(1, DAY)]
    with pytest.raises(OperatorRefused, match="unknown"):
        operator("POST", "/schedules/nothing/run")


@pytest.mark.slow
def test_an_import_replaces_what_is_held_and_says_what_is_unknown(db: Any, client: FlaskClient) -> None:
    """S2-01: the request and its job are one transaction; the page shows how far it is, then what came of it."""
    answer = client.post("/portfolios/1/import", data={"content": f"{NEW},2\nNOSUCH,3\nAKX,0.5\n"})
    page = answer.headers["Location"]
    assert 'http-equiv="refresh"' in client.get(page).text
    ((job,),) = rows(db, "select job_id from request")
    assert drain(app).completed == 1
    assert rows(db, "select progress_message from tallybook.job where id = %s", job) == [("line 3 of 3",)]
    assert "2 imported; the market does not know NOSUCH" in client.get(page).text
    held = rows(db, "select symbol, quantity from holding where portfolio = 1 order by 1")
    assert held == [("AKX", Decimal("0.5")), (NEW, Decimal(2))]
    asked = client.post("/portfolios/1/export").headers["Location"]
    assert client.get(f"{asked}/file").status_code == 404
    drain(app)
    assert f"{asked}/file" in client.get(asked).text
    assert client.get(f"{asked}/file").text == f"AKX,0.5\n{NEW},2\n"


@pytest.mark.slow
def test_a_screenshot_is_read_and_then_imported(db: Any, client: FlaskClient) -> None:
    """S2-01: the job that reads a picture enqueues the import with its own end; other files are cancelled."""

    def sent(picture: bytes) -> str:
        answer = client.post("/portfolios/1/screenshot", data={"picture": (BytesIO(picture), "shot.png")})
        return answer.headers["Location"]

    page, wrong = sent(PICTURE + b"AKX,2\nBKX,0.5\n"), sent(b"<svg>")
    done = drain(app)
    assert (done.completed, done.cancelled) == (2, 1)
    assert "2 imported" in client.get(page).text and "no holdings in this picture" in client.get(wrong).text
    held = rows(db, "select symbol, quantity from holding where portfolio = 1 order by 1")
    assert held == [("AKX", Decimal(2)), ("BKX", Decimal("0.5"))]
    tasks = rows(db, "select task, args from tallybook.job where state = 'completed' order by id")
    assert tasks == [("read_screenshot", {"request": 1}), ("import_holdings", {"request": 1})]
    assert client.post("/portfolios/1/screenshot").status_code == 400


@pytest.mark.slow
def test_a_wallet_is_synced_by_the_clock_and_first_for_an_owner_who_asks(
    db: Any, client: FlaskClient, market: World
) -> None:
    """S2-01 S2-09: the schedule's job moves to the front when its owner asks, and runs once; rates are fetched too."""
    assert app.schedules.run("wallets").sync(db).jobs == 2
    assert client.post("/portfolios/11/sync").status_code == 303
    assert client.post("/portfolios/2/sync").status_code == 404
    db.execute("select tallybook.promote()")  # what workers do all the time: it takes its new place
    drain(app, max_jobs=1)
    assert rows(db, "select portfolio from wallet where synced_at is not null") == [(11,)]
    assert str(balance("bc1000011")) in client.get("/portfolios/11").text
    app.schedules.run("rates").sync(db)
    drain(app)
    found = rows(db, "select address, balance from wallet order by 1")
    assert found == [(address, balance(address)) for address in ("bc1000001", "bc1000011")]
    rates = rows(db, "select currency, per_dollar from rate")
    assert played.wrong_syncs(found, rates) == [] and set(RATES) == {name for name, _ in rates}
    assert sum(many for what, many in market.asked.items() if "bc1000011" in what) == 1


def test_a_mail_under_another_key_is_sent_twice_and_seen() -> None:
    """The control of the run's count of mails: a known key sends none, another key sends the same mail again."""
    world, text = World(calm=True), f"On {DAY} your portfolio 7 was worth 1.00."
    for key in ("statement-7", "statement-7", "another key"):
        world.mail(key, text)
    assert world.mails == {f"statement-7-{DAY}": 2} and world.answers["knew the mail"] == 1
    assert len(played.wrong_statements([(7, DAY, 0)], [(7, DAY)], world.mails)) == 1


@pytest.mark.slow
def test_what_is_no_import_changes_nothing(db: Any, client: FlaskClient) -> None:
    """Files that make no sense: cancelled, the page shows the reason, and the holdings stay."""
    before = rows(db, "select * from holding")
    files = ["", "AKX", "AKX,1,2", "AKX,-1", "AKX,0", "AKX,NaN", "AKX,1e99", "AKX,one", "<script>"]
    pages = [client.post("/portfolios/1/import", data={"content": one}).headers["Location"] for one in files]
    assert drain(app).cancelled == len(files)
    for page in pages:
        assert "the file must have lines" in client.get(page).text
    assert rows(db, "select * from holding") == before


@pytest.mark.slow
def test_pages(db: Any, client: FlaskClient) -> None:
    """S2-16: the clock's table, portfolios, what is not there, and what comes from elsewhere."""
    for name in SCHEDULES:
        assert app.schedules.drop(name).sync(db)
    assert "No worker has stored a schedule" in client.get("/").text
    put(db, 1)
    drain(app)
    app.schedules.run("quotes").sync(db)
    app.schedules.run("quotes").sync(db)
    page = client.get("/").text
    assert "30 15 * * MON-FRI Asia/Tokyo" in page and "skipped: overlap" in page and str(DAY) in page
    assert str(DAY) in client.get("/portfolios/1").text
    for path in ("/portfolios/999", "/requests/999", "/requests/999/file"):
        assert client.get(path).status_code == 404
    pruned = "insert into request (portfolio, kind, job_id) values (1, 'export', 999999999) returning id"
    ((number,),) = rows(db, pruned)
    page = client.get(f"/requests/{number}").text
    assert "Not done" in page and "http-equiv" not in page  # it is not loaded again for ever
    db.execute("delete from request")
    assert client.post("/portfolios/999/export").status_code == 404
    assert client.post("/portfolios/1/drop").status_code == 404
    assert client.post("/portfolios/1/import", data={"content": "\0"}).status_code == 422
    assert client.post("/portfolios/1/import", data={"content": "x" * 200_000}).status_code == 422
    assert client.post("/portfolios/1/export", headers={"Origin": "https://evil.example"}).status_code == 403
    assert rows(db, "select from request") == []


def test_the_account_finds_what_is_lost_wrong_and_there_twice() -> None:
    """The control of the run's last line: each kind of loss is found, and nothing else is taken for one."""
    closings = [(market, DAY) for market in played.MARKETS]
    portfolios, holdings = (
        [(1, "tokyo"), (2, "tokyo"), (3, "newyork")],
        [(1, "AKX", Decimal(2)), (3, "BKX", Decimal(1))],
    )
    valuations = [(1, DAY, round(price("AKX", DAY) * 200)), (3, DAY, round(price("BKX", DAY) * 100))]
    assert played.wrong_valuations(closings, portfolios, holdings, valuations) == []
    assert len(played.wrong_valuations(closings, portfolios, holdings, valuations[:1])) == 1
    assert len(played.wrong_valuations(closings, portfolios, holdings, [(1, DAY, 1), valuations[1]])) == 1
    assert len(played.wrong_valuations(closings, portfolios, holdings, [*valuations, (2, DAY, 0)])) == 1
    assert len(played.wrong_valuations(closings[1:], portfolios, holdings, valuations)) == 2  # and it was valued
    mails, noted = {f"statement-{n}-{DAY}": 1 for n in (1, 3)}, [(1, DAY), (3, DAY)]
    assert played.wrong_statements(valuations, noted, mails) == []
    assert len(played.wrong_statements(valuations, noted[:1], mails)) == 1
    assert len(played.wrong_statements(valuations, [*noted, (1, DAY)], mails)) == 1
    assert len(played.wrong_statements(valuations, noted, {**mails, f"statement-1-{DAY}": 2})) == 1
    assert len(played.wrong_statements(valuations, noted, {**mails, f"statement-2-{DAY}": 1})) == 1
    promised: dict[int, Any] = {1: ("import", 1, {"AKX": "2"}), 2: ("export", 3, {})}
    requests = [(1, "", datetime.now(UTC)), (2, "BKX,1\n", datetime.now(UTC))]
    assert played.wrong_requests(promised, requests, holdings) == []
    assert len(played.wrong_requests(promised, requests[:1], holdings)) == 1
    assert len(played.wrong_requests(promised, [(1, "", None), requests[1]], holdings)) == 1
    assert len(played.wrong_requests(promised, [requests[0], (2, "", datetime.now(UTC))], holdings)) == 1
    assert len(played.wrong_requests(promised, requests, holdings[1:])) == 1
    wallets, rates = [("bc1", balance("bc1"))], [(name, Decimal(rate)) for name, rate in RATES.items()]
    assert played.wrong_syncs(wallets, rates) == []
    assert len(played.wrong_syncs([("bc1", None)], rates)) == len(played.wrong_syncs(wallets, rates[1:])) == 1


@pytest.mark.slow
def test_the_whole_run_loses_nothing() -> None:
    """S2-01 S2-02 S2-05 S2-10 S2-12: one worker, then four, one killed: 0 lost, each mail once, skips, refusals."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TALLYBOOK_", "PG", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "examples.portfolio_jobs"], cwd=HERE.parents[1], env={**env, "SHORT": "1"},
        capture_output=True, text=True, timeout=290, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"portfolio_jobs: \d+ processed, 0 failed, \d+ retried, 0 lost", done.stdout.splitlines()[-1])
    assert re.search(r"by now \d+ by one$", done.stdout, re.MULTILINE)
    assert re.search(r"by now .*\d+ by (three|four).*; two was killed", done.stdout)
    assert "refused calls, which changed nothing: late, replayed, scope, signature, unsigned" in done.stdout
    assert re.search(r"quotes: \d+ fired, [1-9]\d* skipped", done.stdout) and ", at most 1 at a time" in done.stdout
