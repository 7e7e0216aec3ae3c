"""Verbs between Python and SQL. Each function is declared once: its name, its parameters with their types, its result.

CANCEL = Declared("cancel(job_id bigint, reason text) -> text")

A program calls `CANCEL.call(str, job_id=42, reason=None)` and gets a pure value: `Call(verb, sql, params, row)`.
sync.py runs it on the user's own connection, on every driver, with any settings. Therefore:

- Every parameter is text or null, cast twice (`cast(cast(%(id)s as text) as bigint)`): the driver sends text, and the
  server parses it. This bypasses adapters and codecs that the user has registered for datetime, list or JSON. It also
  bypasses SQLAlchemy's type guesses, which turn an aware datetime into a timestamp without time zone.
- The result is one column of one row: a number, a text, or JSON as text, with instants in ISO 8601.
- The casts are `cast(... as ...)`, because `::` collides with SQLAlchemy's `:name`. Only parameters have percent signs.

Arrays are sent as PostgreSQL's array literal, which takes a fifth of the time of the drivers' list adaptation.

The method of an App's noun checks a verb's values and makes the Call; a verb without checks is a Simple, one that reads
a view is a View. Verbs that tasks or workers call, too, have a function in this folder.

A worker has its own psycopg connections: `CANCEL.worker` is a statement with `%s`, for values in the declared order.
tests/db/test_declared.py compares each declaration with pg_proc.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache, cached_property
from typing import Any, Generic, TypeAlias, TypeVar

from tallybook._db.texts import duration, text_array, utc
from tallybook._model.durations import format_duration
from tallybook._model.options import check_instant, check_name
from tallybook.errors import TallybookError, UnknownJob

T = TypeVar("T")
Value: TypeAlias = "str | int | bytes | timedelta | datetime | Sequence[str | None] | None"


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One verb with its values. `row` converts the only column of the only row to the caller's result."""

    verb: str
    sql: str
    params: Mapping[str, str | None]
    row: Callable[[Any], T]
    unknown: type[TallybookError] = UnknownJob  # the meaning of TB002 here: no such job, or no such queue


_SIGNATURE = re.compile(
    r"\s*(?P<name>\w+)\((?P<params>[^)]*)\)\s*-> (?:(?P<kind>rows?) \()?(?P<result>[^()]+)\)?(?P<order>.*)", re.S
)
_VALUE = re.compile(r"\{(\w+)(?::([^}]+))?\}")
_DIALECTS = {"dollar": "${place}::{kind}", "order": "%s::{kind}", "pyformat": "%({name})s::{kind}"}
_AS_TEXT = {
    "void": "select 0 from {} as r",
    "jsonb": "select cast({} as text)",
    "timestamptz": "select cast(to_json({}) as text)",
    "row": "select cast(to_json(r) as text) from {} as r",
    "rows": "select cast(coalesce(json_agg(r{order}), '[]') as text) from {} as r",
}


class Declared:
    """A function of the schema: "name(parameter type, ...) -> type", "-> row (column type, ...)", "-> rows (...) ...".

    Names before a type share it. A parameter that is left out has its default. If a parameter is not sent unchanged,
    `sent` has its expression: a constant, or with {name} for a value of that parameter's type, {name:type} for another
    type. The parameters of internal functions are named p_name; their values have the plain names. `unknown` is as in
    Call; `verb` is the name for people if it differs from the function's. Statements are rendered at their first use.
    """

    def __init__(
        self, signature: str, /, *, verb: str | None = None, unknown: type[TallybookError] = UnknownJob, **sent: str
    ) -> None:
        found = _SIGNATURE.fullmatch(signature)
        if found is None:
            raise ValueError(f"not a declaration of a function: {signature}")
        self.name, self.params, self.sent = found["name"], _columns(found["params"]), sent
        self.kind = found["kind"] or found["result"].strip()  # row, rows, or the type of a single value
        self.columns = _columns(found["result"]) if found["kind"] else {}  # those that are read, with their types
        self._order, self._verb, self._unknown = found["order"], verb, unknown

    @cached_property
    def sql(self) -> str:
        """The statement for producers: one row of one column."""
        return _AS_TEXT.get(self.kind, "select {}").format(self.called(), order=self._order)

    @cached_property
    def nulls(self) -> dict[str, str | None]:
        return dict.fromkeys(rendered(self.sql, "dollar")[1])

    def call(self, row: Callable[[Any], T], /, **values: Value) -> Call[T]:
        """Return the Call with a value for each parameter; no parameter can be left to its default by mistake."""
        params = {name: _text(value) for name, value in values.items()}
        if params.keys() != self.nulls.keys():
            raise TypeError(f"{self.name} takes {', '.join(self.nulls)}, not {', '.join(params)}")
        return Call(self._verb or self.name.removeprefix("_"), self.sql, params, row, self._unknown)

    def called(self, dialect: str = "text", **instead: str) -> str:
        """Return the call in SQL, with some arguments as other expressions than `sent`.

        Dialects: "text" for all drivers, which sends texts; for psycopg "order" %s, "pyformat" %(name)s, "dollar" $1.
        """
        places: dict[str, int] = {}

        def value(found: re.Match[str]) -> str:
            name = found[1]
            kind = found[2] or self.params.get(name) or self.params[f"p_{name}"]
            if dialect == "text":
                text = f"cast(%({name})s as text)"
                return text if kind == "text" else f"cast({text} as {kind})"
            return _DIALECTS[dialect].format(name=name, kind=kind, place=places.setdefault(name, len(places) + 1))

        sent = {name: f"{{{name.removeprefix('p_')}}}" for name in self.params} | self.sent | instead
        args = ", ".join(f"{name} => {_VALUE.sub(value, sent[name])}" for name in self.params)
        return f"tallybook.{self.name}({args})"

    @cached_property
    def worker(self) -> str:
        """The statement for a worker, with `%s`."""
        return self.select(", ".join(self.columns)) if self.columns else f"select {self.called('order')}"

    def select(self, columns: str, dialect: str = "order") -> str:
        """Return the same statement with these columns."""
        return f"select {columns} from {self.called(dialect)}"  # noqa: S608


