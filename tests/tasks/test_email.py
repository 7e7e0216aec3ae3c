"""Mails through a real SMTP server, also from templates; an SMS; and a mail and an SMS as one job."""

import json
import socket
from base64 import b64encode
from datetime import timedelta
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from support.outside import LOOPBACK, HttpServer, Reply, certificate, provider, serving, smtp_server
from tallybook import App, Constant, JobInfo
from tallybook.extra.tasks import email, notification, sms
from tallybook.testing import drain, travel

DAY = timedelta(days=1)
HOUR = Constant(timedelta(hours=1))  # nothing is tried again within one drain
LATER = email.with_(retry=HOUR)
MAIL = {"provider": "mail", "to": "ada@example.org", "subject": "Hello", "text": "It is here."}
TEXT = {"provider": "sms", "to": "+4930123", "text": "It is here."}


def mail(port: int, secrets: Any = None, **settings: Any) -> Any:
    given = {"host": "127.0.0.1", "port": port, "tls": "none", "from": "Shop <shop@example.org>", **settings}
    return provider("mail", secrets, **given)


def read(envelope: Any) -> Any:
    return message_from_bytes(envelope.content, policy=policy.default)


def texts(endpoint: HttpServer, secrets: Any = None, **settings: Any) -> Any:
    return provider("sms", secrets, url=endpoint.url, allow=LOOPBACK, allow_http=True, **settings)


def again(app: App, dsn: str, db: Any, job: Any) -> JobInfo:
    """Drain an hour later, and return the job's info."""
    travel(dsn, timedelta(hours=1))
    drain(app, dsn=dsn)
    return app.get(job).sync(db)


def test_sql_alone_sends_a_mail(app: App, run: Any, db: Any) -> None:
    """S4-22 S4-06: a job from SQL is one message to all recipients, text and html; bcc is only in the envelope."""
    with smtp_server() as (mailbox, port):
        serving(app, mail(port))
        (job,) = db.execute(
            "select tallybook.enqueue('out', 'tallybook.email', jsonb_build_object('provider', 'mail',"
            " 'to', jsonb_build_array('Ada Löve <ada@example.org>', 'bob@example.org'),"
            " 'cc', jsonb_build_array('cy@example.org'),"
            " 'bcc', jsonb_build_array('dan@example.org'), 'subject', 'Grüße', 'text', E'Hello\n.\nYou',"
            " 'html', '<b>Hello</b>',"
            " 'reply_to', 'desk@example.org', 'headers', jsonb_build_object('Auto-Submitted', 'auto-generated')))"
        ).fetchone()
        found = run(job)
        assert found.state == "completed", found.last_error
        (envelope,) = mailbox.messages
        assert envelope.mail_from == "shop@example.org"
        assert sorted(envelope.rcpt_tos) == [f"{name}@example.org" for name in ("ada", "bob", "cy", "dan")]
        message = read(envelope)
        assert (
            str(message["to"]) == "Ada Löve <ada@example.org>, bob@example.org"
            and message["from"] == "Shop <shop@example.org>"
        )
        assert (message["cc"], message["subject"], message["reply-to"]) == (
            "cy@example.org",
            "Grüße",
            "desk@example.org",
        )
        assert message["auto-submitted"] == "auto-generated" and "dan" not in envelope.content.decode()
        assert message.get_body(("plain",)).get_content().splitlines() == ["Hello", ".", "You"]
        assert message.get_body(("html",)).get_content().strip() == "<b>Hello</b>"
        result = found.result
        assert (
            result["message_id"] == message["message-id"] and len(result["accepted"]) == 4 and result["refused"] == {}
        )


def test_the_message_id_is_the_same_at_every_attempt(app: App, dsn: str, db: Any) -> None:
    """S4-18: after a lost answer, the message is sent again with the same Message-ID; another job has another one."""
    with smtp_server() as (mailbox, port):
        serving(app, mail(port))
        mailbox.data = ["cut", "451 later", "250 OK"]
        first = LATER.enqueue_sync(db, "mail", "ada@example.org", "Hello", "text")
        keyed = email.with_(delay="10 days").enqueue_sync(
            db, "mail", "ada@example.org", "Hello", "text", idempotency_key="form-7"
        )
        states = []
        for _ in range(3):
            drain(app, dsn=dsn)
            states.append(app.get(first).sync(db).state)
            travel(dsn, DAY)
        assert states == ["retrying", "retrying", "completed"]
        travel(dsn, 10 * DAY)
        second = LATER.enqueue_sync(db, "mail", "ada@example.org", "Hello", "text")
        drain(app, dsn=dsn)
        assert app.get(second).sync(db).state == app.get(keyed).sync(db).state == "completed"
        ids = [str(read(envelope)["message-id"]) for envelope in mailbox.messages]
        assert len(ids) == 4 and ids[0] == ids[1] and len(set(ids)) == 3
        assert ids[0].startswith(f"<job-{first.id}.") and ids[0].endswith("@example.org>")


