"""The web application: it accepts submissions, shows them and their failures, and lets a cron run the jobs."""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.security import HTTPBasic
from fastapi.templating import Jinja2Templates
from sqlalchemy import select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession

from examples.form_submissions.jobs import QUEUE, app, hand_over
from examples.form_submissions.models import Form, Submission, engine, sessions
from tallybook.contrib.fastapi import in_transaction, lifespan
from tallybook.errors import InvalidArgument, TallybookError, UnknownJob
from tallybook.web import User, dashboard

log = logging.getLogger("forms")
basic = HTTPBasic(auto_error=False)
pages = Jinja2Templates(Path(__file__).parent / "templates")
Transaction = Annotated[AsyncSession, in_transaction(sessions)]


@asynccontextmanager
async def connections(_: FastAPI) -> AsyncIterator[None]:
    yield
    await engine.dispose()


api = FastAPI(title="Forms", lifespan=lifespan(app, connections))


@api.post("/forms/{name}", status_code=201)
async def submit(session: Transaction, name: str, data: dict[str, str]) -> dict[str, Any]:
    """Save a submission and its five operations. If the queue refuses them, the submission is still saved."""
    form = await session.get(Form, name)
    if form is None:
        raise HTTPException(404, "no such form")
    content = "".join([*data, *data.values()])
    if len(content) > 100_000 or re.search("[\0\ud800-\udfff]", content):
        raise HTTPException(422, "a submission has at most 100,000 characters, no NUL and no half of a surrogate pair")
    saved = Submission(form=name, data=data, handed_over=True)
    session.add(saved)
    await session.flush()
    try:
        async with session.begin_nested():
            await hand_over(session, form, saved)
    except (TallybookError, SQLAlchemyError):
        log.exception("submission %s: enqueue failed; catch_up enqueues its operations later", saved.id)
        saved.handed_over = False
    return {"submission": saved.id, "status": f"/submissions/{saved.id}"}


async def who(request: Request) -> User | None:
    """Return the user of the pages and the dashboard. This uses HTTP Basic; use your own login here."""
    given = await basic(request)
    password = os.environ["ADMIN_PASSWORD"]
    if given is None or not secrets.compare_digest(given.password.encode(), password.encode()):
        return None
    return User(given.username or "admin", operate=True)


async def admin(request: Request) -> User:
    """Require such a user, and reject forms from another site."""
    if (user := await who(request)) is None:
        raise HTTPException(401, headers={"WWW-Authenticate": "Basic"})
    origin = request.headers.get("origin")
    if request.method != "GET" and origin and urlsplit(origin).netloc != request.headers["host"]:
        raise HTTPException(403, "this was sent from another site")
    return user


STATUS = text("""select o.kind, j.* from operation o left join tallybook.job j on j.id = o.job_id
                  where o.submission = :id order by o.job_id""")
TABLE = text("""select task, state, jobs, oldest, newest, average_attempts from tallybook.queue_status
                 where queue = 'integrations' order by task, state""")


@api.get("/", response_class=HTMLResponse, dependencies=[Depends(admin)])
async def statistics(request: Request, session: Transaction) -> Any:
    """Show the operations by state, the number completed today and the newest submissions."""
    counted = [one for one in await app.counts.list().on(session) if one.queue == QUEUE]
    totals = {name: sum(getattr(one, name) for one in counted) for name in
              ("available", "running", "retrying", "dead", "completed")}  # fmt: skip
    midnight = datetime.combine(datetime.now().astimezone().date(), time()).astimezone()
    completed = await app.counts.completed_since(midnight).on(session)
    today = sum(many for (queue, _), many in completed.items() if queue == QUEUE)
    newest = (await session.scalars(select(Submission).order_by(Submission.id.desc()).limit(20))).all()
    table = (await session.execute(TABLE)).mappings().all()
    shown = {"totals": totals, "today": today, "newest": newest, "table": table}
    return pages.TemplateResponse(request, "statistics.html", shown)


@api.get("/submissions/{number}", response_class=HTMLResponse, dependencies=[Depends(admin)])
async def status(request: Request, session: Transaction, number: int) -> Any:
    """Show one submission: its operations, their failures, and all events in order."""
    saved = await session.get(Submission, number)
    if saved is None:
        raise HTTPException(404, "no such submission")
    operations = (await session.execute(STATUS, {"id": number})).mappings().all()
    events = await app.jobs.trace(links={"submission": number}).on(session)
    found = await session.scalar(text("select company from enrichment where submission = :id"), {"id": number})
    shown = {"saved": saved, "operations": operations, "events": events, "company": found}
    return pages.TemplateResponse(request, "submission.html", shown)


@api.get("/dead", response_class=HTMLResponse, dependencies=[Depends(admin)])
async def dead(request: Request, session: Transaction, task: str | None = None) -> Any:
    """Show the dead operations, newest first; ?task= selects one kind."""
    letters = await app.dead.list(queue=QUEUE, task=task, max_jobs=50).on(session)
    return pages.TemplateResponse(request, "dead.html", {"letters": letters})


@api.post("/operations/{job}/{verb}")
async def act(session: Transaction, user: Annotated[User, Depends(admin)], job: int, verb: str) -> RedirectResponse:
    """Retry an operation at once, or cancel it, dead or not; the reason stores the user's name."""
    submission = await session.scalar(text("select submission from operation where job_id = :job"), {"job": job})
    if submission is None or verb not in ("retry", "cancel"):
        raise HTTPException(404)
    try:
        if verb == "retry":
            await app.retry(job).on(session)
        elif not (state := await app.cancel(job, f"by {user.name}").on(session)).startswith("cancel"):
            raise HTTPException(409, f"it is {state}")
    except UnknownJob as error:
        raise HTTPException(404, str(error)) from error
    except InvalidArgument as error:  # another user was faster
        raise HTTPException(409, str(error)) from error
    return RedirectResponse(f"/submissions/{submission}", 303)


@api.post("/submissions/{number}/cancel")
async def withdraw(session: Transaction, user: Annotated[User, Depends(admin)], number: int) -> RedirectResponse:
    """Cancel a submission's open and dead operations; running jobs are asked to stop."""
    saved = await session.get(Submission, number, with_for_update=True)
    if saved is None:
        raise HTTPException(404, "no such submission")
    saved.handed_over = True  # catch_up leaves it alone
    jobs = await session.scalars(text("select job_id from operation where submission = :id"), {"id": number})
    await app.jobs.cancel(jobs, f"by {user.name}").on(session)
    return RedirectResponse(f"/submissions/{number}", 303)


@api.post("/cron/process")
async def process(authorization: Annotated[str, Header()] = "") -> dict[str, int]:
    """Run due jobs and return their number. A cron calls this each minute where no worker can run."""
    if not secrets.compare_digest(authorization.encode(), f"Bearer {os.environ['CRON_TOKEN']}".encode()):
        raise HTTPException(403)
    return {"processed": (await app.drain(max_jobs=10, max_seconds=25)).processed}


api.mount("/queue", dashboard(app, authenticate=who))
