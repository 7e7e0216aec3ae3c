"""An older release's worker and producers on a newer schema, as in a deploy of a new release."""

import io
import os
import shutil
import signal
import subprocess
import tarfile
from pathlib import Path

import psycopg
import pytest

from support.cli import Program
from support.paths import ROOT
from support.waiting import wait_until
from tallybook import App
from tallybook.testing import drain

pytestmark = pytest.mark.slow

OLD = "0d16dbf0"
"""The previous release: the last commit with the tables, types and names of today."""
NEXT = """\
alter table tallybook.entry add column anything int;
alter table tallybook.unique_key add column anything int;
alter table tallybook.installation alter column works_from set default {works_from};
update tallybook.installation set works_from = {works_from};
"""
PROGRAM = """\
import asyncio
from tallybook import App

app = App("shop")

@app.task
async def note(n: int) -> None:
    if n % 7 == 3:
        raise ValueError("again, please")

@app.task
async def slow(n: int) -> None:
    await asyncio.sleep(1)
"""
PRODUCER = """\
import sys, time, psycopg
from jobs import note
with psycopg.connect(sys.argv[1], autocommit=True) as conn:
    n = 0
    while True:
        if n % 3 == 0:
            note.with_(unique=f"{sys.argv[2]}{n}").enqueue_sync(conn, 7)
        else:
            note.enqueue_sync(conn, 7)
        n += 1
        print(n, flush=True)
        time.sleep(0.005)
"""


