"""The Django app: its checks, and the schema, which `manage.py migrate` installs if the settings enable it."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.db.models.signals import pre_migrate

from tallybook._db.driver import connect
from tallybook._db.migrate import migrate
from tallybook.contrib.django import _checks, _settings

__all__ = ["TallybookConfig"]


class TallybookConfig(AppConfig):
    """The app "tallybook.contrib.django" of INSTALLED_APPS."""

    name = "tallybook.contrib.django"
    label = "tallybook"
    verbose_name = "Tallybook"

    def ready(self) -> None:
        with suppress(ImportError):
            import_module("django.tasks")  # of Django 6, which checks TASKS only after an import
        checks.register(_checks.check_settings, "tallybook")
        checks.register(_checks.check_schema, checks.Tags.database)
        pre_migrate.connect(_bring_schema, sender=self, dispatch_uid="tallybook")


def _bring_schema(*, using: str, verbosity: int = 1, **_: Any) -> None:
    """Migrate the schema before Django's own migrations, so that those may refer to it."""
    if not _settings.read().migrate or using not in _checks.needed():
        return
    with connect(_settings.dsn(using), autocommit=True) as conn:
        done = migrate(conn)
    if done and verbosity >= 1:
        print(f"  Brought the schema tallybook of database {using!r} up to date")
