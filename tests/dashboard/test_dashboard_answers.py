"""What every answer of the dashboard has in common, and that no request makes it fail or reveal too much."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from support.dashboard import (
    HERE,
    SECURITY,
    Make,
    routes,
    users_file,
    visiting,
)
from support.dashboard_app import HOSTILE, SECRET
from support.proxy import Proxy
from tallybook import App
from tallybook._app.counts import Counts
from tallybook.extra.dashboard import database
from tallybook.web import dashboard


async def test_every_answer_carries_its_headers(make: Make, tmp_path: Path, paused: Any) -> None:
    """Pages, parts, files, redirects, refusals and errors have the security headers; browsers store no page."""
    open_site, closed = make(read_only=False), make(users=users_file(tmp_path))
    for site in (open_site, closed):
        async with visiting(site) as visitor:
            asked = [("GET", path.replace("{id}", "1")) for path in routes(site, "GET") if path != "/events"]
            asked += [("HEAD", path.replace("{id}", "1")) for path in routes(site, "GET")]
            asked += [
                (method, "/queues") for method in ("PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "POST", "NONSENSE")
            ]
            asked += [("POST", path) for path in routes(site, "POST")]
            asked += [
                ("GET", path)
                for path in (
                    "/nowhere",
                    "/static/app.css",
                    "/static/none",
                    "/queue?name=none",
                    "/queues/",
                    "/job/x",
                    "//",
                    "/static",
                )
            ]
            for method, path in asked:
                answer = await visitor.ask(method, path)
                wrong = {
                    name: answer.headers.get(name)
                    for name, value in SECURITY.items()
                    if answer.headers.get(name) != value
                }
                assert not wrong, (method, path)
                assert answer.status < 500 or path == "/readyz", (method, path)
                static = path.startswith("/static/") and answer.status == 200
                assert answer.headers["cache-control"] == ("no-cache" if static else "no-store"), (method, path)
    async with visiting(open_site) as visitor:
        vendored = await visitor.get("/static/vendor/htmx-4.0.1.min.js")
        assert "immutable" in vendored.headers["cache-control"]
        assert (await visitor.ask("PUT", "/queues")).status == 405


async def test_what_is_no_address_is_refused_like_any_other(make: Make, tmp_path: Path, paused: Any) -> None:
    """An address that is not UTF-8 or a wrong origin gets a refusal with the headers, no traceback."""
    for site in (make(read_only=False), make(users=users_file(tmp_path))):
        for path in ("/", "/queues", "/login", "/metrics", "/static/app.css", "/nowhere"):
            sent: list[Any] = []

            async def send(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            async def receive() -> Any:
                return {"type": "http.request", "body": b"", "more_body": False}

            scope = {
                "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"q=\xff",
                "scheme": "http", "headers": [(b"host", b"localhost")], "client": HERE, "server": HERE,
                "http_version": "1.1",
            }  # fmt: skip
            await site(scope, receive, send)
            said = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
            assert sent[0]["status"] == 400 and SECURITY.items() <= said.items(), path
        async with visiting(site) as visitor:
            for origin in ("http://[", "http://[::1", "null", "http://"):
                assert (await visitor.post("/login", headers={"origin": origin})).status == 403, origin


async def test_an_error_of_ours_tells_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that fails shows a sentence and has the headers; the error itself is only in the log."""
    site = make(read_only=False)

    def breaks(*given: Any, **options: Any) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(Counts, "throughput", breaks)
    async with visiting(site) as visitor:
        answer = await visitor.get("/queues")
        assert answer.status == 500 and SECRET not in answer.text and "See its log" in answer.text
        assert SECURITY.items() <= dict(answer.headers).items()


