"""Three tasks in a row. One transaction has a task's writes, the end of its job and the next job: all or nothing."""

from datetime import timedelta

import httpx2
from django.conf import settings
from django.db.backends.base.base import BaseDatabaseWrapper

from examples.signup.models import Step, User, Workspace
from tallybook import Context, Dead, Exponential
from tallybook.contrib.django import App

app = App("signup")


@app.task(atomic=True)
def check_address(connection: BaseDatabaseWrapper, ctx: Context, user_id: int) -> None:
    """Check the address and enqueue the second step."""
    user = User.objects.get(id=user_id)
    user.checked = "@" in user.email
    user.save(update_fields=["checked"])  # other columns may have changed since
    Step.objects.create(user=user, name=ctx.task, job_id=ctx.job_id)
    make_workspace.enqueue_sync(connection, user_id)


@app.task(atomic=True)
def make_workspace(connection: BaseDatabaseWrapper, ctx: Context, user_id: int) -> None:
    """Make the workspace and enqueue the third step."""
    Workspace.objects.create(user_id=user_id)
    Step.objects.create(user_id=user_id, name=ctx.task, job_id=ctx.job_id)
    send_welcome.enqueue_sync(connection, user_id)


@app.task(atomic=True, queue="mail", retry=Exponential(timedelta(seconds=1)), max_attempts=20)
def send_welcome(connection: BaseDatabaseWrapper, ctx: Context, user_id: int) -> Dead | None:
    """Send the welcome mail. The job's id is the same in every attempt, so the provider sends one mail per id."""
    user = User.objects.get(id=user_id)
    answer = httpx2.post(
        f"{settings.MAIL_URL}/mail",
        json={"to": user.email, "text": "Welcome!"},
        headers={"Idempotency-Key": str(ctx.job_id)},
        timeout=5,  # a transaction is open meanwhile
    )
    if answer.status_code == 422:  # the provider will never accept it
        User.objects.filter(id=user_id).update(bounced=True)
        return Dead("the address is refused")  # returned, not raised: the update is committed with the job's end
    answer.raise_for_status()  # an exception rolls back, counts as a failure, and the job is retried
    Step.objects.create(user_id=user_id, name=ctx.task, job_id=ctx.job_id)
    return None
