"""The operator API over several nodes: combined lists, ids that lead to their node, and the `node` parameter."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.database import UNREACHABLE
from support.fleet import Fleet
from support.operator_client import SECRET, Client, client
from tallybook import App
from tallybook.extra.operator import openapi
from tallybook.web import Key, operator_api

pytestmark = [pytest.mark.anyio, pytest.mark.direct("opens three databases by their DSNs")]


@pytest.fixture
async def ask(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    """A client with an admin key, at an API of three nodes of which west is away."""
    monkeypatch.setenv("TALLYBOOK_NODES", fleet.named(west=UNREACHABLE))
    api = operator_api(App("shop"), keys=[Key("ops", SECRET, ("admin",))], dsn=fleet.dsn, nodes="all")
    async with client(api) as one:
        yield one
    await api.close()


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
    await api.close()
