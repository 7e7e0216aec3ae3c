"""The command line: input, output and exit codes."""

import asyncio
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from rich.console import Console

from support.cli import Command, invoke
from support.database import UNREACHABLE
from tallybook import App, Constant
from tallybook._cli import GROUPS, cli, output
from tallybook._cli.errors import short
from tallybook._cli.job import when
from tallybook._cli.output import clean, json_safe
from tallybook._db import migrate
from tallybook._model.durations import parse_duration


def put(dsn: str, *jobs: str) -> list[int]:
    """Enqueue by SQL; each string has the arguments of tallybook.enqueue."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        rows = [conn.execute(f"select tallybook.enqueue({job})").fetchone() for job in jobs]
    return [row[0] for row in rows if row]


def fails() -> None:
    raise ValueError("no such address")


def test_the_help_has_four_groups() -> None:
    """The help shows at most 26 commands, each once, under Run, Look, Change and Maintain, in lines of 80 columns."""
    shown = [name for names in GROUPS.values() for name in names]
    assert list(GROUPS) == ["Run", "Look", "Change", "Maintain"]
    assert sorted(shown) == sorted(cli.commands) and len(shown) <= 26
    lines = invoke("--help").output.splitlines()
    assert [line for line in lines if line.endswith(":") and line[0] != " "] == [
        "Options:",
        *(f"{name}:" for name in GROUPS),
    ]
    assert not [line for line in lines if len(line) > 80 or (line[0:1] == " " and line.endswith("..."))]


LISTS = (
    "audit", "breaker list", "count list", "count list --by-task", "count series", "dead list", "event list",
    "history list", "job list", "limit list", "node list", "provider list", "queue list", "queue top mail",
    "schedule list", "service list", "subject list", "task list",
)  # fmt: skip


def test_a_terminal_of_80_columns_cuts_no_title_and_no_number(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, each list has the titles that it has in a file, in whole words, and its numbers in one piece."""
    for n in range(3):
        put(dsn, f"'mail', 'send_the_monthly_report', priority => {n + 1}")
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            "select tallybook.schedule_set('nightly', 'send', '{}', queue => 'mail', cron => '0 3 * * *'),"
            " tallybook.rate_limit_set('acme', 8, '1 min'), tallybook.breaker_set('acme', 5, '1 min', '30 s'),"
            " tallybook.provider_set('acme', 'smtp', '{}'), tallybook.count_event('signup', 123456789),"
            " tallybook.subject_push('mail', 'send', 'customer/1'), tallybook.audit_add('ada', 'cli', 'x', '{}', '{}')"
        )

    def shown(words: str, width: int | None) -> list[str]:
        with monkeypatch.context() as patch:
            if width:
                patch.setattr(output, "_console", lambda stream: Console(file=stream, width=width, markup=False))
            return invoke(*words.split(), to=dsn).output.splitlines()

    for words in LISTS:
        piped, narrow = shown(words, None), shown(words, 80)
        assert not [line for line in narrow if len(line) > 80], words
        if len(piped) > 1:
            head = next(at for at, line in enumerate(narrow) if line.startswith("─"))
            assert sorted(" ".join(narrow[:head]).split()) == sorted(piped[0].split()), words
    assert "123456789" in " ".join(shown("event list", 20)).split()


def test_dsn_before_and_after_the_command(dsn: str, empty_dsn: str) -> None:
    """--dsn works before and after the command; the one after it wins."""
    put(dsn, "'mail', 'send'")
    assert invoke("--dsn", dsn, "job", "list", to=UNREACHABLE).output == invoke("job", "list", "--dsn", dsn).output
    assert invoke("--dsn", empty_dsn, "job", "list", "--dsn", dsn).exit_code == 0
    assert invoke("--dsn", empty_dsn, "job", "list", to=dsn).exit_code == 2


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["jbo", "list"], "job"),
        (["job", "lst"], "list"),
        (["worker", "--concurency", "3"], "--queues default=10"),
        (["trace", "7"], "`tallybook job trace`"),
        (["info"], "`tallybook doctor --info`"),
        (["retry", "7"], "`tallybook job retry` or `tallybook dead retry`"),
        (["worker", "--proceses", "3"], "--processes"),
        (["job", "list", "--state", "failed"], "dead or retrying"),
        (["job", "list", "--state", "runing"], "running"),
        (["job", "list", "--state", "pending"], "available or scheduled"),
    ],
)
def test_near_misses_get_a_suggestion(words: list[str], hint: str) -> None:
    """A misspelled command, option or choice gets a suggestion."""
    result = invoke(*words)
    assert result.exit_code == 2
    assert "Did you mean" in result.output and hint in result.output.split("Did you mean", 1)[1]


