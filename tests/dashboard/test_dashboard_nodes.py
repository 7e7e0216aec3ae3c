"""The dashboard of several nodes: one view of all, ids that lead to their nodes, and behavior while one is away."""

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from support.chromium import DESK, PHONE, browser, needed
from support.cli import Command
from support.dashboard import Visitor, audits, routes, visiting, walk
from support.database import UNREACHABLE
from support.fleet import Fleet
from support.proxy import Proxy
from support.samples import parsed, value
from support.waiting import wait_until
from tallybook import App
from tallybook.extra.dashboard import nodes as _nodes
from tallybook.web import dashboard


@asynccontextmanager
async def visited(monkeypatch: pytest.MonkeyPatch, fleet: Fleet, **others: str) -> AsyncIterator[Visitor]:
    """A visitor with all rights, on a dashboard of all nodes."""
    monkeypatch.setenv("TALLYBOOK_NODES", fleet.named(**others))
    site = dashboard(App("shop"), dsn=fleet.dsn, nodes="all", read_only=False)
    async with aclosing(site), visiting(site) as visitor:
        yield visitor


def listed(page: str) -> list[int]:
    """The jobs of a page, in its order."""
    return [int(one) for one in re.findall(r'<a class="id" href="/job/(\d+)', page)]


async def test_lists_are_of_all_nodes(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs and dead letters are merged by time, each with its node; queues are summed; ?node= selects one node."""
    dead = [fleet.die(number) for number in (2, 1)]
    put = [fleet.enqueue(number, "mail") for number in (3, 1, 2, 2)]
    async with visited(monkeypatch, fleet) as visitor:
        jobs = await visitor.get("/jobs?queue=mail")
        assert listed(jobs.text) == put[::-1] and jobs.text.count('<span class="badge node">south</span>') == 2
        assert listed((await visitor.get("/dead")).text) == dead[::-1]
        assert listed((await visitor.get("/jobs?queue=mail&node=south")).text) == put[:1:-1]
        queues = (await visitor.get("/queues")).text
        assert re.search(r">mail</a></th>\s*<td class=\"n\">4</td>", queues)
        overview = (await visitor.get("/")).text
        assert '<strong title="4">4</strong>' in overview and '<strong title="2">2</strong>' in overview
        for name in ("self", "path", "root"):  # the names of what makes the links to other nodes
            assert (await visitor.get(f"/jobs?{name}=x")).status == 200
        strange = await visitor.get("/jobs?node=nowhere")
        assert strange.status == 400 and "unknown node &#39;nowhere&#39;" in strange.text


@pytest.mark.parametrize(
    "spread", [(1, 2, 3) * 40, (1,) * 30 + (2,) * 90, (3,) * 110 + (1, 2) * 5], ids=["even", "two", "one"]
)
async def test_pages_of_jobs_go_on_behind_one_another(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, spread: tuple[int, ...]
) -> None:
    """120 jobs make three pages, in order, without repeats or gaps, however they are spread over three nodes."""
    put = [fleet.enqueue(number, "mail") for number in spread]
    found: list[int] = []
    async with visited(monkeypatch, fleet) as visitor:
        address = "/jobs"
        for _ in range(3):
            page = await visitor.get(address)
            found += listed(page.text)
            address = next((one for one in page.links if "after=" in one), "")
    assert found == put[::-1] and not address


async def test_a_job_and_what_is_done_to_it_by_its_id(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's page, its buttons and its audit row are on the node of its id, even if another node is away."""
    job = fleet.enqueue(2, "mail")
    async with visited(monkeypatch, fleet, north=UNREACHABLE) as visitor:
        assert f"Job {job}" in (await visitor.get(f"/job/{job}")).text
        await visitor.post("/job/cancel", job=job, reason="", back=f"/job/{job}")
        assert f"Job {job} is cancelled." in (await visitor.get(f"/job/{job}")).text
        unknown = await visitor.get(f"/job/{9 << 43}")
    assert fleet.state(job) == "cancelled"
    with fleet.connect(2) as conn:
        assert [row[1] for row in audits(conn)] == ["job.cancel"]
    assert unknown.status == 404 and "node 9" in unknown.text


async def test_many_jobs_are_reported_by_node(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that goes away between page and action is reported; jobs of the other nodes are cancelled."""
    with Proxy(fleet.dsns[1]) as proxy:
        jobs = [fleet.enqueue(number, "mail") for number in (1, 2, 3)]
        async with visited(monkeypatch, fleet, south=proxy.dsn) as visitor:
            page = await visitor.get("/jobs")
            assert listed(page.text) == jobs[::-1]
            proxy.refusing = True
            proxy.cut()
            await visitor.post("/jobs/cancel", job=jobs, back="/jobs")
            told = (await visitor.get("/jobs")).text
    assert "north: 1 job cancelled." in told and "west: 1 job cancelled." in told and "south: " in told
    assert [fleet.state(job) for job in jobs] == ["cancelled", "available", "cancelled"]


async def test_a_page_of_one_node(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ?node= a page of one node, and its buttons, are for that node only."""
    for number in (1, 2):
        fleet.run(number, "select tallybook.queue_set('mail')")
    async with visited(monkeypatch, fleet) as visitor:
        page = await visitor.get("/queue?name=mail&node=south")
        assert all("node=south" in one for one in page.forms if one.startswith("/queue/"))
        await visitor.post("/queue/pause?node=south", name="mail", back="/queue?name=mail&node=south")
        paused = [fleet.run(number, "select paused_at is not null from tallybook.queues") for number in (1, 2)]
        assert paused == [[(False,)], [(True,)]]
        assert "since" in (await visitor.get("/queues")).text or "paused" in (await visitor.get("/queues")).text


async def test_a_silent_node_holds_up_one_page_for_two_seconds(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that accepts connections but never answers delays one page by 2 s; then it is named as away."""
    job = fleet.enqueue(1, "mail")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dsn = f"host=127.0.0.1 port={silent.getsockname()[1]} dbname=shop user=u"
        async with visited(monkeypatch, fleet, west=dsn) as visitor:
            await visitor.get("/login")
            began = time.monotonic()
            first = await visitor.get("/jobs")
            took, began = time.monotonic() - began, time.monotonic()
            again = [
                await visitor.get(page)
                for page in ("/jobs", "/", "/dead", "/queues", "/workers", "/schedules", "/nodes")
            ]
            later = time.monotonic() - began
    assert listed(first.text) == [job] and "Node west does not answer: no answer within 2 s" in first.text
    assert took < 6 and later < 2, (took, later)
    assert all(page.status == 200 and "west" in page.text for page in again)


async def test_a_node_that_falls_silent_holds_up_one_page_for_two_seconds(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that falls silent on open connections delays one page by 2 s; then it is named as away."""
    with Proxy(fleet.dsns[1]) as proxy:
        async with visited(monkeypatch, fleet, south=proxy.dsn) as visitor:
            assert "does not answer" not in (await visitor.get("/jobs")).text
            proxy.silent = True
            began = time.monotonic()
            page = (await visitor.get("/jobs")).text
            took, proxy.silent = time.monotonic() - began, False
            proxy.cut()
    assert "Node south does not answer: no answer within 2 s" in page and 2 <= took < 4, took


async def test_a_node_that_comes_back_is_found(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a node is away the overview shows its last figures and their age; it is found when it is back."""
    for number in (1, 2):
        fleet.enqueue(number, "mail")
    with Proxy(fleet.dsns[1]) as proxy:
        async with visited(monkeypatch, fleet, south=proxy.dsn) as visitor:
            assert "does not answer" not in (await visitor.get("/")).text
            proxy.refusing = True
            proxy.cut()
            gone = (await visitor.get("/")).text
            assert re.search(
                r"Node <a href=\"/nodes\">south</a> does not answer: .* Its figures are [\d.]+ m?s old", gone
            )
            assert '<strong title="2">2</strong>' in gone
            nodes = (await visitor.get("/nodes")).text
            assert nodes.count(">away</span>") == 1
            proxy.refusing, until = False, time.monotonic() + 30
            while ">away</span>" in (await visitor.get("/nodes")).text:
                assert time.monotonic() < until, "it is found again"
                await asyncio.sleep(0.05)


async def test_what_is_live_is_of_all_nodes(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of overview, workers and nodes cover all nodes, those of a job and a worker one, while a node is away."""
    for number in (1, 2):
        fleet.run(number, f"select tallybook.worker_start('w{number}', '{{queue{number}}}')")
    job = fleet.enqueue(2, "mail")
    async with visited(monkeypatch, fleet, west=UNREACHABLE) as visitor:
        live = visitor.site.live
        wanted = ["overview", "point", "workers", "nodes", f"job:{job}", "worker:1@south", "overview:south"]
        said: dict[str, str] = {}
        async with asyncio.timeout(60):
            async for chunk in await live.watch(wanted):
                lines = chunk.decode().split("\n")
                if lines[0].startswith("event: "):
                    said[lines[0][7:]] = chunk.decode()
                if set(wanted) <= set(said):
                    break
    assert "w1" in said["workers"] and "w2" in said["workers"] and "queue2" in said["worker:1@south"]
    assert ">west<" in said["overview"] and ">west<" not in said["overview:south"] and ">west<" in said["nodes"]
    assert '"available": 1' in said["point"] and "available" in said[f"job:{job}"]


async def test_metrics_have_the_node(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each series has the label node; an absent node has tallybook_up 0, and the others have their numbers."""
    fleet.enqueue(2, "mail", "send")
    async with visited(monkeypatch, fleet, west=UNREACHABLE) as visitor:
        found = parsed((await visitor.get("/metrics")).text)
        ready = await visitor.get("/readyz")
    assert [value(found, "tallybook_up", node=name) for name in ("north", "south", "west")] == [1, 1, 0]
    job = {"node": "south", "queue": "mail", "state": "available", "task": "send"}
    assert value(found, "tallybook_jobs", **job) == 1 and ready.status == 200


async def test_every_page_works_over_nodes(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every linked page works, over all nodes and for each node."""
    fleet.die(1)
    fleet.die(2)
    fleet.enqueue(3, "mail")
    async with visited(monkeypatch, fleet) as visitor:
        walked = await walk(visitor)
        assert {page: one.status for page, one in walked.items() if one.status != 200} == {}
        assert any(page.startswith("/queue?") for page in walked) and "/nodes" in walked
        assert "/nodes" in routes(visitor.site, "GET")


async def test_the_audit_is_of_all_nodes(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Audit rows of all nodes are listed by time, each with its node, and pages continue without gaps."""
    for n in range(120):
        fleet.run(1 + n % 3, "select tallybook.audit_add('ada', 'api', 'pause', %s::jsonb, '{}')", f'{{"n": {n}}}')
    found: list[int] = []
    async with visited(monkeypatch, fleet) as visitor:
        address = "/audit"
        while address:
            page = await visitor.get(address)
            assert '<span class="badge node">south</span>' in page.text
            found += map(int, re.findall(r">n (\d+)<", page.text))
            address = next((one for one in page.links if "after=" in one), "")
        south = (await visitor.get("/audit?node=south")).text
    assert found == list(range(119, -1, -1))
    assert re.findall(r">n (\d+)<", south) == [str(n) for n in range(118, 0, -3)]


async def test_subjects_are_of_all_nodes(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subjects are listed node by node, each links to its node, and pages neither skip nor repeat one."""
    push = "select tallybook.subject_push('q', 't', 's' || to_char(n, 'FM000')) from generate_series(1, %s) n"
    for number in (1, 2, 3):
        fleet.run(number, push, 70)
    found: list[tuple[str, str]] = []
    async with visited(monkeypatch, fleet) as visitor:
        pages, address = 0, "/subjects"
        while address:
            page = await visitor.get(address)
            found += re.findall(r'href="/subject\?task=t&amp;queue=q&amp;name=(s\d+)&amp;node=(\w+)', page.text)
            address, pages = next((one for one in page.links if "after_name=" in one), ""), pages + 1
        one = await visitor.get("/subject?task=t&name=s001&node=west")
    names = [f"s{n:03}" for n in range(1, 71)]
    assert found == [(name, node) for node in ("north", "south", "west") for name in names] and pages == 3
    assert one.status == 200


async def test_a_queue_has_its_numbers_of_all_nodes(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue's page has a row per node and the sum; a queue that the home lacks redirects to a node with it."""
    for number, jobs in ((1, 1), (2, 3)):
        for _ in range(jobs):
            fleet.enqueue(number, "mail")
    fleet.enqueue(3, "sms")
    async with visited(monkeypatch, fleet) as visitor:
        page = (await visitor.get("/queue?name=mail")).text
        rows = re.findall(r'<tr><th scope="row">(?:<a [^>]*>)?(\w+)(?:</a>)?</th><td class="n">(\d+)</td>', page)
        assert rows == [("north", "1"), ("south", "3"), ("all", "4")]
        assert "The rest of this page shows node north." in page
        south = (await visitor.get("/queue?name=mail&node=south")).text
        assert "On all nodes" not in south
        assert "This page shows node south" in (await visitor.get("/limits?node=south")).text
        elsewhere = await visitor.get("/queue?name=sms")
        assert elsewhere.status == 307 and elsewhere.headers["location"].endswith("/queue?name=sms&node=west")
        assert (await visitor.get("/queue?name=nothing")).status == 404


async def test_a_named_node_that_is_removed_leaves_the_pages(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of named nodes, one that is removed from the list is left out, and a wrong list is a log line."""
    monkeypatch.setattr(_nodes, "_GOOD", 0.0)
    shown = _nodes.Nodes(App("shop", dsn=fleet.dsn), which="north,south")

    async def names() -> list[str]:
        return [at.name for at in await shown.known()]

    try:
        assert await names() == ["north", "south"]
        fleet.run(1, "select tallybook.node_remove('south')")
        async with asyncio.timeout(30):
            while await names() != ["north"]:  # noqa: ASYNC110  read in the background
                await asyncio.sleep(0.01)
            monkeypatch.setenv("TALLYBOOK_NODES", "no node")
            while "the list of nodes cannot be read" not in caplog.text:
                await names()
                await asyncio.sleep(0.01)
        assert await names() == ["north"]
    finally:
        await shown.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_is_live_over_nodes(fleet: Fleet, tmp_path: Path) -> None:
    """Figures of all nodes update without a reload; an absent node, with its figures' age, is shown until it is back.

    No page complains, on a phone in light or on a desktop in dark.
    """

    def available() -> str:
        """The number of the overview, as it is shown now."""
        return str(look.run("return document.querySelector('.tile.available strong').textContent"))

    needed()
    with browser() as look, Proxy(fleet.dsns[2]) as proxy:
        nodes = fleet.named(west=proxy.dsn)
        job = fleet.enqueue(3, "mail")
        words = ("web", "--port", "0", "--nodes", "all", "--operate")
        with Command(tmp_path, *words, dsn=fleet.dsn, TALLYBOOK_NODES=nodes) as web:
            site = web.address()
            look.get(f"{site}/")
            wait_until(lambda: available() == "1", "the job of west is counted")
            fleet.enqueue(2, "mail")
            wait_until(lambda: available() == "2", "that of south is, too, without a reload")
            look.get(f"{site}/job/{job}")
            look.press(look.find("form[action^='/job/cancel'] button"))
            assert f"Job {job} is cancelled." in look.text
            assert fleet.state(job) == "cancelled"
            look.get(f"{site}/")
            proxy.refusing = True
            proxy.cut()
            wait_until(
                lambda: "Node west does not answer" in look.text and "old" in look.text, "the page says so by itself"
            )
            proxy.refusing = False
            wait_until(lambda: "Node west does not answer" not in look.text, "and that it is back")
            for scheme, size in (("light", PHONE), ("dark", DESK)):
                look.scheme(scheme)
                look.size(*size)
                for page in ("", "nodes", "jobs", "dead", "queues", "schedules", "workers", "limits?node=south"):
                    look.get(f"{site}/{page}")
                    wide = look.run("return document.documentElement.scrollWidth <= window.innerWidth")
                    assert wide, f"{page} is wider than the window"
                    assert look.complaints() == [], page
