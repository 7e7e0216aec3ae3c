"""Mail templates: the files NAME.subject, NAME.txt and NAME.html of the folder TALLYBOOK_MAIL_TEMPLATES, in Jinja2."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from tallybook.errors import CallFailed, ConfigError
from tallybook.extra.tasks._provider import needed

_NAME = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")
_FILES = {"subject": "subject", "text": "txt", "html": "html"}


def rendered(who: str, name: str, values: Mapping[str, Any]) -> dict[str, str]:
    """Render the `subject`, `text` and `html` for which the template has files. Raises ConfigError and CallFailed."""
    jinja2 = needed(f"{who}, template {name!r}", "jinja2", "templates")
    folder = os.environ.get("TALLYBOOK_MAIL_TEMPLATES")
    if not folder:
        hint = "Set it for your workers"
        raise ConfigError("TALLYBOOK_MAIL_TEMPLATES", None, "the folder of the templates is not set", hint=hint)
    if not _NAME.fullmatch(name):
        hint = "Pass a name like welcome or shop/welcome, without an extension"
        raise CallFailed(f"{who}: template {name!r} is not a valid name", no_retry=True, hint=hint)
    found = {}
    for part, ending in _FILES.items():
        file = f"{name}.{ending}"
        try:
            found[part] = str(_environment(folder).get_template(file).render(values))
        except jinja2.TemplateNotFound as error:
            if error.name != file:  # an included template
                raise CallFailed(f"{who}: template {file!r} needs {error.name!r}, which is missing") from None
        except Exception as error:  # a missing value, or any error of a filter
            raise CallFailed(f"{who}: template {file!r}: {error}", no_retry=True) from None
    if not found.keys() & {"text", "html"}:
        raise CallFailed(f"{who}: neither {name}.txt nor {name}.html is in TALLYBOOK_MAIL_TEMPLATES")
    return found


@lru_cache(maxsize=8)
def _environment(folder: str) -> Any:
    """Return an environment that escapes values in HTML but not in text, and raises an error for a missing value."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    def escaped(name: str | None) -> bool:
        return name is not None and name.endswith(".html")

    return Environment(loader=FileSystemLoader(folder), autoescape=escaped, undefined=StrictUndefined)
