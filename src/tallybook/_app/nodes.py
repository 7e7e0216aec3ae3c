"""app.nodes: the databases of one app, and the choice of the node for a key."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from tallybook._db import node_changes, node_check, nodes
from tallybook._db.node_changes import Changed
from tallybook._db.node_source import listing
from tallybook._db.nodes import Node
from tallybook._db.source import Source
from tallybook._db.verb import Beside, ListOf, Noun, Steps, Verb, beside
from tallybook._model.maintenance import Finding

T = TypeVar("T")


class Nodes(Noun):
    """The databases of an app. Each verb opens separate connections."""

    def list(self) -> Verb[ListOf[Node]]:
        """List the nodes that are not removed. A node without a stored number is asked for it.

        for node in await app.nodes.list(): print(node.number, node.name, node.state)
        """
        return self._beside(lambda dsn: list(nodes.numbered(nodes.nodes(dsn))), "nodes.list")

    def of(self, key: str) -> Verb[Node]:
        """Return the node of a key: the one that it is pinned to, else a live node chosen by a hash.

        Connect to its `dsn`, and enqueue in the transaction that writes the key's data. Raises UnknownNode if the key
        is pinned to a node that does not exist.

            node = await app.nodes.of("tenant:7")
        """
        lists = listing(self._app)
        return Verb(lists, partial(_of, lists, key), "nodes.of")

    def add(self, name: str, address: str, number: int | None = None) -> Verb[Changed]:
        """Add a node, or change its address ("host=north dbname=shop", no password). A retired node becomes live.

        `number` defaults to that of its installation, else to the next free one. Raises ConfigError, InvalidArgument,
        and QueueUnavailable if the node does not answer and has no number.

            await app.nodes.add("south", "host=south dbname=shop")
        """
        return self._beside(lambda dsn: node_changes.add(dsn, name, address, number), "nodes.add")

    def retire(self, name: str) -> Verb[Changed]:
        """Assign no more keys to a node. Its jobs still run; its schedules move to the home node.

        Keys that are pinned to it stay. Raises UnknownNode, and InvalidArgument for the last live node.
        """
        return self._beside(lambda dsn: node_changes.retire(dsn, name), "nodes.retire")

    def remove(self, name: str, *, anyway: bool = False) -> Verb[Changed]:
        """Remove a node from the list; its schedules move to the home node, and its jobs stay in its database.

        Raises UnknownNode, and InvalidArgument for the last live node. Unless `anyway`, raises ConfigError if it has
        open jobs or does not answer, and InvalidArgument if keys are pinned to it; `anyway` deletes their pins.
        """
        return self._beside(lambda dsn: node_changes.remove(dsn, name, anyway=anyway), "nodes.remove")

    def check(self) -> Verb[ListOf[Finding]]:
        """Check all nodes: one finding for each healthy node, and one for each problem."""
        return self._beside(node_check.check, "nodes.check")

    def pin(self, key: str, node: str) -> Verb[str]:
        """Pin a key to this node; return "created", "changed" or "unchanged". Its existing jobs stay.

        Raises UnknownNode.

        await app.nodes.pin("tenant:7", "south")
        """
        return self._beside(lambda dsn: node_changes.pin(dsn, key, node), "nodes.pin")

    def unpin(self, key: str) -> Verb[bool]:
        """Let the hash choose the node of a key again; False: it was not pinned."""
        return self._beside(lambda dsn: node_changes.unpin(dsn, key), "nodes.unpin")

    def _beside(self, do: Callable[[str], T], name: str) -> Verb[T]:
        return self._verb(partial(beside, lambda: do(listing(self._app).conninfo())), name)


def _of(lists: Source, key: str) -> Steps[Node]:
    among: tuple[Node, ...] = yield Beside(lambda: nodes.nodes(lists.conninfo()))
    pins: dict[str, str] = yield nodes.pins(key)
    return nodes.route(key, among, pins)
