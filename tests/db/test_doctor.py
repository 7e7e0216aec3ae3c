"""The doctor: each problem is made for real, found with advice, and gone once the advice is followed: the control."""

import json
import re
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import class_row

from support import hands
from support.cli import invoke
from support.database import Connection, call, fresh
from support.paths import ROOT
from support.roles import House
from support.waiting import wait_until
from support.workers import POOLED
from tallybook import App, Finding
from tallybook._db import migrate
from tallybook._db.doctor import GROUPS, clock, doctor, examine
from tallybook._db.link import CONNECT
from tallybook.embedded import Server, temporary_server
from tallybook.errors import QueueUnavailable
from tallybook.testing import drain

OWN = pytest.mark.direct("a server of its own")


@dataclass
class Patient:
    """The doctor's findings in one database, now or later."""

    db: Connection

    def all(self, group: str | None = None, *, later: str = "0 s") -> dict[str, Finding]:
        query = (
            "select d.name, d.level, d.finding, d.advice, d.details"
            " from tallybook.doctor(about => %s, at => clock_timestamp() + %s::text::interval) d"
        )
        with self.db.cursor(row_factory=class_row(Finding)) as cursor:
            return {found.name: found for found in cursor.execute(query, [group, later])}

    def fine(self, check: str, *, later: str = "0 s") -> Finding:
        """Assert that the check is ok, without advice; for the horizon wait until no other test's standby is here."""
        found = self.all(later=later)[check]

        def is_ok() -> bool:
            nonlocal found
            found = self.all(later=later)[check]
            return found.level == "ok"

        if check == "horizon" and found.level != "ok":
            wait_until(is_ok, "no other test's standby is there")
        assert (found.level, found.advice) == ("ok", None), found
        return found

    def ill(self, check: str, *words: str, level: str = "warning", later: str = "0 s") -> Finding:
        """Assert that the check's finding has these words, and advice."""
        found = self.all(later=later)[check]
        assert found.level == level, found
        assert all(word in found.finding for word in words), found
        assert found.advice
        return found


@pytest.fixture
def patient(db: Connection) -> Patient:
    return Patient(db)


@pytest.fixture(scope="module")
def own() -> Iterator[Server]:
    """A server for these tests only: few connections, and durable."""
    with temporary_server(settings={"max_connections": 20}, durable=True) as server:
        yield server


@pytest.fixture
def healthy(own: Server) -> Iterator[str]:
    """A database on it with Tallybook installed."""
    with fresh(own) as dsn:
        with psycopg.connect(dsn) as conn:
            migrate.migrate(conn)
        yield dsn


def command(found: Finding, start: str) -> str:
    """The command in the advice that begins with `start`."""
    said = re.search(r"(?<!\w)" + re.escape(start) + r"[^;]*;", found.advice or "")
    assert said, found.advice
    return said[0]


# --- who pins the horizon ---------------------------------------------------------------------------------------------


def test_an_open_transaction(patient: Patient, connect: Callable[..., Connection]) -> None:
    """An open transaction with a job is found by three checks, horizon, transactions and idle, until its commit."""
    open_ = connect(autocommit=False, application_name="till")
    (pid,) = open_.execute("select pg_backend_pid() from tallybook.enqueue('mail', 'x')").fetchone() or ()
    for check, level, later in (
        ("horizon", "note", "10 min"), ("horizon", "warning", "2 h"), ("transactions", "note", "2 min"),
        ("transactions", "warning", "15 min"), ("idle_in_transaction", "note", "2 min"),
        ("idle_in_transaction", "warning", "10 min"),
    ):  # fmt: skip
        patient.fine(check)
        found = patient.ill(check, f"pid {pid} (", "idle in transaction", level=level, later=later)
        assert command(found, "select pg_terminate_backend") == f"select pg_terminate_backend({pid});"
    assert "has enqueued jobs" in patient.ill("transactions", later="15 min").finding
    open_.commit()
    for check in ("horizon", "transactions", "idle_in_transaction"):
        patient.fine(check, later="2 h")


