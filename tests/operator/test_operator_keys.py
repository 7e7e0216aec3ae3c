"""The keys of the operator API: the file, its permissions, the command that makes a key, and limits to some queues."""

import json
import pickle
import tomllib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.cli import invoke
from support.operator_client import OTHER, SECRET, Client, client, codes, key_file
from tallybook import App
from tallybook._app.schedules import Schedules
from tallybook.errors import ConfigError
from tallybook.web import Key, operator_api, read_keys

GOOD = f'[keys.deploy]\nsecret = "{SECRET}"\nscopes = ["read", "operate"]\nqueues = ["mail"]\n'


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    """S2-12: a file has one table per key, several for a rotation; a key without queues reaches all queues."""
    more = f'[keys."deploy-2"]\nsecret = "{OTHER}"\nscopes = ["admin"]\n'
    assert read_keys(key_file(tmp_path, GOOD + more)) == [
        Key("deploy", SECRET, ("read", "operate"), ("mail",)),
        Key("deploy-2", OTHER, ("admin",)),
    ]


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602, 0o644, 0o666])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    """S2-12: a key file that group or others can read or write is refused with the fix; 600 and 400 are accepted."""

    def _only_read(folder: Path) -> Path:
        (folder / "keys.toml").chmod(0o400)
        return folder / "keys.toml"

    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(key_file(tmp_path, GOOD, mode))
    for good in (0o600, 0o400):
        assert read_keys(key_file(tmp_path, GOOD, 0o600) if good == 0o600 else _only_read(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "keys = 3",
        "[keys]",
        f'secret = "{SECRET}"',
        GOOD + "[more]",
        GOOD.replace('"read"', '"write"'),
        GOOD.replace('["read", "operate"]', "[]"),
        GOOD.replace('["read", "operate"]', '"read"'),
        GOOD.replace('["mail"]', "[]"),
        GOOD.replace('["mail"]', '[" mail"]'),
        GOOD.replace("queues", "quques"),
        GOOD.replace(SECRET, SECRET[:62]),
        GOOD.replace(SECRET, "0" * 64),
        GOOD.replace(SECRET, SECRET.upper()),
        GOOD.replace(SECRET, SECRET[:63] + '" #'),
        GOOD.replace("deploy", '"a b"'),
        GOOD + GOOD.replace("deploy", "other"),
    ],
)
def test_a_file_that_is_none_is_refused_without_its_secrets(tmp_path: Path, text: str) -> None:
    """S2-12: an invalid key file is refused when the API is made, and no message shows a secret."""
    with pytest.raises(ConfigError) as refused:
        operator_api(App("shop"), keys=key_file(tmp_path, text))
    shown = f"{refused.value!r} {refused.value} {refused.value.__dict__} {pickle.dumps(refused.value)!r}"
    assert SECRET[:32] not in shown.lower()


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """A missing file and a folder each raise a ConfigError about keys."""
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="keys"):
            read_keys(path)


def test_two_keys_of_one_id_or_one_secret_are_refused() -> None:
    """S2-12: ids and secrets are unique, or the signature of one key could use the rights of another."""
    one = Key("one", SECRET, ("read",))
    for other in (Key("one", OTHER, ("read",)), Key("two", SECRET, ("admin",))):
        with pytest.raises(ConfigError, match="keys"):
            operator_api(App("shop"), keys=[one, other])


def test_a_key_is_made_on_the_command_line(tmp_path: Path) -> None:
    """S2-12: `tallybook web key` prints a block that the key file accepts, with a fresh secret each time."""

    new = partial(invoke, "web", "key")

    made = new("deploy", "--scope", "read", "--scope", "operate", "--queue", 'a "b"')
    again = new("deploy-2", "--scope", "admin")
    assert (made.exit_code, again.exit_code) == (0, 0)
    first, second = read_keys(key_file(tmp_path, made.output + again.output))
    assert (first.id, first.scopes, first.queues) == ("deploy", ("read", "operate"), ('a "b"',))
    assert (second.scopes, second.queues) == (("admin",), None)
    assert len(bytes.fromhex(first.secret)) == 32 and first.secret != second.secret
    assert tomllib.loads(made.output)["keys"]["deploy"]["secret"] == first.secret
    assert new("a b", "--scope", "read").exit_code == 2
    assert new("deploy").exit_code == 2
    assert new("deploy", "--scope", "all").exit_code == 2


@pytest.fixture
async def call(dsn: str, db: Any) -> AsyncIterator[Client]:
    db.execute("select tallybook.enqueue('mail', 'welcome'), tallybook.enqueue('pay', 'charge')")
    limited = Key("mailer", OTHER, ("read", "enqueue", "operate"), ("mail",))
    api = operator_api(App("shop", dsn=dsn), keys=[Key("ops", SECRET, ("admin",)), limited])
    async with client(api) as one:
        yield one


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
