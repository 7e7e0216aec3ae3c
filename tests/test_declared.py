"""Verbs between Python and SQL: each declaration fits its function, and nothing is called that is not declared."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import tallybook
from conftest import Connection
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
    """All of the package, by module and name."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        if "Declared(" in path.read_text():
            name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
            module = vars(import_module(name))
            found.update({f"{name}.{key}": one for key, one in module.items() if isinstance(one, Declared)})
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
        if name not in real:
            found.append(f"there is no {what} {name}".strip())
        elif row != (real[name],):
            found.append(f"{what} {name} is {real[name]}, not {kind}")
    return found


def test_each_declaration_fits_its_function(db: Connection) -> None:
    """Each function is there, with these parameters, types, order, defaults and columns."""
    wrong = {name: found for name, one in declarations().items() if (found := problems(db, one))}
    assert wrong == {}
    assert len(declarations()) > 20


def test_the_server_understands_each_statement(db: Connection) -> None:
    """What is rendered, for producers and for workers, is SQL that it can plan."""
    for name, one in declarations().items():
        plan: Any = f"explain {one.sql}"
        assert db.execute(plan, one.nulls).fetchall(), name
        plan = f"explain {one.worker(dialect='pyformat')}"
        assert db.execute(plan, one.nulls).fetchall(), name


@pytest.mark.parametrize(
    ("signature", "problem"),
    [
        ("cancle(job_id bigint) -> text", "there is no function cancle"),
        ("cancel(job bigint) -> text", "there is no parameter job"),
        ("cancel(job_id int) -> text", "parameter job_id is bigint, not int"),
        ("cancel(reason text) -> text", "job_id has no default"),
        ("cancel(reason text, job_id bigint) -> text", "the parameters are in another order"),
        ("cancel(job_id bigint) -> boolean", "result  is text, not boolean"),
        ("cancel(job_id bigint) -> row (state text)", "there is no column state"),
        ("retry_jobs(jobs bigint[]) -> text", "there is no result"),
        ("retry_jobs(jobs bigint[]) -> rows (job_id int)", "column job_id is bigint, not int"),
        ("cancel_many(queue text) -> rows (cancelled int)", "it returns no rows"),
    ],
)
def test_a_wrong_declaration_is_found(db: Connection, signature: str, problem: str) -> None:
    """The negative control: each kind of mistake has its own words."""
    assert problem in problems(db, Declared(signature))


def test_a_declaration_that_is_none_is_refused() -> None:
    """A text that is no signature raises where it is used, and so does a value without a parameter."""
    with pytest.raises(ValueError, match="declares no function"):
        _ = Declared("cancel").sql
    with pytest.raises(TypeError, match="cancel has no job"):
        Declared("cancel(job_id bigint) -> text").call(str, job=1)


def test_each_dialect() -> None:
    """One declaration, rendered for all drivers and for psycopg; an expression may name its values more than once."""
    one = Declared(
        "f(a text, b int, c timestamptz, d boolean) -> int", c="coalesce({c}, now() + {e:interval})", d="true"
    )
    cast = "coalesce(cast(cast(%(c)s as text) as timestamptz), now() + cast(cast(%(e)s as text) as interval))"
    assert one.sql == (
        f"select tallybook.f(a => cast(%(a)s as text), b => cast(cast(%(b)s as text) as int), c => {cast}, d => true)"
    )
    assert one.worker(dialect="dollar") == (
        "select tallybook.f(a => $1::text, b => $2::int, c => coalesce($3::timestamptz, now() + $4::interval), d => true)"
    )
    assert one.called("order").startswith("tallybook.f(a => %s::text, b => %s::int, ")
    assert one.call(int, a="x", b=2, e=None).params == {"a": "x", "b": "2", "c": None, "e": None}
    assert Declared("g(a text[]) -> rows (b int) order by r.b").sql == (
        "select cast(coalesce(json_agg(r order by r.b), '[]') as text)"
        " from tallybook.g(a => cast(cast(%(a)s as text) as text[])) as r"
    )


BY_HAND: dict[str, tuple[set[str], str]] = {
    # pending
    "_cli/queue.py": ({"counts"}, "not yet"),
    "_cli/subject.py": ({"subjects"}, "not yet"),
    "_db/doctor.py": ({"doctor"}, "not yet"),
    "_db/ends.py": ({"cancel_running", "complete", "complete_many", "fail", "snooze"}, "not yet"),
    "_db/numbers.py": ({"backlog", "counts"}, "not yet"),
    "_db/providers.py": ({"provider_resolve"}, "not yet"),
    "_db/subjects.py": (
        {"subject_append", "subject_forget", "subject_move", "subject_push", "subject_upsert", "subjects"},
        "not yet",
    ),
    "_db/top.py": ({"running"}, "not yet"),
    "_upkeep/concurrency.py": ({"concurrency_release"}, "not yet"),
    "_upkeep/fairness.py": ({"fair_release"}, "not yet"),
    "_upkeep/fold.py": ({"fold"}, "not yet"),
    "_upkeep/loop.py": ({"upkeep_look"}, "not yet"),
    "_upkeep/parents.py": ({"parents_resolve"}, "not yet"),
    "_upkeep/promote.py": ({"promote"}, "not yet"),
    "_upkeep/prune.py": ({"prune"}, "not yet"),
    "_upkeep/rebase.py": ({"rebase"}, "not yet"),
    "_upkeep/rescue.py": ({"rescue"}, "not yet"),
    "_worker/claimer.py": ({"admit", "claim", "claimed_jobs"}, "not yet"),
    "_worker/doubtful_ends.py": ({"ended", "fail"}, "not yet"),
    "_worker/finisher.py": (
        {"cancel_running", "complete_many", "crash", "fail", "move", "snooze", "unclaim"},
        "not yet",
    ),
    "_worker/heartbeat.py": ({"renew", "worker_start", "worker_stop"}, "not yet"),
    "_worker/sleeper.py": ({"listen_begin", "listen_end"}, "not yet"),
    "_worker/verbs.py": ({"checkpoint", "checkpoint_of", "limit_take", "progress", "rate_limit_push"}, "not yet"),
    "_worker/worker.py": ({"fold", "worker_stop"}, "not yet"),
    "extra/dashboard/bulk_actions.py": ({"state"}, "not yet"),
    "extra/dashboard/pages/dead.py": ({"dead_letters"}, "not yet"),
    "extra/dashboard/pages/job.py": ({"state"}, "not yet"),
    "extra/dashboard/pages/limits.py": ({"breaker_keys", "concurrency_keys", "fair_keys", "rate_keys"}, "not yet"),
    "extra/dashboard/pages/overview.py": ({"completed_since"}, "not yet"),
    "extra/dashboard/pages/schedules.py": ({"state"}, "not yet"),
    "extra/dashboard/pages/workers.py": ({"running"}, "not yet"),
    # end pending
}
"""Modules that call public functions without a declaration: which, and why. This list only shrinks."""


def test_no_call_is_written_by_hand(db: Connection) -> None:
    """No text of the package calls a public function by itself, but for a short list."""
    public = {
        row[0] for row in db.execute("select proname from pg_proc where pronamespace = 'tallybook'::regnamespace")
    }
    found = {}
    for path in SOURCE.rglob("*.py"):
        texts = "\n".join(_texts(ast.parse(path.read_text())))
        if named := public.intersection(re.findall(r"\btallybook\.([a-z]\w*)\s*\(", texts)):
            found[str(path.relative_to(SOURCE))] = named
    assert found == {name: named for name, (named, _) in BY_HAND.items()}


def _texts(tree: ast.AST) -> Iterator[str]:
    """The texts of a module, its docstrings apart."""
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value
