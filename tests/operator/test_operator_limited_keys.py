"""A key of the operator API that is limited to some queues reaches no other one, and learns of none."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.operator_client import OTHER, SECRET, Client, client, codes
from tallybook import App
from tallybook._app.schedules import Schedules
from tallybook.web import Key, operator_api


@pytest.fixture
async def call(dsn: str, db: Any) -> AsyncIterator[Client]:
    db.execute("select tallybook.enqueue('mail', 'welcome'), tallybook.enqueue('pay', 'charge')")
    limited = Key("mailer", OTHER, ("read", "enqueue", "operate"), ("mail",))
    api = operator_api(App("shop", dsn=dsn), keys=[Key("ops", SECRET, ("admin",)), limited])
    async with client(api) as one:
        yield one
    await api.close()


async def test_a_key_for_some_queues_reaches_no_other(call: Client, db: Any) -> None:
    """S2-12: a key that is limited to a queue is refused for another queue; control: for its own queue it is not."""
    limited = [
        ("GET", "/jobs/2", None),
        ("GET", "/jobs/2/why", None),
        ("POST", "/jobs", {"queue": "pay", "task": "charge"}),
        ("POST", "/jobs/2/retry", None),
        ("POST", "/jobs/2/cancel", None),
        ("GET", "/dead-letters?queue=pay", None),
        ("POST", "/dead-letters/retry", {"queue": "pay"}),
        ("POST", "/dead-letters/drop", {"queue": "pay"}),
        ("GET", "/counts?queue=pay", None),
        ("POST", "/queues/pay/pause", None),
        ("POST", "/queues/pay/resume", None),
        ("POST", "/schedules/pay/run", None),
        ("POST", "/schedules/pay/pause", None),
        ("POST", "/schedules/pay/resume", None),
        ("GET", "/workers?queue=pay", None),
    ]
    queues = "unnest('{mail,pay}'::text[]) q"
    daily = "tallybook.schedule_set(q, 'work', '{}', every => '1 day', queue => q)"
    db.execute(f"select {daily} from {queues}")  # noqa: S608
    mailer = call.by("mailer", OTHER)
    for method, target, document in limited:
        assert codes(await mailer(method, target, document)) == (403, "queue"), target
    assert db.execute("select count(*) from tallybook.audits").fetchone()[0] == 0
    for method, target, document in limited:
        own = json.loads(json.dumps(document).replace("pay", "mail"))
        answer = await mailer(method, target.replace("/2", "/1").replace("pay", "mail"), own)
        # Only a key that may retry the job learns that it is not dead.
        assert answer.status_code in (200, 201) or codes(answer) == (409, "conflict"), target


async def test_lists_of_a_limited_key_have_its_queues_only(call: Client, db: Any) -> None:
    """S2-12: a limited key lists only its queues, and cannot change another queue's job through a unique key."""
    mailer = call.by("mailer", OTHER)
    assert [row["name"] for row in (await mailer("GET", "/queues")).json()["queues"]] == ["mail"]
    assert [row["queue"] for row in (await mailer("GET", "/counts")).json()["counts"]] == ["mail"]
    wanted = {"queue": "mail", "task": "charge", "unique": "k", "priority": 0, "on_conflict": "raise_priority"}
    job = (await call("POST", "/jobs", {**wanted, "queue": "pay", "priority": 9})).json()["job"]
    assert codes(await mailer("POST", "/jobs", wanted)) == (403, "queue")
    assert db.execute("select priority from tallybook.job where id = %s", [job]).fetchone()[0] == 9


async def test_a_schedule_that_is_given_another_queue_meanwhile_is_not_run(
    call: Client, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2-12: a schedule that leaves the key's queues between check and run is not run, and leaves no job and no row."""
    put = "select tallybook.schedule_set('s', 'work', '{}', every => '1 day', queue => %s)"
    db.execute(put, ["mail"])
    run = Schedules.run

    def late(self: Schedules, name: str) -> Any:
        db.execute(put, ["pay"])
        return run(self, name)

    monkeypatch.setattr(Schedules, "run", late)
    assert codes(await call.by("mailer", OTHER)("POST", "/schedules/s/run")) == (403, "queue")
    assert db.execute("select count(*) from tallybook.job where task = 'work'").fetchone()[0] == 0
    assert db.execute("select count(*) from tallybook.audits").fetchone()[0] == 0


async def test_a_limited_key_does_not_learn_of_other_queues_by_their_workers(call: Client, db: Any) -> None:
    """S2-12: a limited key sees only its own queue of a worker that serves more, and no tasks; others see all."""
    db.execute("select tallybook.worker_start('web-1', '{mail,pay}', '{welcome,charge}')")
    (worker,) = (await call.by("mailer", OTHER)("GET", "/workers")).json()["workers"]
    assert (worker["queues"], worker["tasks"]) == (["mail"], [])
    (worker,) = (await call("GET", "/workers")).json()["workers"]
    assert (worker["queues"], worker["tasks"]) == (["mail", "pay"], ["welcome", "charge"])