def test_job_show_says_state_and_error_first(dsn: str) -> None:
    """The first lines are the id, the state, and a dead job's last error."""
    app = App("shop", dsn=dsn)

    @app.task(max_attempts=1)
    async def charge() -> None:
        raise ValueError("card was refused")

    job = charge.enqueue_sync(app)
    asyncio.run(app.drain())
    lines = invoke("job", "show", job.id, to=dsn).output.splitlines()
    assert [line.split() for line in lines[:2]] == [["id", str(job.id)], ["state", "dead"]]
    assert (
        lines[2].split(maxsplit=1) == ["error", "builtins.ValueError: card was refused"]
        or "card was refused" in lines[2]
    )


def test_max_attempts_is_the_tasks_own_value(dsn: str) -> None:
    """job show prints the job's own max_attempts, else its task's, else 5."""
    app = App("shop", dsn=dsn)

    @app.task(max_attempts=9)
    async def charge() -> None: ...

    plain, asked = charge.enqueue_sync(app), charge.with_(max_attempts=2).enqueue_sync(app)

    def shown(job: int) -> int:
        return int(json.loads(invoke("job", "show", job, "--json", to=dsn).output)["max_attempts"])

    assert (shown(plain.id), shown(asked.id)) == (5, 2)
    asyncio.run(app.drain(max_jobs=0))
    assert (shown(plain.id), shown(asked.id)) == (9, 2)


def test_migrate_twice(empty_dsn: str) -> None:
    """S3-41: migrate installs the schema, says so, and finds nothing to do the second time."""
    first, second = invoke("migrate", to=empty_dsn), invoke("migrate", to=empty_dsn)
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert "installed schema tallybook (version" in first.output
    assert second.output.startswith("nothing to do: ")


def test_migrate_from_two_processes(empty_dsn: str, tmp_path: Path) -> None:
    """S3-41: of two concurrent migrations one installs, the other finds it done, and none fails."""
    with (
        Command(tmp_path / "a", "migrate", dsn=empty_dsn) as one,
        Command(tmp_path / "b", "migrate", dsn=empty_dsn) as two,
    ):
        assert [one.ended(), two.ended()] == [0, 0], one.output + two.output
        assert (one.output + two.output).count("applying migrations/0001") == 1
    assert invoke("doctor", "--info", to=empty_dsn).exit_code == 0


def test_script_installs_the_same(empty_dsn: str) -> None:
    """S3-42: the output of `migrate --sql`, applied by other means, is what migrate installs."""
    text = invoke("migrate", "--sql", "--node", 7).output
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute(text)
    found = json.loads(invoke("doctor", "--info", "--json", to=empty_dsn).output)
    assert (found["routines_current"], found["node"]) == (True, 7)
    assert invoke("migrate", to=empty_dsn).output.startswith("nothing to do: ")


def test_info_tells_what_is_installed(dsn: str, empty_dsn: str) -> None:
    """S3-42: doctor --info says whether the schema is up to date; its exit code is 1 if nothing is installed."""
    here, nowhere = invoke("doctor", "--info", to=dsn), invoke("doctor", "--info", to=empty_dsn)
    assert (here.exit_code, nowhere.exit_code) == (0, 1)
    assert "up to date" in here.output
    assert "run `tallybook migrate`" in nowhere.output
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("update tallybook.installation set routines = 'of another release'")
    assert "behind this program: run `tallybook migrate`" in invoke("doctor", "--info", to=dsn).output
    assert "replaced the functions and views" in invoke("migrate", to=dsn).output
    assert "up to date" in invoke("doctor", "--info", to=dsn).output


def test_migrate_rebases_what_came_from_another_cluster(dsn: str) -> None:
    """doctor --info reports a database from another cluster; migrate makes its jobs claimable and says so."""
    assert json.loads(invoke("doctor", "--info", "--json", to=dsn).output)["cluster"] == "this one"
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("select tallybook.enqueue('mail', 'send')")
        conn.execute("update tallybook.installation set system_identifier = 1")
        assert "came from another cluster" in invoke("doctor", "--info", to=dsn).output
        assert "1 lanes rebased, 1 jobs available again" in invoke("migrate", to=dsn).output
        assert conn.execute("select attempt, attempts, state from tallybook.job").fetchall() == [(2, 0, "available")]
    assert json.loads(invoke("doctor", "--info", "--json", to=dsn).output)["cluster"] == "this one"


