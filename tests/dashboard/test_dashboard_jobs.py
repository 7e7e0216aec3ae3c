"""The dashboard's pages of jobs, dead letters and subjects: what they show of a job, and what their forms do."""

import json
import re
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import httpx2
import psycopg
import pytest

import support.dashboard
from support.dashboard import audits
from support.hands import Hands
from tallybook import App, Kill
from tallybook.errors import ConfigError
from tallybook.extra.dashboard import bulk_actions, database
from tallybook.testing import drain_async
from tallybook.web import dashboard

SECRET = "hunter2-never-shown"


@pytest.fixture
def app(dsn: str) -> App:
    app = App("shop", dsn=dsn)

    @app.task(queue="mail", summary="Note {what}")
    async def note(what: str) -> dict[str, str]:
        return {"said": what, "api_key": SECRET}

    @app.task(max_attempts=1, queue="charges")
    async def charge(user: str, password: str = SECRET) -> None:
        raise RuntimeError(f"no card: {user}")

    @app.task(queue="feeds", max_attempts=1)
    async def feed(url: str) -> None:
        if "gone" in url:
            raise Kill(f"it is gone: {url}")
        raise ValueError(f"odd: {url}")

    return app


class Page(HTMLParser):
    """A page as a browser parses it: its elements, its text, and the fields of its forms."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.said = ""
        self.hidden: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.said += " " if tag in ("td", "th", "time") else ""
        self.tags.append((tag, found))
        if tag == "input" and found.get("type") == "hidden":
            self.hidden[found["name"]] = found["value"]

    def handle_data(self, data: str) -> None:
        self.said += data

    @property
    def actions(self) -> set[str]:
        """The addresses of its forms and buttons that change something."""
        forms = {found["action"] for tag, found in self.tags if tag == "form" and found.get("method") == "post"}
        return forms | {found["formaction"] for tag, found in self.tags if "formaction" in found}

    @property
    def links(self) -> list[str]:
        return [found["href"] for tag, found in self.tags if tag == "a"]

    @property
    def notice(self) -> str:
        return self.said.split("This page may be out of date.", 1)[1].strip().split("\n")[0]


@dataclass
class Visitor:
    """A browser without a screen."""

    http: httpx2.AsyncClient

    async def get(self, path: str, status: int = 200) -> Page:
        answer = await self.http.get(path)
        assert answer.status_code == status, answer.text
        return Page(answer.text)

    async def send(self, page: Page, action: str, **fields: Any) -> Page:
        """Submit the page's form with this action; return the next page."""
        assert action in page.actions
        answer = await self.http.post(action, data={**page.hidden, **fields})
        assert answer.status_code == 303, answer.text
        return await self.get(answer.headers["location"])


@asynccontextmanager
async def visiting(app: App, **options: Any) -> AsyncIterator[Visitor]:
    site = dashboard(app, **{"read_only": False, **options})
    async with aclosing(site), support.dashboard.visiting(site, raises=True) as visitor:
        yield Visitor(visitor.http)


async def dead_ones(app: App, db: Any, dsn: str, *users: str) -> list[int]:
    jobs = [app.tasks["charge"].enqueue_sync(db, user).id for user in users]
    await drain_async(app, dsn=dsn)
    return jobs


async def test_every_page_of_an_empty_database(app: App) -> None:
    """Each page of an empty database explains that it is empty; a wrong request is answered in words."""
    async with visiting(app) as visitor:
        assert "No job yet." in (await visitor.get("/jobs")).said
        assert (
            "No job matches."
            in (await visitor.get("/jobs?state=dead&task=none&link=customer%3D1&error=x&since=2+hours")).said
        )
        assert "No dead letter. A job" in (await visitor.get("/dead")).said
        assert "No dead letter matches." in (await visitor.get("/dead?reason=failed&error=x&before=2026-01-31")).said
        assert "No job that matches can be retried." in (await visitor.get("/dead/preview?verb=retry")).said
        assert "Enter a link" in (await visitor.get("/trace")).said
        assert "Nothing is recorded" in (await visitor.get("/trace?link=customer%3D42")).said
        assert "There is no job 42" in (await visitor.get("/job/42", 404)).said
        for odd in ("0", "-1", "x", "9" * 19, "9" * 5000, "\u0664"):
            assert "No job can have the id" in (await visitor.get(f"/job/{odd}", 404)).said
        for path, why in {
            "/jobs?state=failed": "is not a state of a job", "/jobs?since=soon": "is not a time",
            "/jobs?link=customer": "is not KIND=KEY",
            "/jobs?after=here": "is not a cursor", "/jobs?error=" + "x" * 501: "at most 500",
            "/dead?reason=bored": "reason must be one of", "/dead?after=here": "address is not valid",
            "/dead/preview?verb=burn": "can be retried, cancelled or dropped",
            "/jobs/preview?verb=burn": "The verb must be one of", "/trace?link=a%3D1&unique=b": "follows one thing",
            "/trace?unique=a&most=-1": "not a whole number",
        }.items():  # fmt: skip
            assert why in (await visitor.get(path, 400)).said, path


