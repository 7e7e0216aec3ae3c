"""The simulated outside: a market-data and mail server, the owners of portfolios, and operators; the final check.

The server is real, on the loopback interface, and unreliable: slow, failing, out of quota, silent, and sometimes wrong:
prices of another day, in cents, or only some of them; a mail that is sent although the answer is an error. The fate of
a request depends only on its content and the number of tries, so that every run is the same. The server keeps records.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import select
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import psycopg

from examples.stage import Stage, free_port, listens
from tallybook.extra.operator import OperatorClient, signed_headers
from tallybook.testing import travel

SYMBOLS = [f"{first}{second}X" for first in "ABCDEF" for second in "KLMNOP"]
HALTED = "HALT"
"""A symbol whose price is 0 until `World.mended` is set."""
NEW = "NEWX"
"""A symbol that the market knows and the application does not know yet."""
MARKETS = ("tokyo", "frankfurt", "newyork")
MOVING = """\
select count(*) from tallybook.job where task <> 'refresh_quotes'
   and (state in ('available', 'running') or state = 'retrying' and run_at <= now())"""
"""The number of jobs that run or can run, without the refresh of quotes, which never ends."""
CLOSES = """\
select args ->> 'market', greatest(due_at - now(), interval '0') from tallybook.schedules
 where task = 'close_market' and due_at is not null order by due_at"""
NEXT = "select max(run_at) - clock_timestamp() from tallybook.job where state = 'retrying' and task <> 'refresh_quotes'"
HANGS = 3.0
"""Seconds that a silent server takes; the deadline of the tasks is shorter."""


def draw(text: str) -> float:
    """Return a number in [0, 1) that looks random but depends only on the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


def price(symbol: str, day: date | str) -> Decimal:
    """Return the true price of a share at the end of that day."""
    return round(Decimal(10 + 400 * draw(symbol)) * Decimal(0.97 + 0.06 * draw(f"{symbol} {day}")), 2)


def balance(address: str) -> Decimal:
    """Return the balance of an address on the chain."""
    return round(Decimal(5 * draw(address)), 4)


RATES = {"EUR": "0.92", "INR": "84.4"}
PICTURE = b"\x89PNG\r\n"
"""The start of a simulated screenshot; its text follows."""


