"""The dashboard's pages for schedules, workers, limits, providers, maintenance and audit, through an ASGI client."""

import base64
import html
import json
import re
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from support.dashboard import Visitor, audits, visiting
from support.roles import house
from support.waiting import wait_until
from tallybook import App
from tallybook._db.migrate import latest, migrate
from tallybook._worker.life.heartbeat import memory
from tallybook._worker.life.watchdog import Watchdog
from tallybook.extra.dashboard.database import Examination
from tallybook.extra.dashboard.live import Live
from tallybook.extra.dashboard.pages import schedules as schedule_pages
from tallybook.web import dashboard

PAGES = ("/schedules", "/workers", "/limits", "/providers", "/maintenance", "/audit")
EVIL = "<img src=x onerror=alert(1)>'\"&amp;"
CANARY = "canary-b7f1e6d2"
NOW = datetime(2031, 5, 1, 12, tzinfo=UTC)


def shop(dsn: str | None = None) -> App:
    app = App("shop", dsn=dsn)

    @app.task(queue="mail")
    def send(to: str, api_key: str = "") -> None: ...

    return app


@pytest.fixture
def app(dsn: str) -> App:
    return shop(dsn)


@dataclass
class Seen:
    visitor: Visitor

    async def page(self, path: str, status: int = 200) -> str:
        found = await self.visitor.get(path)
        assert found.status == status, (path, found.status, found.text[-600:])
        return found.text

    async def act(self, path: str, status: int = 303, **form: str) -> str:
        """Post a form; return the notice on the next page."""
        found = await self.visitor.post(path, **{"back": "/audit", **form})
        assert found.status == status, (path, found.status, found.text[-600:])
        if status != 303:
            return found.text
        said = re.search(r'<div class="notice \w+"[^>]*>(.*?)</div>', await self.page("/audit"), re.S)
        assert said, path
        return html.unescape(said[1])


@asynccontextmanager
async def seeing(app: App, dsn: str, *, read_only: bool = False) -> AsyncIterator[Seen]:
    async with aclosing(dashboard(app, dsn=dsn, read_only=read_only)) as site, visiting(site, raises=True) as visitor:
        yield Seen(visitor)


@pytest.fixture
async def seen(app: App, dsn: str) -> AsyncIterator[Seen]:
    async with seeing(app, dsn) as one:
        yield one


async def test_pages_of_an_empty_database(seen: Seen) -> None:
    """S2-09: every page of an empty database says that there is nothing yet."""
    said = {path: await seen.page(path) for path in PAGES}
    assert "No schedule yet" in said["/schedules"] and "No live worker" in said["/workers"]
    assert all(word in said["/limits"] for word in ("No concurrency limit", "No rate limit", "No breaker"))
    assert "No provider yet" in said["/providers"] and "No route" in said["/providers"]
    assert (
        "rescue" in said["/maintenance"]
        and "dead letters" in said["/maintenance"]
        and f"version {latest()}" in said["/maintenance"]
    )
    assert "No change by a page" in said["/audit"]


async def test_what_there_is_not(seen: Seen) -> None:
    """An unknown schedule or worker is a 404 that says so."""
    assert "unknown schedule" in await seen.page("/schedule?name=none", 404)
    for number in ("7", "-1", "x", "9" * 30, "", "٣"):
        assert "There is no worker" in await seen.page(f"/worker?id={number}", 404)
    assert "No matching change" in await seen.page("/audit?actor=nobody&after=x")


ACTIONS = {
    "/schedule/run": {"name": "s"},
    "/schedule/pause": {"name": "s"},
    "/schedule/resume": {"name": "s"},
    "/limit/concurrency/set": {"name": "c", "most": "3"},
    "/limit/concurrency/drop": {"name": "c"},
    "/limit/rate/set": {"name": "r", "calls": "8", "per": "1 min", "burst": "2"},
    "/limit/rate/push": {"name": "r:x", "wait": "5 min"},
    "/limit/rate/drop": {"name": "r"},
    "/limit/breaker/set": {"name": "b", "failures": "5", "per": "1 min", "open_for": "30 s"},
    "/limit/breaker/open": {"name": "b:x", "duration": "1 h"},
    "/limit/breaker/close": {"name": "b:x"},
    "/limit/breaker/drop": {"name": "b"},
    "/provider/active": {"name": "acme", "active": "no"},
    "/provider/route/drop": {"data_type": "equity", "symbol": "GOLD"},
    "/maintenance/service": {"name": "rescue", "every": "7 s"},
    "/maintenance/retention": {"name": "dead", "keep": "12 days"},
    "/schedule/drop": {"name": "s"},
}


