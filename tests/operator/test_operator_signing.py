"""The operator API serves only a request that was signed exactly so, now, with a key that may make it."""

import asyncio
import hashlib
import hmac
import json
import logging
import time
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import click.testing
import httpx2
import pytest
from psycopg import sql

from support.broken import DIES_AT_COMMIT
from support.operator_client import OTHER, SECRET, Client, client, codes, headers
from support.operator_process import serving
from support.proxy import Proxy
from tallybook import App
from tallybook._app.queues import Queues
from tallybook._cli import cli
from tallybook.errors import ConfigError, QueueUnavailable
from tallybook.extra.dashboard import database
from tallybook.extra.operator import openapi, operations, serve, signed_headers
from tallybook.extra.operator.client import canonical
from tallybook.extra.operator.routes import OPERATIONS
from tallybook.extra.operator.signing import sent_path
from tallybook.web import Key, OperatorApi, operator_api

PAUSE = "/queues/mail/pause"


@pytest.fixture
def app(dsn: str, db: Any) -> App:
    db.execute("select tallybook.enqueue('mail', 'welcome'), tallybook.enqueue('pay', 'charge')")
    return App("shop", dsn=dsn)


@pytest.fixture
def api(app: App) -> OperatorApi:
    return operator_api(app, keys=[Key("ops", SECRET, ("admin",)), Key("reader", OTHER, ("read",))])


@pytest.fixture
async def call(api: OperatorApi) -> AsyncIterator[Client]:
    async with client(api) as one:
        yield one


def is_paused(db: Any) -> bool:
    return bool(db.execute("select count(paused_at) from tallybook.queues where name = 'mail'").fetchone()[0])


# What is signed


def test_the_signed_text_is_this() -> None:
    """S2-12: the signed text and signature of a known request never change: clients in any language rely on them."""
    body = b'{"reason": "late"}'
    text = canonical(
        key="ops", method="POST", path=b"/api/v1/jobs/7/cancel", query=b"b=2&a=1&a=0", timestamp="1767225600",
        nonce="0123456789abcdef", body=body,
    )  # fmt: skip
    digest = hashlib.sha256(body).hexdigest()
    expected = f"tallybook-v1\nops\nPOST\n/api/v1/jobs/7/cancel\na=0&a=1&b=2\n1767225600\n0123456789abcdef\n{digest}"
    assert text == expected.encode()
    signature = hmac.new(bytes.fromhex(SECRET), expected.encode(), hashlib.sha256).hexdigest()
    sent = headers("POST", "/api/v1/jobs/7/cancel?b=2&a=1&a=0", body, timestamp=1767225600, nonce="0123456789abcdef")
    assert sent["Tallybook-Signature"] == f"v1={signature}"


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://h:1/api/v1/jobs/7/cancel?b=2&a=1", "/api/v1/jobs/7/cancel?b=2&a=1"),
        ("/queues/a%2Fb%20c/pause", "/queues/a%2Fb%20c/pause"),
        ("http://h", "/"),
        ("https://h?queue=mail#top", "/?queue=mail"),
    ],
)
def test_signed_headers_are_those_of_the_page(url: str, target: str) -> None:
    """S2-12: the product signs exactly like a client that was written from the page alone; no two nonces are equal."""
    made = signed_headers("ops", SECRET, "post", url, b"{}", at=1767225600.9)
    nonce = made["Tallybook-Nonce"]
    assert made == headers("POST", target, b"{}", timestamp=1767225600, nonce=nonce)
    assert signed_headers("ops", SECRET, "post", url, b"{}", at=1767225600.9)["Tallybook-Nonce"] != nonce