async def test_hostile_text_is_text_and_secrets_are_dots(app: App, db: Any, dsn: str) -> None:
    """Every page shows a job's data as text: it creates no element, attribute or link, and shows no secret."""
    hostile = "<script>alert(1)</script>\"'&{{ 7 * 7 }}" + "x" * 150 + "\u202egnp.\x1b[31m\x08"
    bound = app.tasks["charge"].with_(
        links={"customer": hostile[:180]}, unique=hostile, headers={"authorization": SECRET, "x": hostile}
    )
    job = bound.enqueue_sync(db, hostile, SECRET).id
    good = app.tasks["note"].enqueue_sync(db, hostile).id
    app.tasks["feed"].subject(hostile).push(hostile).sync(db)
    await drain_async(app, dsn=dsn)
    app.tasks["charge"].with_(queue="slow", delay="1 hour").enqueue_sync(db, hostile)
    said = quote(hostile)
    paths = [
        "/jobs", "/dead", "/dead/preview?verb=drop", "/jobs/preview?verb=cancel", "/subjects", f"/job/{job}",
        f"/job/{good}", f"/trace?unique={said}", f"/trace?link={quote('customer=' + hostile[:180])}",
        f"/subject?task=feed&name={said}", f"/subjects?prefix={said}", f"/jobs?error={said}",
        f"/jobs?task={said}&queue={said}&link={quote('a=' + hostile[:150])}",
        f"/dead?error={said}&task={said}&queue={said}",
    ]  # fmt: skip
    async with visiting(app) as visitor:
        for path in paths:
            page = await visitor.get(path)
            scripts = [found.get("src", "") for tag, found in page.tags if tag == "script"]
            assert scripts and all(src.startswith("/static/") for src in scripts), path
            odd = [
                (tag, name) for tag, found in page.tags for name in found if name.startswith("on") or name == "style"
            ]
            assert not odd, path
            assert all(link.startswith(("/", "#")) for link in page.links), path
            everything = page.said + "".join(value for _, found in page.tags for value in found.values())
            if path != "/jobs/preview?verb=cancel":  # it names task and queue alone
                assert "<script>alert(1)</script>" in everything and "{{ 7 * 7 }}" in everything, path
            assert SECRET not in everything, path
        page = await visitor.get(f"/job/{job}")
        assert json.loads(page.said.split("Args", 1)[1].split("Headers")[0]) == {"password": "••••••", "user": hostile}
        assert SECRET in str(
            db.execute("select args from tallybook.job where id = %s", [job]).fetchone()
        )  # the control


async def test_tabs_count_the_jobs_of_a_queue_and_a_task(app: App, db: Any, dsn: str) -> None:
    """Tabs count jobs by queue and task, but not completed and cancelled ones; other filters have no counts."""
    await dead_ones(app, db, dsn, "ada", "bob")
    for n in range(3):
        app.tasks["note"].enqueue_sync(db, str(n))
    app.tasks["note"].with_(delay="1 hour", queue="late").enqueue_sync(db, "later")

    def tabs(page: Page) -> str:
        return " ".join(page.said.split("drop all that match …".capitalize())[-1].split("job state")[0].split())

    async with visiting(app) as visitor:
        whole = "all scheduled 1 retrying 0 waiting 0 available 3 running 0 completed cancelled dead 2"
        assert tabs(await visitor.get("/jobs")) == whole
        queue = await visitor.get("/jobs?queue=charges")
        assert tabs(queue) == "all scheduled 0 retrying 0 waiting 0 available 0 running 0 completed cancelled dead 2"
        assert "/jobs?queue=charges&state=running" in queue.links
        assert "scheduled 1 retrying 0 waiting 0 available 3 " in tabs(await visitor.get("/jobs?task=note"))
        assert tabs(await visitor.get("/jobs?error=card")).startswith("all scheduled retrying waiting available ")


async def test_a_row_has_the_args_and_the_duration(app: App, db: Any, dsn: str) -> None:
    """A job's row shows its args without secrets, and its duration once it has ended."""
    job, note = app.tasks["charge"].enqueue_sync(db, "ada", SECRET).id, app.tasks["note"]
    done = note.enqueue_sync(db, "done").id
    await drain_async(app, dsn=dsn)
    for what in ("first", "second"):
        note.with_(unique="k", on_conflict="replace_args").enqueue_sync(db, what)
    note.enqueue_sync(db, "x" * 9000)
    async with visiting(app) as visitor:
        rows = {
            state: " ".join((await visitor.get(f"/jobs?state={state}")).said.split())
            for state in ("dead", "completed", "available")
        }
        (row,) = re.findall(rf"{job} dead charge.*", rows["dead"])
        assert '"user": "ada"' in row and '"password": "••••••"' in row and re.search(r"UTC [\d.]+ m?s", row)
        (row,) = re.findall(rf"{done} completed note.*", rows["completed"])
        assert '{"what": "done"}' in row and re.search(r"UTC [\d.]+ m?s", row)
        row, replaced = re.findall("Note (?:xxx|second).*? UTC –", rows["available"])
        assert '{"what": "second"}' in replaced
        assert len(row) < 400 and " … 0 " in row  # it has not ended


