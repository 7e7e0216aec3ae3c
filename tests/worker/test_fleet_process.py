"""Worker processes of several nodes: killed, stopped, and beside a node whose server hangs, dies or is read-only."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.cli import Command, stopped
from support.fleet import Fleet as Nodes
from support.fleet_app import TABLES
from support.waiting import wait_until
from support.worker_process import PYTHONPATH
from tallybook._embedded.directories import server_account
from tallybook.embedded import Server, temporary_server

RAN = "select attempt, pid from ran order by attempt"


def worker(folder: Path, nodes: Nodes, *words: str, **environment: str) -> Command:
    """Return a worker of all nodes, as a process."""
    given = ["worker", "-A", "support.fleet_app:app", "--nodes", "all", "--lease", "2 s", "--heartbeat", "400 ms"]
    return Command(folder, *given, "--poll", "200 ms", *words, dsn=nodes.dsn, PYTHONPATH=PYTHONPATH, **environment)


def put(nodes: Nodes, task: str, *numbers: int) -> None:
    for number in numbers:
        nodes.run(number, TABLES)
        nodes.enqueue(number, task=task)


def runs(nodes: Nodes, starts: int, *numbers: int, seconds: float = 60.0) -> None:
    """Wait until this many attempts have started on each of these nodes."""
    started = f"{starts} starts on {numbers}"
    wait_until(lambda: all(len(nodes.run(n, RAN)) >= starts for n in numbers), started, seconds=seconds)


def both_on_record(nodes: Nodes) -> None:
    """Wait until two workers are registered on each node."""
    live = "select count(*) from tallybook.worker where ended_at is null"
    wait_until(lambda: nodes.each(live) == [[(2,)]] * 3, "two workers on each node")


def test_another_process_takes_over_on_all_nodes(fleet: Nodes, tmp_path: Path) -> None:
    """When a worker of several nodes is killed, another one rescues its jobs on each of them."""
    put(fleet, "hold", 1, 2, 3)
    with worker(tmp_path, fleet) as victim:
        runs(fleet, 1, 1, 2, 3)
        with worker(tmp_path, fleet) as other:
            both_on_record(fleet)
            victim.send(signal.SIGKILL)
            runs(fleet, 2, 1, 2, 3)
            assert [rows[1] for rows in fleet.each(RAN)] == [(2, other.pid)] * 3
            for number in (1, 2, 3):
                fleet.run(number, "insert into gate values (true)")


def test_the_last_line_is_the_sum_and_each_node(fleet: Nodes, tmp_path: Path) -> None:
    """SIGTERM ends the process with code 0; its last line has the counts, also per node; lines name their node."""
    put(fleet, "note", 1, 2, 3)
    fleet.enqueue(2, task="note")
    with worker(tmp_path, fleet) as process:
        runs(fleet, 1, 1, 3)
        runs(fleet, 2, 2)
        process.send(signal.SIGTERM)
        assert process.ended() == 0
    last = process.output.splitlines()[-1]
    assert re.search(
        r"stopped: 4 completed, .*; north: 1 completed, .*; south: 2 completed, .*; west: 1 completed", last
    )
    assert re.search(r"\[south\] worker \d+ \(.*\) serves default=10", process.output)


def test_bad_lists_of_nodes_end_the_process(fleet: Nodes, tmp_path: Path) -> None:
    """An unknown node, or two nodes with one number, end the process with code 2 and one line."""
    twice = f"north={fleet.dsns[0]}\nagain={fleet.dsns[0]}"
    with worker(tmp_path, fleet, "--nodes", "nroth") as unknown, worker(tmp_path, fleet, TALLYBOOK_NODES=twice) as both:
        assert (unknown.ended(), both.ended()) == (2, 2)
    assert "Did you mean 'north'?" in unknown.output and "Traceback" not in unknown.output
    assert "'north' and 'again' both have it" in both.output and "Traceback" not in both.output


def test_several_processes_serve_all_nodes(fleet: Nodes, tmp_path: Path) -> None:
    """Each of several processes serves all nodes."""
    put(fleet, "note", 1, 2, 3)
    with worker(tmp_path, fleet, "--processes", "2") as process:
        both_on_record(fleet)
        process.send(signal.SIGTERM)
        assert process.ended() == 0


@pytest.fixture
def second() -> Iterator[Server]:
    """The second node's own server."""
    with temporary_server(
        18, settings={"max_connections": "60", "wal_level": "replica", "max_wal_senders": "4"}
    ) as server:
        yield server


@pytest.fixture
def apart(make_fleet: Callable[..., Nodes], second: Server) -> Nodes:
    """Three nodes; the second one is on its own server."""
    nodes = make_fleet(apart={2: second})
    nodes.each(TABLES)
    return nodes


