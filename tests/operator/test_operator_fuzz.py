"""schemathesis, an API fuzzer, finds no defect in the operator API except deliberate ones."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.operator_client import SECRET, key_file
from support.operator_process import serving
from support.paths import TESTS


def fuzz(
    dsn: str, folder: Path, *options: str, broken: str = "", examples: int = 4
) -> subprocess.CompletedProcess[str]:
    """Run it with all of its checks against a real server; the hooks compute the values of the four headers."""
    keys = key_file(folder, f'[keys.ops]\nsecret = "{SECRET}"\nscopes = ["admin"]\n')
    headers = [f"Tallybook-{name}: signed" for name in ("Key", "Timestamp", "Nonce", "Signature")]
    signed = [word for header in headers for word in ("--header", header)]
    with serving(dsn, keys, broken, log=folder / "server.log") as url:
        command = [
            str(Path(sys.executable).parent / "schemathesis"), "--config-file", str(TESTS / "support/fuzz.toml"), "run",
            f"{url}/openapi.json", *signed, "--checks", "all", "--max-examples", str(examples), "--seed", "7",
            "--no-color", "--suppress-health-check", "all", *options,
        ]  # fmt: skip
        environment = {**os.environ, "SCHEMATHESIS_HOOKS": "support.fuzz_hooks", "PYTHONPATH": str(TESTS)}
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=550, check=False
        )


def stage(db: Any) -> None:
    """One object of each kind, under the names that the examples use."""
    db.execute("select tallybook.enqueue('mail', 'send_welcome'), tallybook.worker_start('web-1', '{mail}')")
    db.execute("select tallybook.schedule_set('report-de', 'report', '{}', every => '1 day')")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.direct("the fuzzer's server has many connections")
def test_the_fuzzer_finds_nothing(dsn: str, db: Any, tmp_path: Path) -> None:
    """S2-12: by all checks of schemathesis, a fitting request is accepted, a wrong or unsigned one is refused."""
    stage(db)
    done = fuzz(dsn, tmp_path)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert "18 selected / 18 total" in done.stdout
    # Its requests were served, not only refused.
    assert db.execute("select count(distinct action) from tallybook.audits").fetchone()[0] >= 5
    assert (tmp_path / "server.log").read_text().count("Traceback") == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.direct("the fuzzer's server has many connections")
@pytest.mark.parametrize("broken", ["answer", "error", "unsigned"])
def test_the_fuzzer_finds_what_is_broken(dsn: str, db: Any, tmp_path: Path, broken: str) -> None:
    """Negative control: the fuzzer finds an undocumented answer, a defect, and a server that checks no signature."""
    stage(db)
    done = fuzz(dsn, tmp_path, "--include-operation-id", "list_queues", broken=broken)
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr
    found = {"answer": "Response violates schema", "error": "Server error", "unsigned": "header accepted"}[broken]
    assert found in done.stdout, done.stdout[-4000:]
