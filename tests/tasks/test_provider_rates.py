"""Rate limits of providers: each caller takes a turn at them, and a 429 delays all callers."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from support.outside import LOOPBACK, HttpServer, Reply, provider, serving, smtp_server
from tallybook import App, Constant, Context
from tallybook.errors import CallFailed
from tallybook.extra.tasks import email, http, new_signing_secret, notification, sms, webhook
from tallybook.testing import drain, travel

HOUR = timedelta(hours=1)


@pytest.fixture
def limited(app: App, dsn: str, db: Any) -> App:
    """The app with a provider acme, limited to one call an hour, all of it in rows."""
    app.dsn = dsn
    app.rate_limits.set("provider:acme", 1, per="1 hour").sync(db)
    asyncio.run(set_provider(app, ["provider:acme"]))
    return app


async def set_provider(app: App, limits: Any) -> None:
    async with app.open():
        await app.providers.set("acme", kind="test", settings={"limits": limits})


def ends(app: App, db: Any, *jobs: Any) -> list[tuple[str, int]]:
    return [(found.state, found.failures) for found in (app.get(job).sync(db) for job in jobs)]


def pushed_for(app: App, db: Any) -> timedelta:
    """The time until acme may be called again."""
    (rate,) = [rate for rate in app.rate_limits.list().sync(db) if rate.name == "provider:acme"]
    return timedelta(0) if rate.pushed_to is None else rate.pushed_to - datetime.now(UTC)


def test_a_handler_takes_a_turn_of_its_provider(limited: App, dsn: str, db: Any) -> None:
    """S1-18 S1-12: ctx.provider lets one of three handlers call; the others end without failure until their turns."""
    called: list[str] = []

    @limited.task
    async def ask(ctx: Context) -> None:
        async with ctx.provider("acme") as acme:
            called.append(acme.name)

    @limited.task
    def ask_plain(ctx: Context) -> None:
        with ctx.provider("acme") as acme:
            called.append(acme.name)

    jobs = [ask.enqueue_sync(db), ask.enqueue_sync(db), ask_plain.enqueue_sync(db)]
    drain(limited, dsn=dsn)
    assert called == ["acme"] and sorted(ends(limited, db, *jobs)) == [("completed", 0), *[("scheduled", 0)] * 2]
    for _ in range(2):
        travel(dsn, HOUR + timedelta(seconds=37))
        drain(limited, dsn=dsn)
    assert called == ["acme"] * 3 and ends(limited, db, *jobs) == [("completed", 0)] * 3


@pytest.mark.parametrize("plain", [False, True])
def test_a_429_puts_the_provider_off(limited: App, dsn: str, db: Any, plain: bool) -> None:
    """S1-19: a 429 delays the provider's limits by its Retry-After; the attempt is no failure."""

    class TooMany(Exception):
        """Like the errors of HTTP libraries: the response has the status and the headers."""

        def __init__(self, status: int) -> None:
            super().__init__(f"status {status}")
            self.response = type("Response", (), {"status_code": status, "headers": {"retry-after": "1800"}})()

    limited.rate_limits.set("provider:acme", 600, per="1 min").sync(db)

    @limited.task
    async def ask(ctx: Context, status: int) -> None:
        async with ctx.provider("acme"):
            raise TooMany(status)

    @limited.task
    def ask_plain(ctx: Context, status: int) -> None:
        with ctx.provider("acme"):
            raise TooMany(status)

    task = (ask_plain if plain else ask).with_(retry=Constant(HOUR))
    other = task.enqueue_sync(db, 503)
    drain(limited, dsn=dsn)
    assert ends(limited, db, other) == [("retrying", 1)] and pushed_for(limited, db) == timedelta(0)  # the control
    job = task.enqueue_sync(db, 429)
    drain(limited, dsn=dsn)
    assert ends(limited, db, job) == [("scheduled", 0)]
    assert timedelta(minutes=29) < pushed_for(limited, db) <= timedelta(minutes=30)


def test_a_provider_without_limits_asks_for_no_turn(limited: App, dsn: str, db: Any) -> None:
    """S1-18: without limits, a 429 is an ordinary error; limits that are no list or are unknown are clear errors."""
    limited.providers.fresh_for = timedelta(0)

    @limited.task(max_attempts=1)
    async def ask(ctx: Context) -> None:
        async with ctx.provider("acme"):
            raise CallFailed("status 429", status=429)

    words = {}
    for limits in ([], "provider:acme", ["provider:amce"]):
        asyncio.run(set_provider(limited, limits))
        job = ask.enqueue_sync(db)
        drain(limited, dsn=dsn)
        words[str(limits)] = limited.get(job).sync(db).last_error
    assert words["[]"] == "status 429" and "not a list of names" in words["provider:acme"]
    assert "there is no limit of that name" in words["['provider:amce']"]


def test_ready_made_tasks_keep_to_their_providers_rates(app: App, dsn: str, db: Any, endpoint: HttpServer) -> None:
    """S1-18 S1-19: webhook, http, sms, email and a notification take turns on their own; a 429 delays all of them."""
    limits = {"limits": ["provider:acme"]}
    app.rate_limits.set("provider:acme", 1, per="1 hour").sync(db)
    with smtp_server() as (mailbox, port):
        serving(
            app,
            provider("mail", host="127.0.0.1", port=port, tls="none", **{"from": "shop@example.org"}, **limits),
            provider(
                "acme",
                {"signing_secret": new_signing_secret()},
                url=endpoint.url,
                allow=LOOPBACK,
                allow_http=True,
                **limits,
            ),
        )
        endpoint.reply(Reply(429, {"Retry-After": "7200"}), Reply())
        mail = {"provider": "mail", "to": "ada@example.org", "subject": "s", "text": "t"}
        jobs = [
            webhook.enqueue_sync(db, "acme", {"n": 1}),
            http.enqueue_sync(db, "acme"),
            sms.enqueue_sync(db, "acme", "+4930123", "t"),
            email.enqueue_sync(db, **mail),
            notification.enqueue_sync(db, email=mail, sms={"provider": "acme", "to": "+4930123", "text": "t"}),
        ]
        drain(app, dsn=dsn)
        assert ends(app, db, *jobs) == [("scheduled", 0)] * 5
        assert len(endpoint.got) == 1 and timedelta(minutes=118) < pushed_for(app, db) <= timedelta(hours=2)
        travel(dsn, timedelta(hours=2, minutes=1))
        for n in range(6):
            drain(app, dsn=dsn)
            assert len(endpoint.got) - 1 + len(mailbox.messages) == n + 1
            travel(dsn, HOUR + timedelta(seconds=37))
        assert ends(app, db, *jobs) == [("completed", 0)] * 5
        assert (len(mailbox.messages), len(endpoint.got)) == (2, 5)
