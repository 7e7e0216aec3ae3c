"""The admin and the dashboard in docs/django.md's project: by Django's test client, real servers and a browser."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psycopg
import pytest

from support import chromium
from support.django_site import ADMIN, Site
from support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.direct("Django's test runner makes a database of its own, and its servers hold sessions"),
]

PEOPLE = """
from django.contrib.auth.models import Permission, User
User.objects.create_superuser("ada", password="open sesame")
viewer = User.objects.create_user("bob", password="open sesame", is_staff=True)
views = Permission.objects.filter(content_type__app_label="tallybook", codename__startswith="view_")
viewer.user_permissions.set(views)
User.objects.create_user("cem", password="open sesame", is_staff=True)
"""
COMMANDS = {
    "wsgi": ("manage.py", "runserver", "--noreload", "127.0.0.1:0"),
    "asgi": ("-m", "uvicorn", "--port", "0", "project.asgi:application"),
}


@pytest.fixture
def site(tmp_path: Path, empty_dsn: str) -> Site:
    return Site(tmp_path, empty_dsn, ADMIN, "django_admin_cases.py")


@contextmanager
def served(site: Site, kind: str) -> Iterator[str]:
    """Run a server of the project, with users; yield its address."""
    site.manage("makemigrations", "shop")
    site.manage("migrate")
    site.manage("shell", "--command", PEOPLE)
    with (
        (site.folder / "log").open("w+b") as log,
        subprocess.Popen(
            [sys.executable, *COMMANDS[kind]],
            cwd=site.folder,
            env=site.env,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        ) as server,
    ):

        def address() -> str | None:
            assert server.poll() is None, (site.folder / "log").read_text()
            found = re.search(r"http://127\.0\.0\.1:[1-9]\d*", (site.folder / "log").read_text())
            return found[0] if found else None

        try:
            yield wait_until(address, "the address of the server")
        finally:
            server.terminate()


def test_the_admin_of_a_project(site: Site) -> None:
    """Lists, detail pages, actions, permissions and the audit work, by Django's own test client."""
    site.manage("makemigrations", "shop")
    said = site.manage("test", "--noinput", "shop.test_more")
    assert re.search(r"Ran (\d+) tests", said)[1] == "9", said  # type: ignore[index]
    assert "OK" in said


@pytest.mark.parametrize("kind", COMMANDS)
def test_the_dashboard_is_behind_djangos_login(site: Site, empty_dsn: str, kind: str) -> None:
    """One line of urls.py, under WSGI and ASGI: permissions set who sees and acts; pages, forms and streams work."""

    def enter(http: httpx2.Client, name: str) -> None:
        """Log in at Django's own page."""
        page = http.get("/admin/login/?next=/queue/")
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)
        assert token is not None
        form = {"username": name, "password": "open sesame", "csrfmiddlewaretoken": token[1], "next": "/queue/"}
        answer = http.post("/admin/login/", data=form, headers={"Origin": str(http.base_url).rstrip("/")})
        assert (answer.status_code, answer.headers["location"]) == (302, "/queue/"), answer.text

    with served(site, kind) as base, psycopg.connect(empty_dsn, autocommit=True) as db:
        db.execute("select tallybook.enqueue('mail', 'send_receipt', '{\"order_id\": 1}')")
        for name, looks, acts in (("", 302, False), ("cem", 403, False), ("bob", 200, False), ("ada", 200, True)):
            with httpx2.Client(base_url=base, timeout=30) as http:
                if name:
                    enter(http, name)
                page = http.get("/queue/queue?name=mail")
                assert page.status_code == looks, page.text
                if looks != 200:
                    assert name or page.headers["location"].startswith("/admin/login/?next=/queue/queue")
                    assert http.get("/queue/static/app.css").status_code == looks
                    continue
                assert "default-src 'none'" in page.headers["content-security-policy"]
                assert ('action="/queue/queue/pause"' in page.text) is acts
                assert http.get("/queue/static/app.css").headers["content-type"].startswith("text/css")
                assert http.get("/queue/nothing").status_code == 404
                token = re.search(r'name="token" value="([^"]+)"', page.text)
                form = {"name": "mail", "token": token[1] if token else "", "back": "/queue/queues"}
                assert http.post("/queue/queue/pause", data=form).status_code == (303 if acts else 403)
                assert http.post("/queue/queue/pause", data={**form, "token": "forged"}).status_code == 403
                with http.stream("GET", "/queue/events?topic=overview") as events:
                    text = ""
                    for chunk in events.iter_text():
                        text += chunk
                        if kind == "asgi" and "event: live" in text:
                            break  # it continues while a client reads; under WSGI it ends there by itself
                assert "event: overview" in text and text.endswith("data: ok\n\n"), text
        assert db.execute("select actor, via, action from tallybook.audits").fetchall() == [
            ("ada", "web", "queue.pause")
        ]


def test_the_admin_and_the_dashboard_in_a_browser(site: Site, empty_dsn: str, tmp_path: Path) -> None:
    """A user logs in, filters jobs, cancels one after the question, pauses a queue and sees the live dashboard."""
    chromium.needed()
    with served(site, "wsgi") as base, psycopg.connect(empty_dsn, autocommit=True) as db, chromium.browser() as window:
        db.execute("select tallybook.enqueue('mail', 'send_receipt', '{\"order_id\": 1}') from generate_series(1, 60)")
        db.execute("select tallybook.schedule_set('daily', 'bill', '{\"order_id\": 1}', cron => '0 6 * * *')")

        def shows(text: str, picture: str) -> None:
            wait_until(lambda: text in window.text, text)
            if folder := os.environ.get("TALLYBOOK_PICTURES"):
                window.driver.save_screenshot(f"{folder}/{picture}.png")
            assert [one for one in window.complaints() if "favicon.ico" not in one] == []

        window.get(f"{base}/admin/")
        window.find("#id_username").send_keys("ada")
        window.find("#id_password").send_keys("open sesame")
        window.press(window.find("input[type=submit]"))
        shows("Dead letters", "index")
        window.press(window.find("a[href='/admin/tallybook/job/']"))
        shows("50 on this page", "jobs")
        window.press(window.find("a[href='?queue=mail']"))
        shows("Clear all filters", "filtered")
        window.find("input.action-select").click()
        window.run("document.querySelector('select[name=action]').value = 'cancel'")
        window.press(window.find("button[name=index]"))
        shows("None of them will start", "question")
        window.press(window.find("#content input[type=submit]"))
        shows("1 job: cancelled", "cancelled")
        window.get(f"{base}/admin/tallybook/job/?state=cancelled")
        window.press(window.find("#result_list th a"))
        shows("It was cancelled", "job")
        window.get(f"{base}/admin/tallybook/queue/mail/change/")
        window.press(window.find("button[value=pause]"))
        shows("Queue mail paused", "queues")
        window.get(f"{base}/admin/tallybook/schedule/daily/change/")
        shows("0 6 * * *", "schedule")
        window.get(f"{base}/queue/")
        shows("Queue mail is paused", "dashboard")
        db.execute("select tallybook.enqueue('afterwards', 'send_receipt', '{\"order_id\": 1}')")
        shows("afterwards", "dashboard-live")
        assert window.run("return document.querySelector('[data-stale]').hidden")
        actions = db.execute("select action from tallybook.audits order by id").fetchall()
        assert actions == [("jobs.cancel",), ("queue.pause",)]
