"""Money as integers in minor units. No binary fraction on the way: 1.005 as a float is less than it says."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal, InvalidOperation

MOST = 2**63 - 1
"""What a bigint takes."""


class PriceRefused(ValueError):
    """What a provider gave is no price."""


def minor_units(price: object, decimals: int) -> int:
    """round(price x 10^decimals), halves up: 2847.50 INR is 284750. A Decimal, an int or a text; PriceRefused.

    NaN, infinities, negative prices and None are refused, floats too: read JSON with parse_float=Decimal.
    """
    if isinstance(price, bool) or not isinstance(price, Decimal | int | str):
        raise PriceRefused(f"a price is wanted, not {type(price).__name__}")
    try:
        exact = Decimal(price)
        if not exact.is_finite() or exact < 0:
            raise PriceRefused(f"{price} is no price")
        # One rounding, at the place that counts; multiplied first, a long number would be rounded twice.
        rounded = exact.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)
    except InvalidOperation:  # no number, or one with too many digits
        raise PriceRefused(f"{str(price)[:40]!r} is no price") from None
    amount = int(rounded.scaleb(decimals))
    if amount > MOST:
        raise PriceRefused(f"{price} is too much")
    return amount


def shown(amount: int, decimals: int) -> str:
    """For people: 284750 with 2 decimals is 2,847.50."""
    return f"{Decimal(amount).scaleb(-decimals):,.{decimals}f}"
