"""Every error that Tallybook raises, in one tree.

    TallybookError
    ├── PayloadError (ValueError)        args or a result cannot be stored, or do not fit the task's annotations
    ├── SignatureError (TypeError)       a call does not fit the task, or the task's signature is not supported
    ├── ConfigError (ValueError)         an option or a setting has a wrong value
    │   └── ExpressionError              a cron expression is invalid
    ├── InvalidArgument (ValueError)     TB005: the server refused an argument of a call
    ├── NotSupported                     this feature or combination of options is not supported
    ├── NotASubject                      an ordinary job ended with Reschedule, Drop or new args
    ├── ConnectionNotSupported (TypeError)  the object passed as a connection is not supported
    ├── WrongIsolationLevel              TB003: the transaction's isolation level is not supported
    ├── DuplicateTask                    two functions have the same task name or alias
    ├── UnknownTask                      no function has this task name here
    ├── UnknownQueue                     TB002: no such queue
    ├── UnknownProvider                  TB002: no such provider, or it is not active
    ├── UnknownSchedule                  TB002: no such schedule
    ├── UnknownNode                      TB002: no such node
    ├── UnknownJob                       TB002: no such job, or its history is pruned
    ├── ResultTimeout (TimeoutError)     the job has not ended within the timeout; it continues
    ├── ResultMissing                    the job completed, but its result could not be stored
    ├── JobFailed                        an attempt failed in a drain that raises
    ├── JobDied                          the job is dead: there will be no result
    ├── JobCancelled                     the job was cancelled: there will be no result
    ├── KeyTaken                         TB008: another live job has the unique key, and on_conflict is "raise"
    ├── LockNotAvailable (TimeoutError)  ctx.lock did not get its lock in time
    ├── OperatorRefused                  the operator API refused a request
    ├── LeaseLost                        TB001: the attempt no longer belongs to this worker
    ├── TransactionError                 a handler misused the transaction that ends its attempt
    ├── WorkerEnded                      TB006: the server does not know this worker, or has declared it ended
    ├── ForeignCursor                    TB004: another cluster wrote the cursors; rebase first
    ├── SecretError                      a provider's secret cannot be encrypted or decrypted
    ├── CallFailed                       an outgoing call of a job did not succeed
    │   └── AddressRefused               the call would have gone to an internal address
    ├── QueueUnavailable                 the server cannot be reached
    ├── CommitUnknown                    the connection was lost at a commit, and the outcome is unknown
    ├── SchemaError                      TB007: program and database have different versions
    │   ├── SchemaMissing                there is no schema `tallybook` in this database
    │   ├── SchemaTooOld                 migrate the database
    │   ├── SchemaTooNew                 update the program
    │   ├── SchemaUnreleased             the schema was created before the first release: remove and install it again
    │   └── SchemaBusy                   other sessions hold locks that the migration needs
    └── RoleError                        the database roles cannot be created, are missing, or have a different owner

Each error stores its data as attributes. Its text names the problem, its location and the remedy. An error raised by
the server has the server's text and sets only `sqlstate`, `detail` and `hint`; KeyTaken also sets `job`. All errors can
be pickled. The errors of an embedded server, also TallybookErrors, are in `tallybook.embedded`.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Self

__all__ = [
    "AddressRefused", "CallFailed", "CommitUnknown", "ConfigError", "ConnectionNotSupported", "DuplicateTask",
    "ExpressionError", "ForeignCursor", "InvalidArgument", "JobCancelled", "JobDied", "JobFailed", "KeyTaken",
    "LeaseLost", "LockNotAvailable", "NotASubject", "NotSupported", "OperatorRefused", "PayloadError",
    "QueueUnavailable", "ResultMissing", "ResultTimeout", "RoleError", "SchemaBusy", "SchemaError", "SchemaMissing",
    "SchemaTooNew", "SchemaTooOld", "SchemaUnreleased", "SecretError", "SignatureError", "TallybookError",
    "TransactionError", "UnknownJob", "UnknownNode", "UnknownProvider", "UnknownQueue", "UnknownSchedule",
    "UnknownTask", "WorkerEnded", "WrongIsolationLevel", "from_sqlstate",
]  # fmt: skip


class TallybookError(Exception):
    """The base class of all errors. `detail` and `hint` are full sentences; `sqlstate` is the server's code."""

    sqlstate: str | None = None
    detail: str | None = None
    hint: str | None = None

    def __init__(self, message: str, *, detail: str | None = None, hint: str | None = None) -> None:
        parts = [part.strip().removesuffix(".") for part in (message, detail, hint) if part and part.strip()]
        super().__init__(". ".join(parts) + ("." if len(parts) > 1 and parts[-1][-1] not in "?!" else ""))
        self.detail, self.hint = detail or None, hint or None

    @classmethod
    def of_server(cls, sqlstate: str, message: str, detail: str | None, hint: str | None) -> Self:
        """Build the error that the server raised, with its text; attributes of the subclass stay None."""
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


