"""The run: markets close with one worker, then with four, one of them killed; owners and an operator send requests."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from examples.portfolio_jobs import world as played
from examples.stage import SERVE, SHORT, Stage, free_port, listens

HERE = "examples.portfolio_jobs"
WORKER = (f"{HERE}.jobs:app", "--queues", "default=3")
MANY = 40 if SHORT else 120  # portfolios for each market
DEAD = "select count(*) from tallybook.job where state = 'dead'"


def one_worker(stage: Stage, owners: played.Owners, market: str, next_one: str, later: str) -> None:
    """Close a market while one worker runs; owners' requests do not wait for it."""
    stage.say(f"one worker; the clock moves to the close of {market}")
    played.close(stage, market)
    imported = owners.ask_for_two(stage, later)
    owners.ask("screenshot", owners.empty(stage, next_one), dict.fromkeys(played.SYMBOLS[:3], "7"))
    owners.sync(stage)
    stage.until(lambda: stage.one(played.MOVING) == 0, market)
    stage.say(played.shares(stage, market))
    played.settle(stage)
    result = stage.one("select result from request_status where id = %s", imported)
    stage.say(f"the import is done: {result['imported']} imported, unknown to the market: {result['unknown']}")


def four_workers(stage: Stage, env: dict[str, str], market: str) -> None:
    """Start three workers of the next release, and kill one in the middle of the next close."""
    stage.say(f"three more workers, of a release that fetches quotes every second; then {market} closes")
    for name in ("two", "three", "four"):
        stage.worker(name, *WORKER, env={**env, "QUOTES_EVERY": "1 s"})
    stage.until(lambda: stage.one("select count(*) from tallybook.workers where ended_at is null") == 4, "four workers")
    played.close(stage, market)
    stage.until(
        lambda: stage.one("select count(*) from valued where market = %s", market) >= MANY // 4,
        "a quarter of the valuations",
    )
    stage.until(
        lambda: stage.rows("select from tallybook.job where state = 'running' and worker = 'two'"), "jobs of two"
    )
    stage.kill("two")
    stage.until(lambda: stage.one(played.MOVING) == 0, market)
    lost = stage.one("select count(*) from tallybook.attempt where state = 'lost'")
    stage.say(f"{played.shares(stage, market)}; two was killed, which lost {lost} attempts")


def by_signed_calls(stage: Stage, operators: played.Operators, world: played.World, market: str) -> None:
    """Run schedules early and retry dead letters by signed calls; check that wrong calls are refused."""
    call = operators.operator.call
    fired = call("POST", f"/schedules/close-{market}/run")
    stage.say(f"by a signed call: {market} closes ahead of its schedule: {fired['what']}")
    stage.until(lambda: call("POST", "/schedules/quotes/run")["what"] == "skipped", "a skip")
    stage.say("an extra run of quotes while they are being fetched: skipped")
    played.settle(stage)
    dead = stage.one(DEAD)
    stage.say(f"{dead} valuations are dead: the market has no price for {played.HALTED}")
    no = operators.refused()
    stage.say(f"refused calls, which changed nothing: {', '.join(no)}")
    assert no == ["late", "replayed", "scope", "signature", "unsigned"] and stage.one(DEAD) == dead

    world.mended = True
    # Repeated: if a market has closed twice, two dead letters may have one unique key, and the second waits.
    while (retried := call("POST", "/dead-letters/retry", {"task": "value", "reason": "failed"})["retried"]) > 0:
        stage.say(f"the price is there now; {retried} dead letters are retried")
        played.settle(stage)
    sent = call("POST", "/schedules/statements/run")
    stage.say(f"an extra run for the missing statements: {sent['what']}")
    played.settle(stage)
    for name in ("quotes", "rates", "wallets"):
        call("POST", f"/schedules/{name}/pause")
    stage.until(stage.is_idle, "the last jobs")


def main() -> int:
    """Run the example; return 0 if nothing was lost."""
    with played.World() as world, Stage("portfolio_jobs") as stage, TemporaryDirectory() as folder:
        stage.schema(Path(__file__).parent / "schema.sql")
        played.seed(stage.db, MANY)
        port, env = free_port(), {"MARKET_URL": world.url}
        stage.process("pages", "flask", "--app", f"{HERE}.web:web", "run", "--port", str(port))
        operators = played.operators(stage, Path(folder))
        stage.worker("one", *WORKER, env=env)
        stage.until(lambda: listens(port) and len(stage.rows(played.CLOSES)) == 3, "pages and schedules")
        owners = played.Owners(f"http://127.0.0.1:{port}")
        first, second, third = (market for market, _ in stage.rows(played.CLOSES))

        one_worker(stage, owners, first, second, third)
        four_workers(stage, env, second)
        by_signed_calls(stage, operators, world, third)

        for name, fires, skips in stage.rows("select name, fired_count, skipped_count from tallybook.schedules"):
            stage.say(f"{name}: {fires} fired, {skips} skipped")
        found = played.account(stage, world, owners)
        for what in found[:10]:
            stage.say(f"wrong: {what}")
        if SERVE:
            stage.say(
                f"{owners.http.base_url}; the queue's own pages: {operators.url.removesuffix('/api/v1')}/;"
                f" psql '{stage.dsn}'"
            )
        return stage.end(len(found))


if __name__ == "__main__":
    raise SystemExit(main())
