"""make example-harvester: a hundred concurrent visits read a site, a worker is killed, a day passes; then the check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2

from examples.harvester.jobs import app, visit
from examples.harvester.world import Site
from examples.stage import SERVE, SHORT, Stage, free_port, listens
from tallybook.testing import travel

HERE = "examples.harvester"
PAGES = 1_500 if SHORT else 20_000
SESSIONS = os.environ.get("SESSIONS", "3" if SHORT else "50")
"""Database sessions of each worker for its visits."""
BOOKMARKS = range(101, 401)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
_OLD = "select count(*) from tallybook.subject_push_many('pages', 'visit', %s, %s) where report = 'created'"
_OLD_LEFT = """\
select count(*) from tallybook.subject
 where task = 'visit' and subject = any(%s) and args ? 'page' and state = 'planned'"""
_SESSIONS = (
    "select count(*) from pg_stat_activity where datname = current_database() and backend_type = 'client backend'"
)
_DUE = """\
select exists (
  select from tallybook.backlog() where queue = 'pages' and state = 'scheduled' and oldest_run_at <= now())"""
_FAILED_ONCE = """\
select e.subject from tallybook.error e join visit v on v.url = e.subject and v.iteration = 1
 where e.task = 'visit' limit 1"""


class Progress:
    """Prints progress from the counters, whose cost does not depend on the number of pages."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.said_at, self.visits, self.sessions = stage, time.monotonic(), 0, 0

    def counted(self) -> Mapping[str, int]:
        """Return the counts of the queue `pages` over all tasks."""
        states = ("available", "running", "retrying", "scheduled", "dead", "snoozed", "completed", "failed")
        found = [one for one in app.counts.list().sync(self.stage.db) if one.queue == "pages"]
        return {name: sum(getattr(one, name) for one in found) for name in states}

    def look(self) -> Mapping[str, int]:
        """Return the current counts; print them every three seconds."""
        now, time_now = self.counted(), time.monotonic()
        self.sessions = max(self.sessions, self.stage.one(_SESSIONS))
        if time_now - self.said_at >= 3:
            visits = now["snoozed"]  # a visit that plans the next one does not complete its job
            self.stage.say(
                f"{visits} visits, {(visits - self.visits) / (time_now - self.said_at):.0f} per second;"
                f" available {now['available']}, running {now['running']}, retrying {now['retrying']},"
                f" planned {now['scheduled']}, dead {now['dead']}"
            )
            self.said_at, self.visits = time_now, visits
        return now

    def half(self) -> bool:
        return self.look()["snoozed"] >= PAGES // 2

    def is_over(self) -> bool:
        """Return whether nothing is left to visit before tomorrow."""
        due = self.stage.one(_DUE)  # first: jobs promoted between the two reads are then counted as available
        now = self.look()
        return not due and now["available"] + now["running"] + now["retrying"] == 0