async def test_queues_and_tasks_are_offered(app: App, db: Any, dsn: str) -> None:
    """The fields for queue and task offer the existing names."""
    await dead_ones(app, db, dsn, "ada")
    async with visiting(app) as visitor:
        page = await visitor.get("/jobs")
        offered = [found["value"] for tag, found in page.tags if tag == "option"]
        lists = [found["list"] for tag, found in page.tags if "list" in found]
        assert offered == ["charges", "charge"] and lists == ["queues", "tasks"]


async def test_a_list_of_jobs_is_live(app: App, db: Any) -> None:
    """The first page of a list has a topic that shows new jobs; a later page and a wrong filter have none."""
    async with visiting(app) as visitor:
        page = await visitor.get("/jobs?queue=mail&state=available")
        (topic,) = [found["data-live"] for _, found in page.tags if "data-live" in found]
        assert topic == "jobs:queue=mail&state=available"
        for address in ("/jobs?after=i9", "/jobs?queue=" + "q" * 300):
            assert not [found for _, found in (await visitor.get(address)).tags if "data-live" in found]
    site = dashboard(app)
    stream = await site.live.watch([topic, "jobs:state=odd"])
    job = app.tasks["note"].enqueue_sync(db, "hi").id
    async for chunk in stream:
        if (said := chunk.decode()).startswith(f"event: {topic}"):
            page = Page(said)
            if f"/job/{job}" in page.links:
                break
    assert "token" not in page.hidden and "/jobs?queue=mail&state=dead" in page.links
    await stream.aclose()  # type: ignore[attr-defined]
    await site.live.close()
    await site.aclose()


async def test_one_job(app: App, db: Any, dsn: str) -> None:
    """A job's page has its attempts, errors, links and why; retry, cancel and drop work, each with one audit row."""
    charge, note = app.tasks["charge"], app.tasks["note"]
    job = charge.with_(links={"customer": 42}).enqueue_sync(db, "ada").id
    await drain_async(app, dsn=dsn)
    done = note.enqueue_sync(db, "hi").id
    await drain_async(app, dsn=dsn)
    parent = note.with_(delay="1 hour").enqueue_sync(db, "later").id
    child = note.with_(after=[parent]).enqueue_sync(db, "after it").id
    async with visiting(app) as visitor:
        page = await visitor.get(f"/job/{job}")
        assert "RuntimeError: no card: ada" in page.said and "Traceback (most recent call last)" in page.said
        assert "/trace?link=customer%3D42" in page.links and "out of attempts" in page.said
        assert "last attempt" in page.said  # when it was last started
        text = (await visitor.http.get(f"/job/{job}")).text
        assert re.sub("<pre>.*?</pre>", "", text, flags=re.S).count("no card: ada") == 1  # apart from its traceback
        places = [page.said.index(word) for word in ("no card: ada", "Args", "out of attempts", "Timeline", "Facts")]
        assert places == sorted(places)
        timeline = page.said[places[3] :].partition("Attempts")[0]
        assert len(re.findall(r"\+[\d.]+ m?s · ", timeline)) == timeline.count(" UTC") - 1  # except the first event
        assert "enqueued" in (await visitor.get("/trace?link=customer%3D42")).said
        page = await visitor.get(f"/job/{done}")
        assert "Note hi" in page.said and '"said": "hi"' in page.said
        page = await visitor.get(f"/job/{parent}")
        assert f"/job/{child}" in page.links and "in this state since" in page.said and "last attempt" not in page.said
        page = await visitor.get(f"/job/{child}")
        assert f"/job/{parent}" in page.links and "waits for its parents" in page.said
        page = await visitor.send(page, "/job/cancel", job=child, reason="not wanted")
        assert f"Job {child} is cancelled." in page.said and "not wanted" in page.said
        page = await visitor.send(await visitor.get(f"/job/{job}"), "/job/retry", job=job)
        assert page.notice == f"Job {job} gets attempt 2."
        page = await visitor.send(page, "/job/retry", job=job)  # it is available now
        assert "is not dead or cancelled" in page.notice or "available" in page.notice
        await drain_async(app, dsn=dsn)
        page = await visitor.send(await visitor.get(f"/job/{job}"), "/job/cancel", job=job, reason="given up")
        assert f"Job {job} is cancelled." in page.said and "given up" in page.said
        await visitor.send(page, "/job/retry", job=job)
        await drain_async(app, dsn=dsn)
        page = await visitor.send(await visitor.get(f"/job/{job}"), "/job/drop", job=job)
        assert "is dropped" in page.notice and "Rest of its history" in page.said
        page = await visitor.send(await visitor.get(f"/job/{done}"), "/job/cancel", job=done)
        assert "is already completed: nothing was changed" in page.notice
    assert audits(db) == [
        ("local", "job.cancel", {"job": child, "reason": "not wanted"}, {"state": "cancelled"}),
        ("local", "job.retry", {"job": job}, {"attempt": 2}),
        ("local", "job.cancel", {"job": job, "reason": "given up"}, {"state": "cancelled"}),
        ("local", "job.retry", {"job": job}, {"attempt": 4}),
        ("local", "job.drop", {"job": job}, {"dropped": True}),
    ]


