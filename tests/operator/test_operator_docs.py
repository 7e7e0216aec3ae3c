"""docs/operator-api.md is checked against the API: its clients run, its tables and the document are complete."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from support.cli import Command
from support.operator_client import SECRET, key_file
from support.operator_process import serving
from support.pages import blocks, section, table, text
from support.paths import ROOT
from tallybook import Counts, QueueInfo
from tallybook.extra.operator import openapi
from tallybook.extra.operator.keys import SCOPES
from tallybook.extra.operator.problems import CODES
from tallybook.extra.operator.routes import OPERATIONS
from tallybook.web import read_keys

PAGE = "docs/operator-api.md"


def scripts(folder: Path) -> None:
    """Write the page's files; each names itself in its first line."""
    for language in ("sh", "python"):
        for block in blocks(ROOT / PAGE, language):
            first = block.splitlines()[0]
            if first.startswith("# ") and first.split()[1].rstrip(":") in ("ask.py", "call.sh", "call.py", "server.py"):
                (folder / first.split()[1].rstrip(":")).write_text(block, encoding="utf-8")


def run(folder: Path, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a client of the page."""
    env = {**os.environ, "API_URL": url, "API_KEY": "deploy", "API_SECRET": SECRET}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """The page's key file, with a real secret."""
    (block,) = blocks(ROOT / PAGE, "toml")
    path = key_file(tmp_path, block.replace("64 hexadecimal digits", SECRET))
    assert [(key.id, key.queues) for key in read_keys(path)] == [("deploy", ("mail",))]
    return path


@pytest.mark.slow
def test_the_client_of_the_page_in_python(tmp_path: Path, dsn: str, db: Any, keys: Path) -> None:
    """S2-12: the page's ask.py, and its call.py, with only the standard library, are served by a real server."""

    def eval_of(line: str) -> Any:
        """A printed line of Python as a value."""
        import ast

        return ast.literal_eval(line)

    db.execute("select tallybook.enqueue('mail', 'send_welcome')")
    scripts(tmp_path)
    with serving(dsn, keys) as url:
        asked = run(tmp_path, url, sys.executable, "ask.py")
        assert asked.returncode == 0, asked.stderr
        assert "send_welcome" in asked.stdout
        done = run(tmp_path, url, sys.executable, "-I", "call.py")
    assert done.returncode == 0, done.stderr
    paused, counts, dry = (eval_of(line) for line in done.stdout.splitlines())
    assert paused == {"queue": "mail", "paused": True, "changed": True}
    assert counts["counts"][0]["available"] == 1 and dry == {"dry_run": True, "matched": 0}


@pytest.mark.slow
def test_the_client_of_the_page_in_a_shell(tmp_path: Path, dsn: str, db: Any, keys: Path) -> None:
    """S2-12: a real server serves the page's call.sh, with openssl and curl: a body, a query and encoded names."""
    missing = [program for program in ("sh", "curl", "openssl") if shutil.which(program) is None]
    assert not missing, f"this test needs {', '.join(missing)}: without them the page's example is not shown to work"
    db.execute("select tallybook.enqueue('mail', 'send_welcome')")
    db.execute("select tallybook.schedule_set('a/b ü', 'report', '{}', every => '1 day', queue => 'mail')")
    scripts(tmp_path)
    answers = []
    with serving(dsn, keys) as url:
        for words in (
            ("POST", "/queues/mail/pause"),
            ("GET", "/counts?task=send_welcome&queue=mail"),
            ("POST", "/schedules/a%2Fb%20%C3%BC/run"),
            ("POST", "/dead-letters/retry", '{"queue": "mail", "dry_run": true}'),
        ):
            done = run(tmp_path, url, "sh", "call.sh", *words)
            assert done.returncode == 0, done.stdout + done.stderr
            answers.append(json.loads(done.stdout))
        refused = run(tmp_path, url, "sh", "call.sh", "POST", "/queues/pay/pause")
    assert answers[0]["changed"] and answers[1]["counts"][0]["available"] == 1
    assert (answers[2]["what"], answers[3]["matched"]) == ("enqueued", 0)
    assert refused.returncode != 0 and json.loads(refused.stdout)["code"] == "queue"


@pytest.mark.slow
def test_the_server_of_the_page_can_be_made(tmp_path: Path, dsn: str, keys: Path) -> None:
    """The page's server.py makes an API from the key file beside it, without a connection."""
    scripts(tmp_path)
    done = run(tmp_path, "", sys.executable, "-c", "import server; print(type(server.api).__name__)")
    assert (done.returncode, done.stdout) == (0, "OperatorApi\n"), done.stderr


@pytest.mark.slow
def test_the_tables_of_the_page_are_those_of_the_api() -> None:
    """S2-12: the page lists exactly the API's endpoints with their scopes, its scopes and its codes."""
    listed = [tuple(cell.strip("`") for cell in row[:3]) for row in table(text(PAGE), "endpoint")]
    assert listed == [(f"{one.method} {one.path}", one.scope, one.about) for one in OPERATIONS]
    assert [row[0].strip("`") for row in table(section(PAGE, "Keys"), "scope")] == list(SCOPES)
    codes = [(row[0].strip("`"), int(row[1]), row[2]) for row in table(text(PAGE), "code")]
    assert codes == [(code, status, meaning) for code, (status, meaning) in CODES.items()]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "of", "made"), [("list_queues", "queues", QueueInfo), ("counts", "counts", Counts)])
def test_a_row_of_a_list_is_described_whole(name: str, of: str, made: type) -> None:
    """The examples of queues and counts have the fields of what is listed, in their order."""
    (example,) = next(one for one in OPERATIONS if one.name == name).answer.example[of]
    assert list(example) == [field.name for field in fields(made)]


def test_the_document_names_what_is_served() -> None:
    """The OpenAPI document has every endpoint, an example for each value and a problem for each code."""
    document = openapi.document("/api/v1")
    served = {(one.method.lower(), one.path) for one in OPERATIONS}
    assert {(method, path) for path, methods in document["paths"].items() for method in methods} == served
    for one in OPERATIONS:
        found = document["paths"][one.path][one.method.lower()]
        said = " ".join(answer["description"] for answer in found["responses"].values())
        assert all(
            f"{code}: " in said for code in (*one.codes, "signature", "late", "replayed", "scope", "unavailable")
        )
        assert all("example" in parameter for parameter in found["parameters"])
        assert all("example" in next(iter(answer["content"].values())) for answer in found["responses"].values())


@pytest.mark.slow
def test_the_api_is_off_unless_it_has_keys(tmp_path: Path, dsn: str, keys: Path) -> None:
    """S2-12: `tallybook web` serves the API only with --api-keys, below /api/v1, and only to signed requests."""
    scripts(tmp_path)
    for option in ((), ("--api-keys", str(keys))):
        with Command(tmp_path, "web", "--port", "0", *option, dsn=dsn) as web:
            url = f"{web.address()}/api/v1"
            signed = run(tmp_path, url, "sh", "call.sh", "GET", "/queues")
            unsigned = subprocess.run(["curl", "-s", f"{url}/queues"], capture_output=True, text=True, check=True)
            assert SECRET not in web.output
        if option:
            assert json.loads(signed.stdout) == {"queues": []} and json.loads(unsigned.stdout)["code"] == "unsigned"
        else:
            assert signed.returncode != 0 and '"queues":' not in signed.stdout
            assert "unsigned" not in unsigned.stdout
