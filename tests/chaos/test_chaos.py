"""The chaos harness itself: a good run passes, and a run without one of the fences fails."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KEYS = {
    *("attempted", "acknowledged", "lost", "unexpected", "duplicate_runs", "recovered", "second_effects"),
    *("rescue_p50_s", "rescue_max_s"),
}


def chaos(*options: str) -> tuple[int, dict[str, Any], str]:
    """Run the harness; return its exit code, last line and output."""
    words = [sys.executable, "-m", "chaos", "--seed", "11", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    said = done.stdout + done.stderr
    assert done.stdout.strip(), said
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("{"), said
    numbers: dict[str, Any] = json.loads(last)
    assert set(numbers) == KEYS, said
    assert numbers["attempted"] >= numbers["acknowledged"] > 100, said
    return done.returncode, numbers, said


def test_nothing_is_lost_and_no_effect_comes_twice() -> None:
    """P1 P3 P4 F1 F2 F5 F8 F13: kill -9 of workers and server, a zombie, a promoted standby without the last commits.

    No acknowledged job is lost, no job appears that was not enqueued, and each effect exists once.
    """
    code, numbers, said = chaos("--seconds", "30", "--nemeses", "kill_worker,kill_postmaster,pause_worker,failover")
    assert (numbers["lost"], numbers["unexpected"], numbers["second_effects"], code) == (0, 0, 0, 0), said
    assert numbers["rescue_max_s"] > 0, said
    assert "promotions" in said


def test_control_without_the_fence_effects_come_twice() -> None:
    """P4 F8: negative control: if complete accepts every end, a zombie's effect is added to the other one."""
    code, numbers, said = chaos("--seconds", "20", "--break", "fence", "--nemeses", "pause_worker")
    assert numbers["second_effects"] > 0, said
    assert code == 1, said


def test_control_without_holes_jobs_are_lost() -> None:
    """S1-10 P3: negative control: if the cursor forgets running transactions, late commits are lost."""
    code, numbers, said = chaos("--seconds", "10", "--break", "holes", "--nemeses", "long_transaction")
    assert numbers["lost"] > 0, said
    assert code == 1, said


@pytest.mark.parametrize("option", [("--nemeses", "earthquake"), ("--break", "everything")])
def test_wrong_options_are_refused(option: tuple[str, str]) -> None:
    """An unknown name is an error with code 2; it is not ignored."""
    done = subprocess.run(
        [sys.executable, "-m", "chaos", *option], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert option[1] in done.stderr
