"""make docs: build the docs as a site in site/.

The pages are copied to build/docs with the folders of the repository, so that links between them work. The reference is
generated from the code. Zensical builds the site from mkdocs.yml. A broken link, or a page that is not in the nav,
fails the build.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.reference import pages  # noqa: E402

FOLDERS = ("docs", "examples", "bench", "src")
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)|\b(?:src|href)=\"([^\"#:]+)\"")


def sources() -> list[Path]:
    """Return every page of the repository that belongs to the site."""
    found = [ROOT / name for name in TOP]
    for folder in FOLDERS:
        found += sorted((ROOT / folder).rglob("*.md"))
    return [path for path in found if "node_modules" not in path.parts]


def linked(page: Path) -> set[Path]:
    """Return the files of the repository that a page links to or shows, without other pages."""
    text = page.read_text(encoding="utf-8")
    targets = {first or second for first, second in LINK.findall(text)}
    files = {(page.parent / target).resolve() for target in targets if not re.match(r"[a-z]+:", target)}
    return {file for file in files if file.is_file() and file.suffix != ".md" and file.is_relative_to(ROOT)}


def stage(folder: Path) -> None:
    """Copy the sources of the site to a folder and write the reference pages."""
    shutil.rmtree(folder, ignore_errors=True)
    found = sources()
    for file in {*found, *(file for page in found for file in linked(page))}:
        to = folder / file.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, to)
    reference = folder / "docs" / "reference"
    reference.mkdir()
    for name, text in pages().items():
        (reference / name).write_text(text, encoding="utf-8")


def build(root: Path) -> int:
    """Build the site staged below `root`, which has mkdocs.yml; print the builder's output and return its exit code."""
    shutil.rmtree(root / "site", ignore_errors=True)
    zensical = Path(sys.executable).with_name("zensical")
    return subprocess.run([str(zensical), "build", "--clean", "--strict"], cwd=root, check=False).returncode


def nav() -> list[str]:
    """Return every page in the nav of mkdocs.yml, in order."""
    return re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)


def beside_nav(reference: Iterable[str]) -> list[str]:
    """Return the faults of the nav: missing pages, pages that do not exist, pages that it lists twice."""
    listed = nav()
    known = {str(page.relative_to(ROOT)) for page in sources()} | {f"docs/reference/{name}" for name in reference}
    return [
        *(f"{page} is not in the nav of mkdocs.yml" for page in sorted(known - set(listed))),
        *(f"{page} is in the nav of mkdocs.yml and does not exist" for page in sorted(set(listed) - known)),
        *(
            f"{page} is in the nav of mkdocs.yml twice"
            for page in sorted({one for one in listed if listed.count(one) > 1})
        ),
    ]


def main() -> int:
    """Check the nav, stage and build the site; return the exit code."""
    if wrong := beside_nav(pages()):
        print("\n".join(f"docs: {line}" for line in wrong), file=sys.stderr)
        return 1
    stage(ROOT / "build" / "docs")
    if failed := build(ROOT):
        return failed
    print(f"docs: {sum(1 for _ in (ROOT / 'site').rglob('*.html'))} pages in site/, start at site/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