class World:
    """The server and its records. A calm server is quick and never fails."""

    def __init__(self, *, calm: bool = False, quotes_take: float = 2.2) -> None:
        self.calm = calm
        self.quotes_take = quotes_take
        self.mended = False
        self.lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        """Number of requests by key or path."""
        self.answers: Counter[str] = Counter()
        self.known: set[str] = set()
        """The keys of requests that were carried out. A request with a known key is not carried out again."""
        self.mails: Counter[str] = Counter()
        """Number of mails for each statement, by their content: 1 each if the keys work."""
        self.quoting = self.most_quoting = 0
        """Number of concurrent requests for all quotes: now, and at most."""

    def __enter__(self) -> World:
        self.http = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"world": self}))
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}"

    def mail(self, key: str, text: str) -> None:
        """Record a mail, unless its key is known."""
        day, portfolio = re.findall(r"On (\S+) your portfolio (\d+) ", text)[0]
        with self.lock:
            if key in self.known:
                self.answers["knew the mail"] += 1
            else:
                self.known.add(key)
                self.mails[f"statement-{portfolio}-{day}"] += 1

    def verdict(self, key: str) -> tuple[str, float]:
        """Return the fate of this request, ok or a fault at most twice per key, and its duration in seconds."""
        with self.lock:
            self.asked[key] += 1
            n = self.asked[key]
        if self.calm:
            return "ok", 0.0
        fate, takes = draw(key), 0.1 + 0.3 * draw(f"{key} {n}")
        if n <= (2 if fate < 0.05 else 1):
            for kind, share in (("fails", 0.12), ("limits", 0.15), ("hangs", 0.17), ("is wrong", 0.25)):
                if fate < share:
                    return kind, HANGS if kind == "hangs" else takes
        return "ok", takes


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

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        _, kind, *rest = parts.path.split("/")
        if kind == "quotes":
            return self.quotes()
        verdict, takes = self.world.verdict(self.path)
        if not self.met(verdict, takes):
            return None
        query = parse_qs(parts.query)
        if kind == "close":
            return self.close(date.fromisoformat(rest[0]), query["symbols"][0].split(","), verdict)
        if kind in ("rates", "wallet"):
            return self.answer(200, RATES if kind == "rates" else {"balance": str(balance(query["address"][0]))})
        symbol = query["symbol"][0]
        if symbol not in (*SYMBOLS, HALTED, NEW):
            return self.answer(404, {"error": "no such symbol"})
        return self.answer(200, {"symbol": symbol, "price": str(price(symbol, "now"))})

    def do_POST(self) -> None:
        body, key = self.rfile.read(int(self.headers.get("Content-Length") or 0)), self.headers["Idempotency-Key"]
        verdict, takes = self.world.verdict(key)
        if not self.met(verdict, takes):
            return
        if self.path == "/read":
            lines = body.removeprefix(PICTURE).decode()
            return self.answer(200, {"lines": lines}) if body.startswith(PICTURE) else self.answer(422, {})
        self.world.mail(key, json.loads(body)["text"])
        self.answer(503 if verdict == "is wrong" else 202, {})

    def met(self, verdict: str, takes: float) -> bool:
        """Wait `takes` seconds; answer and return False if the request fails."""
        with self.world.lock:
            self.world.answers[verdict] += 1
        if not self.waited(takes):
            return False
        if verdict == "limits":
            self.answer(429, {"error": "too many"}, {"Retry-After": "30"})
        elif verdict in ("fails", "hangs"):
            self.answer(503, {"error": "not now"})
        return verdict in ("ok", "is wrong")

    def close(self, day: date, symbols: list[str], verdict: str) -> None:
        prices = {symbol: price(symbol, day) for symbol in symbols}
        if HALTED in prices and not self.world.mended:
            prices[HALTED] = Decimal(0)
        if verdict == "is wrong":
            how = int(draw(f"{self.path} how") * 3)
            if how == 0:
                day -= timedelta(days=1)
            elif how == 1:
                prices = {symbol: amount * 100 for symbol, amount in prices.items()}
            else:
                prices.popitem()
        self.answer(200, {"day": day.isoformat(), "prices": {symbol: str(one) for symbol, one in prices.items()}})

    def quotes(self) -> None:
        with self.world.lock:
            self.world.asked["/quotes"] += 1
            self.world.quoting += 1
            self.world.most_quoting = max(self.world.most_quoting, self.world.quoting)
        stays = self.waited(self.world.quotes_take)
        with self.world.lock:
            self.world.quoting -= 1
        if stays:
            self.answer(200, {symbol: str(price(symbol, "now")) for symbol in [*SYMBOLS, HALTED]})

    def waited(self, seconds: float) -> bool:
        """Wait; return False as soon as the caller disconnects, for example a killed worker."""
        gone = bool(select.select([self.connection], [], [], seconds)[0])
        self.close_connection = gone
        return not gone

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


