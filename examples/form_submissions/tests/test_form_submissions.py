"""The example of form submissions, in parts and as a whole."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from fastapi.testclient import TestClient

from examples.form_submissions.world import World
from tallybook.testing import FreshDatabases, assert_enqueued, travel

HERE = Path(__file__).parents[1]
DATA = {"email": "ada@example.org", "text": "<script>alert(1)</script>"}


@pytest.fixture(scope="module")
def forms_dsn(tallybook_server: FreshDatabases) -> Iterator[str]:
    """One database for all: the application reads its address on import. Without providers every operation fails."""
    said = {"ADMIN_PASSWORD": "right", "CRON_TOKEN": "tick", "DEADLINE": "0.5"}
    with tallybook_server.fresh() as dsn, pytest.MonkeyPatch.context() as environment:
        for name, value in {**said, "TALLYBOOK_DSN": dsn}.items():
            environment.setenv(name, value)
        environment.delenv("TALLYBOOK_KEYS", raising=False)
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute((HERE / "schema.sql").read_bytes())
        yield dsn


@pytest.fixture
def db(forms_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(forms_dsn, autocommit=True) as conn:
        yield conn


@pytest.fixture
def client(forms_dsn: str) -> Iterator[TestClient]:
    from examples.form_submissions.web import api

    with TestClient(api, follow_redirects=False) as client:
        yield client


@pytest.mark.slow
def test_a_submission_and_its_operations_are_one_transaction(client: TestClient, db: Any) -> None:
    """S4-01 S4-04 S4-06 S4-21 S4-22: saved with five linked jobs by one call; attempts by kind, keys."""
    from examples.form_submissions.jobs import ATTEMPTS, app, table_sync

    answer = client.post("/forms/contact", json=DATA)
    assert answer.status_code == 201
    number = answer.json()["submission"]
    found = db.execute(
        "select o.kind, j.task, j.max_attempts, j.links ->> 'submission' from operation o"
        " join tallybook.job j on j.id = o.job_id where o.submission = %s order by o.job_id", (number,)
    ).fetchall()  # fmt: skip
    assert found == [
        ("webhook", "tallybook.webhook", 5, str(number)),
        ("table", "table_sync", None, str(number)),
        ("notification", "tallybook.notification", 3, str(number)),
        ("receipt", "tallybook.email", 3, str(number)),
        ("enrichment", "enrich", None, str(number)),
    ]
    assert ATTEMPTS == table_sync.max_attempts == app.tasks["enrich"].max_attempts == 3
    assert_enqueued(db, "tallybook.webhook", signed_by="contact", idempotency_key=f"contact-{number}-webhook")
    assert_enqueued(db, table_sync, sheet="contacts", submission=number, key=f"contact-{number}-table")


@pytest.mark.parametrize(("form", "data", "status"), [
    ("unknown", DATA, 404), ("contact", {"text": "x" * 100_001}, 422),
    ("contact", {"text": "\0"}, 422), ("contact", {"\ud800": ""}, 422), ("contact", {"n": [1]}, 422),
])  # fmt: skip
def test_what_is_no_submission_is_refused(client: TestClient, db: Any, form: str, data: Any, status: int) -> None:
    """Unknown forms, what is too large, what no database can keep: refused, and nothing is saved."""
    before = db.execute("select count(*) from submission").fetchone()
    answer = client.post(f"/forms/{form}", content=json.dumps(data), headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert db.execute("select count(*) from submission").fetchone() == before


@pytest.mark.slow
def test_a_queue_that_is_away_keeps_no_submission_from_being_saved(client: TestClient, db: Any) -> None:
    """S4-05: the savepoint keeps the submission if the enqueue fails; its operations are enqueued later, once."""
    db.execute("alter schema tallybook rename to away")
    try:
        answer = client.post("/forms/signup", json=DATA)
    finally:
        db.execute("alter schema away rename to tallybook")
    assert answer.status_code == 201
    number = answer.json()["submission"]
    count = (
        "select (select handed_over from submission where id = %(n)s), count(*) from operation where submission = %(n)s"
    )
    assert db.execute(count, {"n": number}).fetchone() == (False, 0)
    tick(client, db)  # stores the schedule
    for _ in range(2):
        travel(db, timedelta(minutes=1))
        tick(client, db)
        assert db.execute(count, {"n": number}).fetchone() == (True, 5)


def tick(client: TestClient, db: Any) -> int:
    """Call the cron's route until nothing is due; return how many jobs were processed."""
    total = 0
    while done := client.post("/cron/process", headers={"Authorization": "Bearer tick"}).json()["processed"]:
        assert done <= 10
        total += done
    return total


