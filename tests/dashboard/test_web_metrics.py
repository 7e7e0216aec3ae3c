"""The dashboard's /metrics, /healthz and /readyz: the database's numbers, who may read them, and few queries."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from support.roles import house
from tallybook import App
from tallybook._db import numbers as _numbers
from tallybook.errors import ConfigError
from tallybook.extra.dashboard.database import Database
from tallybook.extra.dashboard.metrics import health_routes, metrics_route
from tallybook.extra.dashboard.nodes import Nodes

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


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


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
    found = samples(answer.text)
    assert found["tallybook_up", ()] == 1
    assert found["tallybook_jobs", ("mail", "hello", "available")] == 2
    assert found["tallybook_oldest_job_age_seconds", ("mail", "available")] >= 0
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
    assert metrics.status_code == 200 and samples(metrics.text) == {("tallybook_up", ()): 0.0}
    async with serving(empty_dsn) as client:
        ready, metrics = await client.get("/readyz"), await client.get("/metrics")
    assert (ready.status_code, ready.text) == (503, "Tallybook is not installed in the database\n")
    assert samples(metrics.text) == {("tallybook_up", ()): 0.0}


@pytest.mark.direct("logs in as users of its own")
async def test_whose_role_may_ask(empty_dsn: str) -> None:
    """The metrics role gets the numbers; the producer role gets up 0 and nothing else."""
    with house(empty_dsn) as at:
        at.give()
        for kind, up in (("metrics", 1.0), ("producer", 0.0)):
            async with serving(at.dsn_of(at.user(kind))) as client:
                found = samples((await client.get("/metrics")).text)
            assert found["tallybook_up", ()] == up
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
