"""Verbs between Python and SQL: each declaration fits its function, and only declared functions are called."""

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import tallybook
from support.database import Connection
from tallybook._db.declared import Declared

SOURCE = Path(tallybook.__file__).parent

_FUNCTION = """\
select p.proretset, format_type(p.prorettype, null), p.pronargs - p.pronargdefaults as needed, a.name, a.mode, a.type
  from pg_proc p
  left join lateral (
    select n.name, coalesce(m.mode::text, 'i') as mode, format_type(t.oid, null) as type, t.place
      from unnest(coalesce(p.proallargtypes, p.proargtypes::oid[])) with ordinality t(oid, place)
      left join unnest(p.proargnames) with ordinality n(name, place) using (place)
      left join unnest(p.proargmodes) with ordinality m(mode, place) using (place)) a on true
 where p.pronamespace = 'tallybook'::regnamespace and p.proname = %s order by a.place"""


def declarations() -> dict[str, Declared]:
    """All declarations of the package, by module and name."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        if "Declared(" in path.read_text():
            name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
            for key, value in vars(import_module(name)).items():
                ones = value if isinstance(value, dict) else {"": value}
                found.update({f"{name}.{key} {one}": ones[one] for one in ones if isinstance(ones[one], Declared)})
    return found


def problems(db: Connection, one: Declared) -> list[str]:
    """What is wrong with a declaration, by pg_proc."""
    rows = db.execute(_FUNCTION, (one.name,)).fetchall()
    if not rows:
        return [f"there is no function {one.name}"]
    returns_set, returned, needed = rows[0][:3]
    inputs = [(name, kind) for *_, name, mode, kind in rows if mode in ("i", "b")]
    outputs = {name: kind for *_, name, mode, kind in rows if mode in ("o", "b", "t")}
    places = {name: place for place, (name, _) in enumerate(inputs)}
    found = [f"{name} is not sent" for name in one.sent if name not in one.params]
    found += [f"there is no parameter {name}" for name in one.params if name not in places]
    found += _types(db, "parameter", {name: one.params[name] for name in one.params if name in places}, dict(inputs))
    order = [places[name] for name in one.params if name in places]
    if order != sorted(order):
        found.append("the parameters are in another order")
    found += [f"{name} has no default" for name, _ in inputs[:needed] if name not in one.params]
    if one.kind not in ("row", "rows"):
        return found + _types(db, "result", {"": one.kind}, {"": returned} if not returns_set and not outputs else {})
    if one.kind == "rows" and not returns_set:
        found.append("it returns no rows")
    return found + _types(db, "column", one.columns, outputs)


def _types(db: Connection, what: str, said: dict[str, str], real: dict[str, str]) -> list[str]:
    found = []
    for name, kind in said.items():
        row = db.execute("select format_type(to_regtype(%s), null)", (kind,)).fetchone()
        label = f"{what} {name}".strip()
        if name not in real:
            found.append(f"there is no {label}")
        elif row != (real[name],):
            found.append(f"{label} is {real[name]}, not {kind}")
    return found


def test_each_declaration_fits_its_function(db: Connection) -> None:
    """Each declared function exists, with these parameters, types, order, defaults and columns."""
    wrong = {name: found for name, one in declarations().items() if (found := problems(db, one))}
    assert wrong == {}
    assert len(declarations()) > 100


@pytest.mark.servers
def test_the_server_understands_each_statement(db: Connection) -> None:
    """The server can plan each rendered statement, for producers and for workers."""
    for name, one in declarations().items():
        plan: Any = f"explain {one.sql}"
        assert db.execute(plan, one.nulls).fetchall(), name
        plan = f"explain {one.select('*', 'pyformat')}"
        assert db.execute(plan, one.nulls).fetchall(), name


@pytest.mark.parametrize(
    ("signature", "problem"),
    [
        ("cancle(job_id bigint) -> text", "there is no function cancle"),
        ("cancel(job bigint) -> text", "there is no parameter job"),
        ("cancel(job_id int) -> text", "parameter job_id is bigint, not int"),
        ("cancel(reason text) -> text", "job_id has no default"),
        ("cancel(reason text, job_id bigint) -> text", "the parameters are in another order"),
        ("cancel(job_id bigint) -> boolean", "result is text, not boolean"),
        ("cancel(job_id bigint) -> row (state text)", "there is no column state"),
        ("retry_jobs(jobs bigint[]) -> text", "there is no result"),
        ("retry_jobs(jobs bigint[]) -> rows (job_id int)", "column job_id is bigint, not int"),
        ("cancel_many(queue text) -> rows (cancelled int)", "it returns no rows"),
    ],
)
def test_a_wrong_declaration_is_found(db: Connection, signature: str, problem: str) -> None:
    """Negative control: each kind of mistake has its own message."""
    assert problem in problems(db, Declared(signature))


def test_a_declaration_that_is_none_is_refused() -> None:
    """A string that is not a signature raises when it is used, and so does a value of no parameter."""
    with pytest.raises(ValueError, match="not a declaration of a function"):
        _ = Declared("cancel").sql
    with pytest.raises(TypeError, match="cancel takes job_id, not job"):
        Declared("cancel(job_id bigint) -> text").call(str, job=1)


def test_each_dialect() -> None:
    """One declaration, rendered for all drivers and for psycopg; an expression may use several values."""
    one = Declared(
        "f(a text, b int, c timestamptz, d boolean) -> int", c="coalesce({c}, now() + {e:interval})", d="true"
    )
    cast = "coalesce(cast(cast(%(c)s as text) as timestamptz), now() + cast(cast(%(e)s as text) as interval))"
    assert one.sql == (
        f"select tallybook.f(a => cast(%(a)s as text), b => cast(cast(%(b)s as text) as int), c => {cast}, d => true)"
    )
    assert one.select("*", "dollar") == (
        "select * from tallybook.f(a => $1::text, b => $2::int, c => coalesce($3::timestamptz, now() + $4::interval),"
        " d => true)"
    )
    assert one.called("order").startswith("tallybook.f(a => %s::text, b => %s::int, ")
    assert one.call(int, a="x", b=2, c=None, e=None).params == {"a": "x", "b": "2", "c": None, "e": None}
    assert Declared("g(a text[]) -> rows (b int) order by r.b").sql == (
        "select cast(coalesce(json_agg(r order by r.b), '[]') as text)"
        " from tallybook.g(a => cast(cast(%(a)s as text) as text[])) as r"
    )


def test_no_call_is_written_by_hand(db: Connection) -> None:
    """No string of the package calls a function by hand, except for a short list without verbs."""
    # The modules that do: which functions, and why. This list only shrinks.
    by_hand = {
        "_db/doctor.py": ({"doctor"}, "asks whether there is such a function: no call"),
        "_db/ends.py": ({"_atomic"}, "a question without parameters, around each end"),
        "_db/migrate.py": ({"_roles_apply"}, "a line of the script that installs it"),
        "_db/sql_lines.py": ({"_rights"}, "makes this function"),
        "_db/roles.py": (
            {"_roles_forget", "_roles_use"},
            "run by the owner, with roles that are put in as names",
        ),
        "_db/top.py": ({"_failures_said", "_horizon", "_oldest_of"}, "parts of one large statement"),
        "_worker/life/heartbeat.py": ({"_on_timeline", "_timeline"}, "beside the verb, in its statement"),
        "testing.py": ({"_wake"}, "beside a table, for the clock of tests"),
    }
    rows = db.execute("select proname from pg_proc where pronamespace = 'tallybook'::regnamespace")
    there = {row[0] for row in rows}
    found = {
        str(path.relative_to(SOURCE)): named
        for path in SOURCE.rglob("*.py")
        if (named := there.intersection(called_by(path.read_text())))
    }
    assert found == {name: named for name, (named, _) in by_hand.items()}


def called_by(source: str) -> set[str]:
    """The functions that the strings of a module call, except for its docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    told = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in told]
    return {name for text in texts for name in re.findall(r"\btallybook\.(\w+)\s*\(", text)}


def test_a_call_that_is_written_by_hand_is_found() -> None:
    """Negative control: a call in a string, an f-string or a default is found, but not in a docstring."""
    source = '''"""select tallybook.shown(1)"""
A = "select tallybook.plain(1)"
def f(b=("x", f"select {A} from tallybook.joined ({A})")): ...
'''
    assert called_by(source) == {"plain", "joined"}
