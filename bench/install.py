"""The size of an installation: packages and MB of the wheel with [binary], beside the peers with their drivers.

Each is installed alone into an empty environment. pip itself does not count.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.figures import Figure, plain, say

ROOT = Path(__file__).resolve().parents[1]
PEERS = {"celery": "celery[redis]", "procrastinate": "procrastinate", "pgqueuer": "pgqueuer[asyncpg]"}


def _installed(what: str, folder: Path) -> tuple[int, float]:
    """Install into the folder; return the packages and MB."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--target", str(site)]
    subprocess.run([*pip, "--no-compile", what], check=True, stderr=subprocess.DEVNULL)
    packages = [path for path in site.glob("*.dist-info") if not path.name.startswith(("pip-", "setuptools-"))]
    size = sum(file.stat().st_size for file in site.rglob("*") if file.is_file())
    return len(packages), size / 1e6


def run() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(home), str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        wheel = next(home.glob("*.whl"))
        found = {}
        for name, what in (("tallybook", f"{wheel}[binary]"), *PEERS.items()):
            found[name] = _installed(what, home / name)
            say(f"  install: {name}: {found[name][0]} packages, {found[name][1]:.1f} MB")
            shutil.rmtree(home / name)
    ours, size = found.pop("tallybook")
    fewest = min(packages for packages, _ in found.values())
    beside = ", ".join(f"{name} {packages} ({mb:.0f} MB)" for name, (packages, mb) in found.items())
    Figure("install", "packages", ours, "packages", f"at most {fewest + 1}", ours <= fewest + 1, beside).show()
    plain("install", "size", size, "MB", beside).show()
