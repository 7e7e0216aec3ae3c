"""What the tests stand on: a database that a test has used is as a new one for the next test."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql

from support.database import Connection
from support.databases import Aside, Database, Used
from support.hands import Hands, put

pytestmark = pytest.mark.direct("it resets databases, which is not done through a pooler")


@pytest.fixture
def used(aside: Aside) -> Iterator[Database]:
    """A database that no test has used, with a session of its own."""
    made = aside.take(new=True)
    made.session = psycopg.connect(made.dsn, autocommit=True)
    yield made
    aside.drop(made)


def stored(conn: Connection) -> dict[str, Any]:
    """All rows and sequences of the schema."""
    kinds = {
        "r": sql.SQL("select array_agg(t::text order by t::text) from {} t"),
        "S": sql.SQL("select last_value, is_called from {}"),
    }
    found = conn.execute("select relname, relkind from pg_class where relnamespace = 'tallybook'::regnamespace")
    return {
        name: conn.execute(kinds[kind].format(sql.Identifier("tallybook", name))).fetchone()
        for name, kind in found.fetchall() if kind in kinds
    }  # fmt: skip


def test_a_reset_database_has_the_rows_of_a_new_one(used: Database, aside: Aside) -> None:
    """Jobs in all states, limits, schedules and settings of the session are gone; the ids begin anew."""
    db = used.session
    assert db is not None
    new = stored(db)
    db.execute(
        "select tallybook.queue_set('q'), tallybook.concurrency_limit_set('c', 2),"
        " tallybook.rate_limit_set('r', 2, '1 s'), tallybook.schedule_set('s', 't', every => '1 min')"
    )
    first, hands = put(db, unique_key="u"), Hands(db)
    put(db), put(db), put(db, order_key="o"), put(db, run_at="2040-01-01")
    started = hands.start()
    hands.complete(started[0])
    hands.fail(started[1], final=True)
    assert len({name for name, rows in stored(db).items() if rows != new[name]}) > 15
    db.execute("set time zone 'Asia/Tokyo'; set role pg_monitor; select pg_advisory_lock(7)")
    aside.template.reset(used)
    assert stored(db) == new
    assert db.execute("select current_user = session_user, current_setting('TimeZone')").fetchone() == (True, "UTC")
    assert db.execute(
        "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()"
    ).fetchone() == (0,)
    assert put(db, unique_key="u") == first


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("create table own (id int)", "the catalog was changed"),
        ("alter table tallybook.node alter column name set default 'x'", "the catalog was changed"),
        ("alter function tallybook.fold stable", "the catalog was changed"),
        ("drop view tallybook.attempt cascade", "the catalog was changed"),
        ("grant select on tallybook.node to public", "the catalog was changed"),
        ("alter database {} set work_mem = '1MB'", "the catalog was changed"),
        ("analyze tallybook.installation", "the catalog was changed"),
        ("begin; select tallybook.enqueue('t', 'q'); prepare transaction '{}'", "a prepared transaction is left"),
        ("insert into tallybook.api_nonce select 'k', n, now() from generate_series(1, 1001) n", "tables have grown"),
    ],
)
def test_a_changed_database_is_not_used_again(used: Database, aside: Aside, statement: str, reason: str) -> None:
    """What a reset does not undo ends the database's use, also after a reset that found everything as it was."""
    aside.template.reset(used)
    with psycopg.connect(used.dsn, autocommit=True) as conn:
        for one in statement.format(used.name, used.name).split("; "):
            conn.execute(one)  # type: ignore[call-overload]
    with pytest.raises(Used, match=reason):
        aside.template.reset(used)


def test_a_database_with_a_session_is_not_used_again(used: Database, aside: Aside) -> None:
    """A session that a test has left open ends the database's use."""
    with psycopg.connect(used.dsn), pytest.raises(Used, match="a session is left"):
        aside.template.reset(used)