def test_uninstall_asks(dsn: str) -> None:
    """S3-42: uninstall removes nothing without a confirmation, all with --yes, and then finds nothing to do."""
    refused = invoke("uninstall", to=dsn)
    assert (refused.exit_code, "Pass --yes" in refused.output) == (2, True)
    assert invoke("doctor", "--info", to=dsn).exit_code == 0
    assert "removed schema tallybook" in invoke("uninstall", "--yes", to=dsn).output
    assert "nothing to do" in invoke("uninstall", "--yes", to=dsn).output


@pytest.mark.parametrize(
    "words",
    [
        ("uninstall", "--yes", "--dsn", ""),
        ("--dsn", "", "uninstall", "--yes"),
        ("job", "list", "--read-dsn", ""),
        ("worker", "-A", "shop:app", "--direct-dsn", ""),
    ],
)
def test_an_empty_dsn_is_refused(dsn: str, words: tuple[str, ...]) -> None:
    """An empty DSN, as of an unset variable of the shell, does not mean the database of TALLYBOOK_DSN."""
    refused = invoke(*words, to=dsn)
    assert refused.exit_code == 2 and "dsn': it is empty" in refused.output
    assert invoke("doctor", "--info", to=dsn).exit_code == 0


@pytest.mark.parametrize(
    "words",
    [
        *(("job", "list", option) for option in ("--queue", "--task", "--error")),
        *(("job", "trace", "1", option) for option in ("--subject", "--unique", "--task")),
        *(("job", "cancel", "1", option) for option in ("--queue", "--task", "--key", "--order-key", "--args")),
        *(("dead", "list", option) for option in ("--queue", "--task", "--error", "--args")),
        *(("dead", "drop", "--yes", option) for option in ("--queue", "--task", "--error", "--args")),
        *(("subject", "list", option) for option in ("--queue", "--task")),
        ("subject", "forget", "t", "a", "--queue"),
        *(("subject", "errors", option) for option in ("--queue", "--task", "--subject")),
        *((noun, "-A", "shop:app", "--queues") for noun in ("dev", "worker")),
    ],
)
def test_an_empty_filter_is_refused(dsn: str, words: tuple[str, ...]) -> None:
    """An empty filter, as of an unset variable of the shell, does not mean all jobs or all queues."""
    refused = invoke(*words, "", to=dsn)
    assert refused.exit_code == 2 and f"'{words[-1]}': it is empty" in refused.output, refused.output


@pytest.mark.parametrize(
    "words",
    [
        "queue pause \udcff",
        "subject show t \udcff",
        "provider show \udcff",
        "job list --dsn postgresql://u:geheim\udcff@127.0.0.1:1/shop",
    ],
)
def test_an_argument_that_is_not_utf_8_is_refused(dsn: str, words: str) -> None:
    """An argument with the byte 0xff, which Python reads as a lone surrogate, gives one line without it, and code 2."""
    refused = invoke(*words.split(), to=dsn)
    assert refused.exit_code == 2 and "is not valid UTF-8" in refused.output
    assert refused.output.count("error:") == 1 and "geheim" not in refused.output


