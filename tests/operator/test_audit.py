"""The audit and the nonces of signed requests: what is kept, refused and swept."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from support.cli import invoke
from support.waiting import wait_until
from tallybook import App
from tallybook._app.history import audit_add
from tallybook._db import sync
from tallybook.errors import ConfigError, InvalidArgument

NOW = datetime(2031, 5, 1, 12, tzinfo=UTC)
S = timedelta(seconds=1)


def take(db: Any, nonce: str, signed_at: datetime, at: datetime, key: str = "k") -> str:
    return str(db.execute("select tallybook.nonce_take(%s, %s, %s, %s)", [key, nonce, signed_at, at]).fetchone()[0])


def sweep(db: Any, at: datetime) -> int:
    return int(db.execute("select swept from tallybook._sweep(%s)", [at]).fetchone()[0])


@pytest.mark.servers
def test_a_nonce_serves_once_per_key(db: Any) -> None:
    """S2-12: a nonce is accepted once per key; for another key, or with another nonce, the answer is fresh."""
    assert take(db, "n", NOW, NOW) == "fresh"
    assert take(db, "n", NOW, NOW + S) == "used"
    assert take(db, "n", NOW, NOW, key="other") == "fresh"
    assert take(db, "m", NOW, NOW) == "fresh"


@pytest.mark.parametrize(("seconds", "said"), [(-301, "late"), (-300, "fresh"), (300, "fresh"), (301, "early")])
def test_the_window_is_300_seconds(db: Any, seconds: int, said: str) -> None:
    """S2-12: a request is in time up to 300 s before and after the database's clock; otherwise it uses up no nonce."""
    assert take(db, "n", NOW + seconds * S, NOW) == said
    kept = db.execute("select count(*) from tallybook.api_nonce").fetchone()[0]
    assert kept == (said == "fresh")


def test_a_nonce_of_what_was_rolled_back_is_fresh(db: Any) -> None:
    """S2-12: a nonce is rolled back with its transaction, so the request can be sent again."""
    with db.transaction(force_rollback=True):
        assert take(db, "n", NOW, NOW) == "fresh"
    assert take(db, "n", NOW, NOW) == "fresh"


@pytest.mark.direct("looks at the sessions that wait")
@pytest.mark.parametrize("committed", [True, False], ids=["committed", "rolled back"])
def test_of_two_at_the_same_moment_one_waits(db: Any, connect: Any, committed: bool) -> None:
    """S2-12: a replica waits while another one serves the same nonce: after a commit it is used, else fresh."""
    first, second = connect(autocommit=False), connect()
    assert take(first, "n", NOW, NOW) == "fresh"
    waiting = "select count(*) from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
    pid = second.execute("select pg_backend_pid()").fetchone()[0]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(take, second, "n", NOW, NOW)
        wait_until(lambda: db.execute(waiting, [pid]).fetchone()[0] > 0, "the second waits")
        assert not asked.done()
        if committed:
            first.commit()
        else:
            first.rollback()
        assert asked.result(10) == ("used" if committed else "fresh")


def test_nonces_go_after_two_windows(db: Any) -> None:
    """S2-12: a nonce is kept while a request that was signed ahead of the clock is in time, and is swept afterwards."""
    assert take(db, "n", NOW + 300 * S, NOW) == "fresh"
    last = NOW + 600 * S
    assert sweep(db, last) == 0
    assert take(db, "n", NOW + 300 * S, last) == "used"
    assert sweep(db, last + S) == 1
    assert take(db, "n", NOW + 300 * S, last + S) == "late"


def test_the_audit_goes_after_its_retention(db: Any) -> None:
    """S2-12: an audit row is kept for 90 days, or for the retention that is set; younger rows stay."""
    put = "select tallybook.audit_add(%s, 'api', %s, '{}', '{}', %s)"
    day = timedelta(days=1)
    db.execute(put, ["ada", "pause", NOW])
    db.execute(put, ["ada", "resume", NOW + 10 * day])
    assert sweep(db, NOW + 89 * day) == 0
    db.execute("select tallybook.retention_set('audit', '1 year')")
    assert sweep(db, NOW + 91 * day) == 0
    db.execute("select tallybook.retention_set('audit', '90 days')")
    assert sweep(db, NOW + 91 * day) == 1
    assert [row[0] for row in db.execute("select action from tallybook.audits")] == ["resume"]


