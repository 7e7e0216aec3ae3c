"""The task tallybook.http: a plain call, whose answer is the job's result."""

import asyncio
import base64
import json
import logging
from collections.abc import Callable
from datetime import timedelta
from itertools import chain
from typing import Any
from urllib.parse import quote

import pytest

from support.database import dump
from support.outside import LOOPBACK, HttpServer, Reply, Request, provider, serving
from tallybook import App, Constant, JobInfo
from tallybook._model.provider import Secret
from tallybook.extra.tasks import email, http, new_signing_secret, webhook
from tallybook.extra.tasks._provider import Mask
from tallybook.testing import drain

Run = Callable[..., JobInfo]
HOUR = Constant(timedelta(hours=1))
LATER = http.with_(retry=HOUR)  # nothing is tried again within one drain
CANARY = 'c4n4ry/+ "secret" é'


def rates(endpoint: HttpServer, secrets: Any = None, **settings: Any) -> Any:
    given = {"url": f"{endpoint.url}/v1/", "allow": LOOPBACK, "allow_http": True, **settings}
    return provider("rates", secrets, **given)


def test_a_call_by_sql_and_its_result(app: App, run: Run, dsn: str, db: Any, endpoint: HttpServer) -> None:
    """S4-06: a call that SQL enqueued goes to the provider's URL and path with its token; the result is its JSON."""
    serving(app, rates(endpoint, {"token": "t0ken"}, headers={"Accept": "application/json"}))
    endpoint.reply(
        Reply(200, {"Content-Type": "application/json", "ETag": '"7"', "Set-Cookie": "a=b"}, b'{"EUR": [1, 2.5]}')
    )
    (job,) = db.execute(
        "select tallybook.enqueue('out', 'tallybook.http', %s::jsonb)",
        ('{"provider": "rates", "path": "/latest/a b", "query": {"base": "EUR", "n": 2, "all": true}}',),
    ).fetchone()
    run(job)
    app.dsn = dsn
    result = asyncio.run(app.result(job))
    assert result["status"] == 200 and result["json"] == {"EUR": [1, 2.5]} and result["headers"]["etag"] == '"7"'
    assert "set-cookie" not in result["headers"]
    (got,) = endpoint.got
    path, _, query = got.path.partition("?")
    assert (got.method, path, set(query.split("&"))) == ("GET", "/v1/latest/a%20b", {"base=EUR", "n=2", "all=true"})
    assert got.headers["authorization"] == "Bearer t0ken" and got.headers["accept"] == "application/json"


@pytest.mark.parametrize(
    ("secrets", "settings", "header", "path"),
    [
        ({"token": "t"}, {"token_header": "X-Api-Key"}, ("x-api-key", "t"), "/v1/"),
        ({"token": "t&t"}, {"token_query": "apikey"}, ("authorization", None), "/v1/?apikey=t%26t"),
        ({"password": "p"}, {"user": "u"}, ("authorization", "Basic dTpw"), "/v1/"),
        ({}, {}, ("authorization", None), "/v1/"),
    ],
)  # fmt: skip
def test_how_a_provider_is_shown_who_calls(
    app: App, run: Run, db: Any, endpoint: HttpServer, secrets: Any, settings: Any, header: Any, path: str
) -> None:
    """S4-06: a token goes into any header or the query, user and password into Basic; none of it is in the args."""
    serving(app, rates(endpoint, secrets, **settings))
    found = run(http.enqueue_sync(db, "rates"))
    assert found.state == "completed" and found.args == {"provider": "rates"}
    assert (endpoint.got[0].headers.get(header[0]), endpoint.got[0].path) == (header[1], path)


