"""Pages, lists and metrics from a real hot standby; actions go to the primary, and lag or loss is shown."""

import asyncio
import re
from collections.abc import Iterator

import psycopg
import pytest

from support.cli import Command, invoke
from support.clusters import streaming
from support.dashboard import visiting, walk
from support.database import one
from support.waiting import wait_until
from tallybook import App
from tallybook._db.pooler import Standby
from tallybook.embedded import Server
from tallybook.errors import ConfigError
from tallybook.web import dashboard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.direct("has servers of its own")]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Server, Server]]:
    with streaming() as both:
        yield both


def caught_up(primary: Server, standby: Server) -> None:
    """Wait until the standby has replayed all that the primary has written by now."""
    with psycopg.connect(primary.dsn("shop"), autocommit=True) as conn:
        written = one(conn, "select pg_current_wal_lsn()::text")
    with psycopg.connect(standby.dsn("shop"), autocommit=True) as conn:
        wait_until(lambda: one(conn, "select pg_last_wal_replay_lsn() >= %s::pg_lsn", written), "it has caught up")


def put(primary: Server) -> int:
    with psycopg.connect(primary.dsn("shop"), autocommit=True) as conn:
        return int(one(conn, "select tallybook.enqueue('mail', 'send')"))


def test_every_page_is_read_from_the_standby(pair: tuple[Server, Server]) -> None:
    """Each linked page works on a hot standby and shows its lag; an action is done on the primary."""
    primary, standby = pair
    job = put(primary)
    caught_up(primary, standby)

    async def look() -> None:
        site = dashboard(App("shop"), dsn=primary.dsn("shop"), read_dsn=standby.dsn("shop"), read_only=False)
        try:
            async with visiting(site) as visitor:
                pages = await walk(visitor)
                assert {page: answer.status for page, answer in pages.items() if answer.status != 200} == {}
                assert all(
                    re.search(r"Pages are read from a standby, [\d.]+ s behind", answer.text)
                    for answer in pages.values()
                )
                metrics = (await visitor.get("/metrics")).text
                assert "tallybook_up 1" in metrics and re.search(r"^tallybook_standby_lag_seconds \d", metrics, re.M)
                await visitor.post("/job/cancel", job=job, reason="", back="/jobs")
        finally:
            await site.aclose()

    asyncio.run(look())
    with psycopg.connect(primary.dsn("shop"), autocommit=True) as conn:
        assert one(conn, "select tallybook.state(%s)", job) == "cancelled"


def test_a_standby_that_is_behind_shows_what_it_has(pair: tuple[Server, Server]) -> None:
    """The command line lists only what the standby has replayed, and says that it reads from a standby."""
    primary, standby = pair
    caught_up(primary, standby)
    conn = psycopg.connect(standby.dsn("shop"), autocommit=True)
    conn.execute("select pg_wal_replay_pause()")
    try:
        job = put(primary)
        listed = invoke("job", "list", "--json", "--read-dsn", standby.dsn("shop"), to=primary.dsn("shop"))
        assert f'"id":{job},' not in listed.stdout and listed.stderr.startswith("read from a standby, ")
        assert f'"id":{job},' in invoke("job", "list", "--json", to=primary.dsn("shop")).stdout
    finally:
        conn.execute("select pg_wal_replay_resume()")
        conn.close()
    caught_up(primary, standby)
    listed = invoke("job", "list", "--json", "--read-dsn", standby.dsn("shop"), to=primary.dsn("shop"))
    assert f'"id":{job},' in listed.stdout and " s behind" in listed.stderr


@pytest.mark.parametrize(
    "standby, told, behind",
    [
        (Standby(True, True, 0.2), "read from a standby, 0.2 s behind", False),
        (Standby(True, True, 30.0), "read from a standby, 30.0 s behind", True),
        (Standby(True, False, 4.0), "read from a standby, 4.0 s behind, which receives nothing from its primary", True),
        (Standby(True, True, None), "read from a standby, by an unknown time behind", True),
        (Standby(False, False, 0.0), "read from a primary: no standby is at this address", False),
    ],
)
def test_how_a_standby_is_told(standby: Standby, told: str, behind: bool) -> None:
    """A lag of 30 s, an unknown lag or no primary is a warning; an address of a primary is called that."""
    assert (str(standby), standby.is_behind) == (told, behind)


def test_a_standby_that_is_gone_is_told(pair: tuple[Server, Server]) -> None:
    """Without its standby each list answers 503 and names the standby, and actions still work."""
    primary, _ = pair
    job = put(primary)

    async def look() -> None:
        site = dashboard(
            App("shop"), dsn=primary.dsn("shop"), read_dsn="host=127.0.0.1 port=1 dbname=shop", read_only=False
        )
        try:
            async with visiting(site) as visitor:
                paths = ("/jobs", "/dead", "/subjects", "/trace?subject=any")
                for page in await asyncio.gather(*map(visitor.get, paths)):
                    assert page.status == 503 and "the standby host=127.0.0.1 port=1" in page.text
                await visitor.post("/job/cancel", job=job, reason="", back="/jobs")
        finally:
            await site.aclose()

    asyncio.run(look())
    with psycopg.connect(primary.dsn("shop"), autocommit=True) as conn:
        assert one(conn, "select tallybook.state(%s)", job) == "cancelled"


def test_the_command_shows_the_standby(pair: tuple[Server, Server], tmp_path: object) -> None:
    """`tallybook web --read-dsn` prints at its start that it reads from a standby; a missing one is an error."""
    primary, standby = pair
    words = ("web", "--port", "0", "--read-dsn", standby.dsn("shop"))
    with Command(tmp_path, *words, dsn=primary.dsn("shop")) as web:  # type: ignore[arg-type]
        web.says("the dashboard is at ")
        assert "read from a standby, " in web.output
    away = invoke("web", "--port", "0", "--read-dsn", "host=127.0.0.1 port=1 dbname=shop", to=primary.dsn("shop"))
    assert away.exit_code == 1 and "cannot reach PostgreSQL at host=127.0.0.1 port=1" in away.stderr


def test_a_standby_is_of_one_database(dsn: str) -> None:
    """A standby beside several nodes is refused, by the function and by the command."""
    with pytest.raises(ConfigError, match="is a standby of one database"):
        dashboard(App("shop"), dsn=dsn, read_dsn=dsn, nodes="all")
    both = invoke("job", "list", "--nodes", "all", "--read-dsn", dsn, to=dsn)
    assert both.exit_code == 2 and "--read-dsn is a standby of one database" in both.stderr
