"""docs/operator-api.md is checked against the API, and so are clients: the page's, the package's and a fuzzer."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from support.cli import Command
from support.operator_client import OTHER, SECRET, key_file
from support.operator_process import serving
from support.outside import HttpServer, Reply, http_server
from support.pages import blocks, section, table, text
from support.paths import ROOT, TESTS
from tallybook import Counts, QueueInfo
from tallybook.errors import ConfigError, OperatorRefused
from tallybook.extra.operator import OperatorClient, openapi
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


IN_DOUBT = Reply(503, body=json.dumps({"code": "in_doubt", "detail": "the connection was lost at the commit"}).encode())


@pytest.fixture
def outside() -> Iterator[HttpServer]:
    """A server whose answers the test sets."""
    with http_server() as server:
        yield server


@pytest.fixture
def api(outside: HttpServer) -> OperatorClient:
    return OperatorClient(f"{outside.url}/api/v1/", "ops", SECRET, timeout=5)


def test_a_real_api_serves_and_refuses_the_client(tmp_path: Path, dsn: str, db: Any) -> None:
    """S2-12: the client reads, changes and enqueues; a refusal raises an error with status, code and reason."""
    keys = tmp_path / "keys.toml"
    keys.write_text(
        f'[keys.ops]\nsecret = "{SECRET}"\nscopes = ["read", "operate", "enqueue"]\n'
        f'[keys.reader]\nsecret = "{OTHER}"\nscopes = ["read"]\n'
    )
    keys.chmod(0o600)
    with serving(dsn, keys) as url:
        api, reader = OperatorClient(url, "ops", SECRET), OperatorClient(url, "reader", OTHER)
        assert api.call("post", "/jobs", {"queue": "mail", "task": "send", "args": {"to": "ada"}})["job"] > 0
        assert reader.call("GET", "/counts?task=send&queue=mail")["counts"][0]["available"] == 1
        assert api.call("POST", "/queues/mail/pause") == {"queue": "mail", "paused": True, "changed": True}
        with pytest.raises(OperatorRefused, match="403 scope: ") as refused:
            reader.call("POST", "/queues/mail/resume")
        assert (refused.value.status, refused.value.code) == (403, "scope")
        with pytest.raises(OperatorRefused) as unknown:
            OperatorClient(url, "ops", OTHER).call("POST", "/queues/mail/resume")
        assert unknown.value.code == "signature"
    assert db.execute("select paused_at is not null from tallybook.queue where name = 'mail'").fetchone() == (True,)


@pytest.mark.parametrize("first", [IN_DOUBT, Reply(length=100, body=b"{")], ids=["in doubt", "broken off"])
def test_a_request_of_unknown_fate_is_sent_again_as_it_was(
    api: OperatorClient, outside: HttpServer, first: Reply
) -> None:
    """After a lost answer the client sends the same request, nonce included, so that the API can recognize it."""
    outside.reply(first, Reply(body=b'{"retried": 3}'))
    assert api.call("POST", "/dead-letters/retry", {"queue": "mail"}) == {"retried": 3}
    one, two = outside.got
    assert one == two and one.headers["tallybook-nonce"] and one.path == "/api/v1/dead-letters/retry"
    assert json.loads(one.body) == {"queue": "mail"}


def test_a_request_is_sent_twice_at_most_and_a_refusal_once(api: OperatorClient, outside: HttpServer) -> None:
    """A request still in doubt after two tries is an error; a refusal is final; each call has its own nonce."""
    outside.reply(IN_DOUBT)
    with pytest.raises(OperatorRefused, match="in_doubt"):
        api.call("POST", "/queues/mail/pause")
    assert len(outside.got) == 2
    outside.reply(Reply(409, body=b'{"code": "conflict", "detail": "it runs", "hint": "Wait for its end"}'))
    with pytest.raises(OperatorRefused, match=r"409 conflict: it runs\. Wait for its end"):
        api.call("POST", "/jobs/7/retry")
    assert len(outside.got) == 3
    assert outside.got[0].headers["tallybook-nonce"] != outside.got[2].headers["tallybook-nonce"]


@pytest.mark.parametrize("status", [302, 307, 502])
def test_what_is_no_operator_api_is_refused(api: OperatorClient, outside: HttpServer, status: int) -> None:
    """A signed request follows no redirect, and an HTML page is no answer; the error asks for the address."""
    outside.reply(Reply(status, {"Location": f"{outside.url}/elsewhere"}, b"<html>"), Reply(body=b"{}"))
    with pytest.raises(OperatorRefused, match="with its prefix") as refused:
        api.call("GET", "/queues")
    assert (refused.value.status, refused.value.code, len(outside.got)) == (status, None, 1)


def test_where_nobody_listens_it_is_an_error_of_the_network() -> None:
    """No answer is an OSError; a URL that is not HTTP is refused at once; no error and no repr shows the secret."""
    with pytest.raises(OSError, match="refused"):
        OperatorClient("http://127.0.0.1:9", "ops", SECRET).call("GET", "/queues")
    for url in ("file:///etc/passwd", "127.0.0.1:8801"):
        with pytest.raises(ConfigError, match="does not begin with http") as wrong:
            OperatorClient(url, "ops", SECRET)
        assert SECRET not in str(wrong.value)
    assert SECRET not in repr(OperatorClient("http://127.0.0.1:9", "ops", SECRET))


def fuzz(dsn: str, db: Any, folder: Path, *options: str, broken: str = "") -> subprocess.CompletedProcess[str]:
    """Run it with all of its checks against a real server, which has one object of each kind that the examples name.

    The hooks compute the values of the four headers.
    """
    db.execute("select tallybook.enqueue('mail', 'send_welcome'), tallybook.worker_start('web-1', '{mail}')")
    db.execute("select tallybook.schedule_set('report-de', 'report', '{}', every => '1 day')")
    keys = key_file(folder, f'[keys.ops]\nsecret = "{SECRET}"\nscopes = ["admin"]\n')
    headers = [f"Tallybook-{name}: signed" for name in ("Key", "Timestamp", "Nonce", "Signature")]
    signed = [word for header in headers for word in ("--header", header)]
    with serving(dsn, keys, broken, log=folder / "server.log") as url:
        command = [
            str(Path(sys.executable).parent / "schemathesis"), "--config-file", str(TESTS / "support/fuzz.toml"), "run",
            f"{url}/openapi.json", *signed, "--checks", "all", "--max-examples", "4", "--seed", "7",
            "--no-color", "--suppress-health-check", "all", *options,
        ]  # fmt: skip
        env = {**os.environ, "SCHEMATHESIS_HOOKS": "support.fuzz_hooks", "PYTHONPATH": str(TESTS)}
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=550, check=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.direct("the fuzzer's server has many connections")
def test_the_fuzzer_finds_nothing(dsn: str, db: Any, tmp_path: Path) -> None:
    """S2-12: by all checks of schemathesis, a fitting request is accepted, a wrong or unsigned one is refused."""
    done = fuzz(dsn, db, tmp_path)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert "18 selected / 18 total" in done.stdout
    # Its requests were served, not only refused.
    assert db.execute("select count(distinct action) from tallybook.audits").fetchone()[0] >= 5
    assert (tmp_path / "server.log").read_text().count("Traceback") == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.direct("the fuzzer's server has many connections")
@pytest.mark.parametrize("broken", ["answer", "error", "unsigned"])
def test_the_fuzzer_finds_what_is_broken(dsn: str, db: Any, tmp_path: Path, broken: str) -> None:
    """Negative control: the fuzzer finds an undocumented answer, a defect, and a server that checks no signature."""
    done = fuzz(dsn, db, tmp_path, "--include-operation-id", "list_queues", broken=broken)
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr
    found = {"answer": "Response violates schema", "error": "Server error", "unsigned": "header accepted"}[broken]
    assert found in done.stdout, done.stdout[-4000:]
