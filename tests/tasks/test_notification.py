"""A mail and an SMS as one job, an SMS alone, and mails from templates."""

import json
from collections.abc import Callable
from datetime import timedelta
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from support.outside import LOOPBACK, HttpServer, Reply, provider, serving, smtp_server
from tallybook import App, Constant, JobInfo
from tallybook.extra.tasks import email, notification, sms
from tallybook.testing import drain, travel

Run = Callable[..., JobInfo]
HOUR = Constant(timedelta(hours=1))  # nothing is tried again within one drain
MAIL = {"provider": "mail", "to": "ada@example.org", "subject": "Hello", "text": "It is here."}
TEXT = {"provider": "sms", "to": "+4930123", "text": "It is here."}


def mail(port: int) -> Any:
    return provider("mail", host="127.0.0.1", port=port, tls="none", **{"from": "shop@example.org"})


def texts(endpoint: HttpServer, secrets: Any = None, **settings: Any) -> Any:
    return provider("sms", secrets, url=endpoint.url, allow=LOOPBACK, allow_http=True, **settings)


def again(app: App, dsn: str, db: Any, job: Any) -> JobInfo:
    """Drain an hour later, and return the job's info."""
    travel(dsn, timedelta(hours=1))
    drain(app, dsn=dsn)
    return app.get(job).sync(db)


def test_a_mail_and_an_sms_are_one_job(app: App, run: Run, db: Any, endpoint: HttpServer) -> None:
    """S4-22: one job that SQL enqueued sends a mail and an SMS; its result has the result of each."""
    with smtp_server() as (mailbox, port):
        serving(app, mail(port), texts(endpoint, {"token": "t0ken"}))
        endpoint.reply(Reply(201, {"Content-Type": "application/json"}, b'{"id": "m1"}'))
        (job,) = db.execute(
            "select tallybook.enqueue('out', 'tallybook.notification', %s::jsonb)",
            (json.dumps({"email": MAIL, "sms": TEXT}),),
        ).fetchone()
        found = run(job)
        assert found.state == "completed", found.last_error
        assert found.result["email"]["accepted"] == ["ada@example.org"]
        assert found.result["sms"] == {"status": 201, "json": {"id": "m1"}}
        (sent,) = endpoint.got
        assert json.loads(sent.body) == {"to": "+4930123", "text": "It is here."}
        assert (sent.headers["idempotency-key"], sent.headers["authorization"]) == (f"job_{job}", "Bearer t0ken")
        assert len(mailbox.messages) == 1 and "t0ken" not in str(found)


@pytest.mark.parametrize("broken", ["email", "sms"])
def test_a_retry_sends_only_what_was_not_sent(app: App, dsn: str, db: Any, endpoint: HttpServer, broken: str) -> None:
    """S4-22 S4-18: if one channel fails, the other is sent, once; the retry sends the rest, an SMS with its key."""
    with smtp_server() as (mailbox, port):
        serving(app, mail(port), texts(endpoint))
        if broken == "email":
            mailbox.data = ["451 later", "451 later", "250 OK"]
        else:
            endpoint.reply(Reply(503), Reply(503), Reply(200))
        job = notification.with_(retry=HOUR).enqueue_sync(db, email=MAIL, sms=TEXT)
        drain(app, dsn=dsn)
        found = app.get(job).sync(db)
        other = "sms" if broken == "email" else "email"
        assert found.state == "retrying" and f"{other} is sent; {broken}: " in (found.last_error or "")
        assert again(app, dsn, db, job).state == "retrying"
        found = again(app, dsn, db, job)
        assert found.state == "completed" and sorted(found.result) == ["email", "sms"]
        tries = (len(mailbox.messages), len(endpoint.got))
        assert tries == ((1, 1) if broken == "email" else (1, 3))
        assert {got.headers["idempotency-key"] for got in endpoint.got} == {f"job_{job.id}"}


def test_a_recipient_of_a_notification_gets_one_mail(app: App, dsn: str, db: Any, endpoint: HttpServer) -> None:
    """S4-22: in a notification, too, no recipient gets a second mail while another is refused for now."""
    with smtp_server() as (mailbox, port):
        serving(app, mail(port), texts(endpoint))
        mailbox.answers = {"later@example.org": ["450 greylisted", "250 OK"]}
        both = {**MAIL, "to": ["ada@example.org", "later@example.org"]}
        job = notification.with_(retry=HOUR).enqueue_sync(db, email=both, sms=TEXT)
        drain(app, dsn=dsn)
        assert again(app, dsn, db, job).state == "completed" and len(endpoint.got) == 1
        assert [one.rcpt_tos for one in mailbox.messages] == [["ada@example.org"], ["later@example.org"]]