def test_node_is_set_once(dsn: str) -> None:
    """A second migrate with another --node reports that the number stays."""
    result = invoke("migrate", "--node", 3, to=dsn)
    assert (result.exit_code, "node number stays 0" in result.output) == (1, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["workr"], "Did you mean 'worker'?"),
        (["worker"], "Write -A module:app"),
        (["worker", "-A", "m:app", "--qeues", "mail"], "Did you mean --queues?"),
        (["worker", "-A", "m:app", "--lease", "5"], "a duration needs a unit"),
        (["job", "show", "abc"], "'abc' is not a valid integer"),
        (["job", "list", "--state", "failed"], "'scheduled', 'retrying', 'waiting', 'available'"),
        (["enqueue", "mail", "t", "{'a': 1}"], "column 2: { >>> 'a': 1}"),
        (["enqueue", "mail", "t", "[1]"], "one object, not an array"),
        (["enqueue", "mail", "t", '{"a": NaN}'], "NaN is not a JSON number"),
        (["enqueue", "mail", "t", '{"a": 1, "a": 2}'], "'a' is a duplicate key"),
        (["enqueue", "mail", "t", '{"a": "\\u0000"}'], "$.a: NUL"),
        (["enqueue", "mail", "t", "--run-at", "2030-01-01"], "has no zone"),
        (["enqueue", "mail", "t", "--run-at", "2030-01-01T00:00Z", "--delay", "1 s"], "run_at is also set"),
        (["enqueue", "ma\nil", "t"], "control or invisible characters"),
        (["job", "list", "--dsn", "no dsn secret"], "not a connection string"),
    ],
)
def test_wrong_usage(dsn: str, words: list[str], said: str) -> None:
    """Wrong input ends with one line of error, a hint and code 2; never a traceback, never a secret."""
    result = invoke(*words, to=dsn)
    assert result.exit_code == 2
    assert said in result.output
    assert result.output.startswith("tallybook: error: ")
    assert "Traceback" not in result.output and "secret" not in result.output


@pytest.mark.parametrize("words", ["doctor --info", "migrate", "job list", "queue pause mail", "enqueue mail t"])
def test_unreachable_server(words: str) -> None:
    """An unreachable server gives one line that names it without the password, and code 1."""
    result = invoke(*words.split(), to=UNREACHABLE)
    assert result.exit_code == 1
    assert "cannot reach PostgreSQL at host=127.0.0.1 port=1 dbname=shop user=u: " in result.output
    assert "geheim" not in result.output


def test_a_verb_that_could_not_run_is_no_warning() -> None:
    """A command that finds no server prints its error and hint, and not Python's warning that its verb did not run."""
    words = [sys.executable, "-m", "tallybook", "queue", "pause", "mail", "--dsn", UNREACHABLE]
    ran = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 1 and [line.split()[0] for line in ran.stderr.splitlines()] == ["tallybook:", "hint:"]


def test_a_schema_of_yours_with_that_name_is_not_removed(empty_dsn: str) -> None:
    """`uninstall` removes what Tallybook has installed and nothing else."""
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("create schema tallybook; create table tallybook.mine ()")
        result = invoke("uninstall", "--yes", to=empty_dsn)
        assert result.exit_code == 0 and "nothing to do" in result.output
        assert conn.execute("select to_regclass('tallybook.mine') is not null").fetchone() == (True,)


@pytest.mark.parametrize("words", ["job list", "queue list", "enqueue mail t", "job cancel 1"])
@pytest.mark.parametrize(
    ("version", "said"), [(-1, "version -1"), (999, "Update the package"), (None, "no schema tallybook in database")]
)
def test_schema_of_another_version(dsn: str, words: str, version: int | None, said: str) -> None:
    """With a missing, too old or too new schema each command says so and what to do, with code 2."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        if version is None:
            conn.execute("drop schema tallybook cascade")
        else:
            conn.execute("update tallybook.installation set version = %s, works_from = %s", (version, version))
    result = invoke(*words.split(), to=dsn)
    assert result.exit_code == 2
    assert said in result.output


def test_commands_read_no_sql_files(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command compares the versions of schema and program without reading the SQL files, which takes 50 ms."""
    monkeypatch.delattr(migrate, "digest")  # cached by an earlier migration, perhaps
    monkeypatch.delattr(migrate, "routines")
    assert invoke("queue", "list", to=dsn).exit_code == 0


def test_enqueue(dsn: str) -> None:
    """enqueue adds one job with its options, and reports whether the unique key was taken."""
    first = invoke("enqueue", "mail", "t", '{"a": 1.5}', "--unique", "k", "--delay", "1 h", "--priority", 0, to=dsn)
    second = json.loads(invoke("enqueue", "mail", "t", "-", "--unique", "k", "--json", to=dsn, typed="{}").stdout)
    assert first.output == f"job {second['id']} is in queue 'mail'\n"
    assert second["created"] is False
    job = json.loads(invoke("job", "show", second["id"], "--json", to=dsn).output)
    assert (job["state"], job["priority"], job["args"], job["unique_key"]) == ("scheduled", 0, {"a": 1.5}, "k")


