"""Access to the dashboard: from this machine only, with a password, or through the host's own hook."""

import asyncio
import socket
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import click.testing
import pytest
from starlette.exceptions import HTTPException

from support.dashboard import HASH, HERE, PASSWORD, SECURITY, Make, routes, users_file, visiting
from support.dashboard_app import SECRET
from tallybook import App
from tallybook._cli import cli
from tallybook._cli.web import _listening
from tallybook.errors import ConfigError
from tallybook.extra.dashboard import users as people
from tallybook.extra.dashboard.access import LONGEST, Session
from tallybook.web import Site, User, dashboard

ELSEWHERE = ("203.0.113.7", 40_000)
SAYS_401 = HTTPException(401, "Who are you?", {"www-authenticate": "Basic"})


# This machine only


async def test_without_users_only_this_machine_is_answered(make: Make) -> None:
    """Requests from another address, for another host name, or through a proxy see nothing."""
    others = [
        (ELSEWHERE, "http://localhost", {}),
        (("::2", 1), "http://localhost", {}),
        (None, "http://localhost", {}),
        (HERE, "http://evil.example", {}),  # a foreign name that points here
        (HERE, "http://localhost.evil.example", {}),
        (HERE, "http://192.0.2.1", {}),
        (HERE, "http://localhost", {"host": ""}),
        *[
            (HERE, "http://localhost", {name: "203.0.113.7"})
            for name in (
                "x-forwarded-for",
                "forwarded",
                "x-real-ip",
                "via",
                "x-forwarded-ssl",
                "x-original-host",
                "cf-ray",
                "x-envoy-peer",
            )
        ],
        (HERE, "http://localhost", {"x-forwarded-proto": "https"}),
    ]
    site = make(read_only=False)
    for client, base, headers in others:
        async with visiting(site, client=client, base=base) as visitor:
            for path in sorted({*routes(site, "GET")} - {"/login", "/healthz", "/readyz", "/metrics"}):
                answer = await visitor.get(path, **headers)
                assert answer.status == 403, path
                assert 'href="/queues"' not in answer.text and "Log out" not in answer.text
            assert (await visitor.ask("POST", "/queue/pause", data={"name": "mail"}, headers=headers)).status == 403
            assert (await visitor.get("/login", **headers)).status == 303  # no login, and nothing else


async def test_a_proxy_that_hides_itself_is_told_by_what_it_cannot_hide(make: Make, paused: Any) -> None:
    """Nginx by default sends a local Host and no header; HTTP/1.0 or the Origin reveals it."""
    site = make(read_only=False)

    async def nginx(scope: Any, receive: Any, send: Any) -> None:
        await site({**scope, "http_version": "1.0"}, receive, send)

    async with visiting(site, within=nginx, base="http://127.0.0.1:8420") as visitor:
        for path in ("/", "/queues", "/events", "/series", "/metrics"):
            assert (await visitor.get(path)).status in (401, 403), path
        assert (await visitor.get("/healthz")).status == 200
    async with visiting(site, base="http://127.0.0.1:8420") as visitor:
        for origin in ("https://queue.example", "https://queue.example:8420", ""):
            headers = {"origin": origin, "sec-fetch-site": "same-origin"}
            assert (await visitor.post("/queue/pause", name="mail", headers=headers)).status == 403, origin
            assert not paused()
        own = {"origin": "http://127.0.0.1:8420", "sec-fetch-site": "same-origin"}
        assert (await visitor.post("/queue/pause", name="mail", headers=own)).status == 303  # the control
        assert paused()


async def test_this_machine_is_answered_by_its_own_names(make: Make) -> None:
    """Control: from this machine, by its own names, the pages are shown."""
    own_names = ["http://localhost:8420", "http://127.0.0.1", "http://[::1]:8420", "http://app.localhost"]
    site = make()
    for base in own_names:
        async with visiting(site, base=base) as visitor:
            answer = await visitor.get("/queues")
            assert answer.status == 200 and 'href="/dead"' in answer.text