async def test_signed_headers_are_served_once(call: Client) -> None:
    """S2-12: a signed request is served once; it is refused when it is repeated or has another body."""
    body = b'{"queue": "mail", "dry_run": true}'
    sent = signed_headers("ops", SECRET, "POST", "/dead-letters/retry", body) | {"Content-Type": "application/json"}
    assert codes(await call.http.post("/dead-letters/retry", content=body + b" ", headers=sent)) == (401, "signature")
    assert (await call.http.post("/dead-letters/retry", content=body, headers=sent)).status_code == 200
    again = await call.http.post("/dead-letters/retry", content=body, headers=sent)
    assert codes(again) == (409, "replayed")


@pytest.mark.parametrize("url", ["/queues/a b/pause", "/queues/\n/pause", "/queues/\u00e4/pause"])
def test_what_cannot_be_signed_is_said_without_the_secret(url: str) -> None:
    """A URL with unencoded characters and an invalid secret are errors at once, which do not show the secret."""
    with pytest.raises(ValueError, match="must be encoded"):
        signed_headers("ops", SECRET, "GET", url)
    with pytest.raises(ValueError, match="not hexadecimal") as told:
        signed_headers("ops", "not-" + SECRET, "GET", "/counts")
    assert SECRET not in "".join(traceback.format_exception(told.value))


