"""The Django project of docs/django.md: its tests, checks, commands, workers, its admin and its dashboard."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import django
import httpx2
import psycopg
import pytest

from support import chromium
from support.cli import Command, children
from support.django_site import ADMIN, Site
from support.fleet import Fleet
from support.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.direct("Django's test runner makes a database of its own, and its servers hold sessions"),
]


@pytest.fixture
def site(tmp_path: Path, empty_dsn: str) -> Site:
    return Site(tmp_path, empty_dsn)


def test_the_tests_of_a_django_project_pass(site: Site) -> None:
    """S5-01 S5-03 S5-12: a Django project's tests pass on the test database that its migrations made, with our schema.
    Cases: orders with jobs, atomic handlers, `django.tasks` with all four abilities, connections closed around jobs.
    """
    said = site.manage("test", "--noinput")
    assert re.search(r"Ran (\d+) tests", said)[1] == "18", said  # type: ignore[index]
    assert "OK" in said


def test_djangos_own_cases_of_tasks_pass(tmp_path: Path, empty_dsn: str) -> None:
    """Django's own tests of tasks pass on our Backend. No wheel has them: DJANGO_SOURCE is a folder with its source."""
    source = os.environ.get("DJANGO_SOURCE")
    if source is None or django.VERSION < (6,):
        pytest.skip("needs Django 6, and its source in DJANGO_SOURCE")
    site = Site(tmp_path, empty_dsn, cases="django_own_cases.py")
    said = site.manage("test", "--noinput", "shop.test_more", PYTHONPATH=f"{source}/tests")
    assert re.search(r"Ran (\d+) tests", said)[1] != "0", said  # type: ignore[index]
    assert "OK" in said


