"""Hostile endpoints, servers and args, and what an error tracker sees."""

import traceback
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest

from support.outside import LOOPBACK, HttpServer, Reply, provider, serving
from tallybook import App, Constant, Context
from tallybook._model.provider import STARS
from tallybook.errors import CallFailed
from tallybook.extra.tasks import email, http, new_signing_secret, webhook
from tallybook.extra.tasks._email import Server
from tallybook.extra.tasks._outbound import Call
from tallybook.testing import drain

HOUR = Constant(timedelta(hours=1))
CALL, TELL, MAIL = (task.with_(retry=HOUR) for task in (http, webhook, email))
TOKEN = "c4n4ryT0ken"


def seen_in_frames(app: App, dsn: str, db: Any, endpoint: HttpServer) -> tuple[int, list[str]]:
    """The number of errors that a tracker gets, and their lines, local variables included, that show a secret."""
    told = StringIO()  # unlike a list, its repr shows no content: it is a variable of a frame, too

    @app.around_job
    async def tracker(ctx: Context) -> Any:
        try:
            yield
        except Exception as error:
            found = traceback.TracebackException.from_exception(error, capture_locals=True)
            told.writelines(["One error\n", *found.format()])
            raise

    signing = new_signing_secret()
    local = {"url": endpoint.url, "allow": LOOPBACK, "allow_http": True}
    endpoint.reply(Reply(500, {"X-Echo": TOKEN}))
    serving(
        app,
        provider("header", {"token": TOKEN, "signing_secret": signing}, **local),
        provider("query", {"token": TOKEN, "signing_secret": signing}, **local, token_query="key"),
        provider("user", {"password": TOKEN, "signing_secret": signing}, **local, user="u"),
        provider("unusable", {"token": f"{TOKEN}\n", "signing_secret": signing}, **local),
        provider("no-url", {"url": f"https://x/{TOKEN} y", "signing_secret": signing}),
        provider("no-key", {"signing_secret": TOKEN}, **local),
        provider(
            "inside", {"url": f"{endpoint.url}/{TOKEN}", "token": TOKEN, "signing_secret": signing}, allow_http=True
        ),
        provider("mail", {"password": TOKEN}, host="127.0.0.1", port=9, user="u", **{"from": "a@example.org"}),
    )
    jobs: list[Any] = [MAIL.job("mail", "b@example.org", "s", "t")]
    for name in ("header", "query", "user", "unusable", "no-url", "no-key", "inside"):
        options: tuple[dict[str, Any], ...] = ({}, {"path": "/../x"}, {"query": {"a": [1]}}, {"headers": {"a b": "c"}})
        jobs += [*(CALL.job(name, **given) for given in options), TELL.job(name, {})]
    app.enqueue_many_sync(db, jobs)
    drain(app, dsn=dsn)
    words = (TOKEN, signing.removeprefix("whsec_"))
    lines = told.getvalue().splitlines()
    return lines.count("One error"), [line for line in lines if any(word in line for word in words)]


def test_no_local_variable_of_an_error_shows_a_secret(app: App, dsn: str, db: Any, endpoint: HttpServer) -> None:
    """S1-12, S4-06: however a call fails, no frame of its error shows a secret to an error tracker."""
    told, found = seen_in_frames(app, dsn, db, endpoint)
    assert (told, found) == (36, [])