async def raw(api: Any, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Send a request to the app as a server would, with a raw scope."""
    sent: list[Any] = []
    given = request["headers"]
    pairs = given if isinstance(given, list) else [(k.lower().encode(), v.encode()) for k, v in given.items()]
    bodies = request.get("bodies", [request.get("body", b"")])
    messages = [
        {"type": "http.request", "body": body, "more_body": n < len(bodies) - 1} for n, body in enumerate(bodies)
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    from urllib.parse import unquote

    root = request.get("root_path", "")
    scope = {
        "type": "http", "method": request["method"], "path": root + unquote(request["path"]), "root_path": root,
        "raw_path": (root + request["path"]).encode(), "query_string": request.get("query", b""), "headers": pairs,
    }  # fmt: skip
    await api(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(one.get("body", b"") for one in sent[1:]))


@pytest.mark.parametrize(
    ("what", "alter"),
    {
        "method": lambda request: request.update(method="GET"),
        "path": lambda request: request.update(path="/queues/pay/pause"),
        "encoding of the path": lambda request: request.update(path="/queues/m%61il/pause"),
        "prefix": lambda request: request.update(root_path="/api"),
        "query": lambda request: request.update(query=b"a=1"),
        "body": lambda request: request.update(body=b'{"a":1}'),
        "key": lambda request: request["headers"].update({"Tallybook-Key": "reader"}),
        "timestamp": lambda request: request["headers"].update(
            {"Tallybook-Timestamp": str(int(request["headers"]["Tallybook-Timestamp"]) + 1)}
        ),
        "nonce": lambda request: request["headers"].update({"Tallybook-Nonce": "f" * 32}),
        "signature": lambda request: request["headers"].update({"Tallybook-Signature": "v1=" + "0" * 64}),
        "nothing": lambda request: None,
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_altered_request_is_refused(
    api: OperatorApi, db: Any, what: str, alter: Callable[[dict[str, Any]], None]
) -> None:
    """S2-12: an altered request is refused with 401 (its method: 405) and changes nothing; unaltered, it is served."""
    request = {"method": "POST", "path": PAUSE, "headers": headers("POST", PAUSE)}
    alter(request)
    status, answer = await raw(api, request)
    await api.close()
    if what == "nothing":
        assert (status, is_paused(db)) == (200, True)
    else:
        # This path has no other method, and the list of endpoints is no secret.
        assert (status, answer["code"]) == ((405, "method") if what == "method" else (401, "signature"))
        assert not is_paused(db)
        assert db.execute("select count(*) from tallybook.api_nonce").fetchone()[0] == 0


async def test_without_the_comparison_an_altered_request_would_be_served(
    api: OperatorApi, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with a comparison that always succeeds, the same altered request changes something."""
    monkeypatch.setattr("tallybook.extra.operator.signing.hmac.compare_digest", lambda a, b: True)
    request = {"method": "POST", "path": PAUSE, "headers": headers("POST", PAUSE), "body": b"{}"}
    request["headers"]["Content-Type"] = "application/json"
    assert (await raw(api, request))[0] == 200
    assert is_paused(db)
    await api.close()


@pytest.fixture
def unasked(monkeypatch: pytest.MonkeyPatch) -> OperatorApi:
    """An API that must not query its database."""

    def asked(*_: Any) -> Any:
        raise QueueUnavailable("a test", "it was asked")

    monkeypatch.setattr("tallybook.extra.dashboard.database.Database.act", asked)
    return operator_api(App("shop"), keys=[Key("ops", SECRET, ("admin",))])


async def test_headers_of_another_form_are_refused(unasked: OperatorApi) -> None:
    """S2-12: a missing header, or one of an invalid form, is refused before the database is queried."""
    bad_headers = {
        "no nonce": [("Tallybook-Nonce", None)],
        "an empty nonce": [("Tallybook-Nonce", "")],
        "a short nonce": [("Tallybook-Nonce", "a" * 15)],
        "a very long nonce": [("Tallybook-Nonce", "a" * 129)],
        "a nonce with a line feed": [("Tallybook-Nonce", "aaaaaaaa\naaaaaaaa")],
        "no key": [("Tallybook-Key", None)],
        "a key of another form": [("Tallybook-Key", "ops ")],
        "no timestamp": [("Tallybook-Timestamp", None)],
        "a timestamp that is none": [("Tallybook-Timestamp", "now")],
        "a negative timestamp": [("Tallybook-Timestamp", "-1")],
        "a timestamp with a point": [("Tallybook-Timestamp", "1767225600.5")],
        "digits of another script": [("Tallybook-Timestamp", "١٧٦٧٢٢٥٦٠٠")],
        "a timestamp beyond all years": [("Tallybook-Timestamp", "9" * 12)],
        "no signature": [("Tallybook-Signature", None)],
        "a signature of another version": [("Tallybook-Signature", "v2=" + "0" * 64)],
        "capital letters": [("Tallybook-Signature", "v1=" + "A" * 64)],
        "non-ASCII": [("Tallybook-Signature", "v1=" + "é" * 64)],
    }
    for what, changes in bad_headers.items():
        sent = headers("POST", PAUSE)
        for name, value in changes:
            if value is None:
                del sent[name]
            else:
                sent[name] = value
        status, answer = await raw(unasked, {"method": "POST", "path": PAUSE, "headers": sent})
        assert (status, answer["code"]) == (401, "unsigned"), what


async def test_a_header_that_is_there_twice_is_refused(unasked: OperatorApi) -> None:
    """S2-12: a header that occurs twice is refused, because a proxy and a server could read different ones."""
    sent = headers("POST", PAUSE)
    pairs = [(key.lower().encode(), value.encode()) for key, value in sent.items()]
    for name, value in sent.items():
        twice = [*pairs, (name.upper().encode(), value.encode())]
        status, answer = await raw(unasked, {"method": "POST", "path": PAUSE, "headers": twice})
        assert (status, answer["code"]) == (401, "unsigned"), name
    assert (await raw(unasked, {"method": "POST", "path": PAUSE, "headers": pairs}))[0] == 503, "control: once each"


async def test_the_order_of_the_query_is_free_and_a_name_is_there_once(call: Client) -> None:
    """S2-12: the pieces of a query may come in any order, so none may occur twice."""
    signed = headers("GET", "/counts?queue=mail&task=welcome")
    found = await call.http.get("/counts?task=welcome&queue=mail", headers=signed)
    assert found.status_code == 200
    assert [row["task"] for row in found.json()["counts"]] == ["welcome"]
    assert codes(await call("GET", "/counts?queue=mail&queue=pay")) == (422, "invalid")
    assert codes(await call("GET", "/counts?queue=mail&")) == (422, "invalid")
    assert codes(await call("GET", "/counts?queue=%ff")) == (422, "invalid")


@pytest.mark.parametrize(
    ("scope", "path"),
    [
        ({"path": "/v1/queues", "root_path": "/v1", "raw_path": b"/v1/queues"}, b"/v1/queues"),  # mounted in Starlette
        ({"path": "/queues", "root_path": "/v1", "raw_path": b"/v1/queues"}, b"/v1/queues"),  # a host that strips /v1
        (
            {"path": "/a b", "root_path": "", "raw_path": b"/a%20b?x=1"},
            b"/a%20b",
        ),  # a server that keeps the query there
        ({"path": "/ü", "root_path": ""}, b"/%C3%BC"),  # a server without a raw path
        ({"path": "/v1/queues", "root_path": "", "raw_path": b"/elsewhere"}, b"/v1/queues"),  # rewritten on the way
    ],
)
def test_the_path_that_is_signed_is_the_one_that_was_sent(scope: Any, path: bytes) -> None:
    """S2-12: the signed path is the client's, with prefix and percent signs, and never another than the served one."""
    assert sent_path(scope) == path


async def test_it_is_served_below_a_prefix(api: OperatorApi, db: Any) -> None:
    """S2-12: below a mount prefix, the path is signed with the prefix, and the document names it."""
    from starlette.applications import Starlette
    from starlette.routing import Mount

    async with client(Starlette(routes=[Mount("/api/v1", api)])) as call:
        assert (await call("POST", "/api/v1/queues/mail/pause")).status_code == 200
        assert is_paused(db)
        unprefixed = headers("POST", "/queues/mail/pause")
        assert codes(await call.http.post("/api/v1/queues/mail/pause", headers=unprefixed)) == (401, "signature")
        assert (await call.http.get("/api/v1/openapi.json")).json()["servers"] == [{"url": "/api/v1"}]
    await api.close()


# Time


@pytest.mark.parametrize(("seconds", "code"), [(-310, "late"), (310, "early"), (-290, None), (290, None)])
async def test_the_time_counts(call: Client, db: Any, seconds: int, code: str | None) -> None:
    """S2-12: a request signed more than 300 s before or after the database's clock is refused; one within is served."""
    now = int(db.execute("select extract(epoch from clock_timestamp())").fetchone()[0])
    answer = await call("POST", PAUSE, timestamp=now + seconds)
    if code is None:
        assert answer.status_code == 200
    else:
        assert codes(answer) == (401, code)
    assert is_paused(db) is (code is None)


async def test_a_request_is_served_once(call: Client, db: Any) -> None:
    """S2-12: a repeated request is refused with 409, both for a change and for a read."""
    for method, target in (("POST", PAUSE), ("GET", "/queues")):
        signed = headers(method, target)
        assert (await call.http.request(method, target, headers=signed)).status_code == 200
        db.execute("select tallybook.resume('mail')")
        assert codes(await call.http.request(method, target, headers=signed)) == (409, "replayed")
        assert not is_paused(db)


async def test_two_apps_serve_a_request_once(app: App, db: Any) -> None:
    """S2-12: if a request reaches two apps of one database at once, exactly one serves it, and it makes one job."""
    key = Key("ops", SECRET, ("enqueue",))
    apis = [operator_api(app, keys=[key]) for _ in range(2)]
    body = b'{"queue": "mail", "task": "welcome"}'
    async with client(apis[0]) as first, client(apis[1]) as second:
        for _ in range(5):
            signed = {**headers("POST", "/jobs", body), "Content-Type": "application/json"}
            sent = (one.http.post("/jobs", content=body, headers=signed) for one in (first, second, first, second))
            answers = await asyncio.gather(*sent)
            assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409]
    assert db.execute("select count(*) from tallybook.job where queue = 'mail'").fetchone()[0] == 1 + 5


