"""tallybook subject: input, output and exit codes."""

import csv
import json
import shlex
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from support.cli import invoke
from tallybook import App, Kill, Reject, Reschedule
from tallybook._cli import subject
from tallybook.testing import drain


@pytest.fixture
def run(dsn: str) -> Any:
    """Run `tallybook subject ...` in this process."""
    return partial(invoke, "subject", to=dsn)


def rows(db: Any) -> list[tuple[Any, ...]]:
    query = 'select subject, args, priority, next_run_at from tallybook.subject order by subject collate "C"'
    return list(db.execute(query).fetchall())


def test_push_and_upsert_one(run: Any, db: Any) -> None:
    """S3-23 S3-25: push creates it once, upsert changes it; both report what they did, as text or JSON."""
    first = run("push", "prices", "refresh", "asset:42", '{"asset_id": 42}', "--delay", "1 hour", "--priority", "1")
    assert first.exit_code == 0
    assert first.output == "subject 'asset:42', job 1, is new\n"
    assert (
        run("push", "prices", "refresh", "asset:42", "-", typed="{}").output
        == "subject 'asset:42', job 1, is unchanged\n"
    )
    assert rows(db)[0][:3] == ("asset:42", {"asset_id": 42}, 1)
    at = "2031-01-01T00:00:00+00:00"
    said = run("upsert", "prices", "refresh", "asset:42", '{"asset_id": 7}', "--run-at", at, "--json")
    report = json.loads(said.output)
    assert (report["report"], report["job_id"], report["new_run_at"]) == ("updated", 1, at)
    assert rows(db) == [("asset:42", {"asset_id": 7}, 2, datetime.fromisoformat(at))]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("push", "prices", "refresh", "a", "[1]"), "ARGS_JSON must be one object, not an array"),
        (("push", "prices", "refresh", ""), "1 to 512 bytes"),
        (("push", "prices", "refresh", "a", "--delay", "5"), "a duration needs a unit"),
        (("upsert", "prices", "refresh"), "pass either a name or --file"),
        (("upsert", "prices", "refresh", "a", "--file", "x"), "pass either a name or --file"),
        (("upsert", "prices", "refresh", "--file", "no such file"), "--file no such file: No such file or directory"),
    ],
)
def test_a_slip_of_the_pen_is_told(run: Any, db: Any, words: tuple[str, ...], message: str) -> None:
    """Wrong input ends with exit code 2 and one line that says why."""
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.output
    assert rows(db) == []


def test_csv_is_upserted(run: Any, db: Any, tmp_path: Path) -> None:
    """S3-12 S3-13: a CSV of several batches, with quotes, line breaks, times, priorities; a rerun changes nothing."""
    file = tmp_path / "assets.csv"
    lines = [f'"x:{n}","{{""asset_id"": {n}}}",,' for n in range(2100)]
    lines += ['"a ""b""\nc","{""note"": ""x, y""}",2031-01-01T00:00:00+01:00,0', "plain,,,"]
    file.write_text("\ufeffsubject,args,run_at,priority\n" + "\n".join(lines) + "\n", encoding="utf-8")
    widest = csv.field_size_limit()
    first = run("upsert", "prices", "refresh", "--file", file, "--delay", "1 hour")
    assert (first.exit_code, first.output) == (0, "2102 subjects: 2102 created\n")
    assert csv.field_size_limit() == widest  # a setting of the whole process
    found = {row[0]: row[1:] for row in rows(db)}
    assert len(found) == 2102
    assert found['a "b"\nc'] == ({"note": "x, y"}, 0, datetime(2030, 12, 31, 23, tzinfo=UTC))
    assert found["x:2099"][:2] == ({"asset_id": 2099}, 2)
    assert found["plain"][0] == {}
    assert abs(found["plain"][2] - datetime.now(UTC) - timedelta(hours=1)) < timedelta(minutes=1)
    assert run("upsert", "prices", "refresh", "--file", file).output == "2102 subjects: 2102 unchanged\n"