def test_what_is_sent_and_what_comes_back(app: App, dsn: str, db: Any, endpoint: HttpServer) -> None:
    """S4-06 S4-18: JSON or text is sent, a POST with one key for all attempts; text, bytes or nothing comes back."""
    serving(app, rates(endpoint))
    answers = {"/v1/text": (b"caf\xc3\xa9", "text/plain"), "/v1/bytes": (b"\x00\xff", "image/png"),
               "/v1/none": (b"", "text/plain"), "/v1/lie": (b"{no", "application/json")}  # fmt: skip
    endpoint.reply(lambda got: Reply(200, {"Content-Type": answers[got.path][1]}, answers[got.path][0]))
    jobs = [
        http.enqueue_sync(db, "rates", method="POST", path="/text", body={"é": None}),
        http.enqueue_sync(db, "rates", method="put", path="/bytes", text="a\r\nb"),
        http.enqueue_sync(db, "rates", method="PATCH", path="/none", idempotency_key="own"),
        http.enqueue_sync(db, "rates", method="HEAD", path="/lie"),
        http.enqueue_sync(db, "rates", path="/lie"),
    ]
    drain(app, dsn=dsn)
    results = [app.get(job).sync(db).result for job in jobs]
    assert [{key: result.get(key) for key in ("json", "text", "base64") if key in result} for result in results] == [
        {"text": "café"}, {"base64": base64.b64encode(b"\x00\xff").decode()}, {}, {}, {"text": "{no"},
    ]  # fmt: skip
    sent = {(got.method, got.path): got for got in endpoint.got}
    posted, put, patched = sent["POST", "/v1/text"], sent["PUT", "/v1/bytes"], sent["PATCH", "/v1/none"]
    assert (posted.body, posted.headers["content-type"]) == ('{"é":null}'.encode(), "application/json")
    assert (put.body, put.headers["content-type"]) == (b"a\r\nb", "text/plain; charset=utf-8")
    assert (posted.headers["idempotency-key"], patched.headers["idempotency-key"]) == (f"job_{jobs[0].id}", "own")
    assert "idempotency-key" not in put.headers and patched.headers["content-length"] == "0"
    endpoint.reply(Reply(503), Reply(204))
    retried = http.with_(retry=Constant(timedelta(0))).enqueue_sync(db, "rates", method="POST", path="/text")
    drain(app, dsn=dsn)
    assert app.get(retried).sync(db).attempts == 2
    assert [got.headers["idempotency-key"] for got in endpoint.got[-2:]] == [f"job_{retried.id}"] * 2


def test_calls_that_fail_for_good_or_for_now(app: App, dsn: str, db: Any, endpoint: HttpServer) -> None:
    """S4-06: wrong args, too long answers and 4xx are dead, 5xx and broken answers are retried; 404 can be expected."""
    serving(app, rates(endpoint, {"token": "t"}))
    replies = {
        "/v1/gone": Reply(404, body=b"no"),
        "/v1/down": Reply(500, body=b"no"),
        "/v1/moved": Reply(307, {"Location": "/v1/gone"}),
        "/v1/long": Reply(body=b"x" * 300_000),
        "/v1/half": Reply(body=b"x" * 10, length=20),
        "/v1/gzip": Reply(200, {"Content-Encoding": "gzip"}, b"\x1f\x8b"),
    }
    endpoint.reply(lambda got: replies[got.path])
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"path": "/gone"}, "dead", "status 404: no"),
        ({"path": "/gone", "expect": [404]}, "completed", ""),
        ({"path": "/down"}, "retrying", "status 500: no"),
        ({"path": "/moved"}, "retrying", "status 307"),
        ({"path": "/long"}, "dead", "more than 256000 bytes"),
        ({"path": "/half"}, "retrying", "RemoteProtocolError"),
        ({"path": "/gzip"}, "dead", "compressed"),
        ({"path": "gone"}, "dead", "the path is not valid"),
        ({"path": "/../admin"}, "dead", "the path is not valid"),
        ({"path": "/a/%2E%2e/b"}, "dead", "the path is not valid"),
        ({"path": "/a?b"}, "dead", "the path is not valid"),
        ({"path": "//evil.example/x\\..\\y"}, "dead", "the path is not valid"),
        ({"method": "CONNECT"}, "dead", "the method must be one of"),
        ({"url": "https://example.org/"}, "dead", "pass either a provider or a url"),
        ({"query": {"a": [1]}}, "dead", "neither a text nor a number"),
        ({"headers": {"cookie": "a"}}, "dead", "is for secrets"),
    ]
    jobs = [LATER.enqueue_sync(db, "rates", **given) for given, _, _ in cases]
    cases.append(({}, "dead", "pass either a provider or a url"))
    jobs.append(LATER.enqueue_sync(db))
    cases.append(({}, "dead", "a URL like"))
    jobs.append(LATER.enqueue_sync(db, url="file:///etc/passwd"))
    drain(app, dsn=dsn)
    for job, (given, state, words) in zip(jobs, cases, strict=True):
        found = app.get(job).sync(db)
        assert (found.state, words in (found.last_error or "")) == (state, True), (given, found.last_error)


