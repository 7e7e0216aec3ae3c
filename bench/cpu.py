"""CPU time that processes have used, from /proc; without /proc (macOS) nothing is measured."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path("/proc/self/schedstat").exists()
"""Whether this machine has the numbers."""


def process_cpu(pid: int) -> float:
    """Return the CPU seconds of one process with all its threads, to a hundredth; without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def thread_cpu(pid: int) -> float:
    """Return the CPU seconds of a process's first thread, to the nanosecond; a PostgreSQL process has only this one."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def server_cpu(postmaster: int) -> float:
    """Return the CPU seconds of a whole server: the postmaster, its living processes, and those that have ended."""
    fields = Path(f"/proc/{postmaster}/stat").read_text().rsplit(")", 1)[1].split()
    used = thread_cpu(postmaster) + (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    for child in Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split():
        try:
            used += thread_cpu(int(child))
        except (FileNotFoundError, ProcessLookupError):  # ended since: the next reading counts it with the ended ones
            continue
    return used
