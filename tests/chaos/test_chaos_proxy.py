"""The fault proxy of the chaos harness, before a real server: each fault does exactly what its name says."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from chaos.proxy import Proxy, Upstream
from chaos.wire import Requests, is_ready
from support.proxy import upstream
from support.workers import eventually


@asynccontextmanager
async def through(dsn: str, **options: Any) -> AsyncIterator[tuple[Proxy, psycopg.AsyncConnection[Any]]]:
    """Yield a proxy before the test's server, and a connection through it."""
    async with Proxy(upstream(dsn), **options) as proxy:
        conn = await connect(dsn, proxy)
        try:
            yield proxy, conn
        finally:
            with suppress(psycopg.Error):
                await conn.close()


async def connect(dsn: str, proxy: Proxy, **kwargs: Any) -> psycopg.AsyncConnection[Any]:
    parts = {**conninfo_to_dict(dsn), "host": "127.0.0.1", "port": proxy.port, **kwargs}
    return await psycopg.AsyncConnection.connect(**parts, autocommit=True)


async def within(seconds: float, answer: asyncio.Future[Any]) -> bool:
    return bool((await asyncio.wait((answer,), timeout=seconds))[0])


async def test_without_a_fault_it_is_not_noticed(dsn: str) -> None:
    """Large values, pipelines and prepared statements pass through whole, on several connections."""
    async with through(dsn) as (proxy, conn):
        text = await (await conn.execute("select repeat('x', 3000000)")).fetchone()
        assert len(text[0]) == 3_000_000
        sent = "y" * 1_000_000
        assert await (await conn.execute("select length(%s::text)", (sent,))).fetchone() == (1_000_000,)
        async with conn.pipeline():
            cursors = [await conn.execute("select %s::int", (n,), prepare=True) for n in range(50)]
        assert [(await cursor.fetchone())[0] for cursor in cursors] == list(range(50))
        more = [await connect(dsn, proxy) for _ in range(5)]
        assert proxy.connections == 6
        for one in more:
            await one.close()
        await eventually(lambda: proxy.connections == 1, "it is connected")


async def test_delay(dsn: str) -> None:
    """Both directions are delayed: a round trip takes twice the delay."""
    async with through(dsn) as (proxy, conn):

        async def quickest(trips: int) -> float:
            """Return the fastest of these trips: a busy machine slows some."""
            took = []
            for _ in range(trips):
                started = time.monotonic()
                await conn.execute("select 1")
                took.append(time.monotonic() - started)
            return min(took)

        proxy.delay(0.1)
        assert 0.2 <= await quickest(3) < 2
        proxy.heal()
        assert await quickest(50) < 0.1


@pytest.mark.parametrize("to_server", [True, False])
async def test_blackhole_delivers_late(dsn: str, db: Any, to_server: bool) -> None:
    """F10: data that a blackhole swallowed arrives when it heals; in one direction the server acted long before."""
    db.execute("create table t (n int)")
    async with through(dsn) as (proxy, conn):
        proxy.blackhole(to_server=to_server, to_client=not to_server)
        answer = asyncio.ensure_future(conn.execute("insert into t values (1)"))
        done = "select count(*) from t"
        if not to_server:
            await eventually(lambda: db.execute(done).fetchone() == (1,), "it was done")
        assert not await within(0.3, answer)
        assert db.execute(done).fetchone() == (0 if to_server else 1,)
        proxy.heal()
        assert await within(30, answer)
        assert (await answer).rowcount == 1


@pytest.mark.direct("the server learns of a dead client from the pooler")
async def test_blackhole_is_given_up_by_the_clients_kernel(dsn: str, db: Any) -> None:
    """F10: unanswered for tcp_user_timeout, the client is reset; the server notices when the line is back."""
    async with through(dsn, unacked=0.3) as (proxy, conn):
        pid = conn.info.backend_pid
        there = "select count(*) from pg_stat_activity where pid = %s"
        proxy.blackhole()
        with pytest.raises(psycopg.OperationalError):
            await conn.execute("select 1")
        assert proxy.counts["given up"] == 1
        assert db.execute(there, (pid,)).fetchone() == (1,)
        proxy.heal()
        await eventually(lambda: db.execute(there, (pid,)).fetchone() == (0,), "the session is gone")


async def test_half_open_stays_dead(dsn: str) -> None:
    """F11: a half-open connection receives nothing, even after healing, until its kernel notices; new ones work."""
    async with through(dsn, unacked=None, keepalive=3.0) as (proxy, conn):
        proxy.half_open()
        answer = asyncio.ensure_future(conn.execute("select 1"))
        assert not await within(0.2, answer)
        proxy.heal()
        assert not await within(0.2, answer)
        other = await connect(dsn, proxy)
        await other.execute("select 1")
        await other.close()
        with pytest.raises(psycopg.OperationalError):
            await answer


