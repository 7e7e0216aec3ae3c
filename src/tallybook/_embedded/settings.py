"""The server's command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Setting = str | int | float | bool

DEFAULTS: Mapping[str, Setting] = {
    "max_connections": 100,
    "shared_buffers": "128MB",
    "log_min_messages": "warning",
    "timezone": "UTC",
    "log_timezone": "UTC",
}
# For data that will be deleted. A commit still waits until its WAL is handed to the operating system
# (synchronous_commit stays on), so that Server.kill() loses no more than a SIGKILL would with real settings. Shared
# memory is in files of the data directory: what a killed server leaves in /dev/shm, only its next start would remove.
NOT_DURABLE: Mapping[str, Setting] = {"fsync": "off", "full_page_writes": "off", "dynamic_shared_memory_type": "mmap"}
# The manager sets where the server listens and for whom, because that keeps it safe.
_OURS = {
    *("listen_addresses", "port", "unix_socket_directories", "unix_socket_permissions", "unix_socket_group"),
    *("data_directory", "hba_file", "ident_file", "external_pid_file", "config_file"),
}


def checked(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the settings on top of our defaults; raise ValueError for settings that the manager sets."""
    if refused := sorted(_OURS & {name.lower() for name in settings}):
        raise ValueError(f"settings must not contain {', '.join(refused)}: the manager sets them")
    return {**DEFAULTS, **settings}


def command_line(
    programs: Path, data: Path, settings: Mapping[str, Setting], *, sockets: Path, port: int, tcp: bool
) -> list[str | Path]:
    """Return the postmaster's arguments. They override postgresql.conf and `alter system`."""
    ours: dict[str, Setting] = {
        "listen_addresses": "127.0.0.1" if tcp else "",
        "port": port,
        "unix_socket_directories": str(sockets),
        "unix_socket_permissions": "0700",
    }
    line: list[str | Path] = [programs / "postgres", "-D", data]
    for name, value in {**settings, **ours}.items():
        text = ("on" if value else "off") if isinstance(value, bool) else str(value)
        line += ["-c", f"{name}={text}"]
    return line
