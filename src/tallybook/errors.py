"""Every error that Tallybook raises, in one tree.

    TallybookError
    ├── PayloadError (ValueError)        args or a result cannot be stored, or cannot be read as the task wants them
    ├── SignatureError (TypeError)       a call does not fit the task, or the task's signature cannot be served
    ├── ConfigError (ValueError)         an option or a setting has a wrong value
    │   └── ExpressionError              a cron expression cannot be read
    ├── InvalidArgument (ValueError)     TB005: the server refused an argument of a verb
    ├── NotSupported                     this combination is not offered
    ├── NotASubject                      an ordinary job was ended as only a subject can be
    ├── ConnectionNotSupported (TypeError)  the object passed as connection is none that Tallybook can use
    ├── WrongIsolationLevel              TB003: the caller's transaction has an isolation level that the verb refuses
    ├── DuplicateTask                    two functions under one task name or alias
    ├── UnknownTask                      no function for this task name here
    ├── UnknownQueue                     no such queue
    ├── UnknownProvider                  TB002: no such provider, or it is switched off
    ├── UnknownSchedule                  TB002: no such schedule
    ├── UnknownNode                      TB002: no such node
    ├── UnknownJob                       TB002: no such job, or its history is pruned
    ├── ResultTimeout (TimeoutError)     the job has not ended in time; it goes on
    ├── ResultMissing                    the job completed, and its result could not be kept
    ├── JobFailed                        an attempt failed in a drain that raises
    ├── JobDied                          the job is dead: there will be no result
    ├── JobCancelled                     the job was cancelled: there will be no result
    ├── KeyTaken                         TB008: another live job has the unique key, and on_conflict is "raise"
    ├── LockNotAvailable (TimeoutError)  ctx.lock did not get its lock in time
    ├── OperatorRefused                  the operator API has refused a request
    ├── LeaseLost                        TB001: the attempt is not this worker's any more
    ├── TransactionError                 the transaction that an attempt's end belongs to did not end as it must
    ├── WorkerEnded                      TB006: the worker is unknown to the server, or was declared ended
    ├── ForeignCursor                    TB004: the cursors were written by another cluster; rebase first
    ├── SecretError                      a provider's secret cannot be encrypted or decrypted
    ├── CallFailed                       a job's call to the outside did not succeed
    │   └── AddressRefused               it would have gone to an address that nobody should be sent to
    ├── QueueUnavailable                 the server cannot be reached
    ├── CommitUnknown                    the connection was lost at a commit, and what became of it cannot be found out
    ├── RoleError                        roles of the database cannot be created, or are not there
    └── SchemaError                      TB007: program and database are of different versions
        ├── SchemaMissing                there is no schema `tallybook` in this database
        ├── SchemaTooOld                 migrate the database
        ├── SchemaTooNew                 update the program
        ├── SchemaUnreleased             made before the first release: remove it and begin anew
        └── SchemaBusy                   others hold the tables that a migration has to change

Each error carries its data as attributes, and its text says what is wrong, where, and what to do about it. An error
that comes from the server has the server's text; of its attributes only `sqlstate`, `detail` and `hint` are set then.
All of them can be pickled, so that they pass from a process executor to its worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from difflib import get_close_matches
from typing import Self

__all__ = [
    "AddressRefused",
    "CallFailed",
    "CommitUnknown",
    "ConfigError",
    "ConnectionNotSupported",
    "DuplicateTask",
    "ExpressionError",
    "ForeignCursor",
    "InvalidArgument",
    "JobCancelled",
    "JobDied",
    "JobFailed",
    "KeyTaken",
    "LeaseLost",
    "LockNotAvailable",
    "NotASubject",
    "NotSupported",
    "OperatorRefused",
    "PayloadError",
    "QueueUnavailable",
    "ResultMissing",
    "ResultTimeout",
    "RoleError",
    "SchemaBusy",
    "SchemaError",
    "SchemaMissing",
    "SchemaTooNew",
    "SchemaTooOld",
    "SchemaUnreleased",
    "SecretError",
    "SignatureError",
    "TallybookError",
    "TransactionError",
    "UnknownJob",
    "UnknownNode",
    "UnknownProvider",
    "UnknownQueue",
    "UnknownSchedule",
    "UnknownTask",
    "WorkerEnded",
    "WrongIsolationLevel",
    "from_sqlstate",
]


class TallybookError(Exception):
    """The root of all errors of Tallybook. `detail` and `hint` are full sentences, `sqlstate` is the server's code."""

    sqlstate: str | None = None
    detail: str | None = None
    hint: str | None = None

    def __init__(self, message: str, *, detail: str | None = None, hint: str | None = None) -> None:
        super().__init__(_sentence(message, detail, hint))
        if detail:
            self.detail = detail
        if hint:
            self.hint = hint

    @classmethod
    def of_server(cls, sqlstate: str, message: str, detail: str | None, hint: str | None) -> Self:
        """The error for what the server raised, with the server's words; attributes of the subclass stay None."""
        error = cls.__new__(cls)
        TallybookError.__init__(error, message, detail=detail, hint=hint)
        error.sqlstate = sqlstate
        return error

    def __reduce__(self) -> tuple[object, ...]:
        # BaseException would call the class with the finished text; subclasses take their data instead.
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[TallybookError], args: tuple[object, ...], data: dict[str, object]) -> TallybookError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(data)
    return error


