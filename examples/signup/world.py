"""The outside: a mail provider over HTTP. It is slow, overloaded at times, refuses some addresses and remembers keys.

POST /mail with {"to": ...} and Idempotency-Key: 202; 422 for an address that it refuses; 503 every seventh time; once
in a while it accepts the mail and still answers 503. GET /mailbox: the delivered mails by key.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

delivered: dict[str, list[str]] = {}
asked = 0
lock = threading.Lock()


class Provider(BaseHTTPRequestHandler):
    """One request."""

    def do_POST(self) -> None:
        global asked  # noqa: PLW0603 - one provider per process
        mail = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(0.01)
        with lock:
            asked += 1
            number, key = asked, self.headers["Idempotency-Key"]
            if mail["to"].startswith("bounce"):
                self.answer(422, {"error": "no such mailbox"})
            elif number % 7 == 0:
                self.answer(503, {"error": "overloaded"})
            else:
                if key not in delivered:
                    delivered[key] = [mail["to"]]
                self.answer(503 if number % 29 == 0 else 202, {"key": key})

    def do_GET(self) -> None:
        with lock:
            self.answer(200, delivered)

    def answer(self, status: int, body: object) -> None:
        """Send an answer in JSON."""
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Write no log."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Provider).serve_forever()
