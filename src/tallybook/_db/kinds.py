"""The kind of a connection object, found by the names of its classes, so that no library has to be imported."""

from functools import cache
from typing import Any, get_origin

from tallybook._db.declared import Call
from tallybook.errors import ConnectionNotSupported, TallybookError, UnknownJob, from_sqlstate

_KINDS = {
    "psycopg.Connection": "psycopg",
    "psycopg.AsyncConnection": "async psycopg",
    "asyncpg.connection.Connection": "async asyncpg",
    "asyncpg.pool.PoolConnectionProxy": "async asyncpg",
    "sqlalchemy.engine.base.Connection": "sqlalchemy connection",
    "sqlalchemy.orm.session.Session": "sqlalchemy session",
    "sqlalchemy.orm.scoping.scoped_session": "sqlalchemy session",
    "sqlalchemy.ext.asyncio.engine.AsyncConnection": "async sqlalchemy connection",
    "sqlalchemy.ext.asyncio.session.AsyncSession": "async sqlalchemy session",
    "sqlalchemy.ext.asyncio.scoping.async_scoped_session": "async sqlalchemy session",
    "django.db.backends.base.base.BaseDatabaseWrapper": "django",
    "django.utils.connection.ConnectionProxy": "django",
    "builtins.str": "django alias",
    # Not connections; recognized so that the error can name what to pass instead.
    "psycopg_pool.base.BasePool": "pool",
    "asyncpg.pool.Pool": "pool",
    "sqlalchemy.engine.base.Engine": "pool",
    "sqlalchemy.ext.asyncio.engine.AsyncEngine": "pool",
}

_SYNC = "a psycopg Connection, a SQLAlchemy Session or Connection, a Django connection or its alias, or the App"
_ASYNC = "a psycopg AsyncConnection, an asyncpg connection, a SQLAlchemy AsyncSession or AsyncConnection, or the App"


@cache
def _kind(cls: type) -> str:
    names = (f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)
    return next((_KINDS[name] for name in names if name in _KINDS), "")


def kind_of(conn: object) -> str:
    """Return one of the kinds above, or "". A tracing proxy counts as the class that it claims to wrap."""
    return _kind(type(conn)) or _kind(conn.__class__)  # type: ignore[arg-type]  # a class has a hash


def transaction_kind(annotation: object) -> str:
    """Return the kind of transaction for a parameter with this annotation, or "" for any other annotation."""
    cls = get_origin(annotation) or annotation
    kind = _kind(cls) if isinstance(cls, type) else ""
    return "" if kind in ("pool", "django alias") else kind


def refused(conn: object, verb: str, *, sync: bool, postgres: bool = True) -> ConnectionNotSupported:
    """Return the error for an object that `verb`, or its `_sync` form, cannot use."""
    kind, accepted = kind_of(conn), _SYNC if sync else _ASYNC
    if verb.startswith("enqueue"):
        other = f"{verb}()" if sync else f"{verb}_sync()"
    else:
        other = ".on(conn)" if sync else ".sync(conn)"
    if not postgres:
        return ConnectionNotSupported(conn, f"one to PostgreSQL: {accepted}")
    if kind == "pool":
        return ConnectionNotSupported(conn, f"one connection out of it: {accepted}")
    if kind == "django alias":
        return ConnectionNotSupported(conn, accepted if sync else f"{accepted}; a Django alias goes to {other}")
    if kind.startswith("async") == sync and kind:
        return ConnectionNotSupported(conn, f"this one to {other}, or here {accepted}")
    return ConnectionNotSupported(conn, accepted)


def chain(error: BaseException) -> list[BaseException]:
    """Return `error` and the errors that it wraps, the driver's own error last."""
    seen: list[BaseException] = []
    inner: BaseException | None = error
    while inner is not None and len(seen) < 5:
        seen.append(inner)
        inner = getattr(inner, "orig", None) or inner.__cause__
    return seen


def state_of(error: BaseException) -> str | None:
    """Return the SQLSTATE of a driver's error."""
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    return state if isinstance(state, str) else None


def refusal(error: BaseException, call: Call[Any] | None = None) -> TallybookError | None:
    """Return the Tallybook error for a refusal by the server (SQLSTATE TB0xx); None for any other driver error.

    SQLAlchemy and Django wrap the driver's error, and only the innermost one has some of its data.
    """
    for inner in reversed(chain(error)):
        if (sqlstate := state_of(inner) or "").startswith("TB"):
            diag = getattr(inner, "diag", inner)
            message = getattr(diag, "message_primary", None) or getattr(diag, "message", None) or str(inner)
            detail = getattr(diag, "message_detail", None) or getattr(diag, "detail", None)
            hint = getattr(diag, "message_hint", None) or getattr(diag, "hint", None)
            if sqlstate == "TB002" and call is not None and call.unknown is not UnknownJob:
                return call.unknown.of_server(sqlstate, message, detail, hint)
            return from_sqlstate(sqlstate, message, detail, hint)
    return None
