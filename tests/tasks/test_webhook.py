"""The task tallybook.webhook, run by a real worker against real local endpoints; docs/webhooks.md fits the code."""

import asyncio
import inspect
import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict
from standardwebhooks import Webhook, WebhookVerificationError

from support.outside import LOOPBACK, HttpServer, Reply, provider, serving, smtp_server
from support.pages import blocks, project, python, section, statements, table
from support.pages import words as in_backticks
from support.paths import ROOT
from tallybook import App, Constant
from tallybook._model.provider import Secret, new_key
from tallybook.extra.tasks import email, http, new_signing_secret, notification, sms, webhook
from tallybook.testing import drain, travel

DAY = timedelta(days=1)
LATER = webhook.with_(retry=Constant(timedelta(hours=1)))  # nothing is tried again within one drain
BODY = {"type": "invoice.paid", "data": {"id": 42, "name": "Zoë"}}
OPEN = {"allow": LOOPBACK, "allow_http": True}
PAGE = "docs/webhooks.md"


def acme(endpoint: HttpServer, secret: str | Secret | None = None, **settings: Any) -> Any:
    given = {"url": f"{endpoint.url}/hooks?v=1", **OPEN, **settings}
    return provider("acme", {"signing_secret": secret or new_signing_secret()}, **given)


def test_sql_alone_sends_a_webhook_that_the_receiver_verifies(
    app: App, run: Any, db: Any, endpoint: HttpServer
) -> None:
    """S4-06: a job that SQL enqueued names only the provider; standardwebhooks verifies the signed webhook."""
    secret = new_signing_secret()
    serving(app, acme(endpoint, secret))
    (job,) = db.execute(
        "select tallybook.enqueue('out', 'tallybook.webhook', %s::jsonb)",
        (json.dumps({"provider": "acme", "body": BODY}),),
    ).fetchone()
    ended = run(job)
    assert (ended.state, ended.result) == ("completed", {"status": 200, "webhook_id": f"job_{job}", "answer": "fine"})
    (got,) = endpoint.got
    assert (got.method, got.path, got.headers["content-type"]) == ("POST", "/hooks?v=1", "application/json")
    assert got.headers["webhook-id"] == f"job_{job}"
    assert Webhook(secret).verify(got.body, got.headers) == BODY
    for forged in ((got.body + b" ", got.headers), (got.body, {**got.headers, "webhook-id": "job_0"})):
        with pytest.raises(WebhookVerificationError):
            Webhook(secret).verify(*forged)


