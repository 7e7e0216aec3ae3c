"""No stored value and no style of times breaks a reader: rows are read through every page, command and answer."""

import copy
import json
from contextlib import suppress
from typing import Any

import click
import psycopg
import pytest
from click.testing import CliRunner
from psycopg import sql

from support.cli import commands
from support.dashboard import NO_PAGES, covers, routes, visiting, walk
from support.database import Connection
from support.operator_client import OTHER, SECRET, client
from tallybook import App
from tallybook._cli import cli
from tallybook._db.texts import _shallow, loads
from tallybook.extra.operator.routes import OPERATIONS
from tallybook.web import Key, operator_api

NAME = "<b>a/../%2F?x=1&y#z'\"\\ \u202eq"
"""A name with characters that are special in HTML, addresses and terminals. Stored past the checks."""
ESCAPE = "\x1b[31m\x1b]0;owned\x07"
PARTS = {
    "digits": "7" * 4400,
    "deep": "[" * 1200 + "]" * 1200,
    "fraction": "7" * 400 + ".5",
    "escapes": json.dumps(ESCAPE + "</script><script>alert(1)</script>"),
}
VALUE = "{" + ", ".join(f'"{name}": {text}' for name, text in PARTS.items()) + "}"
INSTANTS = ("infinity", "-infinity", "0044-03-15 00:00:00+00 BC", "12026-01-01 00:00:00+00")


def hostile(db: Connection, kind: str) -> None:
    """Jobs in each state, a subject, a schedule, a provider, events and audits, with hostile values of this kind."""
    put = "select tallybook.enqueue('q', 't', %(v)s::jsonb, headers => jsonb_build_object("
    put += "'links', jsonb_build_object('k', 1), 'x', %(v)s::jsonb)"
    if kind == "styles":
        for setting in ("datestyle = 'SQL, DMY'", "intervalstyle = 'sql_standard'"):
            db.execute(sql.SQL("alter database {} set ").format(sql.Identifier(db.info.dbname)) + sql.SQL(setting))
    given = {"v": VALUE if kind == "values" else '{"n": 1}'}
    for more in (")", ")", ")", ", run_at => now() + interval '1 day')", ", unique_key => 'u', order_key => 'o')"):
        db.execute((put + more).encode(), given)
    db.execute("select tallybook.worker_start('w', '{q}')")
    db.execute("select tallybook.claim(1, '{q}', '{3}', '7c9e6679-7425-40de-944b-e07fc1f90ae7')")
    end = "'7c9e6679-7425-40de-944b-e07fc1f90ae7', {}, 1"
    db.execute(f"select tallybook.complete({end.format(1)}, %(v)s::jsonb)".encode(), given)
    error = "jsonb_build_object('type', 'E', 'message', 'm', 'details', %(v)s::jsonb)"
    db.execute(f"select tallybook.fail({end.format(2)}, {error}, final => true)".encode(), given)
    db.execute("select tallybook.subject_push('q', 't', 's', %(v)s::jsonb)", given)
    db.execute("select tallybook.schedule_set('plan', 't', %(v)s::jsonb, queue => 'q', every => '1 day')", given)
    db.execute("select tallybook.provider_set('p', 'kind', %(v)s::jsonb), tallybook.route_set('data', 'p')", given)
    db.execute(
        "select tallybook.queue_set('q'), tallybook.count_event('e')"
        ", tallybook.audit_add('me', 'cli', 'x', %(v)s::jsonb, %(v)s::jsonb)",
        given,
    )
    db.execute("select tallybook.rate_limit_set('r', 1, '1 s'), tallybook.concurrency_limit_set('c', 1)")
    update = sql.SQL("update tallybook.{} set {} = {}")
    if kind in INSTANTS:
        columns = db.execute(
            "select c.relname, a.attname from pg_class c join pg_attribute a on a.attrelid = c.oid"
            " where c.relnamespace = 'tallybook'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition"
            "   and a.attnum > 0 and not a.attisdropped and format_type(a.atttypid, null) = 'timestamp with time zone'"
            "   and c.relname not in ('role', 'installation')"
        ).fetchall()
        spoilt = 0
        for column in columns:
            with suppress(psycopg.Error):  # a constraint
                spoilt += db.execute(update.format(*map(sql.Identifier, column), sql.Literal(kind))).rowcount >= 0
        assert spoilt > 40
    if kind == "names":
        for column in ("lane.queue", "queue.name", "entry.task", "dead.task", "scheduled.task"):
            db.execute(update.format(*map(sql.Identifier, column.split(".")), sql.Literal(NAME + ESCAPE)))
        db.execute("update tallybook.worker set name = %s, queues = array[%s]", [NAME + ESCAPE, NAME + ESCAPE])


