"""The glossary is checked against the code: one word per idea, each in use, none of other queues' words for it.

tools/words.py, which `make check` runs, finds odd words and long sentences.
"""

import inspect
import re
from collections import Counter
from typing import Any

import click
import pytest

import tallybook
from support.cli import commands
from support.pages import table, text, words
from support.paths import ROOT
from tools import words as odd_words
from tools.reference import sql_files

ROWS = table(text("docs/glossary.md"), "word")
TERMS = [term for row in ROWS for term in re.findall(r"\*\*([^*]+)\*\*", row[0])]


def public_names() -> set[str]:
    """Every name that a user writes: commands, options, Python's names and arguments, SQL functions and arguments."""
    found = set[str]()
    for path, command in commands():
        options = (option.lstrip("-") for param in command.params for option in param.opts)
        found |= {word.replace("-", "_") for word in (*path[-1:], *options)}
    for name in tallybook.__all__:
        value: Any = getattr(tallybook, name)
        members = dict(inspect.getmembers(value)) if inspect.isclass(value) else {}
        public = {member: what for member, what in members.items() if not member.startswith("_")}
        found |= {name.lower(), *public}
        for method in filter(inspect.isfunction, public.values()):
            found |= {*inspect.signature(method).parameters}
    for file in sql_files(views=False):
        function = r"function tallybook\.\w+\((.*?)\)\s*(?:returns|language)"
        declared = re.search(function, file.read_text("utf-8"), re.DOTALL)
        found |= {file.stem, *(re.findall(r"(?:^|,)\s*(?:out )?(\w+) ", declared[1]) if declared else ())}
    return found


def test_each_word_is_explained_once() -> None:
    """The glossary has no word twice; the text after a word tells its two meanings apart."""
    assert all(len(row) == 3 and row[1] for row in ROWS)
    qualified = [word.strip() for row in ROWS for word in re.findall(r"\*\*[^*]+\*\*(?: of [\w ]+)?", row[0])]
    assert [word for word, count in Counter(qualified).items() if count > 1] == []


def test_each_word_is_in_use() -> None:
    """Each word of the glossary occurs in the sources, so none is obsolete."""
    source = ROOT / "src" / "tallybook"
    code = "\n".join(
        file.read_text(encoding="utf-8").lower()
        for file in source.rglob("*")
        if file.suffix in (".py", ".sql", ".html")
    )
    found = {term: re.escape(term.lower()).replace("\\ ", "[ _]") for term in TERMS}
    unused = [term for term, pattern in found.items() if not re.search(rf"(?<![a-z]){pattern}", code)]
    assert unused == []


def test_no_public_name_is_a_word_of_others() -> None:
    """No command, option, function or argument is another queue's word for an idea, unless it means something else."""
    of_other_ideas = {
        "active": "a provider or a route that is in use",
        "actor": "in the audit: who changed something",
        "clear": "an answer to a worker that goes to sleep",
        "concurrency": "a kind of limit",
        "cron": "the expression of a schedule",
        "failed": "an attempt's end, and a reason to be dead",
        "group": "as in SQL",
        "label": "as in Prometheus",
        "lock": "how long what was picked is the caller's: its word for it at other queues as well",
        "message": "what an error says",
        "run": "a schedule, now",
        "timeout": "the option that sets the deadline",
    }
    others = {word.strip() for row in ROWS for word in row[2].split(",") if word.strip()} - set(TERMS)
    parts = {part for name in public_names() for part in (name, *name.split("_"))}
    assert {word for word in others if word.replace(" ", "_") in parts} <= set(of_other_ideas)


@pytest.mark.parametrize("word", ["payload", "fetch", "requeue", "eta"])
def test_words_of_others_would_be_found(word: str) -> None:
    """Control: the glossary has these words of other queues, and the test above reads such names."""
    assert any(word in re.split(", ?", row[2]) for row in ROWS)
    assert (
        word not in public_names()
        and {"enqueue_many_sync", "max_attempts", "unique_key", "stop_timeout"} <= public_names()
    )


def test_each_state_end_and_reason_is_explained() -> None:
    """Every state of a job, end of an attempt and reason of docs/states.md is a word of the glossary."""
    states = text("docs/states.md")
    named = {word for column in ("state", "end", "reason") for word in words(table(states, column))}
    assert named - {term.lower() for term in TERMS} == set()


def test_each_part_of_a_verb_is_explained() -> None:
    """Every word in the name of a public SQL function is in the glossary."""
    # Parts of verbs between a worker and the core, and plain English.
    plain = {"move", "look", "put", "many", "from", "after", "due", "done", "listen", "begin", "end"}
    said = " ".join(f"{row[0]} {row[1]}".lower() for row in ROWS)
    parts = {part for file in sql_files(views=False) for part in file.stem.split("_")}
    assert {part for part in parts - plain if not re.search(rf"\b{part.rstrip('s')[:5]}", said)} == set()


@pytest.mark.parametrize(
    "text",
    ["A page says so.", "What it does then shall be seen.", "The claim goes on.\n", f"It has {'many ' * 41}words."],
)
def test_odd_words_and_long_sentences_are_found(text: str) -> None:
    """A phrase of the list, or more than forty words in one sentence, is a finding."""
    assert list(odd_words.of_page(f"# A page\n\n{text}\n"))


def test_code_is_not_prose() -> None:
    """Code blocks, headings and text in backticks have no findings."""
    assert list(odd_words.of_page("# It says\n\n```\nit goes on\n```\n\nThe column `says` is text.\n")) == []


def test_a_help_text_of_two_lines_is_found() -> None:
    """The help of an option above 80 columns is a finding, with the command and the option."""
    command = click.Command("run", help="Run jobs.", params=[click.Option(["--queue"], help="A" * 81)])
    assert [found.split(":")[0] for found in odd_words.of_help(command, "tallybook run")] == ["tallybook run --queue"]


@pytest.mark.parametrize(
    "text", ['"""Say what it does."""', 'x = f"job {n}: its worker goes on"', 'log("the job is over", 1)']
)
def test_phrases_in_docstrings_and_messages_are_found(text: str) -> None:
    """A phrase of the list in a string of the code is a finding, with its line."""
    assert [found.split(":")[0] for found in odd_words.of_code(f"import os\n{text}\n")] == ["2"]


@pytest.mark.parametrize(
    "text", ['"""Call `say` once more."""', 'x = "says"', 'x = "select says from tell"', "x = shall"]
)
def test_short_strings_sql_and_names_are_not_prose(text: str) -> None:
    """Keys, SQL, names and text in backticks have no findings."""
    assert list(odd_words.of_code(f"{text}\n")) == []


@pytest.mark.parametrize(
    "text", ["-- Say what it does.", "select 1;  -- its worker goes on", "  'the job is over now',"]
)
def test_phrases_in_sql_are_found(text: str) -> None:
    """A phrase of the list in a comment or message of SQL is a finding, with its line; in code it is not."""
    assert [found.split(":")[0] for found in odd_words.of_sql(f"select says, 'says'\n{text}\n-- rights: say\n")] == [
        "2"
    ]


def test_phrases_in_templates_are_found() -> None:
    """A phrase of the list in the visible words of a template is a finding, with its line; in code it is not."""
    text = "<style>says</style>\n{% if says %}\n<p title='on record'\n>It says <b>so</b>.</p>"
    assert [found.split(":")[0] for found in odd_words.of_template(text)] == ["4"]
