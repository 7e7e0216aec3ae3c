"""GitHub's workflows fit the package. `make check` checks their syntax."""

import re
from typing import Any

import pytest
import yaml

import tallybook
from support.paths import PROJECT, ROOT

NAMES = ("ci", "release")


def workflow(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text(encoding="utf-8"))["jobs"]
    return found


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("name", NAMES)
def test_the_workflows_call_targets_that_there_are(name: str) -> None:
    """Each `make` in a workflow names a target of the Makefile."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    called = {
        target
        for job in workflow(name).values()
        for line in commands(job)
        for target in re.findall(r"make ([\w-]+)", line)
    }
    assert called and called <= targets


def test_each_python_that_is_declared_is_tested() -> None:
    """The jobs of ci.yml cover the Python versions that the package declares."""
    declared = {one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", one)}
    jobs = workflow("ci")
    oldest = jobs["everything"]["container"].partition(":")[2].partition("-")[0]
    assert {oldest, *jobs["python"]["strategy"]["matrix"]["python"]} == declared
    assert PROJECT["requires-python"] == f">={oldest}" and commands(jobs["everything"])[-1] == ".ci/run"


def test_only_the_job_that_publishes_has_an_identity() -> None:
    """Only the job that publishes has an identity for the index, and it runs no code of the repository."""
    jobs = workflow("release")
    able = [name for name, job in jobs.items() if "id-token" in job["permissions"]]
    assert able == ["publish"] and commands(jobs["publish"]) == []
    assert [step["uses"].partition("@")[0] for step in jobs["publish"]["steps"]] == [
        "actions/download-artifact", "pypa/gh-action-pypi-publish",
    ]  # fmt: skip


def test_the_change_log_begins_with_this_version() -> None:
    """The newest section of the change log, pyproject.toml and the package have the same version."""
    first = re.findall(
        r"^## (\S+) \((?:unreleased|\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )[0]
    assert first == PROJECT["version"] == tallybook.__version__
