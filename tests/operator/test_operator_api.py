"""The operator API: what each call does and tells, and its audit; then over several nodes."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from support.database import UNREACHABLE
from support.fleet import Fleet
from support.hands import Hands
from support.operator_client import OTHER, SECRET, Client, client
from tallybook import App
from tallybook.extra.operator import openapi
from tallybook.extra.operator.routes import OPERATIONS
from tallybook.web import Key, operator_api

CANARY = "canary-7f3a"


@pytest.fixture
async def call(dsn: str) -> AsyncIterator[Client]:
    keys = [Key("ops", SECRET, ("admin",)), Key("plain", OTHER, ("read", "enqueue", "operate"))]
    async with client(operator_api(App("shop", dsn=dsn), keys=keys)) as one:
        yield one


@pytest.fixture
def plain(call: Client) -> Client:
    return call.by("plain", OTHER)


def dead(db: Any, n: int = 1, queue: str = "mail", key: str | None = None) -> list[int]:
    """Make dead letters with a canary in their args and in their error."""
    hands, found = Hands(db, queue), []
    for _ in range(n):
        db.execute(
            "select tallybook.enqueue(%s, 'welcome', jsonb_build_object('secret', %s::text), unique_key => %s)",
            [queue, CANARY, key],
        )
        (job,) = hands.claim()
        hands.fail(job, final=True, type="SmtpError", message=f"said {CANARY}")
        found.append(job.id)
    return found


def audits(db: Any) -> list[tuple[Any, ...]]:
    return db.execute("select actor, via, action, target, done from tallybook.audits order by id").fetchall()


async def test_a_failed_job_is_retried(plain: Client, db: Any) -> None:
    """S2-12: a dead job gets another attempt, recorded with the key's id; a second retry is a conflict."""
    (job,) = dead(db)
    answer = await plain("POST", f"/jobs/{job}/retry")
    assert (answer.status_code, answer.json()) == (200, {"job": job, "attempt": 2})
    assert db.execute("select state from tallybook.job where id = %s", [job]).fetchone()[0] == "available"
    again = await plain("POST", f"/jobs/{job}/retry")
    assert (again.status_code, again.json()["code"]) == (409, "conflict")
    assert audits(db) == [("plain", "api", "retry", {"job": job}, {"attempt": 2})]
    assert (await plain("POST", "/jobs/999999/retry")).status_code == 404


async def test_dead_letters_are_retried_by_filter(plain: Client, db: Any) -> None:
    """S2-12: dead letters are retried by filter, after a dry run counts them; others stay; one row has the result."""
    ids, others = dead(db, 3), dead(db, 1, "pay")
    wanted = {"queue": "mail", "reason": "failed"}
    assert (await plain("POST", "/dead-letters/retry", {**wanted, "dry_run": True})).json() == {
        "dry_run": True,
        "matched": 3,
    }
    assert audits(db) == [] and db.execute("select count(*) from tallybook.dead").fetchone()[0] == 4
    assert (await plain("POST", "/dead-letters/retry", wanted)).json() == {"dry_run": False, "retried": 3, "refused": 0}
    states = dict(db.execute("select id, state from tallybook.job").fetchall())
    assert {states[job] for job in ids} == {"available"} and states[others[0]] == "dead"
    assert (await plain("POST", "/dead-letters/retry", wanted)).json()["retried"] == 0
    assert audits(db) == [("plain", "api", "retry_dead", wanted, {"retried": 3, "refused": 0})]


async def test_dead_letters_are_dropped_by_filter(call: Client, db: Any) -> None:
    """S2-12: dead letters are dropped by filter, up to a maximum; the filter's text and args are not in the audit."""
    dead(db, 3)
    wanted = {"args": {"secret": CANARY}, "error": CANARY, "max_jobs": 2}
    assert (await call("POST", "/dead-letters/drop", {**wanted, "dry_run": True})).json()["matched"] == 2
    assert (await call("POST", "/dead-letters/drop", wanted)).json() == {"dry_run": False, "dropped": 2}
    assert db.execute("select count(*) from tallybook.dead").fetchone()[0] == 1
    assert audits(db) == [("ops", "api", "drop_dead", {"args": True, "error": True}, {"dropped": 2})]