async def staged(app: App) -> None:
    await app.schedules.set("s", app.tasks["send"].job("ada"), every="1 hour")
    await app.providers.set("acme", kind="market-data")
    await app.providers.route("equity", "acme", symbol="GOLD")


async def test_each_action_is_done_and_on_record_once(app: App, seen: Seen, db: Any) -> None:
    """S2-09, S2-16: every action of these pages takes effect and writes exactly one audit row with actor and target."""
    await staged(app)
    for n, (path, form) in enumerate(ACTIONS.items(), 1):
        said = await seen.act(path, **form)
        assert re.search(r"\b(is|in|starts|ticks|checks|enqueued)\b", said), (path, said)
        rows = audits(db)
        assert len(rows) == n and rows[-1][0] == "local", path
        assert next(iter(form.values())) in rows[-1][2].values(), path
    done = [row[3] for row in audits(db)]
    assert done[0]["what"] == "enqueued" and done[1] == {"paused": True} and done[2] == {"resumed": True}
    assert all(list(one.values()) != [False] for one in done), done
    assert await app.schedules.list() == [] and await app.breakers.list() == []
    assert not (await app.providers.load()) and [r.keep for r in await app.history.list() if r.name == "dead"] == [
        timedelta(days=12)
    ]
    assert [s.every for s in await app.services.list() if s.name == "rescue"] == [timedelta(seconds=7)]


async def test_a_read_only_dashboard_changes_nothing(app: App, dsn: str, db: Any) -> None:
    """S2-09: a read-only dashboard has no form on any page, and refuses every action without a trace."""
    await staged(app)
    before = await app.schedules.list()
    async with seeing(app, dsn, read_only=True) as reader:
        for path in (*PAGES, "/schedule?name=s"):
            assert 'method="post"' not in await reader.page(path)
        for path, form in ACTIONS.items():
            await reader.act(path, 403, **form)
    assert audits(db) == [] and await app.schedules.list() == before


async def test_what_was_so_already_is_not_on_record(app: App, seen: Seen, db: Any) -> None:
    """S2-09: repeating an action that changes nothing writes no audit row."""
    await staged(app)
    job = db.execute("select tallybook.enqueue('mail', 'send')").fetchone()[0]
    actions = {
        "/queue/set": {"name": "mail", "retention": "brief", "max_attempts": "7"},
        "/queue/pause": {"name": "mail"},
        "/queue/resume": {"name": "mail"},
        "/job/cancel": {"job": str(job)},
        "/jobs/cancel": {"job": str(db.execute("select tallybook.enqueue('mail', 'send')").fetchone()[0])},
        "/queue/truncate": {"name": "mail", "confirm": "mail"},
        **ACTIONS,
        "/queue/drop": {"name": "none"},
    }
    again = {
        "/schedule/run",
        "/limit/rate/push",
        "/limit/breaker/open",
        "/limit/breaker/close",
    }  # these do something each time
    db.execute("select tallybook.enqueue('mail', 'send')")
    for path, form in actions.items():
        await seen.act(path, **form)
        on_record = audits(db)
        if path not in again:
            await seen.act(path, **form)
            assert audits(db) == on_record, path
    assert len(audits(db)) == len(actions) - 1  # there never was a queue `none`
    assert "1 job cancelled" not in await seen.act("/jobs/cancel", job=str(job))
    assert "whole number" in await seen.act("/queue/set", name="mail", max_attempts="9" * 5000)


