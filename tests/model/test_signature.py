"""Converting calls to args, and args to calls (signature.py)."""

from __future__ import annotations

from datetime import date, datetime
from typing import TYPE_CHECKING
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tallybook._model.signature import ArgsModel
from tallybook.errors import PayloadError, SignatureError

if TYPE_CHECKING:
    from nowhere import Missing  # type: ignore[import-not-found]


class Context:
    """Stand-in for the real Context."""


def model(function):
    return ArgsModel(function, task="mail.send", is_special=lambda annotation: annotation is Context)


def send(user_id: int, *, lang: str = "en"): ...
def sync(ctx: Context, since: date, until: date | None = None): ...
def by_place(a: int, b: date = date(2026, 1, 1), /, c: int = 3): ...
def open_to_all(kind: str, /, **rest: date): ...
def later(row: Later): ...


class Later(dict): ...


def test_args_are_bound_by_name_without_defaults():
    """A call becomes a dict by parameter name, without defaults: the code that runs the job sets them."""
    assert model(send).bind((42,), {}) == {"user_id": 42}
    assert model(send).bind((), {"lang": "de", "user_id": 1}) == {"user_id": 1, "lang": "de"}


def test_leading_context_is_not_part_of_the_args():
    """The worker supplies a first parameter annotated Context, even if the annotation is text."""
    assert model(sync).specials == (Context,)
    assert model(sync).bind((date(2026, 1, 1),), {}) == {"since": date(2026, 1, 1)}
    assert model(send).specials == ()


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "message"),
    [
        (send, (), {}, "missing 'user_id'; it takes (user_id, *, lang=...)"),
        (send, (1, "de"), {}, "2 positional arguments, but at most 1 fit"),
        (send, (1,), {"user_id": 2}, "'user_id' is passed twice"),
        (send, (1,), {"langg": "de"}, "unexpected argument 'langg'; it takes (user_id, *, lang=...)"),
        (sync, (), {"ctx": 1, "since": 2}, "'ctx' is supplied by the worker"),
        (by_place, (), {"a": 1}, "'a' is positional-only"),
        (by_place, (), {}, "missing 'a'"),
        (open_to_all, ("x",), {"kind": 1}, "'kind' is positional-only"),
    ],
)
def test_calls_that_do_not_fit_are_refused_where_they_are_made(function, args, kwargs, message):
    """F31: a call that Python would refuse raises SignatureError at enqueue, with task and parameter."""
    with pytest.raises(SignatureError) as caught:
        model(function).bind(args, kwargs)
    assert str(caught.value).startswith("task 'mail.send': ")
    assert message in str(caught.value)


@given(
    st.sampled_from(
        [
            lambda a, b=2: locals(),
            lambda a, /, b, *, c: locals(),
            lambda a, *, c=1, **rest: locals(),
            lambda: {},
            lambda a=1, b=2, /, c=3: locals(),
        ]
    ),
    st.tuples(st.lists(st.integers(), max_size=4), st.dictionaries(st.sampled_from("abcxyz"), st.integers())),
)
def test_bind_accepts_what_python_accepts(function, call):
    """F31: bind refuses every call that Python would refuse; any other call is the same after bind and load, I13."""
    args, kwargs = call
    try:
        expected = function(*args, **kwargs)
    except TypeError:
        with pytest.raises(SignatureError):
            model(function).bind(args, kwargs)
        return
    bound = model(function).bind(args, kwargs)
    assert len(bound) == len(args) + len(kwargs)
    positional, named = model(function).load(bound)
    assert function(*positional, **named) == expected


def test_none_is_refused_where_the_annotation_does_not_allow_it():
    """None for an int is refused; it is accepted if the annotation or the default allows it, or without annotation."""

    def pays(account: int, note: str = None, at: date | None = None, *, rest=None): ...  # noqa: RUF013

    assert model(pays).bind((7, None, None), {"rest": None}) == {"account": 7, "note": None, "at": None, "rest": None}
    for args, kwargs in (((None,), {}), ((), {"account": None})):
        with pytest.raises(PayloadError, match=r"\$\.account: None, but its annotation is int"):
            model(pays).bind(args, kwargs)