@pytest.mark.direct("reaches the server through a proxy of its own")
async def test_a_database_that_hangs_is_unavailable(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the database is silent on open sockets, a page is a 503 soon; the next one gets a new connection."""
    monkeypatch.setattr(database, "_GRACE", 0.3)
    with Proxy(dsn) as proxy:
        site = dashboard(App("shop"), dsn=proxy.dsn)
        site.nodes.first._answer, site.nodes.first._wait = "0.2s", 10.0
        async with aclosing(site), visiting(site) as visitor, asyncio.timeout(15):
            assert (await visitor.get("/queues")).status == 200
            proxy.silent = True
            lost = await visitor.get("/queues")
            assert lost.status == 503 and "no answer within 0.5 s" in lost.text
            proxy.silent = False
            assert (await visitor.get("/queues")).status == 200


async def test_no_file_but_those_of_the_dashboard_is_given_out(make: Make, tmp_path: Path) -> None:
    """No path leads out of the folder of static files, which anybody may read."""

    async def raw(site: Any, path: str) -> tuple[int, bytes]:
        """Request a path that no client would send unchanged."""
        scope = {
            "type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"",
            "scheme": "http", "headers": [(b"host", b"localhost")], "client": HERE, "root_path": "",
            "http_version": "1.1", "asgi": {"version": "3.0"},
        }  # fmt: skip
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        await site(scope, receive, send)
        return sent[0]["status"], b"".join(one.get("body", b"") for one in sent)

    files = [
        "/static/../site.py",
        "/static/vendor/../../site.py",
        "/static/./../site.py",
        "/static//etc/passwd",
        "/static/vendor/../../users.py",
        "/static/\0",
        "/static/\\..\\site.py",
        "/static/",
    ]
    site = make(users=users_file(tmp_path))
    for path in files:
        status, body = await raw(site, path)
        assert status in (401, 404), path
        assert b"from __future__" not in body
    async with visiting(site) as visitor:
        assert (await visitor.get("/static/app.js")).status == 200


async def test_forms_with_nonsense_are_answered(make: Make) -> None:
    """Any nonsense in any form's fields gets an answer, not a server error."""
    nonsense: list[dict[str, Any]] = [
        {}, {"name": HOSTILE, "id": HOSTILE, "job": HOSTILE}, {"name": "\0", "id": "9" * 40, "job": "9" * 40},
        {"name": "x" * 5000, "id": "-1", "job": ["1", "2"]},
    ]  # fmt: skip
    for fields in nonsense:
        site = make(read_only=False)
        async with visiting(site) as visitor:
            for path in routes(site, "POST"):
                answer = await visitor.post(path, **fields)
                assert answer.status in (200, 303, 400, 404, 409), path


@pytest.mark.slow
async def test_addresses_with_nonsense_are_answered(make: Make, dsn: str) -> None:
    """Any nonsense in any page's parameters gets a page, not a server error."""
    nonsense_values = ["\0", HOSTILE, "9" * 40, "-1", "x" * 3000, "%", "a\nb", "NaN"]
    for value in nonsense_values:
        site = make(read_only=False)
        names = [
            "name",
            "id",
            "q",
            "from",
            "after",
            "before",
            "state",
            "queue",
            "task",
            "link",
            "error",
            "since",
            "until",
            "order",
            "span",
            "to",
        ]
        async with visiting(site) as visitor:
            for path in set(routes(site, "GET")) - {"/events"}:
                answer = await visitor.ask("GET", path.replace("{id}", "1"), params=dict.fromkeys(names, value))
                assert answer.status < 500 or path == "/readyz", (path, answer.text[-800:])
                for one in names:
                    answer = await visitor.ask("GET", path.replace("{id}", "1"), params={one: value})
                    assert answer.status < 500 or path == "/readyz", (path, one, answer.text[-800:])


async def test_hostile_topics_are_ignored(make: Make) -> None:
    """A topic that does not exist, or whose name would break the stream, is not known."""
    live = make().live
    assert live.knows("overview")
    for topic in ("nothing", "overview\nevent: live", "overview:\r", "x" * 300, "", ":overview"):
        assert not live.knows(topic)
