"""Load the App of `module:app`, with an error for each possible mistake."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tallybook._cli.errors import APP_FORM, Problem
from tallybook.errors import TallybookError

if TYPE_CHECKING:
    from tallybook._app import App

_SAYS = "The App, as module:app. [TALLYBOOK_APP]"
app_option = click.option(
    "-A", "--app", "target", metavar="MODULE:APP", envvar="TALLYBOOK_APP", required=True, help=_SAYS
)


def _split(target: str) -> tuple[str, str]:
    module, _, name = target.partition(":")
    if "/" in module or module.endswith(".py"):
        dotted = module.removesuffix(".py").removeprefix("./").strip("/").replace("/", ".")
        raise _wrong(f"{target!r} is a file, not a module", hint=f"Write -A {dotted}:{name or 'app'}")
    if not module or not all(part.isidentifier() for part in module.split(".")):
        raise _wrong(f"{target!r} is not of the form module:app", hint=APP_FORM)
    return module, name


def _wrong(message: str, *, hint: str | None = None) -> Problem:
    return Problem(f"--app: {message}", hint=hint, exit_code=2)


def home(target: str) -> Path:
    """Return the directory of the app's code without importing it: the working directory for an installed module."""
    _here_on_path()
    top = _split(target)[0].split(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise _not_found(top)
    if spec.submodule_search_locations:
        package = Path(next(iter(spec.submodule_search_locations)))
        # An installed module, such as ours for Django, loads the code that people edit from where they are.
        return Path.cwd() if top == "tallybook" or "site-packages" in package.parts else package.parent
    return Path(spec.origin).parent if spec.origin else Path.cwd()


def load_app(target: str) -> App:
    """Import the module, with the working directory on the path, and return its App."""
    from tallybook._app import App

    module_name, name = _split(target)
    module = _import(module_name)
    apps = {key: value for key, value in vars(module).items() if isinstance(value, App)}
    if not name:
        if len({id(app) for app in apps.values()}) == 1:
            return next(iter(apps.values()))
        if not apps:
            raise _wrong(f"there is no App in module {module_name!r}", hint=APP_FORM)
        listed = ", ".join(f"{module_name}:{key}" for key in sorted(apps))
        raise _wrong(f"there are {len(apps)} Apps in module {module_name!r}", hint=f"Pass one of: {listed}")
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            file = getattr(module, "__file__", None) or "a namespace without a file"
            near = list(apps) or get_close_matches(part, vars(module), 1)
            hint = f"Did you mean {module_name}:{near[0]}?" if near else f"Define `{name} = App(...)` there"
            raise _wrong(f"module {module_name!r} ({file}) has no {name!r}", hint=hint) from None
    if not isinstance(found, App):
        hint = f"Did you mean {module_name}:{next(iter(apps))}?" if apps else APP_FORM
        of = type(found)
        what = f"of type {f'{of.__module__}.{of.__qualname__}'.removeprefix('builtins.')}"
        if hasattr(found, "__name__"):
            what = f"the {of.__name__} {found.__name__!r}"
        raise _wrong(f"{target} is not an App but {what}", hint=hint)
    return found


def _here_on_path() -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def _import(name: str) -> Any:
    _here_on_path()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # Only for the module itself: a missing import of the module is reported with its place.
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise _not_found(missing) from error
        raise _broken(name, error) from error


def _not_found(name: str) -> Problem:
    parent, _, last = name.rpartition(".")
    folder = Path.cwd().joinpath(*parent.split(".")) if parent else Path.cwd()
    around = [path.stem for path in folder.glob("*.py")] + [path.parent.name for path in folder.glob("*/__init__.py")]
    near = get_close_matches(last, around, 1)
    dotted = f"{parent}." if parent else ""
    hint = f"Did you mean {dotted}{near[0]}?" if near else f"Searched {folder} and the Python path"
    return _wrong(f"there is no module {name!r}", hint=hint)


def _broken(name: str, error: BaseException) -> Problem:
    what = str(error) if isinstance(error, TallybookError) else f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, SystemExit):
        what = f"it exits during its import (exit code {error.code})"
    hint = "TALLYBOOK_DEBUG=1 shows the traceback"
    if type(error).__module__ == "django.core.exceptions":
        hint = "Use `manage.py tallybook`, or -A tallybook.contrib.django.worker:app with DJANGO_SETTINGS_MODULE"
    if isinstance(error, SyntaxError) and error.filename:
        return _wrong(f"cannot import {name!r}: {type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})")
    # The innermost frame of the user's code, else the innermost of all.
    skipped = ("<", __file__)  # frozen modules, and the __init__ of a dataclass
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(skipped)]
    frames = [frame for frame in frames if "importlib" not in frame.filename]
    own = [frame for frame in frames if "site-packages" not in frame.filename and "/tallybook/_" not in frame.filename]
    last = (own or frames)[-1:]
    place = f" ({last[0].filename}:{last[0].lineno})" if last else ""
    return _wrong(f"cannot import {name!r}: {what}{place}", hint=hint)