@pytest.mark.parametrize(
    ("actor", "action", "target", "problem"),
    [
        ("", "pause", {}, "actor"),
        ("a" * 201, "pause", {}, "actor"),
        ("ada", "", {}, "action"),
        ("ada", "pause", {"x": "y" * 9000}, "target"),
    ],
)
def test_what_is_no_audit_row_is_refused(db: Any, actor: str, action: str, target: Any, problem: str) -> None:
    """An audit row without an actor or action, or with a long actor or a large target, is refused."""
    with pytest.raises(InvalidArgument, match=problem):
        sync.run(db, audit_add(actor, "api", action, target))


async def test_audits_in_pages(app: App, db: Any, dsn: str) -> None:
    """S2-12: `audits` lists rows newest first, page by page, by actor, action or both, sync and async."""
    for n in range(5):
        sync.run(db, audit_add("ada" if n % 2 else "key-1", "web", f"verb{n % 3}", {"n": n}, {"done": True}))
    rows = app.audit.list(max_rows=2).sync(db)
    assert [row.target["n"] for row in rows] == [4, 3]
    assert [row.target["n"] for row in app.audit.list(before=rows[-1].id).sync(db)] == [2, 1, 0]
    assert [row.target["n"] for row in app.audit.list(actor="ada").sync(db)] == [3, 1]
    assert [row.target["n"] for row in app.audit.list(action="verb0").sync(db)] == [3, 0]
    assert [row.target["n"] for row in app.audit.list(actor="ada", action="verb0").sync(db)] == [3]
    assert rows[0].done == {"done": True} and rows[0].via == "web"
    app.dsn = dsn
    assert await app.audit.list(max_rows=2) == rows
    with pytest.raises(ConfigError, match="max_rows"):
        app.audit.list(max_rows=0).sync(db)
    with pytest.raises(ConfigError, match="actor"):
        app.audit.list(actor="a\0b").sync(db)


@pytest.mark.parametrize("which", [{}, {"actor": "a7"}, {"action": "v3"}])
def test_a_page_of_the_audit_is_read_by_index(app: App, db: Any, which: dict[str, str]) -> None:
    """A page of the audit reads only its own rows, by index, however many rows there are."""
    db.execute(
        "insert into tallybook.audit (at, actor, via, action, target, done)"
        " select now(), 'a' || n % 100, 'api', 'v' || n % 10, '{}', '{}' from generate_series(1, 20000) n"
    )
    db.execute("vacuum analyze tallybook.audit")
    call: Any = app.audit.list(**which, max_rows=5)._take()
    plan = db.execute("explain (analyze, format json) " + call.sql, call.params).fetchone()[0][0]["Plan"]

    def nodes(node: dict[str, Any]) -> list[dict[str, Any]]:
        return [node, *(inner for child in node.get("Plans", []) for inner in nodes(child))]

    scans = [node for node in nodes(plan) if "Relation Name" in node]
    assert [node["Node Type"] for node in scans] == ["Index Scan"]
    assert scans[0]["Actual Rows"] == 5 and scans[0].get("Rows Removed by Filter", 0) == 0


def test_audit_on_the_command_line(dsn: str, db: Any) -> None:
    """`tallybook audit` lists rows as a table and as JSON, without the control characters of a name."""
    sync.run(db, audit_add("ada\x1b[31m", "web", "pause", {"queue": "mail"}, {"paused": True}))
    sync.run(db, audit_add("key-1", "api", "retry", {"job": 7}))

    run = partial(invoke, "audit", to=dsn)

    lines = run().output.splitlines()
    assert lines[0].split() == ["id", "at", "actor", "via", "action", "target", "done"]
    assert lines[1].split()[3:] == ["key-1", "api", "retry", "job=7"]
    assert lines[2].split()[3:] == ["ada", "web", "pause", "queue=mail", "paused=true"]
    (row,) = json.loads(run("--actor", "key-1", "--json").output)
    assert (row["action"], row["target"], row["done"]) == ("retry", {"job": 7}, {})
    assert run("--before", "1").output == "nothing was changed\n"
