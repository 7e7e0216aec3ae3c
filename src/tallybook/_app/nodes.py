"""app.nodes: the databases of one app, and which of them the jobs of a key go to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from tallybook._db import node_changes, node_check, nodes
from tallybook._db.node_changes import Changed
from tallybook._db.nodes import Node
from tallybook._db.verb import Beside, ListOf, Noun, Steps, Verb
from tallybook._model.finding import Finding

T = TypeVar("T")


class Nodes(Noun):
    """The databases of an app. Each verb opens connections of its own."""

    def list(self) -> Verb[ListOf[Node]]:
        """List the nodes that are not gone, by number. Those whose number is not written down are asked for it.

        for node in await app.nodes.list(): print(node.number, node.name, node.state)
        """
        return self._beside(lambda dsn: list(nodes.numbered(nodes.nodes(dsn))), "nodes.list")

    def of(self, key: str) -> Verb[Node]:
        """The node for the jobs of a key: the one that it is pinned to, else the one that the hash chooses among the live ones.

        Connect to its `dsn`, and enqueue in the transaction that writes the key's data. UnknownNode: the key is pinned to a
        node that is not there.

            node = await app.nodes.of("tenant:7")
        """
        return self._verb(partial(_of, self._app.conninfo, key), "nodes.of")

    def add(self, name: str, address: str, number: int | None = None) -> Verb[Changed]:
        """Put a node on record, or change its address; a retired one is live again. Without a password: "host=north dbname=shop".

        Without `number` it is that of its installation, else the next free one. ConfigError, InvalidArgument for what does not
        fit; QueueUnavailable where it does not answer and has no number.

            await app.nodes.add("south", "host=south dbname=shop")
        """
        return self._beside(lambda dsn: node_changes.add(dsn, name, address, number), "nodes.add")

    def retire(self, name: str) -> Verb[Changed]:
        """Send no more keys to a node; what is there still runs, and its schedules move to the home. UnknownNode."""
        return self._beside(lambda dsn: node_changes.retire(dsn, name), "nodes.retire")

    def remove(self, name: str, *, anyway: bool = False) -> Verb[Changed]:
        """Take a node from the list. ConfigError while jobs are open there or it does not answer, unless `anyway`. UnknownNode."""
        return self._beside(lambda dsn: node_changes.remove(dsn, name, anyway=anyway), "nodes.remove")

    def check(self) -> Verb[ListOf[Finding]]:
        """Ask all nodes who and how they are: one finding for each that is well, and one for each thing that is wrong."""
        return self._beside(node_check.check, "nodes.check")

    def pin(self, key: str, node: str) -> Verb[str]:
        """Let the jobs of a key go to this node; "created", "changed" or "unchanged". Those that are put in stay. UnknownNode.

        await app.nodes.pin("tenant:7", "south")
        """
        return self._beside(lambda dsn: node_changes.pin(dsn, key, node), "nodes.pin")

    def unpin(self, key: str) -> Verb[bool]:
        """Let the hash choose the node of a key again; False: it was not pinned."""
        return self._beside(lambda dsn: node_changes.unpin(dsn, key), "nodes.unpin")

    def _beside(self, do: Callable[[str], T], name: str) -> Verb[T]:
        return self._verb(partial(_do, lambda: do(self._app.conninfo())), name)


def _do(do: Callable[[], T]) -> Steps[T]:
    found: T = yield Beside(do)
    return found


def _of(conninfo: Callable[[], str], key: str) -> Steps[Node]:
    among: tuple[Node, ...] = yield Beside(lambda: nodes.nodes(conninfo()))
    pins: dict[str, str] = yield nodes.pins(key)
    return nodes.route(key, among, pins)
