"""The live view: one poller for all viewers, none without viewers, and behavior when something goes away."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from support.dashboard import HERE
from support.proxy import Proxy
from support.workers import eventually
from tallybook import App
from tallybook.embedded import temporary_server
from tallybook.extra.dashboard import database
from tallybook.extra.dashboard import live as module
from tallybook.extra.dashboard.live import Live, TooManyViewers
from tallybook.extra.dashboard.nodes import Nodes
from tallybook.extra.dashboard.pages import entrance
from tallybook.web import dashboard

pytestmark = pytest.mark.direct("counts the sessions of the dashboard")


class Viewer:
    """Reads a stream as a browser does, and keeps the newest text of each topic."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self.said: dict[str, str] = {}
        self.lines: list[bytes] = []
        self.reading = asyncio.create_task(self._read(stream))

    async def _read(self, stream: AsyncIterator[bytes]) -> None:
        async for chunk in stream:
            self.lines.append(chunk)
            lines = chunk.decode().split("\n")
            if lines[0].startswith("event: "):
                data = [line[6:] for line in lines[1:] if line.startswith("data: ")]
                self.said[lines[0][7:]] = "\n".join(data)

    async def leave(self) -> None:
        self.reading.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)


async def view(live: Live, *topics: str) -> Viewer:
    return Viewer(await live.watch(topics))


@asynccontextmanager
async def looked_at(dsn: str, *, every: float = 0.05) -> AsyncIterator[tuple[Live, Any]]:
    """A live view whose topic `number` sends a number; its queries (`asked`) and their sessions. Closed at the end."""
    database, counted = Nodes(App("shop"), dsn=dsn), SimpleNamespace(asked=[], sessions=set())

    async def number(conn: Any, rest: str) -> str:
        row = await (await conn.execute("select pg_backend_pid()")).fetchone()
        counted.sessions.add(row[0])
        counted.asked.append(rest)
        return f"{rest} {len(counted.asked)}"

    live = Live(database, every=every)
    live.topic("number", number)
    try:
        yield live, counted
    finally:
        await live.close()
        await database.close()


async def test_two_hundred_viewers_cost_one_session(dsn: str, db: Any) -> None:
    """All viewers share one session, also for topics of all nodes, and each round queries the topic once."""
    sessions = """
select count(*) from pg_stat_activity
 where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'"""
    async with looked_at(dsn) as (live, counted):

        async def slow(conn: Any, node: str) -> None:
            await conn.execute("select pg_sleep(0.02)")

        async def everywhere(rest: str) -> str:
            await live._nodes.answered(slow)
            return "read"

        live.over("everywhere", everywhere)
        viewers = [await view(live, "number", "everywhere") for _ in range(200)]
        await eventually(lambda: all(len(one.said) == 3 for one in viewers), "everybody has seen both topics")
        rounds = live.polls
        await eventually(lambda: live.polls >= rounds + 10, "it goes on")
        assert (
            live.polls - 1 <= len(counted.asked) <= live.polls
        )  # once per round, not once per viewer; one may be running
        assert len(counted.sessions) == 1
        assert db.execute(sessions).fetchone()[0] == 1
        assert all(one.said["live"] == "ok" for one in viewers)
        for one in viewers:
            await one.leave()


async def test_nobody_looks_and_nothing_is_asked(dsn: str) -> None:
    """After the last viewer, poller, topics and texts are gone; the next viewer gets news at once."""
    async with looked_at(dsn) as (live, counted):
        assert counted.asked == [] and live._poller is None  # no viewer yet
        for _ in range(2):
            viewers = [await view(live, "number", f"number:{n}") for n in range(5)]
            await eventually(lambda: all("number" in one.said for one in viewers), "they see it")  # noqa: B023
            for one in viewers:
                await one.leave()
            assert live.viewers == 0
            await eventually(lambda: live._poller is not None and live._poller.done(), "the poller has ended")
            asked = len(counted.asked)
            assert not live._watched
            names = {one.get_name() for one in asyncio.all_tasks()}
            assert "tallybook live" not in names
        assert len(counted.asked) == asked