def test_enqueue_warns_of_a_task_that_nobody_knows(dsn: str) -> None:
    """If no live worker knows the task, enqueue warns with the nearest name, and still enqueues the job."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("select tallybook.worker_start('w', array['mail'], array['send_welcome'])")
    result = invoke("enqueue", "mail", "send_welcom", to=dsn)
    assert (result.exit_code, result.stdout[:4]) == (0, "job ")
    assert "did you mean 'send_welcome'?" in result.stderr
    assert invoke("enqueue", "mail", "send_welcome", to=dsn).stderr == ""


def test_every_state_with_one_query(dsn: str) -> None:
    """S5-11: each job's state is read by one query on the view, even while it runs, and `job list` shows the same."""
    app = App("shop", dsn=dsn)
    states = "select task, state from tallybook.job order by id"
    seen: list[tuple[Any, ...]] = []

    @app.task
    def looks() -> None:
        with psycopg.connect(dsn) as conn:
            seen.extend(conn.execute("select state from tallybook.job where task = 'looks'").fetchall())

    @app.task(retry=Constant(timedelta(hours=1)))
    def fails() -> None:
        raise ValueError("no such address")

    put(dsn, "'default', 'looks'", "'default', 'fails'", "'default', 'fails', max_attempts => 1")
    asyncio.run(app.drain())
    later = "run_at => now() + interval '1 hour'"
    *_, cancelled = put(dsn, "'mail', 'waits'", f"'mail', 'later', {later}", f"'mail', 'gone', {later}")
    assert invoke("job", "cancel", cancelled, "--reason", "withdrawn", to=dsn).output == f"job {cancelled}: cancelled\n"

    expected = [
        ("looks", "completed"), ("fails", "retrying"), ("fails", "dead"),
        ("waits", "available"), ("later", "scheduled"), ("gone", "cancelled"),
    ]  # fmt: skip
    assert seen == [("running",)]
    with psycopg.connect(dsn) as conn:
        assert conn.execute(states).fetchall() == expected
    listed = json.loads(invoke("job", "list", "--json", to=dsn).output)
    assert [(job["task"], job["state"]) for job in reversed(listed)] == expected
    for task, state in expected:
        only = json.loads(invoke("job", "list", "--json", "--state", state, "--task", task, to=dsn).output)
        assert [job["task"] for job in only] == [task]
    counts = {row["name"]: row for row in json.loads(invoke("queue", "list", "--json", to=dsn).output)}
    assert (counts["default"]["dead"], counts["default"]["retrying"]) == (1, 1)
    # The cancelled job counts as scheduled until it would have been due.
    assert (counts["mail"]["available"], counts["mail"]["scheduled"], counts["mail"]["paused_at"]) == (1, 2, None)


def test_job_list_is_newest_first_and_limited(dsn: str) -> None:
    """job list shows the newest jobs first, at most --limit, filtered by queue; dates are ISO 8601."""
    ids = put(dsn, "'mail', 'a'", "'mail', 'b'", "'other', 'c'", "'mail', 'd'")
    rows = json.loads(invoke("job", "list", "--queue", "mail", "--limit", 2, "--json", to=dsn).stdout)
    assert [row["id"] for row in rows] == [ids[3], ids[1]]
    assert rows[0]["enqueued_at"][10] == "T" and rows[0]["enqueued_at"].endswith("+00:00")
    assert invoke("job", "list", "--queue", "none", to=dsn).output == "no such jobs\n"
    assert json.loads(invoke("job", "list", "--unserved", "--json", to=dsn).output) == []


@pytest.mark.parametrize("age", ["1000 seconds", "1440min", "100000 s", "0.5 h", "09:00"])
def test_since_takes_a_time_or_a_duration_of_any_size(age: str) -> None:
    """--since and --before read a duration of any number of digits, and a time with or without hyphens."""
    assert datetime.now(UTC) - when(age) - parse_duration(age) < timedelta(minutes=1)
    assert when("20261130T010000Z") == when("2026-11-30T01:00Z") == datetime(2026, 11, 30, 1, tzinfo=UTC)


