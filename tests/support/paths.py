"""Paths in the repository, the address of the project, and the environment for its programs."""

import os
import tomllib
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HOME = PROJECT["urls"]["Homepage"]
"""The address of the project, from pyproject.toml."""


def clean_environment() -> dict[str, str]:
    """Return the environment without what the run of the tests, or its user, has set for Tallybook and its tools."""
    ours = ("TALLYBOOK_", "PG", "PYTEST_", "DJANGO_", "OTEL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
