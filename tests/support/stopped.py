"""A server that has stopped without being gone: all its processes stand still, and its sockets stay open."""

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
    """SIGSTOP a server: the postmaster first, so that no child comes after the look at them."""
    for process in _processes(postmaster):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGSTOP)


def go_on(postmaster: int) -> None:
    """SIGCONT, children first."""
    for process in reversed(_processes(postmaster)):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


@contextmanager
def stopped(postmaster: int) -> Iterator[None]:
    """Stand still while the block runs."""
    stop(postmaster)
    try:
        yield
    finally:
        go_on(postmaster)
