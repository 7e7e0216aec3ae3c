"""The task tallybook.http, whose answer is the job's result; and a call may go only to the address that was checked."""

import asyncio
import base64
import json
import logging
import socket
from datetime import timedelta
from ipaddress import ip_address
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpcore2
import pytest

from support.database import dump
from support.outside import (
    LOOPBACK,
    HttpServer,
    Reply,
    Request,
    certificate,
    http_server,
    provider,
    serving,
    two_http_servers,
)
from tallybook import App, Constant, JobInfo
from tallybook._model.provider import Secret
from tallybook.extra.tasks import _address, _transport, email, http, new_signing_secret, webhook
from tallybook.extra.tasks._address import Allowed, problem
from tallybook.extra.tasks._provider import Mask
from tallybook.testing import drain

HOUR = Constant(timedelta(hours=1))  # nothing is tried again within one drain
CALL, TELL, MAIL = (task.with_(retry=HOUR) for task in (http, webhook, email))
PUBLIC, INTERNAL = "127.0.0.2", "127.0.0.1"  # the first plays a public address: it is allowed
CANARY = 'c4n4ry/+ "secret" é'


def rates(endpoint: HttpServer, secrets: Any = None, **settings: Any) -> Any:
    given = {"url": f"{endpoint.url}/v1/", "allow": LOOPBACK, "allow_http": True, **settings}
    return provider("rates", secrets, **given)


def test_a_call_by_sql_and_its_result(app: App, run: Any, dsn: str, db: Any, endpoint: HttpServer) -> None:
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
    app: App, run: Any, db: Any, endpoint: HttpServer, secrets: Any, settings: Any, header: Any, path: str
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
    jobs = [CALL.enqueue_sync(db, "rates", **given) for given, _, _ in cases]
    cases.append(({}, "dead", "pass either a provider or a url"))
    jobs.append(CALL.enqueue_sync(db))
    cases.append(({}, "dead", "a URL like"))
    jobs.append(CALL.enqueue_sync(db, url="file:///etc/passwd"))
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
        CALL.enqueue_sync(db, name)
        CALL.enqueue_sync(db, name, path="/fail")
        TELL.enqueue_sync(db, name, {}, headers={"X-Mode": "fail"})
        TELL.enqueue_sync(db, name, {})
    MAIL.enqueue_sync(db, "mail", "b@example.org", "s", "t")
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


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.8.9.10", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254",
     "100.64.0.1", "100.100.100.200", "192.0.0.192", "192.0.2.1", "198.18.0.1", "203.0.113.7", "224.0.0.1", "239.1.1.1",
     "240.0.0.1", "255.255.255.255", "168.63.129.16", "192.88.99.1", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1",
     "fd00:ec2::254", "ff02::1", "fec0::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1",
     "64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b:1::1", "2002:7f00:1::", "2002:808:808::", "2001:0:7f00:1::1"],
)  # fmt: skip
def test_addresses_that_nobody_is_sent_to(address: str) -> None:
    """S4-06: loopback, private, link-local, multicast, reserved and metadata addresses are refused, also in IPv6."""
    assert problem(ip_address(address)) is not None
    assert Allowed().refusal("endpoint.test", address) is not None


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.215.14", "100.63.255.255", "2606:4700::1111", "64:ff9b::1.1.1.1", "::ffff:1.1.1.1"]
)
def test_public_addresses_are_called(address: str) -> None:
    """S4-06: ordinary public addresses are allowed, also wrapped in NAT64 or IPv6."""
    assert problem(ip_address(address)) is None


def test_what_is_allowed() -> None:
    """S4-06: a provider allows networks, also wrapped in IPv6, and whole names, and nothing else."""
    allowed = Allowed.of(["10.0.0.0/8", "Hooks.Internal", "::1"], option="allow")
    assert allowed.refusal("x", "10.9.9.9") is allowed.refusal("x", "::ffff:10.9.9.9") is None
    assert allowed.refusal("hooks.internal.", "192.168.0.1") is allowed.refusal("x", "::1") is None
    assert allowed.refusal("x", "192.168.0.1") and allowed.refusal("y.hooks.internal", "127.0.0.1")