def test_an_address_that_others_reach_needs_users(dsn: str) -> None:
    """`tallybook web --host 0.0.0.0` without --users does not start, and says why."""
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        result = click.testing.CliRunner().invoke(cli, ["web", "--host", host, "--dsn", dsn, "--operate"])
        assert result.exit_code == 2, result.output
        assert "without a login" in result.output and "--users" in result.output
    away = "postgresql://nobody@127.0.0.1:1/none?connect_timeout=1"
    result = click.testing.CliRunner().invoke(cli, ["web", "--host", "127.0.0.1", "--dsn", away])
    assert result.exit_code != 0 and "without a login" not in result.output


# Logins


async def test_a_login_lets_in_and_a_logout_ends_it(make: Make, tmp_path: Path, paused: Any) -> None:
    """Nothing is shown before a login; the right password lets in, with a new token; a logout ends it."""
    async with visiting(make(users=users_file(tmp_path)), client=ELSEWHERE, base="http://shop.example") as visitor:
        before = await visitor.get("/queues?q=a", accept="text/html")
        assert (before.status, before.headers["location"]) == (303, "/login?next=%2Fqueues%3Fq%3Da")
        assert (await visitor.get("/queues")).status == 401  # a script
        assert "Dead letters" not in (await visitor.get("/login")).text
        token = visitor.session.get("token")
        entered = await visitor.login("ada", PASSWORD, next="/queues?q=a")
        assert (entered.status, entered.headers["location"]) == (303, "/queues?q=a")
        assert (await visitor.get("/queues")).status == 200
        assert visitor.session.get("token") != token
        assert (await visitor.get("/login")).status == 303  # already logged in
        await visitor.post("/queue/pause", name="mail")
        assert paused()
        assert (await visitor.post("/logout")).headers["location"] == "/login"
        assert (await visitor.get("/queues")).status == 401


async def test_what_was_before_the_login_is_worth_nothing_after_it(make: Make, tmp_path: Path, paused: Any) -> None:
    """A session planted before the login is not logged in by it: its token and cookie are refused."""
    site = make(users=users_file(tmp_path))
    async with visiting(site) as visitor, visiting(site) as thief:
        await visitor.get("/login")
        planted, token = visitor.cookies, visitor.session.get("token")
        await visitor.login("ada", PASSWORD)
        assert (await thief.get("/queues", cookie=planted)).status == 401
        assert (await visitor.post("/queue/pause", name="mail", token=token)).status == 403
        assert not paused()
        await visitor.get("/queues")
        await visitor.post("/queue/pause", name="mail")
        assert paused()


async def test_a_login_that_does_not_fit_lets_nobody_in(make: Make, tmp_path: Path) -> None:
    """A wrong password and an unknown name get the same answer, and no session."""
    wrong = [
        ("ada", "wrong"),
        ("ada", ""),
        ("eve", PASSWORD),
        ("", ""),
        ("ADA", PASSWORD),
        ("ada", PASSWORD + " "),
    ]
    for name, password in wrong:
        async with visiting(make(users=users_file(tmp_path))) as visitor:
            answer = await visitor.login(name, password)
            assert answer.status == 401 and "Wrong name or password." in answer.text
            assert password not in answer.text or not password.strip()
            assert (await visitor.get("/queues")).status == 401


