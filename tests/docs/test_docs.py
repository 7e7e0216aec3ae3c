"""The docs are checked against the code: examples run, names exist, lists are complete."""

import ast
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import pytest

import tallybook.errors
from support.cli import commands
from support.pages import FENCED, blocks, name, project, python, section, statements, table, text, words
from support.paths import ROOT
from tallybook._model.backoff import from_json, to_json
from tallybook._model.durations import parse_duration
from tallybook._task import Task
from tallybook._worker.settings import SLOTS, WorkerSettings
from tallybook.errors import TallybookError
from tallybook.testing import travel
from tools.docs import sources

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


# SQL


@pytest.mark.servers
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sql")], ids=name)
def test_the_sql_of_a_page_runs(page: Path, db: Any) -> None:
    """S5-01: every SQL block runs, in page order, on one connection to a fresh database."""
    for block in blocks(page, "sql"):
        for statement in statements(block):
            db.execute(statement)


def test_the_sql_page_does_what_it_says(db: Any) -> None:
    """S5-01, S1-03, S1-09, S4-02: after docs/sql.md the side table joins its jobs: one is completed, one retrying."""
    for block in blocks(ROOT / "docs/sql.md", "sql"):
        for statement in statements(block):
            db.execute(statement)
    found = db.execute(
        "select asset.name, job.state from price_job join asset on asset.id = asset_id"
        " join tallybook.job on job.id = job_id order by asset.id"
    ).fetchall()
    assert found == [("gold", "completed"), ("silver", "retrying")]
    assert db.execute("select state, reason from tallybook.job where unique_key = 'welcome:42'").fetchall() == [
        ("scheduled", None)  # cancelled, then retried: the cancel was withdrawn before any worker saw it
    ]
    assert db.execute("select count(*) from tallybook.job where task = 'send_welcome'").fetchone() == (10,)


def test_every_public_sql_function_is_on_the_sql_page(db: Any) -> None:
    """docs/sql.md names each public function of the schema, except four that only workers use."""
    public = {
        row[0]
        for row in db.execute(
            "select distinct proname from pg_proc where pronamespace = 'tallybook'::regnamespace and proname !~ '^_'"
        )
    }
    quiet = {"listen_begin", "listen_end", "backoff", "move"}
    assert {found for found in public if f"tallybook.{found}" not in text("docs/sql.md")} == quiet
    named = set(re.findall(r"tallybook\.([a-z_]+)\(", text("docs/sql.md") + text("README.md")))
    assert named <= public


# Python


@pytest.mark.slow
def test_the_examples_of_the_schedules_page_run(tmp_path: Path, dsn: str, db: Any) -> None:
    """S2-11, S2-13: docs/schedules.md as written: files and commands declare, put, run, pause and list schedules."""
    assert project(tmp_path, "docs/schedules.md") == ["app.py", "change.py"]
    python(tmp_path, dsn, "-c", DRAIN)
    declared = db.execute("select name, cron, every::text, tz, source from tallybook.schedule order by name").fetchall()
    assert declared == [
        ("refresh", None, "00:10:00", "UTC", "code"),
        ("report-de", "0 6 * * MON-FRI", None, "Europe/Berlin", "code"),
        ("report-ja", "0 6 * * MON-FRI", None, "Asia/Tokyo", "code"),
        ("sweep", "*/5 * * * *", None, "UTC", "code"),
    ]
    printed = python(tmp_path, dsn, "change.py").splitlines()
    assert printed[:3] == ["created", "3", "enqueued"] and "('report-fr', '0 7 * * * Europe/Paris')" in printed[3]
    assert "report in fr\n" in python(tmp_path, dsn, "-c", DRAIN)
    for block in blocks(ROOT / "docs/schedules.md", "sql"):
        for statement in statements(block):
            db.execute(statement)
    for line in blocks(ROOT / "docs/schedules.md", "sh")[0].splitlines():
        python(tmp_path, dsn, "-m", *shlex.split(line))
    # Only runs by hand: the others fire whenever five minutes end meanwhile.
    by_hand = "select what, count(*) from tallybook.fire where tick <> date_trunc('minute', tick) group by 1"
    assert db.execute(by_hand).fetchall() == [("enqueued", 3)]