def picked_up(nodes: Nodes, number: int, starts: int) -> float:
    """Enqueue a job; return the seconds until it has run."""
    began = time.monotonic()
    nodes.enqueue(number, task="note")
    runs(nodes, starts, number, seconds=20)
    return time.monotonic() - began


@contextmanager
def silent_in_a_claim(nodes: Nodes, server: Server) -> Iterator[None]:
    """Stop the second node's server while a worker's claim is under way there."""
    waits = "select count(*) > 0 from pg_stat_activity where wait_event_type = 'Lock' and query ~ 'tallybook.claim[(]'"
    with nodes.connect(2) as holder, holder.transaction():
        holder.execute("lock table tallybook.claim")
        wait_until(lambda: nodes.run(2, waits) == [(True,)], "a claim to wait")
        with stopped(server.pid):
            yield


def test_a_server_that_hangs_delays_no_other_node(second: Server, apart: Nodes, tmp_path: Path) -> None:
    """While a node's server hangs, jobs of other nodes start at once, all slots are theirs, and a stop completes."""
    with worker(tmp_path, apart, "--queues", "default=2", "--stop-timeout", "3 s") as process:
        for number in (1, 2, 3):
            picked_up(apart, number, 1)
        with silent_in_a_claim(apart, second):
            times = [picked_up(apart, number, n) for n in range(2, 12) for number in (1, 3)]
            assert sorted(times)[len(times) // 2] < 1, times
            for _ in range(2):
                apart.enqueue(1, task="hold")
            runs(apart, 13, 1, seconds=20)  # both slots
            apart.run(1, "insert into gate values (true)")
            process.send(signal.SIGTERM)
            began = time.monotonic()
            assert process.ended() == 0
            assert time.monotonic() - began < 30
    assert "1 completed" in process.output.splitlines()[-1].split("south")[1]


def test_a_claim_without_a_bound_keeps_its_slot(second: Server, apart: Nodes, tmp_path: Path) -> None:
    """Control: if a claim may wait without a bound, the silent server keeps a slot, and others never get all slots."""
    with worker(tmp_path, apart, "-A", "support.fleet_app_patient:app", "--queues", "default=2") as process:
        for number in (1, 2, 3):
            picked_up(apart, number, 1)
        with silent_in_a_claim(apart, second):
            for n in range(2, 12):
                picked_up(apart, 1, n)
            for _ in range(2):
                apart.enqueue(1, task="hold")
            runs(apart, 12, 1, seconds=20)
            with pytest.raises(AssertionError, match="13 starts"):
                runs(apart, 13, 1, seconds=5)
            process.send(signal.SIGKILL)


def test_a_server_that_hangs_from_the_start_delays_no_other_node(second: Server, apart: Nodes, tmp_path: Path) -> None:
    """A server that accepts connections and never answers delays no other node; when it answers, its jobs run, too."""
    with worker(tmp_path, apart) as process:
        with stopped(second.pid):
            for number in (1, 3):
                picked_up(apart, number, 1)
        apart.enqueue(2, task="note")
        runs(apart, 1, 2)
        process.send(signal.SIGTERM)
        assert process.ended() == 0


def test_a_read_only_node_delays_no_other(second: Server, apart: Nodes, tmp_path: Path) -> None:
    """While a node accepts no writes, jobs of other nodes run; after its promotion, its own."""
    with worker(tmp_path, apart) as process:
        for number in (1, 2, 3):
            picked_up(apart, number, 1)
        apart.enqueue(2, task="hold")
        runs(apart, 2, 2)
        second.kill()
        standby = second.data_dir / "standby.signal"  # with it, the server accepts no writes until its promotion
        standby.touch()
        if (account := server_account()) is not None:
            os.chown(standby, account.uid, account.gid)
        second.start()
        for number in (1, 3):
            picked_up(apart, number, 2)
        assert apart.run(2, "select pg_is_in_recovery(), pg_promote()") == [(True, True)]
        apart.run(2, "insert into gate values (true)")
        picked_up(apart, 2, 4)
        process.send(signal.SIGTERM)
        assert process.ended() == 0


def test_a_server_that_is_killed_comes_back(second: Server, apart: Nodes, tmp_path: Path) -> None:
    """A node whose server dies does not delay the others, and is served again when it is back."""
    with worker(tmp_path, apart) as process:
        for number in (1, 2, 3):
            picked_up(apart, number, 1)
        second.kill()
        for number in (1, 3):
            picked_up(apart, number, 2)
        second.start()
        picked_up(apart, 2, 2)
        process.send(signal.SIGTERM)
        assert process.ended() == 0
