"""tallybook node: commands for several databases of one app, and reports of a node's faults."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from support.cli import invoke, run
from support.clusters import dump, restore, streaming
from support.database import one
from support.fleet import Fleet, renumber
from support.roles import house
from support.waiting import wait_until
from tallybook import App
from tallybook._db import node_changes
from tallybook._db.migrate import migrate
from tallybook._db.nodes import VARIABLE
from tallybook.embedded import temporary_server

NOWHERE = "host=127.0.0.1 port=1"


def address(dsn: str) -> str:
    return f"dbname={conninfo_to_dict(dsn)['dbname']}"


def checked(fleet: Fleet, code: int) -> dict[str, list[str]]:
    """The findings of `node check`, by node."""
    found: dict[str, list[str]] = {}
    for each in json.loads(run("node", "check", "--json", dsn=fleet.dsn, code=code)):
        found.setdefault(each["details"]["node"], []).append(each["finding"])
    return found


@contextmanager
def away(fleet: Fleet, name: str) -> Iterator[None]:
    """Let this node not answer."""
    was = fleet.run(1, "select address from tallybook.node where name = %s", name)[0][0]
    move = "update tallybook.node set address = %s where name = %s"
    fleet.run(1, move, NOWHERE, name)
    try:
        yield
    finally:
        fleet.run(1, move, was, name)


def test_one_database_is_one_node(dsn: str) -> None:
    """For a single database the list shows it, and the check is ok."""
    (only,) = json.loads(run("node", "list", "--json", dsn=dsn))
    assert (only["number"], only["state"], only["home"]) == (0, "live", True)
    assert "number 0, 0 open jobs, 0 workers" in run("node", "check", dsn=dsn)


def test_nodes_are_listed(fleet: Fleet) -> None:
    """The list has a line per node with number, state and address, and no password."""
    lines = run("node", "list", dsn=make_conninfo(fleet.dsn, password="hidden")).splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        ["north", "1", "live,", "home"], ["south", "2", "live", lines[2].split()[3]],
        ["west", "3", "live", lines[3].split()[3]],
    ]  # fmt: skip
    assert "hidden" not in "".join(lines) and all(
        conninfo_to_dict(dsn)["dbname"] in "".join(lines) for dsn in fleet.dsns
    )  # type: ignore[operator]


def test_the_first_node_brings_its_directory_along(make_fleet: Callable[..., Fleet], empty_dsn: str) -> None:
    """Adding the first node registers the DSN's database, too; numbers are those of the installations."""
    fleet = make_fleet(2, table=False)
    assert run("node", "add", "south", address(fleet.dsns[1]), dsn=fleet.dsn) == "node 'south' (2) is created\n"
    assert [(node.number, node.home) for node in fleet.nodes] == [(1, True), (2, False)]
    assert "is unchanged" in run("node", "add", "south", address(fleet.dsns[1]), dsn=fleet.dsn)
    said = run("node", "add", "new", address(empty_dsn), dsn=fleet.dsn)
    assert "node 'new' (3) is created" in said and "tallybook migrate --nodes new" in said
    assert "Leave --number out" in run(
        "node", "add", "x", address(fleet.dsns[1]), "--number", "7", dsn=fleet.dsn, code=2
    )


def test_two_installations_with_one_number_are_told(make_fleet: Callable[..., Fleet], empty_dsn: str) -> None:
    """Of two databases with one number, the second is not added: the error says how it gets another number."""
    fleet = make_fleet(1)
    with psycopg.connect(empty_dsn) as conn:
        migrate(conn, node=1)
    said = run("node", "add", "south", address(empty_dsn), dsn=fleet.dsn, code=1)
    assert 'number 1 belongs to node "north"' in said and "`tallybook uninstall` (removes its jobs)" in said
    run("uninstall", "--yes", dsn=empty_dsn)
    run("migrate", "--node", "2", dsn=empty_dsn)
    assert "(2) is created" in run("node", "add", "south", address(empty_dsn), dsn=fleet.dsn)


@pytest.mark.parametrize("words", ["add x dbname=y --number 1", "retire x", "remove x", "unpin key"])
def test_a_database_without_the_schema_has_no_list(empty_dsn: str, words: str) -> None:
    """A change of the list, or of a pin, in a database without the schema is an error that says what to run."""
    said = run("node", *words.split(), dsn=empty_dsn, code=2)
    assert "no schema tallybook in database" in said and "Run `tallybook migrate`" in said