def test_the_advice_ends_a_transaction(patient: Patient, connect: Callable[..., Connection]) -> None:
    """A transaction that only reads pins the horizon and holds no job back; the command in the advice ends it."""
    open_ = connect(autocommit=False)
    open_.execute("select count(*) from tallybook.entry")
    open_.execute("declare c cursor for select * from tallybook.entry")  # keeps a snapshot
    found = patient.ill("horizon", later="2 h")
    patient.fine("transactions", later="2 h")
    patient.db.execute(command(found, "select pg_terminate_backend").encode())
    wait_until(lambda: patient.all("horizon", later="2 h")["horizon"].level == "ok", "the session is gone")


def test_a_prepared_transaction(patient: Patient, connect: Callable[..., Connection]) -> None:
    """A prepared transaction with a job is found with the command that ends it, and is gone after that."""
    gid = f"shop {uuid.uuid4().hex[:8]}"
    with connect(autocommit=False) as open_:
        open_.execute("select tallybook.enqueue('mail', 'x')")
        open_.execute(f"prepare transaction '{gid}'".encode())
    patient.fine("prepared")
    found = patient.ill("prepared", gid, "and has enqueued jobs", later="10 min")
    patient.ill("horizon", gid, level="note", later="10 min")
    patient.ill("transactions", gid, "has enqueued jobs", later="15 min")
    patient.db.execute(command(found, "rollback prepared").encode())
    for check in ("prepared", "horizon", "transactions"):
        patient.fine(check, later="2 h")


@OWN
def test_a_slot(healthy: str) -> None:
    """An unused replication slot is found with the WAL that it keeps; the command in the advice drops it."""
    with psycopg.connect(healthy, autocommit=True) as db:
        patient = Patient(db)
        patient.fine("slots")
        db.execute("select pg_create_physical_replication_slot('old_standby', true)")
        try:
            found = patient.ill("slots", "old_standby", "not in use", "of WAL")
        finally:
            db.execute(command(found, "select pg_drop_replication_slot").encode())
        patient.fine("slots")


# --- storage and settings ---------------------------------------------------------------------------------------------


def test_dead_rows_and_a_table_without_autovacuum(patient: Patient) -> None:
    """A table with many dead rows and no autovacuum is found; the two commands of the advice fix both."""
    db = patient.db
    patient.fine("dead_rows"), patient.fine("autovacuum")
    db.execute("alter table tallybook.progress set (autovacuum_enabled = off)")
    with db.transaction():
        db.execute(
            "insert into tallybook.progress (job_id, attempt, updated_at) select n, 1, now()"
            " from generate_series(1, 11000) n"
        )
        db.execute("delete from tallybook.progress")
        db.execute("select pg_stat_force_next_flush()")
    off = patient.ill("autovacuum", "tallybook.progress")
    dead = wait_until(
        lambda: (f := patient.all("storage")["dead_rows"]).level == "note" and f, "the statistics are there"
    )
    assert "tallybook.progress has 11000 dead rows" in dead.finding
    db.execute(command(off, "alter table").encode())
    db.execute(command(dead, "vacuum tallybook.").encode())
    patient.fine("autovacuum")
    wait_until(lambda: patient.all("storage")["dead_rows"].level == "ok", "vacuum has told")


def test_the_size(patient: Patient) -> None:
    """The size lists the largest tables, each ledger as a whole, and mentions the unknown free disk space."""
    found = patient.fine("size")
    tables = {one["table"] for one in found.details["items" if "items" in found.details else "tables"]}
    assert {"tallybook.entry", "tallybook.claim", "tallybook.outcome"} <= tables
    assert (
        sum(one["bytes"] for one in found.details["tables"]) <= found.details["bytes"] < found.details["database_bytes"]
    )
    assert "disk" in found.finding


@OWN
@pytest.mark.slow
def test_old_transaction_ids() -> None:
    """Unfrozen old transaction ids are found; once no session pins the horizon, vacuum freeze fixes it."""
    with temporary_server(settings={"autovacuum_freeze_max_age": 100_000}) as server:
        dsn = server.dsn("postgres")
        with psycopg.connect(dsn, autocommit=True) as db, psycopg.connect(dsn) as pin:
            migrate.migrate(db)
            patient = Patient(db)
            patient.fine("wraparound")
            pin.execute("declare c cursor for select * from tallybook.entry")
            db.execute("create temp table x (n int)")
            for _ in range(2):  # each writing block with an exception uses a transaction id
                db.execute(
                    "do $$ begin for n in 1..65000 loop"
                    " begin insert into x values (n); exception when others then raise; end; end loop; end $$"
                )
            found = patient.ill("wraparound", "database postgres", "transactions old")
            pin.rollback()
            db.execute(command(found, "vacuum freeze").encode())
            patient.fine("wraparound")