async def test_half_open_for_ever(dsn: str) -> None:
    """F11: without kernel timeouts the proxy keeps a dead connection until somebody closes it."""
    async with through(dsn, unacked=None, keepalive=None) as (proxy, conn):
        proxy.half_open()
        answer = asyncio.ensure_future(conn.execute("select 1"))
        proxy.heal()
        assert not await within(0.5, answer)
        answer.cancel()
    assert proxy.counts["given up"] == 0


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
async def test_cut_after_bytes(dsn: str, direction: Any) -> None:
    """F7: the connection is cut after so many bytes in one direction; so is the next one, until the proxy heals."""
    async with through(dsn) as (proxy, conn):
        proxy.cut_after(lambda: 2000, direction)
        with pytest.raises(psycopg.OperationalError):
            await conn.execute("select %s::text", ("x" * 3000,))
        assert proxy.counts["cut after bytes"] == 1
        again = await connect(dsn, proxy)
        with pytest.raises(psycopg.OperationalError):
            await again.execute("select %s::text", ("x" * 3000,))
        proxy.heal()
        healed = await connect(dsn, proxy)
        await healed.execute("select %s::text", ("x" * 3000,))
        await healed.close()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("prepared", [True, False])
async def test_cut_at_commit(dsn: str, db: Any, when: Any, prepared: bool) -> None:
    """F7: cut at COMMIT the client gets an error; cut before, nothing is committed; cut after, it is."""
    db.execute("create table t (n int)")
    async with through(dsn) as (proxy, conn):
        proxy.cut_at(lambda text: text.lower() == "commit", when)
        await conn.execute("begin")
        await conn.execute("insert into t values (1)")
        with pytest.raises(psycopg.OperationalError):
            await conn.execute("commit", prepare=prepared)
        assert proxy.counts[f"cut {when} statement"] == 1
        await eventually(lambda: proxy.connections == 0, "it is disconnected")
        assert db.execute("select count(*) from t").fetchone() == (1 if when == "after" else 0,)


async def test_cut_at_a_prepared_statement(dsn: str, db: Any) -> None:
    """F7: a prepared statement is also recognized by its name."""
    db.execute("create table t (n int)")
    async with through(dsn) as (proxy, conn):
        insert = "insert into t values (%s)"
        for n in range(3):
            await conn.execute(insert, (n,), prepare=True)
        proxy.cut_at(lambda text: text.startswith("insert"), "after")
        with pytest.raises(psycopg.OperationalError):
            await conn.execute(insert, (3,))
        assert db.execute("select count(*) from t").fetchone() == (4,)


async def test_reset_is_a_reset(dsn: str) -> None:
    """RST: the client's socket fails with ECONNRESET instead of ending."""
    async with Proxy(upstream(dsn)) as proxy:
        loop = asyncio.get_running_loop()
        with socket.socket() as raw:
            raw.setblocking(False)
            await loop.sock_connect(raw, ("127.0.0.1", proxy.port))
            await eventually(lambda: proxy.connections == 1, "it is connected")
            proxy.reset()
            with pytest.raises(ConnectionResetError):
                await loop.sock_recv(raw, 1)


async def test_a_server_that_is_away_refuses(dsn: str) -> None:
    """F5: without a server behind it the proxy refuses; with one again, the same port serves it."""
    place: list[Upstream] = ["/nowhere/.s.PGSQL.5432"]
    async with Proxy(lambda: place[0]) as proxy:
        with pytest.raises(psycopg.OperationalError):
            await connect(dsn, proxy)
        assert proxy.counts["refused"] >= 1
        place[0] = upstream(dsn)()
        conn = await connect(dsn, proxy)
        await conn.close()


def test_messages_in_pieces() -> None:
    """However a stream is split, its messages come out whole and in order, and statements are recognized by name."""
    startup = (12).to_bytes(4) + (196608).to_bytes(4) + b"a\0\0\0"
    parse = b"P" + (4 + 3 + 7 + 2).to_bytes(4) + b"s1\0commit\0\0\0"
    bind = b"B" + (4 + 1 + 3 + 6).to_bytes(4) + b"\0s1\0" + b"\0" * 6
    query = b"Q" + (4 + 7).to_bytes(4) + b"commit\0"
    stream = startup + parse + bind + query
    for size in (1, 2, 7, len(stream)):
        requests = Requests()
        found = [one for at in range(0, len(stream), size) for one in requests.feed(stream[at : at + size])]
        assert [message for message, _ in found] == [startup, parse, bind, query]
        assert [text for _, text in found] == [None, None, "commit", "commit"]
        assert requests.rest() == b""


def test_what_is_no_protocol_goes_through() -> None:
    """A stream that is encrypted, or is not PostgreSQL's, passes through unchanged."""
    requests = Requests()
    ssl = (8).to_bytes(4) + (80877103).to_bytes(4)
    assert requests.feed(ssl) == [(ssl, None)]
    requests.encrypted()
    assert requests.feed(b"\x16\x03\x01anything") == [(b"\x16\x03\x01anything", None)]
    other = Requests()
    assert b"".join(message for message, _ in other.feed(b"\0\0\0\0rubbish")) == b"\0\0\0\0rubbish"


def test_the_end_of_an_answer() -> None:
    """ReadyForQuery at the end marks the end of an answer, whatever the state of the transaction."""
    assert is_ready(b"C\0\0\0\x0bCOMMIT\0Z\0\0\0\x05I")
    assert is_ready(b"Z\0\0\0\x05T")
    assert not is_ready(b"C\0\0\0\x0bCOMMIT\0")
