"""Dependencies of rooms, which are folders of the SQL. Lower rooms call few functions of the parts.

Parts name neither each other nor read or ops.
"""

import re
from collections import Counter
from collections.abc import Iterator
from importlib import resources
from itertools import pairwise
from pathlib import Path

from tallybook._db.migrate import migrations
from tallybook._db.sql_lines import PROFILES, commented

SQL = Path(str(resources.files("tallybook"))) / "sql"
MADE = re.compile(
    r"^create (?:or replace )?(?:function|view|table|type|sequence) tallybook\.(\w+)", re.MULTILINE | re.IGNORECASE
)
NAMED = re.compile(r"tallybook\.(\w+)")
LAYERS = ("checks", "core", "lookups", "unique_key", "control")
"""The rooms below the parts: each may name those before it."""
SEAMS = {
    "core": {
        "_amended": "an end: the next attempt has what a conflict of unique keys has changed",
        "_amendment_state": "a start: what a conflict of unique keys has changed",
        "_apply_amendments": "promote: jobs in line that were given another priority or time",
        "_claim_key": "a job with a unique key that comes in",
        "_crowd": "a start: whether a producer locks tasks instead of jobs",
        "_enqueue_on_dead": "a death: the job that its task names for that",
        "_forget_amendments": "rescue: changes of jobs that have ended",
        "_has_limits": "a claim, and a start that comes to its turn: whether there is a limit to ask",
        "_is_limited": "a claim: whether limits have to be asked before a job of it starts",
        "_limits_clock_back": "the server's clock has stepped back: turns and breakers",
        "_line_up": "a job that comes into line: its place among those with its order key",
        "_line_up_many": "many jobs that come into line: the same",
        "_pace": "promote: when a job that waits for a rate limit gets its turn",
        "_parent_ended": "an end: those that wait for this job look for it soon",
        "_register": "the start of a worker: what its tasks are",
        "_release": "an end: who is next of its order key",
        "_release_missed": "rescue: order keys whose release did not come through",
        "_schedules_clock_back": "the server's clock has stepped back: schedules",
        "_series_clock_back": "the server's clock has stepped back: series",
        "_subject_ended": "a death: what is to be known of a subject once it has ended",
        "_subjects_completed": "a completion: the next iteration of a subject",
        "_truncate_line": "the take of a truncate: what it meets ends",
        "limit_take": "a start: whether limits let it",
        "order_admit": "a start: whose turn it is among those with the order key",
        "postpone": "a start: the job was given a later time",
        "rebase": "the start of a worker: nobody meets the cursor of another cluster",
    },
    "unique_key": {
        "_raise_in_lines": "a raised priority of a job that waits for a permit: its place there",
        "_leave_lines": "an end, or a later time, before a job's turn: who is behind it in the line of its order key",
    },
    "control": {
        "_leave_limits": "the end of jobs that wait: for a permit, no more",
        "_leave_lines": "an end, or a later time, before a job's turn: who is behind it in the line of its order key",
        "_leave_parents": "the end of jobs that wait or are scheduled: those that wait for them look for it soon",
        "_line_up": "a job that comes into line: its place among those with its order key",
        "_line_up_many": "a claim by an id of a job that was scheduled: its place among those with its order key",
        "_parent_ended": "a cancel: those that wait for this job look for it soon",
        "_parents_said": "the end of a job that waits for parents: what is kept of them",
        "_pruned_hint": "a job that is not there: whether its history has gone",
        "_subject_lives": "the cancel of a dead letter: its subject has not ended",
        "_subject_retaken": "a retry by a person: the subject lives again",
    },
}
"""The functions that rooms below the parts call in rooms above them, and when."""
EXCEPTIONS = set((Path(__file__).parent / "rooms.txt").read_text(encoding="utf-8").splitlines())


def texts() -> dict[str, str]:
    """Return the text of every SQL file by path, without comments."""
    files = [file for file in sorted(SQL.rglob("*.sql")) if file.parent.name != "migrations"]
    return {file.relative_to(SQL).as_posix(): re.sub(r"--[^\n]*", "", file.read_text("utf-8")) for file in files}


def room(path: str) -> str:
    """Return the room of a file: core, read, a part, or a room of ops."""
    words = path.split("/")
    return "/".join(words[:2]) if words[0] in ("parts", "ops") else words[0]


def named(files: dict[str, str]) -> Iterator[tuple[str, str, str, str]]:
    """Yield each reference across rooms once, as room and name of both sides."""
    home = {name: room(path) for path, text in files.items() for name in MADE.findall(text)}
    found = set()
    for path, text in files.items():
        begins = [*MADE.finditer(text)]
        for at, made in enumerate(begins):
            body = text[made.end() : begins[at + 1].start() if at + 1 < len(begins) else len(text)]
            for other in NAMED.findall(body):
                if home.get(other, room(path)) != room(path):
                    found.add((room(path), made[1], home[other], other))
    yield from sorted(found)


