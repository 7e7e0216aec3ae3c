"""The example harvester: small sites read in a test, its account, and the whole run with a killed worker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import psycopg
import pytest

from examples.harvester.__main__ import account
from examples.harvester.jobs import app, price, visit
from examples.harvester.world import Site
from examples.stage import free_port, listens
from tallybook.testing import drain, travel
from tests.support.waiting import wait_until

HERE = Path(__file__).parents[1]
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


class Harvest:
    """A site's server and a database whose jobs are drained."""

    def __init__(self, dsn: str, db: psycopg.Connection[Any], url: str, pages: int) -> None:
        self.dsn, self.db, self.site = dsn, db, Site(pages)
        self.client = httpx2.Client(base_url=url)

    def push(self, page: int) -> str:
        """Push a page before all others, so that `read_first` reads only this one."""
        return visit.with_(priority=1).subject(f"/page/{page}").push(f"/page/{page}").sync(self.db).report

    def read_first(self) -> None:
        """Read one page with its retries; the pages that it links to stay available."""
        drain(app, dsn=self.dsn, queues=["pages"], max_jobs=1)
        while self.retrying():
            travel(self.dsn, timedelta(seconds=5))
            drain(app, dsn=self.dsn, queues=["pages"], max_jobs=1)

    def read(self) -> None:
        """Drain until nothing is due, including retries of the next seconds."""
        while drain(app, dsn=self.dsn, queues={"pages": 40, "items": 5}).processed or self.retrying():
            travel(self.dsn, timedelta(seconds=5))

    def retrying(self) -> int:
        return sum(one.retrying for one in app.counts.list().sync(self.db))

    def rows(self, query: str, *values: object) -> list[Any]:
        return self.db.execute(query.encode(), values).fetchall()

    def account(self) -> tuple[int, int]:
        """Run the example's own check on the current database."""
        stage: Any = SimpleNamespace(rows=self.rows, say=lambda text: None)
        return account(stage, self.site, self.client.get("/record").json())


@contextmanager
def harvesting(dsn: str, pages: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harvest]:
    port = free_port()
    words = [sys.executable, "-m", "examples.harvester.world", str(port), str(pages)]
    server = subprocess.Popen(words, cwd=HERE.parents[1])
    try:
        wait_until(lambda: listens(port), "the site listens")
        monkeypatch.setenv("SITE", f"http://127.0.0.1:{port}")
        with psycopg.connect(dsn, autocommit=True) as db:
            db.execute((HERE / "schema.sql").read_bytes())
            yield Harvest(dsn, db, f"http://127.0.0.1:{port}", pages)
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def small(tallybook_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harvest]:
    """A site with 120 linked pages."""
    with harvesting(tallybook_dsn, 120, monkeypatch) as harvest:
        yield harvest


@pytest.fixture
def large(tallybook_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harvest]:
    """A site that is large enough to have pages of every kind."""
    with harvesting(tallybook_dsn, 4000, monkeypatch) as harvest:
        yield harvest


@pytest.mark.slow
def test_every_page_is_read_once_a_round_and_every_item_checked(small: Harvest) -> None:
    """S3-02 S3-07 S3-11 S3-12 S3-14: from one page to all that it leads to, and a second round
    of what is due; the account finds each loss.
    """
    small.push(1)
    small.read()
    readable = small.site.readable
    assert len(small.rows("select distinct url from visit where iteration = 0")) == len(readable) > 100
    planned = next(one for one in app.counts.list().sync(small.db) if one.queue == "items").scheduled
    items = {item for page in readable for item in small.site.items(page, 1)}
    mentions = sum(len(small.site.items(page, 1)) for page in readable)
    assert planned == len(items) < mentions, "an item that many pages name is one subject, and waits for its hour"
    travel(small.dsn, HOUR)
    small.read()
    assert small.rows("select count(*), max(checks) from item") == [(len(items), 1)]

    small.client.post("/day")
    travel(small.dsn, DAY)
    small.read()
    again = {int(url.removeprefix("/page/")) for (url,) in small.rows("select url from visit where iteration = 1")}
    assert again == {page for page in readable if small.site.is_news(page)} != set()
    travel(small.dsn, HOUR)
    small.read()
    assert small.account() == (0, len(readable))

    small.db.execute("insert into visit select * from visit where iteration = 1 limit 1")
    assert small.account()[0] == 1, "a visit too many is found"
    small.db.execute("delete from visit where url = '/page/1'")
    assert small.account()[0] >= 2, "a visit that is missing is found"
    small.db.execute("update item set cents = cents + 100000")
    assert small.account()[0] >= 2 + len(items), "prices that nobody has said are found"


@pytest.mark.slow
def test_what_was_read_before_is_asked_for_by_its_edition(small: Harvest) -> None:
    """S3-27: a visit leaves new args for the next one, which is answered 304 where nothing has changed."""
    page = next(n for n in sorted(small.site.readable) if small.site.is_leaf(n))
    small.push(page)
    small.read_first()
    info = visit.subject(f"/page/{page}").get().sync(small.db)
    assert info is not None and info.args["etag"] == small.site.etag(page, 1)
    assert (info.state, info.iterations) == ("planned", 1)
    travel(small.dsn, 7 * DAY)
    small.read_first()
    query = "select iteration, changed from visit where url = %s order by 1"
    assert small.rows(query, info.subject) == [(0, True), (1, False)]


