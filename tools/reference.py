"""The pages of the reference, made from the code: docstrings, the heads of the SQL files, the command line's own help.

`pages()` gives each page's name and its text; `tools/docs.py` writes them into the site. They are not kept in the repository,
so they cannot be out of date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import click

from tallybook._cli import cli
from tallybook._db.migrate import routines

ROOT = Path(__file__).resolve().parents[1]
SQL = ROOT / "src" / "tallybook" / "sql"

MODULES = {
    "tallybook": "tallybook",
    "errors": "tallybook.errors",
    "testing": "tallybook.testing",
    "embedded": "tallybook.embedded",
    "providers": "tallybook.extra.providers",
    "tasks": "tallybook.extra.tasks",
    "web": "tallybook.web",
    "operator": "tallybook.extra.operator",
    "otel": "tallybook.otel",
    "contrib-django": "tallybook.contrib.django",
    "contrib-fastapi": "tallybook.contrib.fastapi",
    "contrib-flask": "tallybook.contrib.flask",
    "contrib-sentry": "tallybook.contrib.sentry",
    "contrib-sqlalchemy": "tallybook.contrib.sqlalchemy",
}
"""Page and module."""

NOUNS = (
    "jobs.Jobs", "jobs.Dead", "queues.Queues", "schedules.Schedules", "subjects.Subjects", "limits.RateLimits",
    "limits.ConcurrencyLimits", "breakers.Breakers", "counts.Counts", "counts.Events", "history.History", "history.Services",
    "history.Audit", "history.Doctor",
)  # fmt: skip

PARTS = {
    "tallybook": ("The App and its tasks", "App Task JobCall Exponential Linear Constant migrate"),
    "handler": (
        "In a handler",
        "Context Snooze Cancel Dead Reschedule Complete Drop Kill Reject Subject Provider Secret",
    ),
    "nouns": ("The nouns of the App", ""),
    "rows": (
        "What verbs return",
        "Job JobInfo JobLine JobPage JobDone DeadLetter Retried Cancelled Reason TraceEvent TopJob QueueInfo Truncated"
        " ScheduleInfo Fire Fired SubjectCall SubjectInfo SubjectPage SubjectReport RateInfo ConcurrencyInfo BreakerInfo"
        " Counts Throughput Timings Level Difference Finding ServiceInfo RetentionInfo HeldRange AuditRow Node",
    ),
}
"""Pages of the module `tallybook`: title, and public names in the order in which a person needs them."""

ELSEWHERE = {
    "nouns": ("tallybook._db.verb.Verb", *(f"tallybook._app.{noun}" for noun in NOUNS)),
    "contrib-django": ("tallybook.contrib.django._app.App", "tallybook.contrib.django._backend.Backend"),
}
"""Public names of a page that its module gives on demand only, where a reader of its source does not find them."""


def pages() -> dict[str, str]:
    """Each generated page, by its file name."""
    made = {f"{page}.md": python(page) for page in (*PARTS, *MODULES)}
    made["sql-functions.md"] = sql_page("SQL functions", FUNCTIONS, sql_files(views=False))
    made["sql-views.md"] = sql_page("SQL views", VIEWS, sql_files(views=True))
    made["command-line.md"] = command_line()
    return made


# Python


def python(page: str) -> str:
    """A page that mkdocstrings fills from the docstrings of a module, or of some of its names."""
    if page in PARTS:
        title, names = PARTS[page]
        text, paths = f"# {title}\n", [f"tallybook.{name}" for name in names.split()]
    else:
        text, paths = f"# {MODULES[page]}\n\n::: {MODULES[page]}\n", []
    for path in (*paths, *ELSEWHERE.get(page, ())):
        inherited = str(path in paths).lower()
        text += f"\n::: {path}\n    options:\n      show_root_heading: true\n      show_root_toc_entry: true\n"
        text += f"      inherited_members: {inherited}\n"
    return text


# SQL

FUNCTIONS = """Every verb is one function in the schema `tallybook`, one file in `src/tallybook/sql`,
whose head stands here. [SQL, by example](../sql.md) shows each in use.
Names that begin with an underscore are internal and left out."""
VIEWS = "What people and pages read, in the schema `tallybook`: the heads of the files in folders called `views`."


def sql_files(*, views: bool) -> list[Path]:
    """The files of the public functions, or of the views, by name, whatever room they are in."""
    files = [SQL / path for path, _ in routines() if not Path(path).name.startswith("_")]
    return sorted((file for file in files if (file.parent.name == "views") is views), key=lambda file: file.name)


def head(file: Path) -> list[str]:
    """The comment that a SQL file begins with, without its dashes."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("--"):
            break
        lines.append(line[2:].removeprefix(" ").rstrip())
    return lines


def sql_page(title: str, about: str, files: list[Path]) -> str:
    """One page: every file's name as a heading, and below it what its head says."""
    return "\n".join([f"# {title}", "", about, "", *(line for file in files for line in sql_part(file))])


def sql_part(file: Path) -> Iterator[str]:
    """One file of SQL: its name, how it is called, its text; what is indented, a list of arguments or words, is a table."""
    first, *rest = head(file)
    rights = next((n for n, line in enumerate(rest) if line.startswith("rights: ")), len(rest))
    rest, said = rest[:rights], " ".join(line.strip() for line in rest[rights:])
    call, _, summary = first.partition(": ")
    yield from (f"## {file.stem}", "", f"**`{call}`**: {prose(summary)}")
    for indented, lines in groupby(rest, lambda line: line.startswith("  ")):
        if indented:
            yield from ("", *listing(list(lines)), "")
        else:
            yield from map(prose, lines)
    if said:
        yield from ("", f"Who has rights: {prose(said.removeprefix('rights: '))}.")
    yield ""


def listing(lines: list[str]) -> list[str]:
    """A list of words and what each means, as a table; what is no such list stays as it is."""
    rows: list[list[str]] = []
    for line in lines:
        if found := re.match(r"  (\S+(?: \S+)*)  +(\S.*)", line):
            rows.append([found[1], found[2]])
        elif rows and line.startswith("    "):
            rows[-1][1] += " " + line.strip()
        else:
            return ["```text", *lines, "```"]
    return ["| word | meaning |", "|---|---|", *(f"| `{word}` | {prose(text)} |" for word, text in rows)]


def prose(line: str) -> str:
    """A line of plain text, in which nothing is meant as Markdown or HTML."""
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", line).replace("<", "&lt;")


# The command line


def command_line() -> str:
    """Every command with what its own help says."""
    parts = [
        "# Command line",
        "",
        'The help of every command. Completion for bash: `eval "$(_TALLYBOOK_COMPLETE=bash_source tallybook)"` in'
        " `~/.bashrc`; for zsh and fish replace `bash_source` by `zsh_source` or `fish_source`.",
        "",
    ]
    for path, command in commands(cli, ("tallybook",)):
        context = click.Context(command, info_name=" ".join(path), terminal_width=110, max_content_width=110)
        level = "#" * min(len(path) + 1, 4)
        parts += [f"{level} {' '.join(path)}", "", "```text", command.get_help(context).rstrip(), "```", ""]
    return "\n".join(parts)


def commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """A command and all below it, with the words that lead to each."""
    yield path, command
    if isinstance(command, click.Group):
        for word in sorted(command.commands):
            yield from commands(command.commands[word], (*path, word))
