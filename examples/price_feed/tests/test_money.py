"""Prices as integers in minor units."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.price_feed.money import MOST, PriceRefused, minor_units, shown


@pytest.mark.parametrize(("price", "decimals", "amount"), [
    (Decimal("2847.50"), 2, 284750), ("2847.50", 2, 284750), (2847, 2, 284700), ("0", 2, 0),
    ("3012", 0, 3012), (Decimal("3012.5"), 0, 3013), ("3012.49", 0, 3012),  # JPY
    ("0.8755", 3, 876), ("0.875", 3, 875), (Decimal("12.0004"), 3, 12000),  # KWD
    ("176.36110", 2, 17636), (Decimal("1E+3"), 2, 100000),
])  # fmt: skip
def test_a_price_is_an_integer_in_minor_units(price: object, decimals: int, amount: int) -> None:
    """S1-27: round(price x 10^decimals), by the currency's decimals: 2847.50 INR is 284750, JPY has none, KWD three."""
    found = minor_units(price, decimals)
    assert (found, type(found)) == (amount, int)


@pytest.mark.parametrize(("price", "amount"), [
    ("1.005", 101), ("2.675", 268), ("0.005", 1), ("0.00499999999999999999999999999999999", 0), ("0.015", 2),
    ("0.025", 3),
])  # fmt: skip
def test_halves_are_rounded_up_as_they_are_written(price: str, amount: int) -> None:
    """S1-27: a half is rounded up, by the digits that were said; through floats several of these come out wrong."""
    assert minor_units(price, 2) == minor_units(Decimal(price), 2) == amount


def test_floats_would_be_wrong() -> None:
    """S1-27: the control: the rule in binary fractions gives another amount."""
    assert round(1.005 * 10**2) == 100 != minor_units("1.005", 2)


@pytest.mark.parametrize("price", [
    None, True, 2847.5, float("nan"), b"1", [], "", "abc", "1,000", "NaN", "Infinity", "-Infinity", "-0.01",
    Decimal("NaN"), Decimal("sNaN"), Decimal("Infinity"), Decimal(-1), -1, "1e400", "1e999999999", MOST,
])  # fmt: skip
def test_what_is_no_price_is_refused(price: object) -> None:
    """S1-27: NaN, infinities, negative prices, None, floats, texts that are no number, and what no bigint takes."""
    with pytest.raises(PriceRefused):
        minor_units(price, 2)


@given(st.decimals(min_value=0, max_value=10**12, allow_nan=False, places=6), st.sampled_from([0, 2, 3]))
def test_it_is_never_more_than_half_a_unit_off(price: Decimal, decimals: int) -> None:
    """S1-27: of any price and currency the amount is within half a minor unit, in fractions, and read back the same."""
    amount = minor_units(price, decimals)
    off = Fraction(amount) - Fraction(price) * 10**decimals
    assert Fraction(-1, 2) < off <= Fraction(1, 2)
    assert minor_units(shown(amount, decimals).replace(",", ""), decimals) == amount


def test_people_see_what_was_said() -> None:
    """S1-27: 284750 of INR is shown as 2,847.50, without a fraction on the way."""
    assert (shown(284750, 2), shown(3012, 0), shown(875, 3)) == ("2,847.50", "3,012", "0.875")