@pytest.mark.slow
def test_the_crons_route_processes_what_is_due_and_failures_wait(client: TestClient, db: Any) -> None:
    """S4-07 S4-11 S4-12 S4-13: at most ten per call, counted; 5 to 40 minutes, then dead with every error stored."""
    assert client.post("/cron/process").status_code == 403
    number, *_ = [client.post("/forms/contact", json=DATA).json()["submission"] for _ in range(3)]
    assert tick(client, db) >= 15
    waits = []
    wait = "j.run_at - (j.errors -> -1 ->> 'at')::timestamptz"
    this = "from operation o join tallybook.job j on j.id = o.job_id where o.submission = %s and o.kind = 'webhook'"
    for _ in range(4):
        found = db.execute(
            f"select round(extract(epoch from {wait}) / 60)::int {this}",  # noqa: S608
            (number,),
        ).fetchone()
        waits += found
        travel(db, timedelta(minutes=found[0]))
        tick(client, db)
    assert waits == [5, 10, 20, 40]
    dead = f"select j.state, j.failures, jsonb_array_length(j.errors) {this}"
    assert db.execute(dead, (number,)).fetchone() == ("dead", 5, 5)
    others = (
        "select array_agg(distinct j.failures) from operation o join tallybook.job j on j.id = o.job_id"
        " where o.submission = %s and o.kind <> 'webhook'"
    )
    assert db.execute(others, (number,)).fetchone() == ([3],)


@pytest.mark.slow
def test_people_look_at_it_and_handle_what_is_dead(client: TestClient, db: Any) -> None:
    """S4-02 S4-09 S4-14 S4-16: status and events, statistics, dead letters by kind; retry and cancel, for admins."""
    number = client.post("/forms/contact", json=DATA).json()["submission"]
    db.execute("""select tallybook.enqueue('default', 'catch_up', args => '{"wrong": 1}')""")  # is dead at once
    for minutes in (0, 5, 10):
        travel(db, timedelta(minutes=minutes))
        tick(client, db)
    jobs = dict(db.execute("select kind, job_id from operation where submission = %s", (number,)).fetchall())
    for path in ("/", f"/submissions/{number}", "/dead"):
        assert client.get(path).status_code == 401
    assert client.post(f"/operations/{jobs['notification']}/retry").status_code == 401
    assert client.get("/queue/").status_code == 403
    client.auth = ("ada", "right")
    assert client.get("/queue/").status_code == 200
    page = client.get("/").text
    assert "retrying" in page and "0 completed, 0 of them today" in page  # catch_up is no operation
    lease, one = "6f0a9a6e-0000-4000-8000-000000000016", "select tallybook.enqueue('integrations', 'enrich')"
    ((done,), (worker,)) = (
        db.execute(ask).fetchone() for ask in (one, "select tallybook.worker_start('w', '{integrations}')")
    )
    db.execute("select tallybook.claim_job(%s, %s, %s)", (worker, done, lease))
    db.execute("select tallybook.complete(%s, %s, 1)", (lease, done))
    assert "1 completed, 1 of them today" in client.get("/").text
    assert "catch_up" not in client.get("/dead").text
    page = client.get(f"/submissions/{number}").text
    assert "UnknownProvider" in page
    assert "enqueued" in page and "retrying" in page and "dead" in page and "<script>" not in page
    assert f"/operations/{jobs['notification']}/retry" in client.get("/dead").text
    assert f"/operations/{jobs['table']}/retry" not in client.get("/dead?task=tallybook.notification").text
    forged = client.post(f"/operations/{jobs['notification']}/retry", headers={"Origin": "https://evil.example"})
    assert forged.status_code == 403
    state = "select (select state from tallybook.job where id = %s)"
    assert db.execute(state, (jobs["notification"],)).fetchone() == ("dead",)
    assert client.post(f"/operations/{jobs['notification']}/retry").status_code == 303
    assert db.execute(state, (jobs["notification"],)).fetchone() == ("available",)
    assert client.post(f"/operations/{jobs['notification']}/retry").status_code == 409
    for kind in ("table", "notification"):  # one that is dead, and one that is in line
        assert client.post(f"/operations/{jobs[kind]}/cancel").status_code == 303
        assert db.execute(state, (jobs[kind],)).fetchone() == ("cancelled",)
    assert f"/operations/{jobs['table']}/" not in client.get("/dead").text
    assert client.get(f"/submissions/{number}").text.count("cancelled by ada") == 2
    assert client.post("/operations/999999999/retry").status_code == 404
    assert client.post(f"/operations/{jobs['webhook']}/drop").status_code == 404