def seed(db: psycopg.Connection[Any], many: int) -> None:
    """Insert `many` portfolios per market; every 20th has a halted share, every 10th a wallet.

    The last portfolio of each market has no holdings.
    """
    symbols = [*SYMBOLS, HALTED]
    with db.cursor() as cursor:
        quotes = [(symbol, price(symbol, "seed")) for symbol in symbols]
        cursor.executemany("insert into instrument (symbol, quote) values (%s, %s)", quotes)
        for number in range(1, 3 * many + 1):
            market = MARKETS[number % 3]
            owner = f"owner{number}@example.org"
            currency = ("USD", *RATES)[number % 3]
            cursor.execute("insert into portfolio values (%s, %s, %s, %s)", (number, owner, market, currency))
            if number % 10 == 1:
                cursor.execute("insert into wallet values (%s, %s)", (number, f"bc1{number:06}"))
            if number > 3 * many - 3:
                continue
            held = sorted(SYMBOLS, key=lambda symbol: draw(f"{number} {symbol}"))[: 2 + number % 4]
            for symbol in [*held, HALTED] if number // 3 % 20 == 7 else held:
                quantity = round(Decimal(100 * draw(f"{symbol} {number}")), 3) + 1
                cursor.execute("insert into holding values (%s, %s, %s)", (number, symbol, quantity))


class Owners:
    """Owners who request imports, exports and the reading of screenshots. An accepted request is promised."""

    def __init__(self, url: str) -> None:
        self.http = httpx2.Client(base_url=url, timeout=20)
        self.promised: dict[int, tuple[str, int, dict[str, str]]] = {}
        """The kind, the portfolio and the known rows of each request."""

    def ask(self, kind: str, portfolio: int, rows: Mapping[str, str] | None = None, unknown: str = "") -> int:
        """Send a request and return its number."""
        content = "".join(f"{symbol},{quantity}\n" for symbol, quantity in (rows or {}).items()) + unknown
        form: dict[str, Any] = {"data": {"content": content}}
        if kind == "screenshot":
            form = {"files": {"picture": ("screenshot.png", PICTURE + content.encode())}}
        answer = self.http.post(f"/portfolios/{portfolio}/{kind}", **form)
        assert answer.status_code == 303, answer.text
        number = int(answer.headers["Location"].rpartition("/")[2])
        self.promised[number] = (kind, portfolio, dict(rows or {}))
        return number

    def sync(self, stage: Stage) -> None:
        """Request a wallet's sync before its schedule, and wait for it."""
        began, ((portfolio,),) = time.monotonic(), stage.rows("select min(portfolio) from wallet")
        asked_at = stage.one("select clock_timestamp()")
        assert self.http.post(f"/portfolios/{portfolio}/sync").status_code == 303
        synced = "select synced_at > %s from wallet where portfolio = %s"
        stage.until(lambda: stage.one(synced, asked_at, portfolio), "a wallet")
        stage.say(f"an owner's wallet is synced after {time.monotonic() - began:.1f} s")

    def sees(self, number: int) -> str:
        """Return the page of a request."""
        return self.http.get(f"/requests/{number}").raise_for_status().text

    def empty(self, stage: Stage, market: str) -> int:
        """Return the portfolio of a market without holdings."""
        return int(stage.one("select max(id) from portfolio where market = %s", market))

    def ask_for_two(self, stage: Stage, market: str) -> int:
        """Request an export, wait for it, and request an import into the empty portfolio of this market.

        Return the import's number.
        """
        began, empty = time.monotonic(), self.empty(stage, market)
        other = stage.one("select max(id) from portfolio where market = %s and id < %s", market, empty)
        file = {NEW: "12.5", **dict.fromkeys(SYMBOLS[:6], "3")}
        imported, exported = self.ask("import", empty, file, unknown="NOSUCH,1\n"), self.ask("export", other)
        seen: set[str] = set()

        def is_there() -> bool:
            seen.update(re.findall(r"line \d of \d", self.sees(imported)))
            return "The file" in self.sees(exported)

        stage.until(is_there, "the export")
        took, behind = time.monotonic() - began, stage.one(MOVING)
        stage.say(f"an owner's export is done after {took:.1f} s, with {behind} jobs still behind it")
        stage.until(lambda: is_there() and (seen or "Done" in self.sees(imported)), "progress of the import")
        stage.say(f"the import's page shows: {max(seen, default='done already')}")
        return imported


