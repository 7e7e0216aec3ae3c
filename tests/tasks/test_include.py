"""Ready-made tasks in an app: including them, enqueuing them, and missing libraries."""

import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest

from support.outside import HttpServer, provider, serving, smtp_server
from tallybook import App, Constant, Context
from tallybook._task.catalogue import check_tasks
from tallybook.errors import ConfigError, DuplicateTask, SignatureError
from tallybook.extra.tasks import email, http, new_signing_secret, webhook
from tallybook.testing import drain, drain_async


def test_a_notification_by_mail_and_sms_in_one_call(app: App, dsn: str, db: Any, endpoint: HttpServer) -> None:
    """S4-22 S4-06: one call enqueues mail and SMS in the caller's transaction; each is a job with its own attempts."""
    with smtp_server() as (mailbox, port):
        serving(
            app,
            provider("mail", host="127.0.0.1", port=port, tls="none", **{"from": "shop@example.org"}),
            provider("sms", {"token": "t"}, url=endpoint.url, allow=["127.0.0.1"], allow_http=True),
        )
        both = [
            email.job("mail", "ada@example.org", "Your form", "It has come in."),
            http.job("sms", method="POST", path="/messages", body={"to": "+49123", "text": "Your form has come in."}),
        ]
        with db.transaction(force_rollback=True):
            app.enqueue_many_sync(db, both)
        report = app.enqueue_many_sync(db, both)
        assert [job.created for job in report] == [True, True]
        assert drain(app, dsn=dsn).completed == 2
        assert len(mailbox.messages) == len(endpoint.got) == 1
        assert endpoint.got[0].headers["idempotency-key"] == f"job_{report[1].id}"


async def test_an_app_serves_what_it_includes(dsn: str, db: Any) -> None:
    """S4-06: included tasks have their names, args, options and retries; a job of any other task is set aside."""
    app = App("shop", dsn=dsn)
    app.include(webhook)
    assert list(app.tasks) == ["tallybook.webhook"] and app.tasks["tallybook.webhook"].app is app
    assert app.tasks["tallybook.webhook"].max_attempts == 15 and app.tasks["tallybook.webhook"].retry == webhook.retry
    with pytest.raises(SignatureError, match="unexpected argument 'boddy'; it takes"):
        webhook.job("acme", boddy={})  # type: ignore[call-arg]
    await http.enqueue(app, url="https://example.org/")
    assert (await drain_async(app)).moved == 1
    with pytest.raises(DuplicateTask):
        app.include(webhook)
    with pytest.raises(ConfigError, match="not a task"):
        app.include(lambda: None)  # type: ignore[arg-type]


async def test_an_included_task_has_the_app_and_its_policies(dsn: str, db: Any) -> None:
    """A task of another App runs with ctx.app and the retry policies of the App that includes it."""
    library, app, seen = App("library"), App("shop", dsn=dsn), []

    @library.task(retry="patient", max_attempts=2)
    async def shared(ctx: Context, n: int) -> None:
        seen.append((ctx.app, n))
        raise ValueError

    app.include(shared)
    with pytest.raises(ConfigError, match="no retry policy"):
        check_tasks(app)
    app.retry_policy("patient", Constant(timedelta(hours=5)))
    job = await shared.enqueue(app, 3)
    await drain_async(app)
    assert seen == [(app, 3)] and app.get(job).sync(db).state == "retrying"
    assert shared.app is library


@pytest.mark.parametrize(
    ("package", "extra", "job"),
    [
        ("httpcore2", "webhooks", http.job(url="https://192.0.2.1/")),
        ("aiosmtplib", "email", email.job("mail", "a@b.org", "s", "t")),
        ("jinja2", "templates", email.job("mail", "a@b.org", template="welcome")),
    ],
)
def test_a_missing_extra_is_one_clear_error(
    app: App, dsn: str, db: Any, monkeypatch: pytest.MonkeyPatch, package: str, extra: str, job: Any
) -> None:
    """S4-06: without its library, the job fails with the command that installs it, and is retried."""
    serving(app, provider("mail", host="127.0.0.1", port=9, tls="none", **{"from": "shop@example.org"}))
    monkeypatch.delitem(sys.modules, "tallybook.extra.tasks._transport", raising=False)
    monkeypatch.delattr("tallybook.extra.tasks._transport", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    (put,) = app.enqueue_many_sync(db, [job])
    drain(app, dsn=dsn, max_jobs=1)
    found = app.get(put).sync(db)
    assert found.state == "retrying" and f"pip install 'tallybook[{extra}]'" in (found.last_error or "")


def test_enqueueing_needs_no_extra() -> None:
    """S4-06: a producer that imports the ready-made tasks loads none of their libraries."""
    program = (
        "import sys\nfrom tallybook.extra.tasks import email, http, notification, sms, webhook\n"
        "webhook.job('acme', {'a': 1})\n"
        "print([name for name in ('httpcore2', 'aiosmtplib', 'jinja2', 'anyio', 'h11') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_a_new_secret_is_one_that_signs() -> None:
    """S4-06: a new signing secret is random and begins with whsec_."""
    assert len({new_signing_secret() for _ in range(3)}) == 3 and new_signing_secret().startswith("whsec_")
