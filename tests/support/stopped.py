"""A server whose processes are all stopped by SIGSTOP, with open sockets."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def _processes(postmaster: int) -> list[int]:
    found = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    return [postmaster, *map(int, found)]


def stop(postmaster: int) -> None:
    """Send SIGSTOP to a server: to the postmaster first, so that it starts no more children."""
    for process in _processes(postmaster):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP)


def go_on(postmaster: int) -> None:
    """Send SIGCONT, to children first."""
    for process in reversed(_processes(postmaster)):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


@contextmanager
def stopped(postmaster: int) -> Iterator[None]:
    """Stop the server for the block."""
    stop(postmaster)
    try:
        yield
    finally:
        go_on(postmaster)