@pytest.mark.slow
def test_five_failures_in_a_row_stop_a_page_and_a_push_does_not_bring_it_back(large: Harvest) -> None:
    """S3-04 S3-28 S3-29: a page that fails is tolerated five times, one that is gone not at all;
    both keep their names and show the reason.
    """
    pages = range(1, large.site.pages + 1)
    broken = next(n for n in pages if large.site.is_broken(n))
    gone = next(n for n in pages if large.site.is_gone(n))
    for page in (broken, gone):
        large.push(page)
    large.read()
    stopped = app.subjects.list(task="visit", states=["killed", "dead"]).sync(large.db).subjects
    assert {(one.subject, one.state, one.failures, one.last_error) for one in stopped} == {
        (f"/page/{broken}", "dead", 5, "status 500"),
        (f"/page/{gone}", "killed", 0, "there is no such page any more"),
    }
    assert large.push(broken) == large.push(gone) == "unchanged"
    query = "select message, ref_id from tallybook.error where subject = %s order by ended_at"
    errors = large.rows(query, f"/page/{broken}")
    assert errors == [("status 500", f"{broken}-{n}") for n in range(1, 6)]


@pytest.mark.slow
def test_a_page_that_fails_twice_is_read_and_its_failures_start_anew(large: Harvest) -> None:
    """S3-04 S3-35: only failures in a row count; the trace of the page shows all of them."""
    page = next(n for n in sorted(large.site.readable) if large.site.failures(n, 1) == 2 and large.site.is_leaf(n))
    large.push(page)
    large.read_first()
    info = visit.subject(f"/page/{page}").get().sync(large.db)
    assert info is not None and (info.state, info.failures, info.iterations) == ("planned", 0, 1)
    told = [event.event for event in app.jobs.trace(subject=f"/page/{page}", task="visit").sync(large.db)]
    assert told == ["enqueued", *["started", "failed"] * 2, "started", "snoozed", "scheduled"]


def test_args_of_the_release_before_are_upgraded_in_the_flow(large: Harvest) -> None:
    """S3-39: a page pushed by number, as version 1, is visited by its address, and has version 2 from then on."""
    page = next(n for n in sorted(large.site.readable) if large.site.is_leaf(n) and not large.site.failures(n, 1))
    name = f"/page/{page}"
    large.db.execute(
        "select tallybook.subject_push('pages', 'visit', %s, %s)", (name, psycopg.types.json.Jsonb({"page": page}))
    )
    large.read_first()
    info = visit.subject(name).get().sync(large.db)
    assert info is not None and info.args == {"url": name, "found_on": "", "etag": large.site.etag(page, 1)}


@pytest.mark.slow
def test_a_page_that_names_an_item_changes_what_is_planned(large: Harvest) -> None:
    """S3-12 S3-13 S3-25: the newest mention counts, also a page's; the report has the check's old and new time."""
    soon = price.with_(delay="1 hour")
    (first,) = app.subjects.upsert_many([soon.subject("item:7").job(7, 100, "/page/1")]).sync(large.db)
    (second,) = app.subjects.upsert_many([soon.subject("item:7").job(7, 250, "/page/2")]).sync(large.db)
    assert (first.report, second.report, second.old_run_at) == ("created", "updated", first.new_run_at)
    travel(large.dsn, 2 * HOUR)
    large.read()
    assert large.rows("select id, cents, url, checks from item") == [(7, 250, "/page/2", 1)]
    (third,) = app.subjects.upsert_many([soon.subject("item:7").job(7, 300, "/page/1")]).sync(large.db)
    assert third.report == "updated", "its name was kept, and it begins again"
    page = next(n for n in sorted(large.site.readable) if large.site.is_leaf(n) and large.site.items(n, 1))
    named = large.site.items(page, 1)
    app.subjects.upsert_many([soon.subject(f"item:{n}").job(n, 1, "/page/1") for n in named]).sync(large.db)
    large.push(page)
    large.read_first()
    planned = [price.subject(f"item:{n}").get().sync(large.db) for n in named]
    assert [one and one.args["cents"] for one in planned] == [*named.values()]


@pytest.mark.slow
@pytest.mark.direct("counts the sessions of its workers")
def test_the_whole_run_loses_nothing() -> None:
    """S3-06 S3-08 S3-10 S3-39: 100 visits at once in 2 processes, one killed: each page noted once a round, 0 lost."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TALLYBOOK_", "PG", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "examples.harvester"], cwd=HERE.parents[1], env={**env, "SHORT": "1"},
        capture_output=True, text=True, timeout=290, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(r"harvester: \d+ processed, \d+ failed, \d+ retried, 0 lost", done.stdout.splitlines()[-1])
    assert done.stdout.count("missing 0, twice 0, uncalled for 0") == 2
    assert "subjects that still have args of version 1: 0" in done.stdout
    found = re.search(r"by (\d+) database sessions", done.stdout)
    assert found is not None and int(found[1]) <= 45