async def test_a_name_is_tried_ten_times_a_minute(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 15 tries at once ten count; then even the right password waits a minute; unknown names alike."""
    site = make(users=users_file(tmp_path))
    known = site.access.users
    assert known is not None
    monkeypatch.setattr(people, "_fits", lambda password, kept: password == PASSWORD and kept == HASH)
    async with visiting(site) as visitor:
        await visitor.get("/login")
        for name in ("ada", "eve"):
            found = await asyncio.gather(*[visitor.login(name, "wrong") for _ in range(15)])
            assert sorted(one.status for one in found) == [401] * 10 + [429] * 5, name
        assert (await visitor.login("ada", PASSWORD)).status == 429
        assert (await visitor.login("bob", PASSWORD)).status == 303  # others are not held up
    later = time.monotonic() + 61
    monkeypatch.setattr(people.time, "monotonic", lambda: later)
    async with visiting(site) as visitor:
        assert (await visitor.login("ada", PASSWORD)).status == 303


def test_names_that_are_tried_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries with ever new names do not fill the memory."""
    monkeypatch.setattr(people, "_MOST_NAMES", 100)
    known = people.Users({})
    for n in range(1000):
        known.may_try(f"name{n}")
    assert len(known._tries) == 100


async def test_a_changed_password_ends_the_session(make: Make, tmp_path: Path) -> None:
    """After a restart with another password ada's cookie is refused; with the same one it is valid."""
    other_hash = people.hashed("another password")
    async with visiting(make(users=users_file(tmp_path), secret="k" * 40)) as visitor:
        await visitor.login("ada", PASSWORD)
        cookies = visitor.cookies
    for ada, status in ((HASH, 200), (other_hash, 401)):
        async with visiting(make(users=users_file(tmp_path, ada), secret="k" * 40)) as visitor:
            assert (await visitor.get("/queues", cookie=cookies)).status == status


async def test_a_login_is_over_after_twelve_hours(make: Make, tmp_path: Path) -> None:
    """A login ends after twelve hours, however new its cookie; a cookie of another secret, or altered, is refused."""
    site = make(users=users_file(tmp_path), secret="k" * 40)
    mark = people.Password(User("ada"), HASH).mark

    def cookie(signed_by: Site, **said: Any) -> str:
        text = signed_by.sessions.written(
            Session({"user": "ada", "mark": mark, **said}), "localhost", root="", secure=False
        )
        return text.partition(";")[0]

    now = int(time.time())
    good = cookie(site, since=now - LONGEST + 60)
    async with visiting(site) as visitor:
        assert (await visitor.get("/queues", cookie=good)).status == 200
        assert (await visitor.get("/queues", cookie=f'odd="; a=b"; {good}; c')).status == 200
        refused = [
            cookie(site, since=now - LONGEST),
            cookie(site),
            cookie(make(secret="x" * 40), since=now),
            good[:-2] + ("A" if good[-2] != "A" else "B") + good[-1],  # the last character has unused bits
            good.replace("tallybook=", "tallybook=A"),
            "tallybook=",
            "tallybook=..",
        ]
        for one in refused:
            assert (await visitor.get("/queues", cookie=one)).status == 401, one


async def test_the_cookie_says_what_a_browser_needs(make: Make, tmp_path: Path) -> None:
    """HttpOnly and SameSite always, Secure on https; its name has the port, as browsers do not separate ports."""
    for base, name, secure in (
        ("http://localhost", "tallybook", False),
        ("https://shop.example", "tallybook", True),
        ("http://localhost:8421", "tallybook-8421", False),
    ):
        async with visiting(make(users=users_file(tmp_path)), base=base) as visitor:
            said = (await visitor.get("/login")).headers["set-cookie"]
            assert (
                said.startswith(f"{name}=")
                and "; Path=/;" in said
                and "; HttpOnly" in said
                and "; SameSite=Lax" in said
            )
            assert ("; Secure" in said) is secure
            assert "domain" not in said.lower()
            assert "set-cookie" not in (await visitor.get("/static/app.css")).headers


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (None, 0o644, "others may read it"),
        (None, 0o640, "others may read it"),
        ("", 0o600, "names no users"),
        ("[users.ada]\n", 0o600, "no password hash"),
        (f'[users.ada]\npassword = "{PASSWORD}"\n', 0o600, "no password hash"),
        (f'[users."a b"]\npassword = "{HASH}"\n', 0o600, "a name has"),
        (f'[users.ada]\npassword = "{HASH}"\nadmin = true\n', 0o600, "'admin'"),
        (f'[users.ada]\npassword = "{HASH}"\noperate = "yes"\n', 0o600, "true or false"),
        ("users = [", 0o600, "is not TOML"),
    ],
)
def test_a_users_file_that_is_not_right_is_refused(tmp_path: Path, text: str | None, mode: int, said: str) -> None:
    """A file that others may read, or with wrong content, is an error at the start that shows no hash."""
    with pytest.raises(ConfigError, match=said) as caught:
        dashboard(App("shop"), users=users_file(tmp_path, text=text, mode=mode))
    assert HASH not in str(caught.value) and PASSWORD not in str(caught.value)
    dashboard(App("shop"), users=users_file(tmp_path))


