"""Verbs on jobs follow an id to its node, from the app's own database and from a handler on another node."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from support.database import UNREACHABLE
from support.fleet import Fleet
from support.hands import Hands
from tallybook import App
from tallybook._model.at_node import At, at_node
from tallybook.errors import QueueUnavailable, UnknownJob


@pytest.fixture
def shop(fleet: Fleet) -> App:
    """An app whose DSN is the first node's, which has the table of nodes."""
    return App("shop", dsn=fleet.dsn)


@pytest.fixture(params=["of no node", "on the third node"])
def place(request: Any, fleet: Fleet) -> Iterator[None]:
    """Where the call is made: outside of any worker, or in a handler for a job of the third node."""
    if request.param == "of no node":
        yield
        return
    token = at_node.set(At("west", fleet.dsns[2], fleet.dsn))
    yield
    at_node.reset(token)


@pytest.mark.usefixtures("place")
@pytest.mark.anyio
async def test_one_job(fleet: Fleet, shop: App) -> None:
    """State, reasons and details of a job are read on the node that its id names, awaited."""
    job = fleet.enqueue(2, "mail")
    assert await shop.jobs.state(job) == "available"
    assert [one.reason for one in await shop.jobs.why(job)] == [
        row[0] for row in fleet.run(2, "select reason from tallybook.why(%s)", job)
    ]
    assert [event.event for event in await shop.jobs.trace(job=job)] == ["enqueued"]
    assert await shop.jobs.trace(job=job + 1) == []
    assert (await shop.get(job)).id == job


@pytest.mark.usefixtures("place")
def test_one_job_without_an_event_loop(fleet: Fleet, shop: App) -> None:
    """`.sync()` runs the same verbs there, and drops a dead letter."""
    job = fleet.enqueue(2, "mail")
    assert shop.jobs.state(job).sync() == "available"
    assert "unknown" not in [one.reason for one in shop.jobs.why(job).sync()]
    die(fleet, 2, job)
    assert shop.dead.drop(job).sync() is True
    assert fleet.run(2, "select count(*) from tallybook.dead_letters()") == [(0,)]
    assert shop.dead.drop(job).sync() is False


def die(fleet: Fleet, number: int, *jobs: int) -> None:
    """Make the open jobs of a node, which are these, dead letters: they fail for good."""
    with fleet.connect(number) as conn:
        hands = Hands(conn, "mail")
        claimed = hands.claim()
        assert [job.id for job in claimed] == [*jobs] and {hands.fail(job, final=True) for job in claimed} == {"dead"}


@pytest.mark.usefixtures("place")
@pytest.mark.anyio
async def test_many_jobs_of_several_nodes(fleet: Fleet, shop: App) -> None:
    """One call changes each job on its node and reports all, lowest id first; an id of no node is unknown."""
    jobs = [fleet.enqueue(number, "mail") for number in (3, 1, 2, 2)]
    nowhere = 9 << 43
    done = await shop.jobs.cancel([*jobs, nowhere], "withdrawn")
    assert [(one.job, one.done) for one in done] == [
        *((job, "cancelled") for job in sorted(jobs)), (nowhere, "unknown"),
    ]  # fmt: skip
    assert "node 9" in (done[-1].detail or "")
    assert [fleet.state(job) for job in jobs] == ["cancelled"] * 4
    retried = await shop.jobs.retry(jobs)
    assert [one.done for one in retried] == ["retried"] * 4
    assert [fleet.state(job) for job in jobs] == ["available"] * 4


@pytest.mark.usefixtures("place")
def test_many_jobs_without_an_event_loop(fleet: Fleet, shop: App) -> None:
    """One `.sync()` drops dead letters of two nodes; an open job is refused on its node."""
    jobs = [fleet.enqueue(number, "mail") for number in (1, 2, 2)]
    die(fleet, 1, jobs[0])
    open_ = fleet.enqueue(3, "mail")
    die(fleet, 2, *jobs[1:])
    done = shop.jobs.drop([*jobs, open_]).sync()
    assert [(one.job, one.done) for one in done] == [*((job, "dropped") for job in jobs), (open_, "refused")]


@pytest.mark.anyio
async def test_a_node_that_does_not_answer(fleet: Fleet, shop: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of an unreachable node are refused with the node's name, and the others are cancelled."""
    fleet.add("south", UNREACHABLE.replace(" password=geheim", ""), 2)
    jobs = [fleet.enqueue(number, "mail") for number in (1, 2, 3)]
    done = await shop.jobs.cancel(jobs)
    assert [one.done for one in done] == ["cancelled", "refused", "cancelled"]
    assert (done[1].detail or "").startswith("node south does not answer: ")
    assert fleet.state(jobs[1]) == "available"


def test_a_node_that_fails(fleet: Fleet, shop: App) -> None:
    """Jobs of a node without the schema are refused with its name and the error, and the others are cancelled."""
    jobs = [fleet.enqueue(number, "mail") for number in (1, 2, 3)]
    fleet.run(2, "alter schema tallybook rename to set_aside")
    done = shop.jobs.cancel(jobs).sync()
    assert [one.done for one in done] == ["cancelled", "refused", "cancelled"]
    assert (done[1].detail or "").startswith("node south: ")


@pytest.mark.anyio
async def test_the_apps_own_database_does_not_answer(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """If TALLYBOOK_NODES lists the nodes, jobs of the others are found; those of the app's own database are refused."""
    shop = App("shop", dsn=UNREACHABLE)
    mine, job = (fleet.enqueue(number, "mail") for number in (1, 2))
    with pytest.raises(QueueUnavailable):
        await shop.get(job)
    monkeypatch.setenv("TALLYBOOK_NODES", f"north={UNREACHABLE}\nsouth={fleet.dsns[1]}")
    assert (await shop.get(job)).id == job
    assert [(one.job, one.done) for one in await shop.jobs.cancel([mine, job])] == [
        (mine, "refused"), (job, "cancelled"),
    ]  # fmt: skip
    with pytest.raises(QueueUnavailable, match="port=1"):
        await shop.get(mine)
    with pytest.raises(QueueUnavailable, match="port=1"):
        await shop.jobs.cancel([mine])


@pytest.mark.anyio
async def test_a_connection_is_where_the_verb_runs(fleet: Fleet, shop: App) -> None:
    """On the caller's connection a verb runs in that transaction only, and looks at no other node."""
    job = fleet.enqueue(2, "mail")
    async with await psycopg.AsyncConnection.connect(fleet.dsn) as conn:
        with pytest.raises(UnknownJob):
            await shop.jobs.state(job).on(conn)
        assert [one.done for one in await shop.jobs.cancel([job]).on(conn)] == ["unknown"]
    assert fleet.state(job) == "available"