class PayloadError(TallybookError, ValueError):
    """Args or a result cannot be stored as JSON, or stored args do not fit the task's annotations.

    `path` is the location of the wrong value, like `$.items[3].name` (`$` is the whole value), and `reason` is the
    problem there. `task` is the task's name, and `what` is "args", "result", ... It is not retried, because
    another attempt would end the same way.
    """

    no_retry = True

    def __init__(self, path: str, reason: str, *, task: str, what: str = "args", verb: str = "stored") -> None:
        super().__init__(f"{what} of task {task!r} cannot be {verb}: {path}: {reason}")
        self.path, self.reason, self.task, self.what = path, reason, task, what


class SignatureError(TallybookError, TypeError):
    """A call does not fit the task's signature, or Tallybook does not support the signature.

    It is not retried, because another attempt would end the same way.
    """

    no_retry = True

    def __init__(self, task: str, reason: str) -> None:
        super().__init__(f"task {task!r}: {reason}")
        self.task, self.reason = task, reason


class ConfigError(TallybookError, ValueError):
    """An option or a setting (`option`) has a wrong `value`; `reason` explains why."""

    def __init__(self, option: str, value: object, reason: str, *, hint: str | None = None) -> None:
        try:
            text = f"{value.total_seconds():g} s" if isinstance(value, timedelta) else repr(value)
        except Exception:  # `__repr__` of any class
            text = f"<{type(value).__name__}>"
        super().__init__(f"{option}: {text if len(text) <= 100 else text[:97] + '...'}: {reason}", hint=hint)
        self.option, self.value, self.reason = option, value, reason


