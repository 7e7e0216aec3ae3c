"""The package: the contents of the sdist and the wheel, and its needs. `make package` uses it as a newcomer does.

pip needs an index here. Without one these tests fail with pip's message; they are never skipped.
"""

import re
import tarfile
import zipfile
from email import message_from_bytes as metadata
from pathlib import Path

import pytest

import tallybook
from support.paths import HOME, ROOT
from tools.package import PIP, build, installed, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the wheel."""
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def empty(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with Tallybook without extras, and nothing else."""
    return installed(built[1], "", tmp_path_factory.mktemp("empty"))


def test_the_wheel_has_what_runs_and_nothing_else(built: tuple[Path, Path]) -> None:
    """Issue 8: the wheel has exactly the files of src/tallybook, with SQL, templates, static files and py.typed."""
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        about = {Path(name).name for name in wheel.namelist()} - {Path(name).name for name in names}
    source = run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "src", cwd=ROOT)
    assert names == {name.removeprefix("src/") for name in source.split() if (ROOT / name).is_file()}
    assert "tallybook/py.typed" in names and "tallybook/sql/core/enqueue/enqueue.sql" in names
    assert {"LICENSE", "METADATA", "entry_points.txt"} <= about


def test_the_sdist_has_the_sources_and_nothing_else(built: tuple[Path, Path]) -> None:
    """The sdist has the package, its metadata and the pages that an index shows; it is smaller than 1.2 MB."""
    with tarfile.open(built[0]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    outside = {name for name in names if not name.startswith("src/tallybook/")}
    assert outside == {".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert "src/tallybook/sql/migrations/0001_initial.sql" in names and built[0].stat().st_size < 1_200_000


def test_an_index_can_follow_the_links_of_the_readme(built: tuple[Path, Path]) -> None:
    """Every link of the page that an index shows is absolute; a link to a file points to this version's file."""
    with zipfile.ZipFile(built[1]) as wheel:
        about = metadata(wheel.read(f"tallybook-{tallybook.__version__}.dist-info/METADATA"))
    files = f"{HOME}/blob/v{tallybook.__version__}/"
    targets = re.findall(r"\]\(([^)\s]+)\)", about.get_payload())
    ours = [target.removeprefix(files).partition("#")[0] for target in targets if target.startswith(files)]
    shown = [one.partition(f"/raw/v{tallybook.__version__}/")[2] for one in targets if one.startswith(f"{HOME}/raw/")]
    assert len(ours) > 10 and len(shown) == 2 and all((ROOT / path).is_file() for path in ours + shown)
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert about["Author"] == "The Tallybook developers" and about["Keywords"]


def test_it_works_without_extras(empty: Path, tmp_path: Path) -> None:
    """Issue 8: without extras, only the core's four packages and typing-extensions come; command and import work."""
    listed = run(*PIP, "--python", empty, "list", "--format=freeze", cwd=tmp_path)
    names = {line.partition("==")[0].lower().replace("_", "-") for line in listed.splitlines() if "==" in line}
    own = {"tallybook", "psycopg", "psycopg-pool", "click", "cronsim", "typing-extensions"}
    assert names == own
    version = tallybook.__version__
    assert run(empty, "-c", "import tallybook; print(tallybook.__version__)", cwd=tmp_path) == f"{version}\n"
    assert run(empty.with_name("tallybook"), "--version", cwd=tmp_path) == f"tallybook {version}\n"


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("-c", "import tallybook.web"), "web"),
        (("-m", "tallybook", "web"), "web"),
        (("-m", "tallybook", "mcp"), "mcp"),
        (("-m", "tallybook", "demo"), "embedded"),
        (("-c", "from tallybook.embedded import temporary_server as t; t().__enter__()"), "embedded"),
        (("-c", "import tallybook.contrib.fastapi"), "fastapi"),
        (("-c", "import tallybook.contrib.flask"), "flask"),
        (("-c", "import tallybook.contrib.sentry"), "sentry"),
        (("-c", "import tallybook as t, tallybook.otel as o; o.instrument(t.App('a'))"), "otel"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[1],
)
def test_what_is_missing_is_named(empty: Path, tmp_path: Path, words: tuple[str, ...], extra: str) -> None:
    """Issue 8: a feature whose extra is not installed ends with the command that installs it."""
    assert f"pip install 'tallybook[{extra}]'" in run(empty, *words, cwd=tmp_path, fails=True).splitlines()[-1]


def test_a_missing_libpq_is_named(empty: Path, tmp_path: Path) -> None:
    """Issue 8: if psycopg finds no libpq, the import ends with the command that installs one."""
    said = run(empty, "-c", "import tallybook", cwd=tmp_path, fails=True, PSYCOPG_IMPL="binary").splitlines()[-1]
    assert said == "To get psycopg with its own libpq: pip install 'tallybook[binary]'"
