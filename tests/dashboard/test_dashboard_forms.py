"""Which actions the dashboard allows, from which forms; what its answers have in common, and that none runs a text."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from support.broken import DIES_AT_COMMIT
from support.dashboard import (
    HERE,
    NO_PAGES,
    PASSWORD,
    SECURITY,
    Make,
    contents,
    covers,
    routes,
    users_file,
    visiting,
    walk,
)
from support.dashboard_app import HOSTILE, IMG, SECRET, furnish
from support.dashboard_app import app as furnished_app
from support.proxy import Proxy
from tallybook import App
from tallybook._app.counts import Counts
from tallybook.extra.dashboard import database
from tallybook.extra.dashboard.redact import DOTS, redact
from tallybook.web import Site, dashboard

# Looking without acting


@pytest.mark.slow
async def test_who_may_only_look_sees_no_form_and_changes_nothing(
    make: Make, tmp_path: Path, dsn: str, db: Any
) -> None:
    """Without rights to act, no page has a changing form, and a forged form is refused at every address."""

    def _readers(make: Make, tmp_path: Path) -> dict[str, tuple[Site, str | None]]:
        app = furnished_app
        return {
            "by default": (make(app=app), None),
            "read_only": (make(app=app, users=users_file(tmp_path), read_only=True), "ada"),
            "a user who may only look": (make(app=app, users=users_file(tmp_path)), "bob"),
        }

    await furnish(dsn, drain=False)
    before = contents(db)
    for name, (site, who) in _readers(make, tmp_path).items():
        async with visiting(site) as visitor:
            if who:
                await visitor.login(who, PASSWORD)
            for address, answer in (await walk(visitor)).items():
                assert set(answer.forms) <= {"/logout"}, (name, address)
            for path in set(routes(site, "POST")) - {"/login", "/logout"}:
                answer = await visitor.post(path, name="mail", job="1")
                assert answer.status == 403, (name, path)
    assert contents(db) == before
    async with visiting(make(app=furnished_app, read_only=False)) as visitor:  # the control
        assert any(answer.forms for answer in (await walk(visitor, most=20)).values())


@pytest.mark.slow
async def test_looking_changes_nothing(make: Make, dsn: str, db: Any) -> None:
    """Requesting every page and part leaves each row of the database as it was; an action changes it."""
    await furnish(dsn, drain=False)
    site = make(app=furnished_app, read_only=False)
    async with visiting(site) as visitor:
        await visitor.get("/")  # the session begins
        before = contents(db)
        walked = await walk(visitor)
        for path in routes(site, "GET"):
            if path != "/events":
                await visitor.get(path.replace("{id}", "1"))
            await visitor.ask("HEAD", path.replace("{id}", "1"))
        assert contents(db) == before
        assert len(walked) >= 3
        await visitor.post("/queue/pause", name="mail")
        assert contents(db) != before


@pytest.mark.slow
async def test_every_page_can_be_reached(make: Make, dsn: str) -> None:
    """Every page route is linked from another page, every link leads to a page, and no page fails."""
    await furnish(dsn)
    site = make(app=furnished_app, read_only=False)
    async with visiting(site, raises=True) as visitor:
        walked = await walk(visitor)
    for address, answer in walked.items():
        assert answer.status == 200, address
        assert answer.text.count("<h1") == 1 and "<main" in answer.text, address
    missed = [path for path in routes(site, "GET") if path not in NO_PAGES and not covers(path, walked)]
    assert not missed


async def test_what_a_job_carries_is_text(make: Make, dsn: str) -> None:
    """Markup in names, args, errors and results is shown only as text, and secrets are not shown."""
    await furnish(dsn)
    async with visiting(make(app=furnished_app, read_only=False)) as visitor:
        walked = await walk(visitor)
    shown = "".join(answer.text for answer in walked.values())
    assert IMG not in shown and "<script>fired" not in shown and "</pre></script>" not in shown
    assert "&lt;img src=x" in shown  # the control: it is there
    assert SECRET not in shown


def test_what_a_secret_is_called() -> None:
    """Values of these keys are dots at any depth; values of merely similar keys are shown."""
    plain = (
        "user",
        "author",
        "passenger",
        "key",
        "unique_key",
        "order_key",
        "keyboard",
        "monkey",
        "compassion",
        "dsn_count",
        "url",
        "session",
    )
    secrets = (
    "password", "passwords", "password_hash", "dbPassword", "old_passwd", "pwd", "passphrase", "pass", "user_pass",
    "api_key", "apiKey", "API Key", "access_key", "AWS_SECRET_ACCESS_KEY", "private-key", "signing_key",
    "encryption_key", "token", "refreshToken", "jwt", "bearer", "Authorization", "auth", "Set-Cookie", "credentials",
    "client_secret", "dsn", "database_dsn", "database_url", "DATABASE_URI", "connection_string", "connectionString",
    "webhook_url", "webhookUrl", "session_id",
)  # fmt: skip
    for name in secrets:
        assert redact([{"a": {name: SECRET}}]) == [{"a": {name: DOTS}}], name
    assert redact(dict.fromkeys(plain, "shown")) == dict.fromkeys(plain, "shown")
    assert redact({"password": None}) == {"password": None}


# Forged forms


async def test_only_our_own_forms_count(make: Make, paused: Any) -> None:
    """A form without the session's token, of another origin, or of another content type is refused."""
    forged = [
        ({}, {"token": ""}, 403),
        ({}, {"token": "x" * 32}, 403),
        ({}, {"token": "ä€"}, 403),
        ({"cookie": ""}, {}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, {}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate"}, {}, 403),
        ({"origin": "https://evil.example"}, {}, 403),
        ({"origin": "null"}, {}, 403),
        ({"origin": "http://localhost:9999"}, {}, 403),
        ({"content-type": "text/plain"}, {}, 415),
        ({"content-type": "application/json"}, {}, 415),
        ({"content-type": "multipart/form-data; boundary=x"}, {}, 415),
        ({}, {}, 303),
        ({"origin": "http://localhost"}, {}, 303),
        ({"sec-fetch-site": "same-origin", "origin": "null"}, {}, 303),
        ({"sec-fetch-site": "none"}, {}, 303),
        ({"content-type": "application/x-www-form-urlencoded; charset=utf-8"}, {}, 303),
    ]
    site = make(read_only=False)
    for headers, fields, status in forged:
        async with visiting(site) as visitor:
            answer = await visitor.post("/queue/pause", headers=headers, name="mail", **fields)
            assert answer.status == status, (headers, fields)
            assert paused() is (status == 303)
            assert SECURITY.items() <= dict(answer.headers).items()


async def test_the_token_is_not_taken_from_the_address(make: Make, paused: Any) -> None:
    """The token is read from the body only, never from the address."""
    async with visiting(make(read_only=False)) as visitor:
        await visitor.get("/queues")
        token = visitor.session.get("token")
        assert (await visitor.ask("POST", f"/queue/pause?token={token}&name=mail", data={"name": "mail"})).status == 403
        assert not paused()


async def test_a_form_that_cannot_be_read_is_refused(make: Make) -> None:
    """A form that is too large, has too many fields, is not UTF-8 or is empty gets a clear refusal."""
    unreadable = [
        (b"token=" + b"x" * 300_000, 413),
        (b"&".join(b"a=1" for _ in range(2001)), 400),
        (b"token=\xff\xfe", 400),
        (b"token=%ff", 400),
        (b"", 403),
    ]
    site = make(read_only=False)
    for body, status in unreadable:
        async with visiting(site) as visitor:
            kind = {"content-type": "application/x-www-form-urlencoded"}
            assert (await visitor.ask("POST", "/queue/pause", content=body, headers=kind)).status == status


async def test_a_page_of_another_site_cannot_load_anything(make: Make) -> None:
    """Requests by another site's page are refused, for live parts and data, too; a link from it works."""
    async with visiting(make()) as visitor:
        for path in ("/", "/series", "/events", "/queues"):
            for site in ("cross-site", "same-site"):
                headers = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}
                assert (await visitor.ask("GET", path, headers=headers)).status == 403
        headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await visitor.ask("GET", "/queues", headers=headers)).status == 200
        assert (await visitor.ask("GET", "/series", headers={"sec-fetch-site": "same-origin"})).status == 200