@pytest.mark.slow
def test_two_replicas_serve_a_request_once(dsn: str, app: App, db: Any, tmp_path: Path) -> None:
    """S2-12: if a request reaches two processes at once, exactly one serves it, in each of ten rounds."""
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[keys.ops]\nsecret = "{SECRET}"\nscopes = ["operate", "enqueue"]\n')
    keys.chmod(0o600)
    body = b'{"queue": "mail", "task": "welcome"}'

    async def race(urls: list[str]) -> None:
        async with httpx2.AsyncClient(timeout=20) as http:
            for _ in range(10):
                signed = {**headers("POST", "/jobs", body), "Content-Type": "application/json"}
                answers = await asyncio.gather(
                    *(http.post(f"{url}/jobs", content=body, headers=signed) for url in urls * 3)
                )
                assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409, 409, 409]

    with serving(dsn, keys) as first, serving(dsn, keys) as second:
        asyncio.run(race([first, second]))
    assert db.execute("select count(*) from tallybook.job where queue = 'mail'").fetchone()[0] == 1 + 10
    assert db.execute("select count(*) from tallybook.audits").fetchone()[0] == 10


async def test_what_was_refused_cannot_be_sent_again(call: Client, db: Any) -> None:
    """S2-12: a refused action uses up its nonce, so an eavesdropper cannot repeat it when it would succeed."""
    target = "/jobs/1/retry"
    signed = headers("POST", target)
    assert codes(await call.http.post(target, headers=signed)) == (409, "conflict")
    db.execute("select tallybook.cancel(1)")
    assert codes(await call.http.post(target, headers=signed)) == (409, "replayed")
    assert (await call("POST", target)).status_code == 200
    assert db.execute("select array_agg(action) from tallybook.audits").fetchone()[0] == ["retry"]


