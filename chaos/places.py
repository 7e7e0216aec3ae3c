"""Where a run keeps its files: a small disk that can be filled, and logs that outlive the run when it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_INSIDE = "TALLYBOOK_CHAOS_NAMESPACE"
_LARGEST_DISK = 8 << 30


def enter_namespace(*, network: bool) -> None:
    """Start this program again in a namespace of its own, where it can: its disk and its network end with its last process.

    Root needs no more than that; others get it through a user namespace, where the kernel allows one. Returns where
    this has been done, or is not possible.
    """
    if os.environ.get(_INSIDE) or not sys.platform.startswith("linux") or not (unshare := shutil.which("unshare")):
        return
    who = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    command = [unshare, *who, "--mount", "--propagation", "private", *(["--net"] if network else [])]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
        os.environ[_INSIDE] = "1"
        os.execv(unshare, [*command, sys.executable, "-m", "chaos", *sys.argv[1:]])


class Place:
    """The directory of one run. `disk` is where the servers are; `small` says why it cannot be filled, if so."""

    def __init__(self, disk: Path | None, size: int) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="tallybook-chaos-", dir="/tmp"))
        self.path.chmod(0o711)  # the server's user must get through
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
            self.small = f"{disk} has {usage.total >> 30} GB: that is no disk to be filled, name one of at most 8 GB"

    def _mount(self, size: int) -> None:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size},mode=711", "tmpfs", str(self.disk)],
            capture_output=True,
            text=True,
            check=False,
        ) if os.environ.get(_INSIDE) else None  # fmt: skip
        if done is not None and done.returncode == 0:
            self._mounted = True
            return
        why = done.stderr.strip() if done is not None else "no mount namespace can be made here"
        self.small = (
            f"{why}; run as root, or give a directory on a file system of at most 8 GB: make chaos DISK=/mnt/small"
        )

    def fill(self) -> int:
        """Leave no byte on the disk, of what has come free since the last time either; how many that took."""
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
        """Give the space back."""
        self._filler.unlink(missing_ok=True)

    def close(self, *, keep: bool) -> None:
        """Remove everything; with `keep`, all but the logs of servers, workers and producers."""
        for log in self.disk.glob("*.log*"):
            shutil.copy(log, self.logs / f"postgres-{log.name}")
        if self._mounted:
            subprocess.run(["umount", "--lazy", str(self.disk)], capture_output=True, check=False)
        for directory in [self.disk] if keep else [self.disk, self.path]:
            shutil.rmtree(directory, ignore_errors=True)
