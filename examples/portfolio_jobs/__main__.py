"""The run: markets close with one worker, then with four, one of them killed; owners ask for things; an operator helps."""

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
    """A market closes while one worker is there; owners do not wait for it."""
    stage.say(f"one worker; the clock moves to the close of {market}")
    played.close(stage, market)
    imported = owners.ask_for_two(stage, later)
    owners.ask("screenshot", owners.empty(stage, next_one), dict.fromkeys(played.SYMBOLS[:3], "7"))
    owners.sync(stage)
    stage.until(lambda: stage.one(played.MOVING) == 0, market)
    stage.say(played.shares(stage, market))
    played.settle(stage)
    result = stage.one("select result from request_status where id = %s", imported)
    stage.say(f"the import has ended: {result['imported']} imported, unknown to the market: {result['unknown']}")


def four_workers(stage: Stage, env: dict[str, str], market: str) -> None:
    """More workers are started, of the next release; one is killed in the middle of the next close."""
    stage.say(f"three more workers, of a release that asks for quotes each second; then {market} closes")
    for name in ("two", "three", "four"):
        stage.worker(name, *WORKER, env={**env, "QUOTES_EVERY": "1 s"})
    stage.until(lambda: stage.one("select count(*) from tallybook.workers where ended_at is null") == 4, "four")
    played.close(stage, market)
    stage.until(lambda: stage.one("select count(*) from valued where market = %s", market) >= MANY // 4, "a quarter")
    stage.until(
        lambda: stage.rows("select from tallybook.job where state = 'running' and worker = 'two'"), "jobs of two"
    )
    stage.kill("two")
    stage.until(lambda: stage.one(played.MOVING) == 0, market)
    lost = stage.one("select count(*) from tallybook.attempt where state = 'lost'")
    stage.say(f"{played.shares(stage, market)}; two was killed, and {lost} attempts with it")


def by_signed_calls(stage: Stage, operators: played.Operators, world: played.World, market: str) -> None:
    """Runs out of schedule, dead letters that are tried again, and what is refused."""
    call = operators.operator.call
    fired = call("POST", f"/schedules/close-{market}/run")
    stage.say(f"by signed calls: {market} is closed out of its schedule: {fired['what']}")
    stage.until(lambda: call("POST", "/schedules/quotes/run")["what"] == "skipped", "a skip")
    stage.say("quotes out of their schedule, while they are being fetched: skipped")
    played.settle(stage)
    dead = stage.one(DEAD)
    stage.say(f"{dead} valuations are dead: the market has no price for {played.HALTED}")
    no = operators.refused()
    stage.say(f"refused, and nothing was changed: {', '.join(no)}")
    assert no == ["late", "replayed", "scope", "signature", "unsigned"] and stage.one(DEAD) == dead

    world.mended = True
    # More than once: where a market has closed twice, of two dead letters with one unique key the second waits its turn.
    while (retried := call("POST", "/dead-letters/retry", {"task": "value", "reason": "failed"})["retried"]) > 0:
        stage.say(f"that is mended; {retried} dead letters are tried again")
        played.settle(stage)
    sent = call("POST", "/schedules/statements/run")
    stage.say(f"the statements that are missing, out of their schedule: {sent['what']}")
    played.settle(stage)
    for name in ("quotes", "rates", "wallets"):
        call("POST", f"/schedules/{name}/pause")
    stage.until(stage.is_idle, "the end")


def main() -> int:
    """Run it; 0 if nothing was lost."""
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
                f"{owners.http.base_url}; the queue's own pages: {operators.url.removesuffix('/api/v1')}/; psql '{stage.dsn}'"
            )
        return stage.end(len(found))


if __name__ == "__main__":
    raise SystemExit(main())
