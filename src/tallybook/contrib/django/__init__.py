"""Tallybook in a Django project.

    INSTALLED_APPS = [..., "tallybook.contrib.django"]
    TALLYBOOK = {"APP": "shop.jobs:app", "DATABASE": "default", "MIGRATE": True}

    # shop/jobs.py
    from tallybook.contrib.django import App

    app = App("shop")

    @app.task(atomic=True)
    def charge(connection: BaseDatabaseWrapper, order_id: int) -> None: ...

`App` is an App that uses the database of the settings and closes old connections around its jobs. `Backend` is a
backend for `django.tasks` (of Django 6, or before that of the package django-tasks). `manage.py tallybook ...` is the
command line.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tallybook.contrib.django._app import App
    from tallybook.contrib.django._backend import Backend

__all__ = ["App", "Backend"]


def __getattr__(name: str) -> Any:
    # Django imports this package before its apps are ready, and `django.tasks` need not be there.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}._{name.lower()}"), name)
