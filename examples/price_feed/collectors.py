"""The three providers: the request to each, and the parsing of its price or error."""

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
    """The provider accepts no calls for `retry_after`; `ctx.provider` handles it like a 429."""

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
    """Return this provider's quote of this symbol.

    Raises Busy. Raises PriceRefused or an HTTP error, which fail the attempt.
    """
    kinds = {"twelvedata": twelve_data, "yahoo": yahoo, "mfapi": mfapi}
    found = await kinds[provider.kind](http, provider, symbol)
    if found.symbol != symbol:
        raise PriceRefused(f"{provider.name} was asked for {symbol} and answered for {found.symbol}")
    return found


async def twelve_data(http: httpx2.AsyncClient, provider: Provider, symbol: str) -> Quote:
    """Ask Twelve Data. The key is in a header, because logs contain URLs. Errors are in the body, with any status."""
    headers = {"Authorization": f"apikey {provider.secrets['api_key'].reveal()}"}
    answer = await http.get(f"{provider.settings['url']}/quote", params={"symbol": symbol}, headers=headers)
    said = read(answer)
    if said.get("status") == "error":
        if said["code"] == 429:  # with status 200
            raise Busy(timedelta(minutes=1))
        raise PriceRefused(f"{said['code']}: {said['message']}")
    return Quote(said["symbol"], said["close"], said["currency"])


async def yahoo(http: httpx2.AsyncClient, provider: Provider, symbol: str) -> Quote:
    """Ask Yahoo Finance. The secret is a session cookie. The price is a JSON number."""
    headers = {"Cookie": provider.secrets["cookie"].reveal()}
    address = f"{provider.settings['url']}/v8/finance/chart/{quote(symbol, safe='=')}"
    chart = read(await http.get(address, params={"range": "1d", "interval": "1d"}, headers=headers))["chart"]
    if chart["error"] is not None:
        raise PriceRefused(f"{chart['error']['code']}: {chart['error']['description']}")
    meta = chart["result"][0]["meta"]
    return Quote(meta["symbol"], meta["regularMarketPrice"], meta["currency"])


async def mfapi(http: httpx2.AsyncClient, provider: Provider, symbol: str) -> Quote:
    """Ask mfapi.in: Indian funds by scheme code, in INR, without a key. An unknown scheme is a SUCCESS without data."""
    said = read(await http.get(f"{provider.settings['url']}/mf/{quote(symbol, safe='')}/latest"))
    if not said["data"]:
        raise PriceRefused(f"there is no scheme {symbol}")
    return Quote(str(said["meta"]["scheme_code"]), said["data"][0]["nav"], "INR")


def read(answer: httpx2.Response) -> dict[str, Any]:
    """Return the JSON of an answer or of a refusal, with exact numbers. Raises PriceRefused or an HTTP error."""
    if answer.status_code == 429 or answer.status_code >= 500:
        answer.raise_for_status()  # ctx.provider handles a 429 and its Retry-After
    try:
        said = answer.json(parse_float=Decimal, parse_constant=Decimal)  # NaN is refused later
    except ValueError as error:
        answer.raise_for_status()
        raise PriceRefused(f"not a price in JSON: {error}") from None
    if not isinstance(said, dict):
        raise PriceRefused("not a price in JSON")
    return said
