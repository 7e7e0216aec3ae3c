"""Run pytest with one server for each PostgreSQL; `make test`, `make test-all` and tools/matrix.py call this.

Without an option: all tests on 18 that are not marked slow. With --on 16: the tests marked servers on that version.
With --all: all tests on 18; on 15 those marked servers (all of tests/sql), on 16 those of them that are not slow. Then
on 18 through a PgBouncer in transaction mode: all tests except slow ones that are not marked servers. Other arguments
are passed to pytest unchanged. A failed test is not repeated. The last lines name the failed tests, a crash of
the server and the tests that could not run; if the variable CI is set, a missing PgBouncer or browser is a failure.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import chromium, plproxy, pooler
from tallybook.embedded import EmbeddedError, EmbeddedUnavailable, temporary_server
from tools import citus

VERSIONS = (18, 16, 15)
# Each of the tests' thousands of sessions would load PL/pgSQL for itself: 2 % of its CPU time.
SETTINGS = {"max_prepared_transactions": "40", "max_connections": "300", "shared_preload_libraries": "plpgsql"}
# Sources of the versions that the wheel does not contain.
PACKAGES = {15: "Debian package postgresql-15"}
NO_TESTS_COLLECTED = 5
# The report of the whole run on the newest version, for `make acceptance REPORT=build/tests.xml`.
REPORT = Path("build/tests.xml")


@dataclass
class Result:
    """One version's run: pytest's exit code and last line, or the reason why it did not run."""

    version: int
    pooled: bool = False
    code: int | None = None
    seconds: float = 0.0
    closing_line: str = ""
    not_run: str = ""
    reasons: list[str] = field(default_factory=list)
    """The first line of each failed test's summary, and what the server's log has of a crash."""

    @property
    def failed(self) -> bool:
        return bool(self.code) or (self.code is None and not self.not_run)

    @property
    def name(self) -> str:
        return f"PostgreSQL {self.version}" + (" through PgBouncer" if self.pooled else "")


MEMORY, ROOM = Path("/dev/shm"), 6 * 2**30
# The sessions of the tests are short. They need 7 % less CPU time if they get their memory in huge pages of 2 MB and
# keep it until they end.
MALLOC = "glibc.malloc.hugetlb=1:" + ":".join(
    f"glibc.malloc.{name}={size}"
    for name, size in (("top_pad", 2**21 - 2**17), ("trim_threshold", 2**25), ("mmap_threshold", 2**25))
)


def _in_memory() -> str:
    """Put the servers' files in memory if there is room and TMPDIR is not set; return the folder.

    Each test makes a database of some 400 files, which takes 20 ms in memory and 130 ms on a disk. None of these
    servers outlives the run.
    """
    with suppress(OSError):
        free = shutil.disk_usage(MEMORY).free
        if "TMPDIR" not in os.environ and free >= ROOM and os.access(MEMORY, os.W_OK | os.X_OK):
            os.environ["TMPDIR"] = str(MEMORY)
    return tempfile.gettempdir()


def main() -> int:
    options, extra = _arguments()
    # A shell starts background commands with SIGINT ignored, and all child processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("GLIBC_TUNABLES", MALLOC)
    print(f"tests: servers and files in {_in_memory()}", flush=True)
    runs = [] if options.pooled else [Result(version) for version in options.versions]
    if options.pooled or (options.all and VERSIONS[0] in options.versions):
        runs.append(Result(VERSIONS[0], pooled=True))
    results = [_run(result, options, extra) for result in runs]
    missing = [result for result in results if result.not_run]
    print("\n--- tests ---")
    for result in results:
        if not result.not_run:
            print(f"{result.name}: {result.closing_line} [exit code {result.code}]", *result.reasons, sep="\n  ")
    for result in missing:
        print(f"not run: {result.name} ({result.not_run})")
    outside = [
        (chromium.installed(), f"tests in a browser (not installed: {chromium.PACKAGES})"),
        (plproxy.installed(), f"tests of PL/Proxy (not installed: {plproxy.PACKAGE})"),
        (citus.given(), f"tests on Citus (not given: {citus.WANTED})"),
    ]
    unseen = [named for there, named in outside if options.all and not there]
    for named in unseen:
        print(f"not run: {named}")
    if not missing and not unseen:
        print(f"not run: nothing; {', '.join(result.name for result in results)} were all available")
    failed = [result for result in results if result.failed or (result.pooled and result.not_run and os.getenv("CI"))]
    nothing_ran = len(missing) == len(results)
    if not options.all:
        print("left out: tests marked slow, PostgreSQL 16 and 15, runs through PgBouncer (make test-all runs them)")
    outcome = "FAILED" if failed or nothing_ran else "passed"
    print(f"tests: {outcome} in {sum(result.seconds for result in results):.0f} s")
    return 1 if outcome == "FAILED" else 0


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--all", action="store_true", help="run all tests on 18, and on 16, 15 and PgBouncer those that depend on them"
    )
    parser.add_argument(
        "-n",
        "--processes",
        default="3",
        help="number of pytest-xdist processes (3): most tests wait for servers and processes half of the time",
    )
    parser.add_argument("--durations", type=int, default=15, help="number of slowest tests to list (15)")
    parser.add_argument(
        "--on",
        dest="versions",
        type=int,
        action="append",
        choices=(*VERSIONS, 17, 19),
        help="run only this version; may be repeated",
    )
    parser.add_argument("--pooled", action="store_true", help="run only through PgBouncer")
    options, extra = parser.parse_known_args()
    for path in (word.split("::")[0] for word in extra if word.startswith("tests")):
        if not Path(path).exists():  # pytest-xdist reports it as a selection without tests
            parser.error(f"no such file: {path}")
    options.versions = options.versions or list(VERSIONS[: None if options.all else 1])
    return options, extra


def _run(result: Result, options: argparse.Namespace, extra: list[str]) -> Result:
    started, version = time.monotonic(), result.version
    if result.pooled and not pooler.installed():
        result.not_run = f"not installed: {pooler.PACKAGE}"
        return result
    try:
        with ExitStack() as stack:
            cloned = {"file_copy_method": "clone"} if version >= 18 else {}  # 2 ms of 16 for each test's database
            server = stack.enter_context(temporary_server(version, settings=SETTINGS | cloned))
            print(f"\n--- {result.name} ---", flush=True)
            environment = {"TALLYBOOK_TEST_DSN": server.dsn(), "TALLYBOOK_TEST_PG": str(version)}
            if result.pooled:
                between = stack.enter_context(pooler.Pooler(server.dsn()))
                environment["TALLYBOOK_TEST_POOLER"] = between.dsn("postgres")
            _pytest(_selection(result, options) + extra, options, environment, result)
            log = server.log_path.read_text(errors="replace").splitlines() if result.code else []
            result.reasons += [line for line in log if re.search("PANIC|terminated by signal", line)][:20]
    except EmbeddedUnavailable:
        result.not_run = "not installed" + (f": {PACKAGES[version]}" if version in PACKAGES else "")
    except EmbeddedError as error:
        result.closing_line = f"no server: {error}"
        print(result.closing_line, flush=True)
    result.seconds = time.monotonic() - started
    return result


def _selection(result: Result, options: argparse.Namespace) -> list[str]:
    named = ["-rsfE"] if result.pooled else []  # list skipped tests with their reasons
    if result.pooled:
        return [*named, "-m", "not slow or servers"]
    newest, oldest = VERSIONS[0], VERSIONS[-1]
    if result.version == newest:
        REPORT.unlink(missing_ok=True)
        return ["--junitxml", str(REPORT), "-o", "junit_family=xunit1"] if options.all else ["-m", "not slow"]
    return ["-m", "servers" if options.all and result.version == oldest else "servers and not slow"]


def _pytest(selection: list[str], options: argparse.Namespace, environment: dict[str, str], result: Result) -> None:
    """Run pytest, forward its output at once to show progress, and store its end in the result."""
    # Neighbouring tests run in one process, so that it makes what a file's tests share only once: 40 s less CPU.
    spread = ["-n", options.processes, "--dist=worksteal"]
    command = [sys.executable, "-m", "pytest", *spread, f"--durations={options.durations}", *selection]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if not any(Path("tests").rglob("test_*.pyc")):  # else each process would compile all tests: 16 s of CPU, not 5
        print("compiling the tests (once)", flush=True)
        collect = [sys.executable, "-m", "pytest", "--collect-only"]
        subprocess.run(collect, env=inherited, stdout=subprocess.DEVNULL, check=False)  # the run reports its errors
    tail = b""
    with subprocess.Popen(command, env=inherited | environment, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        while chunk := os.read(running.stdout.fileno(), 65536):
            os.write(sys.stdout.fileno(), chunk)
            tail = (tail + chunk)[-65536:]
    lines = tail.decode(errors="replace").split("\n")
    result.closing_line = next(
        (line.strip("= ") for line in reversed(lines) if line.strip("= ")), "pytest printed nothing"
    )
    result.reasons = [line for line in lines if line.startswith(("FAILED ", "ERROR "))][:20]
    # With a selection for an older version (--on 16), a file may have no tests.
    few = not options.all and not result.pooled and result.version != VERSIONS[0]
    result.code = 0 if running.returncode == NO_TESTS_COLLECTED and few else running.returncode


if __name__ == "__main__":
    sys.exit(main())
