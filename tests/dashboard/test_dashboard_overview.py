"""Numbers of the dashboard: its overview, its charts, and /metrics, /healthz and /readyz for those who may ask."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette

from support.dashboard import Answer, Make, visiting
from support.hands import Hands, put
from support.roles import house
from support.samples import parsed, value
from tallybook import App
from tallybook._db import numbers as _numbers
from tallybook.errors import ConfigError
from tallybook.extra.dashboard.database import Database
from tallybook.extra.dashboard.metrics import health_routes, metrics_route
from tallybook.extra.dashboard.nodes import Nodes

TILE = re.compile(r'<a class="tile (\w+)" href="([^"]+)">.*?<strong title="([\d,]+)">')
ROWS = re.compile(r'<tr[^>]*>.*?<th scope="row">.*?</tr>', re.S)


def some_of_each(db: Any) -> None:
    """Jobs in several states: two scheduled, one retrying, three available, one running, one dead."""
    for _ in range(2):
        db.execute("select tallybook.enqueue('later', 'note', '{}', run_at => now() + interval '1 hour')")
    hands = Hands(db, "mail")
    for attempts in (5, 1):
        put(db, queue="mail", task="note", max_attempts=attempts)
        (job,) = hands.start()
        hands.fail(job, "1 hour", final=attempts == 1)
    put(db, queue="mail", task="note")
    hands.start()
    for _ in range(3):
        put(db, queue="mail", task="note")


def numbers(page: Answer, queue: str) -> dict[str, str]:
    """The row of a queue, keyed by its table's heads."""
    table = page.text.partition('id="h-queues"')[2]
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", table.partition("</thead>")[0])
    (row,) = [one for one in ROWS.findall(table) if f">{queue}<" in one]
    return dict(zip(heads[1:], re.findall(r'<td class="n[^"]*">([^<]*)</td>', row), strict=False))


async def test_a_tile_leads_to_what_it_counts(make: Make, db: Any) -> None:
    """Each tile of the overview and of a queue links to as many jobs as it shows."""
    some_of_each(db)
    async with visiting(make()) as visitor:
        for address in ("/", "/queue?name=mail"):
            tiles = TILE.findall((await visitor.get(address)).text)
            assert [name for name, _, _ in tiles] == [
                "available",
                "running",
                "scheduled",
                "retrying",
                "waiting",
                "dead",
            ]
            for name, href, n in tiles:
                page = await visitor.get(href.replace("&amp;", "&"))
                assert len(ROWS.findall(page.text)) == int(n), (address, name)


async def test_a_number_is_the_same_everywhere(make: Make, db: Any) -> None:
    """Scheduled and retrying have a column each, which adds up to the tile; the chart agrees."""
    some_of_each(db)
    async with visiting(make()) as visitor:
        page = await visitor.get("/")
        tiles = {name: int(n) for name, _, n in TILE.findall(page.text)}
        rows = [numbers(page, queue) for queue in ("mail", "later")]
        for name, n in tiles.items():
            assert sum(int(row[name]) for row in rows) == n, name
        assert (tiles["scheduled"], tiles["retrying"]) == (2, 1)
        chart = json.loads((await visitor.get("/series?span=15m")).text)
        assert (chart["scheduled"][-1], chart["retrying"][-1]) == (2, 1)
        assert chart["open"][-1] == tiles["available"] + tiles["running"]
        jobs = await visitor.get("/jobs")
        assert 'title="2">2<' in jobs.text.partition(">scheduled")[2][:60]


