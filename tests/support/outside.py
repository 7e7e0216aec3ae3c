"""The outside world on this machine: an HTTP server with set replies, an SMTP server, and a registry in memory."""

import asyncio
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, LoginPassword

from tallybook import App
from tallybook._model.provider import Provider, Secret
from tallybook.errors import UnknownProvider

LOOPBACK = ["127.0.0.0/8"]


class Registry:
    """Providers in memory."""

    def __init__(self, *providers: Provider) -> None:
        self.known = {provider.name: provider for provider in providers}

    async def get(self, name: str) -> Provider:
        if not self.known[name].active:
            raise UnknownProvider(name, inactive=True)
        return self.known[name]

    def forget(self) -> None:
        """Do nothing, because there is no cache."""

    def through(self, _: object) -> AbstractContextManager[None]:
        return nullcontext()

    def change(self, name: str, **settings: Any) -> None:
        """Change the settings of an existing provider, and secrets of these names."""
        known = self.known[name]
        secrets = {name: Secret(value) for name, value in settings.items() if name in known.secrets}
        self.known[name] = replace(
            known,
            settings={**known.settings, **{n: v for n, v in settings.items() if n not in secrets}},
            secrets={**known.secrets, **secrets},
        )

    async def set(self, name: str, *, active: bool) -> str:
        self.known[name] = replace(self.known[name], active=active)
        return "changed"


def serving(app: App, *providers: Provider) -> Registry:
    """Give the app these providers and return their registry."""
    registry = Registry(*providers)
    app.providers = registry  # type: ignore[assignment]
    return registry


def provider(name: str, secrets: Mapping[str, str | Secret] | None = None, **settings: Any) -> Provider:
    """Return a provider with these settings, and secrets as texts."""
    made = {key: Secret(one) if isinstance(one, str) else one for key, one in (secrets or {}).items()}
    return Provider(name, "test", settings, made)


@dataclass(frozen=True)
class Request:
    """A request that the server received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Reply:
    """A reply of the server; `length` replaces the Content-Length.

    `held` delays the whole reply, `trickling` sends 50 bytes per second.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b"fine"
    length: int | None = None
    held: bool = False
    trickling: bool = False


class HttpServer:
    """Answers each request with the next reply, and all further ones with the last. A function returns a reply."""

    def __init__(self, url: str, port: int) -> None:
        self.url = url
        self.port = port
        self.got: list[Request] = []
        self.replies: list[Reply | Callable[[Request], Reply]] = [Reply()]
        self.freed = threading.Event()

    def reply(self, *replies: Reply | Callable[[Request], Reply]) -> None:
        self.replies = list(replies)

    def next(self, request: Request) -> Reply:
        self.got.append(request)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return reply if isinstance(reply, Reply) else reply(request)


class _Handler(BaseHTTPRequestHandler):
    home: HttpServer

    def _any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        reply = self.home.next(Request(self.command, self.path, headers, body))
        if reply.held:
            self.home.freed.wait(30)
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body) if reply.length is None else reply.length))
        self.end_headers()
        if reply.trickling:
            for at in range(len(reply.body)):
                self.wfile.write(reply.body[at : at + 1])
                if self.home.freed.wait(0.02):
                    return
        elif self.command != "HEAD":
            self.wfile.write(reply.body)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = _any

    def log_message(self, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # a connection beyond that is accepted a second later, perhaps after its timeout

    def handle_error(self, *args: Any) -> None:
        pass  # a caller may disconnect early


def _tls(cert: Path | None) -> ssl.SSLContext | None:
    if cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert)
    return context


@contextmanager
def http_server(host: str = "127.0.0.1", port: int = 0, cert: Path | None = None) -> Iterator[HttpServer]:
    """Run a server in threads of this process, with TLS if there is a certificate (with its key)."""
    handler = type("Handler", (_Handler,), {})
    server = _Server((host, port), handler)
    if context := _tls(cert):
        server.socket = context.wrap_socket(server.socket, server_side=True)
    home = HttpServer(f"{'https' if context else 'http'}://{host}:{server.server_port}", server.server_port)
    handler.home = home  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield home
    finally:
        home.freed.set()
        server.shutdown()
        server.server_close()


@contextmanager
def two_http_servers(first: str, second: str) -> Iterator[tuple[HttpServer, HttpServer]]:
    """Run servers at one port of two addresses; try another port if it is taken at the second address."""
    for _ in range(20):
        with ExitStack() as stack:
            one = stack.enter_context(http_server(first))
            try:
                two = stack.enter_context(http_server(second, one.port))
            except OSError:
                continue
            yield one, two
            return
    raise AssertionError(f"no port is free at both {first} and {second}")


def certificate(folder: Path, name: str) -> Path:
    """Write a self-signed certificate for one host name and its key to one file; return the path."""
    path = folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}", "-keyout", str(path),
         "-out", str(folder / "only")],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    with path.open("a", encoding="ascii") as file:
        file.write((folder / "only").read_text(encoding="ascii"))
    return path


class Mailbox:
    """The mails that the SMTP server accepted; `answers` has its answers to recipients, `data` to messages."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.answers: dict[str, list[str]] = {}
        self.data = ["250 OK"]
        self.silent = False
        """QUIT gets no answer."""

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, options: Any) -> str:
        answers = self.answers.get(address, ["250 OK"])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer.startswith("250"):
            envelope.rcpt_tos.append(address)
        return answer

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        answer = self.data.pop(0) if len(self.data) > 1 else self.data[0]
        if answer.startswith("250"):
            self.messages.append(envelope)
        elif answer == "cut":
            self.messages.append(envelope)
            session.loop.call_soon(server.transport.close)
        return answer

    async def handle_QUIT(self, server: Any, session: Any, envelope: Any) -> str:
        if self.silent:
            await asyncio.Event().wait()
        return "221 Bye"


@contextmanager
def smtp_server(*, login: tuple[str, str] | None = None, cert: Path | None = None) -> Iterator[tuple[Mailbox, int]]:
    """Run an SMTP server in a thread; yield its mailbox and port. A login is possible only after STARTTLS."""
    mailbox = Mailbox()
    context = _tls(cert)

    def authenticate(server: Any, session: Any, envelope: Any, mechanism: str, given: Any) -> AuthResult:
        right = isinstance(given, LoginPassword) and login == (given.login.decode(), given.password.decode())
        return AuthResult(success=right, handled=right is True)

    options: dict[str, Any] = {"tls_context": context, "require_starttls": context is not None}
    if login is not None:
        options |= {"authenticator": authenticate, "auth_required": True}
    controller = _Controller(mailbox, hostname="127.0.0.1", port=0, **options)
    controller.start()
    try:
        yield mailbox, controller.bound
    finally:
        controller.stop()


class _Controller(Controller):
    """A server on a free port, which the library does not find out on its own."""

    bound = 0

    def _trigger_server(self) -> None:
        self.port = self.bound = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()
