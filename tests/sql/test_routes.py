"""Providers and routes in SQL."""

import itertools
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from support.database import one

AT = datetime(2031, 1, 1, tzinfo=UTC)


def resolve(db: Any, data_type: str, symbol: str | None = None) -> str | None:
    return one(db, "select tallybook.provider_resolve(%s, %s)", data_type, symbol)  # type: ignore[no-any-return]


@pytest.fixture
def two(db: Any) -> Any:
    """Two providers."""
    db.execute("select tallybook.provider_set(n, 'market-data') from unnest('{acme,beta}'::text[]) n")
    return db


def test_a_provider_is_created_changed_and_left_alone(db: Any) -> None:
    """S1-12: provider_set reports created, changed or unchanged; null keeps a setting; the time is an argument."""
    put = "select tallybook.provider_set('acme', %s, %s, %s, at => %s)"
    assert one(db, put, "market-data", '{"url": "https://a"}', None, AT) == "created"
    assert (
        one(db, put, None, None, None, AT)
        == one(db, put, "market-data", '{"url":"https://a"}', True, AT)
        == "unchanged"
    )
    assert one(db, put, None, None, False, AT.replace(month=2)) == "changed"
    row = db.execute("select kind, settings, active, created_at, changed_at from tallybook.provider").fetchone()
    assert row == ("market-data", {"url": "https://a"}, False, AT, AT.replace(month=2))
    assert one(db, "select tallybook.provider_drop('acme')") is True
    assert one(db, "select tallybook.provider_drop('acme')") is False


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        ("provider_set('new')", "TB005", 'there is no provider "new"'),
        ("provider_set('')", "TB005", "a provider name has 1 to 64 bytes"),
        ("provider_set('a', E'b\\n')", "TB005", "no control or invisible characters"),
        ("provider_set('a', 'b', '[]')", "TB005", "a JSON object, not array"),
        ("provider_set('a', 'b', jsonb_build_object('x', repeat('x', 100001)))", "TB005", "100,000 bytes"),
        ("route_set('equity', 'nobody')", "TB002", 'there is no provider "nobody"'),
        ("route_set('equity', null)", "TB002", "there is no provider null"),
        ("route_set('', 'acme')", "TB005", "a data type has 1 to 64 bytes"),
        ("route_set('equity', 'acme', '')", "TB005", "a symbol has 1 to 200 bytes"),
        ("provider_drop('beta')", "TB005", 'provider "beta" is used by 1 routes'),
        ("_provider_secret_set('nobody', 'f', null, 'k', '', '', null, null, null)", "TB002", "there is no provider"),
        ("_provider_secret_set('acme', '', null, 'k', '', '', null, null, null)", "TB005", "a field of a secret has 1"),
    ],
)
def test_what_does_not_fit_is_refused(two: Any, call: str, code: str, text: str) -> None:
    """S1-12, S1-14: bad names, settings and routes, and a drop of a provider in use, raise a code and a clear text."""
    two.execute("select tallybook.route_set('bond', 'beta')")
    with pytest.raises(psycopg.Error) as refused:
        two.execute(f"select tallybook.{call}")
    assert refused.value.sqlstate == code and text in str(refused.value)


def test_one_route_for_all_and_one_a_symbol(two: Any) -> None:
    """S1-14: a kind of data has at most one broad route, and at most one for each symbol, even by a plain insert."""
    for symbol in (None, "RELIANCE"):
        assert one(two, "select tallybook.route_set('equity', 'acme', %s)", symbol) == "created"
        assert one(two, "select tallybook.route_set('equity', 'acme', %s)", symbol) == "unchanged"
        assert one(two, "select tallybook.route_set('equity', 'beta', %s)", symbol) == "changed"
        with pytest.raises(psycopg.errors.UniqueViolation):
            two.execute(
                "insert into tallybook.provider_route values ('equity', %s, 'acme', true, now(), now())", (symbol,)
            )
    assert one(two, "select count(*) from tallybook.provider_route") == 2
    assert one(two, "select tallybook.route_drop('equity', 'RELIANCE')") and not one(
        two, "select tallybook.route_drop('equity', 'RELIANCE')"
    )
    assert two.execute("select symbol, provider from tallybook.provider_route").fetchall() == [(None, "beta")]


def test_without_the_indexes_there_would_be_two(two: Any) -> None:
    """Negative control of S1-14: a plain unique constraint accepts two broad routes, since null is not null."""
    two.execute("drop index tallybook.provider_route_broad")
    two.execute("alter table tallybook.provider_route add unique (data_type, symbol)")
    for name in ("acme", "beta"):
        two.execute("insert into tallybook.provider_route values ('equity', null, %s, true, now(), now())", (name,))
    assert one(two, "select count(*) from tallybook.provider_route") == 2


