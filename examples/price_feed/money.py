"""Money as integers in minor units, computed without binary fractions: 1.005 as a float is less than 1.005."""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal, InvalidOperation

MOST = 2**63 - 1
"""The largest bigint."""


class PriceRefused(ValueError):
    """A provider's answer is not a price."""


def minor_units(price: object, decimals: int) -> int:
    """Return round(price x 10^decimals), halves up, of a Decimal, an int or a text: 2847.50 INR is 284750.

    Raises PriceRefused for NaN, infinities, negative prices, None and floats: read JSON with parse_float=Decimal.
    """
    if isinstance(price, bool) or not isinstance(price, Decimal | int | str):
        raise PriceRefused(f"expected a price, got {type(price).__name__}")
    try:
        exact = Decimal(price)
        if not exact.is_finite() or exact < 0:
            raise PriceRefused(f"{price} is no price")
        # Round only once: a multiplication first would also round a long number.
        rounded = exact.quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)
    except InvalidOperation:  # not a number, or one with too many digits
        raise PriceRefused(f"{str(price)[:40]!r} is no price") from None
    amount = int(rounded.scaleb(decimals))
    if amount > MOST:
        raise PriceRefused(f"{price} is too large")
    return amount


def shown(amount: int, decimals: int) -> str:
    """Format an amount for people: 284750 with 2 decimals is 2,847.50."""
    return f"{Decimal(amount).scaleb(-decimals):,.{decimals}f}"
