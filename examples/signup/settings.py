"""Django's settings. Tallybook needs only the last lines."""

import os

from django.core.management.utils import get_random_secret_key
from psycopg.conninfo import conninfo_to_dict

SECRET_KEY = (
    os.environ.get("SECRET_KEY") or get_random_secret_key()
)  # set it: otherwise a restart invalidates all open forms
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "testserver"]
ROOT_URLCONF = "examples.signup.urls"
MIDDLEWARE = ["django.middleware.csrf.CsrfViewMiddleware"]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {"context_processors": ["django.template.context_processors.request"]},
    }
]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
PASSWORD_HASHERS = ["django.contrib.auth.hashers.ScryptPasswordHasher"]

_dsn = conninfo_to_dict(os.environ.get("TALLYBOOK_DSN", ""))
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _dsn.get("dbname") or "signup",
        "USER": _dsn.get("user") or "",
        "PASSWORD": _dsn.get("password") or "",
        "HOST": _dsn.get("host") or "",
        "PORT": str(_dsn.get("port") or ""),
        "CONN_MAX_AGE": 60,
    }
}
MAIL_URL = os.environ.get("MAIL_URL", "http://127.0.0.1:8025")

INSTALLED_APPS = ["tallybook.contrib.django", "examples.signup"]
if os.environ.get("SIGNUP_RELEASE") == "2":  # the release that implements `thank_referrer`
    INSTALLED_APPS.append("examples.signup.referrals")
TALLYBOOK = {"APP": "examples.signup.jobs:app", "MIGRATE": True}
