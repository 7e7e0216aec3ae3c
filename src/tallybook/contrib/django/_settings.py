"""settings.TALLYBOOK, and the connection string of a database in settings.DATABASES."""

import os
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from tallybook._db.driver import Conninfo, make_conninfo

DATABASE = "TALLYBOOK_DJANGO_DATABASE"
"""The environment variable that passes `manage.py tallybook --database` to the processes that it starts."""


@dataclass(frozen=True)
class Settings:
    """settings.TALLYBOOK, checked."""

    app: str | None = None  # the location of the App, as "shop.jobs:app"
    database: str = "default"  # the alias of the database with the schema tallybook
    migrate: bool = False  # whether `manage.py migrate` installs and upgrades that schema, too


_KINDS: dict[str, type] = {"APP": str, "DATABASE": str, "MIGRATE": bool}


def read() -> Settings:
    """Return the settings. Raises ImproperlyConfigured, which names the key, for wrong ones."""
    given: Any = getattr(settings, "TALLYBOOK", {})
    if not isinstance(given, dict):
        raise ImproperlyConfigured('TALLYBOOK must be a dict, like {"APP": "shop.jobs:app"}')
    for key, value in given.items():
        if key not in _KINDS:
            raise ImproperlyConfigured(f"TALLYBOOK has no key {key!r}; it has {', '.join(_KINDS)}")
        if not isinstance(value, _KINDS[key]):
            text = f"TALLYBOOK[{key!r}] is of type {type(value).__name__}, not {_KINDS[key].__name__}"
            raise ImproperlyConfigured(text)
    database = os.environ.get(DATABASE) or given.get("DATABASE", "default")
    if database not in connections.settings:
        raise ImproperlyConfigured(f"TALLYBOOK names the database {database!r}, which is not in DATABASES")
    return Settings(given.get("APP"), database, given.get("MIGRATE", False))


def dsn(alias: str) -> str:
    """Return libpq's connection string for the database of this alias: in a test run, the test database.

    It contains the password, so other processes get it only by their environment. Raises ImproperlyConfigured for a
    database that is not PostgreSQL.
    """
    conn = connections[alias]
    if conn.vendor != "postgresql":
        raise ImproperlyConfigured(f"the database {alias!r} is {conn.vendor}; Tallybook needs PostgreSQL")
    known = {option.keyword.decode() for option in Conninfo.get_defaults()}
    given = conn.get_connection_params()
    words = {name: str(value) for name, value in given.items() if name in known and value not in (None, "")}
    if role := conn.settings_dict.get("OPTIONS", {}).get("assume_role"):
        escaped = str(role).replace("\\", "\\\\").replace(" ", "\\ ")
        words["options"] = f"{words.get('options', '')} -c role={escaped}".strip()
    return make_conninfo(**words)
