"""What was only a name in the line for a while: sign-ups have enqueued it, nobody had written it."""

from django.db.backends.base.base import BaseDatabaseWrapper

from examples.signup.jobs import app
from examples.signup.models import Step
from tallybook import Context


@app.task(atomic=True)
def thank_referrer(connection: BaseDatabaseWrapper, ctx: Context, user_id: int) -> None:
    """Note the thanks that somebody gets for having brought this user."""
    Step.objects.create(user_id=user_id, name=ctx.task, job_id=ctx.job_id)
