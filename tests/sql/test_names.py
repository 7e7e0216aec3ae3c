"""Names that the server accepts: people can type and see them, and the pages find them again."""

import unicodedata

import psycopg
import pytest

from support.database import Connection, one
from tallybook._model.options import check_name
from tallybook.errors import ConfigError


def in_python(name: str) -> bool:
    try:
        check_name("queue", name, 64)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("shape", ["{}mail", "mail{}", "ma{}il"])
def test_sql_and_python_refuse_the_same_characters(db: Connection, shape: str) -> None:
    """S5-13: SQL and Python accept the same names; a page that strips an accepted name leaves it unchanged."""

    def in_sql(db: Connection, names: list[str]) -> list[bool]:
        query = (
            "select array(select tallybook._is_visible(n) from unnest(%s::text[]) with ordinality u(n, i) order by i)"
        )
        return list(one(db, query, names))

    # The ranges of Unicode with white space, control characters and invisible characters, and their neighborhood.
    names = [
        shape.format(chr(code))
        for first, last in [(1, 0x33FF), (0xFB00, 0x111FF), (0x13400, 0x1345F), (0x1BC80, 0x1BCAF), (0x1D160, 0x1D18F),
                            (0xE0000, 0xE01FF), (0x10FFFF, 0x10FFFF)]
        for code in range(first, last + 1)
    ]  # fmt: skip
    taken = in_sql(db, names)
    assert [in_python(name) for name in names] == taken
    kept = [name for name, ok in zip(names, taken, strict=True) if ok]
    assert [name for name in kept if name.strip() != name] == []
    assert [name for name in kept if {unicodedata.category(c) for c in name} & {"Cc", "Cf", "Zl", "Zp"}] == []
    assert len(kept) > 0.9 * len(names)


@pytest.mark.parametrize(
    "name", ["mail", "a b", "Zürich", "\u90f5\u4fbf", "\u2709\ufe0f", "a/b?c=%20#d", "a\"b'c", "<b>"]
)
def test_what_people_type_is_taken(db: Connection, name: str) -> None:
    """A name may have letters of any script, spaces inside, emoji and punctuation."""
    assert in_python(name)
    db.execute("select tallybook.enqueue(%s, %s)", [name, name])


@pytest.mark.parametrize(("name", "shown"), [
    ("\u00a0mail", '"<U+A0>mail"'), ("\u2028mail", '"<U+2028>mail"'), ("ma\u200bil", '"ma<U+200B>il"'),
    ("mail\U000e0041", '"mail<U+E0041>"'),
])  # fmt: skip
def test_what_nobody_sees_is_refused_and_shown(db: Connection, name: str, shown: str) -> None:
    """A name that begins with a no-break space or has an invisible character is refused; the error shows its code."""
    calls = [
        "enqueue(%s, 't')", "enqueue('q', %s)", "queue_set(%s)",
        "enqueue_from('select ''{}''::jsonb as args', %s, 't')",
        "enqueue('q', 't', options => jsonb_build_object('limits', jsonb_build_array(%s::text)))",
        "enqueue('q', 't', options => jsonb_build_object('fair_key', %s::text))", "worker_start('w', array[%s])",
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(
            psycopg.Error, match="no control or invisible characters and no space at its ends"
        ) as refused:
            db.execute(f"select tallybook.{call}".encode(), [name])
        assert refused.value.sqlstate == "TB005" and shown in str(refused.value)
    assert db.execute("select count(*) from tallybook.job").fetchone() == (0,)