def test_what_the_server_says_makes_of_the_job(app: App, dsn: str, db: Any) -> None:
    """5xx for the message or all recipients is dead; a recipient refused for good is in the result."""
    with smtp_server() as (mailbox, port):
        serving(app, mail(port))
        mailbox.answers = {"never@example.org": ["550 no such user"]}
        dead = LATER.enqueue_sync(db, "mail", "never@example.org", "s", "t")
        some = LATER.enqueue_sync(db, "mail", ["never@example.org", "ada@example.org"], "some", "t")
        drain(app, dsn=dsn)
        found = app.get(dead).sync(db)
        assert found.state == "dead" and "never@example.org: 550 no such user" in (found.last_error or "")
        result = app.get(some).sync(db).result
        assert (result["accepted"], result["refused"]) == (
            ["ada@example.org"],
            {"never@example.org": "550 no such user"},
        )
        mailbox.data = ["554 spam"]
        spam = LATER.enqueue_sync(db, "mail", "ada@example.org", "s", "t")
        drain(app, dsn=dsn)
        assert app.get(spam).sync(db).state == "dead" and "554 spam" in (app.get(spam).sync(db).last_error or "")


def test_who_has_the_message_does_not_get_it_again(app: App, dsn: str, db: Any) -> None:
    """S4-22 S4-18: after one of three recipients is refused for now, the next attempt is only for that one."""
    with smtp_server() as (mailbox, port):
        serving(app, mail(port))
        mailbox.answers = {"never@example.org": ["550 no"], "later@example.org": ["450 greylisted", "250 OK"]}
        to = ["ada@example.org", "later@example.org", "never@example.org"]
        job = LATER.enqueue_sync(db, "mail", to, "s", "t")
        drain(app, dsn=dsn)
        found = app.get(job).sync(db)
        assert found.state == "retrying" and "later@example.org: 450 greylisted" in (found.last_error or "")
        travel(dsn, DAY)
        drain(app, dsn=dsn)
        found = app.get(job).sync(db)
        assert [envelope.rcpt_tos for envelope in mailbox.messages] == [["ada@example.org"], ["later@example.org"]]
        assert found.state == "completed" and sorted(found.result["accepted"]) == to[:2]
        assert found.result["refused"] == {"never@example.org": "550 no"}


def test_nothing_is_smuggled_into_a_header(app: App, dsn: str, db: Any) -> None:
    """A line break, a second address or a reserved header in an argument makes the job dead; nothing is sent."""
    # An encoded word: the e-mail library decodes it, with its line break.
    smuggled = f"=?utf-8?b?{b64encode(b'Hello' + bytes((13, 10)) + b'Bcc: eve@example.org').decode()}?="
    wrong = [
        ({"subject": "Hello\r\nBcc: eve@example.org"}, "subject: pass one line"),
        ({"subject": "Hello\u2028Bcc: eve@example.org"}, "line break"),
        ({"to": "ada@example.org\r\nBcc: eve@example.org"}, "to: pass one line"),
        ({"to": "ada@example.org, eve@example.org"}, "one address"),
        ({"to": "ada@example.org> <eve@example.org"}, "one address"),
        ({"to": "friends: ada@example.org;"}, "one address"),
        ({"to": "ada"}, "one address"),
        ({"to": "ada@example.org>\tNOTIFY=SUCCESS"}, "to: pass one line"),
        ({"to": []}, "0 recipients"),
        ({"to": [f"a{n}@example.org" for n in range(101)]}, "101 recipients"),
        ({"cc": ["ada@example.org\neve"]}, "cc: pass one line"),
        ({"sender": "shop@example.org\nX: y"}, "sender: pass one line"),
        ({"reply_to": "a@b.org, c@d.org"}, "one address"),
        ({"headers": {"X-A\r\nBcc": "eve@example.org"}}, "cannot be set"),
        ({"headers": {"X-A": "b\nBcc: eve@example.org"}}, "pass one line"),
        ({"headers": {"Bcc": "eve@example.org"}}, "cannot be set"),
        ({"headers": {"Content-Type": "text/plain"}}, "cannot be set"),
        ({"headers": {"X-A": smuggled}}, "pass one line"),
        ({"headers": {"X-A": "a", "x-a": smuggled}}, "pass one line"),
        ({"subject": smuggled}, "subject: pass one line"),
        ({"text": None}, "pass text or html"),
    ]
    with smtp_server() as (mailbox, port):
        serving(app, mail(port))
        plain = {
            "to": "ada@example.org",
            "subject": "s",
            "text": "a line\r\nBcc: eve@example.org\r\n.\r\nRCPT TO:<eve@example.org>",
        }
        jobs = [LATER.enqueue_sync(db, "mail", **{**plain, **given}) for given, _ in wrong]
        drain(app, dsn=dsn)
        for job, (given, words) in zip(jobs, wrong, strict=True):
            found = app.get(job).sync(db)
            assert found.state == "dead" and words in (found.last_error or ""), (given, found.state, found.last_error)
        assert mailbox.messages == []
        control = LATER.enqueue_sync(db, "mail", **plain)  # in the body, all of that is only text
        drain(app, dsn=dsn)
        assert app.get(control).sync(db).state == "completed"
        assert [envelope.rcpt_tos for envelope in mailbox.messages] == [["ada@example.org"]]


