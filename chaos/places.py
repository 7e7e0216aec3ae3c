"""The files of a run: a small disk that can be filled, and logs that are kept if the run fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_INSIDE = "TALLYBOOK_CHAOS_NAMESPACE"
_LARGEST_DISK = 8 << 30


def inside() -> bool:
    """Return whether this process is in a namespace of its own."""
    return bool(os.environ.get(_INSIDE))


def enter_namespace(*, network: bool) -> None:
    """Restart this program in its own namespace if possible: its disk and network end with its last process.

    Users other than root get it through a user namespace, if the kernel allows one. This function returns only inside
    the namespace, or if none is possible.
    """
    if inside() or not sys.platform.startswith("linux") or not (unshare := shutil.which("unshare")):
        return
    who = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    command = [unshare, *who, "--mount", "--propagation", "private", *(["--net"] if network else [])]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
        os.environ[_INSIDE] = "1"
        os.execv(unshare, [*command, sys.executable, "-m", "chaos", *sys.argv[1:]])


class Place:
    """The directory of one run. The servers are in `disk`; `small` is the reason why it cannot be filled, or None."""

    def __init__(self, disk: Path | None, size: int) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="tallybook-chaos-", dir="/tmp"))
        self.path.chmod(0o711)  # the server's user must be able to enter
        self.logs = self._make("logs")
        self.runs = self._make("runs")
        self.links = self._make("links")
        self.disk = self._make("disk")
        self.small: str | None = None
        self._mounted = False
        if disk is not None:
            self._take(disk)
        else:
            self._mount(size)
        self._filler = self.disk / "filler"

    def _make(self, name: str) -> Path:
        made = self.path / name
        made.mkdir(mode=0o711)
        made.chmod(0o711)
        return made

    def _take(self, disk: Path) -> None:
        self.disk.rmdir()
        self.disk = Path(tempfile.mkdtemp(prefix="tallybook-chaos-", dir=disk))
        self.disk.chmod(0o711)
        usage = shutil.disk_usage(self.disk)
        if usage.total > _LARGEST_DISK:
            self.small = f"{disk} has {usage.total >> 30} GB: too large to fill, give one of at most 8 GB"

    def _mount(self, size: int) -> None:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size},mode=711", "tmpfs", str(self.disk)],
            capture_output=True,
            text=True,
            check=False,
        ) if inside() else None  # fmt: skip
        if done is not None and done.returncode == 0:
            self._mounted = True
            return
        why = done.stderr.strip() if done is not None else "cannot make a mount namespace"
        self.small = (
            f"{why}; run as root, or give a directory on a file system of at most 8 GB: make chaos DISK=/mnt/small"
        )

    def fill(self) -> int:
        """Fill the disk completely, also with space freed since the last call; return the filler's size in bytes."""
        with self._filler.open("ab") as file:
            size = file.tell()
            step = 1 << 28
            while step >= 1 << 12:
                try:
                    os.posix_fallocate(file.fileno(), size, step)
                except OSError:
                    step >>= 2
                else:
                    size += step
        return size

    def empty(self) -> None:
        """Free the space."""
        self._filler.unlink(missing_ok=True)

    def close(self, *, keep: bool) -> None:
        """Remove everything; with `keep`, remove only the disk and keep the logs of servers, workers and producers."""
        for log in self.disk.glob("*.log*"):
            shutil.copy(log, self.logs / f"postgres-{log.name}")
        if self._mounted:
            subprocess.run(["umount", "--lazy", str(self.disk)], capture_output=True, check=False)
        for directory in [self.disk] if keep else [self.disk, self.path]:
            shutil.rmtree(directory, ignore_errors=True)
