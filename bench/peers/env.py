"""Where the peers are installed, and whether they are installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent / ".peers"
VENV = ROOT / "venv"
NODE = ROOT / "node"
PYTHON = VENV / "bin" / "python"
REQUIREMENTS = HERE / "requirements.txt"
PACKAGE = HERE / "node" / "package.json"
OLDEST_NODE = 20
VENV_STAMP = VENV / ".ready"
NODE_STAMP = NODE / ".ready"
MISSING = "not installed in the pinned versions: run `make bench-peers`"


def stamped(stamp: Path, pins: Path) -> bool:
    """Return whether the versions pinned in `pins` are the ones installed last."""
    return stamp.is_file() and stamp.read_bytes() == pins.read_bytes()


def node_missing(*commands: str) -> str | None:
    """Return why Node programs cannot run here, or None."""
    absent = [command for command in commands if not shutil.which(command)]
    if absent:
        return (
            f"{' and '.join(absent)} not found: Graphile Worker needs Node.js (on Debian: the packages nodejs and npm)"
        )
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=False).stdout
    found = re.match(r"v(\d+)", version)
    if not found or int(found[1]) < OLDEST_NODE:
        return f"node is {version.strip() or 'of unknown version'}: Graphile Worker needs {OLDEST_NODE} or newer"
    return None


def available() -> dict[str, str | None]:
    """Return for each peer why it cannot run here, or None if it can."""
    python = None if stamped(VENV_STAMP, REQUIREMENTS) and PYTHON.exists() else MISSING
    node = node_missing("node") or (None if stamped(NODE_STAMP, PACKAGE) else MISSING)
    return {"graphile": node or python, "pgqueuer": python, "procrastinate": python, "celery": python}
