"""The cost of a worker without work: statements per second on the server, and its share of a core."""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

from bench.cpu import process_cpu
from bench.figures import SCALE, at_most, say
from bench.processes import Process
from bench.server import SETTINGS, database
from tallybook.embedded import temporary_server

_STATEMENT = re.compile(r"LOG:  (?:statement|execute [^:]*): (.*)")


def said_since(log: Path, size: int) -> Counter[str]:
    """Return the statements in a server's log after its first `size` bytes, and how often each occurs."""
    return Counter(_STATEMENT.findall(log.read_bytes()[size:].decode("utf-8", "replace")))


def run() -> None:
    """Print the figures. The server logs every statement, and the log is counted."""
    seconds = max(20.0, 60 * SCALE)
    logging = {"log_statement": "all", "log_min_messages": "info"}
    with (
        temporary_server(18, settings=SETTINGS | logging, durable=True) as running,
        database(running) as dsn,
        Process("serve", dsn) as worker,
    ):
        time.sleep(3)
        log = Path(running.log_path)
        size, cpu, start = log.stat().st_size, process_cpu(worker.pid), time.perf_counter()
        time.sleep(seconds)
        passed, used = time.perf_counter() - start, process_cpu(worker.pid) - cpu
        said = said_since(log, size)
        worker.go()
        worker.answer()
    for text, count in said.most_common():
        say(f"  idle: {count / passed:.2f}/s {text[:90]}")
    at_most("idle", "statements_per_s", sum(said.values()) / passed, "1/s", 2, f"over {passed:.0f} s").show()
    at_most("idle", "core_percent", 100 * used / passed, "%", 1, f"process CPU {used:.2f} s").show()