@pytest.mark.direct("a setting of the session")
def test_settings(patient: Patient) -> None:
    """A setting with which a crash loses jobs is found with its right value; set so, it is not found."""
    before = patient.all("settings")["settings"].finding
    patient.db.execute("set synchronous_commit = off")
    found = patient.all("settings")["settings"]
    assert "synchronous_commit is off" in found.finding and "synchronous_commit = on" in (found.advice or "")
    patient.db.execute("set synchronous_commit = on")
    after = patient.all("settings")["settings"]
    assert after.finding == before and "synchronous_commit" not in after.finding


@OWN
def test_connections(healthy: str) -> None:
    """A shortage of connections is found, with the number in use; closed ones are not counted."""
    with psycopg.connect(healthy, autocommit=True) as db:
        patient = Patient(db)
        patient.fine("connections")
        more = [psycopg.connect(healthy) for _ in range(15)]
        wait_until(lambda: patient.all("workers")["connections"].level == "warning", "they are counted")
        patient.ill("connections", "of 20 connections")
        for one in more:
            one.close()
        wait_until(lambda: patient.all("workers")["connections"].level == "ok", "they are gone")


# --- workers ----------------------------------------------------------------------------------------------------------


put = partial(hands.put, queue="mail", task="x")


def start(db: Connection, queue: str, **more: object) -> int:
    return int(call(db, "worker_start", name="till-3", queues=[queue], **more)[0][0])


def claim(db: Connection, worker: int, queue: str = "mail") -> uuid.UUID:
    lease = uuid.uuid4()
    db.execute("select tallybook.claim(%s, array[%s], '{1}', %s)", [worker, queue, lease])
    return lease


def test_a_silent_worker(patient: Patient) -> None:
    """A worker past its lease is found until it is rescued, as the advice says."""
    worker = start(patient.db, "mail")
    assert patient.fine("workers").finding == "1 worker live"
    patient.ill("workers", '"till-3"', f"({worker})", "has sent no heartbeat for 5 min", "lease is 30 s", later="5 min")
    for later in ("5 min", "6 min"):
        patient.db.execute("select tallybook.rescue(at => clock_timestamp() + %s::text::interval)", [later])
    patient.ill("workers", "no worker is running", level="note", later="5 min")


@pytest.mark.direct("a lock of the session")
def test_a_worker_without_its_session(patient: Patient, connect: Callable[..., Connection]) -> None:
    """A worker that has lost its session is found; while it holds the session it is not."""
    worker = start(patient.db, "mail", session=True)
    holder = connect()
    holder.execute("select pg_advisory_lock_shared(1413565443, %s)", [worker])
    patient.fine("workers")
    holder.execute("select pg_advisory_unlock_shared(1413565443, %s)", [worker])
    patient.ill("workers", "has lost its session")


def test_a_job_that_runs_for_long(patient: Patient) -> None:
    """A job that runs for more than an hour is found with its worker; once it has ended it is not."""
    job = put(patient.db)
    lease = claim(patient.db, start(patient.db, "mail"))
    patient.fine("running")
    patient.ill("running", f"job {job} (x) has been running for 2 h on till-3", level="note", later="2 h")
    patient.db.execute("select tallybook.complete(%s, %s, 1)", [lease, job])
    patient.fine("running", later="2 h")


def test_running_lists_what_runs(patient: Patient) -> None:
    """`running` has one row per running attempt, longest first; no ended or waiting job; 0 rows is refused."""
    db, rows = patient.db, "select job_id, queue, task, worker from tallybook.running()"
    jobs = [put(db) for _ in range(3)]
    worker = start(db, "mail")
    leases = [claim(db, worker) for _ in jobs[:2]]
    assert db.execute(rows).fetchall() == [(job, "mail", "x", "till-3") for job in jobs[:2]]
    db.execute("select tallybook.complete(%s, %s, 1)", [leases[0], jobs[0]])
    assert db.execute(rows).fetchall() == [(jobs[1], "mail", "x", "till-3")]
    with pytest.raises(psycopg.Error, match="max_jobs 0 is out of range") as refused:
        db.execute("select tallybook.running(0)")
    assert refused.value.sqlstate == "TB005"


