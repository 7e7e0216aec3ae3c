"""The simulated outside: visitors, an HTTP server with webhooks, tables, SMS and enrichment, and an SMTP server.

Both servers are real, on the loopback interface, and unreliable: slow, failing, out of quota, silent, and sometimes
wrong: they carry out a request and answer that it failed. The fate of a request depends only on its submission, its
kind and the number of tries, so that every run is the same. The servers record what they have done by key.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import statistics
import threading
import time
from collections import Counter
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

import httpx2
import psycopg
from aiosmtpd.controller import Controller
from standardwebhooks import Webhook

from examples.stage import SERVE, Stage
from tallybook import App
from tallybook.extra.tasks import new_signing_secret

FORMS = ("contact", "signup", "broken", "gone")
HANGS = 3.0
"""Seconds that a silent server takes; the deadline of the run is shorter."""


def draw(text: str) -> float:
    """Return a number in [0, 1) that looks random but depends only on the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


class World:
    """Both servers and their records."""

    def __init__(self, token: str) -> None:
        self.signing_secrets = {form: new_signing_secret() for form in FORMS}
        self.token = token
        self.lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        """Number of requests for each key."""
        self.done: set[str] = set()
        """The keys whose requests were carried out. A receiver does nothing for a key that it knows."""
        self.effects: Counter[str] = Counter()
        """Number of effects by the submission that a request is about, not by its key: 1 each if the keys work."""
        self.heeds_keys = os.environ.get("KEYS") != "ignored"
        self.answers: Counter[str] = Counter()
        self.refused: list[str] = []
        """Requests without the right signature or token."""
        self.mended = False

    def __enter__(self) -> World:
        self.http = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"world": self}))
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.smtp = _Smtp(_Mailbox(self), hostname="127.0.0.1", port=0)
        self.smtp.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.smtp.stop()
        self.http.shutdown()
        self.http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def note(self, key: str) -> int:
        """Count a request for this key and return the count."""
        with self.lock:
            self.asked[key] += 1
            return self.asked[key]

    def do(self, key: str, about: str) -> None:
        """Carry out a request, unless its key is known and keys are heeded."""
        with self.lock:
            if key in self.done and self.heeds_keys:
                self.answers["known already"] += 1
            else:
                self.done.add(key)
                self.effects[about] += 1

    def twice(self) -> set[str]:
        """Return the effects that happened more than once."""
        return {about for about, times in self.effects.items() if times > 1}

    def verdict(self, path: str, key: str) -> str:
        """Return the fate of this request: ok, or the kind of failure, at most twice per key."""
        n = self.note(key)
        if path.startswith("/hooks/broken") and not self.mended:
            return "fails"
        if path.startswith("/hooks/gone") and not self.mended:
            return "refuses"
        fate = draw(key.partition("-")[2])  # without the form, because the order of the visitors' submissions is random
        if n > (2 if fate < 0.05 else 1):
            return "ok"
        for kind, share in (("fails", 0.12), ("limits", 0.16), ("hangs", 0.22), ("lies", 0.28)):
            if fate < share:
                return kind
        return "ok"