async def test_what_never_committed_may_be_sent_again(
    api: OperatorApi, call: Client, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2-12: if the connection dies before the commit, nothing has changed, and the very same request is good again."""
    add = operations.audit_add

    def dies(*given: Any) -> Any:
        others = "pid <> pg_backend_pid() and datname = current_database()"
        db.execute(f"select pg_terminate_backend(pid) from pg_stat_activity where {others}")  # noqa: S608
        return add(*given)

    signed = headers("POST", PAUSE)
    monkeypatch.setattr(operations, "audit_add", dies)
    refused = await call.http.post(PAUSE, headers=signed)
    assert codes(refused) == (503, "unavailable") and refused.headers["retry-after"] == "1"
    assert not is_paused(db)
    monkeypatch.undo()
    assert (await call.http.post(PAUSE, headers=signed)).status_code == 200
    assert is_paused(db)


@pytest.mark.direct("a pooler answers the commit of a session that has died with words of its own")
async def test_a_commit_that_is_not_answered_is_in_doubt(call: Client, db: Any) -> None:
    """S2-12: if the database is lost at the commit, the answer says so, and the very same request is good again."""
    db.execute(DIES_AT_COMMIT)
    signed = headers("POST", PAUSE)
    assert codes(await call.http.post(PAUSE, headers=signed)) == (503, "in_doubt")
    db.execute("drop trigger dies on tallybook.audit")
    assert (await call.http.post(PAUSE, headers=signed)).status_code == 200
    assert codes(await call.http.post(PAUSE, headers=signed)) == (409, "replayed")
    assert db.execute("select count(*) from tallybook.audits").fetchone()[0] == 1


# Keys


async def test_keys_are_changed_one_for_the_other(app: App) -> None:
    """S2-12: during a rotation both keys work; after it, the old key is refused like an unknown one."""
    old, new = Key("old", SECRET, ("read",)), Key("new", OTHER, ("read",))
    for keys, good in (([old], {"old"}), ([old, new], {"old", "new"}), ([new], {"new"})):
        api = operator_api(app, keys=keys)
        async with client(api) as call:
            for key, secret in (("old", SECRET), ("new", OTHER)):
                answer = await call.by(key, secret)("GET", "/queues")
                assert answer.status_code == (200 if key in good else 401)


async def test_an_unknown_key_is_compared_like_a_known_one(call: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """S2-12: an unknown key and a wrong signature get the same answer, each after a constant-time comparison."""
    compared = 0
    compare = hmac.compare_digest

    def counted(one: Any, other: Any) -> bool:
        nonlocal compared
        compared += 1
        return compare(one, other)

    monkeypatch.setattr("tallybook.extra.operator.signing.hmac.compare_digest", counted)
    unknown = await call.by("nobody", SECRET)("GET", "/queues")
    wrong = await call.by("ops", OTHER)("GET", "/queues")
    assert codes(unknown) == codes(wrong) == (401, "signature")
    assert unknown.text == wrong.text and unknown.headers["www-authenticate"] == "Tallybook"
    assert compared == 2


@pytest.mark.parametrize("scope", ["read", "enqueue", "operate", "admin"])
async def test_a_key_does_what_its_scopes_allow(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S2-12: each endpoint serves keys with its scope or admin; any other gets 403 before the database is queried."""

    def asked(*_: Any) -> Any:
        raise QueueUnavailable("a test", "it was asked")

    monkeypatch.setattr("tallybook.extra.dashboard.database.Database.act", asked)
    api = operator_api(App("shop"), keys=[Key("ops", SECRET, (scope,))])
    async with client(api) as call:
        for operation in OPERATIONS:
            target = operation.path.replace("{job}", "1").replace("{queue}", "mail").replace("{schedule}", "s")
            document = {field.name: field.example for field in operation.in_body if field.required}
            answer = await call(operation.method, target, document or None)
            allowed = scope in (operation.scope, "admin")
            assert codes(answer) == ((503, "unavailable") if allowed else (403, "scope")), operation.name


async def test_what_is_read_only_changes_nothing_whoever_signs(app: App, db: Any) -> None:
    """S2-12: served read-only, each endpoint that changes something refuses any key; each that only reads is served."""
    api = operator_api(app, keys=[Key("ops", SECRET, ("admin",))], read_only=True)
    async with client(api) as call:
        for operation in OPERATIONS:
            target = operation.path.replace("{job}", "1").replace("{queue}", "mail").replace("{schedule}", "s")
            document = {field.name: field.example for field in operation.in_body if field.required}
            answer = await call(operation.method, target, document or None)
            if operation.method == "POST":
                assert codes(answer) == (403, "read_only"), operation.name
            else:
                assert answer.status_code == 200, operation.name
    assert db.execute("select count(*) from tallybook.job where state = 'available'").fetchone()[0] == 2
    assert not is_paused(db) and db.execute("select count(*) from tallybook.audit").fetchone()[0] == 0


def test_the_command_passes_read_only_on(tmp_path: Path, dsn: str, db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """S2-12: `tallybook web --read-only --api-keys` makes the API read-only; without --read-only, it is not."""
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.ops]\nsecret = "{SECRET}"\nscopes = ["admin"]\n')
    path.chmod(0o600)
    said: list[bool] = []

    def begun(*_: Any, read_only: bool, **__: Any) -> Any:
        said.append(read_only)
        raise ConfigError("keys", "(a test)", "it is not served here")

    monkeypatch.setattr("tallybook.web.operator_api", begun)
    for options in (["--read-only"], [], ["--operate"]):
        result = click.testing.CliRunner().invoke(cli, ["web", "--dsn", dsn, "--api-keys", str(path), *options])
        assert "it is not served here" in result.output
    assert said == [True, False, False]


async def test_nothing_is_served_unsigned_but_the_document(call: Client) -> None:
    """S2-12: every endpoint is 401 without a signature; only the OpenAPI document, which has no secret, is served."""
    for operation in OPERATIONS:
        target = operation.path.replace("{job}", "1").replace("{queue}", "mail").replace("{schedule}", "s")
        assert codes(await call.http.request(operation.method, target)) == (401, "unsigned")
    document = await call.http.get("/openapi.json")
    assert document.status_code == 200 and document.json() == openapi.document()
    assert codes(await call.http.options("/queues")) == (405, "method")
    assert (await call.http.head("/queues")).status_code == 405
    assert codes(await call.http.get("/")) == (404, "unknown")


# Bounds


async def test_bodies_are_bounded(call: Client, api: OperatorApi, db: Any) -> None:
    """S2-12: a body of more than 1 MB, with or without a length, is refused unread; so is a deep or compressed one."""
    big = b'{"queue": "mail", "task": "t", "args": {"a": "' + b"x" * 999_990 + b'"}}'
    assert codes(await call("POST", "/jobs", body=big)) == (413, "too_large")
    read = 0

    class Endless(list[bytes]):
        def pop(self, *_: Any) -> Any:
            nonlocal read
            read += 1
            return {"type": "http.request", "body": b"x" * 100_000, "more_body": True}

    messages = Endless()

    async def receive() -> Any:
        return messages.pop()

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(key.lower().encode(), value.encode()) for key, value in headers("POST", "/jobs").items()]
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/jobs",
        "raw_path": b"/jobs",
        "query_string": b"",
        "headers": pairs,
    }
    await api(scope, receive, send)
    assert (sent[0]["status"], read) == (413, 11)

    for depth, found in ((62, 201), (64, 400), (100_000, 400)):
        deep = b'{"queue": "mail", "task": "t", "args": {"a": ' + b"[" * depth + b"]" * depth + b"}}"
        assert (await call("POST", "/jobs", body=deep)).status_code == found
    brackets = json.dumps({"queue": "mail", "task": "t", "args": {"a": '\\"[' * 100}}).encode()
    assert (await call("POST", "/jobs", body=brackets)).status_code == 201
    squeezed = await call("POST", "/jobs", body=b"x", headers={"Content-Encoding": "gzip"})
    assert codes(squeezed) == (415, "media_type")