class Operators:
    """Clients of the operator API: one with a key that may operate, one with a key that may only read."""

    def __init__(self, url: str, secrets: Mapping[str, str]) -> None:
        self.url, self._secrets = url, secrets
        self.operator, self.reader = (OperatorClient(url, key, secrets[key]) for key in ("operate", "read"))

    def refused(self) -> list[str]:
        """Send a repeated, an altered, a late, an unsigned and a read-only request; return the sorted error codes."""
        target, dry, real = (
            f"{self.url}/dead-letters/retry",
            b'{"task": "value", "dry_run": true}',
            b'{"task": "value"}',
        )

        def signed(body: bytes, key: str = "operate", at: float | None = None) -> dict[str, str]:
            return signed_headers(key, self._secrets[key], "POST", target, body, at=at)

        def tried(body: bytes, headers: dict[str, str]) -> str:
            typed = {"Content-Type": "application/json", **headers}
            return str(httpx2.post(target, content=body, headers=typed, timeout=35).json().get("code", "served"))

        once, unsigned = signed(dry), signed(dry)
        del unsigned["Tallybook-Signature"]
        assert tried(dry, once) == "served"
        altered, late = tried(real, signed(dry)), tried(dry, signed(dry, at=time.time() - 600))
        return sorted([tried(dry, once), altered, late, tried(dry, unsigned), tried(real, signed(real, "read"))])


def operators(stage: Stage, folder: Path) -> Operators:
    """Start a server with the operator API and two keys."""
    port, found = free_port(), {scope: secrets.token_hex(32) for scope in ("operate", "read")}
    keys = write_keys(folder, found)
    app = "examples.portfolio_jobs.jobs:app"
    stage.process("api", "tallybook", "web", "-A", app, "--api-keys", str(keys), "--port", str(port))
    stage.until(lambda: listens(port), "the operator API listens")
    return Operators(f"http://127.0.0.1:{port}/api/v1", found)


def write_keys(folder: Path, found: Mapping[str, str]) -> Path:
    """Write a private file of keys, each with the scope of its name; return its path."""
    keys = folder / "keys.toml"
    keys.touch(0o600)
    keys.write_text("".join(f'[keys.{one}]\nsecret = "{said}"\nscopes = ["{one}"]\n' for one, said in found.items()))
    return keys


def close(stage: Stage, market: str) -> None:
    """Move the clock to the market's close."""
    travel(stage.dsn, dict(stage.rows(CLOSES))[market])
    stage.until(lambda: stage.rows("select from closing where market = %s", market), f"{market} closes")


def settle(stage: Stage) -> None:
    """Move the clock until no job waits for its next attempt."""
    stage.until(lambda: stage.one(MOVING) == 0, "the available jobs")
    while (ahead := stage.one(NEXT)) is not None:
        travel(stage.dsn, max(ahead, timedelta()))
        stage.until(lambda: stage.one(MOVING) == 0, "the next attempts")


def shares(stage: Stage, market: str) -> str:
    """Describe how many portfolios of a market each worker has valued, and when half of them were."""
    done = stage.rows("select worker, count(*) from valued where market = %s group by 1 order by 1", market)
    half = stage.one(
        "select extract(epoch from percentile_disc(0.5) within group (order by valued_at) - min(c.closed_at))"
        " from closing c join valued using (market, day) where market = %s", market
    )  # fmt: skip
    return f"{market}: half are valued after {half:.1f} s, by now {', '.join(f'{n} by {who}' for who, n in done)}"


Rows = Iterable[tuple[Any, ...]]