@pytest.mark.parametrize("value", ["1000", "soon", "2026-01-31", "1000000 days"])
def test_since_names_both_forms(dsn: str, value: str) -> None:
    """The error for what is neither a time with a zone nor a duration names both forms."""
    refused = invoke("job", "list", "--since", value, to=dsn)
    assert (refused.exit_code, "or '2 hours' for two hours ago" in refused.output) == (2, True)
    assert "Write 2026-01-31" in refused.output and refused.output.count("error:") == 1
    advised = refused.output.partition(" Write ")[2].split(" for UTC")[0].split(",")[0]
    assert invoke("job", "list", "--since", advised, to=dsn).exit_code == 0


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_why_of_an_unknown_job_ends_with_one(dsn: str, words: tuple[str, ...]) -> None:
    """job why explains that there is no such job, and ends with exit code 1."""
    found = invoke("job", "why", 999, *words, to=dsn)
    assert (found.exit_code, "There is no job 999." in found.output) == (1, True)


def test_why_advises_commands_that_work(dsn: str) -> None:
    """job why advises what undoes a cancel before its time, quotes names for the shell, and calls a dropped job so."""
    app = App("shop", dsn=dsn)
    app.task(max_attempts=1)(fails)
    later, dead = put(dsn, "'my mail', 'a', run_at => now() + interval '1 h'", "'default', 'fails'")
    invoke("queue", "pause", "my mail", to=dsn)
    assert "tallybook queue resume 'my mail'\n" in invoke("job", "why", later, to=dsn).output
    invoke("job", "cancel", later, to=dsn)
    said = invoke("job", "why", later, to=dsn).output
    assert "will not start. Its end is not recorded yet. [cancel_pending]" in said
    assert f"undo that: tallybook job retry {later}" in said and invoke("job", "retry", later, to=dsn).exit_code == 0
    assert invoke("job", "why", later, to=dsn).output.startswith(f"job {later}: scheduled\n")
    asyncio.run(app.drain())
    invoke("dead", "drop", dead, to=dsn)
    assert invoke("job", "why", dead, to=dsn).output.startswith(f"job {dead}: dropped\n")


def test_job_show_has_errors_and_attempts(dsn: str) -> None:
    """job show prints a dead job's columns, each attempt and each error; retry gives it another attempt."""
    app = App("shop", dsn=dsn)
    app.task(max_attempts=1)(fails)
    (job,) = put(dsn, "'default', 'fails'")
    asyncio.run(app.drain())
    shown = invoke("job", "show", job, to=dsn).output
    assert all(part in shown for part in ("dead", "ValueError: no such address", "Traceback", "worker"))
    found = json.loads(invoke("job", "show", job, "--json", to=dsn).output)
    assert (found["state"], len(found["history"]), len(found["errors"])) == ("dead", 1, 1)
    assert (found["last_attempt_at"], found["updated_at"]) == (found["history"][0]["started_at"], found["ended_at"])
    assert invoke("job", "retry", job, to=dsn).output == f"job {job}: retried, attempt 2\n"
    again = invoke("job", "retry", job, to=dsn)
    assert (again.exit_code, f"job {job} is not dead or cancelled" in again.output) == (1, True)


@pytest.mark.parametrize("verb", ["show", "cancel", "retry"])
@pytest.mark.parametrize("job", [987654321, 2**64])
def test_unknown_job(dsn: str, verb: str, job: int) -> None:
    """An unknown job id gives one line and code 1."""
    result = invoke("job", verb, job, to=dsn)
    assert (result.exit_code, f"job {job}" in result.output) == (1, True)


def test_one_unknown_job_keeps_no_other_from_being_cancelled(dsn: str) -> None:
    """cancel continues after an unknown id, and still ends with code 1."""
    (job,) = put(dsn, "'mail', 'a'")
    result = invoke("job", "cancel", 987654321, job, to=dsn)
    assert (result.exit_code, result.stdout) == (1, f"job {job}: cancelled\n")


def test_pause_and_resume(dsn: str) -> None:
    """queue list shows who paused a queue; a wrong name gets the nearest one as a suggestion."""
    put(dsn, "'mail', 'a'")
    assert invoke("queue", "pause", "mail", "--by", "ops", to=dsn).output == "queue 'mail' is paused\n"
    assert "by ops" in invoke("queue", "list", to=dsn).output
    assert invoke("queue", "pause", "mail", to=dsn).output == "queue 'mail' was paused already\n"
    assert invoke("queue", "resume", "mail", to=dsn).output == "queue 'mail' is resumed\n"
    wrong = invoke("queue", "pause", "mial", to=dsn)
    assert (wrong.exit_code, "Did you mean 'mail'?" in wrong.output) == (1, True)


