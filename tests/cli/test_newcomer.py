"""Mistakes that a newcomer makes: each gives one clear line, with what to do, and no traceback."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.cli import invoke
from tallybook import App
from tallybook.errors import QueueUnavailable


@pytest.mark.parametrize(
    ("command", "answer"),
    {
        "worker": (2, "Missing option '-A'", "Write -A module:app"),
        "worker -A first:ap": (2, "has no 'ap'", "Did you mean first:app?"),
        "worker -A firts:app": (2, "there is no module 'firts'", "Did you mean first?"),
        "worker -A broken:app": (2, "No module named 'nothing_here'", "TALLYBOOK_DEBUG=1 shows the traceback"),
        "worker -A of_django:app": (2, "AppRegistryNotReady", "Use `manage.py tallybook`"),
        "worker -A first:hello": (2, "is not an App but the Task 'hello'", "Did you mean first:app?"),
        "worker -A first:app --concurency 5": (2, "No such option '--concurency'", "--queues default=10"),
        "worker -A first:app --queues mail=many": (2, "'many' is not a number of slots", "Write mail=10,default"),
        "worker -A first:app --poll soon": (2, "'soon': not a duration", "Write '30 s'"),
        "work -A first:app": (2, "No such command 'work'", "Did you mean 'worker'?"),
        "jobs": (2, "No such command 'jobs'", "Did you mean 'job'?"),
        "job list --state failed": (2, "'failed' is not one of", "Did you mean dead or retrying?"),
        "job show 99": (1, "unknown job 99", "never committed"),
        "queue pause nothing": (1, "unknown queue 'nothing'", "tallybook queue list"),
        "schedule set nightly hello --every 1x": (2, "unknown unit 'x'", "Write '30 s'"),
        "dead retry": (2, "pass ids, or filters", "--all"),
        "limit set api 5 --per 1min": (
            2,
            "No such option '--per'",
            "PER is an argument: write its value without a name",
        ),
        "limit set api -5 1min": (2, "No such option '-5'", "write -- before it"),
        "breaker open nope": (1, "there is no breaker nope", "Set its rule first"),
        'enqueue hello {"user_id":42}': (2, "the args come third", " enqueue --help`"),
        "enqueue mail hello --in 5min": (2, "No such option '--in'", "Did you mean --delay?"),
        "job list --concurrency 5": (2, "No such option '--concurrency'", " job list --help`"),
        "job list --qeue mail": (2, "No such option '--qeue'", "Did you mean --queue?"),
        "node check --nodes all": (2, "No such option '--nodes'", " node check --help`"),
        "provider secret acme": (2, "No such command 'secret'", " provider --help`"),
        "dead list --limit ten": (2, "'ten' is not a valid integer\n", " dead list --help`"),
        "uninstall --yes --dsn=": (2, "'--dsn': it is empty", "Is a variable of the shell not set?"),
        "dead drop --yes --error=": (2, "'--error': it is empty", "Is a variable of the shell not set?"),
        "web --host 0.0.0.0": (2, "without a login", "Pass --users FILE"),
    }.items(),
)
def test_a_command(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, answer: tuple[int, str, str]
) -> None:
    """One line of error and one of advice on stderr, and the exit code."""
    first = "from tallybook import App\napp = App('shop')\n\n@app.task\nasync def hello(user_id: int) -> None: ...\n"
    of_django = "from django.core.exceptions import AppRegistryNotReady\nraise AppRegistryNotReady('not yet')\n"
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in {"first": first, "broken": "import nothing_here\n", "of_django": of_django}.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    code, what, advice = answer
    ran = invoke(*command.split(), to=dsn)
    assert ran.exit_code == code and ran.stderr.count("error:") == 1 and "Traceback" not in ran.output
    assert what in ran.stderr and advice in ran.stderr, ran.stderr
    assert len(ran.stderr.strip().splitlines()) <= 2, ran.stderr


app = App("shop")


@app.task
async def hello(user_id: int, *, lang: str = "en") -> None: ...


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        pytest.param(lambda _: app.enqueue("hello"), "A task enqueues", id="an app does not enqueue"),
        pytest.param(lambda _: hello.delay(1), "Here it is .enqueue", id="delay of Celery"),
        pytest.param(lambda _: hello.with_(countdown=5), "with_(delay=...)", id="countdown of Celery"),
        pytest.param(hello.enqueue_sync, "missing 'user_id'", id="an argument too few"),
        pytest.param(lambda db: hello.enqueue_sync(db, user=1), "'user'", id="an argument that there is not"),
        pytest.param(
            lambda db: hello.enqueue_sync(db, None),
            "None, but its annotation is int",
            id="the id of a row that was not flushed",
        ),
        pytest.param(lambda _: hello.enqueue_sync(1), "Pass a psycopg Connection", id="no connection"),
        pytest.param(lambda db: hello.enqueue(db, 1), "Write .enqueue_sync", id="await forgotten"),
        pytest.param(lambda db: hello.enqueue_sync(db, {1}), "pass a sorted list", id="a set in the args"),
        pytest.param(lambda _: hello.with_(delay=5), "or pass a timedelta", id="a number of seconds"),
        pytest.param(lambda _: app.task(retry=3)(lambda: None), "retry=Exponential", id="a number of retries"),
        pytest.param(lambda _: App(""), "1 to 200 bytes", id="an app without a name"),
        pytest.param(lambda _: app.rate_limit("a", 8, per=60), "or pass a timedelta", id="a window in seconds"),
        pytest.param(lambda db: app.get(99).sync(db), "never committed", id="a job that there is not"),
        pytest.param(lambda db: hello.with_(run_at="soon").enqueue_sync(db, 1), "datetime.now(UTC)", id="a past time"),
    ],
)
def test_a_call(db: Any, call: Callable[[Any], Any], advice: str) -> None:
    """The error is one line that says what to write instead."""
    with pytest.raises(Exception) as refused:
        call(db)
    text = str(refused.value)
    assert advice in text and "\n" not in text


def test_a_program_without_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a database the error names TALLYBOOK_DSN."""
    monkeypatch.delenv("TALLYBOOK_DSN", raising=False)
    monkeypatch.setenv("PGHOST", "/nowhere")
    with pytest.raises(QueueUnavailable, match=r"Set TALLYBOOK_DSN .*, or pass App\('shop', dsn=\.\.\.\)"):
        hello.enqueue_sync(app, 1)


def test_there_are_enough_of_them() -> None:
    """At least 25."""
    (table,) = [mark.args[1] for mark in test_a_command.pytestmark]  # type: ignore[attr-defined]
    assert len(table) >= 25
