"""The dashboard inside other applications: Starlette, FastAPI and Django, below a path, with their own logins."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI, Request
from starlette.applications import Starlette
from starlette.routing import Mount

from support.dashboard import SECURITY, Visitor, visiting, walk
from support.dashboard_app import app, furnish
from support.pages import blocks
from support.paths import ROOT, TESTS
from support.workers import eventually
from tallybook.web import Site, User, dashboard, mounted

MOUNT = "/ops/queue"


def who(request: Any) -> User | None:
    return User("ada", operate=True) if request.cookies.get("host") == "ada" else None


def in_any(site: Site) -> Any:
    async def elsewhere(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": b"the host"})

    return mounted(elsewhere, MOUNT, site)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["in_starlette", "in_fastapi", "in_any"])
async def test_it_works_below_a_path(host: str, dsn: str, db: Any) -> None:
    """A mounted dashboard keeps links, files, forms and cookies below its path; the host names the user."""

    async def check(visitor: Visitor, db: Any) -> None:
        """Links, files, forms and data below the path, and nothing beside it."""
        walked = await walk(visitor, most=12)
        assert {address for address, answer in walked.items() if answer.status == 200} >= {"/", "/queues"}
        for answer in walked.values():
            addresses = [
                one for one in re.findall(r'(?:href|src|action)="([^"]*)"', answer.text) if not one.startswith("#")
            ]
            assert addresses and all(one.startswith(f"{MOUNT}/") for one in addresses), addresses
            assert f'data-root="{MOUNT}"' in answer.text
        for file in set(re.findall(r'(?:href|src)="([^"]*/static/[^"]*)"', walked["/"].text)):
            answer = await visitor.get(file.removeprefix(MOUNT))
            assert answer.status == 200 and SECURITY.items() <= dict(answer.headers).items()
        assert "at" in json.loads((await visitor.get("/series")).text)
        answer = await visitor.post("/queue/pause", name="mail", back=f"{MOUNT}/queue?name=mail")
        assert (answer.status, answer.headers["location"]) == (303, f"{MOUNT}/queue?name=mail")
        assert f"Path={MOUNT};" in answer.headers["set-cookie"]
        assert "Queue mail is paused." in (await visitor.get("/queue?name=mail")).text
        assert (await visitor.post("/queue/resume", name="mail", back="/admin")).headers["location"] == f"{MOUNT}/"
        found = db.execute("select actor, action from tallybook.audits where via = 'web' order by id").fetchall()
        assert found == [("ada", "queue.pause"), ("ada", "queue.resume")]

    await furnish(dsn, drain=False)
    site = dashboard(app, authenticate=who, dsn=dsn)
    within: Any = in_any(site)
    if host == "in_starlette":
        within = Starlette(routes=[Mount("/ops", routes=[Mount("/queue", app=site)])])
    elif host == "in_fastapi":
        within = FastAPI()
        within.mount(MOUNT, site)
    async with visiting(site, within=within, base="https://shop.example", root=MOUNT) as visitor:
        assert (await visitor.get("/")).status == 403
        visitor.http.cookies.set("host", "ada", domain="shop.example")
        await check(visitor, db)
        assert (await visitor.ask("GET", "", follow_redirects=False)).status == 307
        beside = await visitor.http.get(f"{MOUNT}er/queues")
        assert beside.status_code in (404, 418)
        scope = {
            "type": "http", "method": "GET", "path": f"{MOUNT}/events", "query_string": b"topic=overview",
            "headers": [(b"host", b"shop.example"), (b"cookie", visitor.cookies.encode())], "raw_path": b"",
            "client": ("127.0.0.1", 1), "server": ("shop.example", 443), "scheme": "https", "root_path": "",
            "http_version": "1.1", "asgi": {"version": "3.0"},
        }  # fmt: skip
        sent: list[Any] = []

        def text() -> str:
            return b"".join(message.get("body", b"") for message in sent).decode()

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await eventually(lambda: "event: overview" in text(), "the overview is sent")
            return {"type": "http.disconnect"}

        async with asyncio.timeout(30):
            await visitor.http._transport.app(scope, receive, send)  # type: ignore[attr-defined]
        assert sent[0]["status"] == 200 and f'href="{MOUNT}/jobs' in text().partition("event: overview")[2]
    await site.aclose()
    assert site.live.viewers == 0


async def test_it_is_found_behind_a_prefix_that_a_proxy_has_taken_off(dsn: str, db: Any) -> None:
    """With a server's root path the dashboard answers below root path and mount, and links and cookie have both."""
    site = dashboard(app, authenticate=who, dsn=dsn)
    whole = in_any(site)

    async def served(scope: Any, receive: Any, send: Any) -> None:
        # Like servers do: the prefix is in the path, and is the root path.
        await whole({**scope, "root_path": "/shop", "path": "/shop" + scope["path"]}, receive, send)

    async with visiting(site, within=served, base="https://shop.example", root=MOUNT) as visitor:
        visitor.http.cookies.set("host", "ada", domain="shop.example")
        answer = await visitor.get("/queues")
        assert answer.status == 200 and f'href="/shop{MOUNT}/jobs"' in answer.text
        assert f"Path=/shop{MOUNT};" in answer.headers["set-cookie"]
        assert (await visitor.get("/static/app.css")).status == 200
        assert (await visitor.http.get("/shop/elsewhere")).status_code == 418
        assert (await visitor.http.get(f"{MOUNT}er/queues")).status_code == 418
    await site.aclose()


