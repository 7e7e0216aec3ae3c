"""Where an app's nodes are listed, which node a key or an id leads to, and one query to all nodes."""

import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from support.database import Connection, call
from support.fleet import Fleet, renumber
from support.waiting import wait_until
from tallybook._db import nodes as door
from tallybook._db.nodes import Node, asked, named, node_of, nodes, numbered, of_job, route
from tallybook.errors import ConfigError, QueueUnavailable, UnknownJob, UnknownNode

NOWHERE = "host=127.0.0.1 port=1 dbname=x"


def some(*names: str) -> list[Node]:
    return [Node(name, number, "") for number, name in enumerate(names)]


def test_a_database_alone_is_the_only_node_and_the_home(dsn: str) -> None:
    """If no node is listed, there is one: the database of the DSN, with its number."""
    (only,) = nodes(dsn)
    assert (only.number, only.dsn, only.state, only.home) == (0, dsn, "live", True)


def test_a_database_without_the_schema_is_a_node_without_number(empty_dsn: str) -> None:
    """A database without the schema is a node whose number is unknown."""
    (only,) = nodes(empty_dsn)
    assert only.number is None and only.home


def test_the_table_names_the_nodes(fleet: Fleet) -> None:
    """Nodes are listed by number, each address leads to its database, and the lowest live number is the home."""
    found = fleet.nodes
    assert [(node.name, node.number, node.home) for node in found] == [
        ("north", 1, True), ("south", 2, False), ("west", 3, False),
    ]  # fmt: skip
    assert [answer.value for answer in asked(found, lambda conn: conn.info.dbname)] == [
        conninfo_to_dict(dsn)["dbname"] for dsn in fleet.dsns
    ]
    assert fleet.dsn not in repr(found)


def test_named_nodes_are_chosen_and_an_unknown_one_is_refused(fleet: Fleet) -> None:
    """A list of names selects these nodes; an unknown name is refused with the most similar one."""
    assert [node.name for node in nodes(fleet.dsn, "west, north")] == ["west", "north"]
    assert nodes(fleet.dsn, "home")[0].name == "north"
    with pytest.raises(UnknownNode, match=r"unknown node 'soth'\. Did you mean 'south'\?"):
        nodes(fleet.dsn, "north,soth")


def test_a_retiring_node_is_served_and_one_that_is_gone_is_not(fleet: Fleet) -> None:
    """A retired node is still listed but not the home; a removed one is not, and its number stays reserved for it."""
    with fleet.connect(1) as db:
        assert call(db, "node_retire", name="north") == [("retired",)]
        assert [(node.name, node.state, node.home) for node in fleet.nodes] == [
            ("north", "retiring", False), ("south", "live", True), ("west", "live", False),
        ]  # fmt: skip
        assert call(db, "node_remove", name="north") == [("removed",)]
        assert call(db, "node_remove", name="north") == [("unchanged",)]
        assert [node.name for node in fleet.nodes] == ["south", "west"]
        with pytest.raises(Exception, match='number 1 belongs to node "north"'):
            call(db, "node_add", name="new", address="host=x", number=1)
        assert call(db, "node_add", name="north", address="host=x", number=1) == [("changed",)]


def test_what_does_not_fit_is_refused(fleet: Fleet) -> None:
    """Each bad argument of a verb over nodes is refused with its value, and nothing is written."""
    new = {"address": "host=x", "number": 9}
    secret = "an address must not contain a password"
    with fleet.connect(1) as db:
        for verb, args, message in (
            ("node_add", {**new, "name": "a,b"}, 'invalid node name "a,b"'),
            ("node_add", {**new, "name": "all"}, 'invalid node name "all"'),
            ("node_add", {**new, "name": "new", "number": 1024}, "number 1024"),
            ("node_add", {**new, "name": "new", "address": "host=x password=y"}, secret),
            ("node_add", {**new, "name": "new", "address": "postgresql://u:p@x/y"}, secret),
            ("node_add", {**new, "name": "new", "address": "host=x oauth_client_secret=y"}, secret),
            ("node_add", {**new, "name": "north"}, 'node "north" has number 1'),
            ("node_retire", {"name": "nobody"}, 'there is no node "nobody"'),
            ("node_pin", {"key": "k", "node": "nobody"}, 'there is no node "nobody"'),
        ):
            with pytest.raises(Exception, match=message):
                call(db, verb, **args)
    assert len(fleet.nodes) == 3


