"""Permissions that keep a file with secrets private."""

import os
import stat

import pytest

from tallybook._model.private_file import open_to_others


@pytest.mark.parametrize(
    ("mode", "owner", "us", "is_open"),
    [
        (0o600, 1000, 1000, False),
        (0o400, 0, 0, False),
        (0o640, 1000, 1000, True),
        (0o640, 0, 0, True),
        (0o440, 1001, 1000, True),
        (0o440, 0, 1000, False),
        (0o640, 0, 1000, False),
        (0o660, 0, 1000, True),
        (0o444, 0, 1000, True),
        (0o441, 0, 1000, True),
    ],
)
def test_a_private_file_is_its_owners_or_roots_for_one_group(mode: int, owner: int, us: int, is_open: bool) -> None:
    """A file is private if only its owner has access, or if root owns it, its group may read it and we are not root."""
    about = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 1000, 0, 0, 0, 0))
    assert open_to_others(about, us) is is_open