@pytest.mark.slow
def test_a_submission_that_is_withdrawn_is_not_worked_off(client: TestClient, db: Any) -> None:
    """S4-14: open and dead jobs are cancelled with the user's name; operations not enqueued yet never are."""
    tick(client, db)  # stores the schedule of catch_up
    number = client.post("/forms/contact", json=DATA).json()["submission"]
    db.execute("alter schema tallybook rename to away")
    try:
        late = client.post("/forms/contact", json=DATA).json()["submission"]
    finally:
        db.execute("alter schema away rename to tallybook")
    assert client.post(f"/submissions/{number}/cancel").status_code == 401
    answers = [client.post(f"/submissions/{n}/cancel", auth=("ada", "right")) for n in (number, late, 999_999)]
    assert [answer.status_code for answer in answers] == [303, 303, 404]
    travel(db, timedelta(minutes=1))
    tick(client, db)
    found = (
        "select j.state, j.attempts, j.reason from operation o join tallybook.job j on j.id = o.job_id"
        " where o.submission = %s"
    )
    assert db.execute(found, (number,)).fetchall() == [("cancelled", 0, "by ada")] * 5
    assert db.execute(found, (late,)).fetchall() == []


def test_the_account_finds_what_is_lost() -> None:
    """The run's account sees each loss: a submission, an effect, a finding; and takes nothing else for one."""
    from examples.form_submissions.world import KINDS, missing

    promised = {1: "contact", 2: "gone"}
    done = {f"{form}-{n}-{kind}" for n, form in promised.items() for kind in KINDS} - {"gone-2-webhook"}
    assert missing(promised, {1, 2}, {1, 2}, done, {"gone-2-webhook"}, set()) == set()
    assert missing(promised, {1, 2}, {1, 2}, done, set(), set()) == {"gone-2-webhook"}
    assert missing(promised, {1}, {1, 2}, done, {"gone-2-webhook"}, set()) == {"submission 2"}
    assert missing(promised, {1, 2}, {2}, done, {"gone-2-webhook"}, set()) == {"contact-1-enrichment"}
    assert missing(promised, {1, 2}, {1, 2}, done - {"contact-1-sms"}, set(), {"gone-2-webhook"}) == {"contact-1-sms"}
    (undue,) = missing(promised, {1, 2}, {1, 2}, done, {"gone-2-webhook"}, {"contact-1-sms"})
    assert undue == "contact-1-sms, which was cancelled"


@pytest.mark.slow
def test_the_whole_run_loses_nothing() -> None:
    """S4-01 S4-18 S4-19: 0 lost, nothing done twice, half the answers within 300 ms, calls ended by their deadline."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TALLYBOOK_", "PG", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "examples.form_submissions"], cwd=HERE.parents[1], env={**env, "SHORT": "1"},
        capture_output=True, text=True, timeout=290, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("form_submissions: ")
    assert done.stdout.endswith("retried, 0 lost\n")
    assert "after 5, 10, 20, 40, 80 minutes" in done.stdout and "done twice: 0" in done.stdout
    figures = r"answered in p50 (\d+) ms", r"save nothing in p50 (\d+) ms", r"(\d+) calls were aborted"
    p50, nothing, by_deadline = (re.search(what, done.stdout) for what in figures)
    assert p50 and nothing and by_deadline, done.stdout
    # On a machine where no request is quick, this one is slower by the same factor.
    assert int(p50[1]) <= max(300, 5 * int(nothing[1]))
    assert int(by_deadline[1]) > 0, "some servers are silent for longer than the deadline"


def test_what_comes_under_another_key_is_done_twice() -> None:
    """S4-18: the account's control: a receiver that sees a new key at a retry does the same again, and that is seen."""
    world = World("")
    world.do("contact-1-sms", "/sms: contact: submission 1 has come in")
    world.do("contact-1-sms", "/sms: contact: submission 1 has come in")
    assert world.twice() == set()
    world.heeds_keys = False
    world.do("contact-1-table", "/tables/contacts: 1")
    world.do("contact-1-table", "/tables/contacts: 1")
    assert world.twice() == {"/tables/contacts: 1"}  # a receiver that knows no keys
    world.effects.clear()
    world.do("contact-1-sms", "/sms: contact: submission 1 has come in")
    world.do("another key", "/sms: contact: submission 1 has come in")
    assert world.twice() == {"/sms: contact: submission 1 has come in"}