def wrong_valuations(closings: Rows, portfolios: Rows, holdings: Rows, valuations: Rows) -> list[str]:
    """Check that each portfolio with holdings is valued at the true prices on each day its market closed."""
    held: dict[int, dict[str, Decimal]] = {}
    for portfolio, symbol, quantity in holdings:
        held.setdefault(portfolio, {})[symbol] = quantity
    days: dict[str, list[date]] = {market: [] for market in MARKETS}
    for market, day in closings:
        days[market].append(day)
    found = {(portfolio, day): amount for portfolio, day, amount in valuations}
    expected = {
        (portfolio, day): round(sum(units * price(symbol, day) * 100 for symbol, units in held[portfolio].items()))
        for portfolio, market in portfolios if portfolio in held for day in days[market]
    }  # fmt: skip
    said = [f"{market} has not closed" for market in MARKETS if not days[market]]
    return said + [f"valuation {one}: {found.get(one)} instead of {expected.get(one)}"
                   for one in sorted({*expected, *found}) if found.get(one) != expected.get(one)]  # fmt: skip


def wrong_statements(valuations: Rows, statements: Rows, mails: Mapping[str, int]) -> list[str]:
    """Check that each valuation has one stored statement and one mail at the provider, and no others exist."""
    wanted = {f"statement-{portfolio}-{day}" for portfolio, day, _ in valuations}
    noted = Counter(f"statement-{portfolio}-{day}" for portfolio, day in statements)
    return [f"{one}: {noted[one]} stored, {mails.get(one, 0)} mails"
            for one in sorted(wanted | noted.keys() | mails.keys())
            if (noted[one], mails.get(one, 0)) != ((1, 1) if one in wanted else (0, 0))]  # fmt: skip


def wrong_requests(
    promised: Mapping[int, tuple[str, int, Mapping[str, str]]], requests: Rows, holdings: Rows
) -> list[str]:
    """Check that each request is done, and that imports and exports match the portfolio's holdings."""
    held: dict[int, dict[str, Decimal]] = {}
    for portfolio, symbol, quantity in holdings:
        held.setdefault(portfolio, {})[symbol] = quantity
    done = {number: content for number, content, done_at in requests if done_at is not None}
    said = [f"request {number} is not done" for number in promised.keys() - done.keys()]
    for number, (kind, portfolio, rows) in promised.items():
        lines = done.get(number, "").split() if kind == "export" else [f"{name},{many}" for name, many in rows.items()]
        given = {name: Decimal(many) for name, _, many in (line.partition(",") for line in lines)}
        if number in done and given != held.get(portfolio, {}):
            said.append(f"request {number}: {given} instead of {held.get(portfolio)}")
    return said


def wrong_syncs(wallets: Rows, rates: Rows) -> list[str]:
    """Check that each wallet has the chain's balance, and each currency the market's rate."""
    said = [f"wallet {address}: {found}" for address, found in wallets if found != balance(address)]
    return said + ([] if {name: str(rate) for name, rate in rates} == RATES else ["rates"])


def account(stage: Stage, world: World, owners: Owners) -> list[str]:
    """Return all that is missing, wrong or doubled by the application's tables and the outside's records."""
    holdings = stage.rows("select portfolio, symbol, quantity from holding")
    valuations = stage.rows("select portfolio, day, amount from valuation")
    statements = stage.rows("select portfolio, day from statement")
    closings = stage.rows("select market, day from closing")
    said = ", ".join(f"{n} {what}" for what, n in world.answers.most_common())
    stage.say(f"outside: {said}; {len(world.mails)} mails, {sum(n > 1 for n in world.mails.values())} of them twice")
    stage.say(f"all quotes were fetched {world.asked['/quotes']} times, at most {world.most_quoting} at a time")
    stage.say(
        f"here: {len(valuations)} valuations, {len(statements)} statements, {len(owners.promised)} requests of owners"
    )
    return [
        *wrong_valuations(closings, stage.rows("select id, market from portfolio"), holdings, valuations),
        *wrong_statements(valuations, statements, world.mails),
        *wrong_requests(owners.promised, stage.rows("select id, content, done_at from request"), holdings),
        *wrong_syncs(
            stage.rows("select address, balance from wallet"), stage.rows("select currency, per_dollar from rate")
        ),
        *(["several jobs fetched all quotes at a time"] if world.most_quoting != 1 else []),
    ]