def test_json_lines_are_upserted_and_reported_row_by_row(run: Any, db: Any) -> None:
    """S3-13: JSON lines from stdin; with --json one report per row, in the order of the file."""
    lines = [{"subject": "b", "args": {"n": 1}, "priority": 0}, {"subject": "a", "run_at": "2031-01-01T00:00:00Z"}]
    text = "\n\n".join(map(json.dumps, lines))
    result = run("upsert", "prices", "refresh", "--file", "-", "--json", typed=text)
    assert result.exit_code == 0
    assert [(row["subject"], row["report"]) for row in json.loads(result.output)] == [
        ("b", "created"),
        ("a", "created"),
    ]
    assert [row[:3] for row in rows(db)] == [("a", {}, 2), ("b", {"n": 1}, 0)]
    assert json.loads(run("upsert", "prices", "refresh", "--file", "-", "--json", typed="\n").output) == []
    assert run("upsert", "prices", "refresh", "--file", "-", typed="").output == "no subjects in it\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "name\na\n", "line 1: unknown column 'name'; the known columns are subject, args, run_at, priority"),
        ("x.csv", "args\n{}\n", "line 1: there is no column `subject`"),
        ("x.csv", "subject,args\na,{\n", "line 2: Expecting property name"),
        ("x.csv", "subject,args\na\n", "line 2: it does not have 2 columns"),
        ("x.csv", "subject,args\na,[]\n", "line 2: args must be one JSON object"),
        ("x.csv", "subject,run_at\na,2031-01-01\n", "line 2: run_at: "),
        ("x.csv", "subject,priority\na,low\n", "line 2: invalid literal"),
        ("x.csv", 'subject\n"a\n', "unexpected end of data"),
        ("x.jsonl", '{"subject": "a"}\n{"subject": 7}\n', "line 2: subject: 7: not a text"),
        ("x.jsonl", '{"subject": "a"}\n\n{"name": "b"}\n', "line 3: one JSON object with subject"),
        ("x.jsonl", "nonsense\n", "line 1: Expecting value"),
        ("x.jsonl", b"\xff\n", "it is not UTF-8"),
    ],
)
def test_a_wrong_line_is_named(run: Any, db: Any, tmp_path: Path, name: str, text: str | bytes, message: str) -> None:
    """A wrong file ends with exit code 2 and the line's number, and nothing of its batch is stored."""
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = run("upsert", "prices", "refresh", "--file", file)
    assert result.exit_code == 2
    assert message in result.output
    assert rows(db) == []


def test_what_is_in_before_a_wrong_line_is_told(run: Any, db: Any, tmp_path: Path) -> None:
    """Batches before the wrong line stay, and the message gives the number of their subjects."""
    file = tmp_path / "x.jsonl"
    file.write_text("".join(f'{{"subject": "{n}"}}\n' for n in range(1001)) + "nonsense\n")
    result = run("upsert", "prices", "refresh", "--file", file)
    assert result.exit_code == 2
    assert "the 1000 subjects before it are stored" in result.output and "line 1002" in result.output
    assert len(rows(db)) == 1000


