"""PL/Proxy on Debian's PostgreSQL 15."""

from __future__ import annotations

import os

import pytest

from tallybook.embedded import EmbeddedUnavailable, binaries

PACKAGE = "Debian package postgresql-15-plproxy"


def installed() -> bool:
    """Whether PostgreSQL 15 has it."""
    try:
        return (binaries(15).parent / "lib" / "plproxy.so").exists()
    except EmbeddedUnavailable:
        return False


def needed() -> None:
    """Skip with a reason where it is not there; under CI that is a failure."""
    if not installed():
        if os.environ.get("CI"):
            pytest.fail(f"not installed: {PACKAGE}")
        pytest.skip(f"not installed: {PACKAGE}")
