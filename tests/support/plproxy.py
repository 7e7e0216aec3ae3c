"""PL/Proxy on Debian's PostgreSQL 15."""

import os

import pytest

from tallybook.embedded import EmbeddedUnavailable, binaries

PACKAGE = "Debian package postgresql-15-plproxy"


def installed() -> bool:
    """Return whether PostgreSQL 15 has PL/Proxy."""
    try:
        return (binaries(15).parent / "lib" / "plproxy.so").exists()
    except EmbeddedUnavailable:
        return False


def needed() -> None:
    """Skip the test if PL/Proxy is not installed; fail it in CI."""
    if not installed():
        if os.environ.get("CI"):
            pytest.fail(f"not installed: {PACKAGE}")
        pytest.skip(f"not installed: {PACKAGE}")
