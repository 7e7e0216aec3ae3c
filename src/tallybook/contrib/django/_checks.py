"""System checks: the settings at every start, the schema for `check --database` and `migrate`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import click
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning  # noqa: A004 - Django's own name
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

import tallybook
from tallybook._cli.loading import load_app
from tallybook._db.driver import connect
from tallybook._db.migrate import latest
from tallybook._db.schema import refusal
from tallybook.contrib.django import _settings
from tallybook.contrib.django._app import App

_BACKEND = "tallybook.contrib.django.Backend"


def needed() -> set[str]:
    """Return the aliases of the databases that need the schema: those of the App and of task backends."""
    backends = [told for told in getattr(settings, "TASKS", {}).values() if told.get("BACKEND") == _BACKEND]
    own = _settings.read().database
    return {own, *(told.get("OPTIONS", {}).get("database", own) for told in backends)}


def check_settings(app_configs: Any = None, **_: Any) -> Iterable[CheckMessage]:
    """Check that settings.TALLYBOOK is usable: its keys, its database, its App."""
    try:
        told = _settings.read()
    except ImproperlyConfigured as error:
        return [Error(str(error), id="tallybook.E001")]
    found: list[CheckMessage] = []
    if (vendor := connections[told.database].vendor) != "postgresql":
        message = f"Tallybook needs PostgreSQL, but the database {told.database!r} is {vendor}"
        found.append(Error(message, hint="Set another one in TALLYBOOK['DATABASE']", id="tallybook.E002"))
    if told.app is not None:
        try:
            app: tallybook.App = load_app(told.app)
        except click.ClickException as error:
            text = error.format_message().removeprefix("--app: ")
            found.append(Error(f"TALLYBOOK['APP']: {text}", hint=getattr(error, "hint", None), id="tallybook.E003"))
        else:
            if not isinstance(app, App):
                hint = "from tallybook.contrib.django import App"
                text = f"{told.app} is not a Django App: its jobs may get connections that are too old"
                found.append(Warning(text, hint=hint, id="tallybook.W001"))
    return found


def check_schema(app_configs: Any = None, databases: Sequence[str] | None = None, **_: Any) -> Iterable[CheckMessage]:
    """Check that the schema exists, in a version that this release can use."""
    try:
        wanted = sorted(one for one in needed() & set(databases or ()) if connections[one].vendor == "postgresql")
    except ImproperlyConfigured:
        return []  # check_settings reports it
    found: list[CheckMessage] = []
    for alias in wanted:
        with connect(_settings.dsn(alias), autocommit=True) as conn:
            problem = refusal(conn, latest())
        if problem is not None:  # not an error: that would prevent `manage.py migrate`
            words = "manage.py migrate" if _settings.read().migrate else "manage.py tallybook migrate"
            found.append(Warning(f"database {alias!r}: {problem}", hint=f"Run {words}", id="tallybook.W002"))
    return found