@pytest.mark.parametrize(("verb", "done"), [("retry", "retried"), ("drop", "dropped")])
async def test_all_dead_letters_are_asked_for_by_name(call: Client, db: Any, verb: str, done: str) -> None:
    """S2-12: a change of dead letters needs a filter or `all`, not both; the OpenAPI document says the same."""
    dead(db, 2)
    path = f"/dead-letters/{verb}"
    body = openapi.document()["paths"][path]["post"]["requestBody"]
    fits = Draft202012Validator(body["content"]["application/json"]["schema"]).is_valid
    for wrong in ({}, {"max_jobs": 1}, {"dry_run": True}, {"all": False}, {"all": True, "queue": "mail"}):
        assert (await call("POST", path, wrong)).json()["code"] == "invalid" and not fits(wrong), wrong
    assert body["required"] and audits(db) == []
    for good, count in (({"all": False, "queue": "pay"}, 0), ({"all": True}, 2)):
        assert (await call("POST", path, good)).json()[done] == count and fits(good)
    assert [row[3] for row in audits(db)] == [{"all": True}]


async def test_a_schedule_is_run_out_of_its_time(plain: Client, db: Any) -> None:
    """S2-12: a schedule is run now, paused and resumed; each change is in the audit, a call without effect is not."""
    db.execute("select tallybook.schedule_set('a/b ü', 'report', '{}', every => '1 day')")
    target = "/schedules/a%2Fb%20%C3%BC"
    ran = (await plain("POST", f"{target}/run")).json()
    assert (ran["what"], ran["schedule"]) == ("enqueued", "a/b ü")
    assert db.execute("select task from tallybook.job where id = %s", [ran["job"]]).fetchone()[0] == "report"
    changed = [(await plain("POST", f"{target}/{verb}")).json()["changed"] for verb in ("pause", "pause", "resume")]
    assert changed == [True, False, True]
    assert [row[2] for row in audits(db)] == ["schedule_run", "schedule_pause", "schedule_resume"]
    assert audits(db)[0][4] == {"what": "enqueued", "job": ran["job"], "jobs": 1}
    (listed,) = (await plain("GET", "/schedules")).json()["schedules"]
    assert (listed["name"], listed["every"], listed["paused_at"]) == ("a/b ü", 86400, None)
    assert (await plain("POST", "/schedules/none/run")).status_code == 404


async def test_queues_are_paused_and_resumed(plain: Client, db: Any) -> None:
    """S2-12: a queue is paused in the key's name and resumed; an unknown queue is 404."""
    db.execute("select tallybook.enqueue('mail', 'welcome')")
    assert (await plain("POST", "/queues/mail/pause")).json() == {"queue": "mail", "paused": True, "changed": True}
    (listed,) = (await plain("GET", "/queues")).json()["queues"]
    assert listed["paused_by"] == "plain"
    assert (await plain("POST", "/queues/mail/resume")).json()["changed"] is True
    assert (await plain("POST", "/queues/mail/resume")).json()["changed"] is False
    assert [row[2:4] for row in audits(db)] == [("pause", {"queue": "mail"}), ("resume", {"queue": "mail"})]
    assert (await plain("POST", "/queues/none/pause")).status_code == 404
    assert (await plain("POST", "/queues//pause")).status_code == 422