def test_what_cannot_be_sent_is_dead_and_a_person_sends_it_alone(
    app: App, dsn: str, db: Any, endpoint: HttpServer
) -> None:
    """S4-22: an SMS refused for good makes the job dead, with the mail sent; a person's retry sends only the SMS."""
    with smtp_server() as (mailbox, port):
        serving(app, mail(port), texts(endpoint))
        endpoint.reply(Reply(400, body=b"no such number"), Reply(200))
        job = notification.enqueue_sync(db, email=MAIL, sms=TEXT)
        drain(app, dsn=dsn)
        found = app.get(job).sync(db)
        assert found.state == "dead" and "email is sent; sms: SMS by provider 'sms': status 400: no such number" in (
            found.last_error or ""
        )
        app.retry(job).sync(db)
        drain(app, dsn=dsn)
        assert app.get(job).sync(db).state == "completed"
        assert (len(mailbox.messages), len(endpoint.got)) == (1, 2)


def test_wrong_args_of_a_channel_send_nothing(app: App, dsn: str, db: Any, endpoint: HttpServer) -> None:
    """S4-22: wrong args of a channel, no channel and an invalid SMS are dead with a clear error, and not sent."""
    with smtp_server() as (mailbox, port):
        serving(app, mail(port), texts(endpoint))
        cases: list[tuple[dict[str, Any], str]] = [
            ({}, "pass email, sms or both"),
            ({"email": MAIL, "sms": {"provider": "sms", "body": "x"}}, "notification: sms: "),
            ({"email": {**MAIL, "to": 5}}, "notification: email: "),
        ]
        jobs = [notification.with_(max_attempts=1).enqueue_sync(db, **args) for args, _ in cases]
        wrong = [sms.enqueue_sync(db, "sms", "+49 30", "x"), sms.enqueue_sync(db, "sms", "+4930123", "")]
        drain(app, dsn=dsn)
        for job, words in zip([*jobs, *wrong], [*(words for _, words in cases), "number", "0 characters"], strict=True):
            found = app.get(job).sync(db)
            assert found.state == "dead" and words in (found.last_error or ""), found.last_error
        assert not mailbox.messages and not endpoint.got


def test_an_sms_as_a_form_by_names_of_the_provider(app: App, run: Run, db: Any, endpoint: HttpServer) -> None:
    """S4-06: the provider's settings set the field names, extra fields, the sender and the form encoding."""
    fields = {"to": "To", "text": "Body", "sender": "From", "Channel": "7"}
    serving(app, texts(endpoint, {"password": "p4ss"}, user="AC1", form=True, fields=fields, **{"from": "+4930999"}))
    found = run(sms.enqueue_sync(db, "sms", "+4930123", "Grüße & more", idempotency_key="form-7"))
    assert found.state == "completed" and found.result == {"status": 200, "text": "fine"}, found.last_error
    (sent,) = endpoint.got
    wanted = {"To": ["+4930123"], "Body": ["Grüße & more"], "From": ["+4930999"], "Channel": ["7"]}
    assert parse_qs(sent.body.decode()) == wanted and sent.headers["idempotency-key"] == "form-7"
    assert sent.headers["content-type"] == "application/x-www-form-urlencoded"


def test_a_mail_is_made_of_a_template(
    app: App, dsn: str, db: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Subject, text and html come from template files; only html is escaped; a missing value is named."""
    monkeypatch.setenv("TALLYBOOK_MAIL_TEMPLATES", str(tmp_path))
    (tmp_path / "hello.subject").write_text("Hello {{ name }}\n")
    (tmp_path / "hello.txt").write_text("You are {{ name }}.")
    (tmp_path / "hello.html").write_text("<b>{{ name }}</b>")
    (tmp_path / "plain.txt").write_text("{{ name }}")
    with smtp_server() as (mailbox, port):
        serving(app, mail(port))

        def put(**given: Any) -> Any:
            return email.with_(retry=HOUR).enqueue_sync(db, "mail", "ada@example.org", **given)

        good = put(template="hello", values={"name": "<Ada> & Co"})
        wrong: list[tuple[Any, str, str]] = [
            (put(template="hello", values={}), "dead", "template 'hello.subject': 'name' is undefined"),
            (put(template="hello", values={"name": "a\nBcc: eve@example.org"}), "dead", "subject: pass one line"),
            (put(template="hello", text="t"), "dead", "not both"),
            (put(template="../hello"), "dead", "is not a valid name"),
            (put(template="plain", values={"name": 1}), "dead", "the subject is missing"),
            (put(template="other"), "retrying", "neither other.txt nor other.html"),
        ]
        drain(app, dsn=dsn)
        assert app.get(good).sync(db).state == "completed", app.get(good).sync(db).last_error
        for job, state, words in wrong:
            found = app.get(job).sync(db)
            assert (found.state, words in (found.last_error or "")) == (state, True), found.last_error
        (envelope,) = mailbox.messages
        message: Any = message_from_bytes(envelope.content, policy=policy.default)
        assert message["subject"] == "Hello <Ada> & Co"
        assert message.get_body(("plain",)).get_content().strip() == "You are <Ada> & Co."
        assert message.get_body(("html",)).get_content().strip() == "<b>&lt;Ada&gt; &amp; Co</b>"
