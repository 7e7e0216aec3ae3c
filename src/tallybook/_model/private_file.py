"""Whether a file with secrets is private."""

import os


def open_to_others(about: os.stat_result, us: int | None = None) -> bool:
    """Whether others than its owner may read or write a file. `us` is the current user, by default the process's.

    A file of root's may be readable by our own group unless we are root. Kubernetes stores secrets this way, and so do
    administrators for a service that must not change them.
    """
    if os.name != "posix":
        return False
    us = os.geteuid() if us is None else us
    allowed = 0o040 if about.st_uid == 0 and us != 0 else 0
    return bool(about.st_mode & 0o077 & ~allowed)