def test_the_first_node_cannot_have_the_name_of_its_directory(make_fleet: Callable[..., Fleet]) -> None:
    """The first node is refused under the name that the DSN's database gets, unless that one has been named before."""
    fleet = make_fleet(2, table=False)
    add = ("node", "add", str(conninfo_to_dict(fleet.dsn)["dbname"]), address(fleet.dsns[1]))
    assert "Choose another name" in run(*add, dsn=fleet.dsn, code=2)
    assert fleet.run(1, "select from tallybook.node") == []
    run("node", "add", "north", "", dsn=fleet.dsn)
    assert "(2) is created" in run(*add, dsn=fleet.dsn)
    assert [(node.name, node.number) for node in fleet.nodes] == [("north", 1), (add[2], 2)]


def test_databases_of_servers_from_one_image_are_two() -> None:
    """Two databases with one system identifier and one oid, but two numbers, are listed and checked as two nodes."""
    with temporary_server() as first, temporary_server() as second:
        dsns = [str(server.create_database("shop")) for server in (first, second)]
        for number, dsn in enumerate(dsns):
            with psycopg.connect(dsn) as conn:
                migrate(conn, node=number)
        run("node", "add", "south", f"host={conninfo_to_dict(dsns[1])['host']}", dsn=dsns[0])
        listed = json.loads(run("node", "list", "--json", dsn=dsns[0]))
        assert [(one["name"], one["number"]) for one in listed] == [("shop", 0), ("south", 1)]
        assert "address" not in run("node", "check", dsn=dsns[0])


def test_a_node_that_is_away_is_added_by_its_number(fleet: Fleet) -> None:
    """A node that does not answer is refused without a number, and added with one."""
    assert "Pass its number" in run("node", "add", "away", NOWHERE, dsn=fleet.dsn, code=1)
    assert "(9) is created" in run("node", "add", "away", NOWHERE, "--number", "9", dsn=fleet.dsn)
    assert checked(fleet, 1)["away"][0].startswith("it does not answer")
    assert checked(fleet, 1)["north"] == ["number 1, 0 open jobs, 0 workers"]


def test_an_address_with_a_password_is_refused(fleet: Fleet) -> None:
    """An address with a password is refused, with what to do instead."""
    said = run("node", "add", "x", f"{address(fleet.dsns[1])} password=geheim", "--number", "2", dsn=fleet.dsn, code=1)
    assert "an address must not contain a password" in said and "PGPASSFILE" in said and "geheim" not in said


def test_a_node_with_open_jobs_is_not_removed(fleet: Fleet) -> None:
    """Removal reports the number of open jobs and refuses; --anyway removes the node and leaves its jobs."""
    job = fleet.enqueue(2)
    fleet.enqueue(2)
    said = run("node", "remove", "south", dsn=fleet.dsn, code=2)
    assert "2 jobs are open there" in said and "--anyway" in said
    assert len(fleet.nodes) == 3
    assert run("node", "remove", "south", "--anyway", dsn=fleet.dsn) == "node 'south' (2) is removed\n"
    assert [node.name for node in fleet.nodes] == ["north", "west"]
    assert fleet.run(2, "select state from tallybook.job where id = %s", job) == [("available",)]
    assert run("node", "remove", "west", dsn=fleet.dsn) == "node 'west' (3) is removed\n"
    assert "Did you mean 'west'" in run("node", "remove", "wst", dsn=fleet.dsn, code=1)


def test_a_node_that_does_not_answer_is_removed_only_anyway(fleet: Fleet) -> None:
    """If the open jobs are unknown, removal is refused, too."""
    run("node", "add", "away", NOWHERE, "--number", "9", dsn=fleet.dsn)
    assert "its open jobs are unknown" in run("node", "remove", "away", dsn=fleet.dsn, code=2)
    assert "is removed" in run("node", "remove", "away", "--anyway", dsn=fleet.dsn)


