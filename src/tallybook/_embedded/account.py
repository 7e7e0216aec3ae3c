"""The user that the server runs as, and what that user can reach.

PostgreSQL refuses to run as root. For root, the server runs as `postgres` if that user exists, else as `nobody`. For
any other user, it runs as that user, and there is no account (None).
"""

import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from .errors import EmbeddedUnavailable


@dataclass(frozen=True)
class Account:
    """The user that root's server runs as, with its primary group and no other."""

    name: str
    uid: int
    gid: int

    def owns(self, path: Path) -> None:
        """Give a directory to this user. Call it only for directories that we have just made."""
        os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def reaches(self, path: Path) -> bool:
        """Return whether this user may walk to `path` and read it (run it, list it), by owner, group and mode.

        Access control lists are not checked. If one opens a path, an unneeded copy is made; if one closes it, the
        operating system's own error appears.
        """
        real = path.resolve()
        try:
            here = real.stat()
        except OSError:
            return False
        runs = stat.S_ISDIR(here.st_mode) or here.st_mode & stat.S_IXUSR
        return self.enters(real.parent) and self._may(here, stat.S_IROTH | (stat.S_IXOTH if runs else 0))

    def enters(self, directory: Path) -> bool:
        """Return whether this user can enter a directory, even without the right to list it."""
        real = directory.resolve()
        try:
            return all(self._may(part.stat(), stat.S_IXOTH) for part in (real, *real.parents))
        except OSError:
            return False

    def _may(self, info: os.stat_result, want: int) -> bool:
        shift = 6 if info.st_uid == self.uid else 3 if info.st_gid == self.gid else 0
        return (info.st_mode >> shift) & want == want


def server_account() -> Account | None:
    """Return the account that root's servers run as, or None when we are not root."""
    if os.geteuid() != 0:
        return None
    # Other programs run as `nobody`, too, and could then reach the server's socket; it is the last resort.
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return Account(name, entry.pw_uid, entry.pw_gid)
    raise EmbeddedUnavailable(
        "PostgreSQL does not run as root, and this machine has neither a user postgres nor a user nobody. "
        "Run as another user, or add one: useradd --system postgres"
    )


def owner_uid(account: Account | None) -> int:
    """Return the uid that the server runs as and that owns its files."""
    return os.geteuid() if account is None else account.uid
