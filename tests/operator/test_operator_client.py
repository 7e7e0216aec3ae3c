"""The package's client of the operator API, against a real server and against servers that answer badly."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.operator_client import OTHER, SECRET
from support.operator_process import serving
from support.outside import HttpServer, Reply, http_server
from tallybook.errors import ConfigError, OperatorRefused
from tallybook.extra.operator import OperatorClient

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
