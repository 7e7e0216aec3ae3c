"""Django's settings. Tallybook needs only `INSTALLED_APPS` and `TALLYBOOK`."""

import os

from django.core.management.utils import get_random_secret_key
from psycopg.conninfo import conninfo_to_dict

SECRET_KEY = os.environ.get("SECRET_KEY") or get_random_secret_key()  # set it: all processes need the same key
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "examples.signup.urls"
MIDDLEWARE = ["django.middleware.csrf.CsrfViewMiddleware"]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.ScryptPasswordHasher",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",  # of sign-up by SQL; the next login replaces it by the first
]

_dsn = conninfo_to_dict(os.environ.get("TALLYBOOK_DSN", ""))
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _dsn.pop("dbname", "signup"),
        "USER": _dsn.pop("user", ""),
        "PASSWORD": _dsn.pop("password", ""),
        "HOST": _dsn.pop("host", ""),
        "PORT": _dsn.pop("port", ""),
        # The rest, such as sslmode. With parameters bound by the server, no statement's text contains a password.
        "OPTIONS": {**_dsn, "server_side_binding": True},  # no CONN_MAX_AGE, which leaves connections open under ASGI
    }
}
MAIL_URL = os.environ.get("MAIL_URL", "http://127.0.0.1:8025")

INSTALLED_APPS = ["tallybook.contrib.django", "examples.signup"]
if os.environ.get("SIGNUP_RELEASE") == "2":  # the release that implements `thank_referrer`
    INSTALLED_APPS.append("examples.signup.referrals")
TALLYBOOK = {"APP": "examples.signup.jobs:app", "MIGRATE": True}
