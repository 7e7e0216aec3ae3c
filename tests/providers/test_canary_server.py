"""A known secret, and the server's own records: its log of every statement and its list of sessions."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import sql

from support.canary_forms import CANARY, CONTROL, FORMER, KEY, found_in
from support.cli import invoke
from support.clusters import cluster
from tallybook import App
from tallybook._db.migrate import migrate
from tallybook._model.keyring import new_key

ALL = {
    "log_statement": "all",
    "log_parameter_max_length": "-1",
    "log_parameter_max_length_on_error": "-1",
    "track_activity_query_size": "65536",
}


async def test_the_servers_log_and_sessions_do_not_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1-12: with all statements and parameters logged, no secret, former secret or key is in log or pg_stat_activity.

    The control: a text in the same provider's settings, which may be seen, is found in both.
    """
    other = new_key("k2")
    monkeypatch.setenv("TALLYBOOK_KEYS", KEY)
    with cluster(**ALL) as server:
        dsn = server.dsn()
        with psycopg.connect(dsn, autocommit=True) as watcher, psycopg.connect(dsn, autocommit=True) as talker:
            migrate(watcher)
            shown: list[str] = []

            def look() -> None:
                shown.extend(str(row[0]) for row in watcher.execute("select query from pg_stat_activity").fetchall())

            app = App("canary", dsn=dsn)
            async with app.open():
                await app.providers.set("acme", kind="x", settings={"note": CONTROL})
                for secret in (FORMER, CANARY):
                    await app.providers.set_secret("acme", "api_key", secret)
                    look()
                command = ("provider", "set-secret", "acme", "other", "--dsn", dsn)
                assert invoke(*command, typed=CANARY + "\n").exit_code == 0
                monkeypatch.setenv("TALLYBOOK_KEYS", f"{other},{KEY}")
                app.providers.forget()
                assert (await app.providers.get("acme")).secrets["api_key"].reveal() == CANARY
                look()
                talker.execute(sql.SQL("select {}").format(CONTROL))
                look()
            rotated = App("canary", dsn=dsn)
            async with rotated.open():
                assert (await rotated.providers.rotate()).rotated == 3
                look()
        log: Any = server.log_path.read_text("utf-8", "replace")
    assert log.count("_provider_secret_set") >= 3 and "_provider_secret_reseal" in log
    for text in (log, "\n".join(shown)):
        assert CONTROL in text
        assert found_in(text) == set() and other.split(":")[1][:-4] not in text