def leaks(app: App, dsn: str, db: Any, endpoint: HttpServer, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The secrets that are found after calls to endpoints that echo all input, succeed, fail or do not exist."""
    caplog.set_level(logging.DEBUG)
    token = "Zm9v.c4n4ry-T0ken_a"
    signing = new_signing_secret()
    base = f"{endpoint.url}/hook/c4n4ryInTheUrl"

    def echo(got: Request) -> Reply:
        known = () if got.headers.get("authorization", "").startswith("Basic") else (token, signing, CANARY)
        forms = [(one, quote(one), json.dumps(one), base64.b64encode(one.encode()).decode()) for one in known]
        said = "\n".join([*got.headers.values(), got.path, *chain(*forms), "echo"])
        status = 500 if "fail" in got.path or "fail" in got.headers.get("x-mode", "") else 200
        return Reply(status, {"Content-Type": "text/plain; charset=utf-8"}, said.encode())

    endpoint.reply(echo)
    other = Secret("c4n4ry-now", previous=Secret(CANARY))
    secret = {"url": Secret(base), "token": token, "signing_secret": signing, "other": other}
    shared = {"allow": LOOPBACK, "allow_http": True}
    serving(
        app,
        provider("bearer", secret, **shared),
        provider("query", secret, token_query="key", **shared),
        provider("basic", {"url": base, "password": CANARY.replace("é", "e")}, user="u", **shared),
        provider("refused", {"url": base.replace("127.0.0.1", "localhost"), "token": token}, allow_http=True),
        provider("broken", {"url": "https://c4n4ryInTheUrl host/", "token": token}),
        provider("nowhere", {"url": "https://c4n4ryinthehost.invalid/", "token": token}),
        provider("mail", {"password": token}, host="127.0.0.1", port=9, user="u", **{"from": "a@example.org"}),
    )
    for name in ("bearer", "query", "basic", "refused", "broken", "nowhere"):
        LATER.enqueue_sync(db, name)
        LATER.enqueue_sync(db, name, path="/fail")
        webhook.with_(retry=HOUR).enqueue_sync(db, name, {}, headers={"X-Mode": "fail"})
        webhook.with_(retry=HOUR).enqueue_sync(db, name, {})
    email.with_(retry=HOUR).enqueue_sync(db, "mail", "b@example.org", "s", "t")
    report = drain(app, dsn=dsn)
    assert report.completed >= 5 and report.retrying >= 6 and report.dead >= 1
    assert any(token in got.headers.get("authorization", "") for got in endpoint.got)
    assert any("c4n4ryInTheUrl" in got.path and token in got.path for got in endpoint.got)
    found = "\n".join([dump(db), *(f"{record.getMessage()} {record.__dict__}" for record in caplog.records)])
    assert "echo" in found and "status 500" in found
    encoded = base64.b64encode(CANARY.encode()).decode()
    hidden = (token, "c4n4ryInTheUrl", signing.removeprefix("whsec_"), CANARY, encoded)
    return [word for word in hidden if word in found]


def test_a_secret_is_nowhere(
    app: App, dsn: str, db: Any, endpoint: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    """S4-06 S1-12: whatever a provider echoes and however a call ends, no log line, error or result has a secret."""
    assert leaks(app, dsn, db, endpoint, caplog) == []


def test_a_secret_that_is_echoed_is_found(
    app: App, dsn: str, db: Any, endpoint: HttpServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-06 S1-12, negative control: without the stars, the same search finds at least four of the five."""
    monkeypatch.setattr(Mask, "text", lambda mask, text: text)
    found = leaks(app, dsn, db, endpoint, caplog)
    assert len(found) >= 4 and "c4n4ryInTheUrl" in found