async def test_dead_letters_are_cancelled(app: App, db: Any, dsn: str) -> None:
    """S4-14: a user cancels some dead letters, or all that match; each ends as cancelled, with the reason.

    The list of jobs includes dead ones only if they are asked for: "all of this queue" does not mean them.
    """
    jobs = await dead_ones(app, db, dsn, "ada", "bob", "eve", "ada")
    async with visiting(app) as visitor:
        page = await visitor.send(await visitor.get("/dead"), "/dead/cancel", job=[jobs[1]])
        assert page.notice == "1 job cancelled."
        page = await visitor.get("/dead/preview?verb=cancel&error=ada")
        assert page.hidden["jobs"].split() == [str(jobs[3]), str(jobs[0])]
        page = await visitor.send(page, "/dead/cancel", reason="withdrawn")
        assert page.notice == "2 jobs cancelled."
        assert "Cancel 1 job?" in (await visitor.get("/jobs/preview?verb=cancel&state=dead")).said
        assert (
            "No job that matches can be cancelled."
            in (await visitor.get("/jobs/preview?verb=cancel&queue=charges")).said
        )
    assert [row[0] for row in db.execute("select job_id from tallybook.dead").fetchall()] == [jobs[2]]
    ended = db.execute("select id, state, reason from tallybook.job order by id").fetchall()
    assert [(row[0], row[2]) for row in ended if row[1] == "cancelled"] == [
        (jobs[0], "withdrawn"), (jobs[1], None), (jobs[3], "withdrawn"),
    ]  # fmt: skip
    assert [row[2]["jobs"] for row in audits(db)] == [[jobs[1]], [jobs[3], jobs[0]]]


async def test_dead_letters(app: App, db: Any, dsn: str) -> None:
    """S4-14, S2-12: dead letters show task, error, attempts and times; a user retries one or some, or drops all."""
    jobs = await dead_ones(app, db, dsn, "ada", "bob", "eve", "ada")
    async with visiting(app) as visitor:
        page = await visitor.get("/dead")
        row = " ".join(page.said.split("Actions")[1].split())
        assert re.match(rf"{jobs[3]} charge charges failed RuntimeError: no card: ada 1 .* UTC .* UTC", row)
        page = await visitor.send(
            page, "/dead/retry", only=jobs[1], job=jobs[2]
        )  # its own button, which ignores checked jobs
        assert page.notice == "1 job retried."
        page = await visitor.send(page, "/dead/retry", job=[jobs[0], jobs[1]])
        assert "1 job retried. 1 job unchanged" in page.notice
        page = await visitor.send(page, "/dead/drop")
        assert page.notice == "No job is chosen. Nothing was changed"
        await drain_async(app, dsn=dsn)
        asked = "/dead/preview?verb=drop&error=CARD:+ada&queue=charges"
        page = await visitor.get(asked)
        assert "Drop 2 jobs?" in page.said and page.hidden["jobs"].split() == [str(jobs[0]), str(jobs[3])]
        later = await dead_ones(app, db, dsn, "ada")  # matches, too, and was not in the preview
        page = await visitor.send(page, "/dead/drop")
        assert page.notice == "2 jobs dropped."
    left = [row[0] for row in db.execute("select job_id from tallybook.dead order by job_id").fetchall()]
    assert left == [jobs[1], jobs[2], *later]
    assert [(action, target["jobs"], done) for _, action, target, done in audits(db)] == [
        ("jobs.retry", [jobs[1]], {"retried": 1}),
        ("jobs.retry", [jobs[0], jobs[1]], {"retried": 1, "refused": 1}),
        ("jobs.drop", [jobs[0], jobs[3]], {"dropped": 2}),
    ]
    assert audits(db)[2][2]["filter"] == "queue=charges&error=CARD%3A+ada"


async def test_pages_of_dead_letters_that_died_at_one_instant(app: App, db: Any, dsn: str) -> None:
    """S4-14: pages neither skip nor repeat letters of one instant; a bounded search goes on where it ended."""
    jobs = await dead_ones(app, db, dsn, *map(str, range(7)))
    at = datetime(2031, 1, 1, tzinfo=UTC)
    db.execute("update tallybook.dead set died_at = %s", [at])
    ask = """select job_id, why
               from tallybook.dead_letters(max_jobs => 3, before => %s, before_id => %s, max_looked => %s,
                                           text => %s)"""
    seen, before, before_id = [], None, None
    while found := db.execute(ask, [before, before_id, None, None]).fetchall():
        seen += [job for job, _ in found]
        before, before_id = at, found[-1][0]
    assert seen == jobs[::-1]
    assert db.execute(ask, [None, None, 4, "card: 0"]).fetchall() == [
        (jobs[3], None)
    ]  # looked at four, none of them matches
    assert db.execute(ask, [at, jobs[3], 4, "card: 0"]).fetchall() == [(jobs[0], "failed")]
    async with visiting(app) as visitor:
        page = await visitor.get(f"/dead?after={quote(f'{at.isoformat()}~{jobs[2]}')}")
        assert [link for link in page.links if link.startswith("/job/")] == [f"/job/{jobs[1]}", f"/job/{jobs[0]}"]


