"""History in a running worker, in Python and on the command line."""

import json
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from support.cli import invoke
from support.workers import eventually, working
from tallybook import App, HeldRange, RetentionInfo
from tallybook.errors import ConfigError, InvalidArgument, UnknownJob


async def test_a_worker_prunes(app: App, dsn: str, db: Any) -> None:
    """S3-21: a running worker prunes history past its retention, keeps younger history, and the run is recorded."""

    @app.task
    async def note(n: int) -> None: ...

    app.services.set("prune", "100 ms").sync(db)
    db.execute("select tallybook.enqueue('default', 'note', jsonb_build_object('n', n)) from generate_series(1, 20) n")
    async with working(app, dsn):
        await eventually(
            lambda: db.execute("select count(*) = 20 from tallybook.outcome").fetchone()[0], "all have ended"
        )
        db.execute(
            "select tallybook._range_split(f.parents, 0, pg_snapshot_xmax(pg_current_snapshot())::text::numeric + 200)"
            " from tallybook._families() f where f.name = 'default'"
        )
        old = "update tallybook.outcome set ended_at = ended_at - interval '8 days'"
        db.execute(old.replace("tallybook.outcome", "only tallybook.outcome_default_1"))
        db.execute("update only tallybook.claim_default_1 set claimed_at = claimed_at - interval '8 days'")
        db.execute("do $$ begin for n in 1..2000 loop perform pg_current_xact_id(); commit; end loop; end $$")
        young = db.execute("select tallybook.enqueue('default', 'note', '{\"n\": 21}')").fetchone()[0]
        await eventually(
            lambda: (
                db.execute("update tallybook.service set last_run_at = null where name = 'prune'").rowcount
                and db.execute("select count(*) = 1 from tallybook.entry").fetchone()[0]
            ),
            "they have gone",
        )
        await eventually(
            lambda: db.execute("select last_run_at from tallybook.service where name = 'prune'").fetchone()[0],
            "it is on record",
        )
        await eventually(lambda: app.get(young).sync(db).state == "completed", "the younger one has ended")
    assert db.execute("select entries from tallybook.pruned").fetchall() == [(20,)]
    with pytest.raises(UnknownJob, match=r"no job|unknown job"):
        app.cancel(3).sync(db)


def test_retention_in_python(app: App, db: Any) -> None:
    """S3-21: retention periods are listed and set in Python; invalid ones are refused."""
    kept = {one.name: one.keep for one in app.history.list().sync(db)}
    assert kept == {
        "brief": timedelta(hours=1), "default": timedelta(days=7), "long": timedelta(days=90),
        "dead": timedelta(days=30), "fires": timedelta(days=90), "audit": timedelta(days=90),
    }  # fmt: skip
    assert app.history.set("brief", "2 h").sync(db) is True
    assert app.history.set("brief", timedelta(hours=2)).sync(db) is False
    assert isinstance(app.history.list().sync(db)[0], RetentionInfo)
    with pytest.raises(InvalidArgument, match="no retention class"):
        app.history.set("short", "2 h").sync(db)
    with pytest.raises(InvalidArgument, match="cannot be kept"):
        app.history.set("brief", "1 s").sync(db)
    with pytest.raises(ConfigError):
        app.history.set("brief", "soon").sync(db)


async def test_held_ranges_in_python(app: App, db: Any, dsn: str) -> None:
    """S3-21: Python and the command line show why a range is held."""
    db.execute("select tallybook.enqueue('q', 'work')")
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        assert await app.history.held().on(conn) == []
    db.execute(
        "insert into tallybook.history_range (leaf, files, quiet_since, open, held)"
        " values ('entry_default_1', '{}', now() - interval '8 days', 1, 'open jobs')"
    )
    (held,) = app.history.held().sync(db)
    assert isinstance(held, HeldRange)
    assert (held.name, held.lower, held.open_jobs, held.why) == ("default", 0, 1, "open jobs")
    assert held.due_at is not None
    assert "open jobs" in invoke("history", "held", to=dsn).output
    assert json.loads(invoke("history", "held", "--json", to=dsn).output)[0]["open_jobs"] == 1


def test_retention_on_the_command_line(dsn: str) -> None:
    """S3-21: tallybook history lists and sets retention; an unknown class is an error with an exit code."""
    assert "brief" in invoke("history", "list", to=dsn).output
    assert invoke("history", "held", to=dsn).output == "nothing is held\n"
    assert invoke("history", "set", "brief", "2h", to=dsn).output == "brief is kept for 2 hours\n"
    assert invoke("history", "set", "brief", "2h", to=dsn).output == "brief is kept for 2 hours already\n"
    listed = {one["name"]: one["keep"] for one in json.loads(invoke("history", "list", "--json", to=dsn).output)}
    assert listed["brief"] == 7200.0
    refused = invoke("history", "set", "short", "2h", to=dsn)
    assert refused.exit_code != 0 and "no retention class" in refused.output
