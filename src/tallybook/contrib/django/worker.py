"""`tallybook.contrib.django.worker:app` is the App for `manage.py tallybook`: the App of the settings, with all tasks.

Importing it imports `jobs.py` and `tasks.py` of every app in INSTALLED_APPS, so that a worker knows their tasks. The
App also serves the tasks of `django.tasks` that belong to our Backend. In a process that a command has started, it sets
Django up first.
"""

import django
from django.apps import apps
from django.utils.module_loading import autodiscover_modules

import tallybook
from tallybook._cli.loading import load_app
from tallybook.contrib.django import _settings
from tallybook.contrib.django._app import App

__all__ = ["app"]


def _served() -> tallybook.App:
    if not apps.ready:
        django.setup()
    target = _settings.read().app
    found = App("django") if target is None else load_app(target)
    autodiscover_modules("jobs", "tasks")
    try:
        from tallybook.contrib.django import _backend, _tasks
    except ImportError:  # neither Django 6 nor django-tasks
        return found
    found.include(*_tasks.declared.values())
    found._also_serves |= _backend.queues()
    return found


app = _served()
"""The App that the module's docstring describes."""