def redirected(
    dsn: str, redirection: str, words: str, typed: bytes | None = None, **environment: str
) -> tuple[int, str]:
    """Run a command in a process, with this redirection of the shell; return its exit code and stderr."""
    line = ("sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-P", "-m", "tallybook", *words.split())
    environment = {**os.environ, "TALLYBOOK_DSN": dsn, "PYTHONUNBUFFERED": "", **environment}
    ran = subprocess.run(line, env=environment, stderr=subprocess.PIPE, input=typed, check=False)
    return ran.returncode, ran.stderr.decode()


@pytest.mark.parametrize(
    ("redirection", "ended"),
    [(">/dev/full", (1, "tallybook: error: cannot write: No space left on device\n")), (">&-", (0, ""))],
)
def test_stdout_that_is_full_or_closed(dsn: str, redirection: str, ended: tuple[int, str]) -> None:
    """A full disk gives one line and code 1; a closed stdout gives nothing; neither gives a traceback."""
    put(dsn, "'mail', 'a'")
    assert redirected(dsn, redirection, "job list") == ended


@pytest.mark.parametrize(
    ("words", "said"),
    [("uninstall", "no terminal to confirm on"), ("enqueue mail a -", "expecting value at column 1")],
)
def test_a_closed_stdin_is_no_terminal_and_has_no_input(dsn: str, words: str, said: str) -> None:
    """A command whose stdin the shell has closed gives one line and code 2, as without a terminal; no traceback."""
    code, error = redirected(dsn, "<&-", words)
    assert code == 2 and said in error and error.startswith("tallybook: error: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("enqueue mail a -", "$.a: lone surrogate (U+DCFF)"),
        ("web user ada", "the input or an environment variable is not valid UTF-8"),
    ],
)
def test_input_that_is_not_utf_8_is_refused(dsn: str, words: str, said: str) -> None:
    """Bytes on stdin that are not UTF-8 give one line and code 2 in every locale; no traceback, and no secret."""
    code, error = redirected(dsn, "", words, b'{"a": "geheim\xff"}\n', PYTHONIOENCODING="utf-8:strict")
    assert code == 2 and said in error and error.startswith("tallybook: error: ") and "geheim" not in error


def test_output_is_safe_on_a_terminal(dsn: str) -> None:
    """A job's data cannot control the terminal or fake lines; as JSON it is unchanged."""
    nasty = "\x1b[31mred\x1b[0m\nfake line \x9b2J [bold]x[/bold] \u202eback"
    (job,) = put(dsn, "'mail', 'a'")
    invoke("job", "cancel", job, "--reason", nasty, to=dsn)
    plain, as_json = invoke("job", "list", to=dsn).output, invoke("job", "show", job, "--json", to=dsn).output
    assert "red fake line  [bold]x[/bold] back" in plain
    assert not set("\x1b\x9b\u202e") & set(plain + as_json)
    assert json.loads(as_json)["reason"] == nasty
    assert json.loads(json_safe(json.dumps(nasty, ensure_ascii=False))) == nasty
    assert clean(None) == ""


def test_reason_of_a_failed_connection_is_short() -> None:
    """Of libpq's connection error only the reason is shown, since the address precedes it."""
    socket = (
        'connection failed: connection to server on socket "/tmp/.s.PGSQL.1" failed: FATAL:  database "x" is not there'
    )
    assert short(socket) == 'database "x" is not there'
    assert (
        short('connection to server at "::1", port 1 failed: Connection refused\n\tIs the server')
        == "Connection refused"
    )


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    """TALLYBOOK_DEBUG=1 shows the traceback before the error."""
    monkeypatch.setenv("TALLYBOOK_DEBUG", "1")
    assert "Traceback" in invoke("queue", "pause", "none", to=make_conninfo(dsn)).stderr


@pytest.mark.direct("a session of its own")
def test_commands_ignore_the_isolation_level_of_the_role(dsn: str) -> None:
    """A command that needs READ COMMITTED runs in it, whatever default_transaction_isolation the role has."""
    to = make_conninfo(dsn, options="-c default_transaction_isolation=serializable")
    assert invoke("schedule", "set", "daily", "t", "--every", "1 day", to=to).exit_code == 0
    for words in ("event set sold 5", "schedule run daily"):
        done = invoke(*words.split(), to=to)
        assert done.exit_code == 0, done.output