async def test_lists_of_jobs(app: App, db: Any, dsn: str) -> None:
    """S4-09, S2-12: jobs are listed by state, task, link and error, in pages; an action covers the preview only."""
    note = app.tasks["note"]
    dead = await dead_ones(app, db, dsn, "ada", "bob")
    notes = [note.with_(links={"customer": n % 2}).enqueue_sync(db, str(n)).id for n in range(55)]

    def listed(page: Page) -> list[int]:
        return [int(link.removeprefix("/job/")) for link in page.links if link.startswith("/job/")]

    async with visiting(app) as visitor:
        assert listed(await visitor.get("/jobs?state=dead&error=CARD:+bob")) == [dead[1]]
        assert listed(await visitor.get("/jobs?link=customer%3D1&task=note&state=available"))[:2] == [
            notes[53],
            notes[51],
        ]
        page = await visitor.get("/jobs?task=note")
        assert listed(page) == notes[:4:-1]
        older = next(link for link in page.links if "after=" in link)
        assert listed(await visitor.get(older)) == notes[4::-1]
        page = await visitor.get("/jobs/preview?verb=cancel&link=customer%3D1&state=available&state=dead")
        assert "Cancel 27 jobs?" in page.said and "27 available" in " ".join(page.said.split())
        more = note.with_(links={"customer": 1}).enqueue_sync(db, "not in the preview").id
        page = await visitor.send(page, "/jobs/cancel", reason="enough")
        assert page.notice == "27 jobs cancelled."
        page = await visitor.send(await visitor.get("/jobs?state=cancelled"), "/jobs/retry", job=notes[1])
        assert page.notice == "1 job retried."
        page = await visitor.send(await visitor.get("/jobs?state=dead"), "/jobs/drop", job=dead)
        assert page.notice == "2 jobs dropped."
    states = dict(db.execute("select id, state from tallybook.job").fetchall())
    assert states == {job: "cancelled" if n % 2 and n != 1 else "available" for n, job in enumerate(notes)} | {
        more: "available"
    }
    assert [(action, len(target["jobs"]), done) for _, action, target, done in audits(db)] == [
        ("jobs.cancel", 27, {"cancelled": 27}),
        ("jobs.retry", 1, {"retried": 1}),
        ("jobs.drop", 2, {"dropped": 2}),
    ]
    assert audits(db)[0][2]["reason"] == "enough"


