"""Install the peers into `.peers/` at the root of the repository: `make bench-peers`. Runs once, until a pin changes.

They get their own environment, so that none of their dependencies can replace one of Tallybook's.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

from bench.peers.env import NODE, NODE_STAMP, PACKAGE, PYTHON, REQUIREMENTS, VENV, VENV_STAMP, node_missing, stamped


def install_python() -> None:
    """Make `.peers/venv`, unless it exists."""
    if stamped(VENV_STAMP, REQUIREMENTS) and PYTHON.exists():
        return
    print("bench-peers: PgQueuer, Procrastinate and Celery into .peers/venv", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--requirement", str(REQUIREMENTS)], check=True)
    VENV_STAMP.write_bytes(REQUIREMENTS.read_bytes())


def install_node() -> None:
    """Make `.peers/node`, unless it exists."""
    if stamped(NODE_STAMP, PACKAGE):
        return
    print("bench-peers: Graphile Worker into .peers/node", flush=True)
    shutil.rmtree(NODE, ignore_errors=True)
    NODE.mkdir(parents=True)
    shutil.copy(PACKAGE, NODE)
    quiet = ["--no-audit", "--no-fund", "--ignore-scripts", "--no-package-lock", "--loglevel=error"]
    subprocess.run(["npm", "install", *quiet], cwd=NODE, check=True)
    NODE_STAMP.write_bytes(PACKAGE.read_bytes())


def main() -> int:
    """Install what is missing; report what could not be installed."""
    try:
        install_python()
        missing = node_missing("node", "npm")
        if missing is None:
            install_node()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"bench-peers: {error}", file=sys.stderr)
        return 1
    if missing:
        print(f"bench-peers: {missing}. The benchmarks run without it.", file=sys.stderr)
        return 1
    print("bench-peers: ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
