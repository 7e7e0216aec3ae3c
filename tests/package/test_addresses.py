"""The project's address, the pages that installed users are sent to, and the extras."""

import re
import subprocess

from support.paths import HOME, PROJECT, ROOT

PAGE = re.compile(r"[\w:/.-]*\bdocs/[\w/-]+\.md")


def files(*folders: str) -> list[str]:
    """The text files below these folders that git lists."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    kinds = (".py", ".sql", ".html", ".md", ".yaml", ".yml", ".toml", "Dockerfile")
    return [name for name in listed.stdout.splitlines() if name.endswith(kinds) and (ROOT / name).is_file()]


def test_the_package_sends_its_users_to_pages_on_the_web() -> None:
    """Docstrings, errors, help texts and SQL link to pages by full address, because a wheel has no docs folder."""
    named = {
        f"{file}: {page}"
        for file in files("src")
        if not file.endswith(".md")
        for page in PAGE.findall((ROOT / file).read_text(encoding="utf-8"))
    }
    there = {one for one in named if (ROOT / one.partition(f"{HOME}/blob/main/")[2]).is_file()}
    assert len(there) > 25 and named - there == set()


def test_the_home_of_the_project_is_written_down_once() -> None:
    """Each address of Tallybook on GitHub begins with the home in pyproject.toml, and so do its other URLs."""
    assert all(address.startswith(HOME) for address in PROJECT["urls"].values())
    host, _, name = HOME.rsplit("/", 2)
    address = re.compile(rf"{host}/[\w.-]+/{name}\b")
    found = {one for file in files() for one in address.findall((ROOT / file).read_text(encoding="utf-8"))}
    assert found == {HOME}


def test_all_is_every_extra_of_a_user() -> None:
    """`tallybook[all]` has each extra except those for this repository only and `demo`, which combines others."""
    extras = PROJECT["optional-dependencies"]
    (whole,) = extras["all"]
    assert re.findall(r"[\w-]+", whole.partition("[")[2]) == sorted(set(extras) - {"all", "demo", "dev", "docs"})
