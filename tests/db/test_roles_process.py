"""Real programs that connect with only their role: a worker process, a drain, an app; and `tallybook roles`."""

import re
import signal
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from click.testing import Result
from psycopg.conninfo import make_conninfo

from support.broken import source
from support.cli import Command, invoke
from support.database import one
from support.hands import states
from support.pages import blocks
from support.paths import ROOT
from support.roles import House, house, refused
from support.waiting import wait_until
from tallybook import App, Snooze
from tallybook._db import migrate, roles
from tallybook.errors import ConfigError, RoleError, UnknownJob

pytestmark = pytest.mark.direct("logins of their own")
PAGE = ROOT / "docs/roles.md"


def test_a_real_worker_needs_no_more_than_its_role(at: House, tmp_path: Path) -> None:
    """S10: `tallybook worker` as the worker role runs, fails, snoozes, keeps results and checkpoints, fires, stops."""
    jobs = """
from datetime import timedelta
from tallybook import App, Context, Snooze

app = App("shop")


@app.task(queue="mail", schedule="0 0 1 1 *")
async def greet(name: str = "nobody") -> dict[str, str]:
    return {"said": f"hello {name}"}


@app.task(queue="mail", max_attempts=1)
async def fails() -> None:
    raise ValueError("no")


@app.task(queue="mail")
async def reports(ctx: Context) -> None:
    await ctx.progress(0.5, "half")
    if await ctx.get_checkpoint() is None:
        await ctx.set_checkpoint({"at": 1})
        raise Snooze(timedelta(0))


@app.task(queue="mail", process=True)
def apart() -> int:
    return 1
"""
    (tmp_path / "jobs.py").write_text(jobs)
    producer = at.as_("producer")
    ids = [
        one(producer, f"select tallybook.enqueue('mail', {task}, {args})")
        for task, args in (
            ("'greet'", """'{"name": "ada"}'"""),
            *((f"'{name}'", "'{}'") for name in ("fails", "reports", "apart", "unknown")),
        )
    ]  # fmt: skip
    later = one(
        producer, "select tallybook.enqueue('mail', 'greet', run_at => clock_timestamp() + '1 s', order_key => 'o')"
    )
    at.db.execute(
        "select tallybook.schedule_set('by the second', 'greet', queue => 'mail', every => '1 s'),"
        " tallybook.schedule_set('by query', 'greet', queue => 'mail', every => '1 s',"
        "   query => 'select ''k'' as key, jsonb_build_object(''name'', current_user::text) as args')"
    )
    user = at.user("worker")
    with Command(tmp_path, "worker", "-A", "jobs:app", "--queues", "mail", dsn=at.dsn_of(user)) as command:
        wait_until(
            lambda: states(at.db, *ids[:4], later) == ["completed", "dead", "completed", "completed", "completed"],
            "all jobs have ended",
            seconds=30,
        )
        wait_until(
            lambda: (
                at.db.execute("select count(distinct schedule) from tallybook.fire where what = 'enqueued'").fetchone()
                == (2,)
            ),
            "both schedules have fired",
            seconds=30,
        )
        assert at.db.execute("select unserved from tallybook.job where id = %s", [ids[4]]).fetchone() == (True,)
        command.send(signal.SIGTERM)
        assert command.ended() == 0, command.output
        assert "permission denied" not in command.output, command.output
    assert at.db.execute("select count(*) from tallybook.schedule where source = 'code'").fetchone() == (1,)
    assert at.db.execute("select count(*) from tallybook.worker where ended_at is null").fetchone() == (0,)
    assert at.db.execute(
        "select args from tallybook.job where args ->> 'name' like %s limit 1", [f"{at.prefix}%"]
    ).fetchone() == (
        {"name": user},  # the query ran with the worker's rights
    )


async def test_drain_and_rescue_as_the_worker_role(at: House) -> None:
    """S10: app.drain rescues a dead worker's job and runs all jobs as the worker role; the producer role enqueues."""
    app = App("shop", dsn=at.dsn_of(at.user("producer")))
    done: list[int] = []

    @app.task
    async def work(n: int) -> None:
        done.append(n)
        if n == 2:
            raise Snooze(timedelta(hours=1))

    for n in (1, 2, 3):
        job = await work.enqueue(app, n)
    assert await app.jobs.state(job) == "available"
    with pytest.raises(UnknownJob):
        await app.jobs.state(4711)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        await app.get(job)
    worker = at.as_("worker")
    worker.execute("select tallybook.worker_start('dead', '{default}', array[%s])", [work.name])
    taken = worker.execute("select jobs from tallybook.claim(1, '{default}', '{1}', gen_random_uuid())").fetchone()
    assert taken == (1,)
    at.db.execute("update tallybook.worker set seen_at = '-infinity'")
    report = await app.drain(dsn=at.dsn_of(worker.info.user))
    assert sorted(done) == [1, 2, 3] and report.completed == 2


