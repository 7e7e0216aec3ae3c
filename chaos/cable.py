"""A cable to a node that can be pulled: the node's proxy listens in its own network namespace.

A pulled cable loses packets in both directions, without an answer. A proxy that drops data does not: its kernel still
acknowledges received data. Needs `ip` (iproute2) and a kernel that allows network namespaces.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from chaos.places import inside

_NAMES = Path("/run/netns")
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <sched.h>


def possible() -> str | None:
    """Return None if cables work on this machine, else the reason."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is missing"
    # `ip netns` keeps a file for each name here. The run's own tmpfs has none of an earlier run.
    _NAMES.mkdir(exist_ok=True)
    own = inside() and subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(_NAMES)], capture_output=True, check=False)
    if not own or own.returncode or not _run("link", "set", "lo", "up"):
        return "the kernel does not allow network namespaces"
    return None


class Cable:
    """A pair of virtual network devices, one in the namespace of node `number`."""

    def __init__(self, number: int) -> None:
        self._here, self._there, self._namespace = f"here{number}", f"there{number}", f"node{number}"
        self.address = f"10.77.{number}.2"
        made = (
            _run("netns", "add", self._namespace)
            and _run("link", "add", self._here, "type", "veth", "peer", "name", self._there, "netns", self._namespace)
            and _run("address", "add", f"10.77.{number}.1/30", "dev", self._here)
            and _run("-n", self._namespace, "address", "add", f"{self.address}/30", "dev", self._there)
            and _run("link", "set", self._here, "up")
        )
        if not made:
            raise OSError(f"cannot make the network devices of node {number}")
        self.plug()

    def plug(self) -> None:
        """Let packets through."""
        _run("-n", self._namespace, "link", "set", self._there, "up")

    def pull(self) -> None:
        """Lose every packet until `plug`."""
        _run("-n", self._namespace, "link", "set", self._there, "down")

    def listener(self) -> socket.socket:
        """Return a listening TCP socket at the far end."""
        with ThreadPoolExecutor(1) as thread:  # a namespace belongs to a thread
            return thread.submit(self._listen).result()

    def _listen(self) -> socket.socket:
        with (_NAMES / self._namespace).open("rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return socket.create_server((self.address, 0))


def _run(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0