_SLOW = (pytest.param(kind, marks=pytest.mark.slow) for kind in (*INSTANTS[1:], "names"))
KINDS = ("values", "infinity", "styles", *_SLOW)


def strict(text: str) -> Any:
    """Read JSON as any other program does: no NaN, no Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(_shallow(text), parse_int=str, parse_constant=refuse)


# --- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.direct("many pages of one database")
@pytest.mark.parametrize("kind", KINDS)
async def test_every_page(db: Connection, dsn: str, make: Any, kind: str) -> None:
    """Whatever a row holds, each linked page is served, and no value becomes markup."""
    data = (
        "/trace?link=k%3D1",
        "/trace?subject=s&task=t",
        "/jobs?state=completed",
        "/jobs?state=dead",
        "/dead?queue=q",
        "/series?what=a",
    )
    hostile(db, kind)
    site = make(app=App("shop", dsn=dsn))
    paths = [path for path in routes(site, "GET") if path not in NO_PAGES]
    async with visiting(site) as visitor:
        found = await walk(visitor)
        for path in [*(path for path in paths if "{" not in path), *(f"/job/{job}" for job in range(1, 7)), *data]:
            if path not in found:
                found[path] = await visitor.get(path)
    failed = {at: answer.status for at, answer in found.items() if answer.status >= 500}
    assert not failed
    for at, answer in found.items():
        assert "<script>alert" not in answer.text and "<b>a" not in answer.text, at
    if kind != "names":
        assert [path for path in paths if not covers(path, found)] == []


# --- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["values", "styles", *(pytest.param(kind, marks=pytest.mark.slow) for kind in (*INSTANTS, "names"))]
)
def test_every_command(db: Connection, dsn: str, kind: str) -> None:
    """Whatever a row holds, each reading command ends without a traceback, in text and in strict JSON."""
    changing = {
        "add", "retire", "remove", "pin", "unpin", "dev", "migrate", "worker", "web", "user", "enqueue", "cancel",
        "retry", "create", "drop", "pause", "resume", "set", "truncate", "run", "forget", "push", "upsert", "at-once",
        "close", "open", "drop-secret", "key", "rotate", "set-secret", "count", "recount", "every", "new", "roles",
        "demo", "uninstall",
    }  # fmt: skip
    reading = {
        path: one for path, one in commands()
        if not isinstance(one, click.Group) and path[-1] not in changing
        and path not in (("top",), ("provider", "test"), ("version",))
    }  # fmt: skip
    hostile(db, kind)
    named = {"queue": "q", "task": "t", "schedule": "plan", "provider": "p", "limit": "r"}
    assert len(reading) > 25
    for words, command in reading.items():
        needed = [one.name or "" for one in command.params if isinstance(one, click.Argument) and one.required]
        given = {
            "job_id": ["1", "2", "3", "6"],
            "name": [named.get(words[0], "")],
            "task": ["t"],
            "data_type": ["data"],
            "key": ["k"],
        }
        calls = [[value, *(["s"] if needed[1:] == ["name"] else [])] for value in given[needed[0]]] if needed else [[]]
        if words == ("job", "trace"):
            calls = [["--link", "k=1"]]
        as_json = any(one.name == "as_json" for one in command.params)
        for call in calls:
            for more in ([], ["--json"]) if as_json else ([],):
                done = CliRunner().invoke(cli, [*words, *call, *more, "--dsn", dsn])
                said = f"{' '.join(words)} {call} {more}: {done.output[-600:]}"
                assert done.exception is None or isinstance(done.exception, SystemExit), said
                assert done.exit_code in (0, 1) and "\x1b" not in done.output, said
                if more and done.exit_code == 0 and done.stdout:
                    strict(done.stdout)


# --- the operator API, and Python ------------------------------------------------------------------------------------


@pytest.mark.direct("an API of its own")
@pytest.mark.parametrize("kind", KINDS)
async def test_every_answer(db: Connection, dsn: str, kind: str) -> None:
    """S2-12: whatever a row holds, each GET of the operator API answers with strict JSON."""
    hostile(db, kind)
    keys = [Key("ops", SECRET, ("admin",)), Key("plain", OTHER, ("read",))]
    api = operator_api(App("shop", dsn=dsn), keys=keys)
    async with client(api) as ops:
        for operation in OPERATIONS:
            if operation.method != "GET":
                continue
            for job in map(str, range(1, 7)) if "{job}" in operation.path else [""]:
                target = operation.path.replace("{job}", job)
                for asks in (ops, ops.by("plain", OTHER)):
                    answer = await asks("GET", target)
                    assert answer.status_code < 500, (target, answer.text)
                    strict(answer.text)
    await api.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_every_question_in_python(db: Connection, dsn: str, kind: str) -> None:
    """Whatever a row holds, the app's reading verbs return."""
    hostile(db, kind)
    app = App("shop", dsn=dsn)
    async with app.open():
        for job in range(1, 7):
            found = await app.get(job)
            assert found.args
            await app.jobs.why(job)
            await app.jobs.trace(job=job)
        for ask in (
            app.jobs.list,
            app.dead.list,
            app.queues.list,
            app.counts.list,
            app.subjects.list,
            app.services.list,
            app.schedules.list,
            app.concurrency_limits.list,
            app.rate_limits.list,
            app.history.list,
            app.breakers.list,
            app.audit.list,
            app.events.list,
            app.counts.levels,
            app.counts.throughput,
            app.counts.timings,
        ):
            await ask()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("7" * 5000, "7" * 5000),
        ("1.5", 1.5),
        ("7" * 400 + ".5", "7" * 400 + ".5"),
        ('{"a": "[[", "b": [1]}', {"a": "[[", "b": [1]}),
        ('"\\"["', '"['),
    ],
)
def test_how_a_value_is_read(text: str, value: Any) -> None:
    """A number that Python cannot hold is read as its digits; all else is unchanged."""
    assert loads(text) == value


@pytest.mark.parametrize("depth", [200, 300, 3000])
def test_how_a_deep_value_is_read(depth: int) -> None:
    """A value deeper than 200 levels is read as its JSON text, whatever this Python could read."""
    found = loads('{"a": ' + "[" * depth + '"]"' + "]" * depth + ', "b": 1}')
    assert found["b"] == 1
    inner, levels = found["a"], 0
    while isinstance(inner, list):
        inner, levels = inner[0], levels + 1
    assert levels == 199 and inner == "[" * (depth - 199) + '"]"' + "]" * (depth - 199)


def test_without_it_such_a_value_breaks_a_reader(db: Connection) -> None:
    """Negative control: Python and psycopg alone cannot read these values, or cannot traverse them."""
    for part in ("digits", "deep"):
        with pytest.raises((ValueError, RecursionError)):
            copy.deepcopy(json.loads(PARTS[part]))
    for instant in INSTANTS:
        with pytest.raises(psycopg.DataError):
            db.execute("select %s::text::timestamptz", [instant]).fetchone()
