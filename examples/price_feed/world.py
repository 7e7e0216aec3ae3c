"""The simulated outside: three price providers, an SMTP server, and people who look at their holdings.

Both servers are real, on the loopback interface. The providers have the paths and answers of Twelve Data, Yahoo Finance
and mfapi.in, and their faults: slow, silent, out of calls, failing, and sometimes wrong: the price of another symbol or
currency, NaN, none, or an HTML page. The fate of a request depends only on its symbol, the day and the number of tries,
so that every run is the same. Each provider allows 8 calls in any minute of the simulated clock, and records every one.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
import threading
import time
from collections import Counter, defaultdict
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import httpx2
import psycopg
from aiosmtpd.controller import Controller

from examples.stage import Stage
from tallybook import App
from tallybook.testing import travel

CALLS, WINDOW = 8, 60.0
PER = "61 s"
"""The limit sets when a call may start. One may arrive a second later than another, also on a loaded machine."""
HANGS = 3.0
"""Seconds that a silent provider takes; the timeout of the run is shorter."""

PROVIDERS = ("twelvedata", "yahoo", "mfapi")
STOCKS = ["AAPL", "MSFT", "NVDA", "AMZN", "GOOGL", "META", "TSLA", "NFLX", "AMD", "ORCL", "INTC", "IBM"]
ABROAD = {"RELIANCE.NS": "INR", "7203.T": "JPY", "NBK.KW": "KWD", "TCS.NS": "INR", "6758.T": "JPY", "INFY.NS": "INR"}
MONEY = ["USDINR=X", "EURINR=X", "GBPINR=X", "CHFINR=X", "SGDINR=X", "AEDINR=X"]
FUNDS = [
    "119551", "120503", "125497", "118834", "122639", "120586", "118989", "119063", "120716", "118825", "127042",
    "119598",
]  # fmt: skip
DELISTED, DARK = "SIVB", "TWTR"  # another provider knows the first, none knows the second
DECIMALS = {"INR": 2, "USD": 2, "JPY": 0, "KWD": 3}


def draw(text: str) -> float:
    """Return a number in [0, 1) that looks random but depends only on the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


