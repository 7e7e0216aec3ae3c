"""The run: submissions arrive while the queue is missing, while no worker runs, and while everything outside fails."""

from __future__ import annotations

import asyncio
import os
import secrets
from datetime import timedelta
from pathlib import Path

import httpx2

from examples.form_submissions.world import Visitors, World, account, providers
from examples.stage import SHORT, Stage, free_port
from tallybook.extra.providers import new_key
from tallybook.testing import travel

HERE = "examples.form_submissions"
MANY = 24 if SHORT else 200
WAITS = """\
select extract(epoch from j.run_at - (j.errors -> -1 ->> 'at')::timestamptz) / 60
  from operation o join tallybook.job j on j.id = o.job_id join submission s on s.id = o.submission
 where j.state = 'retrying' and s.form = 'broken' and o.kind = 'webhook'"""
DEAD = """\
select s.form, j.id from operation o join tallybook.job j on j.id = o.job_id join submission s on s.id = o.submission
 where j.state = 'dead' and o.kind = 'webhook'"""
MOVING = """\
select count(*) from tallybook.job where state in ('available', 'running') or state = 'retrying' and run_at <= now()"""
NEXT = "select max(run_at) - clock_timestamp() from tallybook.job where state = 'retrying'"


def main() -> int:
    """Run the example; return 0 if nothing was lost."""
    password, cron = secrets.token_hex(8), secrets.token_hex(8)
    env = {"TALLYBOOK_KEYS": new_key("k1"), "ADMIN_PASSWORD": password, "CRON_TOKEN": cron, "DEADLINE": "1.5"}
    os.environ.update(env)
    with World(secrets.token_hex(8)) as world, Stage("form_submissions") as stage:
        stage.schema(Path(__file__).parent / "schema.sql")
        asyncio.run(providers(stage.dsn, world))
        url = stage.web("web", f"{HERE}.web:api", free_port(), env)
        visitors = Visitors(url)
        admin = httpx2.Client(base_url=url, auth=("admin", password), timeout=60)

        stage.say("the queue is missing (its schema is renamed): 5 submissions are still saved and answered")
        stage.db.execute("alter schema tallybook rename to away")
        asyncio.run(visitors.submit(["contact"] * 5))
        stage.db.execute("alter schema away rename to tallybook")
        assert stage.one("select count(*) from submission where not handed_over") == 5

        stage.say(f"{MANY} submissions while no worker runs, five operations each")
        asyncio.run(visitors.submit(["broken", "gone", *["contact", "signup"] * (MANY // 2 - 1)]))
        asyncio.run(visitors.submit(["contact"]))
        withdrawn = max(visitors.promised)
        assert admin.post(f"/submissions/{withdrawn}/cancel").status_code == 303
        stage.say(f"submission {withdrawn} is withdrawn: its five operations are cancelled")
        for _ in range(2):
            tick = httpx2.post(f"{url}/cron/process", headers={"Authorization": f"Bearer {cron}"}, timeout=60)
            stage.say(f"a cron calls /cron/process: {tick.raise_for_status().json()}")

        stage.say(f"two workers, and {MANY} more while everything outside is slow or fails; one worker is killed")
        for name in ("one", "two"):
            stage.worker(name, f"{HERE}.jobs:app", "--queues", "integrations=20,default=2", env=env)
        asyncio.run(visitors.submit(["contact", "signup"] * (MANY // 2)))
        stage.kill("one")
        stage.until(lambda: stage.one(MOVING) == 0, "the first attempts")

        waits = []
        while not stage.is_idle() or stage.one("select count(*) from submission where not handed_over"):
            waits += [f"{minutes:.0f}" for (minutes,) in stage.rows(WAITS)]
            ahead = stage.one(NEXT) or timedelta(minutes=1)  # catch_up runs every minute
            retrying = stage.one("select coalesce(sum(retrying), 0)::int from tallybook.counts()")
            stage.say(f"{retrying} wait for their next attempt; the clock moves by {ahead.seconds // 60} minutes")
            travel(stage.dsn, ahead)
            stage.until(lambda: stage.one(MOVING) == 0, "the due attempts")
        stage.say(f"the broken webhook was retried after {', '.join(waits)} minutes, then it was dead")

        world.mended = True
        letters = dict(stage.rows(DEAD))
        shown = admin.get("/dead").text
        stage.say(f"/dead shows {shown.count('/retry')} dead letters: one is retried, one is cancelled")
        admin.post(f"/operations/{letters['broken']}/retry")
        admin.post(f"/operations/{letters['gone']}/cancel")
        stage.until(stage.is_idle, "the retried job")

        return account(stage, world, visitors, admin)


if __name__ == "__main__":
    raise SystemExit(main())