@pytest.mark.slow
def test_a_mount_needs_a_path() -> None:
    """Mounting at "/" is refused, as it would hide the host."""
    with pytest.raises(ValueError, match="needs a path"):
        mounted(in_any, "/", in_any)


def shown(file: str) -> str:
    """The block of docs/dashboard.md that begins with the name of this file."""
    (found,) = [block for block in blocks(ROOT / "docs/dashboard.md", "python") if block.startswith(f"# {file}\n")]
    return found


@pytest.mark.slow
async def test_the_fastapi_example_of_the_docs_works(dsn: str, db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/dashboard.md: a user of the host's session looks, ada acts, and nobody else sees anything."""
    monkeypatch.setenv("TALLYBOOK_DSN", dsn)
    db.execute("select tallybook.queue_set('mail')")
    main: dict[str, Any] = {}
    exec(compile(shown("main.py").replace("from __future__", ""), "main.py", "exec"), main)  # noqa: S102
    api = main["api"]
    site = api.routes[-1].app

    def enter(request: Request) -> str:
        request.session["user"] = request.query_params["name"]
        return "in"

    api.get("/enter")(enter)
    for name, status, acts in (("", 403, 403), ("bob", 200, 403), ("ada", 200, 303)):
        async with visiting(site, within=api, root="/queue", base="https://shop.example") as visitor:
            if name:
                assert (await visitor.http.get(f"/enter?name={name}")).status_code == 200
            assert (await visitor.get("/queues")).status == status
            assert (await visitor.post("/queue/pause", name="mail")).status == acts
    assert db.execute("select actor, action from tallybook.audits").fetchall() == [("ada", "queue.pause")]
    await site.aclose()


@pytest.mark.slow
async def test_it_works_in_django_by_its_sessions(tmp_path: Any, dsn: str, db: Any) -> None:
    """Beside a real Django application: users with is_staff look, superusers act, others see nothing."""
    serve = """
import os, sys
sys.path[:0] = [os.environ["TESTS"], os.getcwd()]
import django
from django.conf import settings

settings.configure(
    DEBUG=False, SECRET_KEY="k" * 50, ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "site.db"}},
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions"],
    MIDDLEWARE=["django.contrib.sessions.middleware.SessionMiddleware",
                "django.contrib.auth.middleware.AuthenticationMiddleware"],
)
django.setup()
from django.contrib.auth import login
from django.contrib.auth.models import User as Person
from django.core.management import call_command
from django.http import HttpResponse
from django.urls import path


def enter(request):
    login(request, Person.objects.get(username=request.GET["name"]))
    return HttpResponse("in")

urlpatterns = [path("enter", enter), path("", lambda request: HttpResponse("the host"))]
call_command("migrate", verbosity=0)
Person.objects.create_user("ada", is_staff=True, is_superuser=True)
Person.objects.create_user("bob", is_staff=True)
Person.objects.create_user("eve")
exec(open("asgi.py").read())
import uvicorn
uvicorn.run(application, port=0, lifespan="off", log_level="info")
"""

    @contextmanager
    def django(folder: Path, dsn: str) -> Iterator[str]:
        """Run a real Django application with the file of docs/dashboard.md; yield its address."""
        (folder / "serve.py").write_text(serve)
        (folder / "asgi.py").write_text(shown("project/asgi.py"))
        (folder / "shop").mkdir()
        (folder / "shop" / "jobs.py").write_text("from support.dashboard_app import app\n")
        environment = {"TESTS": str(TESTS), "PATH": "/usr/bin:/bin", "TALLYBOOK_DSN": dsn}
        command = [sys.executable, "serve.py"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True, cwd=folder) as running:
            assert running.stderr is not None
            said = ""
            try:
                for line in running.stderr:
                    said += line
                    if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                        break
                else:
                    raise AssertionError(said)
                yield found[0]
            finally:
                running.kill()

    await furnish(dsn, drain=False)
    with django(tmp_path, dsn) as base:
        for name, may_look, may_act in (
            ("ada", True, True),
            ("bob", True, False),
            ("eve", False, False),
            ("", False, False),
        ):
            async with httpx2.AsyncClient(base_url=base, timeout=30) as http:
                assert (await http.get("/")).text == "the host"
                if name:
                    assert (await http.get(f"/enter?name={name}")).text == "in"
                page = await http.get("/queue/queue?name=mail")
                assert page.status_code == (200 if may_look else 403), name
                assert ('action="/queue/queue/pause"' in page.text) is may_act, name
                if not may_look:
                    continue
                assert (await http.get("/queue/static/app.css")).status_code == 200
                token = re.search(r'name="token" value="([^"]+)"', page.text)
                form = {"name": "mail", "token": token[1] if token else "", "back": "/queue/queues"}
                answer = await http.post("/queue/queue/pause", data=form)
                assert answer.status_code == (303 if may_act else 403)
                async with http.stream("GET", "/queue/events?topic=overview", timeout=20) as events:
                    text = ""
                    async for chunk in events.aiter_text():
                        text += chunk
                        if "event: overview" in text:
                            break
                    assert 'href="/queue/jobs' in text
    found = db.execute("select actor, action from tallybook.audits where via = 'web'").fetchall()
    assert found == [("ada", "queue.pause")]