class World:
    """Both servers, their clock and their records."""

    def __init__(self, api_key: str, cookie: str) -> None:
        self.api_key = api_key
        self.cookie = cookie
        self.lock = threading.Lock()
        self.moved = 0.0
        """Seconds by which the clock was moved."""
        self.calls: dict[str, list[float]] = defaultdict(list)
        """Times of the calls of each provider."""
        self.over: Counter[str] = Counter()
        """Calls of each provider beyond its 8 per minute."""
        self.asked: Counter[str] = Counter()
        self.symbols: set[str] = set()
        """All requested symbols."""
        self.said: dict[str, list[int]] = defaultdict(list)
        """The prices in the answers for each symbol, in minor units."""
        self.answers: Counter[str] = Counter()
        self.keeps_waiting = False
        """Whether calls are kept waiting; `kept_waiting` counts them."""
        self.kept_waiting = 0
        self.has_moods = True
        self.without_key = 0
        self.mails: Counter[str] = Counter()
        """Number of mails for each event."""
        self.currency = {
            **ABROAD,
            **dict.fromkeys(STOCKS, "USD"),
            **dict.fromkeys([*MONEY, *FUNDS], "INR"),
            DELISTED: "USD",
        }

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

    def url(self, provider: str) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/{provider}"

    def now(self) -> float:
        return time.monotonic() + self.moved

    def move(self, db: psycopg.Connection[Any], by: timedelta) -> None:
        """Move the clock of the queue, the tables and the providers. No call may be running."""
        with db.transaction():
            travel(db, by)
            db.execute("update price set at = at - %s", (by,))
            db.execute("update asset set viewed_at = viewed_at - %s", (by,))
            self.moved += by.total_seconds()

    def least_called(self) -> int:
        """Return the number of calls of the provider with the fewest."""
        return min(len(self.calls[name]) for name in PROVIDERS)

    def is_over(self, provider: str) -> bool:
        """Record a call; return whether it is one too many in this minute."""
        with self.lock:
            calls = self.calls[provider]
            calls.append(self.now())
            over = sum(one > calls[-1] - WINDOW for one in calls) > CALLS
            self.over[provider] += over
            return over

    def verdict(self, provider: str, symbol: str) -> str:
        """Return the fate of this call: ok, or the kind of fault, at most twice per symbol and day."""
        if symbol == DARK:
            return "fails"
        if symbol not in self.currency or (symbol == DELISTED and provider == "twelvedata"):
            return "unknown"
        key = f"{symbol} {self.moved // 86400}"
        with self.lock:
            self.asked[key] += 1
            n = self.asked[key]
        fate = draw(key)
        if n > (2 if fate < 0.06 else 1) or not self.has_moods:
            return "ok"
        for kind, share in (("fails", 0.12), ("busy", 0.18), ("hangs", 0.22), ("wrong", 0.36)):
            if fate < share:
                return kind
        return "ok"

    def price(self, symbol: str) -> tuple[str, int]:
        """Return today's price as a text with three extra decimal places, and in minor units, by integer arithmetic."""
        day, decimals = int(self.moved // 86400), DECIMALS[self.currency[symbol]]
        amount, rest = 1 + int(draw(f"{symbol} {day}") * 10 ** (decimals + 4)), int(draw(symbol) * 1000) - 500
        if symbol == "RELIANCE.NS":
            amount, rest = 284750 + 100 * day, 0
        digits = str(amount * 1000 + rest).zfill(decimals + 4)  # rest is from -500 to 499: halves round up
        return f"{digits[: -decimals - 3]}.{digits[-decimals - 3 :]}", amount

    def tell(self, symbol: str) -> str:
        """Return the price as a text and record it."""
        text, amount = self.price(symbol)
        with self.lock:
            self.said[symbol].append(amount)
        return text


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
        world, parts = self.world, urlsplit(self.path)
        provider, path = re.match(r"/(\w+)(/.*)", parts.path).groups()  # type: ignore[union-attr]
        over = world.is_over(provider)
        symbol = {
            "twelvedata": lambda: parse_qs(parts.query)["symbol"][0],
            "yahoo": lambda: unquote(path.removeprefix("/v8/finance/chart/")),
            "mfapi": lambda: unquote(path.removeprefix("/mf/").removesuffix("/latest")),
        }[provider]()
        kind = "over" if over else world.verdict(provider, symbol)
        time.sleep(0.3 * draw(f"{symbol} {world.moved}") ** 3)
        with world.lock:
            world.symbols.add(symbol)
            world.answers[kind] += 1
            world.kept_waiting += world.keeps_waiting
        if kind == "hangs" or world.keeps_waiting:
            time.sleep(HANGS)
            kind = "fails"  # if the caller is still connected
        getattr(self, provider)(kind, symbol)

    def twelvedata(self, kind: str, symbol: str) -> None:
        if self.headers.get("Authorization") != f"apikey {self.world.api_key}":
            self.world.without_key += 1
            return self.error(401, "**apikey** parameter is incorrect or not specified.")
        if kind in ("over", "busy"):
            return self.error(429, "You have run out of API credits for the current minute.")
        if kind == "unknown":
            return self.error(404, "**symbol** or **figi** parameter is missing or invalid.")
        if kind == "fails":
            return self.error(500, "Internal server error")
        said = {"symbol": symbol, "exchange": "NASDAQ", "currency": self.world.currency[symbol], "close": "601.10"}
        if kind == "wrong":
            wrong: list[dict[str, Any]] = [{"symbol": "QQQ"}, {"close": "-1"}, {"close": "NaN"}, {"close": None}]
            return self.json(200, said | wrong[int(draw(symbol) * 4)])
        return self.json(200, said | {"close": self.world.tell(symbol)})

    def error(self, code: int, message: str) -> None:
        """Send an error of Twelve Data; a 404 comes with status 200."""
        self.json(200 if code == 404 else code, {"code": code, "message": message, "status": "error"})

    def yahoo(self, kind: str, symbol: str) -> None:
        if self.headers.get("Cookie") != self.world.cookie:
            self.world.without_key += 1
            return self.answer(401, b"Unauthorized", "text/plain")
        if kind in ("over", "busy"):
            return self.answer(429, b"Too Many Requests\r\n", "text/plain")
        if kind == "fails":
            return self.answer(502, b"<html>Bad Gateway</html>", "text/html")
        if kind == "unknown":
            missing = {"code": "Not Found", "description": "No data found, symbol may be delisted"}
            return self.json(404, {"chart": {"result": None, "error": missing}})
        meta = {"currency": self.world.currency[symbol], "symbol": symbol, "regularMarketPrice": 1.5}
        if kind == "wrong":
            wrong: list[dict[str, Any]] = [{"regularMarketPrice": float("nan")}, {"currency": "GBp"}, {"symbol": "QQQ"}]
            meta |= wrong[int(draw(symbol) * 3)]
        chart = json.dumps({"chart": {"result": [{"meta": meta, "timestamp": [], "indicators": {}}], "error": None}})
        if kind != "wrong":  # inserts the number as text: json would make a float of it
            chart = chart.replace("1.5", self.world.tell(symbol))
        return self.answer(200, chart.encode(), "application/json")

    def mfapi(self, kind: str, symbol: str) -> None:
        if kind in ("over", "busy"):
            return self.answer(429, b"Too many requests, please try again later.", "text/html")
        if kind == "fails":
            return self.answer(503, b"Service Unavailable", "text/html")
        if kind == "wrong":
            return self.answer(200, b"<!doctype html><title>mfapi</title>", "text/html")
        if kind == "unknown":
            return self.json(200, {"meta": {}, "data": [], "status": "SUCCESS"})
        meta = {
            "fund_house": "A Fund House",
            "scheme_code": int(symbol),
            "scheme_name": "A Fund - Direct Plan - Growth",
        }
        data = [{"date": "20-11-2026", "nav": self.world.tell(symbol)}]
        return self.json(200, {"meta": meta, "data": data, "status": "SUCCESS"})

    def json(self, status: int, said: dict[str, Any]) -> None:
        self.answer(status, json.dumps(said).encode(), "application/json")

    def answer(self, status: int, content: bytes, kind: str) -> None:
        try:
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        """Write no log, since all calls are counted."""


class _Mailbox:
    """The admin's mailbox. The server refuses each message at its first try."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen: set[str] = set()

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        text = envelope.content.decode(errors="replace")
        event = re.search(r"^X-Event: (\S+)", text, re.MULTILINE)[1]  # type: ignore[index]
        if event not in self.seen:
            self.seen.add(event)
            return "451 try again later"
        self.world.mails[event] += 1
        return "250 OK"


class _Smtp(Controller):
    """An SMTP server on a free port, which the library does not find out on its own."""

    def _trigger_server(self) -> None:
        self.port = self.server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        super()._trigger_server()


async def providers(dsn: str, world: World) -> None:
    """Set providers, limits and routes: addresses in settings, encrypted secrets. mfapi.in needs no secret."""
    setup = App("setup", dsn=dsn)
    registry = setup.providers
    for name in PROVIDERS:
        limit = f"provider:{name}"
        await setup.rate_limits.set(limit, CALLS, per=PER)
        await registry.set(name, kind=name, settings={"url": world.url(name), "limits": [limit]})
    await registry.set_secret("twelvedata", "api_key", world.api_key)
    await registry.set_secret("yahoo", "cookie", world.cookie)
    mail = {"host": "127.0.0.1", "port": world.smtp.port, "tls": "none", "from": "prices@example.org"}
    await registry.set("mail", kind="smtp", settings=mail)
    await registry.route("stock", "twelvedata")
    await registry.route("fx", "yahoo")
    await registry.route("fund", "mfapi")
    for symbol in ABROAD:
        await registry.route("stock", "yahoo", symbol=symbol)


def assets(many: int) -> list[tuple[str, str, str]]:
    """Return symbol, data type and currency of `many` assets of each list, plus the two that fail."""
    stocks = [(symbol, "stock", "USD") for symbol in [DELISTED, DARK, *STOCKS[:many]]]
    abroad = [(symbol, "stock", currency) for symbol, currency in ABROAD.items()][: many // 2]
    money = [(symbol, "fx", "INR") for symbol in MONEY[: many // 2]]
    return [*stocks, *abroad, *money, *((code, "fund", "INR") for code in FUNDS[:many])]


UNWANTED = {
    "MANUAL": "update asset set price_mode = 'manual' where id = %s",
    "DELETED": "update asset set deleted_at = now() where id = %s",
    "INACTIVE": "update asset set active = false where id = %s",
    "SOLD": "update holding set active = false where asset = %s",
    "NOWHERE": "update asset set data_type = 'bond' where id = %s",  # no route leads to a provider
}


def fill(stage: Stage, many: int) -> None:
    """Insert assets and holdings: Ada holds every second asset, Bob the others and those that must not be fetched."""
    for n, asset in enumerate([*assets(many), *((symbol, "stock", "USD") for symbol in UNWANTED)]):
        row = stage.one("insert into asset (symbol, data_type, currency) values (%s, %s, %s) returning id", *asset)
        owner = "bob" if (n % 2 and asset[0] not in (DELISTED, DARK)) or asset[0] in UNWANTED else "ada"
        stage.db.execute("insert into holding (owner, asset, units) values (%s, %s, %s)", (owner, row, n + 1))
        if asset[0] in UNWANTED:
            stage.db.execute(UNWANTED[asset[0]].encode(), (row,))


class Visitors:
    """People who look at holdings. Each price that a page reports as being fetched is promised."""

    def __init__(self, url: str, world: World) -> None:
        self.http = httpx2.Client(base_url=url, timeout=20)
        self.world = world
        self.promised: dict[int, float] = {}
        self.took_ms: list[float] = []

    def look(self, owner: str = "ada") -> int:
        """Look once; return how many prices are being fetched."""
        began, at = time.perf_counter(), self.world.now()
        page = self.http.get(f"/holdings/{owner}").raise_for_status().text
        self.took_ms.append((time.perf_counter() - began) * 1000)
        fetching = [int(one) for one in re.findall(r'data-asset="(\d+)" class="fetching"', page)]
        self.promised |= dict.fromkeys(fetching, at)
        return len(fetching)

    def percentile(self, which: int) -> float:
        return statistics.quantiles(self.took_ms, n=100, method="inclusive")[which - 1]


def most_in_a_minute(calls: list[float]) -> int:
    """Return the most calls in any window of a minute, by arrival time."""
    return max((sum(0 <= other - one < WINDOW for other in calls) for one in calls), default=0)


MOVING = """\
select count(*) from tallybook.job
 where state in ('available', 'running') or state in ('scheduled', 'retrying') and run_at <= clock_timestamp()"""
RUNNING = "select count(*) from tallybook.job where state = 'running'"
NEXT = "select min(run_at) - clock_timestamp() from tallybook.job where state in ('scheduled', 'retrying')"
WANTED = """\
select count(*) from asset_now a join holding h on h.asset = a.id and h.active
 where a.fetched and a.stale and (a.priced_at is null or a.viewed_at > now() - interval '48 h')"""
CALLING = (
    "select worker from tallybook.job where state = 'running' and task = 'fetch_price' order by started_at limit 1"
)


def kill_one_that_calls(stage: Stage, world: World) -> str:
    """Send SIGKILL to a worker that a provider keeps waiting; return its name."""
    killed: list[str] = []

    def strike() -> bool:
        name = stage.one(CALLING) if world.kept_waiting else None
        if name is not None:
            stage.kill(name)
            killed.append(name)
        return name is not None

    world.keeps_waiting = True
    stage.until(strike, "a running call")
    world.keeps_waiting = False
    return killed[0]


def serve(stage: Stage, world: World) -> None:
    """Move the clock from turn to turn until all wanted prices are stored or given up."""
    moved = world.moved
    while not stage.is_idle() or stage.one(WANTED):
        stage.until(lambda: stage.one(MOVING) == 0, "the due jobs")
        ahead = stage.one(NEXT)
        stage.db.execute("select tallybook.pause('prices')")  # no call may run while the clock moves
        stage.until(lambda: not stage.one(RUNNING), "the running jobs")
        world.move(stage.db, max(ahead or timedelta(minutes=1), timedelta(0)))
        stage.db.execute("select tallybook.resume('prices')")
        if ahead is None:  # the schedule enqueues the wanted prices every minute
            stage.until(lambda: not stage.is_idle() or not stage.one(WANTED), "the schedule")
    prices, stopped = stage.one("select count(*) from price"), stage.one("select count(*) from asset where stopped")
    stage.say(f"{(world.moved - moved) / 60:.1f} minutes later: {prices} prices stored, {stopped} assets stopped")


def missing(promised: dict[int, float], priced: dict[int, float], given_up: set[int]) -> set[str]:
    """Return promised assets without a newer price that were not given up either.

    `promised` and `priced` map assets to seconds ago.
    """
    late = {n for n, ago in promised.items() if n not in given_up and priced.get(n, math.inf) > ago}
    return {f"a price of asset {n}" for n in late}


def wrong(said: dict[str, list[int]], kept: list[tuple[str, int]]) -> set[str]:
    """Return stored prices that no provider sent, and the last sent price of each symbol if it is not stored."""
    right = {(symbol, amount) for symbol, amounts in said.items() for amount in amounts}
    last = {(symbol, amounts[-1]) for symbol, amounts in said.items()}
    return {f"{symbol} at {amount}" for symbol, amount in {*kept} - right | last - {*kept}}


KEPT = "select a.symbol, p.amount from price p join asset a on a.id = p.asset"
PRICED = "select asset, extract(epoch from now() - max(at))::float from price group by asset"
STOPPED = (
    "select a.id, e.job_id::text from asset a join event e on (e.body ->> 'assetId')::bigint = a.id where a.stopped"
)
ENDED = "select count(*) from tallybook.job where task = 'fetch_price' and state = 'completed'"


def account(stage: Stage, world: World, visitors: Visitors) -> int:
    """Compare promised prices with stored ones, and both with the outside's records; return the number of faults."""
    now = world.now()
    ago = {asset: now - at for asset, at in visitors.promised.items()}
    stopped = {asset for asset, event in stage.rows(STOPPED) if world.mails[event]}  # given up, with a mail
    lost = missing(ago, dict(stage.rows(PRICED)), stopped) | wrong(world.said, stage.rows(KEPT))
    lost |= {f"mail {event}" for (event,) in stage.rows("select job_id::text from event") if world.mails[event] != 1}
    lost |= {f"{symbol}: must not be fetched" for symbol in UNWANTED.keys() & world.symbols}
    lost |= {f"{provider}: {n} calls too many" for provider, n in world.over.items() if n}
    prices, completed = stage.one("select count(*) from price"), stage.one(ENDED)
    if prices != completed:
        lost.add(f"{completed} jobs completed, {prices} prices stored")
    crashes = stage.one("select sum(crashes)::int from tallybook.job")
    answers = ", ".join(f"{n} {what}" for what, n in world.answers.most_common())
    stage.say(
        f"outside: {answers}; {world.without_key} without the right key;"
        f" {sum(world.mails.values())} mails to the admin; {crashes} jobs rescued"
    )
    minutes = ", ".join(f"{name} {most_in_a_minute(calls)} of {len(calls)}" for name, calls in world.calls.items())
    stage.say(f"most calls in any {WINDOW:.0f} s by the providers' clocks: {minutes} (wanted: at most {CALLS})")
    stage.say(
        f"{len(visitors.took_ms)} looks answered in p50 {visitors.percentile(50):.0f} ms,"
        f" p99 {visitors.percentile(99):.0f} ms"
    )
    for one in sorted(lost)[:10]:
        stage.say(f"lost: {one}")
    return len(lost)
