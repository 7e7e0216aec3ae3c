"""tools/words.py, which `make check` runs, finds odd words and long sentences."""

from __future__ import annotations

import click
import pytest

from tools import words


@pytest.mark.parametrize(
    "text",
    ["A page says so.", "What it does then shall be seen.", "The claim goes on.\n", f"It has {'many ' * 41}words."],
)
def test_odd_words_and_long_sentences_are_found(text: str) -> None:
    """A phrase of the list, or more than forty words in one sentence, is a finding."""
    assert list(words.of_page(f"# A page\n\n{text}\n"))


def test_code_is_not_prose() -> None:
    """Code blocks, headings and text in backticks have no findings."""
    assert list(words.of_page("# It says\n\n```\nit goes on\n```\n\nThe column `says` is text.\n")) == []


def test_a_help_text_of_two_lines_is_found() -> None:
    """The help of an option above 80 columns is a finding, with the command and the option."""
    command = click.Command("run", help="Run jobs.", params=[click.Option(["--queue"], help="A" * 81)])
    assert [found.split(":")[0] for found in words.of_help(command, "tallybook run")] == ["tallybook run --queue"]


@pytest.mark.parametrize(
    "text", ['"""Say what it does."""', 'x = f"job {n}: its worker goes on"', 'log("the job is over", 1)']
)
def test_phrases_in_docstrings_and_messages_are_found(text: str) -> None:
    """A phrase of the list in a string of the code is a finding, with its line."""
    assert [found.split(":")[0] for found in words.of_code(f"import os\n{text}\n")] == ["2"]


@pytest.mark.parametrize(
    "text", ['"""Call `say` once more."""', 'x = "says"', 'x = "select says from tell"', "x = shall"]
)
def test_short_strings_sql_and_names_are_not_prose(text: str) -> None:
    """Keys, SQL, names and text in backticks have no findings."""
    assert list(words.of_code(f"{text}\n")) == []


@pytest.mark.parametrize(
    "text", ["-- Say what it does.", "select 1;  -- its worker goes on", "  'the job is over now',"]
)
def test_phrases_in_sql_are_found(text: str) -> None:
    """A phrase of the list in a comment or message of SQL is a finding, with its line; in code it is not."""
    assert [found.split(":")[0] for found in words.of_sql(f"select says, 'says'\n{text}\n-- rights: say\n")] == ["2"]


def test_phrases_in_templates_are_found() -> None:
    """A phrase of the list in the visible words of a template is a finding, with its line; in code it is not."""
    text = "<style>says</style>\n{% if says %}\n<p title='on record'\n>It says <b>so</b>.</p>"
    assert [found.split(":")[0] for found in words.of_template(text)] == ["4"]
