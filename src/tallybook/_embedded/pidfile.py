"""What a data directory says about the server that uses it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Postmaster:
    """The contents of a postmaster.pid, as far as they are written yet."""

    pid: int
    port: int | None
    sockets: Path | None
    ready: bool


def read_postmaster(data: Path) -> Postmaster | None:
    """Return what postmaster.pid says, true or stale; None when it is not there or not written yet."""
    try:
        lines = (data / "postmaster.pid").read_text(errors="replace").splitlines()
        pid = abs(int(lines[0]))  # negative for a server in single-user mode
    except (OSError, ValueError, IndexError):
        return None
    lines += [""] * (8 - len(lines))
    return Postmaster(
        pid=pid,
        port=int(lines[3]) if lines[3].isdecimal() else None,
        sockets=Path(lines[4]) if lines[4] else None,
        ready=lines[7].strip() == "ready",
    )


def is_running(pid: int) -> bool:
    """Say whether the process is there and more than a zombie that nobody has reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    # kill() reaches zombies too, and in a container whose first process does not reap they stay for good.
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state not in ("Z", "X")
    return True


def is_postmaster_of(pid: int, data: Path) -> bool:
    """Say whether a running process can be the server of this data directory; in doubt it is.

    After a crash another program may have got the number that postmaster.pid still names.
    """
    if not is_running(pid):
        return False
    process = Path(f"/proc/{pid}")
    with suppress(OSError):
        if not (process / "comm").read_text().startswith("postgres"):
            return False
    with suppress(OSError):  # unreadable to other users; a postmaster works in its data directory
        return (process / "cwd").readlink() == data
    return True