def test_a_call_to_the_inside_is_refused(app: App, dsn: str, db: Any, names: dict[str, list[str]]) -> None:
    """S4-06: an inside address in any notation is not connected to and the job is dead; if allowed, it is called."""
    names["inside.test"] = [INTERNAL]
    hosts = ("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "inside.test")
    secrets = {"signing_secret": new_signing_secret()}
    with http_server() as inside:
        urls = {host: f"http://{host}:{inside.port}/" for host in hosts}
        shared = {"allow_http": True}
        refused = [provider(host, secrets, url=url, **shared) for host, url in urls.items()]
        allowed = [
            provider(f"own {host}", secrets, url=url, allow=["127.0.0.0/8", "::1"], **shared)
            for host, url in urls.items()
        ]
        serving(app, *refused, *allowed)
        jobs = [webhook.enqueue_sync(db, host, {}) for host in hosts]
        jobs += [http.enqueue_sync(db, url=url) for url in urls.values()]
        drain(app, dsn=dsn)
        for job in jobs:
            found = app.get(job).sync(db)
            assert found.state == "dead" and "loopback" in (found.last_error or "")
            assert (found.errors or [])[-1]["type"] == "tallybook.errors.AddressRefused"
        assert inside.got == []
        jobs = [
            webhook.enqueue_sync(db, f"own {host}", {}) for host in hosts
        ]  # the control: if allowed, the call arrives
        drain(app, dsn=dsn)
        assert {app.get(job).sync(db).state for job in jobs} == {"completed"} and len(inside.got) == len(hosts)


def test_without_the_check_the_inside_is_called(
    app: App, run: Any, db: Any, endpoint: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-06, negative control: if every address counts as public, a URL of the args reaches the inside."""
    assert run(http.enqueue_sync(db, url=f"{endpoint.url}/admin?a=b", query={"c": 1})).state == "dead"
    monkeypatch.setattr(_address, "problem", lambda address: None)
    found = run(http.enqueue_sync(db, url=f"{endpoint.url}/admin?a=b", query={"c": 1}))
    assert (found.state, found.result["text"]) == ("completed", "fine")
    assert [got.path for got in endpoint.got] == ["/admin?a=b&c=1"]


def rebinding(app: App, run: Any, db: Any, names: dict[str, list[str]]) -> tuple[JobInfo, list[int]]:
    """One webhook to a name that is public at the first lookup and inside later; the job, and the calls per server."""
    names["rebinding.test"] = [PUBLIC, INTERNAL]
    with two_http_servers(PUBLIC, INTERNAL) as (public, inside):
        settings = {"url": f"http://rebinding.test:{public.port}/", "allow_http": True, "allow": [PUBLIC]}
        serving(app, provider("acme", {"signing_secret": new_signing_secret()}, **settings))
        found = run(webhook.enqueue_sync(db, "acme", {}))
        if public.got:
            assert public.got[0].headers["host"] == f"rebinding.test:{public.port}"
        return found, [len(public.got), len(inside.got)]


def test_a_name_that_rebinds_leads_to_the_address_that_was_checked(
    app: App, run: Any, db: Any, names: dict[str, list[str]]
) -> None:
    """S4-06: DNS rebinding: the name is resolved once, and the connection goes to the very address that was checked."""
    found, calls = rebinding(app, run, db, names)
    assert (found.state, calls) == ("completed", [1, 0])


def test_rebinding_reaches_the_inside_where_the_name_is_connected_to(
    app: App, run: Any, db: Any, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-06, negative control: if a name is checked and then connected to, as is usual, the call ends up inside."""

    async def by_name(self: Any, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        await self._checked(host, port)
        return await httpcore2.AnyIOBackend().connect_tcp(host, port)

    monkeypatch.setattr(_transport.CheckedBackend, "connect_tcp", by_name)
    found, calls = rebinding(app, run, db, names)
    assert (found.state, calls) == ("completed", [0, 1])


def test_one_bad_address_among_good_ones_is_refused(
    app: App, run: Any, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-06: a name with a public and an inside address is refused, because the choice must not be luck."""

    async def both(host: str, port: int) -> list[str]:
        return [PUBLIC, INTERNAL]

    monkeypatch.setattr(_transport, "resolve", both)
    with http_server(PUBLIC) as public:
        settings = {"url": f"http://two.test:{public.port}/", "allow_http": True, "allow": [PUBLIC]}
        serving(app, provider("acme", {"signing_secret": new_signing_secret()}, **settings))
        assert run(webhook.enqueue_sync(db, "acme", {})).state == "dead"
        assert public.got == []


def test_an_address_that_does_not_answer_is_passed_over(
    app: App, run: Any, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-06: of several checked addresses, the first that accepts the connection is called."""

    async def both(host: str, port: int) -> list[str]:
        return ["127.0.0.3", PUBLIC]

    monkeypatch.setattr(_transport, "resolve", both)
    with http_server(PUBLIC) as public:
        settings = {"url": f"http://two.test:{public.port}/", "allow_http": True, "allow": ["127.0.0.0/8"]}
        serving(app, provider("acme", {"signing_secret": new_signing_secret()}, **settings))
        assert run(webhook.enqueue_sync(db, "acme", {})).state == "completed"
        assert len(public.got) == 1


def test_tls_is_with_the_name_and_the_connection_with_the_address(
    app: App, run: Any, db: Any, names: dict[str, list[str]], tmp_path: Path
) -> None:
    """S4-06: certificate, SNI and Host are the name's; another name at the same address fails at the certificate."""
    cert = certificate(tmp_path, "endpoint.test")
    names["endpoint.test"] = names["other.test"] = [INTERNAL]
    with http_server(cert=cert) as endpoint:
        endpoint.reply(Reply(body=b"over tls"))
        shared = {"allow": [INTERNAL], "ca": (tmp_path / "only").read_text(encoding="ascii")}
        secrets = {"signing_secret": new_signing_secret()}
        serving(
            app,
            provider("right", secrets, url=f"https://endpoint.test:{endpoint.port}/", **shared),
            provider("wrong", secrets, url=f"https://other.test:{endpoint.port}/", **shared),
            provider("unknown", secrets, url=f"https://endpoint.test:{endpoint.port}/", allow=[INTERNAL]),
        )
        right, wrong, unknown = (run(TELL.enqueue_sync(db, name, {})) for name in ("right", "wrong", "unknown"))
        assert right.state == "completed" and right.result["answer"] == "over tls"
        assert wrong.state == unknown.state == "retrying"
        assert "CERTIFICATE_VERIFY_FAILED" in wrong.last_error
        assert "CERTIFICATE_VERIFY_FAILED" in unknown.last_error
        assert [got.headers["host"] for got in endpoint.got] == [f"endpoint.test:{endpoint.port}"]


def test_a_proxy_of_the_environment_is_not_asked(app: App, run: Any, db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """S4-06: HTTP_PROXY is ignored, because a proxy would make the check worthless."""
    with http_server() as endpoint, http_server() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        serving(
            app,
            provider(
                "acme", {"signing_secret": new_signing_secret()}, url=endpoint.url, allow_http=True, allow=[INTERNAL]
            ),
        )
        assert run(TELL.enqueue_sync(db, "acme", {})).state == "completed"
        assert (len(endpoint.got), proxy.got) == (1, [])


def test_a_host_that_is_not_there_is_tried_again(app: App, run: Any, db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that does not resolve, or a port without a listener, is a temporary failure."""

    async def none(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    with socket.socket() as unused:
        unused.bind((INTERNAL, 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        serving(
            app, provider("acme", {"signing_secret": new_signing_secret()}, url=url, allow_http=True, allow=[INTERNAL])
        )
        found = run(TELL.enqueue_sync(db, "acme", {}))
        assert found.state == "retrying" and "ConnectError" in found.last_error
        monkeypatch.setattr(_transport, "resolve", none)
        found = run(TELL.enqueue_sync(db, "acme", {}))
        assert found.state == "retrying" and "name resolution" in found.last_error