def test_the_last_live_node_stays(fleet: Fleet) -> None:
    """The last live node can be neither retired nor removed."""
    with fleet.connect(1) as db:
        for name in ("north", "south"):
            call(db, "node_remove", name=name)
        for verb in ("node_retire", "node_remove"):
            with pytest.raises(Exception, match='node "west" is the last live one'):
                call(db, verb, name="west")


def test_a_node_with_pins_is_removed_only_anyway(fleet: Fleet) -> None:
    """Keys pinned to a node prevent its removal; with `anyway`, the pins are removed with it."""
    with fleet.connect(1) as db:
        assert call(db, "node_pin", key="tenant:7", node="west") == [("created",)]
        assert call(db, "node_pin", key="tenant:7", node="west") == [("unchanged",)]
        with pytest.raises(Exception, match='1 keys are pinned to node "west"'):
            call(db, "node_remove", name="west")
        assert call(db, "node_remove", name="west", anyway=True) == [("removed",)]
        assert db.execute("select * from tallybook.node_pins").fetchall() == []


def test_a_pin_that_is_not_committed_prevents_the_removal(fleet: Fleet) -> None:
    """A node is not removed beside a transaction that pins a key to it: the removal waits and sees the pin."""
    with psycopg.connect(fleet.dsn) as other, fleet.connect(1) as db, ThreadPoolExecutor(1) as beside:
        call(other, "node_pin", key="tenant:7", node="west")
        removal = beside.submit(call, db, "node_remove", name="west")
        waiting = "select cardinality(pg_blocking_pids(%s)) > 0"
        wait_until(lambda: removal.done() or fleet.run(1, waiting, db.info.backend_pid)[0][0], "it waits")
        other.commit()
        with pytest.raises(Exception, match='1 keys are pinned to node "west"'):
            removal.result(30)


def test_nodes_of_the_variable(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """TALLYBOOK_NODES, lines or a file, overrides the table; the first is the home, and nodes give their numbers."""
    lines = f"# ours\nb={fleet.dsns[1]}\n\na={fleet.dsns[2]}"
    file = tmp_path / "nodes.toml"
    file.write_text(f'[nodes]\nb = "{fleet.dsns[1]}"\na = "{fleet.dsns[2]}"\n')
    for value in (lines, str(file)):
        monkeypatch.setenv(door.VARIABLE, value)
        found = nodes(NOWHERE)
        assert [(node.name, node.number, node.home) for node in found] == [("b", None, True), ("a", None, False)]
        assert [(node.number, node.home) for node in numbered(found)] == [(2, True), (3, False)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("/nowhere/nodes.toml", "cannot be read"),
        ("a=host=x\na=host=y", "'a': is listed twice"),
        ("a b=host=x", "'a b': a node's name has letters"),
        ("a=host=x\nsecret", "'line 2': is not name=DSN"),
        ("a=host=x\nb=no dsn at all secret", f"{door.VARIABLE}: 'b': its DSN is not a connection string"),
        ("a=host=x user=u password=secret,b=host=y user=u", "'a': has two DSNs"),
        ("a=dbname=x; b=dbname=y", "'a': has two DSNs"),
        ("a=postgresql://u:secret@x/db,b=postgresql://u@y/db", "'a': has two DSNs"),
        ("all=host=x", "'all': is reserved"),
        ("#=\n", "names no node"),
        ("# north=host=h password=secret", "names no node"),
        ("postgresql://u:secret@north/db", "cannot be read: No such file"),
        ("postgresql://u:secret@north/db?sslmode=require", "a node's name has letters"),
    ],
)
def test_a_bad_variable_is_told(monkeypatch: pytest.MonkeyPatch, value: str, message: str) -> None:
    """A wrong TALLYBOOK_NODES is an error that names the problem and shows no connection string."""
    monkeypatch.setenv(door.VARIABLE, value)
    with pytest.raises(ConfigError, match=message) as raised:
        nodes("")
    assert "secret" not in str(raised.value)


