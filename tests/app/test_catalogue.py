"""The catalogue of tasks: what workers register, and what users see of it."""

import json
import re
import sys
from datetime import date, timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from support.cli import invoke as run
from support.workers import eventually, working
from tallybook import App, Constant, Context, Exponential, Linear
from tallybook._cli.loading import load_app
from tallybook._task.catalogue import catalogue, check_tasks
from tallybook.errors import ConfigError
from tallybook.testing import drain


class Kind(Enum):
    FULL = "full"


def shop(name: str = "shop", **changed: Any) -> App:
    """An app whose tasks declare the options that the catalogue shows."""
    app = App(name)
    app.retry_policy("patient", Exponential(timedelta(minutes=5)))

    @app.task
    async def tell(
        ctx: Context, job: int, task: str, args: dict[str, Any], failures: int, error: dict[str, Any]
    ) -> None: ...

    options: dict[str, Any] = {
        "queue": "mail", "priority": 1, "retry": "patient", "max_attempts": 7, "no_retry": (KeyError,),
        "unique": ("user_id",), "store_result": False, "version": 2, "aliases": ("welcome",), "on_dead": tell,
        "summary": "Welcome mail to {user_id}",
    }  # fmt: skip

    @app.task(**{**options, **changed})
    async def send_welcome(
        user_id: int, *, lang: str = "en", since: date | None = None, kind: Kind = Kind.FULL
    ) -> None: ...

    send_welcome.upgrade(1)(lambda args: args)

    @app.task(retry=Linear(timedelta(minutes=1)))
    def plain(names: list[str] = [], secret: object = print, **rest: int) -> None: ...  # noqa: B006

    app.task(name="constant", retry=Constant(timedelta(seconds=30)))(_nothing)
    app.task(name="own", retry=_own)(_nothing)
    return app


async def _nothing() -> None: ...


def _own(failures: int) -> timedelta:
    return timedelta(0)


def recorded(db: Any) -> dict[str, Any]:
    return dict(db.execute("select name, to_jsonb(t) - 'name' from tallybook.task t").fetchall())


def test_a_worker_puts_its_tasks_on_record(dsn: str, db: Any) -> None:
    """S2-15, S2-11: typed args, defaults, queue, policy, attempts, version, aliases, on_dead, summary are recorded."""
    drain(shop(), dsn=dsn)
    found = recorded(db)
    assert sorted(found) == ["constant", "own", "plain", "send_welcome", "tell"]
    mail = found["send_welcome"]
    assert (mail["app"], mail["version"], mail["aliases"]) == ("shop", 2, ["welcome"])
    assert (mail["on_dead_task"], mail["on_dead_queue"]) == ("tell", "default")
    assert mail["summary"] == "Welcome mail to {user_id}"
    assert mail["definition"] == {
        "args": [
            {"name": "user_id", "type": "int"},
            {"name": "lang", "type": "str", "default": "'en'"},
            {"name": "since", "type": "datetime.date | None", "default": "None"},
            {"name": "kind", "type": "test_catalogue.Kind", "default": "Kind.FULL"},
        ],
        "queue": "mail", "priority": 1, "max_attempts": 7, "no_retry": ["KeyError"], "unique": ["user_id"],
        "store_result": False, "retry_name": "patient",
        "retry": {"exponential": {"first": "5 min", "factor": 2, "cap": "6 hours", "jitter": False}},
    }  # fmt: skip
    assert [arg["name"] for arg in found["tell"]["definition"]["args"]] == ["job", "task", "args", "failures", "error"]
    assert found["plain"]["definition"]["args"] == [
        {"name": "names", "type": "list[str]", "default": "[]"},
        {"name": "secret", "type": "object", "default": "..."},
        {"name": "**rest", "type": "int"},
    ]
    assert found["own"]["definition"]["retry"] == {"function": "test_catalogue._own"}


def test_the_catalogue_follows_the_code_and_rests_while_it_stays(dsn: str, db: Any) -> None:
    """S2-11: a start with the same code writes nothing; a start with changed code replaces what was recorded."""
    drain(shop(), dsn=dsn)
    before = db.execute("select name, xmin::text, registered_at from tallybook.task order by name").fetchall()
    drain(shop(), dsn=dsn)
    assert db.execute("select name, xmin::text, registered_at from tallybook.task order by name").fetchall() == before
    drain(shop(queue="letters", on_dead=None, summary=None), dsn=dsn)
    mail = recorded(db)["send_welcome"]
    assert (mail["definition"]["queue"], mail["on_dead_task"], mail["summary"]) == ("letters", None, None)