@pytest.mark.parametrize(
    ("path", "form", "why"),
    [
        ("/limit/concurrency/set", {"name": "c", "most": "many"}, "most must be a whole number"),
        ("/limit/concurrency/set", {"name": "", "most": "1"}, "1 to 200 bytes"),
        ("/limit/rate/set", {"name": "r", "calls": "1", "per": "300"}, "per"),
        ("/limit/rate/push", {"name": "r", "wait": "999999999 days"}, "too long"),
        ("/limit/rate/push", {"name": "none", "wait": "1 s"}, "none"),
        ("/limit/breaker/open", {"name": "none"}, "none"),
        ("/maintenance/service", {"name": "rescue", "every": "soon"}, "every"),
        ("/maintenance/retention", {"name": "none", "keep": "1 day"}, "none"),
        ("/schedule/run", {"name": "none"}, "there is no schedule"),
        ("/provider/active", {"name": "none", "active": "yes"}, "none"),
    ],
)
async def test_what_cannot_be_is_told_and_leaves_nothing(
    seen: Seen, db: Any, path: str, form: dict[str, str], why: str
) -> None:
    """A wrong value in a form is explained in a sentence, changes nothing and is not audited."""
    assert why in await seen.act(path, **form)
    assert audits(db) == []


async def test_queues_by_their_oldest_job(seen: Seen, db: Any) -> None:
    """Queues can be listed by their oldest available job; those without such a job come last, by name."""
    for queue in ("b", "a"):
        db.execute("select tallybook.enqueue(%s, 'send')", [queue])
    for queue in ("0", "c"):
        db.execute("select tallybook.enqueue(%s, 'send', run_at => now() + interval '1 hour')", [queue])
    text = await seen.page("/queues?order=oldest")
    assert re.findall(r'<th scope="row"><a class="name" title="([^"]+)"', text) == ["b", "a", "0", "c"]


async def test_every_fire_of_a_schedule_is_seen(app: App, seen: Seen, db: Any) -> None:
    """S2-16: the page shows fires that ran, were skipped by overlap, missed or failed, with job, state and reason."""
    await app.schedules.set("report", app.tasks["send"].job("ada", api_key=CANARY), every="1 hour")
    assert "enqueued job" in await seen.act("/schedule/run", name="report")
    assert "was skipped" in await seen.act("/schedule/run", name="report")
    for hours, what, reason, ticks in ((2, "failed", f"no such table {EVIL}", None), (3, "missed", None, 4)):
        db.execute(
            "insert into tallybook.fire (schedule, tick, fired_at, what, reason, ticks)"
            " values ('report', %s, %s, %s, %s, %s)",
            [NOW - timedelta(hours=hours), NOW, what, reason, ticks],
        )
    text = await seen.page("/schedule?name=report")
    job = db.execute("select last_job_id from tallybook.schedules").fetchone()[0]
    assert f'href="/job/{job}"' in text and 'class="state available"' in text
    assert ">ran</span>" in text and "skipped: overlap" in text and "no such table &lt;img" in text
    assert re.search(r"4\s+ticks from this one on", text) and "2031-05-01 10:00:00" in text
    assert CANARY not in text and "••••" in text  # its args are shown, but nothing that looks like a secret
    assert CANARY in str(db.execute("select args from tallybook.schedules").fetchone())  # control
    only = await seen.page("/schedule?name=report&what=failed")
    assert "no such table" in only and "skipped: overlap" not in only
    listed = await seen.page("/schedules")
    assert "every 1 hour" in listed and 'href="/schedule?name=report"' in listed and "failed" in listed