async def test_jobs_are_enqueued(plain: Client, db: Any) -> None:
    """S2-12: a job is enqueued with all its options, once per unique key; its args are not in the audit."""
    whole = {
        "queue": "mail", "task": "welcome", "args": {"secret": CANARY, "n": [1, 2.5, None, "ü"]}, "priority": 1,
        "run_at": "2031-01-31T09:00:00+01:00", "max_attempts": 3, "unique": "k", "unique_while": "queued",
        "order_key": "user:1", "expires_at": "2032-01-01T00:00:00Z", "headers": {"trace": "4711"},
        "links": {"user": 42},
    }  # fmt: skip
    made = await plain("POST", "/jobs", whole)
    assert (made.status_code, made.json()["created"]) == (201, True)
    job = made.json()["job"]
    row = db.execute(
        "select queue, task, args, priority, run_at::text, max_attempts, unique_key, order_key, headers, links"
        " from tallybook.job where id = %s",
        [job],
    ).fetchone()
    assert row[:4] == ("mail", "welcome", whole["args"], 1)
    assert row[4] == "2031-01-31 08:00:00+00" and row[5:8] == (3, "k", "user:1")
    assert row[8]["trace"] == "4711" and row[9] == {"user": "42"}
    again = await plain("POST", "/jobs", whole)
    assert (again.status_code, again.json()) == (200, {"job": job, "created": False})
    taken = await plain("POST", "/jobs", {**whole, "on_conflict": "raise"})
    assert (taken.status_code, taken.json()["code"]) == (409, "conflict")
    later = await plain("POST", "/jobs", {"queue": "mail", "task": "welcome", "delay": "5 min"})
    assert db.execute(
        "select run_at > now() + '4 min' from tallybook.job where id = %s", [later.json()["job"]]
    ).fetchone()[0]
    assert [row[2:] for row in audits(db)] == [
        ("enqueue", {"queue": "mail", "task": "welcome", "on_conflict": "skip"}, {"job": one, "created": True})
        for one in (job, later.json()["job"])
    ]
    assert CANARY not in str(audits(db))


async def test_a_job_is_cancelled(plain: Client, db: Any) -> None:
    """S2-12: a job or a dead letter is cancelled once; cancelling it again returns its state and is no change."""
    db.execute("select tallybook.enqueue('mail', 'welcome')")
    assert (await plain("POST", "/jobs/1/cancel", {"reason": "gone"})).json() == {"job": 1, "state": "cancelled"}
    assert (await plain("POST", "/jobs/1/cancel")).json()["state"] == "cancelled"
    (job,) = dead(db)
    assert (await plain("POST", f"/jobs/{job}/cancel")).json()["state"] == "cancelled"
    assert (await plain("POST", f"/jobs/{job}/cancel")).json()["state"] == "cancelled"
    assert audits(db) == [("plain", "api", "cancel", {"job": one}, {"state": "cancelled"}) for one in (1, job)]


async def test_only_admin_sees_what_jobs_carry(call: Client, plain: Client, db: Any) -> None:
    """S2-12: args, results and errors are shown only to keys with scope admin; other keys cannot filter by them."""
    (job,) = dead(db)
    db.execute("select tallybook.enqueue('mail', 'welcome', jsonb_build_object('secret', %s::text))", [CANARY])
    (retrying,) = (one.id for one in Hands(db, "mail").claim())
    targets = [f"/jobs/{job}", f"/jobs/{job}/why", "/dead-letters"]
    for target in targets:
        shown, hidden = await call("GET", target), await plain("GET", target)
        assert (shown.status_code, hidden.status_code) == (200, 200)
        assert CANARY in shown.text and CANARY not in hidden.text
    assert (await plain("GET", f"/jobs/{retrying}/why")).json()["reasons"][0]["reason"] == "running"
    shown = (await plain("GET", f"/jobs/{job}")).json()
    assert shown["died_of"] == "failed"
    assert shown["enqueued_at"] < shown["last_attempt_at"] < shown["updated_at"] == shown["ended_at"]
    assert (await plain("GET", "/dead-letters")).json()["dead_letters"][0]["error_type"] == "SmtpError"
    for method, target, document in (
        ("GET", "/dead-letters?error=canary", None),
        ("POST", "/dead-letters/retry", {"args": {"secret": CANARY}, "dry_run": True}),
        ("POST", "/dead-letters/drop", {"error": "canary", "dry_run": True}),
    ):
        assert (await plain(method, target, document)).status_code == 403
        assert (await call(method, target, document)).status_code == 200