async def test_no_body_keeps_the_server_busy(call: Client) -> None:
    """S2-12: a 1 MB body whose one string does not end is refused within 5 s, even for a key that may only read."""
    escaped = [
        b'"' + b'\\"' * n for n in (20_000, 499_990)
    ]  # the first takes seconds where the second would take hours
    for body in (*escaped, b'["' * 499_990, b'"\\' * 499_990, b'[]"' + b"\\" * 999_990):
        began = time.monotonic()
        refused = await call.by("reader", OTHER)("GET", "/queues", body=body)
        assert codes(refused) == (400, "malformed")
        assert time.monotonic() - began < 5


async def test_what_is_no_request_is_refused_with_a_reason(unasked: OperatorApi) -> None:
    """Invalid input gets a problem with a code and a sentence, before the database is queried."""
    bodies = [
        (b"{", "application/json", "malformed"),
        (b'{"queue": NaN}', "application/json", "malformed"),
        (b'{"queue": "a", "queue": "b"}', "application/json", "malformed"),
        (b"\xff\xfe{\x00}\x00", "application/json", "malformed"),
        (b'{"a": ' + b"9" * 5000 + b"}", "application/json", "malformed"),
        (b"[]", "application/json", "invalid"),
        (b"{}", "text/plain", "media_type"),
        (b"{}", "application/json; charset=latin-1", "media_type"),
        (b'{"queue": "mail"}', "application/json; charset=utf-8", "invalid"),
        (b'{"queue": "mail", "task": "t", "more": 1}', "application/json", "invalid"),
        (b'{"queue": null, "task": "t"}', "application/json", "invalid"),
        (b'{"queue": "mail", "task": "t", "delay": "soon"}', "application/json", "invalid"),
        (b'{"queue": "mail", "task": "t", "run_at": "2030-01-01T00:00:00"}', "application/json", "invalid"),
        (b'{"queue": "mail", "task": "t", "priority": 1.5}', "application/json", "invalid"),
        (b'{"queue": "mail", "task": "t", "priority": true}', "application/json", "invalid"),
    ]
    async with client(unasked) as call:
        for body, kind, code in bodies:
            answer = await call("POST", "/jobs", body=body, headers={"Content-Type": kind})
            assert codes(answer)[1] == code, body[:80]
            assert answer.json()["detail"]