def test_a_worker_that_is_older_than_the_schema(patient: Patient) -> None:
    """A worker that started before a migration is found; a restarted one is not."""
    worker = start(patient.db, "mail")
    patient.fine("releases")
    patient.db.execute("update tallybook.installation set routines = 'of another release'")
    migrate.migrate(patient.db)
    patient.ill("releases", '"till-3" was started before', level="note")
    patient.db.execute("select tallybook.worker_stop(%s)", [worker])
    start(patient.db, "mail")
    patient.fine("releases")


# --- queues -----------------------------------------------------------------------------------------------------------


def test_a_queue_that_nobody_serves(patient: Patient) -> None:
    """A queue with a job and no live worker is found, with its wait; a worker that serves it fixes this."""
    patient.fine("unserved_queues")
    put(patient.db)
    start(patient.db, "other")
    patient.ill("unserved_queues", '"mail"', "for 10 min", later="10 min")
    start(patient.db, "mail")
    patient.fine("unserved_queues")


@pytest.mark.parametrize("version", [1, 3])
def test_a_task_that_nobody_knows(patient: Patient, version: int) -> None:
    """A set-aside task, or version of its args, is found until a live worker knows it."""
    db = patient.db
    job = put(db, options={"version": version})
    lease = claim(db, start(db, "mail"))
    patient.fine("unserved_tasks")
    db.execute("select tallybook.move(%s, %s, 1)", [lease, job])
    patient.ill("unserved_tasks", '"mail"', 'task "x"' + (" in version 3" if version == 3 else ""))
    patient.fine("unserved_queues")
    catalogue = json.dumps([{"name": "x", "app": "shop", "version": version}])
    db.execute("select tallybook.worker_start('new', '{mail}', '{x}', catalogue => %s::text::jsonb)", [catalogue])
    patient.fine("unserved_tasks")


def test_a_paused_queue(patient: Patient) -> None:
    """A paused queue is found with who paused it and the age of its jobs; a resumed one is not."""
    put(patient.db)
    patient.db.execute("select tallybook.pause('mail', 'ada')")
    patient.ill("paused", '"mail"', "by ada", level="note")
    patient.ill("paused", "for 2 h by ada", "its next job has waited for 2 h", later="2 h")
    patient.fine("unserved_queues"), patient.fine("backlog", later="2 h")
    patient.db.execute("select tallybook.resume('mail')")
    patient.fine("paused")


def test_an_old_backlog(patient: Patient) -> None:
    """A job that waits long in a served queue is found; once it is claimed it is not."""
    put(patient.db)
    worker = start(patient.db, "mail", lease="1 day")
    patient.fine("backlog")
    patient.ill("backlog", '"mail"', "20 min", level="note", later="20 min")
    patient.ill("backlog", '"mail"', "2 h", later="2 h")
    claim(patient.db, worker)
    patient.fine("backlog", later="2 h")


def test_dead_letters(patient: Patient) -> None:
    """Dead letters of the last day are counted by task, without dropped ones; ten within an hour are a warning."""
    worker = start(patient.db, "mail")
    for n in range(1, 11):
        job = put(patient.db, max_attempts=1)
        patient.db.execute("select tallybook.fail(%s, %s, 1, '{}')", [claim(patient.db, worker), job])
        patient.ill("dead_letters", f'{n} of task "x" (failed)', level="warning" if n == 10 else "note")
    patient.ill("dead_letters", level="note", later="2 h")
    patient.fine("dead_letters", later="2 days")
    patient.db.execute("select tallybook.drop_dead_many(task => 'x')")
    patient.fine("dead_letters")


def test_an_open_breaker(patient: Patient) -> None:
    """An open breaker is found; a closed one is not."""
    patient.db.execute("select tallybook.breaker_set('acme', 3, '1 min', '1 h'), tallybook.breaker_open('acme')")
    patient.ill("breakers", '"acme" has been open', "holds back 0 jobs", level="note")
    patient.db.execute("select tallybook.breaker_close('acme')")
    patient.fine("breakers")


# --- maintenance ------------------------------------------------------------------------------------------------------


