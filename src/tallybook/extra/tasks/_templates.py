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
    """`subject`, `text` and `html` of this template, those that have a file. ConfigError, CallFailed."""
    jinja2 = needed(f"{who}, template {name!r}", "jinja2", "templates")
    folder = os.environ.get("TALLYBOOK_MAIL_TEMPLATES")
    if not folder:
        hint = "Set it where the jobs run"
        raise ConfigError("TALLYBOOK_MAIL_TEMPLATES", None, "the folder of the templates is not set", hint=hint)
    if not _NAME.fullmatch(name):
        hint = "Like welcome or shop/welcome, without an ending"
        raise CallFailed(f"{who}: template {name!r} is no name", no_retry=True, hint=hint)
    found = {}
    for part, ending in _FILES.items():
        file = f"{name}.{ending}"
        try:
            found[part] = str(_environment(folder).get_template(file).render(values))
        except jinja2.TemplateNotFound as error:
            if error.name != file:  # one that it includes
                raise CallFailed(f"{who}: template {file!r} needs {error.name!r}, which is not there") from None
        except Exception as error:  # a missing value, and whatever a filter raises
            raise CallFailed(f"{who}: template {file!r}: {error}", no_retry=True) from None
    if not found.keys() & {"text", "html"}:
        raise CallFailed(f"{who}: neither {name}.txt nor {name}.html is in TALLYBOOK_MAIL_TEMPLATES")
    return found


@lru_cache(maxsize=8)
def _environment(folder: str) -> Any:
    """HTML is escaped, text is not. A value that a template does not get is an error, not an empty place."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    def escaped(name: str | None) -> bool:
        return name is not None and name.endswith(".html")

    return Environment(loader=FileSystemLoader(folder), autoescape=escaped, undefined=StrictUndefined)
