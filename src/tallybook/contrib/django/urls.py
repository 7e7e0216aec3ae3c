"""The dashboard in a Django project, behind Django's own login, under WSGI and ASGI. Needs `tallybook[web]`.

    # project/urls.py
    path("queue/", include("tallybook.contrib.django.urls")),

Staff with the right to view everything that the admin shows of Tallybook may see it;
those with the right to change all of it may act.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.urls import NoReverseMatch, re_path, reverse
from django.utils.crypto import salted_hmac
from django.views.decorators.csrf import csrf_exempt

from tallybook.contrib.django import _settings
from tallybook.web import User, dashboard

if TYPE_CHECKING:
    from tallybook.contrib.django._bridge import Bridge

_SHOWN = ("job", "deadletter", "queue", "schedule")


@cache
def _bridge(process: int) -> Bridge:
    from tallybook.contrib.django._bridge import Bridge
    from tallybook.contrib.django.worker import app

    site = dashboard(
        app,
        authenticate=lambda request: request.scope["django_user"],
        secret=salted_hmac("tallybook.dashboard", "", algorithm="sha256").hexdigest(),
        dsn=_settings.dsn(_settings.read().database),
    )
    return Bridge(site)


@csrf_exempt  # its forms have their own token, which its session signs
def _dashboard(request: Any, rest: str) -> Any:
    user = request.user
    if not user.is_authenticated:
        try:
            login = str(reverse("admin:login"))
        except NoReverseMatch:
            login = str(settings.LOGIN_URL)
        return redirect_to_login(request.get_full_path(), login)
    if not user.is_staff or not all(_may(user, "view", one) or _may(user, "change", one) for one in _SHOWN):
        raise PermissionDenied
    name = str(user.get_username())[:200] or f"user {user.pk}"
    known = User(name, operate=all(_may(user, "change", one) for one in _SHOWN))
    root = request.path[: len(request.path) - len(rest)].rstrip("/")
    return _bridge(os.getpid()).answer(request, root, django_user=known)


def _may(user: Any, verb: str, model: str) -> bool:
    return bool(user.has_perm(f"tallybook.{verb}_{model}"))


urlpatterns = [re_path(r"^(?P<rest>.*)$", _dashboard, name="tallybook-dashboard")]
