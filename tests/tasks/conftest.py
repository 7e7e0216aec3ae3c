"""An app with the ready-made tasks, drained on the test's database."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.outside import HttpServer, http_server
from tallybook import App, JobInfo
from tallybook.extra.tasks import email, http, notification, sms, webhook
from tallybook.testing import drain


@pytest.fixture
def app() -> App:
    app = App("shop")
    app.include(webhook, http, email, sms, notification)
    return app


@pytest.fixture
def run(app: App, dsn: str, db: Any) -> Callable[..., JobInfo]:
    """Drain once, and return the job's info."""

    def run(job: Any) -> JobInfo:
        drain(app, dsn=dsn, queues=["default", "out"])
        return app.get(job).sync(db)

    return run


@pytest.fixture
def endpoint() -> Iterator[HttpServer]:
    """A local HTTP server."""
    with http_server() as server:
        yield server


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The resolver's addresses for a name, one per lookup; the last one repeats."""
    known: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def resolved(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name in known:
            answers = known[name]
            host = answers.pop(0) if len(answers) > 1 else answers[0]
        return real(host, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    return known
