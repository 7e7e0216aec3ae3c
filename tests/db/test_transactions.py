"""Connections of atomic tasks: libpq connection strings for asyncpg, and the kinds of errors."""

from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa

from tallybook._db.transactions import asyncpg_url, conflicts, gone, interrupted


@pytest.mark.parametrize(
    ("dsn", "expected"),
    [
        ("host=db dbname=shop user=ada", {"host": "db", "dbname": "shop", "user": "ada"}),
        (
            "postgresql://ada:p%40ss%2Fw@db:6432/shop",
            {"user": "ada", "password": "p@ss/w", "host": "db", "port": "6432", "dbname": "shop"},
        ),
        ("host=a,b,c port=6432", {"host": "a,b,c", "port": "6432,6432,6432"}),
        ("host=a,b port=6432,", {"host": "a,b", "port": "6432,5432"}),
        (
            "postgresql://a:1,b:2/shop?target_session_attrs=read-write",
            {"host": "a,b", "port": "1,2", "dbname": "shop", "target_session_attrs": "read-write"},
        ),
        ("host=/run/pg dbname='my shop'", {"host": "/run/pg", "dbname": "my shop"}),
        ("host=db hostaddr=10.0.0.1 sslmode=require keepalives_idle=5", {"host": "10.0.0.1", "sslmode": "require"}),
        ("host=db hostaddr=10.0.0.1 sslmode=verify-full", {"host": "db", "sslmode": "verify-full"}),
        ("", {}),
    ],
)
def test_a_connection_string_in_asyncpgs_words(dsn: str, expected: dict[str, str]) -> None:
    """S5-03: hosts, sockets, passwords, TLS and the name to verify are kept; what asyncpg would send as a server
    setting is dropped.
    """
    url = asyncpg_url(dsn)
    assert {name: value[0] for name, value in parse_qs(urlsplit(url).query).items()} == expected


async def test_asyncpg_connects_where_psycopg_does(dsn: str, db: Any) -> None:
    """S5-03: the same string leads to the same database, even after a host that does not exist."""
    given = psycopg.conninfo.conninfo_to_dict(dsn)
    two = psycopg.conninfo.make_conninfo(dsn, host=f"/nowhere,{given['host']}")
    for text in (dsn, two):
        conn = await asyncpg.connect(asyncpg_url(text))
        assert await conn.fetchval("select current_database()") == db.info.dbname
        await conn.close()


async def test_errors_are_told_apart_in_every_librarys_words(dsn: str) -> None:
    """F6 F18: a lost connection, a conflict and a cancelled statement are found by SQLSTATE, in all three libraries."""
    raised = "do $$ begin raise 'x' using errcode = '{}'; end $$"
    found = []
    engine = sa.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    other = await asyncpg.connect(asyncpg_url(dsn))
    for state in ("40001", "40P01", "57014", "57P01", "23505"):
        errors: list[Exception] = []
        with psycopg.connect(dsn) as conn, pytest.raises(psycopg.Error) as first:
            conn.execute(raised.format(state))  # type: ignore[call-overload]
        with engine.connect() as connection, pytest.raises(sa.exc.DBAPIError) as second:
            connection.exec_driver_sql(raised.format(state))
        with pytest.raises(asyncpg.PostgresError) as third:
            await other.execute(raised.format(state))
        errors = [first.value, second.value, third.value]
        found.append((state, {(conflicts(error), interrupted(error), gone(error)) for error in errors}))
    await other.close()
    with pytest.raises(asyncpg.InterfaceError) as closed:
        await other.execute("select 1")
    engine.dispose()
    assert gone(closed.value) and gone(ConnectionRefusedError()) and not gone(ValueError())
    assert found == [
        ("40001", {(True, False, False)}),
        ("40P01", {(True, False, False)}),
        ("57014", {(False, True, False)}),
        ("57P01", {(False, False, True)}),
        ("23505", {(False, False, False)}),
    ]