def allowed(caller: str, callee: str, name: str) -> bool:
    """Whether a room may name this function, view, table or type of the other room."""
    if caller in LAYERS:
        return callee in LAYERS[: LAYERS.index(caller)] or name in SEAMS.get(caller, {})
    if callee in LAYERS:
        return True
    if callee.startswith("parts/"):
        return not caller.startswith("parts/")
    return callee == "read" and caller.startswith("ops/")


def forbidden(files: dict[str, str]) -> set[str]:
    return {
        f"{caller} {function} -> {callee} {name}"
        for caller, function, callee, name in named(files)
        if not allowed(caller, callee, name)
    }


def test_rooms_keep_to_themselves() -> None:
    """Apart from the exceptions in rooms.txt, no function names an item of a room that it may not name."""
    assert forbidden(texts()) - EXCEPTIONS == set()


def test_the_exceptions_only_shrink() -> None:
    """Every exception in rooms.txt still occurs; a fixed one leaves the list."""
    assert EXCEPTIONS - forbidden(texts()) == set()


def test_control_a_forbidden_call_is_found() -> None:
    """Control: a call from the core into a part, one from a part into another and one to a table of ops are found."""
    files = texts()
    before = forbidden(files)
    files["core/end/snooze.sql"] += "\ncreate function tallybook._one() as $$ select tallybook.parents_resolve() $$;"
    files["parts/limits/concurrency_release.sql"] += (
        "\ncreate function tallybook._two() as $$ select from tallybook.fire $$;"
    )
    files["parts/parents/parents_resolve.sql"] += (
        "\ncreate function tallybook._three() as $$ select from tallybook.audit $$;"
    )
    assert forbidden(files) - before == {
        "core _one -> parts/parents parents_resolve",
        "parts/limits _two -> parts/schedules fire",
        "parts/parents _three -> ops/operator audit",
    }


def test_every_seam_is_in_use() -> None:
    """The lists of seams name only functions that are called."""
    for room_below, seams in SEAMS.items():
        assert {name for caller, _, _, name in named(texts()) if caller == room_below} >= set(seams)


def test_one_public_verb_is_one_file() -> None:
    """Each public function or view is alone in a file of its name; tables are in the other files."""
    for path, text in texts().items():
        if "/tables" not in path:
            public = [name for name in MADE.findall(text) if not name.startswith("_")]
            expected = [] if Path(path).stem.startswith("_") else [Path(path).stem]
            assert public == expected, path


def test_a_name_is_made_in_one_room() -> None:
    """A function and a table may share a name (claim, fold, progress) only within one room."""
    homes = {(name, room(path)) for path, text in texts().items() for name in MADE.findall(text)}
    assert [name for name, rooms in Counter(name for name, _ in homes).items() if rooms > 1] == []


def test_every_file_of_tables_is_installed() -> None:
    """Migration 0001 includes every file of tables exactly once; a forgotten one would be missing in every database."""
    ((_, _, text),) = [one for one in migrations() if one[0] == 1]
    for path in texts():
        if "/tables" in path:
            assert text.count(commented((SQL / path).read_text("utf-8")).rstrip()) == 1, path


def test_no_function_is_longer_than_a_reader_can_hold() -> None:
    """A function has at most 70 lines below the parts and 120 elsewhere, without comments and empty lines."""
    functions = re.compile(r"^create or replace function tallybook\.(\w+)", re.MULTILINE)
    long = {}
    for path, text in texts().items():
        begins = [match.start() for match in functions.finditer(text)]
        for begin, end in pairwise([*begins, len(text)]):
            lines = sum(1 for line in text[begin:end].splitlines() if line.strip())
            if lines > (70 if room(path) in LAYERS else 120):
                long[functions.match(text, begin)[1]] = lines  # type: ignore[index]
    assert long == {}


def test_the_core_reads_in_an_afternoon() -> None:
    """Without comments, the core with its tables has at most 1,900 lines, and all SQL at most 10,500."""
    lines = Counter(room(path) for path, text in texts().items() for line in text.splitlines() if line.strip())
    assert lines["core"] <= 1900
    assert lines.total() <= 10_500


def test_settings_of_the_planner_are_profiles() -> None:
    """There are at most six profiles, each in use; any other setting in a function's head has a reason beside it."""
    read = {file: file.read_text(encoding="utf-8") for file in SQL.rglob("*.sql")}
    used = {name for text in read.values() for name in re.findall(r"^-- profile: (.*)$", text, re.MULTILINE)}
    assert used == set(PROFILES) and len(PROFILES) <= 6
    heads = re.compile(r"^create or replace function .*?\bas [$']", re.MULTILINE | re.DOTALL)
    settings = [
        line for text in read.values() for head in heads.findall(text) for line in head.splitlines() if " = " in line
    ]
    assert [line for line in settings if re.search(r"\bset \w+ = ", line) and " -- " not in line] == []