def test_the_older_release_does_not_overwrite_the_newer_one(dsn: str, db: Any) -> None:
    """S2-11, S3-36, S3-39: in a rolling deploy the newer version of a task stays stored when an older worker starts."""

    def older() -> App:
        app = App("shop")

        @app.task
        async def send_welcome(user: int) -> None: ...

        return app

    drain(shop(), dsn=dsn)
    drain(older(), dsn=dsn)
    assert recorded(db)["send_welcome"]["version"] == 2


def test_an_old_name_on_record_does_not_hide_its_alias(dsn: str, db: Any) -> None:
    """S2-15: a job with an old name gets the renamed task's summary, even if an older release registered that name."""
    old = App("shop")
    old.task(name="welcome", summary="old")(_nothing)
    drain(old, dsn=dsn)
    drain(shop(), dsn=dsn)
    assert db.execute("select tallybook.summary('welcome', '{\"user_id\": 42}')").fetchone() == ("Welcome mail to 42",)


# Summaries


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ("to {user}", r"no argument 'user'\. Did you mean \{user_id\}\?"),
        ("to {ctx}", "no argument 'ctx'"),
    ],
)
def test_a_summary_names_arguments(dsn: str, summary: str, said: str) -> None:
    """S2-15: a placeholder that is not an argument of the task is an error when the worker starts."""
    with pytest.raises(ConfigError, match=said):
        drain(shop(summary=summary), dsn=dsn)


@pytest.mark.parametrize(
    "summary", ["{", "{}", "{user.id}", "{user_id!r}", "{user_id:>5}", "{0}", "a\nb", "", 5, "x" * 201]
)
def test_a_summary_is_one_line_with_names_in_braces(summary: Any) -> None:
    """Braces hold argument names only; a summary is one line of 1 to 200 bytes."""
    with pytest.raises(ConfigError, match="summary"):
        App("a").task(summary=summary)


def test_a_task_with_any_arguments_may_name_any() -> None:
    """With **kwargs every name fits."""
    app = App("a")

    @app.task(summary="{anything}")
    async def f(**rest: int) -> None: ...

    check_tasks(app)


def test_summaries_are_shown_wherever_jobs_are_listed(dsn: str, db: Any) -> None:
    """S2-11, S2-15: job list, job show and dead list show the summary, without control characters from the args."""
    app = App("shop")

    @app.task(summary="Welcome mail to {who}, {lang}", max_attempts=1)
    async def send(who: str, lang: str = "en") -> None:
        raise ValueError("bounced")

    send.enqueue_sync(db, "\x1b[31mred\x07\n{lang}")
    drain(app, dsn=dsn)
    job = send.enqueue_sync(db, "blue")
    listed = run("job", "list", to=dsn).output
    assert "Welcome mail to red {lang}, {lang} - failed: bounced" in listed
    assert "Welcome mail to blue, {lang}" in listed
    assert "Welcome mail to red {lang}, {lang} - " in run("dead", "list", to=dsn).output
    assert "Welcome mail to blue" in run("job", "show", str(job.id), to=dsn).output
    everything = "".join(
        run(*words, to=dsn).output for words in (("job", "list"), ("dead", "list"), ("job", "list", "--json"))
    )
    assert "\x1b" not in everything and "\x07" not in everything
    assert json.loads(run("job", "list", "--json", to=dsn).output)[0]["summary"] == "Welcome mail to blue, {lang}"


# tallybook task


async def test_task_list_is_the_catalogue(dsn: str, db: Any) -> None:
    """S2-15, S2-11: task list and show print a task's workers, args, policy and old names, as lines and as JSON."""
    async with working(shop(), dsn, {"mail": 1, "default": 1}, name="w1"):
        await eventually(lambda: db.execute("select from tallybook.worker").fetchall(), "the worker is on record")
        listed = run("task", "list", to=dsn)
        found = {one["name"]: one for one in json.loads(run("task", "list", "--json", to=dsn).output)}
        shown = run("task", "show", "welcome", to=dsn).output
    assert listed.exit_code == 0
    (line,) = (line for line in listed.output.splitlines() if line.startswith("send_welcome("))
    assert "user_id: int, lang: str = 'en', since: datetime.date | None = None" in line
    assert "v2, was welcome" in line
    assert "patient: 5 min x 2^(failures - 1), at most 6 hours" in line
    assert "1 min, then 1 min more each time, at most 6 hours" in listed.output
    assert "every 30 s" in listed.output and "test_catalogue._own" in listed.output
    assert found["send_welcome"]["workers"] == [{"name": "w1", "queues": ["mail", "default"]}]
    assert found["send_welcome"]["registered_at"] and found["send_welcome"]["on_dead"] == "tell"
    assert "welcome" not in found
    lines = "served by", "w1 (mail, default)", "Welcome mail to {user_id}", "on dead", "tell", "store result", "no"
    assert all(said in shown for said in lines)
    assert json.loads(run("task", "show", "send_welcome", "--json", to=dsn).output)["workers"] == []  # it has stopped