def run(at: House, user: str, *words: str) -> Result:
    return invoke(*words, to=at.dsn_of(user))


def test_the_command_line_as_operator_and_producer(at: House) -> None:
    """An operator's commands work with the role alone; a producer can enqueue, and `job list` is denied."""
    producer, operator = at.user("producer"), at.user("operator")
    assert run(at, producer, "enqueue", "mail", "greet", "{}").exit_code == 0
    at.db.execute("select tallybook.worker_start('w', '{mail}', '{greet}')")
    for words in (
        ["job", "list"], ["job", "show", "1"], ["queue", "list"], ["queue", "pause", "mail"],
        ["queue", "resume", "mail"], ["task", "list"], ["schedule", "set", "s", "greet", "--every", "1 h"],
        ["schedule", "list"], ["schedule", "show", "s"], ["schedule", "run", "s"], ["schedule", "pause", "s"],
        ["schedule", "drop", "s", "--yes"], ["service", "list"], ["subject", "list"], ["dead", "list"],
        ["doctor", "--info"], ["job", "cancel", "1"], ["job", "retry", "1"],
    ):  # fmt: skip
        result = run(at, operator, *words)
        assert result.exit_code == 0, f"{words}: {result.output}"
    result = run(at, producer, "job", "list")
    assert result.exit_code == 1 and "permission denied" in result.output and "lacks a privilege" in result.output


def test_the_command(at: House) -> None:
    """`tallybook roles` prints what it made, can be run again, prints SQL, and revokes all."""
    words = ("roles", "--prefix", at.prefix)
    again = run(at, at.owner, *words)
    assert again.exit_code == 0 and again.output.count("exists already") == len(roles.KINDS), again.output
    printed = invoke(*words, "--sql")
    assert f'create role "{at.prefix}producer" nologin' in printed.output and "_roles_use" in printed.output
    gone = run(at, at.owner, *words, "--forget")
    assert gone.exit_code == 0 and "revoked all rights" in gone.output
    assert "nothing to do" in run(at, at.owner, *words, "--forget").output
    taken = run(at, at.owner, *words)
    assert taken.exit_code == 1 and "--existing" in taken.output, taken.output
    assert run(at, at.owner, *words, "--existing").exit_code == 0
    denied = run(at, at.user("worker"), *words)
    assert denied.exit_code == 1 and "permission denied" in denied.output
    wrong = run(at, at.owner, "roles", "--prefix", "Shop")
    assert wrong.exit_code == 2 and "prefix" in wrong.output


