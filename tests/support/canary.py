"""An app with handlers that treat a provider carelessly. As a control, its settings have a text that may be seen."""

import dataclasses
import json
import os
import pickle
import pprint
import sys
import traceback
from datetime import timedelta
from typing import Any

from tallybook import App, Constant, Context, Dead
from tallybook.extra.providers import Provider

app = App("canary")


@app.lifespan
async def clients(ctx: Context) -> Any:
    ctx.state.all = await ctx.providers.load()
    print("lifespan", ctx.state.all)
    yield


@app.around_job
async def around(ctx: Context) -> Any:
    try:
        yield
    except Exception as error:
        found = traceback.TracebackException.from_exception(error, capture_locals=True)
        print("".join(found.format()), file=sys.stderr)  # like an error tracker
        raise


@app.task(max_attempts=1)
async def use(ctx: Context) -> dict[str, Any]:
    """Log and print the provider, report it as progress, and return what can be returned."""
    acme = await ctx.providers.get("acme")
    key = acme.secrets["api_key"]
    ctx.log.info("using %s, %r, %s", acme, acme.secrets, key, extra={"provider": acme, "key": key})
    ctx.log.debug(f"{key} {key!r} {acme.secrets} {key.previous}")
    print(json.dumps({"acme": acme, "key": key}, default=str), pprint.pformat([acme, acme.secrets, ctx.providers]))
    print(dataclasses.asdict(acme), vars(acme), dir(key))
    for ship in (pickle.dumps, json.dumps):
        try:
            ship(acme)
        except Exception:
            ctx.log.exception("cannot ship %s", acme)
    await ctx.progress(0.5, f"{acme} {acme.secrets}"[:900])
    return {"settings": acme.settings, "shown": f"{acme} {acme.secrets} {key}"}


@app.task(retry=Constant(timedelta(0)), max_attempts=2)
async def fail(ctx: Context) -> None:
    """Fail with the provider in a local variable, in the message, in the cause and in a note."""
    acme = await ctx.providers.get("acme")
    key = acme.secrets["api_key"]
    try:
        raise KeyError(acme, key)
    except KeyError as error:
        found = RuntimeError(f"failed with {acme} and {acme.secrets}", key, key.previous)
        found.add_note(f"{key} {acme!r}")
        raise found from error


@app.task(max_attempts=1)
async def give_back(ctx: Context) -> Provider:
    """Return the provider, which cannot be stored."""
    return await ctx.providers.get("acme")


@app.task(max_attempts=1)
def give_back_secrets() -> Any:
    """Return the secrets from a plain handler."""
    return {**app.providers.get_sync("acme").secrets}


@app.task(max_attempts=1)
async def bury(ctx: Context) -> Dead:
    """Use the provider as the reason."""
    return Dead(f"{await ctx.providers.get('acme')} {ctx.state.all['acme'].secrets}")


@app.task(max_attempts=1)
async def pass_on(ctx: Context) -> None:
    """Try to store the provider in another job's args and in the checkpoint."""
    acme = await ctx.providers.get("acme")
    for attempt in (ctx.set_checkpoint(acme), ctx.set_checkpoint(acme.secrets), _ask.enqueue(app, acme.secrets)):
        try:
            await attempt
        except Exception:
            ctx.log.exception("refused %s", acme)
    await _ask.enqueue(app, {"shown": str(acme.secrets), **acme.settings})


@app.task(max_attempts=1)
async def broken(ctx: Context) -> None:
    """Fail to read a secret that was moved here; the hook prints the error with all local variables."""
    await ctx.providers.get("broken")


@app.task(process=True, max_attempts=1)
def apart() -> str:
    """Return the environment of a child process."""
    return str(dict(os.environ))


@app.task
async def _ask(about: Any) -> None:
    print("asked", about)


JOBS = (use, fail, give_back, give_back_secrets, bury, pass_on, broken, apart)
