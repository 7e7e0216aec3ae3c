"""Tallybook in Flask: jobs run in the application's context, and `flask tallybook ...`. Needs `tallybook[flask]`.

db = SQLAlchemy()                       # of Flask-SQLAlchemy; any Session, or psycopg, works, too
tallybook = Tallybook(app)              # app = App("shop")

def create_app():
    flask_app = Flask(__name__)
    db.init_app(flask_app)
    tallybook.init_app(flask_app)
    return flask_app

@views.post("/users")
def register():
    db.session.add(user := User(email=request.form["email"]))
    db.session.flush()
    send_welcome.enqueue_sync(db.session, user.id)
    db.session.commit()                 # the user and the job, or neither
"""

import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import click
import psycopg

try:
    from flask import Flask, current_app, g, has_app_context
    from flask.cli import ScriptInfo
except ImportError as error:  # pragma: no cover - shown to people
    raise ImportError(f"{error}. Install it with: pip install 'tallybook[flask]'") from error

from tallybook._app import App
from tallybook._cli import cli, errors
from tallybook._db.sync import done
from tallybook.errors import ConfigError

__all__ = ["Tallybook"]

_TARGET = "tallybook.contrib.flask:app"


class Tallybook:
    """The extension for a Tallybook App, which `init_app` connects to a Flask application.

    Handlers run inside `app_context()`: `current_app`, `db.session` and teardowns work in them as in a view. The
    setting TALLYBOOK_DSN of the Flask application is the App's connection string unless the App has one. `app` is the
    App.

        tallybook = Tallybook(app)
        tallybook.init_app(flask_app)
    """

    def __init__(self, app: App, flask_app: Flask | None = None) -> None:
        if not isinstance(app, App):
            raise ConfigError("app", app, "not a Tallybook App", hint="Tallybook(App('shop'), flask_app)")
        self.app = app
        self._own_dsn = app.dsn
        self._flask: Flask | None = None
        app.around_job(self._in_context)
        if flask_app is not None:
            self.init_app(flask_app)

    def init_app(self, flask_app: Flask) -> None:
        """Set up this Flask application: settings, `flask tallybook`, closing of a request's connection."""
        self._flask = flask_app
        self.app.dsn = self._own_dsn or flask_app.config.get("TALLYBOOK_DSN")
        flask_app.extensions["tallybook"] = self
        flask_app.teardown_appcontext(_close)
        about = "Background jobs: workers, queues, dead letters and the other commands of `tallybook`."
        flask_app.cli.add_command(_Commands("tallybook", commands=dict(cli.commands), help=about))

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[Any]]:
        """A transaction on the request's psycopg connection, for applications without SQLAlchemy sessions.

        It is committed at the end of the block, and rolled back by an exception; inside another one it is a savepoint.
        The connection is made when a request first needs it and closed with the application's context.

            with tallybook.transaction() as conn:
                conn.execute("insert into users (id) values (%s)", (42,))
                send_welcome.enqueue_sync(conn, 42)
        """
        if "_tallybook" not in g or g._tallybook.closed:
            g._tallybook = done(self.app._opened(self.app.conninfo(), sync=True))
        with g._tallybook.transaction():
            yield g._tallybook

    async def _in_context(self, _: object) -> AsyncIterator[None]:
        if self._flask is None:
            raise RuntimeError("Tallybook(app) has no Flask application: call init_app(flask_app)")
        with self._flask.app_context():
            yield


def _close(_: BaseException | None) -> None:
    if (conn := g.pop("_tallybook", None)) is not None:
        conn.close()


class _Commands(click.Group):
    """The commands of `tallybook`, with the same error messages."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command with the application's App and database, in this process and in those that it starts."""
        script = ctx.ensure_object(ScriptInfo)
        app: App = script.load_app().extensions["tallybook"].app
        _loaded.append(app)
        said = {"TALLYBOOK_APP": _TARGET, "FLASK_APP": script.app_import_path, "TALLYBOOK_DSN": app.dsn}
        ctx.with_resource(_environment({name: value for name, value in said.items() if value}))
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, SystemExit):
            raise
        except (Exception, KeyboardInterrupt) as error:
            sys.exit(errors.report(error))
        finally:
            _loaded.pop()


_loaded: list[App] = []


@contextmanager
def _environment(said: dict[str, str]) -> Iterator[None]:
    """Set environment variables for commands and the processes that they start."""
    before = {name: os.environ[name] for name in said if name in os.environ}
    os.environ.update(said)
    try:
        yield
    finally:
        for name in said:
            os.environ.pop(name, None)
        os.environ.update(before)


def __getattr__(name: str) -> Any:
    """`tallybook.contrib.flask:app`, by which a command and its processes find the App of the Flask application."""
    if name != "app":
        raise AttributeError(name)
    if _loaded:
        return _loaded[-1]
    flask_app = current_app if has_app_context() else ScriptInfo(os.environ.get("FLASK_APP")).load_app()
    return flask_app.extensions["tallybook"].app
