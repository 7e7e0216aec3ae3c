"""The Django project of docs/django.md in a folder, with its commands and servers."""

import json
import re
import subprocess
import sys
from pathlib import Path

import django
from psycopg.conninfo import conninfo_to_dict

from support.paths import ROOT, clean_environment

FENCED = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)

# Behind the settings that Django writes for a new project.
SETTINGS = """
import json
import os
SHOP = {"ENGINE": "django.db.backends.postgresql", "CONN_MAX_AGE": None, **json.loads(os.environ["SHOP_DB"])}
DATABASES = {"default": SHOP, "other": {**SHOP, "TEST": {"MIRROR": "default"}}}
"""
# A second backend, whose tasks have no limit of their own.
PLAIN = 'TASKS["plain"] = {**TASKS["default"], "OPTIONS": {}}\n'
URLS = """
from django.urls import path
from shop.views import order
urlpatterns = [path("order/", order)]
"""
MORE_JOBS = """
import contextlib, threading
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

both = threading.Barrier(2, timeout=10)

@app.task(max_attempts=1)
async def ameet() -> None:
    await Order.objects.acount()
    await sync_to_async(both.wait)()

def _open():
    with connection.cursor() as cursor:
        cursor.execute("select count(*) from pg_stat_activity where datname = current_database()")
        return cursor.fetchone()[0] + threading.active_count()

@app.task(max_attempts=1)
async def acount_open() -> int:
    return await sync_to_async(_open)()

@task(max_attempts=2, retry=Constant(timedelta(hours=1)))
def flaky(numbers):
    raise ConnectionResetError(numbers)

@task(backend="plain", retry=Constant(timedelta(hours=1)))
def failing():
    raise ConnectionResetError

@task(backend="plain", retry=Constant(timedelta(hours=1)))
def breaking():
    connection.connection.close()
    raise ConnectionResetError

@task(backend="plain", retry=Constant(timedelta(hours=1)))
async def afailing():
    raise ConnectionResetError

@task
def everything(a, /, b, *rest, key, **others):
    return [a, b, rest, key, others]
"""


ADMIN = """
INSTALLED_APPS[:0] = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions",
    "django.contrib.messages", "django.contrib.staticfiles",
]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
"""
"""Settings of a project with the admin, for `extra`; such a project also has the URLs of the page."""


def _of_this_django(text: str) -> str:
    """Adapt a text to the installed Django, which includes `django.tasks` since 6."""
    if django.VERSION < (6,):
        return text
    for before, now in (
        ('INSTALLED_APPS.append("django_tasks")', ""),
        ("InvalidTaskError", "InvalidTask"),
        ("django_tasks", "django.tasks"),
    ):
        text = text.replace(before, now)
    return text


class Site:
    """The project of docs/django.md in a folder."""

    def __init__(self, folder: Path, dsn: str, extra: str = "", cases: str = "django_cases.py") -> None:
        self.folder = folder
        given = conninfo_to_dict(dsn)
        words = {"NAME": "dbname", "USER": "user", "HOST": "host", "PORT": "port"}
        database = {word: str(given[name]) for word, name in words.items() if given.get(name)}
        shop = json.dumps({**database, "PASSWORD": "open sesame"})
        self.env = {**clean_environment(), "SHOP_DB": shop, "PYTHONUNBUFFERED": "1"}
        begin = [sys.executable, "-m", "django", "startproject", "project", str(folder)]
        subprocess.run(begin, env=self.env, check=True, timeout=60)
        settings = "project/settings.py"
        files = {settings: (folder / settings).read_text(encoding="utf-8") + SETTINGS}
        for name, body in FENCED.findall((ROOT / "docs" / "django.md").read_text(encoding="utf-8")):
            files[name] = files.get(name, "") + body
        files[settings] += PLAIN + extra
        if extra != ADMIN:  # no users and no sessions
            files[settings] += "MIDDLEWARE = []\n"
            files["project/urls.py"] = URLS
        files |= {"shop/more_jobs.py": MORE_JOBS, "shop/__init__.py": ""}
        files["shop/jobs.py"] = files["shop/jobs.py"] + "\nimport shop.more_jobs  # noqa\n"
        files["shop/test_more.py"] = (ROOT / "tests" / "support" / cases).read_text(encoding="utf-8")
        for name, body in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(_of_this_django(body), encoding="utf-8")

    def manage(self, *words: str, code: int = 0, **env: str) -> str:
        """Run `manage.py ...`, which must exit with this code; return stdout and stderr."""
        done = subprocess.run(  # noqa: PLW1510
            [sys.executable, "manage.py", *words],
            cwd=self.folder, env={**self.env, **env}, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, *words: str, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        """Start `manage.py ...` in its own process group."""
        return subprocess.Popen(
            [sys.executable, str(self.folder / "manage.py"), *words],
            cwd=cwd or self.folder, env=self.env, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=(self.folder / "log").open("wb"),
        )  # fmt: skip