def test_the_attempts_of_a_task_without_its_own_are_those_of_its_queue(
    dsn: str, db: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2-15: task list and show print the limit that applies: the task's, else its queue's, else 5."""
    code = "from tallybook import App\napp = App('limits')\n"
    code += "@app.task(queue='mail')\ndef one() -> None: ...\n@app.task\ndef two() -> None: ...\n"
    (tmp_path / "limits.py").write_text(
        code + "@app.task(queue='mail', max_attempts=7)\ndef three() -> None: ...\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    drain(load_app("limits:app"), dsn=dsn)
    db.execute("select tallybook.queue_set('mail', max_attempts => 9)")
    assert {one["name"]: one["max_attempts"] for one in json.loads(run("task", "list", "--json", to=dsn).output)} == {
        "one": 9, "two": 5, "three": 7,
    }  # fmt: skip
    shown = (
        run("task", "show", "one", to=dsn).output,
        run("task", "show", "one", "-A", "limits:app", to=dsn).output,
    )
    found = [re.search(r"max attempts +(.*)", text)[1] for text in shown]  # type: ignore[index]
    assert found == ["9", "of the queue, or 5"]


def test_a_task_that_nobody_put_on_record_is_listed_while_it_is_served(dsn: str, db: Any) -> None:
    """S2-15: a worker in another language that only names its tasks is listed, too."""
    db.execute("select tallybook.worker_start('go', '{prices}', '{fetch_price}')")
    (found,) = json.loads(run("task", "list", "--json", to=dsn).output)
    assert (found["name"], found["app"], found["workers"]) == (
        "fetch_price",
        None,
        [{"name": "go", "queues": ["prices"]}],
    )
    assert "fetch_price(...)" in run("task", "list", to=dsn).output
    assert "nobody" not in run("task", "show", "fetch_price", to=dsn).output


def test_task_list_of_an_app_needs_no_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S2-15: -A shows the declarations in the code, without a database."""
    code = "from tallybook import App\napp = App('filed')\n@app.task(queue='mail')\n"
    (tmp_path / "catalogued.py").write_text(code + "def send(user_id: int) -> None: ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds this folder
    module = "catalogued:app"
    result = run("task", "list", "-A", module)
    assert result.exit_code == 0, result.output
    assert "send(user_id: int)" in result.output and "drawn from 0 to that" in result.output
    (one,) = json.loads(run("task", "list", "-A", module, "--json").output)
    assert (one["name"], one["app"], one["workers"]) == ("send", "filed", None)
    assert "served by" not in run("task", "show", "send", "-A", module).output


def test_an_unknown_task_is_told(dsn: str, db: Any) -> None:
    """S2-15: task show of an unknown name fails and suggests the nearest one."""
    drain(shop(), dsn=dsn)
    result = run("task", "show", "send_welcom", to=dsn)
    assert result.exit_code == 1
    assert "unknown task 'send_welcom'" in result.output and "Did you mean 'send_welcome'?" in result.output


def test_an_empty_catalogue_says_where_tasks_come_from(dsn: str) -> None:
    """If no worker has started yet, a line explains where tasks come from."""
    assert "workers register theirs when they start" in run("task", "list", to=dsn).output


# Two apps


def test_two_apps_with_one_task_name_are_warned(dsn: str, db: Any, caplog: pytest.LogCaptureFixture) -> None:
    """S2-15: a starting worker warns about names that another app registered, more strongly on the same queue."""

    def only(name: str) -> App:
        app = App("second")
        app.task(name=name)(_nothing)
        return app

    drain(shop("first"), dsn=dsn)
    drain(shop("first"), dsn=dsn)
    assert "on record" not in caplog.text
    drain(only("welcome"), dsn=dsn)  # an alias in the first app
    (said,) = (record.getMessage() for record in caplog.records if "is recorded for app" in record.getMessage())
    assert "task 'welcome' is recorded for app 'first', not for app 'second'" in said
    assert "each runs jobs that are meant for the other" not in said  # on different queues
    drain(only("plain"), dsn=dsn)
    assert "each runs jobs that are meant for the other" in caplog.text


def test_how_a_task_is_run_is_on_record() -> None:
    """S2-15: the catalogue has a task's timeout, process, memory and env, and no option that is not set."""
    app = App("shop")
    app.task(timeout="30 s", process=True, memory="512 MB", env=("TALLYBOOK_DSN",))(_own)
    (one,) = catalogue(app)
    said = one["definition"]
    found = (said["timeout"], said["process"], said["memory"], said["env"])
    assert found == ("30 s", True, 512 << 20, ["TALLYBOOK_DSN"])
    assert "atomic" not in said