@pytest.mark.slow
def test_the_example_of_the_query_page_runs(tmp_path: Path, dsn: str, db: Any) -> None:
    """S1-21 S1-22 S1-23: docs/query-schedules.md as written: stale, viewed assets are enqueued once, others are not."""
    page = ROOT / "docs/query-schedules.md"
    first, *others = blocks(page, "sql")
    for statement in statements(first):
        db.execute(statement)
    db.execute(
        "insert into asset select n, 'api', true, null, now() - (n - 1) * interval '30 h' from generate_series(1, 3) n;"
        "insert into asset values (4, 'api', true, null, null), (5, 'manual', true, null, now());"
        "insert into holding select id, true from asset;"
        "insert into price select id, now() - interval '25 h' from asset where id <> 4"
    )
    assert project(tmp_path, "docs/query-schedules.md") == ["app.py"]
    python(tmp_path, dsn, "-c", DRAIN)  # registers the schedule
    fire = "select jobs from tallybook.schedule_run('stale-prices')"
    assert [db.execute(fire).fetchone() for _ in range(2)] == [(3,), (0,)]
    printed = python(tmp_path, dsn, "-c", DRAIN)
    assert [line for line in printed.splitlines() if line.startswith("refresh")] == [
        f"refresh asset {n}" for n in (1, 2, 4)
    ]
    for block in others:
        for statement in statements(block):
            db.execute(statement)
    for line in blocks(page, "sh")[0].splitlines():
        python(tmp_path, dsn, "-m", *shlex.split(line))


@pytest.mark.slow
def test_the_examples_of_the_providers_page_run(tmp_path: Path, dsn: str, db: Any) -> None:
    """S1-12, S1-15, S1-17: docs/providers.md as written: added, routed, used, rerouted by one row, changed, rotated."""
    page = "docs/providers.md"
    assert project(tmp_path, page) == ["app.py", "rated.py"]
    first, *others = [line for block in blocks(ROOT / page, "sh") for line in block.splitlines()]
    secrets = {name: f"{name} of the page" for name in ("ACME_API_KEY", "BETA_API_KEY", "NEW_API_KEY")}
    key = python(tmp_path, dsn, "-m", *shlex.split(first)).strip()
    assert key.startswith("k1:")
    printed = dict.fromkeys(others, "")
    used = ""
    for line in others:
        if not used and line == "tallybook provider route set equity beta --symbol INFY --inactive":
            enqueue = "from app import *; fetch_price.enqueue_sync(app, 'RELIANCE'); fetch_all.enqueue_sync(app)"
            python(tmp_path, dsn, "-c", enqueue)
            used = python(tmp_path, dsn, "-c", DRAIN, TALLYBOOK_KEYS=key)
            for block in blocks(ROOT / page, "sql"):
                for statement in statements(block):
                    db.execute(statement)
        printed[line] = python(tmp_path, dsn, "-m", *shlex.split(line), TALLYBOOK_KEYS=key, **secrets)
    rated = "from rated import *; from tallybook.testing import drain; drain(app)"
    enqueue = "from rated import *; [fetch_quote.enqueue_sync(app, 'A') for _ in range(2)]"
    python(tmp_path, dsn, "-c", enqueue)
    python(tmp_path, dsn, "-c", rated, TALLYBOOK_KEYS=key)
    found = db.execute("select state from tallybook.job where task = 'fetch_quote' order by state").fetchall()
    assert found == [("completed",), ("scheduled",)]  # one of 8 a minute, the other 7.5 s later
    assert "ask https://beta.example for RELIANCE with {'api_key': Secret('********')} 1\n" in used
    assert "Provider(name='acme', kind='market-data'" in used
    assert printed["tallybook provider route which equity RELIANCE"] == "beta\n"
    assert db.execute("select tallybook.provider_resolve('equity', 'RELIANCE')").fetchone() == ("acme",)
    assert db.execute("select slot from tallybook.provider_field where provider = 'beta'").fetchall() == [("current",)]
    assert "no other key is needed" in printed["tallybook provider rotate"]
    assert not any(secret in "".join(printed.values()) + used for secret in [*secrets.values(), key[3:]])


def test_the_example_of_the_telemetry_page_runs(tmp_path: Path, dsn: str, db: Any) -> None:
    """docs/telemetry.md as written: the app is instrumented; a job is enqueued with a trace, and runs."""
    assert project(tmp_path, "docs/telemetry.md") == ["app.py"]
    put = (
        "from opentelemetry.sdk.trace import TracerProvider; from opentelemetry import trace;"
        "trace.set_tracer_provider(TracerProvider()); from app import *; send_welcome.enqueue_sync(app, 42)"
    )
    python(tmp_path, dsn, "-c", put)
    (headers,) = db.execute("select headers from tallybook.job").fetchone()
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-0[0-9a-f]", headers["traceparent"])
    assert "welcome, user 42" in python(tmp_path, dsn, "-c", DRAIN)


def test_attributes_and_metrics_of_opentelemetry_are_listed() -> None:
    """docs/telemetry.md lists exactly the span attributes and the metrics that the code names."""
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src/tallybook/_otel").glob("*.py"))
    named = set(re.findall(r'"((?:messaging|tallybook|error)\.[a-z_.]+)"', code)) - {
        "tallybook.telemetry",
        "tallybook.state",
        "tallybook.node",
    }
    part = text("docs/telemetry.md").split("## OpenTelemetry\n")[1]
    assert {*words(table(part, "attribute")), *words(table(part, "name"))} == named


