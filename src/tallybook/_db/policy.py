"""What to do about an error of the database: one table by SQLSTATE, used by every connection of Tallybook.

The rows are those of the promise in
https://github.com/tallybook/tallybook/blob/main/docs/reliability.md.
"""

import enum
import logging
import random
import time
from typing import Any

import psycopg

log = logging.getLogger("tallybook.db")


class Action(enum.Enum):
    """What to do about an error."""

    RECONNECT = "the connection is gone or unusable: drop it, back off, retry on a new one"
    AGAIN = "contention or a time limit: retry on the same connection, after a moment"
    WAIT = "the server lacks a resource: retry after a second or more"
    PAYLOAD = "the values do not fit: never retry"
    OURS = "a refusal by Tallybook: raise its error"
    FINAL = "waiting does not help while starting: a wrong password, user, or database"
    CALLER = "the caller's: a mistake in a statement, a violated constraint, ..."


# The longest prefix decides. Connection failures mostly have no SQLSTATE at all: see action_for.
TABLE: dict[str, Action] = {
    "08": Action.RECONNECT,  # connection exceptions
    "57P": Action.RECONNECT,  # terminated, crashed, starting up, database dropped, idle too long
    "58": Action.RECONNECT,  # the server's own input and output
    "25006": Action.RECONNECT,  # read-only: a primary that was demoted
    "25P03": Action.RECONNECT,  # idle in transaction for too long
    "25P04": Action.RECONNECT,  # transaction_timeout ends the session
    "26000": Action.RECONNECT,  # a prepared statement that does not exist: this is another session than before
    "40001": Action.AGAIN,  # serialization failure
    "40003": Action.RECONNECT,  # statement completion unknown
    "40P01": Action.AGAIN,  # deadlock
    "55P03": Action.AGAIN,  # lock_timeout
    "57014": Action.AGAIN,  # statement_timeout, or cancelled by an operator
    "53": Action.WAIT,  # disk full, out of memory, too many connections, ...
    "TB": Action.OURS,
    **dict.fromkeys(("22P02", "22P05", "22003", "54000", "54001", "23514"), Action.PAYLOAD),
    **dict.fromkeys(("28", "3D", "0P"), Action.FINAL),
}

# libpq gives no SQLSTATE for a connection that the server refused. There is only a text, which may be translated. It
# decides only how long to wait, and whether to end a start that cannot succeed.
_FINAL_TEXTS = ("password authentication failed", "no password supplied", "does not exist", "no pg_hba.conf entry")
_FULL_TEXTS = ("too many clients", "too many connections", "remaining connection slots", "no more connections allowed")


def action_for(error: BaseException, conn: Any = None) -> Action:
    """Return what to do about this error of a driver or a socket; `conn` is the connection where it occurred."""
    if not isinstance(error, psycopg.Error):
        return Action.RECONNECT if isinstance(error, OSError) else Action.CALLER
    state = error.sqlstate
    if state:
        found = next((TABLE[state[:n]] for n in range(5, 1, -1) if state[:n] in TABLE), Action.CALLER)
        return Action.RECONNECT if found is Action.CALLER and conn is not None and conn.closed else found
    if any(text in str(error) for text in _FULL_TEXTS):
        return Action.WAIT
    if isinstance(error, psycopg.OperationalError) or (conn is not None and conn.closed):
        return Action.RECONNECT
    return Action.CALLER


def is_gone(error: BaseException, conn: Any = None) -> bool:
    """Whether this error means that the connection or the server is lost, or unusable now."""
    return action_for(error, conn) in (Action.RECONNECT, Action.WAIT)


def is_final(error: BaseException) -> bool:
    """Whether waiting cannot help: a wrong password, database or host name in the DSN. Used only at the start."""
    if getattr(error, "sqlstate", None):
        return action_for(error) is Action.FINAL
    return any(text in str(error) for text in _FINAL_TEXTS)


def backoff(failures: int, *, least: float = 0.0) -> float:
    """Seconds until the next try: 0.1 to 10, doubling, with the upper half random, so that tries do not coincide."""
    most: float = min(10.0, max(0.1 * 2 ** min(failures, 10), 2 * least))
    return most * random.uniform(0.5, 1.0)


def first_line(error: BaseException) -> str:
    """Return the first line of its text, or its class name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def unreached(error: BaseException) -> str:
    """Return why a server was not reached."""
    return first_line(error).removeprefix("connection failed: ")


class Outage:
    """The consecutive failures of one connection: how long to wait, and when to log.

    It logs the first failure and each tenth; from the thirtieth on, it logs one every five minutes. The end of the
    outage is logged if a failure was. The first `quiet` ones are not logged: a restarted server answers the next try.
    """

    EVERY, MANY, SELDOM = 10, 30, 300.0

    def __init__(self, what: str, *, quiet: int = 0, longest: float = 10.0) -> None:
        self._what = what
        self._quiet = quiet
        self._longest = longest
        self._began = self._said_at = 0.0
        self._said = False
        self.failures = 0

    def failed(self, error: BaseException, conn: Any = None) -> float:
        """Count a failure; returns the seconds to wait before the next try."""
        now = time.monotonic()
        if not self.failures:
            self._began = now
        self.failures += 1
        seen = self.failures - self._quiet
        due = seen == 1 or (0 < seen <= self.MANY and seen % self.EVERY == 0)
        if due or (seen > self.MANY and now - self._said_at >= self.SELDOM):
            self._said, self._said_at = True, now
            more = f" ({self.failures} times in {now - self._began:.0f} s)" if self.failures > 1 else ""
            log.warning("%s: %s; trying again%s", self._what, first_line(error), more)
        if action_for(error, conn) is Action.WAIT:
            return min(backoff(self.failures, least=1.0), max(1.0, self._longest))
        if self.failures == 1:  # at once, but not all workers of a restarted server in the same moment
            return random.uniform(0.0, 0.05)
        return min(backoff(self.failures - 1), self._longest)

    def over(self) -> None:
        """End the outage: the connection works again."""
        if self._said:
            log.info("%s: connected again after %.0f s", self._what, time.monotonic() - self._began)
        self.failures, self._said = 0, False
