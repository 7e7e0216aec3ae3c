"""Webhooks to URLs of the args, each signed with a secret that the args name: one provider for all forms."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from standardwebhooks import Webhook, WebhookVerificationError

from support.outside import LOOPBACK, HttpServer, Reply, provider, serving
from tallybook import App, Constant, JobInfo
from tallybook._model.keyring import new_key
from tallybook.extra.tasks import new_signing_secret, webhook
from tallybook.testing import drain

Run = Callable[..., JobInfo]
BODY = {"type": "form.submitted"}
OPEN = {"allow": LOOPBACK, "allow_http": True}
LATER = webhook.with_(retry=Constant(timedelta(hours=1)))  # nothing is tried again within one drain


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
        args = {"provider": "forms", "body": BODY, "url": f"{endpoint.url}/{name}", "signed_by": name}
        db.execute("select tallybook.enqueue('default', 'tallybook.webhook', %s::jsonb)", (json.dumps(args),))
    assert drain(app, dsn=dsn).completed == 2
    sent = {got.path.removeprefix("/"): got for got in endpoint.got}
    for name, secret in secrets.items():
        assert Webhook(secret).verify(sent[name].body, sent[name].headers) == BODY
    with pytest.raises(WebhookVerificationError):
        Webhook(secrets["form_1"]).verify(sent["form_2"].body, sent["form_2"].headers)
    kept = str(db.execute("select to_jsonb(j)::text from tallybook.job j").fetchall())
    assert "form_1" in kept and not any(secret.removeprefix("whsec_") in kept for secret in secrets.values())


def test_no_other_secret_of_the_provider_goes_to_a_url_of_the_args(
    app: App, run: Run, db: Any, endpoint: HttpServer
) -> None:
    """S4-06: the provider's token goes to its own URL, and to no URL of a job's args."""
    own = new_signing_secret()
    secrets = {"token": "t0ken", "signing_secret": own, "form_1": new_signing_secret()}
    serving(app, provider("forms", secrets, url=f"{endpoint.url}/own", **OPEN))
    there = {"url": f"{endpoint.url}/form", "signed_by": "form_1"}
    assert run(webhook.enqueue_sync(db, "forms", BODY)).state == "completed"
    assert run(webhook.enqueue_sync(db, "forms", BODY, **there)).state == "completed"
    mine, form = endpoint.got
    assert mine.headers["authorization"] == "Bearer t0ken"  # the control
    assert form.path == "/form" and "authorization" not in form.headers and "t0ken" not in str(form)


def test_a_form_that_is_gone_switches_nothing_off(app: App, run: Run, db: Any, endpoint: HttpServer) -> None:
    """S4-06: a 410 from a URL of the args ends only that job; the provider of the other forms stays active."""
    registry = serving(app, provider("forms", {"form_1": new_signing_secret()}, **OPEN))
    endpoint.reply(Reply(410))
    assert run(webhook.enqueue_sync(db, "forms", BODY, url=endpoint.url, signed_by="form_1")).state == "dead"
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
    jobs = [LATER.enqueue_sync(db, "forms", BODY, **args) for args, _, _ in cases]
    drain(app, dsn=dsn)
    for job, (args, state, words) in zip(jobs, cases, strict=True):
        found = app.get(job).sync(db)
        assert (found.state, words in (found.last_error or "")) == (state, True), (args, found.last_error)
        assert secret not in (found.last_error or "")
    assert endpoint.got == []
