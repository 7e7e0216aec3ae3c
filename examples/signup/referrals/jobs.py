"""The task that was only a name for a while: sign-ups enqueued it before it was implemented."""

from django.db.backends.base.base import BaseDatabaseWrapper

from examples.signup.jobs import app
from examples.signup.models import Step
from tallybook import Context


@app.task(atomic=True)
def thank_referrer(connection: BaseDatabaseWrapper, ctx: Context, user_id: int) -> None:
    """Note that this user's referrer was thanked."""
    Step.objects.create(user_id=user_id, name=ctx.task, job_id=ctx.job_id)