class ExpressionError(ConfigError):
    """A cron expression is invalid; `field` is the wrong field (minute, hour, ...), or None."""

    def __init__(
        self, option: str, value: object, reason: str, *, field: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(option, value, reason, hint=hint)
        self.field = field


class InvalidArgument(TallybookError, ValueError):
    """The server refused an argument of a call (TB005), for example an empty queue name."""


class NotSupported(TallybookError):
    """Tallybook does not support `what`; the hint names an alternative."""

    def __init__(self, what: str, *, hint: str | None = None) -> None:
        super().__init__(f"{what} is not supported", hint=hint)
        self.what = what


class NotASubject(TallybookError):
    """A handler ended an ordinary job (`job` is its id) with Reschedule, Drop or new args, which only subjects may use.

    It is not retried: the job's work is done, and another attempt would end in the same way. The job is dead.
    """

    no_retry = True

    def __init__(self, job: int, outcome: str) -> None:
        hint = "Make it a subject with `task.subject(name).push(...)`, or return Snooze(...) to run it again later"
        super().__init__(f"job {job} is not a subject, so it cannot end with {outcome}", hint=hint)
        self.job = job


class ConnectionNotSupported(TallybookError, TypeError):
    """The object passed as a connection is not supported; `kind` is the full name of its class."""

    def __init__(self, connection: object, accepted: str) -> None:
        kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
        super().__init__(f"cannot use a {kind} as a connection", hint=f"Pass {accepted}")
        self.kind = kind


class WrongIsolationLevel(TallybookError):
    """The call does not support the isolation level of the transaction (TB003)."""


class DuplicateTask(TallybookError):
    """Two functions have the same task name; `first` and `second` are the locations of their definitions."""

    def __init__(self, task: str, first: str, second: str) -> None:
        text = f"task {task!r} is defined twice, in {first} and in {second}"
        super().__init__(text, hint="Give one of them another name=...")
        self.task, self.first, self.second = task, first, second


def _unknown(error: TallybookError, what: str, name: str, known: Iterable[str], otherwise: str = "") -> None:
    from difflib import get_close_matches

    names = tuple(sorted(known))
    near = get_close_matches(name, names, 1)
    hint = f"Did you mean {near[0]!r}?" if near else otherwise or f"See the names with `tallybook {what} list`"
    TallybookError.__init__(error, f"unknown {what} {name!r}", hint=hint)
    vars(error).update({what: name, "known": names})


class UnknownTask(TallybookError):
    """No imported function has the task name `task`; `known` lists the existing names."""

    task: str | None = None
    known: tuple[str, ...] = ()

    def __init__(self, task: str, known: Iterable[str] = ()) -> None:
        _unknown(self, "task", task, known, "Import the module that defines it, or run the job elsewhere")


class UnknownQueue(TallybookError):
    """There is no queue `queue`; `known` lists the existing names."""

    queue: str | None = None
    known: tuple[str, ...] = ()

    def __init__(self, queue: str, known: Iterable[str] = ()) -> None:
        _unknown(self, "queue", queue, known)


class UnknownProvider(TallybookError):
    """There is no provider `provider` or, if `inactive` is True, it is not active; `known` lists the existing names."""

    provider: str | None = None
    known: tuple[str, ...] = ()
    inactive: bool = False

    def __init__(self, provider: str, known: Iterable[str] = (), *, inactive: bool = False) -> None:
        if inactive:
            hint = f"Activate it: `tallybook provider set {provider} --active`"
            super().__init__(f"provider {provider!r} is not active", hint=hint)
            self.provider, self.known, self.inactive = provider, tuple(sorted(known)), inactive
        else:
            _unknown(self, "provider", provider, known)


class UnknownSchedule(TallybookError):
    """There is no schedule `schedule`; `known` lists the existing names."""

    schedule: str | None = None
    known: tuple[str, ...] = ()

    def __init__(self, schedule: str, known: Iterable[str] = ()) -> None:
        _unknown(self, "schedule", schedule, known)


class UnknownJob(TallybookError):
    """There is no job with the id `job`, or its history has been pruned (TB002)."""

    job: int | None = None

    def __init__(
        self, job: int, *, hint: str = "It was never committed, or its history was pruned after its retention"
    ) -> None:
        super().__init__(f"unknown job {job}", hint=hint)
        self.job = job


class UnknownNode(TallybookError):
    """There is no node `node`; `known` lists the existing names."""

    node: str | None = None
    known: tuple[str, ...] = ()

    def __init__(self, node: str, known: Iterable[str] = ()) -> None:
        _unknown(self, "node", node, known)


class KeyTaken(TallybookError):
    """Another live job has the unique key (TB008), and this call passed on_conflict="raise"; `job` is that job's id."""

    job: int | None = None

    def __init__(self, job: int, message: str | None = None, *, hint: str | None = None) -> None:
        super().__init__(message or f"job {job} has the unique key", hint=hint)
        self.job = job

    @classmethod
    def of_server(cls, sqlstate: str, message: str, detail: str | None, hint: str | None) -> Self:
        """Read the job's id from the server's detail."""
        error = super().of_server(sqlstate, message, None, hint)
        error.job = int(detail) if detail and detail.isdigit() else None
        return error


class ResultTimeout(TallybookError, TimeoutError):
    """The job (`job` is its id) has not ended within the caller's timeout; it continues."""

    def __init__(self, job: int, seconds: float) -> None:
        hint = "The job continues: ask again, or wait longer"
        super().__init__(f"job {job} has not ended within {seconds:g} s", hint=hint)
        self.job = job


class LockNotAvailable(TallybookError, TimeoutError):
    """`ctx.lock` did not get the lock `name` within `wait`, or before its job was asked to stop."""

    def __init__(self, name: str, seconds: float | None) -> None:
        when = "before its job was asked to stop" if seconds is None else f"within {seconds:g} s"
        hint = "Another handler holds it: catch this and return Snooze(...), or let the retry policy set the delay"
        super().__init__(f"the lock {name!r} was not free {when}", hint=hint)
        self.name = name


class ResultMissing(TallybookError):
    """The job completed, but its result could not be stored; `reason` explains why."""

    def __init__(self, job: int, reason: str) -> None:
        super().__init__(f"job {job} completed, but {reason}")
        self.job, self.reason = job, reason


class JobFailed(TallybookError):
    """An attempt failed in `drain(raise_on_failure=True)`; its cause is the handler's exception, if it ran here."""

    def __init__(self, job: int, task: str, error_type: str | None, error_message: str | None) -> None:
        said = ": ".join(part for part in (error_type, error_message) if part)
        super().__init__(f"{task} {job} failed: {said or 'no error is known'}")
        self.job, self.task, self.error_type, self.error_message = job, task, error_type, error_message


class JobDied(TallybookError):
    """The job is dead, so it has no result; `error_type` and `error_message` describe its last failure."""

    def __init__(self, job: int, error_type: str | None, error_message: str | None) -> None:
        said = ": ".join(part for part in (error_type, error_message) if part)
        super().__init__(f"job {job} is dead: {said or 'no error is known'}")
        self.job, self.error_type, self.error_message = job, error_type, error_message


class JobCancelled(TallybookError):
    """The job was cancelled, so it has no result; `reason` is the reason passed with the cancel."""

    def __init__(self, job: int, reason: str | None) -> None:
        super().__init__(f"job {job} was cancelled" + (f": {reason}" if reason else ""))
        self.job, self.reason = job, reason


class CallFailed(TallybookError):
    """An outgoing call of a ready-made task did not succeed.

    `provider` is the provider's name (None: the URL was in the args), `status` the HTTP status (None: no answer).
    `no_retry` is True if another attempt would end the same way. `headers` contains Retry-After and Date of the answer,
    and the next attempt waits accordingly. The text contains no secret of the provider.
    """

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
    """A call would have gone to a non-public address that its provider does not allow; `reason` is its kind."""

    def __init__(self, reason: str, *, provider: str | None = None, who: str = "call") -> None:
        hint = "If that is intended, add the host or network to the setting allow of its provider"
        text = f"{who}: its host has an address that is {reason}"
        super().__init__(text, provider=provider, no_retry=True, hint=hint)
        self.reason = reason


class OperatorRefused(TallybookError):
    """The operator API refused a request. `status` is the HTTP status, `code` the API's (None: not from the API)."""

    def __init__(self, status: int, code: str | None, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{status} {code}: {message}" if code else f"{status}: {message}", hint=hint)
        self.status, self.code = status, code


class LeaseLost(TallybookError):
    """The attempt no longer belongs to this worker (TB001); its outcome was refused."""

    job: int | None = None
    attempt: int | None = None

    def __init__(self, job: int, attempt: int) -> None:
        hint = "Another worker may be running the job: undo what you can, and do not record an outcome"
        super().__init__(f"the lease of job {job}, attempt {attempt}, is lost", hint=hint)
        self.job, self.attempt = job, attempt


class TransactionError(TallybookError):
    """A handler misused the transaction that ends its attempt.

    Either the handler of an atomic task committed or rolled back its transaction, or a handler returned before the
    transaction in which it called `ctx.complete` was committed. The first is not retried: another attempt would repeat
    its effects.
    """

    no_retry = True


class WorkerEnded(TallybookError):
    """The server does not know this worker, or has declared it ended (TB006): register it again."""


class ForeignCursor(TallybookError):
    """Another cluster wrote the cursors of the lanes, for example before a restore (TB004): rebase first."""


class SecretError(TallybookError):
    """The secret `field` of `provider` cannot be encrypted or decrypted. The text never contains a secret or a key."""

    def __init__(
        self, provider: str, field: str, reason: str, *, slot: str = "current", hint: str | None = None
    ) -> None:
        which = " (previous)" if slot == "previous" else ""
        super().__init__(f"secret {field!r} of provider {provider!r}{which}: {reason}", hint=hint)
        self.provider, self.field, self.slot, self.reason = provider, field, slot, reason


class QueueUnavailable(TallybookError):
    """The server `server` (without its password) cannot be reached; `reason` explains why."""

    def __init__(self, server: str, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"cannot reach PostgreSQL at {server}: {reason}", hint=hint)
        self.server, self.reason = server, reason


class CommitUnknown(TallybookError):
    """The connection to `server` was lost while the call `verb` was committed, so the outcome of the commit is unknown.

    Only calls on the App's own connections raise it; an enqueue raises it only if the server does not return in time.
    """

    def __init__(self, verb: str, server: str) -> None:
        text = f"{verb}: the connection to PostgreSQL at {server} was lost, and the outcome of the commit is unknown"
        hint = "Check before you repeat the call. A job with a unique key can be enqueued again safely"
        super().__init__(text, hint=hint)
        self.verb, self.server = verb, server


class SchemaError(TallybookError):
    """Program and database have different versions (TB007). `found` is the database's, `needed` the program's."""

    found: int | None = None
    needed: int | None = None


class SchemaMissing(SchemaError):
    """There is no schema `tallybook` in this database."""

    def __init__(self, database: str) -> None:
        super().__init__(f"no schema tallybook in database {database!r}", hint="Run `tallybook migrate`")


class SchemaTooOld(SchemaError):
    """The database's schema is too old for this program."""

    def __init__(self, found: int, needed: int) -> None:
        text = f"the schema is at version {found}, this program needs {needed}"
        super().__init__(text, hint="Run `tallybook migrate`")
        self.found, self.needed = found, needed


class SchemaTooNew(SchemaError):
    """The database's schema is too new for this program."""

    def __init__(self, found: int, needed: int) -> None:
        text = f"the schema is at version {found}, this program supports versions up to {needed}"
        super().__init__(text, hint="Update the package tallybook here")
        self.found, self.needed = found, needed


class SchemaUnreleased(SchemaError):
    """An unreleased version of Tallybook created the database's schema, which cannot be upgraded."""

    def __init__(self, found: int) -> None:
        text = f"the schema was made by an unreleased version of Tallybook (its version {found}) and cannot be upgraded"
        hint = "Let its workers finish the open jobs, then run `tallybook uninstall` and `tallybook migrate`"
        super().__init__(text, hint=hint)
        self.found = found


class RoleError(TallybookError):
    """The roles `names` cannot be created, are missing, or have a different owner. Nothing was changed."""

    def __init__(self, names: Iterable[str], reason: str, hint: str) -> None:
        self.names = tuple(names)
        super().__init__(f"the roles {', '.join(self.names)} {reason}", hint=hint)


class SchemaBusy(SchemaError):
    """A migration did not get the locks that it needs; `by` names the sessions that hold them. Nothing was changed."""

    def __init__(self, by: str) -> None:
        text = f"the schema cannot be migrated now: its tables are held by {by}"
        super().__init__(text, hint="End that transaction, then migrate again")
        self.by = by


_BY_SQLSTATE: dict[str, type[TallybookError]] = {
    "TB001": LeaseLost, "TB002": UnknownJob, "TB003": WrongIsolationLevel, "TB004": ForeignCursor,
    "TB005": InvalidArgument, "TB006": WorkerEnded, "TB007": SchemaError, "TB008": KeyTaken,
}  # fmt: skip


def from_sqlstate(sqlstate: str, message: str, detail: str | None, hint: str | None) -> TallybookError | None:
    """Build the error for one of Tallybook's SQLSTATEs (TB0xx) with the server's text; None for any other code.

    Raise it from the driver's error: `raise error from driver_error`.
    """
    cls = _BY_SQLSTATE.get(sqlstate)
    return cls.of_server(sqlstate, message, detail, hint) if cls else None
