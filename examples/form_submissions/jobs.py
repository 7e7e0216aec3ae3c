"""The five operations of a submission: the task of each, and the typed function that describes its job."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import httpx2
from sqlalchemy import select, text
from sqlalchemy.ext.asyncio import AsyncSession

from examples.form_submissions.models import Form, Submission, sessions
from tallybook import App, Context, Exponential, JobCall
from tallybook.extra.tasks import email, notification, webhook

app = App("forms", session=sessions)
app.include(webhook, email, notification)

QUEUE = "integrations"
BACKOFF = Exponential(timedelta(minutes=5))  # 5, 10, 20, 40, 80 minutes
ATTEMPTS = 3  # a webhook has 5, or the number of its form
NOTED = text("insert into operation (job_id, submission, kind) values (:job, :submission, :kind)")
FOUND = text("""insert into enrichment values (:submission, :company)
                 on conflict (submission) do update set company = excluded.company""")
DEADLINE = timedelta(seconds=float(os.environ.get("DEADLINE", "30")))


@app.lifespan
async def clients(ctx: Context) -> AsyncIterator[None]:
    """Give each worker one HTTP client. It has no timeout: the deadline of a task aborts its call."""
    async with httpx2.AsyncClient(timeout=None) as ctx.state.http:
        yield


async def call(ctx: Context, provider: str, path: str, key: str, body: dict[str, Any]) -> Any:
    """Post to a provider. Jobs have only its name; address and token are read here. A Retry-After delays the retry."""
    found = await ctx.providers.get(provider)
    headers = {"Authorization": f"Bearer {found.secrets['token'].reveal()}", "Idempotency-Key": key}
    answer = await ctx.state.http.post(found.settings["url"] + path, json=body, headers=headers)
    answer.raise_for_status()
    return answer.json()


@app.task(queue=QUEUE, retry=BACKOFF, max_attempts=ATTEMPTS, timeout=DEADLINE, summary="Row {submission} of {sheet}")
async def table_sync(ctx: Context, sheet: str, submission: int, data: dict[str, str], key: str) -> str:
    """Insert the submission into the customer's table; return the row's name there."""
    row = await call(ctx, "tables", f"/tables/{sheet}", key, {"id": submission, **data})
    return str(row["row"])


@app.task(queue=QUEUE, retry=BACKOFF, max_attempts=ATTEMPTS, timeout=DEADLINE, summary="Who sent {submission}")
async def enrich(ctx: Context, submission: int, sender: str, key: str) -> None:
    """Find out the sender of the submission. One transaction writes the finding and completes the job."""
    found = await call(ctx, "enrichment", "/enrich", key, {"email": sender})
    async with sessions.begin() as session:
        await session.execute(FOUND, {"submission": submission, "company": found["company"]})
        await ctx.complete(session)


def webhook_job(form: Form, saved: Submission) -> JobCall:
    how = webhook.with_(queue=QUEUE, retry=BACKOFF, max_attempts=form.webhook_attempts, links=saved.links)
    body = {"type": "form.submitted", "form": saved.form, "submission": saved.id, "data": saved.data}
    return how.job("forms", body, url=form.webhook, signed_by=form.name, idempotency_key=saved.key("webhook"))


def table_sync_job(form: Form, saved: Submission) -> JobCall:
    return table_sync.with_(links=saved.links).job(form.sheet, saved.id, saved.data, saved.key("table"))


def notification_job(form: Form, saved: Submission) -> JobCall:
    """Describe a mail and an SMS to the form's owner as one job; a retry sends only the part that was not sent."""
    how = notification.with_(queue=QUEUE, retry=BACKOFF, max_attempts=ATTEMPTS, links=saved.links)
    body = "\n".join(f"{name}: {value}" for name, value in saved.data.items())
    subject, mail, sms = f"{saved.form}: submission {saved.id}", saved.key("mail"), saved.key("sms")
    marked = {"headers": {"X-Submission": mail}, "idempotency_key": mail}
    return how.job(
        email={"provider": "mail", "to": form.owner_email, "subject": subject, "text": body, **marked},
        sms={"provider": "sms", "to": form.owner_phone, "text": f"{subject} has come in", "idempotency_key": sms},
    )


def receipt_job(_: Form, saved: Submission) -> JobCall:
    """Describe a mail to the sender."""
    how = email.with_(queue=QUEUE, retry=BACKOFF, max_attempts=ATTEMPTS, links=saved.links)
    key, text = saved.key("receipt"), f"Thank you: your submission {saved.id} has come in."
    return how.job("mail", saved.data["email"], "Thank you", text, headers={"X-Submission": key}, idempotency_key=key)


def enrich_job(_: Form, saved: Submission) -> JobCall:
    return enrich.with_(links=saved.links).job(saved.id, saved.data["email"], saved.key("enrichment"))


FORM = {"webhook": webhook_job, "table": table_sync_job, "notification": notification_job}
SENDER = {"receipt": receipt_job, "enrichment": enrich_job}  # only for submissions with an address


async def hand_over(session: AsyncSession, form: Form, saved: Submission) -> None:
    """Enqueue all operations with one statement and note each job's kind, in the submission's transaction."""
    operations = FORM | SENDER if saved.data.get("email") else FORM
    jobs = await app.enqueue_many(session, [describe(form, saved) for describe in operations.values()])
    named = zip(operations, jobs, strict=True)
    await session.execute(NOTED, [{"job": job.id, "submission": saved.id, "kind": kind} for kind, job in named])


@app.task(atomic=True, schedule="* * * * *")
async def catch_up(session: AsyncSession) -> int:
    """Enqueue the operations of submissions that were saved while the queue failed; return their number."""
    left = select(Submission, Form).join(Form, Form.name == Submission.form).where(~Submission.handed_over)
    found = (await session.execute(left.limit(100).with_for_update(of=Submission, skip_locked=True))).all()
    for saved, form in found:
        await hand_over(session, form, saved)
        saved.handed_over = True
    return len(found)
