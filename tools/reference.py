"""The reference pages, generated from the code: docstrings, heads of the SQL files, help of the command line.

`pages()` returns each page's name and text; `tools/docs.py` writes them into the site. The repository does not store
them, so they cannot be out of date.
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
"""Module of each page."""

NOUNS = (
    "jobs.Jobs", "jobs.Dead", "queues.Queues", "schedules.Schedules", "subjects.Subjects", "limits.RateLimits",
    "limits.ConcurrencyLimits", "limits.Breakers", "counts.Counts", "counts.Events", "history.History",
    "history.Services", "history.Audit", "history.Doctor",
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
        " ScheduleInfo Fire Fired SubjectCall SubjectInfo SubjectPage SubjectReport RateInfo ConcurrencyInfo"
        " BreakerInfo Counts Throughput Timings Level Difference Finding ServiceInfo RetentionInfo HeldRange"
        " AuditRow Node",
    ),
}
"""Pages of the module `tallybook`: title, and public names in the order in which a reader needs them."""

ELSEWHERE = {
    "nouns": ("tallybook._db.verb.Verb", *(f"tallybook._app.{noun}" for noun in NOUNS)),
    "contrib-django": ("tallybook.contrib.django._app.App", "tallybook.contrib.django._backend.Backend"),
}
"""Public names of a page that its module loads on demand only, so that static analysis does not find them."""


def pages() -> dict[str, str]:
    """Return the text of each generated page by file name."""
    made = {f"{page}.md": python(page) for page in (*PARTS, *MODULES)}
    made["sql-functions.md"] = sql_page("SQL functions", FUNCTIONS, sql_files(views=False))
    made["sql-views.md"] = sql_page("SQL views", VIEWS, sql_files(views=True))
    made["command-line.md"] = command_line()
    return made


# Python


def python(page: str) -> str:
    """Return a page that mkdocstrings fills from the docstrings of a module, or of some of its names."""
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

FUNCTIONS = """Every verb is one function in the schema `tallybook` and one file in `src/tallybook/sql`.
This page shows the heads of these files; [SQL, by example](../sql.md) shows each function in use.
Names that begin with an underscore are internal and left out."""
VIEWS = (
    "The views in the schema `tallybook`, for people and dashboards: the heads of the files in folders called `views`."
)


def sql_files(*, views: bool) -> list[Path]:
    """Return the files of the public functions, or of the views, sorted by name across all folders."""
    files = [SQL / path for path, _ in routines() if not Path(path).name.startswith("_")]
    return sorted((file for file in files if (file.parent.name == "views") is views), key=lambda file: file.name)


def head(file: Path) -> list[str]:
    """Return the lines of the comment at the top of a SQL file, without dashes."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("--"):
            break
        lines.append(line[2:].removeprefix(" ").rstrip())
    return lines


def sql_page(title: str, about: str, files: list[Path]) -> str:
    """Return one page: each file's name as a heading, with the head of the file below it."""
    return "\n".join([f"# {title}", "", about, "", *(line for file in files for line in sql_part(file))])


def sql_part(file: Path) -> Iterator[str]:
    """Yield the lines for one SQL file: name, call, text. An indented list of arguments or words becomes a table."""
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
        yield from ("", f"Roles with rights: {prose(said.removeprefix('rights: '))}.")
    yield ""


def listing(lines: list[str]) -> list[str]:
    """Turn a list of words and meanings into a table; return other lines as a text block."""
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
    """Escape a line of plain text for Markdown and HTML."""
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", line).replace("<", "&lt;")


# The command line


def command_line() -> str:
    """Return the page of all commands with the help of each."""
    parts = [
        "# Command line",
        "",
        "The help of every command. For completion in bash, add"
        ' `eval "$(_TALLYBOOK_COMPLETE=bash_source tallybook)"` to `~/.bashrc`; for zsh and fish,'
        " replace `bash_source` with `zsh_source` or `fish_source`.",
        "",
    ]
    for path, command in commands(cli, ("tallybook",)):
        context = click.Context(command, info_name=" ".join(path), terminal_width=110, max_content_width=110)
        level = "#" * min(len(path) + 1, 4)
        parts += [f"{level} {' '.join(path)}", "", "```text", command.get_help(context).rstrip(), "```", ""]
    return "\n".join(parts)


def commands(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield a command and all its subcommands, each with its path of words."""
    yield path, command
    if isinstance(command, click.Group):
        for word in sorted(command.commands):
            yield from commands(command.commands[word], (*path, word))