def test_services_that_do_not_run(patient: Patient) -> None:
    """S3-41: while a worker lives, a service that did not run for two minutes is found; one that ran is not."""
    patient.fine("services", later="5 min")
    start(patient.db, "mail", lease="1 day")
    patient.fine("services", later="1 min")
    found = patient.ill("services", later="5 min")
    assert "promote" in {one["service"] for one in found.details["items"]} and "--no-maintenance" in (
        found.advice or ""
    )
    patient.db.execute("select tallybook.promote(as_service => true, at => clock_timestamp() + interval '4 min')")
    found = patient.all(later="5 min")["services"]
    assert "promote" not in {one["service"] for one in found.details["items"]}


def test_schedules(patient: Patient, dsn: str) -> None:
    """A schedule that no worker can compute and one with a late tick are found; dropped or paused ones are not."""
    db = patient.db
    db.execute("select tallybook.schedule_set('bad', 'report', cron => '61 * * * *')")
    db.execute("select tallybook.schedule_set('good', 'report', every => '1 h')")
    drain(App("shop", dsn=dsn))  # as a worker does
    patient.ill("schedules", '"bad" cannot be computed')
    db.execute("select tallybook.schedule_drop('bad')")
    patient.fine("schedules")
    patient.ill("schedules", 'the tick of schedule "good"', "late", later="3 h")
    db.execute("select tallybook.schedule_set('new', 'report', cron => '0 0 29 2 *')")
    patient.ill("schedules", 'no worker has seen schedule "new", set ', later="2 min")
    db.execute("select tallybook.schedule_drop('new')")
    db.execute("select tallybook.schedule_pause('good', 'ada')")
    patient.fine("schedules", later="3 h")


def test_counters_that_are_wrong(patient: Patient, dsn: str) -> None:
    """S3-33: counters that differ from a recount are a problem, with both numbers; `recount` fixes it."""
    db = patient.db
    put(db)
    db.execute("select tallybook.fold()")
    patient.fine("counters")
    assert db.execute("update tallybook.series set n = n + 4 where what = 'opened'").rowcount
    found = patient.ill("counters", 'queue "mail", task "x", available: 5 counted, 1 found', level="problem")
    assert by_name(doctor(dsn, verify=True))["counters"].finding == found.finding
    db.execute("select tallybook.recount()")
    patient.fine("counters")


def test_a_database_that_came_from_another_cluster(patient: Patient) -> None:
    """A database from another cluster is a problem, no cursor is read, and a rebase fixes it."""
    put(patient.db)
    start(patient.db, "mail")
    patient.db.execute("update tallybook.installation set system_identifier = 42")
    patient.ill("cluster", "came from another cluster", level="problem")
    patient.fine("unserved_queues")
    patient.db.execute("select tallybook.rebase()")
    patient.fine("cluster")


# --- roles and rights -------------------------------------------------------------------------------------------------


@pytest.mark.direct("logins of their own")
def test_a_right_that_is_missing(at: House) -> None:
    """A role's lost right to a function, view or column is found; running `tallybook roles` again restores it."""
    patient = Patient(at.db)
    assert patient.fine("roles").finding == "every role has its rights"
    for lost, named in (
        ("execute on function tallybook.pause from {}operator", "operator may not use tallybook.pause("),
        ("select on tallybook.queues from {}worker", "worker may not read tallybook.queues"),
        ("select (id) on tallybook.job from {}reader", "reader may not read tallybook.job"),
    ):
        at.db.execute(("revoke " + lost.format(at.prefix)).encode())
        patient.ill("roles", at.prefix + named)
        at.give()
        patient.fine("roles")
    at.db.execute("alter function tallybook.pause(text, text, timestamptz) security invoker")
    patient.ill("roles", "tallybook.pause(", "rights of its owner")
    at.give()
    patient.fine("roles")