def test_the_apps_own_providers_serve_it(
    app: App, run: Any, dsn: str, db: Any, endpoint: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1-12, S4-06: a provider in the database signs a webhook with its encrypted secret; a 410 deactivates it."""
    monkeypatch.setenv("TALLYBOOK_KEYS", new_key("k1"))
    app.dsn, secret = dsn, new_signing_secret()
    settings = {"url": f"{endpoint.url}/hooks", "allow": LOOPBACK, "allow_http": True}

    async def made() -> None:
        async with app.open():
            await app.providers.set("acme", kind="webhook", settings=settings)
            await app.providers.set_secret("acme", "signing_secret", secret)

    asyncio.run(made())
    assert run(webhook.enqueue_sync(db, "acme", BODY)).state == "completed"
    assert Webhook(secret).verify(endpoint.got[0].body, endpoint.got[0].headers) == BODY
    endpoint.replies = [Reply(410)]
    assert run(webhook.enqueue_sync(db, "acme", BODY)).state == "dead"
    assert db.execute("select active from tallybook.provider where name = 'acme'").fetchone() == (False,)


def test_while_a_secret_is_replaced_both_sign(app: App, run: Any, db: Any, endpoint: HttpServer) -> None:
    """S4-06: during a rotation, the old and the new secret both verify the same webhook; a third does not."""
    old, new = new_signing_secret(), new_signing_secret()
    serving(app, acme(endpoint, Secret(new, previous=Secret(old))))
    assert run(webhook.enqueue_sync(db, "acme", BODY)).state == "completed"
    (got,) = endpoint.got
    assert len(got.headers["webhook-signature"].split(" ")) == 2
    assert Webhook(new).verify(got.body, got.headers) == Webhook(old).verify(got.body, got.headers) == BODY
    with pytest.raises(WebhookVerificationError):
        Webhook(new_signing_secret()).verify(got.body, got.headers)


@pytest.mark.parametrize("key", [None, "form-7-submission-9-webhook-3"])
def test_every_attempt_has_the_same_id(app: App, dsn: str, db: Any, endpoint: HttpServer, key: str | None) -> None:
    """S4-18: every attempt has the same idempotency key, the caller's or the job's; each has a valid signature."""
    secret = new_signing_secret()
    serving(app, acme(endpoint, secret))
    endpoint.reply(Reply(503), Reply(500), Reply())
    job = webhook.enqueue_sync(db, "acme", BODY, idempotency_key=key)
    other = webhook.with_(delay="5 days").enqueue_sync(db, "acme", BODY)
    for _ in range(3):
        drain(app, dsn=dsn)
        travel(dsn, DAY)
    assert app.get(job).sync(db).state == "completed"
    assert {got.headers["webhook-id"] for got in endpoint.got} == {key or f"job_{job.id}"} and len(endpoint.got) == 3
    assert {got.body for got in endpoint.got} == {endpoint.got[0].body}
    for got in endpoint.got:
        Webhook(secret).verify(got.body, got.headers)
    travel(dsn, 5 * DAY)
    drain(app, dsn=dsn)
    assert endpoint.got[3].headers["webhook-id"] == f"job_{other.id}" != key  # another job is another message


@pytest.mark.parametrize("text", ['{"amount": 12345678901234567.10,\r\n "b" : "é \U0001f600"}', "", "a=1&b=%20"])
def test_a_text_is_sent_and_signed_byte_for_byte(app: App, run: Any, db: Any, endpoint: HttpServer, text: str) -> None:
    """S4-06: a text arrives byte for byte, and the signature covers these bytes."""
    secret = new_signing_secret()
    serving(app, acme(endpoint, secret))
    assert run(webhook.enqueue_sync(db, "acme", text=text, content_type="text/x-own")).state == "completed"
    (got,) = endpoint.got
    assert got.body == text.encode() and got.headers["content-type"] == "text/x-own"
    Webhook(secret).verify(got.body, got.headers, json_parse=False)


def test_gone_stops_the_endpoint(app: App, dsn: str, db: Any, endpoint: HttpServer) -> None:
    """S4-06: a 410 makes the job dead and its provider inactive; later jobs do not call until it is active again."""
    registry = serving(app, acme(endpoint))
    endpoint.reply(Reply(410, body=b"no such hook"), Reply())
    first = LATER.enqueue_sync(db, "acme", BODY)
    drain(app, dsn=dsn)
    found = app.get(first).sync(db)
    assert found.state == "dead" and "status 410: no such hook" in (found.last_error or "")
    assert not registry.known["acme"].active
    later = LATER.enqueue_sync(db, "acme", BODY)
    drain(app, dsn=dsn)
    found = app.get(later).sync(db)
    assert found.state == "retrying" and "is not active" in (found.last_error or "") and len(endpoint.got) == 1
    asyncio.run(registry.set("acme", active=True))  # the control: only this held it back
    travel(dsn, DAY)
    drain(app, dsn=dsn)
    assert app.get(later).sync(db).state == "completed" and len(endpoint.got) == 2


@pytest.mark.parametrize("secret", [False, True])
def test_gone_at_a_former_url_stops_nothing(app: App, dsn: str, db: Any, endpoint: HttpServer, secret: bool) -> None:
    """S4-06: a 410 from a URL that was corrected meanwhile leaves the provider active, and the job is retried."""
    made = acme(endpoint)
    if secret:
        url = made.settings.pop("url")
        made = replace(made, secrets={**made.secrets, "url": Secret(url)})
    registry = serving(app, made)

    def gone(_: object) -> Reply:
        registry.change("acme", url=f"{endpoint.url}/new")
        return Reply(410)

    endpoint.reply(gone, Reply())
    job = LATER.enqueue_sync(db, "acme", BODY)
    drain(app, dsn=dsn)
    found = app.get(job).sync(db)
    assert found.state == "retrying" and "from the provider's former url" in (found.last_error or "")
    assert registry.known["acme"].active
    travel(dsn, DAY)
    drain(app, dsn=dsn)
    assert app.get(job).sync(db).state == "completed" and endpoint.got[1].path == "/new"


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_waited_for(app: App, run: Any, db: Any, endpoint: HttpServer, status: int) -> None:
    """The next attempt waits for the answer's Retry-After, in seconds or as a date; without one it is sooner."""
    serving(app, acme(endpoint))
    endpoint.reply(
        Reply(status, {"Retry-After": "7200"}),
        Reply(status, {"Retry-After": "Wed, 21 Oct 2015 10:00:00 GMT", "Date": "Wed, 21 Oct 2015 07:00:00 GMT"}),
        Reply(status),
    )
    waits = []
    for _ in range(3):
        before = datetime.now(UTC)
        found = run(webhook.enqueue_sync(db, "acme", BODY))
        assert found.state == "retrying" and found.run_at is not None
        waits.append((found.run_at - before).total_seconds())
    assert 7200 <= waits[0] < 7260 and waits[2] < 60
    # Python's server sends a Date of its own first; the last one counts.
    assert 3 * 3600 <= waits[1] < 3 * 3600 + 60


def test_what_a_status_makes_of_the_job(app: App, dsn: str, db: Any, endpoint: HttpServer) -> None:
    """S4-06: 2xx completes; 4xx is dead at once, unless it is temporary or about credentials; 5xx is retried."""
    statuses = {
        "completed": (200, 202, 204),
        "dead": (301, 308, 400, 404, 409, 422),
        "retrying": (302, 307, 401, 403, 407, 408, 425, 429, 500, 502, 503, 504),
    }
    every = [status for listed in statuses.values() for status in listed]
    secrets = {"signing_secret": new_signing_secret()}
    serving(
        app,
        *(provider(str(status), secrets, url=f"{endpoint.url}/{status}", **OPEN) for status in every),
    )
    endpoint.reply(lambda got: Reply(int(got.path[1:]), {"Location": "/200"}, b"" if got.path == "/204" else b"words"))
    jobs = {status: LATER.enqueue_sync(db, str(status), BODY) for status in every}
    drain(app, dsn=dsn)
    for state, listed in statuses.items():
        for status in listed:
            found = app.get(jobs[status]).sync(db)
            assert found.state == state, status
            said = None if state == "completed" else f"webhook to provider '{status}': status {status}: words"
            assert found.last_error == said
    assert sorted(got.path for got in endpoint.got) == sorted(f"/{status}" for status in every)


@pytest.mark.parametrize(
    ("timeout", "said", "reply"),
    [("300 ms", "within 0.3 s", Reply(held=True)), (0.5, "within 0.5 s", Reply(body=b"x" * 10_000, trickling=True))],
    ids=["slow", "trickling"],
)
def test_a_slow_endpoint_is_left_after_the_timeout(
    app: App, run: Any, db: Any, endpoint: HttpServer, timeout: Any, said: str, reply: Reply
) -> None:
    """A call that exceeds the provider's timeout fails and is retried.

    The timeout is for the whole call, so an answer that comes byte by byte holds a slot no longer.
    """
    serving(app, acme(endpoint, timeout=timeout))
    endpoint.reply(reply)
    found = run(LATER.enqueue_sync(db, "acme", BODY))
    assert found.state == "retrying" and said in (found.last_error or "")


def test_an_answer_that_breaks_off_is_no_success(app: App, run: Any, db: Any, endpoint: HttpServer) -> None:
    """A 200 whose body is cut off is retried; a whole one completes."""
    serving(app, acme(endpoint))
    endpoint.reply(Reply(200, body=b"half", length=1000), Reply(200, body=b"half", length=4))
    job = LATER.enqueue_sync(db, "acme", BODY)
    found = run(job)
    assert found.state == "retrying" and "RemoteProtocolError" in found.last_error
    second = run(LATER.enqueue_sync(db, "acme", BODY))
    assert second.state == "completed" and second.result["answer"] == "half"


def test_of_a_long_answer_some_is_read(app: App, run: Any, db: Any, endpoint: HttpServer) -> None:
    """S4-06: of a 50 MB answer, 2,000 characters are kept."""
    serving(app, acme(endpoint))
    endpoint.reply(Reply(200, body=b"x" * 50_000_000))
    found = run(LATER.enqueue_sync(db, "acme", BODY))
    assert found.state == "completed" and found.result["answer"] == "x" * 2000


def test_args_that_cannot_be_sent_are_dead(app: App, dsn: str, db: Any, endpoint: HttpServer) -> None:
    """S4-06: args with a reserved header, a secret or a bad key are dead at once, unsent; a plain header is sent."""
    wrong_args = [
        ({"headers": {"Authorization": "Bearer x"}}, "is for secrets"),
        ({"headers": {"X-A": "b\r\nX-C: d"}}, "is not valid"),
        ({"headers": {"X-A\n": "b"}}, "is not valid"),
        ({"headers": {"Webhook-Id": "b"}}, "cannot be set"),
        ({"headers": {"host": "b"}}, "cannot be set"),
        ({"content_type": "text/plain\r\nX-C: d"}, "is not valid in a header"),
        ({"idempotency_key": "a.b"}, "idempotency_key"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"text": "both"}, "not both"),
    ]
    serving(app, acme(endpoint))
    jobs = [LATER.enqueue_sync(db, "acme", BODY, **given) for given, _ in wrong_args]
    jobs.append(LATER.enqueue_sync(db, "acme"))
    plain = LATER.enqueue_sync(db, "acme", BODY, headers={"X-Form": "7"})
    drain(app, dsn=dsn)
    for job, words in zip(jobs, [*(words for _, words in wrong_args), "pass body or text"], strict=True):
        found = app.get(job).sync(db)
        assert found.state == "dead" and words in (found.last_error or ""), words
    assert app.get(plain).sync(db).state == "completed"
    assert [got.headers["x-form"] for got in endpoint.got] == ["7"]


