"""The tasks of `django.tasks` that this program has declared, by the path of their function."""

from __future__ import annotations

import importlib

from django.apps import apps

from tallybook.contrib.django import _api

known: dict[str, _api.Task] = {}


def priority(given: int) -> int:
    """Django's 100 (first) to -100 as ours, 0 (first) to 200; and the same way back."""
    return 100 - given


def found(path: str) -> _api.Task | None:
    """The task whose function has this path; its module is imported if it belongs to an installed app."""
    module = path.rpartition(".")[0]
    if path not in known and apps.get_containing_app_config(module) is not None:
        try:
            importlib.import_module(module)
        except ImportError:
            return None
    return known.get(path)
