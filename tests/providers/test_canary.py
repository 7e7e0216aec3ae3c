"""A known secret passes through a real worker, the database, its server and the command line, and none shows it."""

import base64
import json
import pickle
import signal
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import sql

from support import canary
from support.cli import Command, invoke
from support.clusters import cluster
from support.database import dump
from support.paths import TESTS
from support.waiting import wait_until
from tallybook import App
from tallybook._cli import cli
from tallybook._db.migrate import migrate
from tallybook._model.provider import new_key

CANARY, FORMER, MOVED = "sk-canary/4711+ä", "sk-former/0815", "sk-moved/2342"
CONTROL = "may-be-seen-2342"
KEY = new_key("k1")


def forms(text: str) -> set[str]:
    """Return the forms in which a text could leak: plain, and in encodings without encryption."""
    raw = text.encode()
    return {
        text, text[3:-1], quote(text), raw.hex(), base64.b64encode(raw).decode()[:-4], json.dumps(text)[1:-1],
        repr(raw)[2:-1], text.encode("utf-16-le").hex(),
    }  # fmt: skip


FORBIDDEN = forms(CANARY) | forms(FORMER) | forms(MOVED)
KEYS = {KEY.split(":")[1][:-4], base64.b64decode(KEY.split(":")[1]).hex()}


def found_in(text: str) -> set[str]:
    return {one for one in FORBIDDEN | KEYS if one in text}


async def test_the_canary_is_nowhere(dsn: str, db: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S1-12, S4-06: no secret is in the worker's debug output, the database, errors, results or on the command line.

    The control: a text in the same provider's settings, which may be seen, is found in each of these places.
    """

    def run(dsn: str, *words: str, stdin: str | None = None) -> str:
        result = CliRunner().invoke(cli, [*words, "--dsn", dsn], input=stdin)
        return f"{words[:2]}: {result.exit_code}\n{result.output}{result.exception!r}\n"

    lines = """\
provider list
provider list --json
provider show acme
provider show acme --json
provider test acme
provider test
provider test broken --json
provider rotate
provider set-secret acme api_key {canary}
provider set-secret acme api_key={canary}
provider set-secret acme api_key --{canary}
provider set-secret acme api_key --from-env {canary}
provider add beta --kind x {canary}
provider add beta --kind x --secret x={canary}
provider add beta --kind x --secret-env x={canary}
provider add beta --kind x --secret-env {canary}
job list
dead list"""
    monkeypatch.setenv("TALLYBOOK_KEYS", KEY)
    monkeypatch.setenv("TALLYBOOK_DEBUG", "1")
    app = App("canary", dsn=dsn)
    commands = run(dsn, "provider", "add", "acme", "--kind", "x", "--settings", json.dumps({"note": CONTROL}))
    commands += run(dsn, "provider", "set-secret", "acme", "api_key", stdin=FORMER + "\n")
    commands += run(dsn, "provider", "set-secret", "acme", "api_key", stdin=CANARY + "\n")
    key = (await app.providers.get("acme")).secrets["api_key"]
    assert key.reveal() == CANARY and key.previous is not None and key.previous.reveal() == FORMER

    options = ("-A", "support.canary:app", "--log-level", "debug", "--log-format", "json", "--queues", "default")
    environment = {"PYTHONPATH": str(TESTS), "TALLYBOOK_KEYS": KEY}
    with Command(tmp_path, "worker", *options, dsn=dsn, **environment) as worker:
        worker.says("lifespan")
        await app.providers.set("broken", kind="x", active=True)
        await app.providers.set_secret("broken", "api_key", MOVED)
        db.execute(
            "update tallybook.provider_secret set nonce = decode(repeat('00', 12), 'hex') where provider = 'broken'"
        )
        jobs = [one.enqueue_sync(db) for one in canary.JOBS]
        state = "select count(*) from tallybook.job where state in ('completed', 'dead')"
        wait_until(lambda: db.execute(state).fetchone()[0] == len(jobs) + 1, "all have ended", seconds=40)
        worker.send(signal.SIGTERM)
        assert worker.ended() == 0
        output = worker.output

    ends = {row[0]: row[1] for row in db.execute("select task, state from tallybook.job")}
    assert ends.pop("fail") == ends.pop("broken") == ends.pop("bury") == "dead" and set(ends.values()) == {"completed"}
    for line in lines.splitlines():
        commands += run(dsn, *line.format(canary=CANARY).split())
    for job in jobs:
        commands += run(dsn, "job", "show", str(job.id))
    commands += run(dsn, "provider", "set-secret", "broken", "api_key", stdin=CANARY)
    monkeypatch.setenv("TALLYBOOK_KEYS", f"k9{KEY}")
    commands += run(dsn, "provider", "test", "acme") + run(dsn, "provider", "rotate")
    monkeypatch.setenv("TALLYBOOK_KEYS", KEY.partition(":")[2])
    commands += run(dsn, "provider", "test", "acme")

    errors = json.dumps([row[0] for row in db.execute("select error from tallybook.outcome where error is not null")])
    errors += json.dumps([row[0] for row in db.execute("select errors from tallybook.dead")])
    results = json.dumps(
        [row[0] for row in db.execute("select result from tallybook.outcome where result is not null")]
    )
    progress = str(db.execute("select * from tallybook.progress").fetchall())
    sinks = {"output": output, "database": dump(db), "errors": errors, "results": results, "commands": commands}
    assert {name: found_in(text) for name, text in sinks.items()} == {name: set() for name in sinks}
    assert {name for name, text in sinks.items() if CONTROL in text} == set(sinks), progress
    for said in (
        "cannot ship",
        "refused",
        "it cannot be decrypted with key 'k1'",
        "asked",
        "acme = Provider(name='acme'",
    ):
        assert said in output, said
    assert errors.count("its result was not kept") == 2


async def test_the_search_finds_each_form() -> None:
    """The negative control: each form is found in a text that has it."""
    for one in FORBIDDEN | KEYS:
        assert found_in(f"...{one}...")
    assert found_in(str(pickle.dumps(CANARY))) and found_in(repr(CANARY.encode())) and found_in(json.dumps([CANARY]))
    assert not found_in("sk-canary of somebody else")


async def test_a_secret_in_the_clear_would_be_found(dsn: str, db: Any) -> None:
    """The negative control: the same dump finds a secret that is stored unencrypted."""
    db.execute("select tallybook.provider_set('acme', 'x')")
    db.execute(
        "select tallybook._provider_secret_set('acme', 'api_key', null, 'k1', %s, %s, null, null, null)",
        (b"n" * 12, CANARY.encode()),
    )
    assert found_in(dump(db))


async def test_the_servers_log_and_sessions_do_not_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """S1-12: with all statements and parameters logged, no secret, former secret or key is in log or pg_stat_activity.

    The control: a text in the same provider's settings, which may be seen, is found in both.
    """
    every = {
        "log_statement": "all", "log_parameter_max_length": "-1", "log_parameter_max_length_on_error": "-1",
        "track_activity_query_size": "65536",
    }  # fmt: skip
    other = new_key("k2")
    monkeypatch.setenv("TALLYBOOK_KEYS", KEY)
    with cluster(**every) as server:
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
