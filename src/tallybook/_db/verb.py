"""A verb as a value: one function and one docstring; await it, pass it a connection, or run it without an event loop.

await app.queues.pause("mail")             in a short transaction of the app's own
await app.queues.pause("mail").on(conn)    inside the caller's transaction
app.queues.pause("mail").sync()            without an event loop
app.queues.pause("mail").sync(conn)        the same inside the caller's transaction
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from tallybook._db import sync
from tallybook._db.declared import Call, T
from tallybook._db.source import Source
from tallybook._db.sync import done, got
from tallybook._model.tracing import Tracing, What
from tallybook.errors import InvalidArgument

if TYPE_CHECKING:
    from tallybook._model.job_info import JobDone

T_co = TypeVar("T_co", covariant=True)
ListOf: TypeAlias = list[T]  # a list, in a class that has a verb of that name


class Rows(Protocol):
    """The result of a synchronous connection's `execute`; a coroutine does not match."""

    def fetchone(self) -> Any: ...


class Plain(Protocol):
    """A psycopg Connection, a SQLAlchemy Session or Connection."""

    def execute(self, statement: Any, /) -> Rows: ...


class AsyncConn(Protocol):
    """A psycopg AsyncConnection, an asyncpg connection, a SQLAlchemy AsyncSession or AsyncConnection."""

    def execute(self, statement: Any, /) -> Coroutine[Any, Any, Any]: ...


class Wrapped(Protocol):
    """A Django connection, by attributes that no other object has."""

    vendor: Any

    def close_if_unusable_or_obsolete(self) -> Any: ...


SyncConn: TypeAlias = Plain | Wrapped | str  # without an event loop; a text is the alias of a Django connection


@dataclass(frozen=True, slots=True)
class Pause:
    """A step of a verb: wait this many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Beside:
    """A step of a verb that opens its own connection: a plain function, run in a thread if there is an event loop."""

    look: Callable[[], Any]


Steps: TypeAlias = Generator[Call[Any] | Pause | Beside, Any, T]
Made: TypeAlias = "Call[T] | Callable[[], Steps[T]]"  # the implementation of a verb: one statement, or several steps


def beside(look: Callable[[], T]) -> Steps[T]:
    """The steps of a verb that is only a `Beside`."""
    found: T = yield Beside(look)
    return found


class Verb(Coroutine[Any, Any, T_co], Generic[T_co]):
    """An action that has not run yet: await it, pass it a connection `.on(conn)`, or run it by `.sync()`; only once.

    If it is dropped without any of these, it warns like a coroutine.
    """

    __slots__ = ("_app", "_coroutine", "_made", "_name")

    def __init__(self, app: Source, made: Made[T_co], name: str = "") -> None:
        self._app = app
        self._name = name or (made.verb if isinstance(made, Call) else "a verb")
        self._made: Made[T_co] | None = made
        self._coroutine: Coroutine[Any, Any, T_co] | None = None

    def on(self, conn: AsyncConn | Source) -> Coroutine[Any, Any, T_co]:
        """Run it on this connection, inside its transaction. Raises ConnectionNotSupported for another object."""
        return run(conn, self._take())

    def sync(self, conn: SyncConn | Source | None = None) -> T_co:
        """Run it without an event loop: on this connection, inside its transaction, or on one of the app's own."""
        return run_sync(self._app if conn is None else conn, self._take())

    def _take(self) -> Made[T_co]:
        made, self._made = self._made, None
        if made is None:
            raise RuntimeError(f"cannot reuse {self._name}: it was awaited or run already")
        return made

    def _started(self) -> Coroutine[Any, Any, T_co]:
        if self._coroutine is None:
            self._coroutine = self.on(self._app)
        return self._coroutine

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self.on(self._app).__await__()

    def send(self, value: Any, /) -> Any:
        """As for a coroutine."""
        return self._started().send(value)

    def throw(self, typ: Any, value: Any = None, traceback: Any = None, /) -> Any:
        """As for a coroutine."""
        return self._started().throw(typ if value is None else value)

    def close(self) -> None:
        """As for a coroutine: it will not run."""
        self._made = None
        if self._coroutine is not None:
            self._coroutine.close()

    def __del__(self) -> None:
        if self._made is not None:
            text = f"{self._name} was never awaited, and neither .on(conn) nor .sync() was called"
            warnings.warn(text, RuntimeWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        return f"<{self._name}, {'done' if self._made is None else 'not done yet'}>"


class Noun:
    """A group of an app's verbs, such as app.queues or app.dead. It holds only the app."""

    __slots__ = ("_app",)

    def __init__(self, app: Source) -> None:
        self._app = app

    def _verb(self, made: Made[T], name: str = "") -> Verb[T]:
        return Verb(self._app, made, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._app.name}>"


def on_job(
    app: Source, job_id: int, made: Made[T], name: str = "", *, no_job: Callable[[Any], bool] | None = None
) -> Verb[T]:
    """Return a verb on one job, which runs on the node of its id. `no_job` as in AtJob."""
    from tallybook._db.node_source import AtJob

    return Verb(AtJob(app, job_id, no_job), made, name)


def on_jobs(
    app: Source, ids: Iterable[int], verb: Callable[[Iterable[int]], Call[ListOf[JobDone]]]
) -> Verb[ListOf[JobDone]]:
    """Return a verb on many jobs, each of which is on the node of its id."""
    from tallybook._db.node_source import AtJobs

    ids = list(ids)
    return Verb(AtJobs(app, ids, verb), verb(ids))


def run(conn: Any, made: Made[T]) -> Coroutine[Any, Any, T]:
    """Return the result of a verb on the caller's connection, or on one of the app's own."""
    if isinstance(made, Call):
        return conn._run(made) if isinstance(conn, Source) else sync.run_on(conn, made, sync=False)
    return drive(made(), partial(_step, conn, sync=False))


def run_sync(conn: Any, made: Made[T]) -> T:
    """The same on a synchronous connection."""
    if isinstance(made, Call):
        return conn._run_sync(made) if isinstance(conn, Source) else sync.run(conn, made)
    return done(drive(made(), partial(_step, conn, sync=True)))


def traced(tracing: Tracing | None, what: What, verb: Callable[[What], Call[T]], *, keeps: bool = False) -> Made[T]:
    """Return an enqueue by a verb, with a trace around it if the app is traced. `keeps` as in Tracing.sending."""
    return verb(what) if tracing is None else partial(_traced, tracing, what, verb, keeps)


def _traced(tracing: Tracing, what: What, verb: Callable[[What], Call[T]], keeps: bool) -> Steps[T]:
    with tracing.sending(what, keeps=keeps) as sending:
        found: T = yield verb(sending.what)
        sending.sent(found)
    return found


async def drive(steps: Steps[T], say: Callable[[Any], Any]) -> T:
    """Run the steps, each with `say`, and return their result. If `say` does not wait, this does not; see `got`."""
    try:
        asked = next(steps)
        while True:
            try:
                answer = await got(say(asked))
            except BaseException as error:
                asked = steps.throw(error)
            else:
                asked = steps.send(answer)
    except StopIteration as end:
        found: T = end.value
        return found


def _step(conn: Any, asked: Call[Any] | Pause | Beside, *, sync: bool) -> Any:
    if isinstance(asked, Call):
        return run_sync(conn, asked) if sync else run(conn, asked)
    if isinstance(asked, Pause):
        return (time if sync else asyncio).sleep(asked.seconds)
    if not isinstance(conn, Source):
        raise InvalidArgument("this needs its own connection", hint="Await it, or call .sync() without a connection")
    return asked.look() if sync else asyncio.to_thread(asked.look)