def main() -> int:
    """Run the example and return the exit status."""
    with Stage("harvester", connections=200, seconds=280 if SHORT else 900) as stage:
        stage.schema(Path(__file__).parent / "schema.sql")
        port = free_port()
        stage.process("site", f"{HERE}.world", str(port), str(PAGES))
        stage.until(lambda: listens(port), "the site listens")
        site = httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30)

        old = [f"/page/{n}" for n in BOOKMARKS]
        made = stage.one(_OLD, old, [json.dumps({"page": n}) for n in BOOKMARKS])
        visit.subject("/page/1").push("/page/1").sync(stage.db)
        stage.say(
            f"{made} bookmarks of the previous release, args of version 1, and the home of a site of {PAGES} pages"
        )
        for name in ("one", "two"):
            start(stage, name, port)
        progress = Progress(stage)
        stage.until(progress.half, "half of the pages")
        stage.kill("one")
        stage.say("killed the worker one, with up to 50 visits running; three takes its place")
        start(stage, "three", port)
        stage.until(progress.is_over, "the first round")
        stage.say(f"the first round is done; subjects that still have args of version 1: {stage.one(_OLD_LEFT, old)}")

        stage.say("an hour passes: each item is checked once, even if many pages name it")
        travel(stage.dsn, HOUR)
        stage.until(lambda: items_open(stage) == 0, "the items")
        site.post("/day")
        stage.say("a day passes: pages that change daily are visited again, the others in a week")
        travel(stage.dsn, DAY)
        stage.until(progress.is_over, "the second round")
        travel(stage.dsn, HOUR)
        stage.until(lambda: items_open(stage) == 0, "the items that have changed")

        record = site.get("/record").raise_for_status().json()
        stage.say(
            f"the site had at most {record['most_under_way']} requests at a time,"
            f" by {progress.sessions} database sessions"
        )
        show(stage)
        if SERVE:
            stage.process("web", "tallybook", "web", "-A", f"{HERE}.jobs:app", "--port", str(web := free_port()))
            stage.say(f"open http://127.0.0.1:{web}/ or psql '{stage.dsn}'")
        visits = stage.one("select count(*) from visit")
        wrong, planned = account(stage, Site(PAGES), record)
        return stage.end(wrong, done=visits, planned=planned)


def start(stage: Stage, name: str, port: int) -> None:
    """Start a worker with 50 slots for visits and five for items."""
    env = {"SITE": f"http://127.0.0.1:{port}", "SESSIONS": SESSIONS}
    stage.worker(name, f"{HERE}.jobs:app", "--queues", "pages=50,items=5", "--log-level", "error", env=env)


def items_open(stage: Stage) -> int:
    return sum(one.open for one in app.counts.list().sync(stage.db) if one.queue == "items")


def show(stage: Stage) -> None:
    """Print the trace of a page, and the pages that have stopped with their reasons."""
    failed = stage.one(_FAILED_ONCE)
    for words in (
        ("job", "trace", "--subject", failed or "/page/1", "--task", "visit"),
        ("subject", "list", "--state", "killed", "--state", "dead", "--limit", "5"),
    ):
        said = subprocess.run(
            [sys.executable, "-m", "tallybook", *words, "--dsn", stage.dsn],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        stage.say(f"tallybook {' '.join(words)}\n{said.stdout.rstrip()}")


def account(stage: Stage, site: Site, record: Mapping[str, Any]) -> tuple[int, int]:
    """Count what is missing, wrong or doubled by the tables and the site's record; return it and the planned visits."""
    news = {page for page in site.readable if site.is_news(page)}
    found: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}
    wrong = 0
    for url, iteration, etag in stage.rows("select url, iteration, etag from visit"):
        page = int(url.removeprefix("/page/"))
        found.setdefault(iteration, Counter())[page] += 1
        wrong += etag != site.etag(page, iteration + 1)
    for day, wanted in ((1, site.readable), (2, news)):
        noted, read = found[day - 1], {int(page): n for page, n in record["read"].get(str(day), {}).items()}
        lost, twice = wanted - noted.keys(), [page for page, n in noted.items() if n > 1]
        unasked = (noted.keys() | read.keys()) - wanted
        again = sum(n > 1 for n in read.values())
        stage.say(
            f"day {day}: {len(wanted)} pages to read; noted {len(noted)}, missing {len(lost)}, twice {len(twice)},"
            f" uncalled for {len(unasked)}; the site has served {len(read)}, {again} of them more than once"
        )
        wrong += len(lost) + len(twice) + len(unasked) + len(wanted ^ read.keys())
    named = {item for page in site.readable for item in site.items(page, 1)}
    right = 0
    for item, cents, url in stage.rows("select id, cents, url from item"):
        page = int(url.removeprefix("/page/"))
        right += item in named and any(site.items(page, day).get(item) == cents for day in (1, 2))
    stage.say(f"{len(named)} items are named; {right} have a price from the site; answers: {record['answers']}")
    return wrong + len(named) - right, len(site.readable)


if __name__ == "__main__":
    raise SystemExit(main())