# The host's own hook


async def test_the_hook_of_the_host_decides(make: Make) -> None:
    """A User from the hook gets in from anywhere; None, another value or an error lets nobody in."""
    hooks = [
        (lambda request: User("ada"), 200),
        (AsyncMock(return_value=User("ada")), 200),
        (lambda request: None, 403),
        (AsyncMock(return_value=None), 403),
        (lambda request: "ada", 500),
        (lambda request: True, 500),
        (lambda request: User(""), 500),
        (lambda request: User("x" * 201), 500),
        (Mock(side_effect=RuntimeError(SECRET)), 500),
        (Mock(side_effect=SAYS_401), 401),
    ]
    for hook, status in hooks:
        async with visiting(make(authenticate=hook), client=ELSEWHERE, base="https://shop.example") as visitor:
            answer = await visitor.get("/queues")
            assert answer.status == status
            assert SECRET not in answer.text
            assert SECURITY.items() <= dict(answer.headers).items()
            assert (
                (await visitor.get("/events", accept="text/event-stream")).status == status if status != 200 else True
            )


async def test_a_scraper_is_no_person_that_the_hook_has_to_know(make: Make, db: Any) -> None:
    """The metrics token reads the metrics and nothing else, even if the host's hook refuses or fails."""
    token = "t" * 32
    says_401, breaks = Mock(side_effect=SAYS_401), Mock(side_effect=RuntimeError(SECRET))
    for hook, refusal in ((says_401, 401), (breaks, 500), (AsyncMock(return_value=None), 401)):
        site = make(authenticate=hook, metrics_token=token)
        async with visiting(site, client=ELSEWHERE, base="https://shop.example") as visitor:
            bearer = {"authorization": f"Bearer {token}"}
            answer = await visitor.get("/metrics", **bearer)
            assert answer.status == 200 and "tallybook_up 1" in answer.text
            assert SECURITY.items() <= dict(answer.headers).items()
            assert (await visitor.get("/metrics")).status == refusal
            assert (await visitor.get("/metrics", authorization="Bearer " + "u" * 32)).status == refusal
            for path in ("/queues", "/series", "/events"):
                assert (await visitor.get(path, **bearer)).status in (401, 403, 500)
            assert (await visitor.ask("POST", "/metrics", headers=bearer)).status >= 400


async def test_a_user_of_the_hook_acts_under_its_name(make: Make, paused: Any, db: Any) -> None:
    """A user who may operate is audited under the name from the hook; another user is refused."""
    ada = AsyncMock(return_value=User("ada", operate=True))
    async with visiting(make(authenticate=ada), base="https://shop.example") as visitor:
        assert (await visitor.post("/queue/pause", name="mail")).status == 303
    assert paused()
    assert db.execute("select actor, via, action from tallybook.audits").fetchall() == [("ada", "web", "queue.pause")]
    async with visiting(make(authenticate=lambda request: User("bob")), base="https://shop.example") as visitor:
        assert (await visitor.post("/queue/resume", name="mail")).status == 403
    assert paused()


def test_no_answer_waits_for_the_clients_word() -> None:
    """Connections of `tallybook web` have TCP_NODELAY: the body of an answer does not wait 40 ms behind its head."""

    def waits(listening: socket.socket) -> bool:
        with listening, socket.create_connection(listening.getsockname()[:2]):
            ours, _ = listening.accept()
            with ours:
                return not ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    assert not waits(_listening("127.0.0.1", 0))
    assert waits(socket.create_server(("127.0.0.1", 0)))  # control