async def test_a_viewer_that_reads_nothing_holds_up_nobody(dsn: str) -> None:
    """A viewer that stops reading gets the newest text when it continues, not all that it missed."""
    async with looked_at(dsn) as (live, counted):
        slow = await live.watch(["number"])
        await anext(slow)
        quick = await view(live, "number")
        await eventually(lambda: len(quick.lines) > 15, "the other goes on")
        missed = len(counted.asked)
        text = (await anext(slow)).decode()
        assert int(text.split()[-1]) >= missed - 1
        await quick.leave()
        await slow.aclose()  # type: ignore[attr-defined]
        assert live.viewers == 0


async def test_who_comes_gets_its_topic_at_once(dsn: str) -> None:
    """A new viewer's topic is queried before the round ends; a topic without text is not queried more often."""
    async with looked_at(dsn, every=30) as (live, counted):
        first = await view(live, "number:1")
        await eventually(lambda: "number:1" in first.said, "the first sees its own")
        second = await view(live, "number:2")
        await eventually(lambda: "number:2" in second.said, "the second does not wait for 30 s")

        async def silent(conn: Any, rest: str) -> None:
            counted.asked.append("silent")

        live.topic("silent", silent)
        third = await view(live, "silent")
        await eventually(lambda: "silent" in counted.asked, "it is asked")
        await eventually(lambda: third.said.get("live") == "ok", "and its viewer is told that all is well")
        polls = live.polls
        fourth = await view(live, "number:4")
        await eventually(lambda: "number:4" in fourth.said, "the next")
        assert live.polls == polls + 1
        for one in (first, second, third, fourth):
            await one.leave()


