"""The run: people look while no worker runs, workers are killed and replaced, a day passes, a route changes."""

from __future__ import annotations

import asyncio
import os
import secrets
from datetime import timedelta
from pathlib import Path

import httpx2

from examples.price_feed.world import DELISTED, Visitors, World, account, fill, kill_one_that_calls, providers, serve
from examples.stage import SERVE, SHORT, Stage, free_port
from tallybook import App
from tallybook.extra.providers import new_key

HERE = "examples.price_feed"
MANY, LOOKS, REAL = (
    (4, 10, 2) if SHORT else (12, 50, 4)
)  # assets of each kind, looks, calls of each provider in real time
LINED_UP = "select count(*), count(distinct unique_key), min(priority), max(priority) from tallybook.job"
STOPPED = """\
select a.symbol, (e.body ->> 'job')::bigint from asset a join event e on e.body ->> 'symbol' = a.symbol
 where a.stopped"""


def main() -> int:
    """Run the example; return 0 if nothing was lost."""
    env = {"TALLYBOOK_KEYS": new_key("k1"), "ADMIN_PASSWORD": secrets.token_hex(8), "PROVIDER_TIMEOUT": "1.5"}
    os.environ.update(env)
    with World(secrets.token_hex(16), f"A3={secrets.token_hex(16)}") as world, Stage("price_feed") as stage:
        stage.schema(Path(__file__).parent / "schema.sql")
        asyncio.run(providers(stage.dsn, world))
        fill(stage, MANY)
        url = stage.web("web", f"{HERE}.web:api", free_port(), env)
        visitors = Visitors(url, world)

        def work(*names: str) -> None:
            for name in names:
                stage.worker(name, f"{HERE}.jobs:app", "--queues", "prices=10,mail=5", env=env)

        fetching = [visitors.look() for _ in range(LOOKS)][-1]
        stage.say(f"no worker runs; {LOOKS} looks at Ada's holdings: {fetching} prices are enqueued")
        assert stage.rows(LINED_UP) == [(fetching, fetching, 1, 1)]

        stage.say(f"two workers, {REAL} calls of each provider in real time")
        work("one", "two")
        stage.until(lambda: visitors.look() < fetching and world.least_called() >= REAL, f"{REAL} calls of each")
        left = ({"one", "two"} - {kill_one_that_calls(stage, world)}).pop()
        stage.say("one worker was killed during a call; the clock is moved from turn to turn")
        serve(stage, world)

        stage.say(
            "the other worker stops, a day passes, two workers start: the schedule renews the prices that Ada viewed"
        )
        stage.stop(left)
        world.move(stage.db, timedelta(hours=25))
        work("three", "four")
        serve(stage, world)
        stage.say(f"Bob looks for the first time: {visitors.look('bob')} of his prices are enqueued")
        serve(stage, world)

        admin = httpx2.Client(base_url=url, auth=("admin", env["ADMIN_PASSWORD"]), timeout=60)
        letters = dict(stage.rows(STOPPED))
        page = admin.get("/stopped").raise_for_status().text
        stage.say(f"/stopped shows {page.count('/retry')}; {DELISTED} is routed to yahoo by one row, and retried")
        asyncio.run(App("admin", dsn=stage.dsn).providers.route("stock", "yahoo", symbol=DELISTED))
        admin.post(f"/stopped/{letters[DELISTED]}/retry")
        serve(stage, world)

        lost = account(stage, world, visitors)
        pages = [admin.get(path).status_code for path in ("/holdings/ada", "/holdings/bob", "/stopped", "/queue/")]
        stage.say(f"the pages answer {pages}")
        if SERVE:
            stage.say(
                f"{url}/holdings/ada, /stopped, /queue/ (user admin, password {env['ADMIN_PASSWORD']});"
                f" psql '{stage.dsn}'"
            )
        return stage.end(lost)


if __name__ == "__main__":
    raise SystemExit(main())