def test_list_show_errors_and_forget(run: Any, dsn: str, db: Any) -> None:
    """S3-30: list by task, state and prefix, show with errors, the error log, and forget."""
    app = App("prices", dsn=dsn)

    @app.task
    async def refresh(asset_id: int) -> Any:
        return [Reschedule("+1 week"), Reject("502", {"code": 7}, ref_id="r-1", retry_in="1 hour"), Kill("gone")][
            asset_id
        ]

    for n, name in enumerate(("asset:0", "asset:1", "page:2")):
        refresh.subject(name).push(n).sync(db)
    refresh.enqueue_sync(db, 1)  # an ordinary job, whose error is not a subject's
    drain(app, dsn=dsn)
    listed = json.loads(run("list", "--json").output)
    assert [(row["subject"], row["state"], row["iterations"], row["failures"]) for row in listed] == [
        ("asset:0", "planned", 1, 0), ("asset:1", "planned", 0, 1), ("page:2", "killed", 1, 0),
    ]  # fmt: skip
    assert [row["subject"] for row in json.loads(run("list", "--prefix", "asset:", "--json").output)] == [
        "asset:0",
        "asset:1",
    ]
    killed = run("list", "--task", "refresh", "--state", "killed").output
    assert "page:2" in killed and "asset:0" not in killed
    assert run("list", "--queue", "other").output == "no such subjects\n"

    shown = run("show", "refresh", "asset:1").output
    assert "asset:1" in shown and "502" in shown and '{"code": 7}' in shown and "r-1" in shown
    found = json.loads(run("show", "refresh", "asset:1", "--json").output)
    assert (found["failures"], found["errors"][0]["ref_id"]) == (1, "r-1")
    missing = run("show", "refresh", "nobody")
    assert missing.exit_code == 1 and "has no subject 'nobody'" in missing.output

    errors = json.loads(run("errors", "--task", "refresh", "--since", "1 hour", "--json").output)
    assert {(row["subject"], row["message"]) for row in errors} == {("asset:1", "502"), ("page:2", "gone")}
    assert len(json.loads(run("errors", "--json").output)) == 2
    assert "r-1" in run("errors", "--subject", "asset:1").output
    assert run("errors", "--subject", "asset:0").output == "no errors\n"

    gone = run("forget", "refresh", "asset:0", "nobody")
    assert gone.exit_code == 1
    assert "subject 'asset:0' is forgotten\n" in gone.output and "subject 'nobody' is unknown\n" in gone.output
    assert [row[0] for row in rows(db)] == ["asset:1", "page:2"]


def test_a_list_continues(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full page, and a search that has stopped early, print the --after of the next page, also with --json."""

    def after(said: Result) -> str:
        words = shlex.split(said.stderr)
        return words[words.index("--after") + 1]

    lines = "".join(f'{{"subject": "it\'s {n:04}"}}\n' for n in range(1100))
    assert run("upsert", "prices", "refresh", "--file", "-", typed=lines).exit_code == 0
    for words in ((), ("--json",)):
        first = run("list", "--limit", "1", *words)
        assert "it's 0000" in first.stdout and "the first 1; --limit shows more, --after" in first.stderr
        assert "it's 0001" in run("list", "--limit", "1", "--after", after(first), *words).stdout
    monkeypatch.setattr(subject, "_LIST", subject._LIST.replace("1000000", "1000"))
    for words in ((), ("--json",)):
        stopped = run("list", "--prefix", "it's 109", *words)
        assert "it's" not in stopped.stdout and "not all were searched" in stopped.stderr
        rest = run("list", "--prefix", "it's 109", "--limit", "1", "--after", after(stopped), *words)
        assert "it's 1090" in rest.stdout


def test_a_name_in_two_queues(run: Any, db: Any, dsn: str) -> None:
    """A queue's own names are listed separately; show and forget need --queue, else the error names the queues."""
    for queue in ("eu", "us"):
        assert invoke("queue", "create", queue, "--own-names", to=dsn).exit_code == 0
        assert run("push", queue, "refresh", "a", "{}", "--delay", "1 hour").exit_code == 0
    refused = invoke("queue", "set", "eu", "--shared-names", to=dsn)
    assert refused.exit_code == 1 and "has had jobs" in refused.output
    listed = json.loads(run("list", "--json").output)
    assert [(row["subject"], row["scope"], row["queue"]) for row in listed] == [("a", "eu", "eu"), ("a", "us", "us")]
    for verb in ("show", "forget"):
        said = run(verb, "refresh", "a")
        assert said.exit_code == 1 and '"eu", "us"' in said.output and "ame the queue" in said.output
    assert json.loads(run("show", "refresh", "a", "--queue", "us", "--json").output)["scope"] == "us"
    assert run("forget", "refresh", "a", "--queue", "eu").output == "subject 'a' is forgotten\n"
    assert json.loads(run("show", "refresh", "a", "--json").output)["queue"] == "us"
    missing = run("show", "refresh", "a", "--queue", "eu")
    assert missing.exit_code == 1 and "has no subject 'a'" in missing.output