def test_a_provider_that_is_wrong_is_tried_again(app: App, dsn: str, db: Any, endpoint: HttpServer) -> None:
    """S4-06: a wrong setting is a clear error without the secret or the URL; the job is retried."""
    wrong_providers = [
        ({"url": "ftp://example.org"}, "must be a URL like"),
        ({"url": "https://user:word@example.org"}, "store user and password"),
        ({"url": "https://exämple.org"}, "xn--"),
        ({"url": None}, "must be a text"),
        ({"allow_http": False}, "needs https"),
        ({"timeout": "1 hour"}, "at most 5 min"),
        ({"timeout": True}, "neither seconds nor"),
        ({"headers": {"Cookie": "a=b"}}, "is for secrets"),
        ({"headers": ["X-A"]}, "not an object"),
        ({"allow": "10.0.0.0/8"}, "not a list"),
        ({"allow": ["10.0.0.0/99"]}, "neither a host nor a network"),
        ({"secret": "whsec_c2hvcnQ="}, "24 to 64"),
        ({"secret": "whsec_!"}, "base64"),
    ]
    wrong = [acme(endpoint, **changed) for changed, _ in wrong_providers]
    serving(app, *(replace(one, name=f"acme-{at}") for at, one in enumerate(wrong)))
    jobs = [LATER.enqueue_sync(db, f"acme-{at}", BODY) for at in range(len(wrong))]
    unsigned = LATER.enqueue_sync(db, "unknown", BODY)
    drain(app, dsn=dsn)
    for at, (job, (_, words)) in enumerate(zip(jobs, wrong_providers, strict=True)):
        found = app.get(job).sync(db)
        assert found.state == "retrying" and words in (found.last_error or ""), found.last_error
        assert f"provider 'acme-{at}'" in (found.last_error or "")
        assert "word@" not in str(found.errors) and "c2hv" not in str(found.errors)
    assert app.get(unsigned).sync(db).state == "retrying" and endpoint.got == []