def test_schedules_go_to_the_home_and_move_with_it(fleet: Fleet) -> None:
    """Schedules of users and programs are on the home node; retiring it moves them, with counts, to the next."""
    west = fleet.dsns[2]
    run("schedule", "set", "nightly", "report", "--cron", "0 3 * * *", dsn=fleet.dsn)
    fleet.run(1, "update tallybook.schedule set fired_count = 7, last_job_id = 5, paused_at = now(), due_at = null")
    assert "1 schedules moved" in run("node", "retire", "north", dsn=fleet.dsn)
    moved = "select name, fired_count, last_job_id, paused_at is not null from tallybook.schedule"
    assert [fleet.run(number, moved) for number in (1, 2, 3)] == [[], [("nightly", 7, None, True)], []]
    assert "nightly" in run("schedule", "list", dsn=fleet.dsn)
    app = App("shop", dsn=fleet.dsn)
    task = app.task(name="report")(lambda: None)
    assert app.schedules.set("hourly", task.job(), every="1 hour").sync() == "created"
    assert [one.name for one in app.schedules.list().sync()] == ["hourly", "nightly"]
    assert fleet.run(2, "select count(*) from tallybook.schedule") == [(2,)]
    assert app.schedules.set("here", task.job(), every="1 hour").sync(psycopg.connect(west)) == "created"
    assert "2 schedules moved" in run("node", "add", "north", address(fleet.dsn), dsn=fleet.dsn)
    assert fleet.run(1, "select count(*) from tallybook.schedule") == [(2,)]