@pytest.mark.parametrize("verb", ["cancel", "drop"])
async def test_a_preview_looks_further_until_it_has_found_all(
    app: App, db: Any, dsn: str, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """A preview appears at once and counts on in pieces; then its action covers all found jobs."""
    monkeypatch.setattr("tallybook.extra.dashboard.bulk_actions.PIECE", 2)
    if verb == "cancel":
        jobs, address = [app.tasks["note"].enqueue_sync(db, str(n)).id for n in range(5)], "/jobs/preview?verb=cancel"
    else:
        jobs, address = await dead_ones(app, db, dsn, *map(str, range(5))), "/dead/preview?verb=drop&since=1+hour"
    async with visiting(app) as visitor:
        # A first page does not trust the parameters that only a later part may have.
        page = first = await visitor.get(f"{address}&found=dead:9000&looks=3")
        ids, counts = [], []
        while True:
            counts += re.findall(rf"{verb.capitalize()} ([\d,]+) jobs\?", page.said)
            ids += page.hidden.get("jobs", "").split()
            following = [found["hx-get"] for _, found in page.tags if "hx-get" in found]
            buttons = [found for tag, found in page.tags if tag == "button" and "name" not in found]
            assert any("disabled" in found for found in buttons) == bool(following)
            if not following:
                break
            page = await visitor.get(following[0])
        assert counts == ["2", "4", "5"] and sorted(map(int, ids)) == jobs
        said = await visitor.send(first, f"/{'jobs' if verb == 'cancel' else 'dead'}/{verb}", jobs=ids)
        assert said.notice.startswith("5 jobs ")
        for wrong in ("found=new:1", "found=dead:-1", "looks=201"):
            page = await visitor.get(f"/jobs/preview/further?verb=cancel&{wrong}", status=400)
            assert page.hidden.get("jobs") is None


@pytest.mark.parametrize("verb", ["cancel", "drop"])
async def test_a_look_that_fails_leaves_what_the_ones_before_have_found(
    app: App, db: Any, dsn: str, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """If a later part of a preview fails, the page says so, and the button covers what was found before."""
    monkeypatch.setattr("tallybook.extra.dashboard.bulk_actions.PIECE", 2)
    limits = database._LIMITS.replace("'2s'", "'20ms'")
    monkeypatch.setattr(database, "_LIMITS", limits)
    noun, table = ("jobs", "lane") if verb == "cancel" else ("dead", "dead")
    if verb == "cancel":
        for n in range(5):
            app.tasks["note"].enqueue_sync(db, str(n))
    else:
        await dead_ones(app, db, dsn, *map(str, range(5)))
    async with visiting(app) as visitor:
        first = await visitor.get(f"/{noun}/preview?verb={verb}")
        (further,) = [found["hx-get"] for _, found in first.tags if "hx-get" in found]
        with psycopg.connect(dsn) as other:
            other.execute(f"lock table tallybook.{table} in access exclusive mode")
            page = await visitor.get(further)
            await visitor.get(f"/{noun}/preview?verb={verb}", status=503)  # nothing was found before
        said = " ".join(page.said.split())
        assert (
            f"{verb.capitalize()} 2 jobs?" in said
            and "holds a lock that this needs" in said
            and "is about the newest 2" in said
        )
        assert not [found for tag, found in page.tags if "hx-get" in found or "disabled" in found]
        assert (await visitor.send(first, f"/{noun}/{verb}")).notice.startswith("2 jobs ")


async def test_a_long_filter_does_not_keep_from_what_it_has_found(app: App, db: Any, dsn: str) -> None:
    """Jobs that match a long error filter are retried like others; the audit has the filter's beginning."""
    error = "нет карты " * 11
    jobs = await dead_ones(app, db, dsn, error, "ada")
    async with visiting(app) as visitor:
        page = await visitor.get(f"/dead/preview?verb=retry&error={quote(error.strip())}")
        assert page.hidden["jobs"] == str(jobs[0]) and len(page.hidden["about"]) > 500
        assert (await visitor.send(page, "/dead/retry")).notice == "1 job retried."
    ((_, _, target, _),) = audits(db)
    assert target["filter"].startswith("error=%D0%BD") and len(target["filter"]) == 501


async def test_many_are_done_in_batches(app: App, db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An action on many jobs runs in small transactions, each with its own audit row."""
    monkeypatch.setattr("tallybook.extra.dashboard.bulk_actions.BATCH", 2)
    jobs = [app.tasks["note"].enqueue_sync(db, str(n)).id for n in range(5)]
    async with visiting(app) as visitor:
        page = await visitor.send(await visitor.get("/jobs/preview?verb=cancel"), "/jobs/cancel")
        assert page.notice == "5 jobs cancelled."
        assert sorted(job for _, _, target, _ in audits(db) for job in target["jobs"]) == jobs
        assert [len(target["jobs"]) for _, _, target, _ in audits(db)] == [2, 2, 1]


async def test_an_action_leaves_jobs_alone_that_have_left_the_previewed_states(app: App, db: Any, dsn: str) -> None:
    """A job that has left the states of the preview, by the press of the button, is counted and not changed."""
    jobs = await dead_ones(app, db, dsn, "ada", "bob", "eve")
    notes = [app.tasks["note"].with_(delay="1 hour").enqueue_sync(db, str(n)).id for n in range(2)]
    async with visiting(app) as visitor:
        dead = await visitor.get("/dead/preview?verb=cancel")
        noted = await visitor.get("/jobs/preview?verb=cancel")
        assert (dead.hidden["states"], noted.hidden["states"]) == ("dead", "scheduled")
        db.execute("select tallybook.retry(%s)", [jobs[1]])
        db.execute("update tallybook.scheduled set run_at = now() - interval '1 s' where job_id = %s", [notes[1]])
        db.execute("select tallybook.promote()")
        assert (await visitor.send(dead, "/dead/cancel")).notice == "2 jobs cancelled. 1 job no longer dead."
        assert (await visitor.send(noted, "/jobs/cancel")).notice == "1 job cancelled. 1 job no longer scheduled."
        noted.hidden["states"] = "new"
        assert "is not a state of a job" in (await visitor.send(noted, "/jobs/cancel")).notice
    states = [db.execute("select tallybook.state(%s)", [job]).fetchone()[0] for job in (*jobs, *notes)]
    assert states == ["cancelled", "available", "cancelled", "cancelled", "available"]
    assert [target["jobs"] for _, _, target, _ in audits(db)] == [[jobs[2], jobs[0]], [notes[0]]]


async def test_an_action_does_not_stop_a_job_that_starts_at_the_last_moment(
    app: App, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that starts after the action has read its state is left alone: only available jobs were previewed."""
    jobs = [app.tasks["charge"].enqueue_sync(db, str(n)).id for n in range(2)]
    read, left = bulk_actions.rows, [1]

    async def rows_then_claim(*asked: Any) -> list[dict[str, Any]]:
        found = await read(*asked)
        assert not left or Hands(db, "charges").claim(left.pop())
        return found

    async with visiting(app) as visitor:
        page = await visitor.get("/jobs/preview?verb=cancel&state=available")
        monkeypatch.setattr(bulk_actions, "rows", rows_then_claim)
        notice = (await visitor.send(page, "/jobs/cancel")).notice
    assert notice == "1 job cancelled. 1 job no longer available."
    states = [db.execute("select tallybook.state(%s)", [job]).fetchone()[0] for job in jobs]
    assert states == ["running", "cancelled"]
    assert [target["jobs"] for _, _, target, _ in audits(db)] == [[jobs[1]]]


@pytest.mark.parametrize("batches", [0, 2])
async def test_a_deadlock_on_the_way_is_told_with_what_was_done(
    app: App, db: Any, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    """A batch that a deadlock aborts changes nothing; the user sees this, and what was done before."""
    in_the_way = """\
create function given_up() returns trigger language plpgsql as $$ begin
  if (select count(*) from tallybook.audit) >= {} then
    raise exception 'deadlock detected' using errcode = '40P01';
  end if;
  return new;
end $$;
create trigger deadlock before insert on tallybook.audit for each row execute function given_up()"""
    monkeypatch.setattr("tallybook.extra.dashboard.bulk_actions.BATCH", 2)
    for n in range(5):
        app.tasks["note"].enqueue_sync(db, str(n))
    db.execute(in_the_way.format(batches))
    async with visiting(app) as visitor:
        page = await visitor.send(await visitor.get("/jobs/preview?verb=cancel"), "/jobs/cancel")
        done = f"{2 * batches} jobs cancelled. Then it stopped: " if batches else ""
        assert page.notice.startswith(f"{done}Another transaction holds a lock that this needs.")
        assert ("Nothing was changed" in page.notice) == (not batches)
    assert len(audits(db)) == batches
    assert db.execute("select count(*) from tallybook.job where state = 'cancelled'").fetchone()[0] == 2 * batches


async def test_who_may_only_look_changes_nothing(app: App, db: Any, dsn: str) -> None:
    """A read-only dashboard has no form that changes anything and refuses each; others refuse one without a token."""
    job = (await dead_ones(app, db, dsn, "ada"))[0]
    app.tasks["feed"].with_(delay="1 hour").subject("a").push("a").sync(db)
    noun = {"/job": ("retry", "cancel", "drop"), "/dead": ("retry", "drop"), "/jobs": ("retry", "cancel", "drop")}
    noun["/subject"] = ("forget", "move", "retry", "cancel")
    paths = [f"{first}/{verb}" for first, verbs in noun.items() for verb in verbs]
    fields = {"job": str(job), "task": "feed", "name": "a"}
    states = "select id, state from tallybook.job order by id"
    before = db.execute(states).fetchall()
    async with visiting(app, read_only=True) as visitor:
        for looked in (
            "/jobs",
            "/dead",
            f"/job/{job}",
            "/dead/preview?verb=retry",
            "/subjects",
            "/subject?task=feed&name=a",
        ):
            assert (await visitor.get(looked)).actions == set()
        for path in paths:
            assert (await visitor.http.post(path, data=fields)).status_code == 403, path
    async with visiting(app) as visitor:
        page = await visitor.get("/dead")
        for path in paths:
            assert (await visitor.http.post(path, data=fields)).status_code == 403, path
        assert db.execute(states).fetchall() == before and audits(db) == []
        await visitor.send(page, "/dead/retry", **fields)  # the control
        assert db.execute(states).fetchall() != before and len(audits(db)) == 1


async def test_subjects(app: App, db: Any, dsn: str) -> None:
    """S1-26: stopped subjects are listed with the reason; each move, cancel, forget and retry writes one audit row."""
    feed = app.tasks["feed"]
    for name in ("odd:1", "gone:2"):
        feed.subject(name).push(name).sync(db)
    await drain_async(app, dsn=dsn)
    for n in range(3):
        feed.with_(delay="1 hour").subject(f"live:{n}").push(f"live:{n}").sync(db)

    def listed(page: Page) -> list[str]:
        return [link.split("name=")[1] for link in page.links if "/subject?" in link]

    async with visiting(app) as visitor:
        page = await visitor.get("/subjects?state=stopped")
        assert listed(page) == ["gone%3A2", "odd%3A1"]
        assert "it is gone: gone:2" in page.said and "killed" in page.said
        assert "ValueError: odd: odd:1" in page.said and "dead" in page.said
        assert listed(await visitor.get("/subjects?state=killed&task=feed")) == ["gone%3A2"]
        assert listed(await visitor.get("/subjects?prefix=live:&state=planned")) == ["live%3A0", "live%3A1", "live%3A2"]
        assert "No subject matches" in (await visitor.get("/subjects?task=none")).said
        assert "state must be one of" in (await visitor.get("/subjects?state=odd", 400)).said
        page = await visitor.get("/subject?task=feed&name=gone:2")
        assert "it is gone: gone:2" in page.said and "killed" in page.said and "enqueued" in page.said
        assert "There is no such subject." in (await visitor.get("/subject?task=feed&name=none", 404)).said
        for name, verb, more, said in (
            ("gone:2", "retry", {}, "It is active again and runs at once."),
            ("odd:1", "forget", {}, "The subject is forgotten: the next push creates a new one."),
            ("live:0", "move", {"run_at": "2031-01-01T09:00"}, "It runs at 2031-01-01 09:00:00 UTC."),
            (
                "live:0",
                "move",
                {"run_at": "soon"},
                "'soon' is not a time: write a duration, like 2 hours, or 2026-01-31T09:00Z",
            ),
            ("live:1", "cancel", {"reason": "enough"}, "Its job is cancelled."),
            ("live:2", "move", {"run_at": ""}, "It runs at "),
        ):
            page = await visitor.get(f"/subject?task=feed&name={quote(name)}")
            page = await visitor.send(page, f"/subject/{verb}", task="feed", name=name, **more)
            assert page.notice.startswith(said)
    asked = "select subject, next_run_at from tallybook.subject where state in ('planned', 'pending')"
    now = dict(db.execute(asked).fetchall())
    assert set(now) == {"gone:2", "live:0", "live:2"} and now["live:0"] == datetime(2031, 1, 1, 9, tzinfo=UTC)
    assert now["live:2"] <= db.execute("select clock_timestamp()").fetchone()[0]
    assert [(action.removeprefix("subject."), target["subject"]) for _, action, target, _ in audits(db)] == [
        ("retry", "gone:2"), ("forget", "odd:1"), ("move", "live:0"), ("cancel", "live:1"), ("move", "live:2"),
    ]  # fmt: skip


async def test_a_subject_of_two_queues(app: App, db: Any) -> None:
    """A queue's own name is listed with its queue; without it an address leads to the list; a form changes one."""
    feed = app.tasks["feed"]
    for queue in ("eu", "us"):
        app.queues.set(queue, own_names=True).sync(db)
        feed.with_(delay="1 hour", queue=queue).subject("a").push(queue).sync(db)
    async with visiting(app) as visitor:
        page = await visitor.get("/subjects")
        assert [link.partition("?")[2] for link in page.links if "/subject?" in link] == [
            "task=feed&queue=eu&name=a",
            "task=feed&queue=us&name=a",
        ]
        assert "feed, in us" in " ".join(page.said.split())
        moved = await visitor.http.get("/subject?task=feed&name=a")
        assert (moved.status_code, moved.headers["location"]) == (303, "/subjects?task=feed&prefix=a")
        page = await visitor.get("/subject?task=feed&queue=us&name=a")
        page = await visitor.send(page, "/subject/move", run_at="2031-01-01T09:00")
        assert page.notice.startswith("It runs at 2031-01-01 09:00:00 UTC.")
        page = await visitor.get("/subject?task=feed&queue=eu&name=a")
        page = await visitor.send(page, "/subject/forget", task="feed", name="a", queue="eu")
        assert page.notice.startswith("The subject is forgotten")
    found = db.execute("select scope, next_run_at from tallybook.subject").fetchall()
    assert found == [("us", datetime(2031, 1, 1, 9, tzinfo=UTC))]


def test_a_planned_subject_is_moved_and_no_other(app: App, db: Any) -> None:
    """subject_move changes only the time of a planned subject; a pending or unknown one is left alone."""
    feed = app.tasks["feed"]
    there = feed.with_(delay="1 hour", priority=1, max_attempts=7).subject("a")
    there.push("x").sync(db)
    feed.subject("b").push("y").sync(db)
    ask = "select to_jsonb(s) - 'run_at', s.run_at from tallybook.scheduled s"
    before, _ = db.execute(ask).fetchone()
    at = datetime(2031, 1, 1, tzinfo=UTC)
    assert there.move(at).sync(db) == "moved"
    assert db.execute(ask).fetchone() == (before, at)
    assert [feed.subject(name).move(at).sync(db) for name in ("b", "c")] == ["pending", "unknown"]
    with pytest.raises(ConfigError, match="not an aware datetime"):
        there.move(at.replace(tzinfo=None)).sync(db)
    with pytest.raises(psycopg.errors.Error, match="subject_move needs a time"):
        db.execute("select tallybook.subject_move('feed', 'a', 'infinity')")


async def test_a_job_is_live(app: App, db: Any, dsn: str) -> None:
    """The live part of a job's page follows its state; a topic that is no job gets nothing, and harms nobody."""
    job = app.tasks["charge"].enqueue_sync(db, "ada").id
    site = dashboard(app, read_only=False)
    stream = await site.live.watch(["job:none", "job:0", f"job:{job}"])
    try:
        text, drained = "", False
        async for piece in stream:
            text += piece.decode()
            if 'data-state="available"' in text and not drained:
                drained = await drain_async(app, dsn=dsn) is not None
            if 'data-state="dead"' in text:
                break
        assert f"event: job:{job}" in text and "event: job:0" not in text and "no card: ada" in text
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
        await site.aclose()