class Simple(Declared, Generic[T]):
    """A verb that passes its values on: `cancel(42, None)` is its Call, with the values in order.

    Durations are timedeltas or text, and instants aware; others raise ConfigError. `row` is as in Call. `names` has the
    parameters that are names: the option in an error, and the most characters.
    """

    def __init__(
        self, signature: str, row: Callable[[Any], T], /, *, names: Mapping[str, tuple[str, int]] = {}, **declared: Any
    ) -> None:
        super().__init__(signature, **declared)
        self._row, self._names = row, names

    def __call__(self, *values: Value) -> Call[T]:
        given: dict[str, Any] = dict(zip(self.nulls, values, strict=True))
        for param, (option, longest) in self._names.items():
            check_name(option, given[param], longest)
        for param, value in given.items():
            if self.params.get(param) == "interval":
                given[param] = duration(param, value)
            elif self.params.get(param) == "timestamptz":
                check_instant(param, value)
                given[param] = utc(value)
        return self.call(self._row, **given)


@dataclass(frozen=True, slots=True)
class View(Generic[T]):
    """A verb that reads a view: `rates("mail")` is the Call for the rows with this value in `which`, `rates()` for all.

    Intervals, named in `seconds`, are read as numbers, because their format depends on the user's settings.
    """

    verb: str
    view: str
    row: Callable[[str], T]
    which: str = ""
    order: str = "r.name"
    seconds: Sequence[str] = ()

    def __call__(self, value: str | None = None) -> Call[T]:
        numbers = ", ".join(f"'{name}', extract(epoch from r.{name})" for name in self.seconds)
        rows = f"json_agg(to_jsonb(r) || jsonb_build_object({numbers}) order by {self.order})"
        sql = f"select cast(coalesce({rows}, '[]') as text) from tallybook.{self.view} as r"  # noqa: S608
        if not self.which:
            return Call(self.verb, sql, {}, self.row)
        where = f"where cast(%({self.which})s as text) is null or r.{self.which} = cast(%({self.which})s as text)"
        return Call(self.verb, f"{sql} {where}", {self.which: value}, self.row)


def _columns(listed: str) -> dict[str, str]:
    return {name: kind for one in listed.split(",") if one.strip() for *names, kind in [one.split()] for name in names}


def _text(value: Value) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return f"\\x{value.hex()}"
    if isinstance(value, timedelta):
        return format_duration(value)
    return text_array(value) if isinstance(value, (list, tuple)) else str(value).lower()  # true, false


_PLACEHOLDER = re.compile(r"%\((\w+)\)s")


@cache
def rendered(sql: str, style: str) -> tuple[str, tuple[str, ...]]:
    """Render `sql` for a driver, and return its names in order: "colon" :a, "dollar" $1."""
    names = tuple(dict.fromkeys(_PLACEHOLDER.findall(sql)))
    if style == "colon":
        return _PLACEHOLDER.sub(r":\1", sql), names
    return _PLACEHOLDER.sub(lambda match: f"${names.index(match[1]) + 1}", sql), names
