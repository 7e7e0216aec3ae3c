"""The record of an exception (failure.py)."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.hostile import hostile
from tallybook._model.failure import describe
from tallybook._model.signature import ArgsModel


def caught(raiser):
    with pytest.raises(BaseException) as found:
        raiser()
    return found.value


def described(error, **options):
    found = describe(error, attempt=2, worker="w1", **options)
    text = json.dumps(found, ensure_ascii=False)
    assert len(text.encode()) <= options.get("max_bytes", 16_000)
    assert "\0" not in "".join(v for v in found.values() if isinstance(v, str))
    return found


def test_failure_is_described():
    """The record has type, message, attempt, worker and a traceback with source lines but without locals."""

    def handler():
        secret = "hunter" + "2"
        raise ValueError(f"no such order {len(secret)}")

    found = described(caught(handler))
    assert (found["type"], found["message"], found["attempt"], found["worker"]) == (
        "ValueError",
        "no such order 7",
        2,
        "w1",
    )
    assert found["traceback"].startswith("Traceback (most recent call last):\n")
    assert 'raise ValueError(f"no such order' in found["traceback"]
    assert found["traceback"].endswith("ValueError: no such order 7\n")
    assert "hunter2" not in found["traceback"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hostile(Exception, __str__=SystemExit, __repr__=SystemExit)(), "<unprintable>"),
        (type("WrongText", (Exception,), {"__str__": lambda self: 5})(), "<unprintable>"),
        (hostile(Exception, __cause__=KeyboardInterrupt, __notes__=RuntimeError)("x"), "x"),
        (ValueError("a\0b\ud800"), "a\\x00b\\ud800"),
        (SystemExit(1), "1"),
        (KeyboardInterrupt(), ""),
        (GeneratorExit(), ""),
    ],
)
def test_hostile_exceptions_are_described(error, message):
    """F29: an exception that raises when it is read, or that jsonb cannot hold, is still recorded."""
    found = described(error)
    assert found["message"] == message
    assert found["type"].endswith(type(error).__qualname__)


def test_cyclic_causes_end():
    """F29: an exception in a cycle of causes is shown once."""
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert described(first)["traceback"].count("ValueError: first") == 1


def test_long_chains_are_cut():
    """F29: a chain of a thousand exceptions is cut to the newest."""
    error = ValueError("0")
    for number in range(1, 1000):
        newer = ValueError(str(number))
        newer.__context__ = error
        error = newer
    found = described(error)["traceback"]
    assert "earlier exceptions are left out" in found
    assert found.endswith("ValueError: 999\n")


def test_causes_come_first():
    """A cause comes before its effect, in Python's own wording; `from None` hides the context."""

    def handler():
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    def hiding():
        try:
            raise KeyError("inner")
        except KeyError:
            raise ValueError("outer") from None

    text = described(caught(handler))["traceback"]
    assert text.index("KeyError: 'inner'") < text.index("direct cause") < text.index("ValueError: outer")
    assert "inner" not in described(caught(hiding))["traceback"].rpartition("raise ValueError")[2]


def test_groups_show_their_members():
    """F29: an exception group is shown with its members, including nested ones; a shared member appears once."""
    member = ValueError("member")
    group = BaseExceptionGroup("outer", [member, BaseExceptionGroup("inner", [KeyError("k"), member])])
    text = described(group)["traceback"]
    assert "1 of 2" in text
    assert text.count("ValueError: member") == 1
    assert "KeyError: 'k'" in text


def test_frames_are_limited():
    """F29: an endless recursion shows at most 50 frames, the first and the last, and how many are left out."""

    def forever():
        forever()

    text = described(caught(forever))["traceback"]
    assert text.count("in forever") <= 50
    assert "frames are left out]" in text
    assert text.startswith("Traceback")


def test_frames_of_the_library_are_left_out():
    """A traceback starts at the handler, without Tallybook's frames before it."""

    def handler(annotation):
        raise ValueError("mine")

    def strange(a: int): ...

    error = caught(ArgsModel(strange, task="t", is_special=handler).described)
    error.__traceback__ = error.__traceback__.tb_next  # drop this test's own frame, as if a worker had called
    text = described(error)["traceback"]
    assert "signature.py" not in text
    assert "in handler" in text


def test_notes_are_kept():
    """Notes added with add_note are part of the traceback."""
    error = ValueError("x")
    error.add_note("while reading page 4")
    assert described(error)["traceback"].endswith("ValueError: x\nwhile reading page 4\n")


@given(st.text(st.characters(), max_size=300), st.integers(1, 200), st.integers(1_000, 5_000))
def test_any_message_fits_the_limit(text, times, limit):
    """F29: for any message, the JSON text of the record is valid UTF-8 and within the limit."""
    found = described(ValueError(text * times), max_bytes=limit)
    json.dumps(found, ensure_ascii=False).encode()


def test_of_a_huge_message_the_beginning_and_of_its_traceback_the_end_is_kept():
    """F29: a message of ten megabytes is cut, and marked as cut."""
    found = described(ValueError("begin" + "\n" * 10_000_000))
    assert found["message"].startswith("begin")
    assert found["message"].endswith("[...]")
    assert found["traceback"].startswith("[...]")