def test_the_options_of_a_schedule_are_those_of_the_function() -> None:
    """docs/schedules.md lists the options of `app.schedule` with their defaults."""
    declared = inspect.signature(tallybook.App.schedule).parameters
    rows = table(text("docs/schedules.md"), "option")
    assert words(rows) == [found for found in declared if found not in ("self", "name", "job")]
    for row in rows:
        default = declared[words([row])[0]].default
        if default is not None:
            assert row[1].strip("`") == str(default).lower(), row


DRAIN = "from app import app; from tallybook.testing import drain; print(drain(app))"


def test_the_first_job_of_the_readme_runs(tmp_path: Path, dsn: str, db: Any) -> None:
    """The README's two files as written: one transaction adds a customer and a job, and the job runs."""
    assert project(tmp_path, "README.md") == ["app.py", "signup.py"]
    assert python(tmp_path, dsn, "signup.py") == "job 1\n"
    assert db.execute("select id from customer").fetchall() == [(42,)]
    printed = python(tmp_path, dsn, "-c", DRAIN)
    assert "welcome, user 42 (de)\n" in printed
    assert db.execute("select id, task, queue, state from tallybook.job").fetchall() == [
        (1, "send_welcome", "mail", "completed")
    ]


def test_the_tutorials_files_run(tmp_path: Path, dsn: str, db: Any) -> None:
    """The tutorial's files as written: a rolled-back job is never seen; the next one fails, waits and completes."""
    assert project(tmp_path, "docs/tutorial.md") == ["app.py", "signup.py", "test_signup.py"]
    python(tmp_path, dsn, "signup.py")
    assert db.execute("select id from customer").fetchall() == [(2,)]
    jobs = "select args ->> 'user_id', state, attempts from tallybook.job order by id"
    assert db.execute(jobs).fetchall() == [("2", "available", 0), ("2", "scheduled", 0)]
    python(tmp_path, dsn, "-c", DRAIN)
    assert db.execute(jobs).fetchall() == [("2", "retrying", 1), ("2", "scheduled", 0)]
    (tmp_path / "mail-server-is-up").touch()
    db.execute("update tallybook.scheduled set run_at = clock_timestamp() where failures = 1")
    assert "welcome, user 2 (de)" in python(tmp_path, dsn, "-c", DRAIN)
    assert db.execute(jobs).fetchall() == [("2", "completed", 2), ("2", "scheduled", 0)]


@pytest.mark.slow
def test_the_files_of_the_subjects_page_run(tmp_path: Path, dsn: str, db: Any) -> None:
    """S3-02 S3-13 S3-39 S3-40: docs/subjects.md as written: pushed once, run, in bulk, ended, forwarded, upgraded."""
    files = ["app.py", "push.py", "bulk.py", "crawl.py", "forward.py", "app2.py", "status.py"]
    assert project(tmp_path, "docs/subjects.md") == files
    (printed,) = blocks(ROOT / "docs/subjects.md", "text")
    assert python(tmp_path, dsn, "push.py") == printed
    assert "price of asset 41\nprice of asset 42\n" in python(tmp_path, dsn, "-c", DRAIN)
    assert python(tmp_path, dsn, "bulk.py").splitlines() == [
        "asset:41 updated True True", "asset:42 updated True True", "asset:43 created False True",
    ]  # fmt: skip

    python(tmp_path, dsn, "crawl.py")
    python(tmp_path, dsn, "forward.py")
    assert "has 1024 bytes" in python(tmp_path, dsn, "-c", f"import crawl, forward; {DRAIN}; drain(app)")
    crawled = "select subject, state, args -> 'seen', failures from tallybook.subject where task = 'crawl' order by 1"
    assert db.execute(crawled).fetchall() == [
        ("https://a.example", "planned", 1, 0), ("https://c.example", "planned", None, 1),
        ("https://d.example", "killed", None, 0),
    ]  # fmt: skip
    assert python(tmp_path, dsn, "status.py") == "completed 1 0 {'url': 'https://example.org', 'size': 1024}\n"

    travel(dsn, timedelta(hours=1))
    python(tmp_path, dsn, "-c", DRAIN.replace("from app", "from app2"))
    rows = db.execute("select distinct s.args -> 'currency', j.options -> 'version' from tallybook.subject s"
                      " join tallybook.job j on j.id = s.job_id where s.task = 'refresh'")  # fmt: skip
    assert rows.fetchall() == [("EUR", 2)]


def test_the_sql_page_ends_subjects_as_it_says(db: Any) -> None:
    """S3-07 S3-28 S3-29: after docs/sql.md each subject has the state that its verb sets."""
    for block in blocks(ROOT / "docs/sql.md", "sql"):
        for statement in statements(block):
            db.execute(statement)
    found = db.execute(
        "select subject, state, iterations, failures, args -> 'etag' from tallybook.subject where task = 'crawl'"
    )
    known = {row[0]: row[1:] for row in found.fetchall()}
    (appended,) = [known.pop(name) for name in list(known) if not name.endswith(".example")]
    assert appended == ("completed", 1, 0, None)
    assert known == {
        "a.example": ("planned", 1, 0, "x7"),
        "e.example": ("planned", 0, 1, None),
    }  # d.example is forgotten


