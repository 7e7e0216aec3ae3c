"""Exceptions after which a retry cannot help (backoff.py)."""

import pytest

from tallybook._model.backoff import checked_no_retry, is_final
from tallybook.errors import ConfigError, PayloadError, SignatureError

CLASSES = (ValueError, KeyError)


class Marked(Exception):
    no_retry = True


class HalfMarked(Exception):
    no_retry = "yes"


class HostileMark(Exception):
    @property
    def no_retry(self):
        raise KeyboardInterrupt


class HostileGroup(ExceptionGroup):
    @property
    def exceptions(self):
        raise SystemExit


class Bottomless(ExceptionGroup):
    @property
    def exceptions(self):
        return (self, self)


def nested(error, depth):
    for _ in range(depth):
        error = ExceptionGroup("x", [error])
    return error


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (ValueError(), True),
        (UnicodeError(), True),
        (TypeError(), False),
        (SystemExit(1), False),
        (Marked(), True),
        (HalfMarked(), False),
        (PayloadError("$", "no", task="t"), True),
        (SignatureError("t", "no"), True),
        (ExceptionGroup("x", [ValueError(), KeyError()]), True),
        (ExceptionGroup("x", [ValueError(), TypeError()]), False),
        (ExceptionGroup("x", [ValueError(), ExceptionGroup("y", [Marked(), KeyError()])]), True),
        (ExceptionGroup("x", [ValueError(), ExceptionGroup("y", [OSError(), KeyError()])]), False),
        (nested(ValueError(), 5_000), True),
        (nested(TypeError(), 5_000), False),
        (HostileMark(), False),
        (HostileGroup("x", [ValueError()]), False),
        (Bottomless("x", [ValueError()]), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_final_is_what_is_of_a_class_or_says_so(error, final):
    """An error of a listed class, a marked one and a group of only such errors are final; an unreadable one is not."""
    assert is_final(error, CLASSES) is final


def test_a_cause_does_not_count():
    """The cause of an error does not make it final: the handler chose to raise another error."""
    error = OSError()
    error.__cause__ = ValueError()
    assert not is_final(error, CLASSES)


def test_a_group_can_be_named_itself():
    """The class of an exception group can be listed, too."""
    assert is_final(ExceptionGroup("x", [OSError()]), (ExceptionGroup,))
    assert not is_final(OSError(), ())


@pytest.mark.parametrize("wrong", ["ValueError", ValueError(), (ValueError, int), (ValueError, "x"), 3, None])
def test_wrong_classes_are_refused(wrong):
    """A value that is not an exception class raises ConfigError with the option's name."""
    with pytest.raises(ConfigError) as caught:
        checked_no_retry(wrong)
    assert caught.value.option == "no_retry"


def test_one_class_and_any_collection_are_taken():
    """One class, a list, a set and an empty tuple are accepted."""
    assert (
        checked_no_retry(ValueError)
        == checked_no_retry([ValueError])
        == checked_no_retry({ValueError})
        == (ValueError,)
    )
    assert checked_no_retry(()) == ()