def _sentence(message: str, detail: str | None, hint: str | None) -> str:
    parts = [part.strip().removesuffix(".") for part in (message, detail, hint) if part and part.strip()]
    return ". ".join(parts) + ("." if len(parts) > 1 and parts[-1][-1] not in "?!" else "")


def _did_you_mean(name: str, known: Iterable[str]) -> str | None:
    close = get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else None


class PayloadError(TallybookError, ValueError):
    """Args or a result cannot be stored as JSON, or what is stored is not what the task's annotations ask for.

    `path` is where, like `$.items[3].name` (`$` is the whole value); `reason` is what is wrong there; `task` is the
    task's name; `what` is "args", "result", ... Another attempt would end the same, so it is not retried.
    """

    no_retry = True
    path: str | None = None
    reason: str | None = None
    task: str | None = None
    what: str | None = None

    def __init__(self, path: str, reason: str, *, task: str, what: str = "args", verb: str = "stored") -> None:
        super().__init__(f"{what} of task {task!r} cannot be {verb}: {path}: {reason}")
        self.path, self.reason, self.task, self.what = path, reason, task, what


class SignatureError(TallybookError, TypeError):
    """A call does not fit the task's signature, or the signature is one that Tallybook cannot serve.

    Like a PayloadError it is not retried: what does not fit now does not fit the next time.
    """

    no_retry = True
    task: str | None = None
    reason: str | None = None

    def __init__(self, task: str, reason: str) -> None:
        super().__init__(f"task {task!r}: {reason}")
        self.task, self.reason = task, reason


class ConfigError(TallybookError, ValueError):
    """An option or a setting has a wrong value: `option` names it, `value` is what was given, `reason` says why not."""

    option: str | None = None
    value: object = None
    reason: str | None = None

    def __init__(self, option: str, value: object, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"{option}: {_shown(value)}: {reason}", hint=hint)
        self.option, self.value, self.reason = option, value, reason