@pytest.mark.slow
@pytest.mark.direct("makes databases from a template, which a pooler keeps open")
def test_the_tutorials_test_passes(tmp_path: Path, dsn: str) -> None:
    """The tutorial's test passes under pytest, with the fixture that Tallybook provides."""
    project(tmp_path, "docs/tutorial.md")
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_signup.py")
    assert "1 passed" in python(tmp_path, dsn, *arguments, TALLYBOOK_TEST_DSN=dsn)


@pytest.mark.slow
def test_the_example_of_the_fan_out_page_runs(tmp_path: Path, dsn: str, db: Any) -> None:
    """S4-22: docs/fan-out.md as written: two mails, a cancelled message, and a follow-up that reports them, once."""
    assert project(tmp_path, "docs/fan-out.md") == ["app.py", "submit.py"]
    (printed,) = blocks(ROOT / "docs/fan-out.md", "text")
    assert python(tmp_path, dsn, "submit.py") == printed
    states = "select array_agg(state order by id) from tallybook.job"
    assert db.execute(states).fetchone() == (["completed", "completed", "cancelled", "completed"],)


def test_the_example_of_the_queues_page_runs(tmp_path: Path, dsn: str) -> None:
    """docs/queues.md as written: a queue is created, read, truncated and dropped."""
    assert project(tmp_path, "docs/queues.md") == ["queues.py"]
    assert python(tmp_path, dsn, "queues.py").splitlines() == ["created", "['send', 'send']", "3", "True"]


@pytest.mark.slow
def test_the_example_of_the_counting_page_runs(tmp_path: Path, dsn: str, db: Any) -> None:
    """S3-14, S3-33, S4-16: docs/counting.md as written: counts, today's completed jobs, times, events; its commands."""
    page = ROOT / "docs/counting.md"
    assert project(tmp_path, "docs/counting.md") == ["counting.py"]
    (expected,) = blocks(page, "text")
    printed = python(tmp_path, dsn, "counting.py").splitlines()
    # An hour or a day may have just begun.
    told = [line for line in expected.splitlines() if line not in ("3", "{('mail', 'send'): 3}")]
    assert [line for line in printed if line in told] == told and len(printed) == len(expected.splitlines())
    for block in blocks(page, "sh"):
        for line in block.splitlines():
            python(tmp_path, dsn, "-m", *shlex.split(line))
    assert db.execute("select n::int from tallybook.event_counts() where name = 'invoice.sent'").fetchone() == (1,)


def test_the_example_of_the_why_page_runs(tmp_path: Path, dsn: str) -> None:
    """Issue 6, 4: docs/why.md as written: no worker serves the queue, then the job is dead; a link lists its events."""
    assert project(tmp_path, "docs/why.md") == ["app.py", "ask.py"]
    (printed,) = blocks(ROOT / "docs/why.md", "text")
    assert python(tmp_path, dsn, "ask.py") == printed


def test_the_example_of_the_jobs_page_runs(tmp_path: Path, dsn: str) -> None:
    """Issue 7: docs/jobs.md as written: jobs are found by their error, in two pages, and the first page is retried."""
    assert project(tmp_path, "docs/jobs.md") == ["app.py", "find.py"]
    (printed,) = blocks(ROOT / "docs/jobs.md", "text")
    assert python(tmp_path, dsn, "find.py") == printed


def test_the_reasons_of_the_why_page_are_those_of_the_functions() -> None:
    """docs/why.md lists exactly the codes that `why` can return."""
    listed = set(words(table(text("docs/why.md"), "reason")))
    folder = ROOT / "src/tallybook/sql/read/why"
    source = "".join(file.read_text(encoding="utf-8") for file in folder.glob("*.sql"))
    given = set(re.findall(r"select (?:v_state, |\d+, )?'(\w+)'", source)) | set(
        re.findall(r"(?:then|else) '([a-z]+_[a-z]+)'", source)
    )
    assert listed == given


def test_the_example_of_the_limits_page_runs(tmp_path: Path, dsn: str, db: Any) -> None:
    """S1-18: docs/limits.md as written: a provider's second call waits for its turn, another provider's does not."""
    assert project(tmp_path, "docs/limits.md") == ["app.py", "run.py", "tenants.py"]
    printed, _ = blocks(ROOT / "docs/limits.md", "text")
    said = python(tmp_path, dsn, "run.py").splitlines()
    assert [*sorted(said[:2]), *said[2:]] == printed.splitlines(), "the first two start at the same moment"
    starts = db.execute(
        "select array_agg(called_at order by called_at) from tallybook.rate_call where name = 'provider:acme'"
    )
    assert len(starts.fetchone()[0]) == 2