@pytest.mark.parametrize("reason", ["cancelled", "retrying", "cancel_pending"])
async def test_why_does_not_tell_errors(call: Client, plain: Client, db: Any, reason: str) -> None:
    """S2-12: `why` shows a key without admin no text that a person wrote or a handler raised."""
    hands = Hands(db, "mail")
    db.execute("select tallybook.enqueue('mail', 'welcome')")
    if reason == "retrying":
        (job,) = hands.claim()
        hands.fail(job, "1 hour", type="SmtpError", message=CANARY)
    else:
        db.execute("select tallybook.cancel(1, %s)", [CANARY])
        if reason == "cancelled":
            hands.start()
    found = (await call("GET", "/jobs/1/why")).json()["reasons"]
    assert found[0]["reason"] == reason and CANARY in str(found)
    bare = (await plain("GET", "/jobs/1/why")).json()["reasons"]
    assert [one["reason"] for one in bare] == [one["reason"] for one in found]
    assert all(one["explanation"] and "details" not in one for one in bare) and CANARY not in str(bare)


async def test_counts_workers_and_audits_are_read(call: Client, db: Any) -> None:
    """S2-12: the API returns counts, live workers and the audit, the audit page by page."""
    db.execute("select tallybook.enqueue('mail', 'welcome'), tallybook.enqueue('pay', 'charge')")
    found = {(one["queue"], one["task"]): one["available"] for one in (await call("GET", "/counts")).json()["counts"]}
    assert found == {("mail", "welcome"): 1, ("pay", "charge"): 1}
    db.execute("select tallybook.worker_start('web-1', '{mail}')")
    (worker,) = (await call("GET", "/workers")).json()["workers"]
    assert (worker["name"], worker["queues"]) == ("web-1", ["mail"])
    assert (await call("GET", "/workers?queue=pay")).json()["workers"] == []
    for verb in ("pause", "resume"):
        await call("POST", f"/queues/mail/{verb}")
    (newest,) = (await call("GET", "/audits?max_rows=1")).json()["audits"]
    (older,) = (await call("GET", f"/audits?max_rows=1&before={newest['id']}")).json()["audits"]
    assert (newest["action"], older["action"]) == ("resume", "pause")
    assert len((await call("GET", "/audits?action=pause&actor=ops")).json()["audits"]) == 1


async def test_a_failed_audit_row_takes_its_change_along(call: Client, db: Any) -> None:
    """S2-12: if the audit row cannot be written, the change is undone."""
    db.execute("select tallybook.enqueue('mail', 'welcome')")
    db.execute("alter table tallybook.audit add constraint never check (false) not valid")
    assert (await call("POST", "/queues/mail/pause")).status_code in (422, 500)
    assert db.execute("select paused_at from tallybook.queues where name = 'mail'").fetchone()[0] is None
    db.execute("alter table tallybook.audit drop constraint never")
    assert (await call("POST", "/queues/mail/pause")).status_code == 200


@pytest.mark.slow
async def test_a_change_that_waits_too_long_is_503(call: Client, db: Any, connect: Any) -> None:
    """A change waits at most 2 s for a lock; then it is 503, and nothing has changed."""
    db.execute("select tallybook.queue_set('mail')")
    other = connect(autocommit=False)
    other.execute("select tallybook.pause('mail')")
    answer = await call("POST", "/queues/mail/pause")
    assert (answer.status_code, answer.json()["code"]) == (503, "slow")
    other.rollback()
    assert audits(db) == []


def test_every_change_is_by_post_and_no_reading_is() -> None:
    """Every read is a GET without a body, and every change is a POST."""
    for one in OPERATIONS:
        assert (one.method == "POST") is (one.changes is not None) is (one.reads is None)
        assert one.method == "POST" or not one.in_body
        assert one.scope != "read" or one.method == "GET"