@pytest.mark.direct("logins of their own")
def test_an_operator_asks(at: House) -> None:
    """S10: an operator may run all checks, and sees what is hidden without pg_monitor; no other role may."""
    at.db.execute("select tallybook.enqueue('mail', 'x')")
    operator = at.as_("operator")
    held = at.connect(at.owner, autocommit=False)
    held.execute("declare c cursor for select * from tallybook.entry")
    patient = Patient(operator)
    found = patient.all(later="2 h")
    assert not [one for one in found.values() if "could not be checked" in one.finding]
    assert found["unserved_queues"].level == "warning"
    assert found["horizon"].level == "ok" and "pg_monitor" in found["horizon"].finding
    at.admin.execute(f"grant pg_monitor to {operator.info.user}".encode())
    patient.ill("horizon", f"pid {held.info.backend_pid} (", later="2 h")
    assert "pg_monitor" not in patient.fine("prepared").finding
    for kind in ("producer", "worker", "reader", "metrics"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            at.as_(kind).execute("select * from tallybook.doctor()")


@pytest.mark.direct("logins of their own")
def test_what_a_user_may_not_check_is_a_warning(at: House) -> None:
    """The exit code after a release is not 0 if the doctor lacked the rights for its checks."""
    found = by_name(list(examine(at.as_("worker"))))
    assert {one.level for one in found.values() if "permission denied" in one.finding} == {"warning"}


# --- what only a client sees ------------------------------------------------------------------------------------------


def by_name(found: list[Finding]) -> dict[str, Finding]:
    named = {one.name: one for one in found}
    assert len(named) == len(found), "a check twice"
    return named


def test_all_checks(dsn: str, patient: Patient) -> None:
    """The client runs its four checks and all of SQL's, each once, in one order, each with a valid level."""

    def groups(db: Connection) -> list[str]:
        with pytest.raises(psycopg.Error, match='has no checks about "x"') as refused:
            db.execute("select tallybook.doctor('x')")
        assert refused.value.sqlstate == "TB005"
        hint = (refused.value.diag.message_hint or "").removeprefix("It has checks about ").removesuffix(".")
        return hint.split(", ")

    found = doctor(dsn)
    assert [one.name for one in found][:4] == ["connection", "schema", "clock", "pooler"]
    assert [one.name for one in found][4:] == list(patient.all())
    assert {one.level for one in found} <= {"ok", "note", "warning", "problem"}
    assert all((one.level == "ok") == (one.advice is None) for one in found), found
    named = by_name(found)
    assert named["connection"].details["server_version"] in named["connection"].finding
    assert named["schema"].level == "ok"
    assert (named["pooler"].level == "ok") is not POOLED and named["pooler"].details["pooled"] is POOLED
    assert set(GROUPS) == set(groups(patient.db))


def test_the_page_lists_every_check(dsn: str) -> None:
    """docs/doctor.md has one line per check, in the order of the checks, with its group."""
    page = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (?:`(\w+)`)? ?\| `(\w+)` \|", page, re.MULTILINE)
    made = [one.name for one in doctor(dsn)]
    elsewhere = {"partitions"} - set(made)  # where history is dropped
    assert [check for _, check in listed if check not in elsewhere] == made
    assert list(dict.fromkeys(group for group, _ in listed if group)) == list(GROUPS)


def test_a_schema_of_another_release(dsn: str, empty_dsn: str, db: Connection) -> None:
    """No schema, other functions or a newer schema is found with advice; after a migration it is ok."""

    def schema(dsn: str) -> Finding:
        return by_name(doctor(dsn))["schema"]

    missing = by_name(doctor(empty_dsn))
    assert (missing["schema"].level, missing["schema"].advice) == ("problem", "Run `tallybook migrate`.")
    assert "were skipped" in missing["checks"].finding
    latest = migrate.latest()
    for version, works_from, functions, level, word in (
        (latest + 1, latest + 1, "other", "problem", "are incompatible"),
        (latest + 1, latest, "other", "note", "they are compatible"),
        (latest, latest, "other", "warning", "a different release"),
    ):
        db.execute(
            "update tallybook.installation set version = %s, works_from = %s, routines = %s",
            [version, works_from, functions],
        )
        found = schema(dsn)
        assert found.level == level and word in found.finding and found.advice, found
    migrate.migrate(db)
    assert schema(dsn).level == "ok"


def test_job_ids_of_another_node(dsn: str, db: Connection, caplog: pytest.LogCaptureFixture) -> None:
    """Data of node 3 in a schema that was installed as node 0 is found, with a statement that repairs the sequence.

    `tallybook migrate` and a worker that starts report it in the same words.
    """
    db.execute("update tallybook.installation set node = 3")
    found = by_name(doctor(dsn))["schema"]
    assert found.level == "problem" and "is 3, but new job ids have number 0" in found.finding
    migrated = invoke("migrate", to=dsn)
    assert migrated.exit_code == 1 and found.finding in migrated.output and str(found.advice) in migrated.output
    drain(App("shop"), dsn=dsn)
    assert f"{found.finding}. {found.advice}" in caplog.messages
    repair = (found.advice or "").removeprefix("Run: ").split(" restart N")[0]
    db.execute(f"{repair} restart {(3 << 43) + 7}".encode())
    assert by_name(doctor(dsn))["schema"].level == "ok"


def test_clocks(db: Connection) -> None:
    """The clocks' difference is measured by the shortest of several round trips; a large one is found."""
    assert clock(db).level == "ok"
    for off, level, word in ((5, "note", "ahead of"), (-5, "note", "behind"), (60, "warning", "60.0 s ahead of")):
        found = clock(db, lambda off=off: time.time() + off)  # type: ignore[misc]
        assert found.level == level and word in found.finding and found.advice, found


def test_what_takes_long_is_given_up(dsn: str, connect: Callable[..., Connection]) -> None:
    """A check that meets a lock gives up in time and says so, and all others run. Without the lock it runs."""
    holder, patient = connect(autocommit=False), psycopg.connect(dsn, **CONNECT)
    patient.prepare_threshold = None
    holder.execute("lock table tallybook.dead")
    with patient:
        found = by_name(list(examine(patient, patience=timedelta(seconds=0.8))))
        assert "could not be checked within 0.8 s" in found["queues"].finding and found["queues"].level == "note"
        assert "unserved_queues" not in found and "cluster" in found and "workers" in found
        holder.rollback()
        assert "unserved_queues" in by_name(list(examine(patient, patience=timedelta(seconds=5))))


def test_a_group_that_fails_is_a_finding(patient: Patient, connect: Callable[..., Connection]) -> None:
    """In SQL, too, a group's lock timeout is a row of its own, and the other groups are there."""
    holder = connect(autocommit=False)
    holder.execute("lock table tallybook.dead")
    with patient.db.transaction():
        patient.db.execute("set local lock_timeout = '50ms'")
        found = patient.all()
    assert "lock timeout" in found["queues"].finding and "cluster" in found
    holder.rollback()
    assert "queues" not in patient.all()


def test_a_server_that_is_not_there() -> None:
    """A missing server is an error, as with every other verb."""
    with pytest.raises(QueueUnavailable):
        doctor("host=127.0.0.1 port=1 user=u dbname=d")


# --- as people meet it ------------------------------------------------------------------------------------------------


@OWN
def test_the_command_line(healthy: str) -> None:
    """Exit code 0 with notes only, 1 with a warning, 2 for usage; --json and --quiet; one line counts the levels."""
    fine = invoke("doctor", to=healthy)
    assert fine.exit_code == 0, fine.output
    assert "note     workers: no worker is running" in fine.output and re.search(
        r"\d+ checks: 1 note, \d+ ok\n", fine.output
    )
    with psycopg.connect(healthy, autocommit=True) as db:
        put(db)
        bad = invoke("doctor", "--quiet", to=healthy)
        assert bad.exit_code == 1 and 'WARNING  unserved_queues: queue "mail" has had available jobs' in bad.output
        assert "-> Start a worker" in bad.output and "ok       " not in bad.output
        listed = invoke("doctor", "--json", to=healthy)
        assert listed.exit_code == 1
        found = {one["name"]: one for one in json.loads(listed.output)}
        assert found["unserved_queues"]["level"] == "warning" and found["unserved_queues"]["details"]["count"] == 1
        assert set(found["horizon"]) == {"name", "level", "finding", "advice", "details"}
        start(db, "mail")
    assert invoke("doctor", to=healthy).exit_code == 0
    assert invoke("doctor", "--nonsense", to=healthy).exit_code == 2


async def test_in_python(dsn: str, db: Connection) -> None:
    """`app.doctor.run()` returns the findings, with and without an event loop; `good` means no action is needed."""
    app = App("shop", dsn=dsn)
    put(db)
    for found in (await app.doctor.run(), app.doctor.run(verify=True).sync()):
        named = by_name(found)
        assert not named["unserved_queues"].good and named["workers"].good and named["cluster"].good
        assert conninfo_to_dict(dsn)["dbname"] in named["connection"].finding