async def test_args_that_cannot_be_stored_are_refused(call: Client, db: Any) -> None:
    """Args that PostgreSQL cannot store are 422 like other invalid input, and nothing is enqueued."""
    for args in (b'{"a": "\\u0000"}', b'{"a": "\\ud800"}', b'{"a": 1e999}'):
        answer = await call("POST", "/jobs", body=b'{"queue": "mail", "task": "t", "args": ' + args + b"}")
        assert codes(answer) == (422, "invalid"), args
    assert db.execute("select count(*) from tallybook.job where task = 't'").fetchone()[0] == 0


async def test_secrets_appear_nowhere(
    call: Client, api: OperatorApi, db: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """S2-12: no answer, log, repr, document or table shows a secret, whatever goes wrong."""
    caplog.set_level(logging.DEBUG)
    answers = [await call(*request) for request in (("GET", "/queues"), ("POST", PAUSE), ("GET", "/jobs/x"))]
    answers.append(await call("GET", "/queues", headers={"Tallybook-Signature": "v1=" + SECRET}))
    answers.append(await call.by(SECRET[:60], SECRET)("GET", "/queues"))
    texts = [answer.text for answer in answers] + [str(answer.headers) for answer in answers]
    texts += [caplog.text, repr(api), repr(api._ring), json.dumps(openapi.document())]
    texts += [repr(Key("ops", SECRET, ("read",)))]
    tables = "select relname from pg_class where relnamespace = 'tallybook'::regnamespace and relkind in ('r', 'p')"
    for (table,) in db.execute(tables).fetchall():
        rows = sql.SQL("select t::text from {} t").format(sql.Identifier("tallybook", table))
        texts += [row[0] for row in db.execute(rows).fetchall()]
    assert len(answers) == 5 and any("mail" in text for text in texts)
    for secret in (SECRET, OTHER):
        assert not any(secret in text or bytes.fromhex(secret).decode("latin-1") in text for text in texts)


async def test_a_defect_shows_nothing(
    call: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A defect is a 500 without its message, which is in the log."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("password is hunter2")

    monkeypatch.setattr(Queues, "list", broken)
    answer = await call("GET", "/queues")
    assert codes(answer) == (500, "failed") and "hunter2" not in answer.text
    assert "hunter2" in caplog.text


@pytest.mark.direct("reaches the server through a proxy of its own")
async def test_a_database_that_hangs_is_503(app: App, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the database is silent on open sockets, a request is 503 soon after its time limit."""
    monkeypatch.setattr(database, "_GRACE", 0.3)
    monkeypatch.setattr(serve, "READ_TIMEOUT", "0.2s")
    with Proxy(dsn) as proxy:
        api = operator_api(app, keys=[Key("ops", SECRET, ("admin",))], dsn=proxy.dsn)
        async with client(api) as call, asyncio.timeout(15):
            assert (await call("GET", "/queues")).status_code == 200
            proxy.silent = True
            assert codes(await call("GET", "/queues")) == (503, "unavailable")
            proxy.cut()


async def test_a_database_that_is_away_is_503(app: App) -> None:
    """A database that cannot be reached is 503 within 10 s, and the answer does not show its address."""
    api = operator_api(app, keys=[Key("ops", SECRET, ("admin",))], dsn="host=/nowhere dbname=hidden")
    api._nodes.first._wait = 0.05
    async with client(api) as call:
        began = time.monotonic()
        answer = await call("GET", "/queues")
        assert time.monotonic() - began < 10
    assert codes(answer) == (503, "unavailable") and "hidden" not in answer.text and "nowhere" not in answer.text