def test_the_specific_rule_goes_before_the_broad_one(two: Any) -> None:
    """S1-15, S1-16: all combinations of routes and providers resolve as by the original's query.

    A route or a provider can be missing, active or inactive. If the specific route or its provider is not active, the
    broad one counts, or the result is null.
    """
    original = """\
select c.name from tallybook.provider_route r join tallybook.provider c on c.name = r.provider
 where r.data_type = %s and (r.symbol = %s or r.symbol is null) and r.active and c.active
 order by r.symbol nulls last limit 1"""
    seen = set()
    for broad, specific, acme, beta in itertools.product(
        (None, True, False), (None, True, False), (True, False), (True, False)
    ):
        two.execute("delete from tallybook.provider_route")
        two.execute(
            "select tallybook.provider_set('acme', active => %s), tallybook.provider_set('beta', active => %s)",
            (acme, beta),
        )
        if broad is not None:
            two.execute("select tallybook.route_set('equity', 'acme', active => %s)", (broad,))
        if specific is not None:
            two.execute("select tallybook.route_set('equity', 'beta', 'RELIANCE', active => %s)", (specific,))
        for symbol in (None, "RELIANCE", "INFY"):
            found = two.execute(original, ("equity", symbol)).fetchone()
            assert resolve(two, "equity", symbol) == (found and found[0])
            seen.add((symbol, found and found[0]))
        assert resolve(two, "bond", "RELIANCE") is None
    assert seen == {
        (None, "acme"), (None, None), ("INFY", "acme"), ("INFY", None),
        ("RELIANCE", "acme"), ("RELIANCE", "beta"), ("RELIANCE", None),
    }  # fmt: skip


def test_resolving_reads_no_more_with_many_routes(two: Any) -> None:
    """S1-15: among 20,000 routes a look-up uses the indexes, even if its plan was made on empty tables."""
    two.execute("select tallybook.provider_resolve('equity', 'x')")
    two.execute(
        "insert into tallybook.provider_route (data_type, symbol, provider, created_at, changed_at)"
        " select 'equity', 's' || n, 'acme', now(), now() from generate_series(1, 20000) n"
    )
    with two.transaction():
        before = (
            "select seq_scan, seq_tup_read from pg_stat_xact_user_tables"
            " where relid = 'tallybook.provider_route'::regclass"
        )
        was = two.execute(before).fetchone()
        assert [resolve(two, "equity", f"s{n}") for n in (1, 20000, 20001)] == ["acme", "acme", None]
        assert two.execute(before).fetchone() == was


def test_two_who_create_the_same_wait_for_no_ever(two: Any, connect: Any) -> None:
    """S1-14: the second of two transactions with the same new route waits for the first, then changes its row."""
    first, second = connect(), connect()
    first.execute("begin")
    assert one(first, "select tallybook.route_set('equity', 'acme', 'RELIANCE')") == "created"
    second.execute("set lock_timeout = '100 ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        second.execute("select tallybook.route_set('equity', 'beta', 'RELIANCE')")
    first.execute("commit")
    assert one(second, "select tallybook.route_set('equity', 'beta', 'RELIANCE')") == "changed"
    assert one(second, "select tallybook.route_set('equity', 'beta', 'INFY')") == "created"


def test_people_see_which_secrets_there_are_and_nothing_more(two: Any) -> None:
    """S1-12: the view provider_field has names, keys and times only; dropping a provider drops its secrets."""
    put = "select tallybook._provider_secret_set('acme', 'api_key', null, 'k1', %s, %s, null, null, null, p_at => %s)"
    assert one(two, put, b"n" * 12, b"c" * 20, AT) is True
    assert one(two, put, b"n" * 12, b"c" * 20, AT) is False  # another call was faster
    cursor = two.execute("select * from tallybook.provider_field")
    assert [column.name for column in cursor.description] == [
        "provider",
        "field",
        "slot",
        "key_id",
        "set_at",
        "sealed_at",
    ]
    assert cursor.fetchall() == [("acme", "api_key", "current", "k1", AT, AT)]
    two.execute("select tallybook.provider_drop('acme')")
    assert one(two, "select count(*) from tallybook.provider_secret") == 0


def test_nobody_is_waited_for_by_a_rotation(two: Any, connect: Any) -> None:
    """A rotation skips a secret that an open transaction changes, without waiting, and does not overwrite it later."""
    put = "select tallybook._provider_secret_set('acme', 'api_key', %s, 'k1', %s, %s, null, null, null)"
    assert one(two, put, None, b"1" * 12, b"c" * 20)
    other = connect()
    other.execute("begin")
    assert one(other, put, b"1" * 12, b"2" * 12, b"d" * 20)
    reseal = "select tallybook._provider_secret_reseal('acme', 'api_key', 'current', %s, 'k2', %s, %s)"
    two.execute("set lock_timeout = '100 ms'")
    assert one(two, reseal, b"1" * 12, b"3" * 12, b"c" * 20) is False
    other.execute("commit")
    assert one(two, reseal, b"1" * 12, b"3" * 12, b"c" * 20) is False  # the secret has changed by now
    assert one(two, "select convert_from(ciphertext, 'utf8') from tallybook.provider_secret") == "d" * 20
    assert one(two, reseal, b"2" * 12, b"3" * 12, b"e" * 20) is True
