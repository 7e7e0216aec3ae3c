"""The example signup: its site's own tests, its account, and the whole run with a killed worker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from examples.signup.__main__ import account

ROOT = Path(__file__).parents[3]


def python(*words: str, **env: str) -> str:
    """Run `python -m ...`, which must succeed; return its output."""
    done = subprocess.run(  # noqa: PLW1510
        [sys.executable, "-m", *words],
        cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=290,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_sites_own_tests_pass(tallybook_dsn: str) -> None:
    """S5-01 S5-03 S5-04 S5-08 S5-12: sign-up and task in one statement; each step's end with the next one's job, or a
    rollback; a task that nobody has written is shown.
    """
    said = python(
        "examples.signup.manage", "test", "--noinput", "examples.signup.tests.cases", TALLYBOOK_DSN=tallybook_dsn
    )
    assert "Ran 10 tests" in said and "OK" in said


@pytest.mark.slow
def test_the_account_finds_what_is_lost_and_what_is_there_twice(tallybook_dsn: str) -> None:
    """The control: the run's last line finds a missing step, a doubled one, a mail too many and a user too few."""
    python("examples.signup.manage", "migrate", "--verbosity", "0", TALLYBOOK_DSN=tallybook_dsn)
    with psycopg.connect(tallybook_dsn, autocommit=True) as db:
        stage: Any = SimpleNamespace(
            rows=lambda query: db.execute(query.encode()).fetchall(),
            one=lambda query: db.execute(query.encode()).fetchone()[0],  # type: ignore[index]
            say=lambda text: None,
        )
        db.execute(
            "insert into signup_user (id, email, password, referrer, checked, bounced)"
            " values (1, 'a@b.c', 'scrypt$', '', true, false);"
            " insert into signup_workspace (user_id) values (1);"
            " insert into signup_step (user_id, name, job_id)"
            " select 1, n, 1 from unnest(array['check_address', 'make_workspace', 'send_welcome']) n"
        )
        assert account(stage, 1, {"1": ["a@b.c"]}) == 0
        assert account(stage, 2, {"1": ["a@b.c"]}) == 1
        assert account(stage, 1, {}) == 1
        assert account(stage, 1, {"1": ["a@b.c"], "2": ["a@b.c"]}) == 1
        db.execute("insert into signup_step (user_id, name, job_id) values (1, 'send_welcome', 2)")
        assert account(stage, 1, {"1": ["a@b.c"]}) == 1
        db.execute("delete from signup_step where name = 'send_welcome'")
        assert account(stage, 1, {"1": ["a@b.c"]}) == 1
        db.execute("insert into signup_step (user_id, name, job_id) values (1, 'send_welcome', 1)")
        assert account(stage, 1, {"1": ["a@b.c"]}) == 0
        db.execute("update signup_user set password = 'secret 1'")
        assert account(stage, 1, {"1": ["a@b.c"]}) == 1


@pytest.mark.slow
def test_the_run_loses_nothing(tmp_path: Path) -> None:
    """S5-05 S5-08 S5-10 S5-12: a worker is killed among 60 sign-ups, a task is written later: 0 lost, no step twice."""
    said = python("examples.signup", SHORT="1")
    assert "wrong users: 0\n" in said
    assert "these tasks are not implemented yet: {'thank_referrer': 6}" in said
    assert re.fullmatch(r"signup: 184 processed, 2 failed, \d+ retried, 0 lost", said.strip().splitlines()[-1])
