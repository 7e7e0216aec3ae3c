"""docs/webhooks.md is checked against the code."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict
from standardwebhooks import Webhook

from support.outside import HttpServer, smtp_server
from support.pages import blocks, project, python, section, statements, table, words
from support.paths import ROOT
from tallybook.extra.tasks import email, http, new_signing_secret, notification, sms, webhook

PAGE = "docs/webhooks.md"


def test_the_examples_of_the_webhooks_page_run(tmp_path: Path, dsn: str, db: Any, endpoint: HttpServer) -> None:
    """S4-06 S4-22: all jobs of docs/webhooks.md run as written, in Python and in SQL."""
    # The page's app, with its providers at this test's servers.
    drain = """
import json, sys
from app import app
from support.outside import provider, serving
from tallybook.testing import drain
secret, url, port = json.loads(sys.argv[1])
serving(
    app,
    provider("acme", {"signing_secret": secret}, url=url + "/acme", allow=["127.0.0.1"], allow_http=True),
    provider("sms", {"token": "t"}, url=url + "/sms", allow=["127.0.0.1"], allow_http=True),
    provider("mail", host="127.0.0.1", port=port, tls="none", **{"from": "shop@example.org"}),
)
print(drain(app).completed)
"""
    assert project(tmp_path, PAGE) == ["app.py", "send.py", "forms.py"]
    known = conninfo_to_dict(dsn)
    names = {"host": "PGHOST", "port": "PGPORT", "dbname": "PGDATABASE", "user": "PGUSER", "password": "PGPASSWORD"}
    environment = {names[key]: str(value) for key, value in known.items() if key in names}
    python(tmp_path, dsn, "send.py", **environment)
    for block in blocks(ROOT / PAGE, "sql"):
        for statement in statements(block):
            db.execute(statement)
    secret = new_signing_secret()
    with smtp_server() as (mailbox, port):
        given = json.dumps([secret, endpoint.url, port])
        assert python(tmp_path, dsn, "-c", drain, given, PYTHONPATH=str(ROOT / "tests")) == "8\n"
        assert len(mailbox.messages) == 3
    called = [got for got in endpoint.got if got.path == "/acme"]
    for got in called:
        Webhook(secret).verify(got.body, got.headers)
    assert "7-9-webhook" in [got.headers["webhook-id"] for got in called] and len(called) == 3
    assert sorted(got.path for got in endpoint.got if got.path != "/acme") == ["/sms", "/sms", "/sms/messages"]


def test_the_args_on_the_page_are_those_of_the_tasks() -> None:
    """docs/webhooks.md lists every arg of the tasks, and no other."""
    tasks = {"Webhook": webhook, "HTTP": http, "E-mail": email, "SMS": sms, "Notification": notification}
    for heading, task in tasks.items():
        listed = words([[row[0]] for row in table(section(PAGE, heading), "arg")])
        taken = list(inspect.signature(task.fn).parameters)
        assert sorted(listed) == sorted(set(taken) - {"ctx"}), heading


def test_the_settings_on_the_page_are_those_that_are_read() -> None:
    """docs/webhooks.md lists every provider setting that the code reads, and no other."""
    folder = ROOT / "src/tallybook/extra/tasks"
    pattern = re.compile(
        r'(?:settings\.get\(|text_setting\(\w+, |text_setting\(\s*provider, )"(\w+)"'
        r'|"(\w+)" (?:not )?in provider\.settings'
    )
    read = {
        name for file in folder.glob("*.py") for found in pattern.findall(file.read_text("utf-8")) for name in found
    }
    headings = ("Provider settings", "E-mail", "SMS")
    rows = [row for heading in headings for row in table(section(PAGE, heading), "setting")]
    assert set(words([[row[0]] for row in rows])) == read - {""}
