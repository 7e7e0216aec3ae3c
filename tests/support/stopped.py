"""A server whose processes are all stopped by SIGSTOP, with open sockets."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def _children(postmaster: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()]


def _send(number: signal.Signals, *processes: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


@contextmanager
def stopped(postmaster: int) -> Iterator[None]:
    """Stop the server for the block: the postmaster first, so that it starts no more children, and last to go on."""
    _send(signal.SIGSTOP, postmaster)
    _send(signal.SIGSTOP, *_children(postmaster))
    try:
        yield
    finally:
        _send(signal.SIGCONT, *_children(postmaster), postmaster)
