"""The Django app: its checks, and the schema, which `manage.py migrate` installs if the settings enable it."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import click
from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.models.signals import pre_migrate

import tallybook
from tallybook._cli.loading import load_app
from tallybook._db.driver import connect
from tallybook._db.migrate import latest, migrate, refusal
from tallybook.contrib.django import _settings
from tallybook.contrib.django._app import App

__all__ = ["TallybookConfig"]

_BACKEND = "tallybook.contrib.django.Backend"


class TallybookConfig(AppConfig):
    """The app "tallybook.contrib.django" of INSTALLED_APPS."""

    name = "tallybook.contrib.django"
    label = "tallybook"
    verbose_name = "Tallybook"

    def ready(self) -> None:
        with suppress(ImportError):
            import_module("django.tasks")  # of Django 6, which checks TASKS only after an import
        checks.register(_check_settings, "tallybook")
        checks.register(_check_schema, checks.Tags.database)
        pre_migrate.connect(_bring_schema, sender=self, dispatch_uid="tallybook")


def _bring_schema(*, using: str, verbosity: int = 1, **_: Any) -> None:
    """Migrate the schema before Django's own migrations, so that those may refer to it."""
    if not _settings.read().migrate or using not in _needed():
        return
    with connect(_settings.dsn(using), autocommit=True) as conn:
        done = migrate(conn)
    if done and verbosity >= 1:
        print(f"  Brought the schema tallybook of database {using!r} up to date")


def _needed() -> set[str]:
    """Return the aliases of the databases that need the schema: those of the App and of task backends."""
    backends = [told for told in getattr(settings, "TASKS", {}).values() if told.get("BACKEND") == _BACKEND]
    own = _settings.read().database
    return {own, *(told.get("OPTIONS", {}).get("database", own) for told in backends)}


def _check_settings(app_configs: Any = None, **_: Any) -> Iterable[checks.CheckMessage]:
    """Check that settings.TALLYBOOK is usable: its keys, its database, its App."""
    try:
        told = _settings.read()
    except ImproperlyConfigured as error:
        yield checks.Error(str(error), id="tallybook.E001")
        return
    if (vendor := connections[told.database].vendor) != "postgresql":
        message = f"Tallybook needs PostgreSQL, but the database {told.database!r} is {vendor}"
        yield checks.Error(message, hint="Set another one in TALLYBOOK['DATABASE']", id="tallybook.E002")
    if told.app is not None:
        try:
            app: tallybook.App = load_app(told.app)
        except click.ClickException as error:
            text, hint = error.format_message().removeprefix("--app: "), getattr(error, "hint", None)
            yield checks.Error(f"TALLYBOOK['APP']: {text}", hint=hint, id="tallybook.E003")
        else:
            if not isinstance(app, App):
                hint = "from tallybook.contrib.django import App"
                text = f"{told.app} is not a Django App: its jobs may get connections that are too old"
                yield checks.Warning(text, hint=hint, id="tallybook.W001")


def _check_schema(
    app_configs: Any = None, databases: Sequence[str] | None = None, **_: Any
) -> Iterable[checks.CheckMessage]:
    """Check that the schema exists, in a version that this release can use."""
    try:
        wanted = sorted(one for one in _needed() & set(databases or ()) if connections[one].vendor == "postgresql")
    except ImproperlyConfigured:
        return  # _check_settings reports it
    for alias in wanted:
        with connect(_settings.dsn(alias), autocommit=True) as conn:
            problem = refusal(conn, latest())
        if problem is not None:  # not an error: that would prevent `manage.py migrate`
            words = "manage.py migrate" if _settings.read().migrate else "manage.py tallybook migrate"
            yield checks.Warning(f"database {alias!r}: {problem}", hint=f"Run {words}", id="tallybook.W002")