def test_the_password_goes_only_over_tls(app: App, dsn: str, db: Any, names: Any, tmp_path: Path) -> None:
    """STARTTLS with the right certificate precedes the login; a wrong password or certificate is retried."""
    names["mail.test"] = names["other.test"] = ["127.0.0.1"]
    cert = certificate(tmp_path, "mail.test")
    with smtp_server(login=("u", "right-p4ssword"), cert=cert) as (mailbox, port), smtp_server() as (plain, plain_port):
        secure = {"host": "mail.test", "tls": "starttls", "user": "u", "ca": (tmp_path / "only").read_text("ascii")}
        right = {"password": "right-p4ssword"}
        cases = [
            (mail(port, right, **secure), "completed", ""),
            (mail(port, {"password": "wrong-p4ssword"}, **secure), "retrying", "535"),
            (mail(port, right, **{**secure, "host": "other.test"}), "retrying", "CERTIFICATE_VERIFY_FAILED"),
            (mail(plain_port, right, **secure), "retrying", "STARTTLS"),
            (mail(plain_port, right, **{**secure, "tls": "none"}), "retrying", "in clear"),
        ]
        for made, state, words in cases:
            serving(app, made)
            job = LATER.enqueue_sync(db, "mail", "ada@example.org", "s", "t")
            drain(app, dsn=dsn)
            found = app.get(job).sync(db)
            assert (found.state, words in (found.last_error or "")) == (state, True), found.last_error
            assert "p4ssword" not in str(found)
        assert len(mailbox.messages) == 1 and plain.messages == []


def test_a_mail_that_was_accepted_is_not_sent_again(app: App, dsn: str, db: Any) -> None:
    """A server that accepts the message and never answers QUIT has the message: the job completes."""
    with smtp_server() as (mailbox, port):
        serving(app, mail(port, timeout="300 ms"))
        mailbox.silent = True
        job = LATER.enqueue_sync(db, "mail", "ada@example.org", "s", "t")
        drain(app, dsn=dsn)
        assert (app.get(job).sync(db).state, len(mailbox.messages)) == ("completed", 1)


@pytest.mark.parametrize("held", [True, False])
def test_a_server_that_says_nothing_is_left(app: App, dsn: str, db: Any, held: bool) -> None:
    """A server that accepts the connection and is silent, or accepts none, is a temporary failure."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if held:
            listener.listen()
        serving(app, mail(listener.getsockname()[1], timeout="300 ms" if held else "30 s"))
        job = LATER.enqueue_sync(db, "mail", "ada@example.org", "s", "t")
        drain(app, dsn=dsn)
        found = app.get(job).sync(db)
        assert found.state == "retrying" and ("within 0.3 s" if held else "SMTPConnectError") in (
            found.last_error or ""
        )


def test_a_mail_and_an_sms_are_one_job(app: App, run: Any, db: Any, endpoint: HttpServer) -> None:
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


def test_an_sms_as_a_form_by_names_of_the_provider(app: App, run: Any, db: Any, endpoint: HttpServer) -> None:
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
            return LATER.enqueue_sync(db, "mail", "ada@example.org", **given)

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
        message = read(envelope)
        assert message["subject"] == "Hello <Ada> & Co"
        assert message.get_body(("plain",)).get_content().strip() == "You are <Ada> & Co."
        assert message.get_body(("html",)).get_content().strip() == "<b>&lt;Ada&gt; &amp; Co</b>"