def test_the_fair_example_of_the_limits_page_runs(tmp_path: Path, dsn: str) -> None:
    """docs/limits.md as written: the jobs of two tenants run in turn."""
    project(tmp_path, "docs/limits.md")
    _, printed = blocks(ROOT / "docs/limits.md", "text")
    assert python(tmp_path, dsn, "tenants.py") == printed


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name)
def test_python_blocks_are_python(page: Path) -> None:
    """Every Python block of a page can be parsed."""
    for block in blocks(page, "python"):
        ast.parse(block)


# The command line


COMMANDS = dict(commands())


def options(command: click.Command) -> set[str]:
    """Every spelling of every option."""
    found = {"-h", "--help", "--version"}
    for param in command.params:
        if isinstance(param, click.Option):
            found |= {*param.opts, *param.secondary_opts}
    return found


def lines_of_code(page: Path) -> Iterator[str]:
    """Lines that a reader would type: those of shell blocks, and texts in backticks elsewhere."""
    whole = page.read_text(encoding="utf-8")
    for language, body in FENCED.findall(whole):
        if language == "sh":
            yield from (line.split("  #")[0] for line in body.splitlines())
    yield from re.findall(r"`([^`\n]+)`", FENCED.sub("", whole))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_and_option_in_the_docs_exists(page: Path) -> None:
    """Each `tallybook ...` on a page names an existing command with existing options."""
    for line in lines_of_code(page):
        assert_exists(line, name(page))


def assert_exists(line: str, where: str) -> None:
    """Fail for a line `tallybook ...` with an unknown command or option."""
    found = re.match(r"tallybook(?: (.*))?$", line.strip())
    path: tuple[str, ...] = ()
    for word in (found[1] or "").split() if found else ():
        if word.startswith("-"):
            flag = word.split("=")[0]
            assert flag in options(COMMANDS[path]), f"{where}: {line}: no option {flag}"
            if isinstance(COMMANDS[path], click.Group):
                break  # the group itself is run
        elif isinstance(COMMANDS[path], click.Group):
            assert (*path, word) in COMMANDS, f"{where}: {line}: no command {word!r}"
            path = (*path, word)


def test_the_dashboard_and_the_doctor_name_commands_that_exist() -> None:
    """Each command and option in the dashboard's templates and in the doctor's advice exists."""
    source = Path(tallybook.__file__).parent
    templates = sorted((source / "extra" / "dashboard" / "templates").glob("*.html"))
    doctor = [source / "_db" / "doctor.py", *sorted((source / "sql" / "read" / "doctor").glob("*.sql"))]
    lines = [(path.name, one) for path in templates for one in re.findall(r"\btallybook [a-z -]+", path.read_text())]
    for path in doctor:
        text = re.sub(r"'\s*\n\s*'", "", path.read_text())  # one literal over several lines
        lines += [(path.name, one) for one in re.findall(r"`(tallybook [^`]+)`", text)]
    assert len(lines) > 15 and {path.name for path in doctor} & {where for where, _ in lines}
    for where, line in lines:
        assert_exists(re.sub(r" (only|ID)\b.*", "", line), where)
    for path in sorted((source / "extra" / "dashboard").glob("*.py")):
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text()):
            assert flag in options(COMMANDS[("web",)]), f"{path.name}: no option {flag}"


def test_every_option_that_stands_alone_exists() -> None:
    """An option that a page names in backticks without its command belongs to some command."""
    known = set().union(*map(options, COMMANDS.values())) | {"--strict"}  # mypy's
    for page in PAGES:
        for line in lines_of_code(page):
            if found := re.match(r"(--?[a-zA-Z][\w-]*)(?: .*)?$", line):
                assert found[1] in known, f"{name(page)}: {line}"


def test_every_command_is_in_the_docs() -> None:
    """Each command is shown with its group on some page, or at least named in the list of CHANGELOG.md."""
    everything = "\n".join(line for page in PAGES for line in lines_of_code(page))
    named = set(re.findall(r"`([a-z]+)`", text("CHANGELOG.md")))
    for path, command in COMMANDS.items():
        if not isinstance(command, click.Group):
            shown_whole = re.search(rf"tallybook {' '.join(path)}\b", everything)
            assert shown_whole or (len(path) == 1 and path[0] in named), " ".join(path)


@pytest.mark.parametrize("example", ["price_feed", "form_submissions"])
def test_all_that_a_newcomer_copies_of_an_example_has_400_lines(example: str) -> None:
    """Python, tables and pages together; the run and the outside world that it simulates are not copied."""
    files = [path for path in (ROOT / "examples" / example).rglob("*") if path.suffix in (".py", ".sql", ".html")]
    copied = [path for path in files if path.parent.name != "tests" and path.name not in ("__main__.py", "world.py")]
    assert {"jobs.py", "web.py", "schema.sql", "page.html"} <= {path.name for path in copied}
    assert sum(len(path.read_text().splitlines()) for path in copied) <= 400