def test_load_converts_as_annotated():
    """Stored args are converted to the annotated types; args that were not stored are left to the defaults."""
    assert model(sync).load({"since": "2026-01-02"}) == ([], {"since": date(2026, 1, 2)})
    assert model(open_to_all).load({"kind": "x", "a": "2026-01-02"}) == (["x"], {"a": date(2026, 1, 2)})


def test_positional_only_parameters_are_called_by_position():
    """A positional-only parameter is stored by name; if SQL leaves one out, its default is passed."""
    assert model(by_place).load({"a": 1, "c": 5}) == ([1, date(2026, 1, 1)], {"c": 5})


def test_plain_args_are_passed_through():
    """Args that need no conversion are not even copied."""
    args = {"user_id": 1}
    assert model(send).load(args)[1] is args


@pytest.mark.parametrize(
    ("function", "args", "path", "reason"),
    [
        (send, {}, "$", "'user_id' is missing; the task takes (user_id, *, lang=...)"),
        (send, {"user_id": 1, "old name": 2}, '$["old name"]', "no parameter of this name"),
        (send, [1], "$", "expected an object with the args by name, not list"),
        (send, None, "$", "an object"),
        (sync, {"since": "x"}, "$.since", "is not a date"),
        (sync, {"since": "2026-01-02", "ctx": 1}, "$.ctx", "no parameter of this name"),
        (open_to_all, {"kind": "x", "a": 5}, "$.a", "expected a date as text"),
    ],
)
def test_stored_args_that_do_not_fit_are_refused(function, args, path, reason):
    """F31: args of another version of the code raise PayloadError with the name and the parameters of the task."""
    with pytest.raises(PayloadError) as caught:
        model(function).load(args)
    assert caught.value.path == path
    assert reason in caught.value.reason
    assert "cannot be read" in str(caught.value)


def test_open_task_refuses_the_names_of_what_the_worker_gives():
    """**kwargs accepts any name except one of a parameter that the worker supplies."""

    def handler(ctx: Context, **rest): ...

    with pytest.raises(PayloadError, match="no parameter of this name"):
        model(handler).load({"ctx": 1})
    assert model(handler).load({"any": 1}) == ([], {"any": 1})


def test_var_positional_is_refused_at_definition():
    """*args has no names to store, so it is refused when the task is defined."""
    with pytest.raises(SignatureError, match="use a list instead"):
        model(lambda *ids: None)


def test_forward_references_are_resolved_at_first_use():
    """Annotations are resolved at first use, so they may name a class that is defined later."""
    assert model(later).bind(({},), {}) == {"row": {}}


def test_unresolvable_annotations_are_named():
    """An import under TYPE_CHECKING cannot be resolved; the error names the parameter and says what to do."""

    def handler(a: int, b: Missing): ...

    found = model(handler)
    with pytest.raises(SignatureError, match=r"'Missing' of parameter 'b' cannot be resolved.*not under TYPE_CHECKING"):
        _ = found.specials


def test_unresolvable_return_annotation_does_not_matter():
    """The return annotation is no part of the args, so it may be unknown at run time."""

    def handler(a: datetime) -> Missing: ...

    assert model(handler).names == {"a"}


def test_special_parameter_must_come_first():
    """A Context that is not the first parameter is refused; the error says what to do."""

    def handler(a: int, ctx: Context): ...

    with pytest.raises(SignatureError, match="the worker supplies parameter 'ctx': put it first"):
        _ = model(handler).specials


def test_defaults_are_never_printed():
    """Messages show dots for a default, which may be secret or have a failing repr."""

    class Secret:
        def __repr__(self):
            raise AssertionError

    def handler(a: UUID, key=Secret()): ...  # noqa: B008

    with pytest.raises(SignatureError, match=r"\(a, key=\.\.\.\)"):
        model(handler).bind((), {})