def test_control_frames_of_the_call_would_show_it(
    app: App, dsn: str, db: Any, endpoint: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1-12, negative control: raised where they occur, the same errors show the secrets."""
    loud = Call.__dict__["to_provider"].__func__.__wrapped__
    monkeypatch.setattr(Call, "to_provider", classmethod(loud))
    told, found = seen_in_frames(app, dsn, db, endpoint)
    assert told == 36 and any("'Authorization': 'Bearer c4n4ryT0ken'" in line for line in found)


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "\\u0000"}',
        b'{"\\u0000": 1}',
        b'["\\ud800"]',
        b'{"a": NaN}',
        b"[1e999]",
        b"[" * 5000 + b"]" * 5000,
    ],
)
def test_json_that_no_database_keeps_is_kept_as_text(
    app: App, run: Any, db: Any, endpoint: HttpServer, body: bytes
) -> None:
    """S4-06: an answer that jsonb cannot store (NUL, a lone surrogate, NaN, its depth) is kept as text."""
    json = {"Content-Type": "application/json"}
    serving(app, provider("rates", url=endpoint.url, allow=LOOPBACK))
    endpoint.reply(Reply(200, json, body), Reply(200, json, b'{"a": 1}'))
    assert run(CALL.enqueue_sync(db, "rates")).result["text"] == body.decode()
    assert run(CALL.enqueue_sync(db, "rates")).result["json"] == {"a": 1}


def test_an_answer_with_nul_is_kept(app: App, run: Any, db: Any, endpoint: HttpServer) -> None:
    """S4-06: a NUL byte in a webhook's answer costs neither the result nor the error."""
    local = {"url": endpoint.url, "allow": LOOPBACK, "allow_http": True}
    serving(app, provider("acme", {"signing_secret": new_signing_secret()}, **local))
    endpoint.reply(Reply(200, {}, b"a\0b"), Reply(500, {}, b"a\0b"))
    assert run(TELL.enqueue_sync(db, "acme", {})).result["answer"] == "a\ufffdb"
    found = run(TELL.enqueue_sync(db, "acme", {}))
    assert found.state == "retrying" and "status 500" in (found.last_error or "")


@pytest.mark.parametrize("host", ["a" * 64 + ".example", "a..example", "...", "."])
def test_a_host_that_no_resolver_takes_is_dead(app: App, run: Any, db: Any, host: str) -> None:
    """S4-06: a host name that can never be resolved makes the job dead at once."""
    found = run(CALL.enqueue_sync(db, url=f"http://{host}/"))
    assert found.state == "dead" and "its host is not a valid name" in (found.last_error or "")


def test_every_way_to_write_the_inside_is_refused(app: App, run: Any, db: Any) -> None:
    """S4-06: inside addresses are refused: decimal, octal, hex, short, mapped, compatible, translated, tunneled."""
    hosts = """\
2130706433 0x7f.1 0177.0.0.1 127.1 0 [::ffff:127.0.0.1] [::127.0.0.1] [::ffff:0:127.0.0.1] [64:ff9b::7f00:1]
[64:ff9b:1::7f00:1] [2002:7f00:1::] [2001:0:7f00:1::] [::] [::1] [fd00:ec2::254] 169.254.169.254
100.100.100.200 255.255.255.255"""
    put = {host: CALL.enqueue_sync(db, url=f"http://{host}:1/") for host in hosts.split()}
    run(put["127.1"])  # drains all of them
    for host, job in put.items():
        found = app.get(job).sync(db)
        assert found.state == "dead" and "has an address that is" in (found.last_error or ""), host


def test_one_header_is_sent_once(app: App, run: Any, db: Any, endpoint: HttpServer) -> None:
    """S4-06: a provider's header replaces ours of that name, in any case, and the task's replaces the provider's."""
    local = {"url": endpoint.url, "allow": LOOPBACK, "headers": {"user-agent": "shop", "content-type": "text/x"}}
    serving(app, provider("rates", **local))
    raw: list[int] = []

    def answer(got: Any) -> Reply:
        raw.append(len(got.headers))
        return Reply(200, {}, b"")

    endpoint.reply(answer)
    run(CALL.enqueue_sync(db, "rates", method="POST", body={}, headers={"X-A": "1"}))
    (got,) = endpoint.got
    assert got.headers["user-agent"] == "shop" and got.headers["content-type"] == "application/json"


def test_a_login_that_a_server_quotes_has_stars() -> None:
    """A password that a server quotes becomes stars, also in the base64 of AUTH PLAIN and with spaces."""
    made = provider("mail", {"password": "p  4ss"}, host="127.0.0.1", user="u", **{"from": "a@example.org"})
    server = Server.of("mail", made)

    class Said:
        code = 535
        message = "no: AHUAcCAgNHNz, no: p  4ss"

    assert server._said(Said()) == f"535 no: {STARS}, no: {STARS}"


def test_a_call_that_fails_has_no_other_error_behind_it(app: App, dsn: str, db: Any, endpoint: HttpServer) -> None:
    """S1-12: the library's error, whose frames have the request, is neither the cause nor the context of our error."""
    told: list[BaseException] = []

    @app.around_job
    async def tracker(ctx: Context) -> Any:
        try:
            yield
        except CallFailed as error:
            told.append(error)
            raise

    serving(app, provider("gone", {"token": TOKEN}, url="http://127.0.0.1:9/", allow=LOOPBACK, allow_http=True))
    CALL.enqueue_sync(db, "gone")
    drain(app, dsn=dsn)
    (error,) = told
    assert "ConnectError" in str(error) and error.__cause__ is None
    assert "httpcore" not in type(error.__context__).__module__
