"""The three providers: what each is asked, and how it says the price, or that there is none."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any
from urllib.parse import quote

import httpx2

from examples.price_feed.money import PriceRefused
from tallybook.extra.providers import Provider


class Busy(Exception):
    """The provider takes no calls for this long: a 429, to `ctx.provider`."""

    status = 429

    def __init__(self, retry_after: timedelta) -> None:
        super().__init__(f"busy for {retry_after.total_seconds():.0f} s")
        self.retry_after = retry_after


@dataclass(frozen=True)
class Quote:
    symbol: str
    price: object
    currency: str


async def ask(http: httpx2.AsyncClient, provider: Provider, symbol: str) -> Quote:
    """What this provider says of this symbol. Busy; PriceRefused or an error of HTTP: the attempt has failed."""
    kinds = {"twelvedata": twelve_data, "yahoo": yahoo, "mfapi": mfapi}
    found = await kinds[provider.kind](http, provider, symbol)
    if found.symbol != symbol:
        raise PriceRefused(f"{provider.name} was asked for {symbol} and answered for {found.symbol}")
    return found


async def twelve_data(http: httpx2.AsyncClient, provider: Provider, symbol: str) -> Quote:
    """Twelve Data. The key goes into a header: addresses are written into logs. Errors are in the body, whatever the status."""
    headers = {"Authorization": f"apikey {provider.secrets['api_key'].reveal()}"}
    answer = await http.get(f"{provider.settings['url']}/quote", params={"symbol": symbol}, headers=headers)
    said = read(answer)
    if said.get("status") == "error":
        if said["code"] == 429:
            raise Busy(timedelta(minutes=1))
        raise PriceRefused(f"{said['code']}: {said['message']}")
    return Quote(said["symbol"], said["close"], said["currency"])


async def yahoo(http: httpx2.AsyncClient, provider: Provider, symbol: str) -> Quote:
    """Yahoo Finance. The secret is a session's cookie. The price is a JSON number."""
    headers = {"Cookie": provider.secrets["cookie"].reveal()}
    address = f"{provider.settings['url']}/v8/finance/chart/{quote(symbol, safe='=')}"
    chart = read(await http.get(address, params={"range": "1d", "interval": "1d"}, headers=headers))["chart"]
    if chart["error"] is not None:
        raise PriceRefused(f"{chart['error']['code']}: {chart['error']['description']}")
    meta = chart["result"][0]["meta"]
    return Quote(meta["symbol"], meta["regularMarketPrice"], meta["currency"])


async def mfapi(http: httpx2.AsyncClient, provider: Provider, symbol: str) -> Quote:
    """mfapi.in: funds of India by scheme code, all in INR, no key. One that it does not know is a SUCCESS without data."""
    said = read(await http.get(f"{provider.settings['url']}/mf/{quote(symbol, safe='')}/latest"))
    if not said["data"]:
        raise PriceRefused(f"there is no scheme {symbol}")
    return Quote(str(said["meta"]["scheme_code"]), said["data"][0]["nav"], "INR")


def read(answer: httpx2.Response) -> dict[str, Any]:
    """The JSON of an answer, its numbers exact. A refusal that says why in JSON is read, too."""
    if answer.status_code == 429 and not answer.headers.get("Content-Type", "").startswith("application/json"):
        raise Busy(timedelta(seconds=int(answer.headers.get("Retry-After", "60"))))
    if answer.status_code >= 500:
        answer.raise_for_status()
    try:
        said = answer.json(parse_float=Decimal, parse_constant=Decimal)  # NaN is no price either
    except ValueError as error:
        answer.raise_for_status()
        raise PriceRefused(f"no JSON of a price: {error}") from None
    if not isinstance(said, dict):
        raise PriceRefused("no JSON of a price")
    return said