def test_every_make_target_in_the_docs_exists() -> None:
    """Each `make ...` on a page is a target of the Makefile, and CONTRIBUTING lists all of them."""
    makefile = text("Makefile")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    examples = re.findall(r"^EXAMPLES := (.*)", makefile, re.MULTILINE)[0].split()
    assert set(examples) == {path.parent.name for path in (ROOT / "examples").glob("*/__main__.py")}
    for page in PAGES:
        for line in lines_of_code(page):
            if found := re.match(r"(?:[A-Z]+=\S+ )?make ([a-z_-]+)", line):
                assert found[1] in targets | {f"example-{one}" for one in examples}, f"{name(page)}: {line}"
    listed = {line.removeprefix("make ") for line in words(table(text("CONTRIBUTING.md"), "command"))}
    assert targets - {"help"} == listed


# States


def test_states_are_those_that_the_view_can_show(db: Any) -> None:
    """docs/states.md lists exactly the states in the definition of tallybook.job, and each can be reached."""
    listed = words(table(text("docs/states.md"), "state"))
    view = text("src/tallybook/sql/read/views/job.sql")
    in_view = set(re.findall(r"(?:then|else) '(\w+)'", view))
    in_view |= set(re.findall(r"(?:select|then|else) '(\w+)'", text("src/tallybook/sql/lookups/_aside.sql")))
    for ended in re.findall(r"or o\.state in \(([^)]*)\)", view):
        in_view |= set(re.findall(r"'(\w+)'", ended))
    assert len(listed) == len(set(listed)) and set(listed) == in_view

    for task in ("completed", "cancelled", "dead", "retrying", "running"):
        db.execute("select tallybook.enqueue('default', %s)", (task,))
    db.execute("select tallybook.worker_start('here', '{default}')")
    lease = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
    db.execute("select tallybook.claim(1, '{default}', '{10}', %s::uuid)", (lease,))
    db.execute("select tallybook.complete(%s, 1, 1), tallybook.cancel_running(%s, 2, 1)", (lease, lease))
    db.execute("select tallybook.fail(%s, 3, 1, '{}', final => true), tallybook.fail(%s, 4, 1, '{}')", (lease, lease))
    for task in ("first of its key", "waiting"):
        db.execute("select tallybook.enqueue('default', %s, order_key => 'k')", (task,))
    lease = "7c9e6679-7425-40de-944b-e07fc1f90ae8"
    db.execute("select tallybook.claim(1, '{default}', '{10}', %s::uuid)", (lease,))
    db.execute("select tallybook.order_admit(array[%s::uuid, %s::uuid], '{6,7}', '{1,1}')", (lease, lease))
    db.execute("select tallybook.enqueue('default', 'available')")
    db.execute("select tallybook.enqueue('default', 'scheduled', run_at => now() + interval '1 hour')")
    assert set(listed) == {row[0] for row in db.execute("select state from tallybook.job where state = task")}


def test_ends_of_attempts_are_those_of_the_type(db: Any) -> None:
    """docs/states.md lists exactly the values of tallybook.ending."""
    known = [row[0] for row in db.execute("select unnest(enum_range(null::tallybook.ending))::text")]
    assert sorted(words(table(text("docs/states.md"), "end"))) == sorted(known)


def test_reasons_and_answers_are_those_of_the_functions() -> None:
    """docs/states.md lists the reasons with which functions make a job dead, and the return values of cancel."""
    functions = ROOT / "src/tallybook/sql"
    buried = {
        reason
        for file in functions.rglob("*.sql")
        for reason in re.findall(r"perform tallybook\._make_dead\(e, '(\w+)'", file.read_text(encoding="utf-8"))
    }
    assert set(words(table(text("docs/states.md"), "reason"))) == buried
    cancel = (functions / "control/cancel.sql").read_text(encoding="utf-8")
    head = {word for line in re.findall(r"^--   (\w[\w, ]*?)  ", cancel, re.MULTILINE) for word in line.split(", ")}
    assert set(words(table(text("docs/states.md"), "return value"))) == head


# Reliability


def test_the_table_of_faults_is_whole_and_names_tests_that_exist() -> None:
    """docs/reliability.md lists F1 to F50, each with existing tests or a note that it does not apply."""
    rows = table(text("docs/reliability.md"), "#")
    assert [row[0] for row in rows] == [f"F{number}" for number in range(1, 51)]
    known = {
        found
        for file in (ROOT / "tests").rglob("test_*.py")
        for found in re.findall(r"def (test_\w+)\(", file.read_text(encoding="utf-8"))
    }
    for row in rows:
        named = set(re.findall(r"`(test_\w+)`", row[3]))
        assert named <= known, row[0]
        assert named or row[3] == "does not apply yet", row[0]


# Errors


