"""The modules behind `tallybook.embedded`, and their errors.

binaries   finds the PostgreSQL installations of this machine; copies one for a user that cannot reach it
directories  cache, run directories, locks between processes; the user that root's server runs as, and what it reaches
cluster    one data directory: its lock, its contents, the server that uses it, making it (initdb once, then copies)
guard      the server's command line, and our handle on the guard process; guard_main is that process
"""

from tallybook.errors import TallybookError


class EmbeddedError(TallybookError):
    """An embedded server cannot do what was asked."""


class EmbeddedUnavailable(EmbeddedError):
    """There is no PostgreSQL of the wanted version that this user could run; the message names the remedy."""


class EmbeddedBusy(EmbeddedError):
    """Another server holds the data directory. `pid` is its process, or None while it is still starting."""

    def __init__(self, message: str, pid: int | None = None) -> None:
        super().__init__(message)
        self.pid = pid


class EmbeddedStartFailed(EmbeddedError):
    """The server ended or stayed silent while starting. `log_tail` holds the last lines of its log."""

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(f"{message}\n{log_tail}" if log_tail else message)
        self.log_tail = log_tail