def source(commit: str, folder: Path) -> Path:
    """The source of a commit, out of the repository's history."""
    found = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "src"], capture_output=True, timeout=60, check=False
    )
    if found.returncode:
        pytest.skip(f"commit {commit} is not in the history that is here: {found.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of the previous release."""
    return source(OLD, tmp_path_factory.mktemp("old"))


def newer(tmp_path: Path, works_from: int) -> Path:
    """Today's source with one more migration, which sets the oldest version that can work with it."""
    copy = tmp_path / f"new-{works_from}" / "src"
    shutil.copytree(ROOT / "src", copy)
    next_one = copy / "tallybook" / "sql" / "migrations" / "0002_next.sql"
    next_one.write_text(NEXT.format(works_from=works_from), encoding="utf-8")
    return copy


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(PROGRAM)
    (tmp_path / "producer.py").write_text(PRODUCER)
    return tmp_path


def program(source: Path, project: Path, *words: str) -> Program:
    """A process of one release."""
    return Program(project, *words, PYTHONPATH=f"{source}{os.pathsep}{project}")


def tallybook(source: Path, project: Path, *words: str) -> tuple[int, str]:
    with program(source, project, "-P", "-m", "tallybook", *words) as process:
        return process.ended(), process.output


def test_old_workers_and_producers_go_on_while_the_schema_is_migrated(
    old: Path, project: Path, tmp_path: Path, empty_dsn: str
) -> None:
    """F32, F33, P12, S3-42: an old worker continues through a migration, with producers of both releases."""
    new = newer(tmp_path, 1)
    assert tallybook(old, project, "migrate", "--dsn", empty_dsn)[0] == 0
    with psycopg.connect(empty_dsn, autocommit=True) as db:
        count = "select count(*) from tallybook.job where state = 'completed'"
        with (
            program(old, project, "-P", "-m", "tallybook", "worker", "-A", "jobs:app", "--dsn", empty_dsn) as worker,
            program(old, project, "producer.py", empty_dsn, "old") as producer,
        ):
            wait_until(lambda: db.execute(count).fetchone()[0] > 50, "the old release works", seconds=30)
            db.execute("select tallybook.enqueue('default', 'slow', '{\"n\": 1}')")
            code, said = tallybook(new, project, "migrate", "--dsn", empty_dsn)
            assert code == 0, said
            assert "from version 1" in said
            before = db.execute(count).fetchone()[0]
            with program(new, project, "producer.py", empty_dsn, "new"):
                wait_until(lambda: db.execute(count).fetchone()[0] > before + 300, "both go on", seconds=60)
            assert worker.process.poll() is None and producer.process.poll() is None
            # A failure and a death by the old code.
            db.execute("select tallybook.enqueue('default', 'note', '{\"n\": 3}', max_attempts => 1)")
            wait_until(lambda: db.execute("select from tallybook.dead").fetchall(), "a death by the old code")
            # A new worker beside the old one; then only the old one stops, with SIGTERM.
            with program(
                new, project, "-P", "-m", "tallybook", "worker", "-A", "jobs:app", "--dsn", empty_dsn
            ) as other:
                living = "select count(*) from tallybook.worker where ended_at is null"
                wait_until(lambda: db.execute(living).fetchone()[0] == 2, "the new one is on record", seconds=30)
                mixed = db.execute(count).fetchone()[0]
                wait_until(lambda: db.execute(count).fetchone()[0] > mixed + 100, "both work", seconds=60)
                worker.send(signal.SIGTERM)
                assert worker.ended(30) == 0
                producer.send(signal.SIGKILL)
                producer.ended()
                left = "select count(*) from tallybook.job where state not in ('completed', 'dead')"
                wait_until(lambda: db.execute(left).fetchone()[0] == 0, "every job has ended", seconds=60)
                other.send(signal.SIGTERM)
                assert other.ended(30) == 0
        assert db.execute("select task, reason, failures from tallybook.dead").fetchall() == [("note", "failed", 1)]
        assert (
            db.execute("select * from tallybook.verify()").fetchall() == []
        )  # the first fold has counted what was there
        twice = "select count(*) from (select from tallybook.attempt group by job_id having count(*) > 1) x"
        assert db.execute(twice).fetchone() == (0,)


def test_an_old_program_does_not_start_on_the_new_schema(
    old: Path, project: Path, tmp_path: Path, empty_dsn: str
) -> None:
    """F32: an old worker on a schema that does not support it asks to be updated, with code 2."""
    assert tallybook(newer(tmp_path, 2), project, "migrate", "--dsn", empty_dsn)[0] == 0
    code, said = tallybook(old, project, "worker", "-A", "jobs:app", "--dsn", empty_dsn)
    assert code == 2 and "the schema is at version 2" in said and "Update the package" in said


def test_a_schema_from_before_the_first_release_is_refused(project: Path, tmp_path: Path, empty_dsn: str) -> None:
    """Every command refuses such a schema and says how to go on; `uninstall` removes it."""
    unreleased = "2412f45"  # from before the tables were written as files; its schema cannot be migrated
    assert tallybook(source(unreleased, tmp_path), project, "migrate", "--dsn", empty_dsn)[0] == 0
    new = ROOT / "src"
    for words in (["migrate"], ["worker", "-A", "jobs:app"], ["doctor", "--info"]):
        code, said = tallybook(new, project, *words, "--dsn", empty_dsn)
        assert code != 0 and "unreleased version of Tallybook" in said and "tallybook uninstall" in said
    code, said = tallybook(new, project, "uninstall", "--yes", "--dsn", empty_dsn)
    assert code == 0 and "removed schema tallybook" in said
    assert tallybook(new, project, "migrate", "--dsn", empty_dsn)[0] == 0


def test_a_new_program_does_not_start_on_the_old_schema(
    old: Path, project: Path, tmp_path: Path, empty_dsn: str
) -> None:
    """F32: a new worker on an old schema asks for a migration, with code 2; after it, older jobs run."""
    assert tallybook(old, project, "migrate", "--dsn", empty_dsn)[0] == 0
    with psycopg.connect(empty_dsn, autocommit=True) as db:
        db.execute("select tallybook.enqueue('default', 'note', '{\"n\": 1}')")
    new = newer(tmp_path, 1)
    code, said = tallybook(new, project, "worker", "-A", "jobs:app", "--dsn", empty_dsn)
    assert code == 2 and "the schema is at version 1" in said and "tallybook migrate" in said
    assert tallybook(new, project, "migrate", "--dsn", empty_dsn)[0] == 0
    app = App("shop")

    @app.task
    async def note(n: int) -> None: ...

    assert drain(app, dsn=empty_dsn).completed == 1
