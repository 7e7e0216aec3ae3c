"""make docs: the site has every page, the reference is whole, a mistake fails the build, nothing loads from outside."""

import importlib
import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import tallybook
from support.paths import ROOT
from tools import docs, reference


def test_every_page_is_in_the_nav() -> None:
    """The nav of mkdocs.yml names exactly the pages of the repository and of the reference, each once."""
    assert docs.beside_nav(reference.pages()) == []


def test_a_page_beside_the_nav_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a page that is missing in the nav, does not exist or is listed twice is named."""
    listed = docs.nav()
    monkeypatch.setattr(docs, "nav", lambda: [*listed[1:], "docs/none.md", listed[1]])
    assert docs.beside_nav(reference.pages()) == [
        f"{listed[0]} is not in the nav of mkdocs.yml",
        "docs/none.md is in the nav of mkdocs.yml and does not exist",
        f"{listed[1]} is in the nav of mkdocs.yml twice",
    ]


def test_every_public_module_has_its_page() -> None:
    """The reference has a page for each module with public names, and no other; of an extra, for its package."""
    package = ROOT / "src" / "tallybook"
    public = {
        ".".join(file.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for file in package.rglob("*.py")
        if re.search(r"^__all__ = ", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    run_by_others = {"tallybook.extra.demo", "tallybook.contrib.django.apps", "tallybook.contrib.django.worker"}
    inside = {module for module in public if re.match(r"tallybook\.extra\.\w+\.", module)}
    named = {module for module in public if "._" not in module} - inside - run_by_others
    assert named == set(reference.MODULES.values())


def test_every_public_name_is_on_one_page() -> None:
    """The pages of the module `tallybook` show each of its public names once."""
    shown = [name for _, names in reference.PARTS.values() for name in names.split()]
    assert sorted(shown) == sorted(set(tallybook.__all__) - {"__version__"})


@pytest.mark.parametrize("module", reference.MODULES.values())
def test_every_public_name_says_what_it_is(module: str) -> None:
    """Each function and class in a module's `__all__` has a docstring, and so has each public method."""

    def _may_speak(value: Any) -> bool:
        return inspect.isclass(value) or inspect.isroutine(value)

    found = importlib.import_module(module)
    assert found.__doc__
    silent = [
        name for name in found.__all__ if _may_speak(getattr(found, name)) and not inspect.getdoc(getattr(found, name))
    ]
    for name in found.__all__:
        value = getattr(found, name)
        if inspect.isclass(value) and value.__module__.startswith("tallybook"):
            own = [
                (word, method) for word, method in vars(value).items() if inspect.isfunction(method) and word[0] != "_"
            ]
            silent += [f"{name}.{word}" for word, method in own if not inspect.getdoc(getattr(value, word)) and method]
    assert silent == []


def test_every_sql_file_says_what_it_is() -> None:
    """The head of each public function shows its call and its effect; the reference has all of them."""
    page = reference.pages()["sql-functions.md"]
    for file in reference.sql_files(views=False):
        first = reference.head(file)[0]
        assert re.match(rf"{file.stem}\(.*?\)(?:, \w+\(.*?\))*: \w", first), f"{file.name}: {first}"
        assert f"\n## {file.stem}\n" in page
    for file in reference.sql_files(views=True):
        assert re.match(r"[\w, ]+: \w", reference.head(file)[0]), file.name


def test_the_arguments_of_a_function_are_a_table() -> None:
    """The reference shows the list of a head as a table of words and their meanings, and loses no text."""
    head = reference.head(reference.SQL / "core" / "enqueue" / "enqueue.sql")
    made = "\n".join(reference.sql_part(reference.SQL / "core" / "enqueue" / "enqueue.sql")).replace("\\", "")
    assert "| `priority` | lower runs first |" in made
    assert re.search(r"\| `on_conflict` \| what happens .* All but raise return the other job's id\. \|", made)
    words = re.findall(r"\w+", " ".join(head))
    assert [word for word in words if word not in re.findall(r"\w+", made)] == []


def test_the_rights_are_one_sentence() -> None:
    """The roles that may use a function or a view are below its text, even if the file's list spans lines."""
    view = "\n".join(reference.sql_part(reference.SQL / "read" / "views" / "attempt.sql")).replace("\\", "")
    assert re.search(r"\nRoles with rights: operator; reader \(job_id, .*, worker_id, worker\)\.\n", view)
    assert "\nRoles with rights: worker.\n" in reference.pages()["sql-functions.md"]


def test_plain_text_stays_plain() -> None:
    """Characters of a head that have a meaning in Markdown or HTML are shown as they are."""
    assert reference.prose("a_b * <c> [d] `e` f|g") == r"a\_b \* &lt;c> \[d\] \`e\` f\|g"


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    """A folder in which the site can be built without changing this one."""
    docs.stage(tmp_path / "build" / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    (tmp_path / "src").symlink_to(ROOT / "src")
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_site_builds(staged: Path) -> None:
    """Issue 8: the site has each page of the nav, and the code's docstrings, and loads nothing from outside."""
    assert docs.build(staged) == 0
    site = staged / "site"
    for page in docs.nav():
        assert (site / re.sub(r"README\.md$", "index.md", page)).with_suffix(".html").is_file(), page
    any_page = (site / "docs/states.html").read_text(encoding="utf-8")
    titles = re.findall(r"^ +- ([^:\n]+): \S+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert [title for title in titles if title not in any_page] == [], "each is in the navigation of each page"
    python = "".join((site / f"docs/reference/{page}.html").read_text(encoding="utf-8") for page in reference.PARTS)
    for name in ("App.task", "App.run_worker", "Task.enqueue", "Snooze", "JobInfo"):
        assert f'id="tallybook.{name}"' in python
    assert "Snooze" in (site / "docs/glossary.html").read_text(encoding="utf-8").title()
    assert 'id="fan_out"' in (site / "docs/reference/sql-functions.html").read_text(encoding="utf-8")
    assert "--stop-timeout" in (site / "docs/reference/command-line.html").read_text(encoding="utf-8")
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>", page.read_text(encoding="utf-8")
        )
        assert loaded == [], page
        assert 'class="mermaid"' not in page.read_text(encoding="utf-8"), "its script would come from elsewhere"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "mistake", ["[a page](nowhere.md)", "[a heading](limits.md#nothing-of-the-kind)", "::: tallybook.nothing"]
)
def test_a_mistake_fails_the_build(staged: Path, mistake: str) -> None:
    """Control: a link to no page, a link to no heading and an unknown name each fail the build."""
    with (staged / "build/docs/docs/states.md").open("a", encoding="utf-8") as page:
        page.write(f"\n\n{mistake}\n")
    assert docs.build(staged) != 0