def test_errors_are_those_of_the_module() -> None:
    """docs/errors.md lists exactly the classes of tallybook.errors, each with its SQLSTATE."""
    rows = table(text("docs/errors.md"), "error")
    classes = {
        found
        for found, value in vars(tallybook.errors).items()
        if inspect.isclass(value) and issubclass(value, TallybookError)
    }
    listed = words(rows)
    assert len(listed) == len(set(listed)) and set(listed) == classes
    states = {word: row[1] for word, row in zip(listed, rows, strict=True) if row[1]}
    by_code = {cls.__name__: code for code, cls in tallybook.errors._BY_SQLSTATE.items()}
    assert states == {
        **by_code,
        "UnknownNode": "TB002",
        "UnknownProvider": "TB002",
        "UnknownQueue": "TB002",
        "UnknownSchedule": "TB002",
    }  # these share a code; the verb decides between them


def test_every_sqlstate_of_the_functions_is_listed() -> None:
    """Each TB0xx that a function raises is in docs/errors.md."""
    raised = {
        code
        for file in (ROOT / "src/tallybook/sql").rglob("*.sql")
        for code in re.findall(r"errcode = '(TB\d+)'", file.read_text(encoding="utf-8"))
    }
    assert raised and raised <= set(re.findall(r"TB\d+", text("docs/errors.md")))


# Configuration


def test_worker_options_are_those_of_the_settings() -> None:
    """docs/configuration.md lists each field of WorkerSettings with its default and option of `tallybook worker`."""

    def shown(field: Field[Any]) -> str:
        """The default as docs/configuration.md writes it."""
        if field.default is MISSING or field.default is None:
            undeclared = {
                "queues": "see below",
                "name": "host:pid:random",
                "max_abandoned": "the number of slots",
                "direct_dsn": "none",
                "metrics_port": "none",
                "rescue_look": "none",
                "children": "one per slot",
            }
            return undeclared[field.name]
        return str(field.default).lower() if isinstance(field.default, bool) else field.default

    rows = table(section("docs/configuration.md", "Worker"), "option")
    assert words(rows) == [field.name for field in fields(WorkerSettings)]
    for row, field in zip(rows, fields(WorkerSettings), strict=True):
        expected = shown(field)
        assert (parse_duration(row[2]) if isinstance(expected, timedelta) else row[2]) == expected, field.name
    assert f"has {SLOTS} slots" in section("docs/configuration.md", "Worker")
    command = COMMANDS["worker",]
    own = {
        row[0]: row
        for row in table(section("docs/configuration.md", "Worker").split("only on the command line")[1], "option")
    }
    listed = {*words(rows, 1), *words(list(own.values()))}
    assert listed == options(command) - {"-h", "--help", "--version"}
    for param in command.params:
        row = own.get(f"`{param.opts[-1]}`")
        if row and param.default is not None and isinstance(param.default, str | int):
            assert row[1] == str(param.default), param.name


def test_task_options_are_those_of_the_functions() -> None:
    """docs/configuration.md lists the options of @app.task, with their defaults, and those of with_."""
    part = section("docs/configuration.md", "Task")
    declared = inspect.signature(tallybook.App.task).parameters
    rows = table(part, "option of `@app.task`")
    assert words(rows) == [found for found in declared if found not in ("app", "fn")]
    defaults = {words([row])[0]: row[1].strip("`") for row in rows}
    assert defaults["queue"] == declared["queue"].default
    assert defaults["priority"] == str(declared["priority"].default)
    for_one = words(table(part, "option of `with_`, for one job"))
    assert sorted(for_one) == sorted(set(inspect.signature(Task.with_).parameters) - {"self", "unknown"})


def test_retry_policies_wait_as_the_table_says() -> None:
    """S2-07 S4-11: each policy in docs/retries.md waits as long as its row says, and has the JSON form of its row."""

    def _value(node: ast.expr) -> Any:
        """A number, or timedelta(minutes=5)."""
        if isinstance(node, ast.Call):
            return timedelta(
                **{argument.arg: ast.literal_eval(argument.value) for argument in node.keywords if argument.arg}
            )
        return ast.literal_eval(node)

    known = {name: getattr(tallybook, name) for name in ("Exponential", "Linear", "Constant")}
    rows = table(text("docs/retries.md"), "`retry=`")
    for code, waits, form in rows:
        call = ast.parse(code.strip("`"), mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        given = {argument.arg: _value(argument.value) for argument in call.keywords if argument.arg}
        policy = known[call.func.id](*map(_value, call.args), **given)
        found = [policy.delay(failures) / timedelta(minutes=1) for failures in range(1, 6)]
        assert ", ".join(f"{wait:g}" for wait in found) + " min" == waits, code
        assert to_json(policy) == json.loads(form.strip("`")) and from_json(to_json(policy)) == policy
    assert {row[0].strip("`").split("(")[0] for row in rows} == set(known)


def test_extras_are_those_of_the_package() -> None:
    """docs/configuration.md lists exactly the extras of pyproject.toml, except the one for development."""
    declared = tomllib.loads(text("pyproject.toml"))["project"]["optional-dependencies"]
    listed = words(table(section("docs/configuration.md", "Extras"), "extra"))
    assert len(listed) == len(set(listed)) and set(listed) == set(declared) - {"dev"}


def test_environment_variables_are_those_of_the_code() -> None:
    """docs/configuration.md lists exactly the variables TALLYBOOK_... that the package reads."""
    read = {
        found
        for file in (ROOT / "src").rglob("*.py")
        for found in re.findall(r"\"(TALLYBOOK_[A-Z_]+)\"", file.read_text(encoding="utf-8"))
    }
    internal = {found for found in read if found.startswith("TALLYBOOK_PARENT_")}  # from a supervisor to its children
    assert set(words(table(text("docs/configuration.md"), "variable"))) == read - internal


# The pages themselves


@pytest.mark.parametrize("page", sources(), ids=name)
def test_links_between_pages_resolve(page: Path) -> None:
    """Every link and every HTML picture leads to an existing file of the repository, and to an existing heading."""

    def anchor(heading: str) -> str:
        """The anchor that a heading gets on the web."""
        return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")

    whole = FENCED.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", whole) + re.findall(r"\b(?:src|href)=\"([^\"]+)\"", whole):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_relative_to(ROOT) and file.exists(), f"{name(page)}: {target}"
        if fragment:
            headings = re.findall(r"^#+ (.+)$", FENCED.sub("", file.read_text(encoding="utf-8")), re.MULTILINE)
            assert fragment in map(anchor, headings), f"{name(page)}: {target}"


