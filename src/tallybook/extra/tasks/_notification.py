"""The task `tallybook.notification`: send a mail and an SMS as one job, each with its own result."""

from typing import Any

from tallybook._app import ContextTask
from tallybook._model.outcome import Outcome
from tallybook._worker.run.context import Context
from tallybook.errors import CallFailed, LeaseLost, SignatureError
from tallybook.extra.tasks._email import PATIENT
from tallybook.extra.tasks._email import email as email_task
from tallybook.extra.tasks._http import sms as sms_task
from tallybook.extra.tasks._provider import ready_made


class _Channel:
    """The job's context for one channel. The channel's checkpoint is a part of the job's checkpoint."""

    def __init__(self, ctx: Context, name: str, kept: dict[str, Any]) -> None:
        self._ctx, self._kept, self._part = ctx, kept, f"{name}_checkpoint"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    async def get_checkpoint(self) -> Any:
        return self._kept.get(self._part)

    async def set_checkpoint(self, value: object) -> None:
        self._kept[self._part] = value
        await self._ctx.set_checkpoint(self._kept)


@ready_made("tallybook.notification", retry=PATIENT, max_attempts=8, summary="Notification")
async def notification(
    ctx: Context, email: dict[str, Any] | None = None, sms: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Send a mail, an SMS or both as one job: `email` and `sms` are the args of these tasks.

    Both channels are tried, even if one fails. A success is recorded at once, and no later attempt sends that part
    again. The result is {"email": the mail's, "sms": the SMS's}. The job is dead at once if the remaining part cannot
    succeed; a retry by a person sends only that part.

        await notification.enqueue(
            conn,
            email={"provider": "mail", "to": "ada@example.org", "subject": "Your form", "text": "It has come in."},
            sms={"provider": "sms", "to": "+4930123", "text": "Your form has come in."},
        )
    """
    given = (("email", email_task, email), ("sms", sms_task, sms))
    wanted = {name: (task, _checked(name, task, args)) for name, task, args in given if args is not None}
    if not wanted:
        raise CallFailed("notification: pass email, sms or both", no_retry=True)
    kept: dict[str, Any] = (await ctx.get_checkpoint() if ctx.attempt > 1 else None) or {}
    failed: dict[str, Exception] = {}
    for name, (task, args) in wanted.items():
        if name in kept:
            continue
        try:
            kept[name] = await task.fn(_Channel(ctx, name, kept), **args)
        except (LeaseLost, Outcome):  # the job was lost, or its turn is not near: end this attempt
            raise
        except Exception as error:
            failed[name] = error
        else:
            if len(wanted) > 1:
                await ctx.set_checkpoint(kept)
    if failed:
        sent = (f"{name} is sent" for name in wanted if name not in failed)
        text = "; ".join([*sent, *(f"{name}: {error}" for name, error in failed.items())])
        waits = (error.headers for error in failed.values() if isinstance(error, CallFailed))
        over = all(getattr(error, "no_retry", False) for error in failed.values())  # none of them can still succeed
        raise CallFailed(f"notification: {text}", headers=next(filter(None, waits), None), no_retry=over)
    return {name: kept[name] for name in wanted}


def _checked(name: str, task: ContextTask[..., Any], args: dict[str, Any]) -> dict[str, Any]:
    try:
        task.job(**args)
    except SignatureError as error:
        raise CallFailed(f"notification: {name}: {error}", no_retry=True) from None
    return args