async def test_the_last_point_of_a_chart_has_the_rates_of_a_minute(make: Make, db: Any) -> None:
    """The unfinished step is no dip: its rates are those of the last minute, as on the tile and in the lists."""
    db.execute("select tallybook.fold()")
    hands = Hands(db, "mail")
    for _ in range(30):
        put(db, queue="mail", task="note")
        (job,) = hands.start()
        hands.complete(job)
    db.execute("select tallybook.fold()")
    async with visiting(make()) as visitor:
        for span in ("15m", "3h", "1d", "7d"):
            chart = json.loads((await visitor.get(f"/series?span={span}")).text)
            assert chart["completed"][-1] == 0.5, span
            assert len({len(column) for column in chart.values()}) == 1 and chart["at"] == sorted(chart["at"])
        assert json.loads((await visitor.get("/series?queue=other")).text)["completed"][-1] == 0
        assert numbers(await visitor.get("/"), "mail")["completed"] == "30/min"
        for address in ("/", "/queues", "/queue?name=mail"):
            assert ">30/min<" in (await visitor.get(address)).text, address


async def test_each_chart_has_a_span(make: Make, db: Any) -> None:
    """The address holds each chart's span, and changing one keeps the other; on a queue's page, too."""
    put(db, queue="mail", task="note")
    async with visiting(make()) as visitor:
        for address, more in (("/?level=7d", ""), ("/queue?name=mail&level=7d", "name=mail&")):
            page = await visitor.get(address)
            assert re.findall(r'data-chart="(\w+)" data-span="(\w+)"', page.text) == [("flow", "15m"), ("level", "7d")]
            assert f"{address.partition('?')[0]}?{more}flow=3h&level=7d" in page.links
        assert 'data-span="15m"' in (await visitor.get("/?flow=odd")).text


async def test_the_overview_says_what_the_doctor_has_found(make: Make, db: Any) -> None:
    """The banner shows a queue that no worker serves, with a link to advice, and no passed check."""
    put(db, queue="nightly", task="note")
    site = make()
    async with visiting(site) as visitor:
        await site.nodes.first.examination.look(60.0)
        alerts = (await visitor.get("/")).text.partition('<ul class="alerts"')[2].partition("</ul>")[0]
        assert "queue &#34;nightly&#34; has had available jobs" in alerts and "no live worker serves it" in alerts
        assert '<a href="/maintenance">' in alerts
        assert "checks" not in alerts and "connections are in use" not in alerts


TOKEN = "s3cr3t-of-the-scraper"