def test_the_list_of_pages_has_every_page() -> None:
    """docs/pages.md links to each page of docs/, by topic."""
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", text("docs/pages.md")))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"pages.md"}


def test_diagrams_are_pictures() -> None:
    """Pages show diagrams as pictures, because the site shows a source as text; each picture has a dark form."""
    assert [page for page in sources() if "```mermaid" in page.read_text(encoding="utf-8")] == []
    for picture in (ROOT / "docs/pictures").glob("*.svg"):
        assert "prefers-color-scheme: dark" in picture.read_text(encoding="utf-8"), picture


def test_files_and_folders_that_contributing_names_exist() -> None:
    """Each folder of CONTRIBUTING's layout exists, and so does each file that a page names by its path."""
    for word in words(table(text("CONTRIBUTING.md"), "folder")):
        assert (ROOT / word).exists(), word
    for page in PAGES:
        for path in re.findall(r"`((?:src|tests|docs|tools|bench)/[\w./]+)`", page.read_text(encoding="utf-8")):
            if "VERB" not in path:
                assert (ROOT / path).exists(), f"{name(page)}: {path}"


def _figures() -> Iterator[tuple[str, list[str]]]:
    """Yield each row of the tables of figures in docs/benchmarks.md, with the name of its benchmark."""
    parts = re.split(r"^### (\w+): .*$", text("docs/benchmarks.md"), flags=re.MULTILINE)[1:]
    for bench, part in zip(parts[::2], parts[1::2], strict=True):
        for row in table(part, "figure"):
            yield bench, row


def test_benchmark_figures_are_those_of_the_benches() -> None:
    """docs/benchmarks.md has one section per benchmark, with one row for each of the figures that it prints."""
    rows = [(bench, row[0].strip("`"), row[3]) for bench, row in _figures()]
    assert len(rows) == len({row[:2] for row in rows})
    for bench, figure, _ in rows:
        literals = re.findall(r'"([\w{}]+)"', text(f"bench/{bench}.py"))
        assert any(
            re.fullmatch(re.sub(r"\{\w+\}", r"\\w+", literal), figure)
            for literal in literals
            if re.sub(r"\{\w+\}", "", literal)
        ), f"{figure} is not of bench {bench}"
    known = ast.literal_eval(re.findall(r"^NAMES = (\(.+?\))$", text("bench/__main__.py"), re.MULTILINE | re.DOTALL)[0])
    assert tuple(dict.fromkeys(bench for bench, *_ in rows)) == known
    missed = {figure for _, figure, measured in rows if "missed" in measured}
    assert missed == set(re.findall(r"`(\w+)`", section("docs/benchmarks.md", "Missed targets")))


def test_the_figures_of_the_comparison_are_those_of_the_benchmarks() -> None:
    """Each figure of docs/comparison.md is in docs/benchmarks.md, for the same thing."""
    rows = {row[0].strip("`"): row for _, row in _figures()}
    part = section("docs/comparison.md", "Speed")
    for figure in ("ratio_to_graphile", "ratio_to_pgqueuer"):
        ratio = re.findall(r"\d+\.\d+", rows[figure][3])[0]
        assert f"{ratio} times" in part
    given = {*re.findall(r"\d+\.\d+ ms", part)}
    told = {*re.findall(r"\d+\.\d+ ms", " ".join(rows["p50_ms_at_50"]))}
    assert given and given <= told
    assert len(re.findall(r"\d+\.\d+", part)) == 2 + len(given)
