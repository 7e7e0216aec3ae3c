"""A secret is shown only to code that asks for it by name (_model/provider.py)."""

import copy
import dataclasses
import json
import logging
import pickle
import pprint
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from tallybook import Provider, Secret
from tallybook._model.payload import encode
from tallybook.errors import PayloadError

CANARY = "sk-canary-4711"
FORMER = "sk-canary-0815"


def provider(of: Callable[..., Any] = Secret) -> Provider:
    return Provider("acme", "market-data", {"url": "https://acme.example"}, {"api_key": of(CANARY, of(FORMER))})


def _locals_of_a_traceback(found: Any) -> str:
    try:
        raise ValueError("no luck") from KeyError(str(found))
    except ValueError as error:
        return "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())


SHOWN: dict[str, Callable[[Any], str]] = {
    "str": str,
    "repr": repr,
    "format": lambda found: f"{found} {found!r:>40}",
    "percent": lambda found: "%s" % (found,),  # noqa: UP031
    "pprint": pprint.pformat,
    "json with default=str": lambda found: json.dumps({"found": found}, default=str),
    "json with default=repr": lambda found: json.dumps([found], default=repr),
    "traceback with locals": _locals_of_a_traceback,
    "log": lambda found: logging.Formatter("%(message)s %(args)s").format(
        logging.LogRecord("x", logging.INFO, "x.py", 1, "%s %r %s", (found, found, [found]), None)
    ),
    "asdict": lambda found: (
        repr(dataclasses.asdict(found)) if dataclasses.is_dataclass(found) else ""  # type: ignore[arg-type]
    ),
    "deepcopy": lambda found: repr(copy.deepcopy([found])),
    "secrets": lambda found: (
        f"{found.secrets} {found.secrets['api_key'].previous}" if hasattr(found, "secrets") else ""
    ),
}


@pytest.mark.parametrize("way", SHOWN, ids=str)
def test_nothing_that_shows_a_value_shows_a_secret(way: str) -> None:
    """S1-12: str, repr, format, %, pprint, json, copies, logs and tracebacks with locals hide a provider's secrets."""
    whole = provider()
    for found in (whole.secrets["api_key"], whole):
        shown = SHOWN[way](found)
        assert CANARY not in shown and FORMER not in shown


def test_a_plain_text_in_its_place_is_shown() -> None:
    """Negative control: with a class that has a plain repr, all of these ways but two show the canary."""

    @dataclasses.dataclass
    class Plain:
        text: str
        previous: Any = None

    found = {way for way in SHOWN if CANARY in SHOWN[way](provider(Plain).secrets)}
    assert set(SHOWN) - found <= {"asdict", "secrets"}  # they read providers only


def test_a_secret_leaves_its_process_by_no_serialiser() -> None:
    """Pickle, JSON and the encoder of args and results refuse a secret, with an error that does not show it."""
    whole = provider()
    for found in (whole, whole.secrets["api_key"]):
        for ship in (pickle.dumps, json.dumps, lambda found: found.__getstate__() if found is not whole else 1 / 0):
            with pytest.raises((TypeError, ZeroDivisionError)) as refused:
                ship(found)
            assert CANARY not in str(refused.value)
        with pytest.raises(PayloadError) as unfit:
            encode({"found": found}, task="t", what="result")
        assert CANARY not in str(unfit.value)


def test_who_asks_gets_it() -> None:
    """reveal() returns the text, previous the former secret; secrets are equal by text, and never equal to a text."""
    found = provider().secrets["api_key"]
    assert found.reveal() == CANARY and found.previous is not None and found.previous.reveal() == FORMER
    assert found == Secret(CANARY) and found != CANARY and len({found, Secret(CANARY)}) == 1
    assert copy.copy(found) is found