@pytest.fixture
async def ask(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    """A client with an admin key, at an API of three nodes of which west is away."""
    monkeypatch.setenv("TALLYBOOK_NODES", fleet.named(west=UNREACHABLE))
    api = operator_api(App("shop"), keys=[Key("ops", SECRET, ("admin",))], dsn=fleet.dsn, nodes="all")
    async with client(api) as one:
        yield one


async def test_lists_are_of_all_nodes(fleet: Fleet, ask: Client) -> None:
    """Each row of a list has its node, `away` names a node that did not answer, and ?node= selects one."""
    for number in (1, 2):
        fleet.enqueue(number, "mail", "send")
    found = (await ask("GET", "/counts")).json()
    assert [(one["node"], one["queue"], one["available"]) for one in found["counts"]] == [
        ("north", "mail", 1), ("south", "mail", 1),
    ]  # fmt: skip
    assert found["away"] == ["west"]
    south = (await ask("GET", "/queues?node=south")).json()
    assert [one["node"] for one in south["queues"]] == ["south"] and south["away"] == []
    away, unknown = await ask("GET", "/queues?node=west"), await ask("GET", "/queues?node=east")
    assert (away.status_code, unknown.status_code) == (503, 404) and "geheim" not in away.text


async def test_the_document_says_where_a_node_is_named(ask: Client) -> None:
    """Over several nodes, lists may name a node and changes must; an API of one database has no such parameter."""

    def told(document: dict[str, Any], path: str, method: str) -> list[bool]:
        return [one["required"] for one in document["paths"][path][method]["parameters"] if one["name"] == "node"]

    many, one = (await ask.http.get("/openapi.json")).json(), openapi.document()
    assert (told(many, "/queues", "get"), told(many, "/jobs", "post"), told(many, "/jobs/{job}", "get")) == (
        [False], [True], [],
    )  # fmt: skip
    assert told(one, "/queues", "get") == told(one, "/jobs", "post") == []


async def test_lists_are_as_the_document_says(fleet: Fleet, ask: Client) -> None:
    """Over several nodes, the document has the members of the answers: `away`, and the `node` of each row."""
    document = (await ask.http.get("/openapi.json")).json()
    for path in ("/queues", "/counts", "/audits", "/workers", "/schedules", "/dead-letters"):
        good = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
        (rows,) = (name for name in good["schema"]["properties"] if name != "away")
        assert set(good["schema"]["required"]) == set((await ask("GET", path)).json()) == {rows, "away"}
        item = good["schema"]["properties"][rows]["items"]
        assert "node" in item["required"] and item["properties"]["node"]["type"] == "string"
        assert set(good["example"][rows][0]) == set(item["required"]) and good["example"]["away"] == []
        one = openapi.document()["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert list(one["properties"]) == [rows] and "node" not in one["properties"][rows]["items"]["properties"]


async def test_newest_first_and_no_more_than_asked_for(fleet: Fleet, ask: Client) -> None:
    """A list by time is in order across all nodes, and its limit holds for all of them together."""
    for number in (1, 2):
        fleet.run(number, "select tallybook.queue_set('mail')")
    for node in ("south", "north", "south"):
        await ask("POST", f"/queues/mail/pause?node={node}")
        await ask("POST", f"/queues/mail/resume?node={node}")
    rows = (await ask("GET", "/audits?max_rows=3")).json()["audits"]
    assert [(row["node"], row["action"]) for row in rows] == [
        ("south", "resume"),
        ("south", "pause"),
        ("north", "resume"),
    ]


async def test_a_whole_second_is_before_its_microseconds(fleet: Fleet, ask: Client) -> None:
    """Rows of several nodes are sorted by instant, although the text of a whole second has no fraction."""
    for number, at in ((1, "09:00:00Z"), (2, "09:00:00.000001Z")):
        fleet.run(number, "select tallybook.audit_add('ada', 'web', 'pause', at => %s)", f"2026-01-31T{at}")
    rows = (await ask("GET", "/audits")).json()["audits"]
    assert [row["node"] for row in rows] == ["south", "north"]


async def test_pages_of_dead_letters_of_all_nodes_skip_none(fleet: Fleet, ask: Client) -> None:
    """Dead letters of several nodes that died at one instant are in the order of their ids, so no page skips one."""
    jobs = [fleet.die(number) for number in (1, 2)]
    for number in (1, 2):
        fleet.run(number, "update tallybook.dead set died_at = '2026-01-31T09:00:00Z'")
    page, found = "/dead-letters?max_jobs=1", []
    for _ in jobs:
        (letter,) = (await ask("GET", page)).json()["dead_letters"]
        found.append(letter["job"])
        page = f"/dead-letters?max_jobs=1&before={letter['died_at']}&before_id={letter['job']}"
    assert found == jobs[::-1]


async def test_pages_of_the_audit_are_of_one_node(fleet: Fleet, ask: Client) -> None:
    """Over several nodes, the audit is refused with `before` but without `node`: each node numbers its own rows."""
    for number in (1, 2):
        fleet.run(number, "select tallybook.audit_add('ada', 'web', 'pause') from generate_series(1, 2)")
    refused = await ask("GET", "/audits?before=2")
    assert refused.status_code == 422 and "node" in refused.json()["hint"]
    page = (await ask("GET", "/audits?before=2&node=south")).json()["audits"]
    assert [(row["node"], row["id"]) for row in page] == [("south", 1)]
    parameters = (await ask.http.get("/openapi.json")).json()["paths"]["/audits"]["get"]["parameters"]
    (before,) = (one["description"] for one in parameters if one["name"] == "before")
    assert before.endswith("Only with node, if the API serves several nodes.")


async def test_an_id_leads_to_its_node(fleet: Fleet, ask: Client) -> None:
    """A job is found, explained and cancelled on its node; an id of an unknown node is a 404."""
    job = fleet.enqueue(2, "mail", "send")
    assert (await ask("GET", f"/jobs/{job}")).json()["id"] == job
    assert (await ask("GET", f"/jobs/{job}/why")).status_code == 200
    assert (await ask("POST", f"/jobs/{job}/cancel", {})).json() == {"job": job, "state": "cancelled"}
    assert fleet.run(2, "select action from tallybook.audits") == [("cancel",)]
    assert (await ask("GET", f"/jobs/{9 << 43}")).status_code == 404


async def test_what_changes_something_names_its_node(fleet: Fleet, ask: Client) -> None:
    """Enqueue acts on the node that is named; without one it is refused, and nothing is changed."""
    refused = await ask("POST", "/jobs", {"queue": "mail", "task": "send"})
    assert refused.status_code == 422 and refused.json()["detail"] == "node is missing"
    put = (await ask("POST", "/jobs?node=south", {"queue": "mail", "task": "send"})).json()
    assert put["job"] >> 43 == 2
    assert fleet.run(1, "select count(*) from tallybook.entry") == [(0,)]


async def test_a_request_is_served_once_by_each_node(fleet: Fleet, ask: Client) -> None:
    """A repeated request is refused over several nodes as with one database."""
    nonce = "0123456789abcdef0123"
    assert (await ask("GET", "/queues", nonce=nonce)).status_code == 200
    assert (await ask("GET", "/queues", nonce=nonce)).json()["code"] == "replayed"


async def test_one_database_takes_no_node(dsn: str) -> None:
    """An API of one database refuses ?node=, because its caller means another database."""
    api = operator_api(App("shop"), keys=[Key("ops", SECRET, ("admin",))], dsn=dsn)
    async with client(api) as one:
        assert (await one("GET", "/queues?node=south")).status_code == 422
        assert (await one("GET", "/queues")).json() == {"queues": []}