async def test_after_an_action_one_is_on_a_page_of_the_dashboard(make: Make, paused: Any) -> None:
    """The return address in a form is only followed to a page of this dashboard."""
    site = make(read_only=False)
    ours = ["/queue?name=a..b", "/queues?q=a&from=100"]
    others = [
        "", "//evil.example/", "https://evil.example/", "/\\evil.example", "/%5cevil.example", "/\tevil",
        "/%2fevil.example", "/../admin", "/x/%2e%2e/admin", "javascript:fired()", "/\r\nset-cookie: a=b",
    ]  # fmt: skip
    for back, to in [*zip(ours, ours, strict=True), *((back, "/") for back in others)]:
        async with visiting(site) as visitor:
            answer = await visitor.post("/queue/pause", name="mail", back=back)
            assert (answer.status, answer.headers["location"]) == (303, to)
            assert paused()


@pytest.mark.direct("a pooler answers the commit of a session that has died with words of its own")
async def test_a_commit_that_is_not_answered_is_told(make: Make, db: Any, paused: Any) -> None:
    """A database lost at the commit leaves the outcome open, and the page says so; one lost before does not."""
    async with visiting(make(read_only=False)) as visitor:
        db.execute(DIES_AT_COMMIT)
        answer = await visitor.post("/queue/pause", name="mail")
        assert answer.status == 303
        assert "the change may have been made" in (await visitor.get("/queues")).text
        db.execute("drop trigger dies on tallybook.audit")
        db.execute("create trigger dies after insert on tallybook.audit for each row execute function dies()")
        await visitor.post("/queue/pause", name="mail")
        assert "cannot reach PostgreSQL" in (await visitor.get("/queues")).text
        assert not paused()
        db.execute("drop trigger dies on tallybook.audit")
        await visitor.post("/queue/pause", name="mail")
        assert paused()


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
