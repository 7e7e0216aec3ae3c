"""A task's signature: the binding of calls, and the call of a handler with stored args.

Args are stored by parameter name, as one JSON object. Only names matter, so that SQL producers can enqueue, too. Hence
`*args` is refused, and a positional-only parameter is bound and called by position but stored under its name. Defaults
are not stored: a job enqueued without `lang` runs with the default of the code that runs it.

The worker supplies leading parameters that `is_special` recognizes by their annotation (a Context, a transaction). They
are not part of the args, and come first in the call: `handler(*specials, *positional, **named)`.

Nothing is resolved at import: annotations are read at the first bind or load, so they may refer to later definitions.
`inspect.Signature.bind` takes 2 to 4 us per call, so the binding is done by hand here.
"""

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import cached_property
from itertools import takewhile
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from tallybook._model.options import as_option
from tallybook._model.payload import Convert, Unfit
from tallybook.errors import PayloadError, SignatureError

_EMPTY = inspect.Parameter.empty
_NEVER_NONE = (bool, int, float, str, list, dict, Decimal, UUID, datetime, date, time, timedelta)
"""Annotations for which a call with None is refused: the id of a row that was not flushed is such a None."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """The data for bind and load, computed once."""

    specials: tuple[object, ...]  # annotations of the leading parameters that the worker supplies
    by_position: tuple[str, ...]  # names that a call may pass by position, in order
    only_position: tuple[inspect.Parameter, ...]
    by_name: frozenset[str]  # names that a call may pass by name
    names: frozenset[str]  # all names that args may have, except those of `**kwargs`
    required: frozenset[str]
    open: bool  # has **kwargs: any other name is accepted
    closed_to: frozenset[str]  # names that **kwargs cannot accept, because a parameter has them
    converters: tuple[tuple[str, Convert], ...]
    extra: Convert | None  # for the values of **kwargs
    shown: str  # like "(user_id, *, lang)", for messages
    never_none: tuple[tuple[str, type], ...]  # parameters whose annotation is one of _NEVER_NONE


def _shown(parameters: list[inspect.Parameter]) -> str:
    # Without annotations and defaults: the repr of a default is the user's code, and may be long or secret.
    short = [p.replace(annotation=_EMPTY, default=p.default if p.default is _EMPTY else ...) for p in parameters]
    return str(inspect.Signature(short)).replace("=Ellipsis", "=...")


class ArgsModel:
    """The args of one task, from its function. Cheap to create; the work is done at first use.

    `is_special(annotation)` returns whether the worker supplies a leading parameter with this annotation.
    `check_specials` receives these annotations, and raises SignatureError if they cannot be combined. Raises
    SignatureError at once for `*args`, and at first use for an annotation that cannot be resolved or a special
    parameter that does not come first.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        task: str,
        is_special: Callable[[Any], bool] = lambda annotation: False,
        check_specials: Callable[[Sequence[Any]], object] = lambda annotations: None,
    ) -> None:
        self.function = function
        self.task = task
        self._is_special = is_special
        self._check_specials = check_specials
        code = getattr(function, "__code__", None)
        if code is not None and code.co_flags & inspect.CO_VARARGS and not hasattr(function, "__wrapped__"):
            self._refuse_var_positional()

    @property
    def specials(self) -> tuple[object, ...]:
        """The annotations of the leading parameters that the worker supplies, in order; empty for most tasks."""
        return self._plan.specials

    @property
    def names(self) -> frozenset[str]:
        """The names that args may have; with `**kwargs` any others as well."""
        return self._plan.names

    @property
    def is_open(self) -> bool:
        """Whether args may have names beyond `names`, because the function has `**kwargs`."""
        return self._plan.open

    def described(self) -> list[tuple[inspect.Parameter, Any]]:
        """Return each parameter for an arg, with its resolved annotation (Parameter.empty: none), in order."""
        parameters = list(inspect.signature(self.function).parameters.values())[len(self.specials) :]
        hints = self._hints([parameter.name for parameter in parameters])
        return [(parameter, hints.get(parameter.name, _EMPTY)) for parameter in parameters]

    @cached_property
    def returns(self) -> Any:
        """The annotation of the function's result; Any if there is none that can be resolved."""
        return self._hints(["return"]).get("return", Any)

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Return the args of a call by parameter name, without defaults.

        Raises SignatureError, which names the parameter, for a call that Python would refuse, too; PayloadError for a
        None that the annotation does not allow.
        """
        plan = self._plan
        if len(args) <= len(plan.by_position):
            bound: dict[str, object] = dict(zip(plan.by_position, args, strict=False))
            fits = True
            for name, value in kwargs.items():
                if name in bound or not (name in plan.by_name or (plan.open and name not in plan.closed_to)):
                    fits = False
                    break
                bound[name] = value
            if fits and plan.required <= bound.keys():
                for name, kind in plan.never_none:
                    if bound.get(name, kind) is None:
                        raise PayloadError(f"$.{name}", f"None, but its annotation is {kind.__name__}", task=self.task)
                return bound
        raise SignatureError(self.task, self._misfit(args, kwargs))

    def bind_named(self, args: Mapping[str, object]) -> dict[str, object]:
        """Return the args of a call that names all of them, positional-only ones too. SignatureError as in `bind`."""
        first = [p.name for p in self._plan.only_position]
        given = [name for name in first if name in args]
        if given != first[: len(given)]:  # a positional argument cannot be left out before another
            return self.bind((), args)
        return self.bind([args[name] for name in given], {n: args[n] for n in args if n not in given})

    def load(self, args: object) -> tuple[list[object], dict[str, object]]:
        """Return stored args as (positional, named), converted by annotation; they follow the handler's specials.

        `args` is the JSON object as read, and may be returned unchanged. Raises PayloadError, with the path, for an
        unknown or missing name and for a value that does not fit its annotation.
        """
        plan = self._plan
        if type(args) is not dict:
            raise self._unreadable("$", f"expected an object with the args by name, not {type(args).__name__}")
        names = args.keys()
        if not plan.required <= names:
            missing = ", ".join(map(repr, sorted(plan.required - names)))
            raise self._unreadable("$", f"{missing} is missing; the task takes {plan.shown}")
        if not names <= plan.names and (
            unknown := plan.closed_to & names - plan.names if plan.open else names - plan.names
        ):
            unfit = Unfit(f"the task has no parameter of this name; it takes {plan.shown}")
            unfit.at(min(unknown))
            raise self._unreadable(unfit.path, unfit.reason)
        if plan.converters or plan.extra:
            args = self._convert(args)
        if not plan.only_position:
            return [], args
        named = dict(args)
        # A missing one is passed as its default, because a later one may be present.
        return [named.pop(parameter.name, parameter.default) for parameter in plan.only_position], named

    @cached_property
    def _plan(self) -> _Plan:
        from tallybook._model.decoder import compile_decoder

        parameters = list(inspect.signature(self.function).parameters.values())
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            self._refuse_var_positional()
        hints = self._hints([parameter.name for parameter in parameters])

        def is_special(p: inspect.Parameter) -> bool:
            return p.kind is not p.VAR_KEYWORD and p.name in hints and self._is_special(hints[p.name])

        specials = list(takewhile(lambda p: p.kind is not p.KEYWORD_ONLY and is_special(p), parameters))
        rest = parameters[len(specials) :]
        for parameter in rest:
            if is_special(parameter):
                raise SignatureError(self.task, f"the worker supplies parameter {parameter.name!r}: put it first")
        self._check_specials([hints[parameter.name] for parameter in specials])
        named = [parameter for parameter in rest if parameter.kind is not parameter.VAR_KEYWORD]
        extra = next((parameter for parameter in rest if parameter.kind is parameter.VAR_KEYWORD), None)
        only_position = tuple(parameter for parameter in named if parameter.kind is parameter.POSITIONAL_ONLY)
        converters = [(p.name, compile_decoder(hints.get(p.name, Any), task=self.task)) for p in named]
        names = frozenset(parameter.name for parameter in named)
        return _Plan(
            specials=tuple(hints.get(parameter.name) for parameter in specials),
            by_position=tuple(parameter.name for parameter in named if parameter.kind is not parameter.KEYWORD_ONLY),
            only_position=only_position,
            by_name=names - {parameter.name for parameter in only_position},
            names=names,
            required=frozenset(parameter.name for parameter in named if parameter.default is _EMPTY),
            open=extra is not None,
            closed_to=frozenset(p.name for p in (*specials, *only_position)),
            converters=tuple((name, convert) for name, convert in converters if convert is not None),
            extra=compile_decoder(hints.get(extra.name, Any), task=self.task) if extra else None,
            shown=_shown(rest),
            never_none=tuple(
                (p.name, hints[p.name]) for p in named if hints.get(p.name) in _NEVER_NONE and p.default is not None
            ),
        )

    def _hints(self, names: list[str]) -> dict[str, Any]:
        function = inspect.unwrap(self.function)
        try:
            return typing.get_type_hints(function)
        except Exception as error:
            whole = error
        # One annotation is at fault; only a parameter's matters, not that of the result.
        hints: dict[str, Any] = {}
        try:
            annotations = dict(function.__annotations__)
        except Exception as error:
            raise SignatureError(self.task, f"its annotations cannot be resolved: {error}") from whole
        for name in names:
            if name in annotations:
                one = SimpleNamespace(__annotations__={name: annotations[name]})
                try:
                    hints.update(typing.get_type_hints(one, globalns=getattr(function, "__globals__", {})))
                except Exception as error:
                    what = f"the annotation {annotations[name]!r} of parameter {name!r} cannot be resolved: {error}"
                    hint = "import it at the top of the module, not under TYPE_CHECKING"
                    raise SignatureError(self.task, f"{what}; {hint}") from None
        return hints

    def _refuse_var_positional(self) -> None:
        raise SignatureError(self.task, "*args is not supported: args are stored by name; use a list instead")

    def _convert(self, args: dict[str, object]) -> dict[str, object]:
        plan, args, name = self._plan, dict(args), ""
        try:
            for name, convert in plan.converters:
                if name in args:
                    args[name] = convert(args[name])
            if plan.extra:
                for name in args.keys() - plan.names:
                    args[name] = plan.extra(args[name])
        except Unfit as unfit:
            unfit.at(name)
            raise self._unreadable(unfit.path, unfit.reason) from None
        return args

    def _unreadable(self, path: str, reason: str) -> PayloadError:
        return PayloadError(path, reason, task=self.task, verb="read")

    def _misfit(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        plan = self._plan
        takes = f"; it takes {plan.shown}"
        if len(args) > len(plan.by_position):
            return f"{len(args)} positional arguments, but at most {len(plan.by_position)} fit{takes}"
        given = set(plan.by_position[: len(args)])
        for name in kwargs:
            if name in plan.closed_to:
                kind = "is positional-only" if name in plan.names else "is supplied by the worker"
                return f"parameter {name!r} {kind}, it cannot be passed by name{takes}"
            if name in given:
                return f"argument {name!r} is passed twice, by position and by name{takes}"
            if name not in plan.by_name and not plan.open:
                hint = as_option(name)
                return f"unexpected argument {name!r}{takes}{'' if hint is None else f'. {hint}'}"
        missing = plan.required - given - set(kwargs)
        names = [name for name in dict.fromkeys((*plan.by_position, *sorted(plan.by_name))) if name in missing]
        return f"missing {', '.join(map(repr, names))}{takes}"
