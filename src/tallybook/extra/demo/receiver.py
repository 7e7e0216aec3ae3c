"""The customer's side of the demo: a real HTTP server for webhooks, in threads of the demo's own process.

It is unreliable on purpose: some requests get a 500, some answers are slow. The choice depends on the key and the
attempt only, so every run is the same. The server notes each request before it answers; the demo counts these notes.
"""

import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import NamedTuple

FAILING = 0.08  # the share of keys whose first attempt gets a 500; a quarter of them fails a second time
SLOW = 0.2  # the share of requests that are answered after 30 to 200 ms


def verdict(key: str, attempt: int, slow: float = SLOW) -> tuple[int, float]:
    """Return the status of the answer and its delay in seconds."""
    fate, speed = _draw(key), _draw(f"{key}/{attempt}")
    failures = (fate < FAILING) + (fate < FAILING / 4)
    return (500 if attempt <= failures else 200), 0.03 + 0.17 * speed / slow if speed < slow else 0.0


def _draw(text: str) -> float:
    """Return a number in [0, 1) that looks random and depends on the text only."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


class Note(NamedTuple):
    at: float
    key: str
    attempt: int
    taken: bool
    started_at: float
    sha256: str


class Webhook(BaseHTTPRequestHandler):
    """Accepts one webhook per request and many per connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: "Receiver"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key, attempt = self.headers.get("Idempotency-Key", ""), int(self.headers.get("Attempt") or 0)
        status, seconds = verdict(key, attempt, self.server.slow)
        try:
            json.loads(body)
        except ValueError:
            status = 400
        time.sleep(seconds)
        started_at, sha256 = float(self.headers.get("Started-At") or 0), hashlib.sha256(body).hexdigest()
        self.server.notes.append(Note(time.time(), key, attempt, status == 200, started_at, sha256))
        try:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
        except OSError:  # the worker was killed in the meantime
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        """Do nothing: the notes are the log."""


class Receiver(ThreadingHTTPServer):
    """A server on a free port of the loopback interface; `slow` is the share of slow answers."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, slow: float) -> None:
        super().__init__(("127.0.0.1", 0), Webhook)
        self.slow, self.notes = slow, list[Note]()
        self.url = f"http://127.0.0.1:{self.server_address[1]}/webhook"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def server_bind(self) -> None:
        """Bind without HTTPServer's look-up of its own name, which takes seconds without a name server."""
        TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        """Report an error, but not the broken connection of a killed worker."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]