def test_dev_follows_the_code_of_the_project(site: Site, empty_dsn: str) -> None:
    """`tallybook dev` with our worker module, installed elsewhere, restarts when the project's code changes."""
    target = "tallybook.contrib.django.worker:app"
    with Command(
        site.folder, "dev", "-A", target, dsn=empty_dsn, **site.env, DJANGO_SETTINGS_MODULE="project.settings"
    ) as dev:
        dev.says(" serves ")
        jobs = site.folder / "shop" / "jobs.py"
        jobs.write_text(jobs.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
        dev.says("shop/jobs.py changed, restarting the worker")
        dev.says(" serves ", times=2)
        dev.send(signal.SIGINT)
        assert dev.ended() == 0


def test_migrations_leave_the_schema_alone(site: Site, empty_dsn: str) -> None:
    """`migrate` installs the schema once, `makemigrations` finds no change, and going back removes nothing of ours."""
    site.manage("makemigrations", "shop")
    first = site.manage("migrate")
    assert "Brought the schema tallybook of database 'default' up to date" in first
    assert "Brought" not in site.manage("migrate")
    assert "No changes detected" in site.manage("makemigrations", "--check")
    site.manage("migrate", "shop", "zero")
    with psycopg.connect(empty_dsn) as db:
        assert db.execute("select count(*) from tallybook.job").fetchone() == (0,)
        assert db.execute("select to_regclass('shop_order')").fetchone() == (None,)
    assert "System check identified no issues" in site.manage("check", "--database", "default")


def test_what_is_wrong_is_found_by_the_checks(tmp_path: Path, empty_dsn: str) -> None:
    """Each system check names its problem; the unchanged project has only one, the missing schema."""
    told = {
        "": ("tallybook.W002", "no schema tallybook", 0),
        'TALLYBOOK = {"APPS": "shop.jobs:app"}': ("tallybook.E001", "TALLYBOOK has no key 'APPS'", 1),
        'TALLYBOOK = {"DATABASE": "nowhere"}': ("tallybook.E001", "names the database 'nowhere'", 1),
        'TALLYBOOK = {"APP": "shop.jobs:missing"}': ("tallybook.E003", "Did you mean shop.jobs:app?", 1),
        'DATABASES["lite"] = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}\n'
        'TALLYBOOK = {"DATABASE": "lite"}': ("tallybook.E002", "is sqlite", 1),
        'TASKS["default"]["QUEUES"].append("a\\nb")': ("tallybook.E005", "control or invisible characters", 1),
        'TASKS["default"]["OPTIONS"] = {"database": "nowhere"}': ("tallybook.E004", "'nowhere'", 1),
        'TASKS["default"]["OPTIONS"] = {"patience": 3}': ("ImproperlyConfigured", "has no key 'patience'", 1),
    }
    for number, (extra, (name, text, code)) in enumerate(told.items()):
        # Without the page's tasks, which cannot even be declared with some of these settings.
        installed = 'INSTALLED_APPS.append("django_tasks")\n'
        (folder := tmp_path / str(number)).mkdir()
        broken = Site(folder, empty_dsn, f"{installed}{extra}\n")
        said = broken.manage("check", "--database", "default", code=code)
        assert name in said and text in said, said


def test_the_command_line_has_the_projects_database_and_app(site: Site, empty_dsn: str) -> None:
    """manage.py tallybook uses the settings' database and App, whatever TALLYBOOK_DSN is; errors and codes as usual."""
    elsewhere = {"TALLYBOOK_DSN": "host=nowhere.invalid"}
    assert "not installed" in site.manage("tallybook", "doctor", "--info", code=1, **elsewhere)
    assert "installed schema tallybook" in site.manage("tallybook", "--database", "other", "migrate", **elsewhere)
    assert "up to date" in site.manage("tallybook", "doctor", "--info", "--settings=project.settings", **elsewhere)
    assert "manage.py tallybook" in site.manage("help", "tallybook")
    assert "No such command 'wrk'" in site.manage("tallybook", "wrk", code=2)
    assert "nowhere" in site.manage("tallybook", "--database", "nowhere", "doctor", "--info", code=1)


def test_workers_of_a_project_run_its_jobs(site: Site, empty_dsn: str, tmp_path: Path) -> None:
    """S5-05 S5-10: two worker processes, started in another folder, run jobs of SQL and Django; one process is killed.
    No job is lost and no atomic one is done twice; the password is on no command line.
    """
    site.manage("makemigrations", "shop")
    site.manage("migrate")
    (away := tmp_path / "away").mkdir()
    worker = site.start("tallybook", "worker", "--processes", "2", "--stop-timeout", "3 s", cwd=away)
    try:
        with psycopg.connect(empty_dsn, autocommit=True, prepare_threshold=None) as db:
            alive = "select count(*) from tallybook.workers where ended_at is null"
            wait_until(lambda: db.execute(alive).fetchone() == (2,), "two workers", seconds=60)
            pids = [worker.pid, *children(worker.pid)]
            assert len(pids) >= 3
            for pid in pids:
                assert b"sesame" not in Path(f"/proc/{pid}/cmdline").read_bytes()
            put: Any = (
                "with o as (insert into shop_order (email, billed) select 'x', false"
                " from generate_series(1, 200) returning id)"
                " select count(tallybook.enqueue('default', 'bill', jsonb_build_object('order_id', o.id))) from o"
            )
            db.execute(put)
            db.execute("select tallybook.enqueue('mail', 'shop.tasks.add', '{\"a\": 1}')")
            wait_until(
                lambda: db.execute("select count(*) > 20 from shop_order where billed").fetchone() == (True,),
                "some",
                seconds=60,
            )
            os.kill(children(worker.pid)[-1], signal.SIGKILL)
            ended = "select count(*) from tallybook.job where state = 'completed'"
            wait_until(lambda: db.execute(ended).fetchone() == (401,), "all have ended", seconds=60)
            counted = "select count(*), count(distinct order_id) from shop_receipt"
            receipts = db.execute(counted).fetchone()
            assert receipts is not None and receipts[1] == 200
            # bill is atomic: it enqueues one receipt per order. send_receipt is not, and may have been running.
            jobs = "select count(*) from tallybook.job where task = 'send_receipt'"
            assert db.execute(jobs).fetchone() == (200,)
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(20)


def test_jobs_that_a_handler_enqueues_through_the_app_stay_on_its_node(tmp_path: Path, fleet: Fleet) -> None:
    """Several nodes: a handler's jobs go to its job's node, although the settings name the database of another."""
    relays = """
import asyncio
from tallybook.contrib.django import App

app = App("apart")

@app.task
def note() -> None: ...

@app.task
async def relay() -> None:
    await note.enqueue(app)

@app.task
def plain_relay() -> None:
    note.enqueue_sync(app)

print("completed", asyncio.run(app.drain(nodes="all")).completed)
"""
    site = Site(tmp_path, fleet.dsn)
    fleet.enqueue(2, task="relay")
    fleet.enqueue(3, task="plain_relay")
    assert "completed 4" in site.manage("shell", "-c", relays)
    names = "select array_agg(task order by task) from tallybook.job"
    assert [fleet.run(node, names)[0][0] for node in (1, 2, 3)] == [None, ["note", "relay"], ["note", "plain_relay"]]


@pytest.fixture
def admin(tmp_path: Path, empty_dsn: str) -> Site:
    return Site(tmp_path, empty_dsn, ADMIN, "django_admin_cases.py")


@contextmanager
def served(site: Site, kind: str) -> Iterator[str]:
    """Run a server of the project, with users; yield its address."""
    people = """
from django.contrib.auth.models import Permission, User
User.objects.create_superuser("ada", password="open sesame")
viewer = User.objects.create_user("bob", password="open sesame", is_staff=True)
views = Permission.objects.filter(content_type__app_label="tallybook", codename__startswith="view_")
viewer.user_permissions.set(views)
User.objects.create_user("cem", password="open sesame", is_staff=True)
"""
    command = ("manage.py", "runserver", "--noreload", "127.0.0.1:0")
    if kind == "asgi":
        command = ("-m", "uvicorn", "--port", "0", "project.asgi:application")
    site.manage("makemigrations", "shop")
    site.manage("migrate")
    site.manage("shell", "--command", people)
    with (
        (site.folder / "log").open("w+b") as log,
        subprocess.Popen(
            [sys.executable, *command], cwd=site.folder, env=site.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
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


def test_the_admin_of_a_project(admin: Site) -> None:
    """Lists, detail pages, actions, permissions and the audit work, by Django's own test client."""
    admin.manage("makemigrations", "shop")
    said = admin.manage("test", "--noinput", "shop.test_more")
    assert re.search(r"Ran (\d+) tests", said)[1] == "9", said  # type: ignore[index]
    assert "OK" in said


@pytest.mark.parametrize("kind", ["wsgi", "asgi"])
def test_the_dashboard_is_behind_djangos_login(admin: Site, empty_dsn: str, kind: str) -> None:
    """One line of urls.py, under WSGI and ASGI: permissions set who sees and acts; pages, forms and streams work."""

    def enter(http: httpx2.Client, name: str) -> None:
        """Log in at Django's own page."""
        page = http.get("/admin/login/?next=/queue/")
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)
        assert token is not None
        form = {"username": name, "password": "open sesame", "csrfmiddlewaretoken": token[1], "next": "/queue/"}
        answer = http.post("/admin/login/", data=form, headers={"Origin": str(http.base_url).rstrip("/")})
        assert (answer.status_code, answer.headers["location"]) == (302, "/queue/"), answer.text

    with served(admin, kind) as base, psycopg.connect(empty_dsn, autocommit=True) as db:
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


def test_the_admin_and_the_dashboard_in_a_browser(admin: Site, empty_dsn: str, tmp_path: Path) -> None:
    """A user logs in, filters jobs, cancels one after the question, pauses a queue and sees the live dashboard."""
    chromium.needed()
    with served(admin, "wsgi") as base, psycopg.connect(empty_dsn, autocommit=True) as db, chromium.browser() as window:
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