def test_a_move_that_was_cut_off_is_ended_by_the_next_one(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A move killed between its two commits leaves the schedules on both nodes; run again, only the home has them."""
    run("schedule", "set", "nightly", "report", "--cron", "0 3 * * *", dsn=fleet.dsn)
    whole = node_changes.sync.run
    takes = []

    def cut_off(conn: psycopg.Connection[Any], call: Any) -> Any:
        found = whole(conn, call)
        if "_schedules_take" in str(call):
            takes.append(found)
        if len(takes) == 2:  # the first is the trial
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(node_changes.sync, "run", cut_off)
        node_changes.retire(fleet.dsn, "north")
    names = "select name from tallybook.schedule"
    assert [fleet.run(number, names) for number in (1, 2, 3)] == [[("nightly",)], [("nightly",)], []]
    run("node", "retire", "north", dsn=fleet.dsn)
    assert [fleet.run(number, names) for number in (1, 2, 3)] == [[], [("nightly",)], []]


@pytest.mark.parametrize("command", ["remove", "retire"])
def test_a_repeated_command_moves_the_schedules(fleet: Fleet, command: str) -> None:
    """If the next home is away when the home leaves, the same command moves the schedules once it is back."""
    run("schedule", "set", "nightly", "report", "--cron", "0 3 * * *", dsn=fleet.dsn)
    with away(fleet, "south"):
        assert "repeat it when both nodes answer" in run("node", command, "north", dsn=fleet.dsn, code=1)
    assert "is unchanged; 1 schedules moved" in run("node", command, "north", dsn=fleet.dsn)
    assert "nightly" in run("schedule", "list", dsn=fleet.dsn)


def test_a_repeated_add_moves_the_schedules_to_the_new_home(fleet: Fleet) -> None:
    """If the home is away when a node is added that becomes the home, the same command moves them once it is back."""
    run("node", "retire", "north", dsn=fleet.dsn)
    run("schedule", "set", "nightly", "report", "--cron", "0 3 * * *", dsn=fleet.dsn)
    add = ("node", "add", "north", address(fleet.dsn))
    with away(fleet, "south"):
        assert "repeat it when both nodes answer" in run(*add, dsn=fleet.dsn, code=1)
    assert "is unchanged; 1 schedules moved" in run(*add, dsn=fleet.dsn)
    assert "nightly" in run("schedule", "list", dsn=fleet.dsn)


@pytest.mark.parametrize("command", ["remove", "retire"])
def test_a_home_stays_while_the_next_cannot_have_its_schedules(
    make_fleet: Callable[..., Fleet], empty_dsn: str, command: str
) -> None:
    """If the next home has no schema, the home with schedules is neither retired nor removed."""
    fleet = make_fleet(1)
    run("node", "add", "new", address(empty_dsn), dsn=fleet.dsn)
    run("schedule", "set", "nightly", "report", "--cron", "0 3 * * *", dsn=fleet.dsn)
    said = run("node", command, "north", dsn=fleet.dsn, code=2)
    assert "it would get the schedules, but has no schema" in said and "tallybook migrate --nodes new" in said
    assert [(node.name, node.home) for node in fleet.nodes] == [("north", True), ("new", False)]
    run("migrate", "--nodes", "all", dsn=fleet.dsn)
    assert "1 schedules moved" in run("node", command, "north", dsn=fleet.dsn)


def test_a_database_that_is_listed_twice_moves_no_schedules(fleet: Fleet) -> None:
    """If the home's database is also listed under another name, it keeps its schedules when one name leaves."""
    fleet.add("north2", fleet.dsn, 0)
    run("schedule", "set", "nightly", "report", "--cron", "0 3 * * *", dsn=fleet.dsn)
    assert run("node", "remove", "north", dsn=fleet.dsn) == "node 'north' (1) is removed\n"
    assert fleet.run(1, "select name from tallybook.schedule") == [("nightly",)]


async def test_an_awaited_schedule_goes_to_the_home(fleet: Fleet) -> None:
    """An awaited schedule without a connection goes to the home, too."""
    run("node", "retire", "north", dsn=fleet.dsn)
    app = App("shop", dsn=fleet.dsn)
    assert await app.schedules.set("hourly", app.task(name="t")(lambda: None).job(), every="1 hour") == "created"
    assert fleet.run(2, "select name from tallybook.schedule") == [("hourly",)]


def test_keys_are_routed_and_pinned(fleet: Fleet) -> None:
    """A key goes to the node of its hash, or to its pin; Python and the command line agree."""
    app = App("shop", dsn=fleet.dsn)
    assert run("node", "of", "tenant:7", dsn=fleet.dsn) == "south\n" and app.nodes.of("tenant:7").sync().name == "south"
    assert "is created" in run("node", "pin", "tenant:7", "west", dsn=fleet.dsn)
    assert (
        run("node", "of", "tenant:7", dsn=fleet.dsn) == "west (pinned)\n"
        and app.nodes.of("tenant:7").sync().name == "west"
    )
    assert "Did you mean" in run("node", "pin", "tenant:7", "wst", dsn=fleet.dsn, code=1)
    assert "no longer pinned" in run("node", "unpin", "tenant:7", dsn=fleet.dsn)
    assert run("node", "unpin", "tenant:7", dsn=fleet.dsn, code=1) == "'tenant:7' is not pinned\n"
    run("node", "retire", "south", dsn=fleet.dsn)
    assert run("node", "of", "tenant:7", dsn=fleet.dsn) != "south\n"


async def test_the_noun_changes_the_list(fleet: Fleet) -> None:
    """app.nodes has the same verbs as the command line."""
    app = App("shop", dsn=fleet.dsn)
    assert [(node.number, node.name) for node in await app.nodes.list()] == [(1, "north"), (2, "south"), (3, "west")]
    assert await app.nodes.pin("k", "west") == "created" and await app.nodes.unpin("k")
    assert (await app.nodes.retire("west")).what == "retired"
    assert (await app.nodes.remove("west")).what == "removed"
    assert (await app.nodes.add("west", address(fleet.dsns[2]))).what == "changed"
    assert [one.level for one in await app.nodes.check()] == ["ok", "ok", "ok"]


async def test_an_id_leads_an_app_to_its_node(fleet: Fleet) -> None:
    """Reading, cancelling and retrying by id reach the job's node; an id of no node is an error that lists them."""
    app = App("shop", dsn=fleet.dsn)
    job = fleet.enqueue(3)
    assert (await app.get(job)).state == "available"
    assert await app.cancel(job, "no") == "cancelled"
    assert await app.retry(job) == 2
    for gone in (9 << 43) + 1, (2 << 43) + 77:
        with pytest.raises(Exception, match="unknown job") as raised:
            await app.get(gone)
        assert gone >> 43 == 2 or "Its id is of node 9; the nodes are north (1), south (2), west (3)" in str(
            raised.value
        )
    assert "Its id is of node 'west': pass --dsn of that node, or --nodes west" in run(
        "job", "show", str(job), dsn=fleet.dsn, code=1
    )
    assert await asyncio.to_thread(app.cancel(job).sync) == "cancelled"
    assert "Its id is of node 9; the nodes are" in run("job", "show", str(9 << 43), dsn=fleet.dsn, code=1)


def test_a_variable_is_not_changed_by_commands(fleet: Fleet) -> None:
    """With TALLYBOOK_NODES changes of the table are refused, and the list shows the variable's nodes."""
    given = {VARIABLE: f"a={fleet.dsns[0]}\nb={fleet.dsns[1]}"}
    refused = invoke("node", "add", "x", "host=y", to=fleet.dsn, **given)
    assert refused.exit_code == 2 and "Change it there" in refused.output
    listed = json.loads(invoke("node", "list", "--json", to=fleet.dsn, **given).stdout)
    assert [(one["name"], one["number"]) for one in listed] == [("a", 1), ("b", 2)]


def test_two_nodes_with_one_number(make_fleet: Callable[..., Fleet]) -> None:
    """The check names both nodes with one number, and the one whose number differs from the list."""
    fleet = make_fleet(3)
    with fleet.connect(3) as db:
        renumber(db, 2)
    found = checked(fleet, 1)
    assert found["south"] == ["it has number 2, and so has west"]
    assert found["west"] == ["it has number 2, and so has south", "its job ids have number 2, but the list has 3"]
    assert found["north"] == ["number 1, 0 open jobs, 0 workers"]
    assert "under another one" in run("node", "check", dsn=fleet.dsn, code=1)


def test_a_node_that_is_listed_twice(fleet: Fleet) -> None:
    """Two addresses that lead to one database are found."""
    fleet.add("south2", fleet.dsns[1], 7)
    assert "its address leads to the database of south" in checked(fleet, 1)["south2"]


def test_a_node_of_an_older_schema(fleet: Fleet, empty_dsn: str) -> None:
    """A node with an unsupported schema, or none, is reported with the command that fixes it."""
    fleet.run(2, "update tallybook.installation set version = 0, routines = 'x'")
    fleet.run(3, "update tallybook.installation set routines = 'x'")
    run("node", "add", "new", address(empty_dsn), dsn=fleet.dsn)
    found = checked(fleet, 1)
    assert "schema" in found["south"][0] and found["west"] == ["its functions are of another release"]
    assert "no schema" in found["new"][0]
    said = run("node", "check", dsn=fleet.dsn, code=1)
    assert "tallybook migrate --nodes south" in said and "Run `tallybook migrate`" not in said


def test_a_node_restored_from_an_older_state(fleet: Fleet, server: Any, tmp_path: Any) -> None:
    """A node whose last job id is below one seen before is reported as restored, until its sequence is set."""
    dump(fleet.dsns[1], tmp_path / "yesterday")
    job = fleet.enqueue(2)
    fleet.run(2, "select tallybook.cancel(%s)", job)
    checked(fleet, 1)
    name = str(conninfo_to_dict(fleet.dsns[1])["dbname"])
    server.drop_database(name)
    server.create_database(name)
    restore(tmp_path / "yesterday", fleet.dsns[1])
    (text,) = checked(fleet, 1)["south"]
    assert f"its last job id was {job} at " in text and "restored from an older state" in text
    assert checked(fleet, 1)["south"] == [text], "it is told until it is mended"
    with fleet.connect(2) as conn:
        conn.execute("select setval('tallybook.job_id', %s)", (job,))
    assert checked(fleet, 0)["south"] == ["number 2, 0 open jobs, 0 workers"]


def test_jobs_on_a_node_without_workers(fleet: Fleet) -> None:
    """Open jobs that no worker serves are a warning; with a live worker on the queue they are not."""
    fleet.enqueue(2)
    assert checked(fleet, 1)["south"] == ["1 jobs are open but no live worker serves it"]
    fleet.run(2, "select tallybook.worker_start('w', '{other}')")
    assert "no live worker serves it" in checked(fleet, 1)["south"][0]
    fleet.run(2, "select tallybook.worker_start('w2', '{default}')")
    assert checked(fleet, 0)["south"] == ["number 2, 1 open jobs, 2 workers"]


def test_jobs_on_a_removed_node(fleet: Fleet) -> None:
    """Open jobs on a removed node are a warning, unless its database is listed under another name."""
    run("node", "remove", "west", dsn=fleet.dsn)
    assert "west" not in checked(fleet, 0)
    fleet.enqueue(3)
    assert checked(fleet, 1)["west"] == ["it was removed, but 1 jobs are open there"]
    fleet.add("west2", fleet.dsns[2], 4)
    assert "west" not in checked(fleet, 1)


def test_another_cluster_behind_an_address(fleet: Fleet) -> None:
    """An address that leads to another cluster than the registered one is a warning."""
    checked(fleet, 0)
    fleet.run(1, "update tallybook.node set system_identifier = 5 where name = 'west'")
    assert "than the registered one (5)" in checked(fleet, 1)["west"][0]


def test_a_check_without_the_database_of_the_list(fleet: Fleet) -> None:
    """If TALLYBOOK_NODES lists the nodes and the DSN's database is away, they are checked, with one warning more."""
    given = {VARIABLE: f"b={fleet.dsns[1]}\nc={fleet.dsns[2]}"}
    said = invoke("node", "check", to=NOWHERE, **given)
    assert said.exit_code == 1 and "WARNING  dsn: the database of the DSN does not answer" in said.output
    assert "b is well" in said.output and "c is well" in said.output


def test_a_check_from_a_standby() -> None:
    """If the DSN leads to a standby, the check works, but stores nothing."""
    with streaming() as (primary, standby):
        run("node", "add", "north", f"host={conninfo_to_dict(primary.dsn('shop'))['host']}", dsn=primary.dsn("shop"))
        with psycopg.connect(standby.dsn("shop"), autocommit=True) as conn:
            wait_until(lambda: one(conn, "select count(*) from tallybook.node") == 1, "the standby has the node")
            assert "north is well" in run("node", "check", dsn=standby.dsn("shop"))


def test_an_address_that_is_none_is_refused(fleet: Fleet) -> None:
    """An address that is no connection string is refused without being shown."""
    said = run("node", "add", "x", "secret", dsn=fleet.dsn, code=2)
    assert "address: '(not shown)': not a connection string" in said and "secret" not in said


def test_every_node_is_migrated_and_one_that_is_away_stops_none(make_fleet: Callable[..., Fleet], server: Any) -> None:
    """migrate --nodes all gives each node its number from the table; a failed one is reported; a rerun does nothing."""
    fleet = make_fleet(1)
    empty = [server.create_database(f"tallybook_bare{number}_{os.getpid()}") for number in (2, 3)]
    try:
        fleet.add("south", empty[0], 5)
        with fleet.connect(1) as db:
            db.execute("select tallybook.node_add('away', %s, 6)", (NOWHERE,))
        fleet.add("west", empty[1], 7)
        said = run("migrate", "--nodes", "all", dsn=fleet.dsn, code=1)
        assert "north: nothing to do" in said
        assert "south: installed schema tallybook" in said and "node 5\n" in said and "node 7\n" in said
        assert "error: away: cannot reach PostgreSQL" in said and "1 of 4 nodes failed; the others are done" in said
        with psycopg.connect(empty[0]) as conn:
            assert conn.execute("select tallybook.enqueue('q', 't', '{}') >> 43").fetchone() == (5,)
        run("node", "remove", "away", "--anyway", dsn=fleet.dsn)
        again = run("migrate", "--nodes", "all", dsn=fleet.dsn)
        assert again.count("nothing to do") == 3 and "applying" not in again
        assert run("migrate", "--nodes", "west", dsn=fleet.dsn).count("\n") == 1
        assert "cannot be combined with --sql or --node" in run(
            "migrate", "--nodes", "all", "--node", "3", dsn=fleet.dsn, code=2
        )
    finally:
        for dsn in empty:
            server.drop_database(conninfo_to_dict(dsn)["dbname"])


def test_nodes_of_a_file_get_the_next_free_number(
    make_fleet: Callable[..., Fleet], empty_dsn: str, tmp_path: Path
) -> None:
    """A file's node without a schema gets the next free number, unless an absent node may have it."""
    fleet = make_fleet(2, table=False)
    file = tmp_path / "nodes.toml"
    lines = [f'[nodes]\na = "{fleet.dsns[0]}"', f'b = "{fleet.dsns[1]}"', f'c = "{empty_dsn}"']
    file.write_text("\n".join([*lines, f'd = "{NOWHERE}"']))
    refused = invoke("migrate", "--nodes", "c", to=fleet.dsn, **{VARIABLE: str(file)})
    assert refused.exit_code == 1 and "the next free number is unknown while these do not answer: d" in refused.output
    file.write_text("\n".join(lines))
    assert "node 3\n" in invoke("migrate", "--nodes", "c", to=fleet.dsn, **{VARIABLE: str(file)}).output


def test_a_node_with_another_number_than_its_own_is_told(fleet: Fleet) -> None:
    """A migration does not renumber: a node whose number differs from the list fails."""
    with fleet.connect(3) as db:
        renumber(db, 8)
    said = run("migrate", "--nodes", "all", dsn=fleet.dsn, code=1)
    assert "error: west: the node number stays 8" in said


def test_citus_is_kept_from_creating_the_schema_elsewhere(empty_dsn: str) -> None:
    """If Citus' setting exists, a migration turns propagation off, for its own transaction only."""
    shown = "select current_setting('citus.enable_ddl_propagation')"
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("set citus.enable_ddl_propagation = on")
        seen: list[str] = []
        migrate(conn, on_step=lambda _: seen.append(one(conn, shown)))
        assert seen and set(seen) == {"off"} and one(conn, shown) == "on"


@pytest.mark.direct("logins of their own")
def test_an_operator_changes_the_list_and_moves_no_schedules(empty_dsn: str) -> None:
    """An operator may check, pin, add and retire, a producer may route; only the schema's owner moves schedules."""
    with house(empty_dsn) as made:
        made.give()
        operator = made.dsn_of(made.user("operator"))
        assert "number 0, 0 open jobs" in run("node", "check", dsn=operator)
        assert "(4) is created" in run("node", "add", "away", NOWHERE, "--number", "4", dsn=operator)
        assert "is created" in run("node", "pin", "k", "away", dsn=operator)
        assert run("node", "of", "k", dsn=made.dsn_of(made.user("producer"))) == "away (pinned)\n"
        (here, away) = json.loads(run("node", "list", "--json", dsn=operator))
        assert (here["number"], here["home"], away["number"]) == (0, True, 4)
        assert "is retired" in run("node", "retire", here["name"], dsn=operator)
        with pytest.raises(psycopg.errors.InsufficientPrivilege), psycopg.connect(operator) as db:
            db.execute("select tallybook._schedules_give()")


@pytest.mark.direct("logins of their own")
def test_an_operator_does_not_retire_a_home_with_schedules(empty_dsn: str, dsn: str) -> None:
    """If the user may not move the schedules, the home stays as it is."""
    with house(empty_dsn) as made:
        made.give()
        operator = made.dsn_of(made.user("operator"))
        run("node", "add", "north", "", dsn=empty_dsn)
        with psycopg.connect(dsn) as db:
            renumber(db, 1)
        run("node", "add", "south", address(dsn), dsn=empty_dsn)
        run("schedule", "set", "nightly", "report", "--cron", "0 3 * * *", dsn=empty_dsn)
        said = run("node", "retire", "north", dsn=operator, code=1)
        assert "cannot move to 'south': permission denied" in said and "Nothing has changed" in said
        assert json.loads(run("node", "list", "--json", dsn=operator))[0]["state"] == "live"


@pytest.mark.direct("logins of their own")
def test_a_user_without_rights_is_told_so(empty_dsn: str) -> None:
    """A check by a user who may not check reports the missing right, not a server that is down."""
    with house(empty_dsn) as made:
        made.give()
        said = run("node", "check", dsn=made.dsn_of(made.user("reader")), code=1)
        assert " rights: permission denied" in said and "role operator" in said and "Start" not in said


def test_no_tick_is_fired_while_schedules_move(fleet: Fleet) -> None:
    """While a node gives its schedules away none is fired there; control: before and after, the query finds it."""
    run("schedule", "set", "often", "t", "--every", "1 s", dsn=fleet.dsn)
    due = "select count(*) from (select from tallybook.schedule for update skip locked) s"
    assert fleet.run(1, due) == [(1,)]
    with psycopg.connect(fleet.dsn) as giving:
        giving.execute("select tallybook._schedules_give()")
        assert fleet.run(1, due) == [(0,)]
        giving.rollback()
    assert fleet.run(1, due) == [(1,)]