def test_the_examples_of_the_page_run(at: House) -> None:
    """docs/roles.md as written, with other names: the logins can do what the page says."""
    made, *asked = (
        block.replace("tallybook_", at.prefix).replace("shop_", f"{at.prefix}shop_") for block in blocks(PAGE, "pgsql")
    )
    at.created += [f"{at.prefix}shop_web", f"{at.prefix}shop_worker"]
    at.db.execute(made.encode())
    web, worker = (
        psycopg.connect(make_conninfo(at.dsn, user=name, password="secret"), autocommit=True)
        for name in at.created[-2:]
    )
    with web, worker:
        assert web.execute("select tallybook.enqueue('mail', 'greet')").fetchone() == (1,)
        worker.execute("select tallybook.enqueue('mail', 'greet')")
        worker.execute("select tallybook.worker_start('w', '{mail}')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            web.execute("select tallybook.worker_start('w', '{mail}')")
        reader = at.as_("reader")
        for statement in asked[0].split(";\n")[:-1]:
            assert reader.execute(statement.encode()).fetchall()
        assert web.execute(asked[1].strip().encode()).fetchone() == ("available",)
    lines = " ".join(blocks(PAGE, "sh")).splitlines()
    assert set(re.findall(r"--\w+", " ".join(lines))) == {"--prefix", "--existing", "--sql", "--forget"}


def test_the_tables_of_the_page_are_the_list(at: House) -> None:
    """docs/roles.md lists each public function and view with exactly the roles that have it."""
    rows = re.findall(r"^\| `(\w+)` \|([^|]*)\|([^|]*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    told = {kind: tuple(set(re.findall(r"`(\w+)`", cell)) for cell in cells) for kind, *cells in rows[-5:]}
    for kind in roles.KINDS:
        found = [
            {
                row[0]
                for row in at.db.execute(
                    "select name from tallybook._rights()"
                    " where %s = any (roles) and kind = any (%s) and name not like '\\_%%'",
                    [kind, kinds],
                )
            }
            for kinds in (["definer", "caller"], ["view"])
        ]
        assert told[kind] == tuple(found), kind


# `tallybook roles`: run again, kept by migrations, run by an owner who may not create roles, and revoked


def matrix(at: House) -> list[tuple[object, ...]]:
    return at.db.execute(
        "select 'f', oid::regprocedure::text, proacl::text, prosecdef, proconfig::text from pg_proc"
        " where pronamespace = 'tallybook'::regnamespace"
        " union all select 'c', relname, relacl::text, null, null from pg_class"
        " where relnamespace = 'tallybook'::regnamespace order by 1, 2"
    ).fetchall()


def test_again_changes_nothing(at: House) -> None:
    """`tallybook roles` run twice changes nothing and creates nothing."""
    before = matrix(at)
    assert at.give().created == []
    assert matrix(at) == before


def test_a_migration_keeps_the_rights(at: House) -> None:
    """A migration that replaces functions and views leaves every right as it was."""
    before = matrix(at)
    at.db.execute("update tallybook.installation set routines = 'other'")
    assert migrate.migrate(at.db) == ["functions and views"]
    assert matrix(at) == before


def test_control_a_replaced_function_is_the_callers(at: House) -> None:
    """Negative control: "create or replace" alone loses the owner's rights, and anybody may call a new function."""
    text = source("enqueue")
    at.db.execute(text.encode())
    assert at.db.execute("select prosecdef, proconfig from pg_proc where proname = 'enqueue'").fetchone() == (
        False,
        None,
    )
    refused(at.as_("producer"), "select tallybook.enqueue('q', 't')")
    at.db.execute("create function tallybook.newer() returns int language sql as 'select 1'")
    assert at.as_("metrics").execute("select tallybook.newer()").fetchone() == (1,)
    at.db.execute("select tallybook._roles_apply()")
    refused(at.connect(f"{at.prefix}metrics_login"), "select tallybook.newer()")


def test_another_prefix_replaces_the_roles(at: House) -> None:
    """Roles with another prefix replace the old ones, which lose their rights here."""
    login = at.as_("producer")
    other = at.prefix + "n_"
    for kind in roles.KINDS:
        at.created.append(other + kind)
    roles.create(at.db, other)
    refused(login, "select tallybook.enqueue('q', 't')")


def test_forget(at: House) -> None:
    """--forget: functions run with the caller's rights again, as if there had never been roles."""
    conn = at.as_("producer")
    assert sorted(roles.forget(at.db)) == sorted(at.prefix + kind for kind in roles.KINDS)
    assert at.db.execute(
        "select count(*) from pg_proc where prosecdef and pronamespace = 'tallybook'::regnamespace"
    ).fetchone() == (0,)
    refused(conn, "select tallybook.enqueue('q', 't')")
    at.db.execute("select tallybook.enqueue('q', 't')")


def test_without_the_right_to_create_roles(empty_dsn: str) -> None:
    """An owner who may not create roles gets SQL for an administrator, and can use existing roles."""
    with house(empty_dsn, createrole=False) as made:
        before = matrix(made)
        with pytest.raises(RoleError, match=f"create role {made.prefix}producer nologin") as caught:
            made.give()
        assert caught.value.names == tuple(made.prefix + kind for kind in roles.KINDS)
        with pytest.raises(RoleError, match="do not exist"):
            roles.create(made.db, made.prefix, existing=True)
        assert matrix(made) == before
        for kind in roles.KINDS:
            made.login(made.prefix + kind)
        with pytest.raises(RoleError, match="--existing"):
            made.give()
        roles.create(made.db, made.prefix, existing=True)
        assert made.connect(made.prefix + "producer").execute("select tallybook.enqueue('q', 't')").fetchone() == (1,)


def test_the_script_does_the_same(empty_dsn: str) -> None:
    """--sql prints a script that grants the same rights."""
    with house(empty_dsn) as made:
        made.db.execute(roles.script(made.prefix).encode())
        before = matrix(made)
        assert made.give().created == []
        assert matrix(made) == before


def test_roles_of_another_cluster_are_left_out(at: House) -> None:
    """After a move to a cluster without the roles a migration works without them."""
    at.db.execute("update tallybook.role set name = 'not_of_this_cluster' where kind = 'metrics'")
    at.db.execute("update tallybook.installation set routines = 'other'")
    assert migrate.migrate(at.db) == ["functions and views"]


@pytest.mark.parametrize("prefix", ["", "Tb_", "1a", "a b", 'a"b', "pg_tb_", "x" * 42])
def test_a_prefix_is_a_plain_name(prefix: str) -> None:
    """A prefix that needs quotes, is reserved or is too long is refused."""
    with pytest.raises(ConfigError, match="prefix"):
        roles.names(prefix)


def test_a_superusers_installation_is_told(at: House) -> None:
    """S11: superuser_owner names the owner if it is a superuser, for the warning."""
    assert roles.superuser_owner(at.db) is None
    at.admin.execute("alter schema tallybook owner to current_user")
    assert roles.superuser_owner(at.db) == at.admin.info.user