@asynccontextmanager
async def serving(dsn: str, **options: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of an app that has these routes, in this event loop."""
    database = Nodes(App("shop", dsn=dsn))
    web = Starlette(routes=[metrics_route(database, **options), *health_routes(database)])
    try:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(web), base_url="http://x") as client:
            yield client
    finally:
        await database.close()


@pytest.mark.servers
async def test_the_numbers_are_those_of_the_database(dsn: str, db: Any) -> None:
    """S2-09: a scrape of the dashboard parses and has the database's numbers, and none of a worker."""
    db.execute("select tallybook.enqueue('mail', 'hello'), tallybook.enqueue('mail', 'hello')")
    async with serving(dsn) as client:
        answer = await client.get("/metrics")
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert answer.headers["cache-control"] == "no-store"
        head = await client.head("/metrics")
        assert (head.status_code, head.text) == (200, "")
        assert (await client.post("/metrics")).status_code == 405
    found = parsed(answer.text)
    assert value(found, "tallybook_up") == 1
    assert value(found, "tallybook_jobs", queue="mail", task="hello", state="available") == 2
    assert value(found, "tallybook_oldest_job_age_seconds", queue="mail", state="available") >= 0
    assert "tallybook_worker" not in answer.text


async def test_the_database_is_asked_once_for_many(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrapes within the cache time cost one query, and so do probes; without that time, one each (control)."""
    asked: list[str] = []
    read = Database.read

    def counted(self: Database, *args: Any) -> Any:
        asked.append("")
        return read(self, *args)

    monkeypatch.setattr(Database, "read", counted)
    monkeypatch.setattr(_numbers, "FRESH", 3600.0)
    async with serving(dsn) as client:
        for path in ("/metrics", "/readyz"):
            answers = await asyncio.gather(*(client.get(path) for _ in range(20)))
            assert {answer.status_code for answer in answers} == {200}
        assert len(asked) == 2
        monkeypatch.setattr(_numbers, "FRESH", 0.0)
        await client.get("/metrics")
        await client.get("/metrics")
        assert len(asked) == 4


async def test_a_token_keeps_others_out(dsn: str) -> None:
    """With a token: 401 for none, a wrong one, a longer one and another scheme; the right one gets the page."""
    async with serving(dsn, token=TOKEN) as client:
        wrong = ["", "Bearer", "Bearer ", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", TOKEN]
        for said in [*wrong, "Bearer \N{SNOWMAN}".encode()]:
            answer = await client.get("/metrics", headers={"Authorization": said})  # type: ignore[dict-item]
            assert answer.status_code == 401 and answer.headers["www-authenticate"].startswith("Bearer"), said
            assert "tallybook_up" not in answer.text and TOKEN not in answer.text
        for scheme in ("Bearer", "bearer"):
            answer = await client.get("/metrics", headers={"Authorization": f"{scheme} {TOKEN}"})
            assert answer.status_code == 200 and "tallybook_up 1" in answer.text
        assert (await client.get("/readyz")).status_code == 200


async def test_a_session_lets_in_as_well(dsn: str) -> None:
    """A request that the host admits needs no token; if no token is set, nobody else gets in."""
    mine = {"Cookie": "mine"}
    for token in (TOKEN, None):
        async with serving(dsn, token=token, admits=lambda request: request.headers.get("cookie") == "mine") as client:
            assert (await client.get("/metrics", headers=mine)).status_code == 200
            for said in ("", "Bearer ", "Bearer None"):
                assert (await client.get("/metrics", headers={"Authorization": said})).status_code == 401
            known = await client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
            assert known.status_code == (401 if token is None else 200)


@pytest.mark.parametrize("token", ["", "short", "x" * 15, "with a space in the middle", "\N{SNOWMAN}" * 20, 7])
def test_a_token_that_is_none(token: Any) -> None:
    """A token that is guessable, or that no header can carry, raises an error that does not show it."""
    with pytest.raises(ConfigError) as caught:
        metrics_route(Nodes(App("shop")), token=token)
    assert not token or str(token) not in str(caught.value)


@pytest.mark.slow
async def test_a_database_that_is_away(empty_dsn: str) -> None:
    """No database: alive, not ready, up 0 with a 200. No Tallybook in it: not ready, for another reason."""
    async with serving("host=127.0.0.1 port=1") as client:
        assert (await client.get("/healthz")).text == "ok\n"
        ready, metrics = await client.get("/readyz"), await client.get("/metrics")
    assert (ready.status_code, ready.text) == (503, "no connection to the database\n")
    assert metrics.status_code == 200 and parsed(metrics.text) == {("tallybook_up", frozenset()): 0.0}
    async with serving(empty_dsn) as client:
        ready, metrics = await client.get("/readyz"), await client.get("/metrics")
    assert (ready.status_code, ready.text) == (503, "Tallybook is not installed in the database\n")
    assert parsed(metrics.text) == {("tallybook_up", frozenset()): 0.0}


@pytest.mark.direct("logs in as users of its own")
async def test_whose_role_may_ask(empty_dsn: str) -> None:
    """The metrics role gets the numbers; the producer role gets up 0 and nothing else."""
    with house(empty_dsn) as at:
        at.give()
        for kind, up in (("metrics", 1.0), ("producer", 0.0)):
            async with serving(at.dsn_of(at.user(kind))) as client:
                found = parsed((await client.get("/metrics")).text)
            assert value(found, "tallybook_up") == up
            assert (len(found) == 1) == (not up)


def test_it_works_in_another_event_loop(dsn: str) -> None:
    """One route answers in one event loop after another, as in a host application's tests."""
    database = Nodes(App("shop", dsn=dsn))
    web = Starlette(routes=[metrics_route(database)])

    async def once() -> str:
        try:
            async with httpx2.AsyncClient(transport=httpx2.ASGITransport(web), base_url="http://x") as client:
                return (await client.get("/metrics")).text
        finally:
            await database.close()

    assert all("tallybook_up 1" in asyncio.run(once()) for _ in range(2))