# URLs of the args, each signed with a secret that the args name: one provider for all forms


FORM = {"type": "form.submitted"}


def test_each_form_has_its_url_and_secret_without_a_provider_of_its_own(
    app: App, dsn: str, db: Any, endpoint: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-06: two forms share a provider row; each is called at its job's URL and signed with its own encrypted secret.

    No row of the jobs contains a secret.
    """
    monkeypatch.setenv("TALLYBOOK_KEYS", new_key("k1"))
    app.dsn = dsn
    secrets = {name: new_signing_secret() for name in ("form_1", "form_2")}

    async def made() -> None:
        async with app.open():
            await app.providers.set("forms", kind="webhook", settings=OPEN)
            for name, secret in secrets.items():
                await app.providers.set_secret("forms", name, secret)

    asyncio.run(made())
    endpoint.reply(lambda got: Reply(200, body=got.headers["webhook-signature"].encode()))
    for name in secrets:
        args = {"provider": "forms", "body": FORM, "url": f"{endpoint.url}/{name}", "signed_by": name}
        db.execute("select tallybook.enqueue('default', 'tallybook.webhook', %s::jsonb)", (json.dumps(args),))
    assert drain(app, dsn=dsn).completed == 2
    sent = {got.path.removeprefix("/"): got for got in endpoint.got}
    for name, secret in secrets.items():
        assert Webhook(secret).verify(sent[name].body, sent[name].headers) == FORM
    with pytest.raises(WebhookVerificationError):
        Webhook(secrets["form_1"]).verify(sent["form_2"].body, sent["form_2"].headers)
    kept = str(db.execute("select to_jsonb(j)::text from tallybook.job j").fetchall())
    assert "form_1" in kept and not any(secret.removeprefix("whsec_") in kept for secret in secrets.values())


def test_no_other_secret_of_the_provider_goes_to_a_url_of_the_args(
    app: App, run: Any, db: Any, endpoint: HttpServer
) -> None:
    """S4-06: the provider's token goes to its own URL, and to no URL of a job's args."""
    own = new_signing_secret()
    secrets = {"token": "t0ken", "signing_secret": own, "form_1": new_signing_secret()}
    serving(app, provider("forms", secrets, url=f"{endpoint.url}/own", **OPEN))
    there = {"url": f"{endpoint.url}/form", "signed_by": "form_1"}
    assert run(webhook.enqueue_sync(db, "forms", FORM)).state == "completed"
    assert run(webhook.enqueue_sync(db, "forms", FORM, **there)).state == "completed"
    mine, form = endpoint.got
    assert mine.headers["authorization"] == "Bearer t0ken"  # the control
    assert form.path == "/form" and "authorization" not in form.headers and "t0ken" not in str(form)


def test_a_form_that_is_gone_switches_nothing_off(app: App, run: Any, db: Any, endpoint: HttpServer) -> None:
    """S4-06: a 410 from a URL of the args ends only that job; the provider of the other forms stays active."""
    registry = serving(app, provider("forms", {"form_1": new_signing_secret()}, **OPEN))
    endpoint.reply(Reply(410))
    assert run(webhook.enqueue_sync(db, "forms", FORM, url=endpoint.url, signed_by="form_1")).state == "dead"
    assert registry.known["forms"].active


def test_a_url_of_the_args_is_guarded(app: App, dsn: str, db: Any, endpoint: HttpServer) -> None:
    """S4-06: inside addresses, http:// and invalid URLs are dead; an unknown secret is retried and is not shown."""
    secret = new_signing_secret()
    serving(app, provider("forms", {"form_1": secret}))
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"url": "https://127.0.0.1/x", "signed_by": "form_1"}, "dead", "loopback"),
        ({"url": "https://169.254.169.254/x", "signed_by": "form_1"}, "dead", "link-local"),
        ({"url": endpoint.url, "signed_by": "form_1"}, "dead", "https"),
        ({"url": "https://a:b@example.org/", "signed_by": "form_1"}, "dead", "user and password"),
        ({"url": "https://example.org/"}, "dead", "pass url and signed_by together"),
        ({"signed_by": "form_1"}, "dead", "pass url and signed_by together"),
        ({"url": "https://example.org/", "signed_by": secret}, "retrying", "no secret has this name"),
    ]
    jobs = [LATER.enqueue_sync(db, "forms", FORM, **args) for args, _, _ in cases]
    drain(app, dsn=dsn)
    for job, (args, state, words) in zip(jobs, cases, strict=True):
        found = app.get(job).sync(db)
        assert (found.state, words in (found.last_error or "")) == (state, True), (args, found.last_error)
        assert secret not in (found.last_error or "")
    assert endpoint.got == []


# docs/webhooks.md


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
        listed = in_backticks([[row[0]] for row in table(section(PAGE, heading), "arg")])
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
    assert set(in_backticks([[row[0]] for row in rows])) == read - {""}