async def test_a_topic_that_fails_does_not_stop_the_others(dsn: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its viewers are marked stale, all others continue; it is logged once, not every second."""
    async with looked_at(dsn) as (live, counted):

        async def fails(conn: Any, rest: str) -> str:
            if rest == "sql":
                await conn.execute("select 1/0")
            return str(int(rest))

        live.topic("fails", fails)
        broken = [await view(live, "fails:x", "number"), await view(live, "fails:sql")]
        well = await view(live, "number", "fails:7")
        await eventually(lambda: [one.said.get("live") for one in broken] == ["stale"] * 2, "they are told")
        seen = len(counted.asked)
        await eventually(lambda: len(counted.asked) > seen + 5, "the others go on")
        assert well.said["live"] == "ok" and well.said["fails:7"] == "7"
        assert "number" in broken[0].said
        assert len([one for one in caplog.records if one.name == "tallybook.web"]) == 2
        for one in (*broken, well):
            await one.leave()


async def test_a_client_that_stops_reading_loses_its_stream(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of a client that reads nothing more ends, so that it does not keep the place of a viewer."""
    monkeypatch.setattr(entrance, "_READS", 0.1)
    site, sent = make(), []

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":  # the socket's buffer is full
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    scope = {
        "type": "http", "asgi": {"spec_version": "2.3"}, "method": "GET", "scheme": "http", "path": "/events",
        "query_string": b"topic=overview", "headers": [(b"host", b"localhost")], "client": HERE,
        "server": ("localhost", 80),
    }  # fmt: skip
    async with asyncio.timeout(10):
        await site(scope, receive, send)
    assert sent == ["http.response.start", "http.response.body"] and site.live.viewers == 0


async def test_a_line_break_in_a_text_begins_no_event(dsn: str) -> None:
    """Line breaks and fake events in a text stay in the text of its topic."""
    async with looked_at(dsn) as (live, _):
        text = "a\rb\r\nc\n\nevent: live\ndata: evil\u2028d"

        async def hostile(conn: Any, rest: str) -> str:
            return text

        live.topic("hostile", hostile)
        one = await view(live, "hostile")
        await eventually(lambda: "hostile" in one.said and "live" in one.said, "it is said")
        chunk = next(chunk for chunk in one.lines if b"event: hostile" in chunk)
        assert b"\r" not in chunk and chunk.count(b"event: ") == 2 and chunk.count(b"\ndata: ") == 6
        assert all(line.startswith((b"data: ", b"event: hostile")) for line in chunk.rstrip(b"\n").split(b"\n"))
        assert one.said["live"] == "ok"
        await one.leave()


async def test_many_topics_hold_no_transaction_for_long(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long round continues in a new transaction; a short one, the control, reads all its topics in one."""
    for longest, transactions in ((60.0, 1), (0.0, 5)):
        monkeypatch.setattr(module, "_SNAPSHOT", longest)
        begun: list[Any] = []

        async def asked(conn: Any, rest: str, begun: list[Any] = begun) -> str:
            begun.append((await (await conn.execute("select now()")).fetchone())[0])
            return rest

        async with looked_at(dsn, every=30) as (live, _):
            live.topic("asked", asked)
            one = await view(live, *(f"asked:{n}" for n in range(5)))
            await eventually(lambda one=one: len(one.said) == 6, "six are said")  # type: ignore[misc]
            await one.leave()
        assert (len(begun), len(set(begun))) == (5, transactions)


async def test_what_there_is_once_is_asked_for_by_one_name(dsn: str, make: Any) -> None:
    """Invented names of the overview cause no extra read, which would spoil everybody's rates."""
    live = make().live
    try:
        for name in ("overview", "point", "workers"):
            assert live.knows(name) and not live.knows(f"{name}:1") and not live.knows(f"{name}:")
        assert live.knows("job:1") and live.knows("worker:1")
        one = await view(live, "overview:1", "overview:2", "point:")
        await eventually(lambda: live.viewers == 1, "it looks")
        assert not live._watched and live.polls == 0
        await one.leave()
    finally:
        await live.close()


async def test_the_limits_of_viewers_and_topics(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A viewer over the limit is refused until another leaves; too many topics are refused, unknown ones ignored."""
    monkeypatch.setattr(module, "MOST_VIEWERS", 2)
    async with looked_at(dsn) as (live, _):
        first, second = await view(live, "number"), await view(live, "nothing", "number\nevent: x", "x" * 300)
        await eventually(lambda: live.viewers == 2 and "number" in first.said, "both look")
        with pytest.raises(TooManyViewers):
            await view(live, "number")
        assert set(live._watched) == {"number"}
        await first.leave()
        third = await view(live, "number")
        await eventually(lambda: "number" in third.said, "it has a place")
        await third.leave()
        monkeypatch.setattr(module, "MOST_TOPICS", 3)
        with pytest.raises(TooManyViewers):
            await view(live, *[f"number:{n}" for n in range(4)])
        await second.leave()


async def test_a_viewer_has_to_come_again(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream ends after a while with a short retry, so a viewer without access does not watch forever."""
    monkeypatch.setattr(module, "_AGE", 0.2)
    async with looked_at(dsn) as (live, _):
        one = await view(live, "number")
        async with asyncio.timeout(15):
            await one.reading
        assert one.lines[0] == b"retry: 3000\n\n" and one.lines[-1] == b"retry: 100\n\n"
        assert live.viewers == 0


@pytest.mark.slow
async def test_the_database_goes_away_and_comes_back() -> None:
    """Viewers learn that their data is stale, and when it is fresh again, without a reload."""
    with temporary_server(18) as server:
        dsn = server.create_database("live")
        async with looked_at(dsn) as (live, counted):
            live._nodes.first._wait = 1.0
            one = await view(live, "number")
            await eventually(lambda: one.said.get("live") == "ok", "it is there")
            with psycopg.connect(server.dsn(), autocommit=True) as conn:
                conn.execute("alter database live with allow_connections false")
                conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = 'live'")
                await eventually(lambda: one.said["live"] == "stale", "it is away")
                conn.execute("alter database live with allow_connections true")
            seen = len(counted.asked)
            await eventually(lambda: one.said["live"] == "ok", "it is back", seconds=30)
            assert len(counted.asked) > seen
            await one.leave()


async def test_a_database_that_hangs_is_stale(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the database is silent on open sockets, viewers learn that their data is stale."""
    monkeypatch.setattr(database, "_GRACE", 0.3)
    with Proxy(dsn) as proxy:
        async with looked_at(proxy.dsn) as (live, _):
            live._nodes.first._answer = "0.2s"
            one = await view(live, "number")
            await eventually(lambda: one.said.get("live") == "ok", "it is there")
            proxy.silent = True
            await eventually(lambda: one.said["live"] == "stale", "it hangs")
            await one.leave()
            proxy.cut()


def test_a_dashboard_that_nobody_holds_is_forgotten() -> None:
    """A dashboard without references is freed, also in a process that makes many, like a host's tests."""
    gone = weakref.ref(dashboard(App("shop"), dsn="host=127.0.0.1 port=1"))
    gc.collect()
    assert gone() is None