def _subject_of(body: dict[str, Any]) -> Any:
    """Return the submission of a request; an enrichment has its sender instead, an SMS names it in its text."""
    return next(body[name] for name in ("submission", "id", "email", "text") if name in body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # skips the lookup of its own name

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore callers that have disconnected."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    world: World

    def do_POST(self) -> None:
        world = self.world
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = self.headers.get("webhook-id") or self.headers.get("Idempotency-Key") or ""
        if not self.is_allowed(body):
            with world.lock:
                world.refused.append(self.path)
            return self.answer(401, {})
        kind = world.verdict(self.path, key)
        time.sleep(0.4 * draw(f"{key} {world.asked[key]}") ** 4)
        with world.lock:
            world.answers[kind] += 1
        if kind == "hangs":
            time.sleep(HANGS)
        if kind in ("ok", "lies", "hangs"):
            world.do(key, f"{self.path}: {_subject_of(json.loads(body))}")
        if kind == "ok":
            return self.answer(
                200, {"row": f"row {key}", "company": json.loads(body).get("email", "").partition("@")[2]}
            )
        if kind == "limits":
            return self.answer(429, {}, {"Retry-After": "420"})
        return self.answer(400 if kind == "refuses" else 503, {"error": "not now"})

    def is_allowed(self, body: bytes) -> bool:
        """Return whether a webhook has a valid signature, or another request the token."""
        if not self.path.startswith("/hooks/"):
            return self.headers.get("Authorization") == f"Bearer {self.world.token}"
        try:
            Webhook(self.world.signing_secrets[self.path.removeprefix("/hooks/")]).verify(
                body, dict(self.headers.items())
            )
        except Exception:
            return False
        return True

    def answer(self, status: int, said: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        content = json.dumps(said).encode()
        try:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        """Write no log, since all requests are counted."""


class _Mailbox:
    def __init__(self, world: World) -> None:
        self.world = world

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        mail = message_from_bytes(envelope.content)
        about = mail["X-Submission"]
        if self.world.verdict("/mail", about) in ("fails", "limits"):
            return "451 try again later"
        self.world.do(mail["Message-ID"], about)  # a mail server drops a second message of the same Message-ID
        return "250 OK"


class _Smtp(Controller):
    """An SMTP server on a free port, which the library does not find out on its own."""

    def _trigger_server(self) -> None:
        self.port = self.server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        super()._trigger_server()


async def providers(dsn: str, world: World) -> None:
    """Set the providers that jobs call: addresses in settings, encrypted secrets. Each form has a URL and a secret."""
    registry = App("setup", dsn=dsn).providers
    inside: dict[str, Any] = {"allow": ["127.0.0.1"], "allow_http": True, "timeout": 1}
    await registry.set("forms", kind="webhook", settings=inside)
    for form, secret in world.signing_secrets.items():
        await registry.set_secret("forms", form, secret)
    with psycopg.connect(dsn) as conn:
        conn.execute("update form set webhook = %s || name", (f"{world.url}/hooks/",))
    await registry.set("sms", kind="sms", settings={"url": f"{world.url}/sms", **inside})
    await registry.set_secret("sms", "token", world.token)
    for name in ("tables", "enrichment"):
        await registry.set(name, kind=name, settings={"url": world.url})
        await registry.set_secret(name, "token", world.token)
    mail = {"host": "127.0.0.1", "port": world.smtp.port, "tls": "none", "from": "forms@example.org"}
    await registry.set("mail", kind="smtp", settings=mail)


class Visitors:
    """Visitors who fill in forms. A submission that was answered with success is promised."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.promised: dict[int, str] = {}
        self.took_ms: list[float] = []
        self.nothing_ms: list[float] = []
        """Durations of requests between submissions that save nothing; they show how slow the machine is."""
        self.numbers = itertools.count()

    async def submit(self, forms: list[str], at_once: int = 2) -> None:
        """Submit these forms, `at_once` at a time."""
        async with httpx2.AsyncClient(base_url=self.url, timeout=20) as http:
            left = list(zip(self.numbers, forms, strict=False))

            async def timed(path: str, data: dict[str, str], times: list[float]) -> httpx2.Response:
                began = time.perf_counter()
                answer = await http.post(path, json=data)
                times.append((time.perf_counter() - began) * 1000)
                return answer

            async def visitor() -> None:
                while left:
                    n, form = left.pop()
                    data = {"email": f"ada{n}@company{n % 7}.example", "text": "<b>hello</b> " * 20}
                    answer = await timed(f"/forms/{form}", data, self.took_ms)
                    answer.raise_for_status()
                    self.promised[answer.json()["submission"]] = form
                    await timed("/forms/nobody-has-this", data, self.nothing_ms)

            await asyncio.gather(*[visitor() for _ in range(at_once)])

    def percentile(self, which: int) -> float:
        return statistics.quantiles(self.took_ms, n=100, method="inclusive")[which - 1]


KINDS = ("webhook", "table", "mail", "sms", "receipt", "enrichment")
GIVEN_UP = """\
select s.form, s.id, k.kind
  from operation o join tallybook.job j on j.id = o.job_id join submission s on s.id = o.submission,
       unnest(case o.kind when 'notification' then array['mail', 'sms'] else array[o.kind] end) as k(kind)
 where j.state = %s"""


BY_DEADLINE = """\
select count(*) from tallybook.job j, jsonb_array_elements(j.errors) e where e ->> 'type' = 'TimeoutError'
   and e ->> 'message' like 'deadline of %% passed'"""


def missing(
    promised: dict[int, str], saved: set[int], enriched: set[int], done: set[str], dead: set[str], cancelled: set[str]
) -> set[str]:
    """Return promised operations that are not done, dead or cancelled, and cancelled ones that are done.

    `promised` maps submissions to their forms.
    """
    given_up = dead | cancelled
    wanted = {f"{form}-{n}-{kind}" for n, form in promised.items() for kind in KINDS} - given_up
    noted = {f"{form}-{n}-enrichment" for n, form in promised.items() if n not in enriched} - given_up
    unwanted = {f"{one}, which was cancelled" for one in done & cancelled}
    return (wanted - done) | noted | unwanted | {f"submission {n}" for n in promised.keys() - saved}


def account(stage: Stage, world: World, visitors: Visitors, admin: httpx2.Client) -> int:
    """Compare promised with done operations by the rows here and the outside's records; return the exit status."""
    saved = {row[0] for row in stage.rows("select id from submission")}
    enriched = {row[0] for row in stage.rows("select submission from enrichment")}
    dead, cancelled = (
        {f"{form}-{n}-{kind}" for form, n, kind in stage.rows(GIVEN_UP, state)} for state in ("dead", "cancelled")
    )
    mailed = {about for about in world.effects if about.endswith(("-mail", "-receipt"))}
    lost = missing(visitors.promised, saved, enriched, world.done | mailed, dead, cancelled)
    ((by_deadline,),) = stage.rows(BY_DEADLINE)
    said = ", ".join(f"{n} {what}" for what, n in world.answers.most_common())
    stage.say(
        f"outside: {said}; {len(world.refused)} unsigned; done twice: {len(world.twice())};"
        f" {by_deadline} calls were aborted by their deadline"
    )
    stage.say(
        f"{len(visitors.promised)} submissions answered in p50 {visitors.percentile(50):.0f} ms,"
        f" p99 {visitors.percentile(99):.0f} ms (wanted: below {300}), requests that save nothing in p50"
        f" {statistics.median(visitors.nothing_ms):.0f} ms; {len(dead)} operations dead, {len(cancelled)} cancelled"
    )
    first = min(visitors.promised)
    pages = [admin.get(path).status_code for path in ("/", f"/submissions/{first}", "/dead", "/queue/")]
    stage.say(f"the pages answer {pages}")
    for one in sorted(lost)[:10]:
        stage.say(f"lost: {one}")
    for one in sorted(world.twice())[:10]:
        stage.say(f"done twice: {one}")
    if SERVE:
        stage.say(
            f"{admin.base_url} (user admin, password {os.environ['ADMIN_PASSWORD']}), /dead, /submissions/{first},"
            " /queue/"
        )
        stage.say(f"psql '{stage.dsn}', table tallybook.queue_status")
    return stage.end(len(lost) + len(world.twice()))