async def test_fires_go_in_pages_that_look_at_a_bounded_number(
    app: App, seen: Seen, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2-16: pages show each fire once; a filtered page reads a bounded number of ticks, the next continues."""
    monkeypatch.setattr(schedule_pages, "_LOOK", 70)
    await app.schedules.set("often", app.tasks["send"].job("ada"), every="1 s")
    db.execute(
        "insert into tallybook.fire (schedule, tick, fired_at, what, reason)"
        " select 'often', %s::timestamptz + n * interval '1 s', %s, case n when 3 then 'failed' else 'skipped' end,"
        " 'overlap' from generate_series(1, 130) n",
        [NOW, NOW],
    )
    path, ticks = "/schedule?name=often", []
    while path:
        text = await seen.page(path)
        ticks += re.findall(r'<th scope="row">(2031-\S+ \S+)</th>', text)
        following = re.search(r'href="([^"]+)">Older</a>', text)
        path = html.unescape(following[1]) if following else ""
    assert len(ticks) == 130 and ticks == sorted(set(ticks), reverse=True)
    first = await seen.page("/schedule?name=often&what=failed")
    assert "2031-05-01 12:00:03" not in first and "Older" in first
    older = html.unescape(re.search(r'href="([^"]+)">Older</a>', first)[1])  # type: ignore[index]
    assert "2031-05-01 12:00:03" in await seen.page(older)


async def test_a_thousand_schedules(app: App, seen: Seen, db: Any) -> None:
    """S2-16: a thousand schedules are listed a hundred per page, and found by a part of their name."""
    db.execute(
        "insert into tallybook.schedule (name, source, task, every, since, created_at, changed_at)"
        " select 's' || to_char(n, 'FM0000'), 'database', 'send', '1 h', %(now)s, %(now)s, %(now)s"
        " from generate_series(1, 1000) n",
        {"now": NOW},
    )
    text = await seen.page("/schedules")
    assert text.count('<th scope="row">') == 100 and "s0100" in text and "s0101" not in text
    assert 'scope="row"><a class="name" href="/schedule?name=s0101"' in await seen.page("/schedules?after=s0100")
    found = await seen.page("/schedules?q=S099")
    assert found.count('<th scope="row">') == 10
    await seen.act("/schedule/pause", name="s0001")
    assert "paused by local" in await seen.page("/schedules?q=s0001")


@pytest.mark.servers
@pytest.mark.direct("makes a database of its own")
async def test_pages_of_schedules_with_another_collation(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each schedule is on one page, also if the database's collation sorts small and capital letters together."""
    monkeypatch.setattr(schedule_pages, "_PAGE", 2)
    name = f"tallybook_collated_{secrets.token_hex(6)}"
    try:
        with psycopg.connect(server.dsn(), autocommit=True) as conn:
            conn.execute(
                f"create database {name} template template0 encoding 'UTF8' locale_provider icu icu_locale 'en'"
            )
    except psycopg.errors.FeatureNotSupported:
        pytest.skip("this server has no ICU")
    try:
        with psycopg.connect(server.dsn(name)) as conn:
            migrate(conn)
        app = shop(server.dsn(name))
        for one in ("a", "B", "c"):
            await app.schedules.set(one, app.tasks["send"].job("ada"), every="1 hour")
        async with seeing(app, server.dsn(name)) as seen:
            pages = [await seen.page(path) for path in ("/schedules", "/schedules?after=a")]
        assert [re.findall(r'href="/schedule\?name=(\w)"', page) for page in pages] == [["B", "a"], ["c"]]
    finally:
        server.drop_database(name)


@pytest.mark.direct("a worker with a session")
async def test_lag_and_memory_come_with_the_heartbeat(app: App, seen: Seen, db: Any) -> None:
    """S2-09: a worker's heartbeat reports its loop's lag and its memory; its start reports slots and version."""
    import asyncio

    holding = asyncio.Event()

    @app.task(queue="hold")
    async def hold() -> None:
        await holding.wait()

    await hold.enqueue(app)
    running = asyncio.create_task(app.run_worker(queues={"mail": 3, "hold": 4}, heartbeat="50 ms", name="till"))
    query = "select id, slots, version, extract(epoch from lag), memory from tallybook.workers where lag is not null"
    row = await asyncio.to_thread(wait_until, lambda: db.execute(query).fetchone(), "a beat with the lag")
    number, slots, version, lag, held = row
    assert slots == [3, 4] and version and 0 <= lag < 60 and held > 2**20
    await asyncio.to_thread(
        wait_until, lambda: db.execute("select from tallybook.running()").fetchone() is not None, "the job runs"
    )
    listed, one = await seen.page("/workers"), await seen.page(f"/worker?id={number}")
    assert "till" in listed and "MiB" in listed and '<td class="n">7</td>' in listed
    assert "hold" in one and 'href="/job/' in one and "MiB" in one
    assert db.execute("select count(*) from tallybook.running(of_worker => %s)", [number]).fetchone() == (1,)
    assert db.execute("select count(*) from tallybook.running(of_worker => %s)", [number + 1]).fetchone() == (0,)
    holding.set()
    running.cancel()
    await asyncio.wait((running,))
    assert "Ended recently" in await seen.page("/workers")


async def test_a_worker_of_the_old_form(seen: Seen, db: Any) -> None:
    """S2-09: a worker that reports no lag, memory or slots, like older releases, works, and its page says so."""
    call = (
        "select tallybook.worker_start(%s::text, %s::text[], %s::text[], session => %s::boolean, lease => %s::interval,"
        " catalogue => %s::jsonb), tallybook._timeline()"
    )
    number, timeline = db.execute(call, [EVIL, ["mail"], ["send"], False, "30 s", "[]"]).fetchone()
    beat = (
        "select r.job_id, r.reason, r.attempt from tallybook._on_timeline(%s::text)"
        " left join lateral tallybook.renew(%s::int, %s::bigint, %s::bigint[]) r on true where r.job_id is not null"
    )
    assert db.execute(beat, [timeline, number, 0, []]).fetchall() == []
    found = db.execute("select lag, memory, slots, version from tallybook.workers").fetchone()
    assert found == (None, None, None, None)
    listed, one = await seen.page("/workers"), await seen.page(f"/worker?id={number}")
    assert html.escape(EVIL, quote=False)[:12] in listed and EVIL not in listed + one and "not set" in one
    db.execute("update tallybook.worker set queues = '{mail,late}', slots = '{3}'")  # one number for two queues
    one = await seen.page(f"/worker?id={number}")
    assert [re.search(rf">{name}</a></th><td class=\"n\">(.)</td>", one)[1] for name in ("mail", "late")] == ["3", "–"]
    db.execute("select tallybook.renew(%s, 0, lag => '1.5 s', memory => 94371840)", [number])
    assert "1.5 s" in (text := await seen.page("/workers")) and "90 MiB" in text
    db.execute("update tallybook.worker set seen_at = now() - interval '1 min'")
    assert "silent" in await seen.page("/workers") and "Silent for longer" in await seen.page(f"/worker?id={number}")
    db.execute("update tallybook.worker set seen_at = '-infinity'")  # worker_stop, while it has left something
    assert ">stopped</span>" in await seen.page("/workers") and "was stopped" in await seen.page(f"/worker?id={number}")
    db.execute("select tallybook.worker_stop(%s)", [number])
    assert "It ended" in await seen.page(f"/worker?id={number}") and EVIL not in await seen.page("/workers")


async def test_the_workers_are_live(app: App, dsn: str, db: Any) -> None:
    """S2-09: the live topics of workers have the pages' content, and nothing of a single viewer."""
    db.execute("select tallybook.worker_start('till', '{mail}')")
    site = dashboard(app, dsn=dsn)
    try:
        live: Live = site.live
        assert live.knows("workers") and live.knows("worker:1")
        async with site.nodes.first.read() as conn:
            number = db.execute("select id from tallybook.workers").fetchone()[0]
            texts = [await live._over["workers"][0](""), await live._asks["worker"][0](conn, str(number))]
            assert await live._asks["worker"][0](conn, "x") is None
    finally:
        await site.aclose()
    assert all(text and "mail" in text and "<form" not in text and "token" not in text for text in texts)


def test_the_lag_is_the_longest_wait_since_it_was_asked() -> None:
    """S2-09: the lag is the loop's longest delay since it was last read; a loop that is still blocked counts."""
    import asyncio

    async def life() -> tuple[float | None, float | None]:
        watchdog = Watchdog(asyncio.get_running_loop())
        first = watchdog.lag()
        watchdog.start()
        try:
            # It blocks the loop for more than the half second between two signs.
            time.sleep(1.2)  # noqa: ASYNC251
            return first, watchdog.lag()
        finally:
            watchdog.stop()

    first, second = asyncio.run(life())
    assert first is None and second is not None and second > 0.3
    assert (memory() or 0) > 2**20


async def test_limits_show_each_key_that_is_in_use(app: App, seen: Seen, db: Any) -> None:
    """S2-09: the page shows rules and keys in use with waiting jobs, omits idle keys, and pages through all names."""
    app.rate_limit("acme", 8, per="1 min")
    await app.concurrency_limits.set("customer", 2)
    await app.rate_limits.set("acme", 8, per="1 min")
    await app.breakers.set("provider", 5, per="1 min", open_for="30 s")
    await app.rate_limits.push("acme:<b>x</b>", datetime.now(UTC) + timedelta(hours=1))
    await app.breakers.open("provider:acme", "2 h")
    db.execute(
        "insert into tallybook.concurrency_line (seq, job_id, priority, name) values (1, 9999, 2, 'provider:acme')"
    )
    # More waiting jobs than are counted, more keys than a page has, and keys of other kinds of rules only.
    db.execute(
        "insert into tallybook.concurrency_line (seq, job_id, priority, name)"
        " select n, n, 2, 'customer:many' from generate_series(1, 1200) n"
        " union all select n, n, 2, 'customer:' || to_char(n, 'FM0000') from generate_series(1, 120) n"
    )
    db.execute(
        "insert into tallybook.rate_state (name, next_at, front_at, granted)"
        " select 'customer:' || to_char(n, 'FM0000'), '-infinity', '-infinity', 0 from generate_series(1, 3000) n"
    )
    text = await seen.page("/limits")
    assert "acme:&lt;b&gt;x&lt;/b&gt;" in text and "<b>x</b>" not in text
    assert 'class="badge bad">open<' in text and "no rule any more" not in text
    assert "provider:acme" not in text[text.index('id="h-concurrency"') : text.index('id="h-rates"')]
    names, path, seen_many = [], "/limits", False
    while path:
        text = await seen.page(path)
        part = text[text.index('id="h-concurrency"') : text.index('id="h-rates"')]
        names += re.findall(r'title="(customer[^"]*)"', part)
        seen_many = seen_many or "1,000+" in part
        following = re.search(r'href="([^"]+)">More</a>', part)
        path = html.unescape(following[1]) if following else ""
    assert len(names) == len(set(names)) == 122 and seen_many
    path, looked = "/limits", 0
    while path:
        text, looked = await seen.page(path), looked + 1
        part = text[text.index('id="h-rates"') : text.index('id="h-breakers"')]
        assert "customer" not in part.replace("c=customer", "").replace("r=customer", "")
        following = re.search(r'href="([^"]+)">More</a>', part)
        path = html.unescape(following[1]) if following else ""
    assert 11 <= looked <= 13  # 255 names per page, none of them in use


async def test_fair_keys_are_counted_so_far(app: App, seen: Seen, db: Any) -> None:
    """S2-09: fair keys are shown with their waiting jobs, up to a limit."""
    for key in ("a", EVIL):
        await app.tasks["send"].with_(fair_key=key).enqueue(app, "x")
    found = db.execute("select queue, fair_key, waiting from tallybook.fair_keys() order by 2 desc").fetchall()
    assert found == [("mail", "a", 1), ("mail", EVIL, 1)]
    assert db.execute("select count(*) from tallybook.fair_keys(1)").fetchone() == (1,)
    text = await seen.page("/limits")
    assert EVIL not in text and html.escape(EVIL)[:10] in text
    with pytest.raises(psycopg.Error, match="max_keys 0"):
        db.execute("select from tallybook.rate_keys(max_keys => 0)")


async def test_no_page_shows_a_secret(app: App, seen: Seen, db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """S1-13, S2-09: pages list a provider's secrets by name, never the secret, its ciphertext, nonce or key."""
    key = "k1:" + base64.b64encode(b"0123456789abcdef0123456789abcdef").decode()
    monkeypatch.setenv("TALLYBOOK_KEYS", key)
    await app.providers.set(EVIL[:40], kind="smtp", active=False)
    await app.providers.set("acme", kind="market-data", settings={"password": CANARY})
    await app.providers.set_secret("acme", "api_key", CANARY)
    await app.providers.set_secret("acme", "api_key", CANARY + "2")
    await app.providers.route("equity", "acme")
    held = db.execute(
        "select encode(ciphertext, 'hex'), encode(nonce, 'hex') from tallybook.provider_secret"
    ).fetchall()
    assert len(held) == 2 and (await app.providers.get("acme")).secrets["api_key"].reveal() == CANARY + "2"  # control
    texts = [await seen.page(path) for path in (*PAGES, "/", "/queues")]
    for word in (CANARY, key, key.partition(":")[2], *(word for row in held for word in row)):
        assert not any(word in text for text in texts)
    text = await seen.page("/providers")
    assert "api_key" in text and ", previous" in text and "all others" in text and "not active" in text
    assert EVIL[:40] not in text and "api_key" not in await seen.page("/providers?q=img")


async def test_maintenance_says_what_the_doctor_finds(seen: Seen, db: Any) -> None:
    """S2-09: findings have advice, bad ones come first, and passed checks are folded away."""
    db.execute("select tallybook.enqueue('lost', 'nobody', '{}')")
    text, asked = await seen.page("/maintenance"), 0
    while 'aria-busy="true"' in text:  # as the page does by itself
        assert 'hx-get="/maintenance/findings"' in text and (asked := asked + 1) < 3000
        text = await seen.page("/maintenance/findings")
    shown, _, folded = text.partition('<details class="more">')
    assert "checks passed" in folded and ">connection</th>" in folded and ">connection</th>" not in shown
    assert re.search(r'<span class="badge (bad|warn)">(problem|warning)</span>', shown)
    assert "Findings of the doctor" in await seen.page("/maintenance")


async def test_the_doctor_does_not_hold_up_the_page(dsn: str) -> None:
    """S2-09: a caller gets the findings so far, later callers share that run, and a lost server is a finding."""
    one = Examination(lambda: dsn)
    first, complete = await one.look(0.0)
    assert not complete and len(first) < 10
    found, complete = await one.look(60.0)
    assert complete and len(found) > 10 and one.runs == 1
    assert await one.look() == (found, True) and one.runs == 1
    away, complete = await Examination(lambda: "host=127.0.0.1 port=1 password=hush").look(60.0)
    assert complete and away[0].level == "problem" and "hush" not in str(away)


async def test_the_audit_is_read_page_by_page(seen: Seen, db: Any) -> None:
    """S2-09: rows are newest first, by actor and action, each once, with all values as text."""
    for n in range(120):
        target = json.dumps({"queue": EVIL, "n": n, "api_key": CANARY})
        db.execute(
            "select tallybook.audit_add(%s, 'api', %s, %s::jsonb, '{}')",
            ["ada" if n % 2 else EVIL, "pause" if n < 60 else "retry", target],
        )
    path, rows = "/audit", []
    while path:
        text = await seen.page(path)
        assert EVIL not in text and CANARY not in text
        rows += re.findall(r">n (\d+), queue ", text)
        following = re.search(r'href="([^"]+)">Older</a>', text)
        path = html.unescape(following[1]) if following else ""
    assert [int(n) for n in rows] == list(range(119, -1, -1))
    text = await seen.page("/audit?actor=ada&action=pause")
    assert re.findall(r">n (\d+), queue ", text) == [str(n) for n in range(59, 0, -2)]


@pytest.mark.slow
@pytest.mark.direct("logins of its own")
async def test_what_a_readers_role_may_not_see_is_told(empty_dsn: str) -> None:
    """S2-09: for the reader role pages show what it may see and say what it may not; no page crashes."""
    with house(empty_dsn) as at:
        at.give()
        app = shop()
        at.db.execute(
            "select tallybook.schedule_set('s', 'send', jsonb_build_object('to', %s::text), every => '1 hour')",
            [CANARY],
        )
        at.db.execute("select tallybook.worker_start('till', '{mail}')")
        reader, operator = at.dsn_of(at.user("reader")), at.dsn_of(at.user("operator"))
        async with seeing(app, reader) as seen:
            for path in ("/schedules", "/workers", "/limits", "/providers", "/maintenance"):
                assert CANARY not in await seen.page(path)
            text = await seen.page("/schedule?name=s")
            assert CANARY not in text and "reader's role" in html.unescape(text)
            assert "docs/roles.md" in await seen.page("/audit", 403)
        async with seeing(app, operator) as seen:
            assert CANARY in await seen.page("/schedule?name=s")  # control
            await seen.page("/maintenance")
            assert "enqueued job" in await seen.act("/schedule/run", name="s")