def test_two_nodes_with_one_number_are_an_error(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes with the same number are an error that names both."""
    with fleet.connect(3) as db:
        renumber(db, 2)
    monkeypatch.setenv(door.VARIABLE, f"b={fleet.dsns[1]}\nc={fleet.dsns[2]}")
    with pytest.raises(ConfigError, match="number of a node: 2: nodes 'b' and 'c' both have it"):
        numbered(nodes(""))


def test_a_directory_that_is_away_is_told() -> None:
    """If the database with the table is unreachable, the error names it without its password."""
    with pytest.raises(QueueUnavailable, match="port=1") as raised:
        nodes(NOWHERE + " password=hidden")
    assert "hidden" not in str(raised.value)


def test_a_silent_database_with_the_table_is_an_error(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the database with the table accepts the connection but does not return the list, the wait is limited."""
    monkeypatch.setattr(door, "ANSWER", 0.2)
    with fleet.connect(1) as conn, conn.transaction():
        conn.execute("lock table tallybook.node; set local idle_in_transaction_session_timeout = '20 s'")
        with pytest.raises(QueueUnavailable, match=r"no answer within 0\.2 s"):
            nodes(fleet.dsn)


def test_an_id_leads_to_its_node(fleet: Fleet) -> None:
    """The number in a job's id is its node's; an unknown one is an error that lists the nodes."""
    jobs = [fleet.enqueue(number) for number in (1, 2, 3)]
    assert [node_of(job) for job in jobs] == [1, 2, 3]
    assert [of_job(fleet.nodes, job).name for job in jobs] == ["north", "south", "west"]
    with pytest.raises(UnknownJob, match=r"Its id is of node 9; the nodes are north \(1\), south \(2\), west \(3\)"):
        of_job(fleet.nodes, 9 << 43)


def test_a_key_goes_to_its_pin_else_to_the_highest_hash() -> None:
    """A pin overrides the hash; the hash spreads keys evenly among live nodes only, with fixed results."""
    three = some("north", "south", "west")
    assert route("tenant:7", three, {"tenant:7": "west"}).name == "west"
    with pytest.raises(UnknownNode):
        route("k", three, {"k": "gone"})
    spread = Counter(route(str(key), three).name for key in range(3000))
    assert min(spread.values()) > 900
    assert [route(key, three).name for key in ("tenant:3", "tenant:4", "tenant:5", "tenant:7")] == [
        "north", "west", "north", "south",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="none is live"):
        route("k", [Node("a", 0, "", "retiring")])


def test_only_the_keys_of_a_node_move_with_it() -> None:
    """A new node takes only the keys that it then serves, and gives all of them back when it is retired."""
    three, four = some("north", "south", "west"), some("north", "south", "west", "east")
    keys = [str(key) for key in range(2000)]
    before, after = ({key: route(key, among).name for key in keys} for among in (three, four))
    moved = {key for key in keys if before[key] != after[key]}
    assert moved == {key for key in keys if after[key] == "east"} and 400 < len(moved) < 600
    retired = [*three, Node("east", 3, "", "retiring")]
    assert {key: route(key, retired).name for key in keys} == before


def test_a_node_that_fails_has_an_error_and_the_others_answer(fleet: Fleet) -> None:
    """One query to all: an unreachable node and a failing query give an error, the others their values."""

    def question(conn: Connection) -> int:
        number = int(conn.execute("select node from tallybook.installed").fetchone()[0])  # type: ignore[index]
        if number == 2:
            conn.execute("select 1/0")
        return number

    among = [*fleet.nodes, Node("away", 4, NOWHERE)]
    answers = asked(among, question)
    assert [answer.value for answer in answers] == [1, None, 3, None]
    assert answers[1].error == "division by zero"
    assert "refused" in (answers[3].error or "")
    assert [answer.node for answer in answers] == among


def test_a_slow_node_is_waited_for_no_longer_than_said(fleet: Fleet) -> None:
    """A slow statement and a stopped server process take no longer than the limit."""
    names = [conninfo_to_dict(dsn)["dbname"] for dsn in fleet.dsns]

    def slow(conn: Connection) -> int:
        if conn.info.dbname == names[1]:
            conn.execute("select pg_sleep(60)")
        return 1

    began = time.monotonic()
    answers = asked(fleet.nodes, slow, seconds=1.0)
    assert time.monotonic() - began < 10
    assert [answer.value for answer in answers] == [1, None, 1]
    assert answers[1].error is not None

    def stopped(conn: Connection) -> int:
        if conn.info.dbname == names[2]:
            pids.append(conn.info.backend_pid)
            os.kill(conn.info.backend_pid, signal.SIGSTOP)
        return conn.execute("select 2").fetchone()[0]  # type: ignore[index,no-any-return]

    pids: list[int] = []
    try:
        answers = asked(fleet.nodes, stopped, seconds=1.0)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert [answer.value for answer in answers] == [2, 2, None]
    assert answers[2].error == "no answer within 1 s"


def test_named_takes_the_home_by_its_word() -> None:
    """The name home selects the home, whatever it is called."""
    assert named([Node("a", 1, ""), Node("b", 0, "", home=True)], "home").name == "b"
