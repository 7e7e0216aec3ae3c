"""The run: people look while nobody works, workers are killed and started anew, a day passes, and a symbol is routed elsewhere."""

from __future__ import annotations

import asyncio
import os
import secrets
from datetime import timedelta
from pathlib import Path

import httpx2

from examples.price_feed.world import DELISTED, PROVIDERS, Visitors, World, account, fill, providers
from examples.stage import SERVE, SHORT, Stage, free_port
from tallybook import App
from tallybook._model.keyring import new_key

HERE = "examples.price_feed"
MANY, LOOKS = (4, 10) if SHORT else (12, 50)
REAL = 2 if SHORT else 4
"""So many calls each provider gets by the real clock, before it is moved."""
MOVING = """\
select count(*) from tallybook.job
 where state in ('available', 'running') or state in ('scheduled', 'retrying') and run_at <= clock_timestamp()"""
RUNNING = "select count(*) from tallybook.job where state = 'running'"
NEXT = "select min(run_at) - clock_timestamp() from tallybook.job where state in ('scheduled', 'retrying')"
WANTED = """\
select count(*) from asset_now a join holding h on h.asset = a.id and h.active
 where a.fetched and a.stale and (a.priced_at is null or a.viewed_at > now() - interval '48 h')"""
CALLING = (
    "select worker from tallybook.job where state = 'running' and task = 'fetch_price' order by started_at limit 1"
)
LINED_UP = "select count(*), count(distinct unique_key), min(priority), max(priority) from tallybook.job"
STOPPED = "select a.symbol, (e.body ->> 'job')::bigint from asset a join event e on e.body ->> 'symbol' = a.symbol where a.stopped"


def main() -> int:
    """Run it; 0 if nothing was lost."""
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
        stage.say(f"nobody works; {LOOKS} looks at Ada's holdings: {fetching} prices are on their way")
        assert stage.rows(LINED_UP) == [(fetching, fetching, 1, 1)]

        stage.say(f"two workers, {REAL} calls of each provider by the real clock")
        work("one", "two")
        stage.until(lambda: visitors.look() < fetching and least_called(world) >= REAL, f"{REAL} calls of each")
        left = ({"one", "two"} - {kill_one_that_calls(stage, world)}).pop()
        stage.say("the other worker was killed while its call was under way; the clock is moved from turn to turn")
        serve(stage, world)

        stage.say("no worker is left, a day passes, two others are started: the minute renews what Ada has looked at")
        stage.stop(left)
        world.move(stage.db, timedelta(hours=25))
        work("three", "four")
        serve(stage, world)
        stage.say(f"Bob has not looked at all: {visitors.look('bob')} of his prices are put in line now that he does")
        serve(stage, world)

        admin = httpx2.Client(base_url=url, auth=("admin", env["ADMIN_PASSWORD"]), timeout=60)
        letters = dict(stage.rows(STOPPED))
        page = admin.get("/stopped").raise_for_status().text
        stage.say(f"/stopped shows {page.count('/retry')}; {DELISTED} is routed to yahoo by one row, and tried again")
        asyncio.run(App("admin", dsn=stage.dsn).providers.route("stock", "yahoo", symbol=DELISTED))
        stage.until(
            lambda: stage.one("select tallybook.provider_resolve('stock', %s)", DELISTED) == "yahoo", "the route"
        )
        admin.post(f"/stopped/{letters[DELISTED]}/retry")
        serve(stage, world)

        lost = account(stage, world, visitors)
        pages = [admin.get(path).status_code for path in ("/holdings/ada", "/holdings/bob", "/stopped", "/queue/")]
        stage.say(f"the pages answer {pages}")
        if SERVE:
            stage.say(f"{url}/holdings/ada, /stopped and /queue/ (user admin, password {env['ADMIN_PASSWORD']})")
            stage.say(f"psql '{stage.dsn}'")
        return stage.end(lost)


def least_called(world: World) -> int:
    """How often the provider was called that was called least."""
    return min(len(world.calls[name]) for name in PROVIDERS)


def kill_one_that_calls(stage: Stage, world: World) -> str:
    """SIGKILL for a worker that a provider keeps waiting; its name."""
    killed: list[str] = []

    def strike() -> bool:
        name = stage.one(CALLING) if world.kept_waiting else None
        if name is not None:
            stage.kill(name)
            killed.append(name)
        return name is not None

    world.keeps_waiting = True
    stage.until(strike, "a call that is under way")
    world.keeps_waiting = False
    return killed[0]


def serve(stage: Stage, world: World) -> None:
    """Move the clock from turn to turn until all that is wanted has come, or has been given up."""
    moved = world.moved
    while not stage.is_idle() or stage.one(WANTED):
        stage.until(lambda: stage.one(MOVING) == 0, "what is due")
        ahead = stage.one(NEXT)
        stage.db.execute("select tallybook.pause('prices')")  # so that no call is on its way meanwhile
        stage.until(lambda: not stage.one(RUNNING), "a moment's rest")
        world.move(stage.db, max(ahead or timedelta(minutes=1), timedelta(0)))
        stage.db.execute("select tallybook.resume('prices')")
        if ahead is None:  # the minute's schedule puts in what is wanted
            stage.until(lambda: not stage.is_idle() or not stage.one(WANTED), "the schedule")
    prices, stopped = stage.one("select count(*) from price"), stage.one("select count(*) from asset where stopped")
    stage.say(f"{(world.moved - moved) / 60:.1f} minutes on: {prices} prices on record, {stopped} assets stopped")


if __name__ == "__main__":
    raise SystemExit(main())