class ExpressionError(ConfigError):
    """A cron expression cannot be read: `field` is the one that is wrong (minute, hour, ...), None where it is the whole."""

    field: str | None = None

    def __init__(
        self, option: str, value: object, reason: str, *, field: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(option, value, reason, hint=hint)
        self.field = field


def _shown(value: object) -> str:
    try:
        text = f"{value.total_seconds():g} s" if isinstance(value, timedelta) else repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 100 else text[:97] + "..."


class InvalidArgument(TallybookError, ValueError):
    """The server refused an argument of a verb (TB005), for example an empty queue name."""


class NotSupported(TallybookError):
    """Tallybook does not offer this; `what` is what was asked for, the hint names what to do instead."""

    what: str | None = None

    def __init__(self, what: str, *, hint: str | None = None) -> None:
        super().__init__(f"{what} is not supported", hint=hint)
        self.what = what


class NotASubject(TallybookError):
    """A handler ended an ordinary job as only a subject can be: by Reschedule, Drop, or new args. `job` is its id.

    Not retried: its work is done, and another attempt would end in the same way. The job is dead.
    """

    no_retry = True
    job: int | None = None

    def __init__(self, job: int, outcome: str) -> None:
        hint = (
            "Make it one with `task.subject(name).push(...)`, or return Snooze(...) to run an ordinary job again later"
        )
        super().__init__(f"job {job} is no subject, so it cannot end with {outcome}", hint=hint)
        self.job = job


class ConnectionNotSupported(TallybookError, TypeError):
    """The object passed as connection is none that Tallybook can use; `kind` is its class, by full name."""

    kind: str | None = None

    def __init__(self, connection: object, accepted: str) -> None:
        kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
        super().__init__(f"cannot use a {kind} as connection", hint=f"Pass {accepted}")
        self.kind = kind


class WrongIsolationLevel(TallybookError):
    """The transaction's isolation level is one that the verb cannot work in (TB003)."""


class DuplicateTask(TallybookError):
    """Two functions were given one task name: `first` and `second` say where each is defined."""

    task: str | None = None
    first: str | None = None
    second: str | None = None

    def __init__(self, task: str, first: str, second: str) -> None:
        super().__init__(
            f"task {task!r} is defined twice, in {first} and in {second}", hint="Give one of them another name=..."
        )
        self.task, self.first, self.second = task, first, second


def _unknown(error: TallybookError, what: str, name: str, known: Iterable[str], otherwise: str = "") -> None:
    names = tuple(sorted(known))
    hint = _did_you_mean(name, names) or otherwise or f"See the names with `tallybook {what} list`"
    TallybookError.__init__(error, f"unknown {what} {name!r}", hint=hint)
    vars(error).update({what: name, "known": names})


class UnknownTask(TallybookError):
    """No function is known under this task name; `task` is the name, `known` are the names that there are."""

    task: str | None = None
    known: tuple[str, ...] = ()

    def __init__(self, task: str, known: Iterable[str] = ()) -> None:
        _unknown(self, "task", task, known, "Import the module that defines it, or run the job elsewhere")


class UnknownQueue(TallybookError):
    """There is no such queue; `queue` is the name, `known` are the names that there are."""

    queue: str | None = None
    known: tuple[str, ...] = ()

    def __init__(self, queue: str, known: Iterable[str] = ()) -> None:
        _unknown(self, "queue", queue, known)


class UnknownProvider(TallybookError):
    """There is no such provider, or it is switched off (`inactive`); `provider` is the name, `known` are those that there are."""

    provider: str | None = None
    known: tuple[str, ...] = ()
    inactive: bool = False

    def __init__(self, provider: str, known: Iterable[str] = (), *, inactive: bool = False) -> None:
        if inactive:
            hint = f"Switch it on: `tallybook provider set {provider} --active`"
            super().__init__(f"provider {provider!r} is not active", hint=hint)
            self.provider, self.known, self.inactive = provider, tuple(sorted(known)), inactive
        else:
            _unknown(self, "provider", provider, known)


class UnknownSchedule(TallybookError):
    """There is no such schedule; `schedule` is the name, `known` are the names that there are."""

    schedule: str | None = None
    known: tuple[str, ...] = ()

    def __init__(self, schedule: str, known: Iterable[str] = ()) -> None:
        _unknown(self, "schedule", schedule, known)


class UnknownJob(TallybookError):
    """There is no such job, or its history is past its retention (TB002); `job` is its id."""

    job: int | None = None

    def __init__(
        self, job: int, *, hint: str = "It was never committed, or its history was pruned after its retention"
    ) -> None:
        super().__init__(f"unknown job {job}", hint=hint)
        self.job = job


class UnknownNode(TallybookError):
    """There is no such node; `node` is the name, `known` are the names that there are."""

    node: str | None = None
    known: tuple[str, ...] = ()

    def __init__(self, node: str, known: Iterable[str] = ()) -> None:
        _unknown(self, "node", node, known)


class KeyTaken(TallybookError):
    """Another live job has the unique key (TB008), and this call said on_conflict="raise"; `job` is that job's id."""

    job: int | None = None

    def __init__(self, job: int, message: str | None = None, *, hint: str | None = None) -> None:
        super().__init__(message or f"job {job} has the unique key", hint=hint)
        self.job = job

    @classmethod
    def of_server(cls, sqlstate: str, message: str, detail: str | None, hint: str | None) -> Self:
        """With the job's id, which the server gives as the detail."""
        error = super().of_server(sqlstate, message, None, hint)
        error.job = int(detail) if detail and detail.isdigit() else None
        return error


class ResultTimeout(TallybookError, TimeoutError):
    """The job has not ended in the time that the caller would wait; it goes on. `job` is its id."""

    job: int | None = None

    def __init__(self, job: int, seconds: float) -> None:
        super().__init__(f"job {job} has not ended within {seconds:g} s", hint="It goes on: ask again, or wait longer")
        self.job = job


class LockNotAvailable(TallybookError, TimeoutError):
    """`ctx.lock` did not get its lock in the time that it was given; `name` is the lock's."""

    name: str | None = None

    def __init__(self, name: str, seconds: float | None) -> None:
        when = "before its job was told to stop" if seconds is None else f"within {seconds:g} s"
        hint = "Another handler holds it: catch this and return Snooze(...), or let the retry policy set the delay"
        super().__init__(f"the lock {name!r} was not free {when}", hint=hint)
        self.name = name


class ResultMissing(TallybookError):
    """The job completed, and what its handler returned could not be kept; `reason` says why."""

    job: int | None = None
    reason: str | None = None

    def __init__(self, job: int, reason: str) -> None:
        super().__init__(f"job {job} completed, but {reason}")
        self.job, self.reason = job, reason


class JobFailed(TallybookError):
    """An attempt failed in `drain(raise_on_failure=True)`; its cause is what the handler raised, where that ran here."""

    job: int | None = None
    task: str | None = None
    error_type: str | None = None
    error_message: str | None = None

    def __init__(self, job: int, task: str, error_type: str | None, error_message: str | None) -> None:
        said = ": ".join(part for part in (error_type, error_message) if part)
        super().__init__(f"{task} {job} failed: {said or 'no error is known'}")
        self.job, self.task, self.error_type, self.error_message = job, task, error_type, error_message


class JobDied(TallybookError):
    """The job is dead, so it has no result; `error_type` and `error_message` are those of its last failure."""

    job: int | None = None
    error_type: str | None = None
    error_message: str | None = None

    def __init__(self, job: int, error_type: str | None, error_message: str | None) -> None:
        said = ": ".join(part for part in (error_type, error_message) if part)
        super().__init__(f"job {job} is dead: {said or 'no error is known'}")
        self.job, self.error_type, self.error_message = job, error_type, error_message


class JobCancelled(TallybookError):
    """The job was cancelled, so it has no result; `reason` is what was said."""

    job: int | None = None
    reason: str | None = None

    def __init__(self, job: int, reason: str | None) -> None:
        super().__init__(f"job {job} was cancelled" + (f": {reason}" if reason else ""))
        self.job, self.reason = job, reason


class CallFailed(TallybookError):
    """A ready-made task's call to the outside did not succeed: `provider` (None: a URL of the args), `status` (None: no answer).

    `no_retry` is True where another attempt would end the same; `headers` are Retry-After and Date of the answer, which
    the next attempt waits for. Its text holds no secret of the provider.
    """

    provider: str | None = None
    status: int | None = None
    no_retry = False

    def __init__(
        self,
        message: str,
        *,
        provider: str | None = None,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
        no_retry: bool = False,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.provider, self.status, self.no_retry = provider, status, no_retry
        self.headers = dict(headers or {})


class AddressRefused(CallFailed):
    """A call would have gone to an address that is not public, and that the provider does not allow: `reason` says which kind."""

    reason: str | None = None

    def __init__(self, reason: str, *, provider: str | None = None, who: str = "call") -> None:
        hint = "If it is meant, add the host or network to the setting allow of its provider"
        super().__init__(
            f"{who}: its host has an address that is {reason}", provider=provider, no_retry=True, hint=hint
        )
        self.reason = reason


class OperatorRefused(TallybookError):
    """The operator API has refused a request: `status` is that of HTTP, `code` says why (None: whoever answered is no such API)."""

    status: int | None = None
    code: str | None = None

    def __init__(self, status: int, code: str | None, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{status} {code}: {message}" if code else f"{status}: {message}", hint=hint)
        self.status, self.code = status, code


class LeaseLost(TallybookError):
    """The attempt does not belong to this worker any more (TB001); what it wanted to record was refused."""

    job: int | None = None
    attempt: int | None = None

    def __init__(self, job: int, attempt: int) -> None:
        super().__init__(
            f"the lease of job {job}, attempt {attempt}, is lost",
            hint="Another worker may be running the job: undo what you can, and do not record an outcome",
        )
        self.job, self.attempt = job, attempt


class TransactionError(TallybookError):
    """The transaction that carries an attempt's end did not end as it must.

    The handler of an atomic task has committed or rolled back the transaction that it was given, or a handler has
    returned although the transaction in which it called `ctx.complete` was not committed. The first is not retried: another
    attempt would do the same, and have its effects once more.
    """

    no_retry = True


class WorkerEnded(TallybookError):
    """The server does not know this worker, or has declared it ended (TB006): it must register anew."""


class ForeignCursor(TallybookError):
    """The cursors of the lanes come from another cluster, for example after a restore (TB004): rebase first."""


class SecretError(TallybookError):
    """A provider's secret cannot be encrypted or decrypted; it names `provider`, `field` and `slot`, never the secret or a key."""

    provider: str | None = None
    field: str | None = None
    slot: str | None = None
    reason: str | None = None

    def __init__(
        self, provider: str, field: str, reason: str, *, slot: str = "current", hint: str | None = None
    ) -> None:
        which = " (previous)" if slot == "previous" else ""
        super().__init__(f"secret {field!r} of provider {provider!r}{which}: {reason}", hint=hint)
        self.provider, self.field, self.slot, self.reason = provider, field, slot, reason


class QueueUnavailable(TallybookError):
    """The server cannot be reached; `server` says which one (never with a password), `reason` why."""

    server: str | None = None
    reason: str | None = None

    def __init__(self, server: str, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"cannot reach PostgreSQL at {server}: {reason}", hint=hint)
        self.server, self.reason = server, reason


class CommitUnknown(TallybookError):
    """The connection was lost while `verb` was committed: it may have happened or not, and `server` does not tell.

    Only verbs on a connection of the App's own raise it; what enqueues does so only if the server stays away.
    """

    verb: str | None = None
    server: str | None = None

    def __init__(self, verb: str, server: str) -> None:
        super().__init__(
            f"{verb}: the connection to PostgreSQL at {server} was lost, and whether it was committed is not known",
            hint="Look before you say it again. A job with a unique key can be enqueued again safely",
        )
        self.verb, self.server = verb, server


class SchemaError(TallybookError):
    """Program and database are of different versions (TB007). `found` is the database's, `needed` the program's."""

    found: int | None = None
    needed: int | None = None


class SchemaMissing(SchemaError):
    """There is no schema `tallybook` in this database."""

    def __init__(self, database: str) -> None:
        super().__init__(f"no schema tallybook in database {database!r}", hint="Run `tallybook migrate`")


class SchemaTooOld(SchemaError):
    """The database's schema is older than this program can work with."""

    def __init__(self, found: int, needed: int) -> None:
        super().__init__(
            f"the schema is at version {found}, this program needs {needed}", hint="Run `tallybook migrate`"
        )
        self.found, self.needed = found, needed


class SchemaTooNew(SchemaError):
    """The database's schema is newer than this program knows, and asks for a program that knows more."""

    def __init__(self, found: int, needed: int) -> None:
        super().__init__(
            f"the schema is at version {found}, this program knows versions up to {needed} and cannot work with it",
            hint="Update the package tallybook here",
        )
        self.found, self.needed = found, needed


class SchemaUnreleased(SchemaError):
    """The database's schema was made by a version of Tallybook from before its first release, and cannot be upgraded."""

    def __init__(self, found: int) -> None:
        super().__init__(
            f"the schema was made by an unreleased version of Tallybook (its version {found}) and cannot be upgraded",
            hint="Let its own workers run what is open, then `tallybook uninstall` and `tallybook migrate`",
        )
        self.found = found


class RoleError(TallybookError):
    """Roles of the database cannot be created, are not there, or are somebody else's; `names` says which. Nothing was changed."""

    names: tuple[str, ...] = ()

    def __init__(self, names: Iterable[str], reason: str, hint: str) -> None:
        self.names = tuple(names)
        super().__init__(f"the roles {', '.join(self.names)} {reason}", hint=hint)


class SchemaBusy(SchemaError):
    """A migration did not get the tables that it has to change; `by` says who has them. Nothing was changed."""

    by: str | None = None

    def __init__(self, by: str) -> None:
        super().__init__(
            f"the schema cannot be migrated now: its tables are held by {by}",
            hint="End that transaction, then migrate again",
        )
        self.by = by


_BY_SQLSTATE: dict[str, type[TallybookError]] = {
    "TB001": LeaseLost,
    "TB002": UnknownJob,
    "TB003": WrongIsolationLevel,
    "TB004": ForeignCursor,
    "TB005": InvalidArgument,
    "TB006": WorkerEnded,
    "TB007": SchemaError,
    "TB008": KeyTaken,
}


def from_sqlstate(sqlstate: str, message: str, detail: str | None, hint: str | None) -> TallybookError | None:
    """The error for a SQLSTATE of Tallybook's own class TB0xx, with the server's words; None for any other code.

    Raise it from the driver's error: `raise error from driver_error`.
    """
    cls = _BY_SQLSTATE.get(sqlstate)
    return cls.of_server(sqlstate, message, detail, hint) if cls else None
