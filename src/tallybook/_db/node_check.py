"""The check of the nodes: their reports on identity and state, compared with the list and with each other."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg

from tallybook._db import migrate, sync
from tallybook._db.declared import Declared
from tallybook._db.doctor import clock
from tallybook._db.link import CONNECT
from tallybook._db.nodes import TWINS, Answer, Node, asked, written
from tallybook._db.policy import first_line, unreached
from tallybook._db.texts import loads
from tallybook._model.maintenance import Finding

_LOOK = Declared("_node_look() -> jsonb")
_SEEN = Declared("_node_seen(p_number int, p_system_identifier p_job_id bigint) -> void")
_IDENTITY = ("system_identifier", "database", "number")
_KNOWN = "select n.name, n.system_identifier, n.seen_job_id, n.seen_at::text from tallybook.nodes n"


@dataclass(frozen=True, slots=True)
class _Report:
    denied: str | None  # the server's error if this user lacks a right
    schema: str | None  # the problem with its schema. Then, or if denied, nothing else is known.
    standby: bool
    ahead: float  # the seconds by which its clock is ahead of this machine's
    look: dict[str, Any]


def check(dsn: str) -> list[Finding]:
    """Return one finding per node without problems, and one per problem of the others, in the order of the nodes.

    Removed nodes are asked only for open jobs. The table stores the observed state, so that the next check finds a node
    that was restored from an older state.
    """
    asked_all = asked(written(dsn), _report, seconds=5.0)
    answers = [answer for answer in asked_all if answer.node.state != "gone"]
    gone = [answer for answer in asked_all if answer.node.state == "gone"]
    known, away = _known(dsn)
    wrong = [*_twins(answers), *_clocks(answers)]
    for answer in answers:
        wrong += _alone(answer, known.get(answer.node.name, (None, None, None)))
    if not away:
        _keep(dsn, answers, {finding.details["node"] for finding in wrong if finding.level == "problem"})
    found = list(away)
    for answer in answers:
        mine = [finding for finding in wrong if finding.details["node"] == answer.node.name]
        found += sorted(mine, key=lambda finding: finding.level != "problem") or [_fine(answer)]
    return [*found, *_left(gone, answers)]


def _report(conn: psycopg.Connection[Any]) -> _Report:
    standby = conn.execute("select pg_is_in_recovery()").fetchone() == (True,)
    ahead = float(clock(conn).details["server_ahead_s"])
    try:
        info = migrate.info(conn)
        error = migrate.verdict(info.version, info.works_from, info.expected, conn.info.dbname)
        text = None if info.routines_current else "its functions are of another release"
        if error is not None:
            text = str(error).partition(". ")[0]  # its hint is of one database: the finding has its own advice
        return _Report(None, text, standby, ahead, {} if text else sync.run(conn, _LOOK.call(loads)))
    except psycopg.errors.InsufficientPrivilege as denied:
        return _Report(first_line(denied), None, standby, ahead, {})


def _known(dsn: str) -> tuple[dict[str, tuple[Any, Any, Any]], list[Finding]]:
    """Return the table's data of each node: its cluster, the highest job id seen, and when. A finding if it is away."""
    try:
        with psycopg.connect(dsn, **CONNECT) as conn:
            return {name: (cluster, job, at) for name, cluster, job, at in conn.execute(_KNOWN).fetchall()}, []
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return {}, []
    except psycopg.OperationalError as error:  # then TALLYBOOK_NODES lists the nodes
        text = f"the database of the DSN does not answer, so a restored node is not found: {unreached(error)}"
        advice = "Start its server, or correct the DSN."
        return {}, [Finding(name="dsn", level="warning", finding=text, advice=advice, details={"node": None})]


def _keep(dsn: str, answers: list[Answer[_Report]], wrong: set[str]) -> None:
    with psycopg.connect(dsn, **CONNECT) as conn:
        if conn.execute("select to_regclass('tallybook.nodes') is null or pg_is_in_recovery()").fetchone() == (True,):
            return
        for answer in answers:
            if answer.value and answer.value.look and answer.node.name not in wrong and answer.node.number is not None:
                look = answer.value.look
                values = {"system_identifier": look["system_identifier"], "job_id": look["last_job_id"]}
                sync.run(conn, _SEEN.call(lambda _: None, number=answer.node.number, **values))


def _finding(node: Node, what: str, level: str, text: str, advice: str | None = None, **details: Any) -> Finding:
    more = {"node": node.name, **details}
    return Finding(name=f"{node.name} {what}", level=level, finding=text, advice=advice, details=more)


