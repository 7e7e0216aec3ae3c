"""A Django project, written from docs/django.md: its own tests, its checks, its commands, its workers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from support.cli import children
from support.paths import ROOT
from support.waiting import wait_until

FENCED = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.direct("Django's test runner makes a database of its own, and its workers hold sessions")

SETTINGS = """
import json, os
SECRET_KEY = "for tests"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "project.urls"
USE_TZ = True
DATABASES = {"default": {"ENGINE": "django.db.backends.postgresql", "CONN_MAX_AGE": None, **json.loads(os.environ["SHOP_DB"])}}
DATABASES["other"] = {**DATABASES["default"], "TEST": {"MIRROR": "default"}}
"""
URLS = """
from django.urls import path
from shop.views import order
urlpatterns = [path("order/", order)]
"""
MANAGE = """
import os, sys
if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    from django.core.management import execute_from_command_line
    execute_from_command_line(sys.argv)
"""
MORE_JOBS = """
import contextlib
from datetime import timedelta
from asgiref.sync import sync_to_async
from django.db import connection
from django_tasks import task
from shop.jobs import app
from shop.models import Order
from tallybook import Constant

def _spoil():
    with contextlib.suppress(Exception), connection.cursor() as cursor:
        cursor.execute("select pg_terminate_backend(pg_backend_pid())")

@app.task
def spoil() -> None:
    _spoil()

@app.task(max_attempts=1)
def count() -> int:
    return Order.objects.count()

@app.task
async def aspoil() -> None:
    await sync_to_async(_spoil)()

@app.task(max_attempts=1)
async def acount() -> int:
    return await Order.objects.acount()

@task(max_attempts=2, retry=Constant(timedelta(hours=1)))
def flaky(numbers):
    raise ConnectionResetError(numbers)

@task
def everything(a, /, b, *rest, key, **others):
    return [a, b, rest, key, others]
"""


class Site:
    """The project of docs/django.md in a folder."""

    def __init__(self, folder: Path, dsn: str, extra: str = "") -> None:
        self.folder = folder
        given = conninfo_to_dict(dsn)
        words = {"NAME": "dbname", "USER": "user", "HOST": "host", "PORT": "port"}
        database = {word: str(given[name]) for word, name in words.items() if given.get(name)}
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("TALLYBOOK_", "PG", "DJANGO_"))
        }
        self.env = {**clean, "SHOP_DB": json.dumps({**database, "PASSWORD": "open sesame"}), "PYTHONUNBUFFERED": "1"}
        files = {"project/settings.py": SETTINGS, "project/urls.py": URLS, "manage.py": MANAGE}
        for name, body in FENCED.findall((ROOT / "docs" / "django.md").read_text(encoding="utf-8")):
            files[name] = files.get(name, "") + body
        files["project/settings.py"] += extra
        files |= {"shop/more_jobs.py": MORE_JOBS, "shop/__init__.py": "", "project/__init__.py": ""}
        files["shop/jobs.py"] = files["shop/jobs.py"] + "\nimport shop.more_jobs  # noqa\n"
        files["shop/test_more.py"] = (ROOT / "tests" / "support" / "django_cases.py").read_text(encoding="utf-8")
        for name, body in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(body, encoding="utf-8")

    def manage(self, *words: str, code: int = 0, **env: str) -> str:
        """What `manage.py ...` prints, stderr too; it ends with this code."""
        done = subprocess.run(  # noqa: PLW1510
            [sys.executable, "manage.py", *words],
            cwd=self.folder, env={**self.env, **env}, capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, *words: str, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        """`manage.py ...` in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, str(self.folder / "manage.py"), *words],
            cwd=cwd or self.folder, env=self.env, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=(self.folder / "log").open("wb"),
        )  # fmt: skip


@pytest.fixture
def site(tmp_path: Path, empty_dsn: str) -> Site:
    return Site(tmp_path, empty_dsn)


@pytest.mark.slow
def test_the_tests_of_a_django_project_pass(site: Site) -> None:
    """S5-01 S5-03 S5-12: a Django project's tests, on the test database that its migrations have made, with our schema in it:
    orders with their jobs, atomic handlers, `django.tasks` with all four abilities, connections closed around jobs.
    """
    said = site.manage("test", "--noinput")
    assert re.search(r"Ran (\d+) tests", said)[1] == "14", said  # type: ignore[index]
    assert "OK" in said


@pytest.mark.slow
def test_migrations_leave_the_schema_alone(site: Site, empty_dsn: str) -> None:
    """`migrate` brings the schema once, `makemigrations` finds nothing of ours, and going back takes nothing of ours away."""
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


@pytest.mark.slow
def test_what_is_wrong_is_found_by_the_checks(tmp_path: Path, empty_dsn: str) -> None:
    """Each system check says what is wrong, and nothing is wrong with the project as it is but the missing schema."""
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
        # Without the tasks of the page, which could not even be declared with some of these.
        installed = 'INSTALLED_APPS.append("django_tasks")\n'
        (folder := tmp_path / str(number)).mkdir()
        broken = Site(folder, empty_dsn, f"{installed}{extra}\n")
        said = broken.manage("check", "--database", "default", code=code)
        assert name in said and text in said, said


@pytest.mark.slow
def test_the_command_line_has_the_projects_database_and_app(site: Site, empty_dsn: str) -> None:
    """manage.py tallybook: database and App of the settings, whatever TALLYBOOK_DSN says; errors and codes as ever."""
    elsewhere = {"TALLYBOOK_DSN": "host=nowhere.invalid"}
    assert "not installed" in site.manage("tallybook", "info", code=1, **elsewhere)
    assert "installed schema tallybook" in site.manage("tallybook", "--database", "other", "migrate", **elsewhere)
    assert "up to date" in site.manage("tallybook", "info", "--settings=project.settings", **elsewhere)
    assert "manage.py tallybook" in site.manage("help", "tallybook")
    assert "No such command 'wrk'" in site.manage("tallybook", "wrk", code=2)
    assert "nowhere" in site.manage("tallybook", "--database", "nowhere", "info", code=1)


@pytest.mark.slow
def test_workers_of_a_project_run_its_jobs(site: Site, empty_dsn: str, tmp_path: Path) -> None:
    """S5-05 S5-10: two worker processes, started from another folder, run what SQL and Django have put in; one is killed,
    nothing is lost or done twice; the password is on no command line.
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
                "with o as (insert into shop_order (email, billed) select 'x', false from generate_series(1, 200) returning id)"
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
            # bill is atomic: one receipt is enqueued for each order. send_receipt is not, and may have been under way.
            jobs = "select count(*) from tallybook.job where task = 'send_receipt'"
            assert db.execute(jobs).fetchone() == (200,)
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait(20)