def _alone(answer: Answer[_Report], known: tuple[Any, Any, Any]) -> Iterator[Finding]:
    """Yield the problems that concern one node only."""
    node, report = answer.node, answer.value
    if report is None:
        advice = "Start its server, or correct its address: `tallybook node add`. Its jobs wait; other nodes continue."
        yield _finding(node, "reachable", "problem", f"it does not answer: {answer.error}", advice)
        return
    if report.standby:
        yield _finding(node, "writable", "problem", "it is a standby: nothing can be enqueued or claimed there",
                       "Set its address to the primary, or promote it.")  # fmt: skip
    if report.denied is not None:
        advice = "Give the user the role operator there, or run the check as another user."
        yield _finding(node, "rights", "problem", report.denied, advice)
        return
    if report.schema is not None:
        advice = f"Run `tallybook migrate --nodes {node.name}`, or update this program."
        yield _finding(node, "schema", "problem", report.schema, advice)
        return
    look = report.look
    if node.number is not None and look["number"] != node.number:
        text = f"its job ids have number {look['number']}, but the list has {node.number}"
        advice = (
            "If the address is wrong, correct it: `tallybook node add`. If the list's number is wrong, remove this"
            " name, and add the database under another one: a name keeps its number."
        )
        yield _finding(node, "number", "problem", text, advice, number=look["number"])
    yield from _past(node, look, known)
    if look["open"] and not look["workers"]:
        yield _finding(node, "workers", "warning", f"{look['open']} jobs are open but no live worker serves it",
                       "Start one: `tallybook worker --nodes all`.", open=look["open"])  # fmt: skip
    for text in look["unserved"] if look["workers"] else ():
        yield _finding(node, "workers", "warning", text, "See `tallybook doctor` on that node.", open=look["open"])


def _past(node: Node, look: dict[str, Any], known: tuple[Any, Any, Any]) -> Iterator[Finding]:
    """Yield findings if the node is a copy or was restored from an older state."""
    cluster, job, at = known
    if cluster is not None and cluster != look["system_identifier"]:
        advice = "If a dump moved it, run `tallybook node add` with its new address. Otherwise the address is wrong."
        text = f"a different cluster answers ({look['system_identifier']}) than the registered one ({cluster})"
        yield _finding(node, "cluster", "warning", text, advice)
    if look["known_identifier"] != look["system_identifier"]:
        advice = "Start a worker or run `tallybook migrate --nodes`: both make its jobs claimable in this cluster."
        yield _finding(node, "cluster", "warning", "its schema was copied from another cluster", advice)
    if job is not None and (look["last_job_id"] or 0) < job:
        before, now = f"its last job id was {job} at {at}", f"is {look['last_job_id']} now"
        text = f"{before} and {now}: it was restored from an older state"
        advice = (
            f"Jobs and results after that state are lost. Before more jobs are enqueued, run: select "
            f"setval('tallybook.job_id', {job}); else ids are assigned twice. A standby that lagged causes this, too."
        )
        yield _finding(node, "restored", "problem", text, advice, was=job, now=look["last_job_id"])


def _twins(answers: list[Answer[_Report]]) -> Iterator[Finding]:
    """Two nodes with one number, and one database that is listed twice."""
    advice = f"Ids lead to the wrong one. {TWINS}."
    for (number,), same in _by(answers, "number").items():
        for node in same if len(same) > 1 else ():
            others = ", ".join(other.name for other in same if other is not node)
            yield _finding(node, "number", "problem", f"it has number {number}, and so has {others}", advice)
    for same in _by(answers, *_IDENTITY).values():
        for node in same[1:]:
            text = f"its address leads to the database of {same[0].name}"
            yield _finding(node, "address", "problem", text, "Correct it: `tallybook node add NAME ADDRESS`.")


def _left(gone: list[Answer[_Report]], answers: list[Answer[_Report]]) -> Iterator[Finding]:
    """Removed nodes with open jobs, unless their database is listed as another node, too."""
    listed = _by(answers, *_IDENTITY)
    for answer in gone:
        look = answer.value.look if answer.value else {}
        if look.get("open") and tuple(look[key] for key in _IDENTITY) not in listed:
            text = f"it was removed, but {look['open']} jobs are open there"
            advice = (
                "A producer may still use the old list: start it again. To run the jobs, add the node again with "
                "`tallybook node add`; else cancel them there."
            )
            yield _finding(answer.node, "removed", "warning", text, advice, open=look["open"])


def _by(answers: list[Answer[_Report]], *keys: str) -> dict[tuple[Any, ...], list[Node]]:
    found: dict[tuple[Any, ...], list[Node]] = defaultdict(list)
    for answer in answers:
        if answer.value and answer.value.look:
            found[tuple(answer.value.look[key] for key in keys)].append(answer.node)
    return found


def _clocks(answers: list[Answer[_Report]]) -> Iterator[Finding]:
    """Servers whose clocks differ from that of the first that answers."""
    there = [(answer.node, answer.value.ahead) for answer in answers if answer.value]
    for node, ahead in there[1:]:
        apart = ahead - there[0][1]
        if abs(apart) >= 1:
            text = f"its clock is {abs(apart):.1f} s {'ahead of' if apart > 0 else 'behind'} that of {there[0][0].name}"
            advice = "Let all servers follow NTP: lists over all nodes are sorted by these clocks."
            level = "warning" if abs(apart) >= 10 else "note"
            yield _finding(node, "clock", level, text, advice, apart_s=round(apart, 3))


def _fine(answer: Answer[_Report]) -> Finding:
    assert answer.value is not None
    look = answer.value.look
    text = f"number {look['number']}, {look['open']} open jobs, {look['workers']} workers"
    return _finding(answer.node, "is well", "ok", text + (", retiring" if answer.node.state == "retiring" else ""))
