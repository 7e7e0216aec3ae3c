"""A model of windows and holes: one lane, its cursor, producers that commit late or never, and two claimers.

Read it together with "The claim" in sql/README.md and `_take.sql`. Producers write entries under a transaction id that
they get at their begin; they commit in any order, or stay open for ever. A claimer looks without a lock (`_next`),
locks the lane, reads its window, opens a new one if that is empty, and reads again. Each step has its own snapshot, and
producers may commit between steps. Claims commit asynchronously: a crash undoes the newest ones that no durable commit
of a producer followed.

Promises: a claimed entry was committed; no entry is claimed twice, as far as claims are stored; a claim's interval
always reads the same set; and from every state, all committed entries can still be claimed, even if open producers stay
open.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from support.explore import Explored, Step, explore

Entry = tuple[int, int]  # (xid, seq)
ENTRIES = 2  # entries per producer


@dataclass(frozen=True)
class Rules:
    """The guards of the cursor."""

    holes: bool = True
    """Transactions that run when a window opens become holes. Otherwise the cursor passes over them."""
    closed: bool = True
    """Holes that have ended are drained before the next window. Otherwise they are forgotten."""
    window: bool = True
    """The cursor moves from snapshot to snapshot. Otherwise it moves to the last entry that it saw, as usual."""
    lock: bool = True
    """A lane has one claim at a time."""


class Snapshot(NamedTuple):
    xmax: int
    running: frozenset[int]

    def sees(self, xid: int) -> bool:
        return xid < self.xmax and xid not in self.running


class Claim(NamedTuple):
    """The interval that a claim took, and the cursor after it."""

    xid: int = 0
    lo: int = 1
    hi: int = 1
    holes: frozenset[int] = frozenset()
    closed: tuple[int, ...] = ()
    came_from: Entry = (1, 0)
    pos: Entry = (1, 0)
    took: tuple[Entry, ...] = ()
    """A ghost: the claim's row has no list of jobs, `interval` reads them."""


BORN = Claim()


class Claimer(NamedTuple):
    doing: str = "idle"  # idle, looked, locked (its window is empty), opened (a new one)
    next_xid: int = 0
    cursor: Claim = BORN


class Lane(NamedTuple):
    producers: int
    """Number of producers that may still begin."""
    crashes: int
    running: tuple[int, ...] = ()
    committed: tuple[int, ...] = ()
    claims: tuple[Claim, ...] = ()
    durable: int = 0
    """Number of claims that no crash can undo."""
    next_xid: int = 1
    completed: int = 0
    """The newest transaction that has ended, by commit or rollback."""
    claimers: tuple[Claimer, Claimer] = (Claimer(), Claimer())

    @property
    def cursor(self) -> Claim:
        return self.claims[-1] if self.claims else BORN

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(self.completed + 1, frozenset(x for x in self.running if x <= self.completed))

    def visible(self) -> list[Entry]:
        """Return the committed entries."""
        return [(xid, seq) for xid in sorted(self.committed) for seq in range(1, ENTRIES + 1)]

    def claimed(self) -> list[Entry]:
        return [entry for claim in self.claims for entry in claim.took]

    def set(self, who: int, claimer: Claimer) -> Lane:
        first, second = self.claimers
        return self._replace(claimers=(claimer, second) if who == 0 else (first, claimer))


def steps(rules: Rules, batch: int, lane: Lane) -> Iterator[Step[Lane]]:
    """Yield all possible next steps. Steps of producers are no progress, because nothing may wait for them."""
    if lane.producers:
        xid = lane.next_xid
        begun = lane._replace(producers=lane.producers - 1, next_xid=xid + 1, running=(*lane.running, xid))
        yield Step(f"transaction {xid} enqueues", begun, progress=False)
    for xid in lane.running:
        ended = lane._replace(running=tuple(x for x in lane.running if x != xid), completed=max(lane.completed, xid))
        durable = ended._replace(committed=(*lane.committed, xid), durable=len(lane.claims))
        yield Step(f"transaction {xid} commits", durable, progress=False)
        yield Step(f"transaction {xid} rolls back", ended, progress=False)
    for who in (0, 1):
        yield from _claimer(rules, batch, lane, who)
    if lane.crashes:
        yield Step("the server crashes", _crashed(lane), progress=False)


def _claimer(rules: Rules, batch: int, lane: Lane, who: int) -> Iterator[Step[Lane]]:
    me, other, name = lane.claimers[who], lane.claimers[1 - who], f"c{who + 1}"
    if me.doing == "idle" and (seen := _next(rules, lane)):
        yield Step(f"{name} looks: {seen}", lane.set(who, Claimer("looked", seen)))
    elif me.doing == "looked" and not (rules.lock and other.doing in ("locked", "opened")):
        cursor, found = lane.cursor, []
        if cursor.closed:
            found = _of_closed(lane, cursor, batch)
        if not found:
            cursor = _past_closed(cursor)
            if me.next_xid < cursor.hi:  # otherwise the look saw that this window is empty
                found = _of_window(rules, lane, cursor, batch)
        if found:
            yield _claims(lane, who, cursor, found)
        else:
            yield Step(f"{name} finds its window empty", lane.set(who, Claimer("locked", cursor=cursor)))
    elif me.doing == "locked":
        opened = _opened(rules, lane.snapshot, me.cursor)
        yield Step(f"{name} opens {opened.lo} to {opened.hi}", lane.set(who, Claimer("opened", cursor=opened)))
    elif me.doing == "opened":
        cursor = me.cursor
        found = _of_closed(lane, cursor, batch) if cursor.closed else []
        if not found:
            cursor = _past_closed(cursor)
            found = _of_window(rules, lane, cursor, batch)
        if found:
            yield _claims(lane, who, cursor, found)
        else:
            yield Step(f"{name} finds nothing", lane.set(who, Claimer()))


def _next(rules: Rules, lane: Lane) -> int:
    """Return the transaction of an entry that may be next, or 0."""
    cursor, visible = lane.cursor, lane.visible()
    if cursor.closed:
        if ahead := [xid for xid, seq in visible if xid in cursor.closed and (xid, seq) > cursor.pos]:
            return ahead[0]
        cursor = _past_closed(cursor)
    ahead = [xid for xid, seq in visible if (xid, seq) > cursor.pos]
    ahead += [xid for xid in sorted(cursor.holes) if xid in lane.committed]
    return ahead[0] if ahead else 0


def _of_closed(lane: Lane, cursor: Claim, batch: int) -> list[Entry]:
    return [e for e in lane.visible() if e[0] in cursor.closed and e > cursor.pos][:batch]


def _past_closed(cursor: Claim) -> Claim:
    return cursor._replace(closed=(), pos=(cursor.lo, 0)) if cursor.closed else cursor


def _of_window(rules: Rules, lane: Lane, cursor: Claim, batch: int) -> list[Entry]:
    inside = [e for e in lane.visible() if e > cursor.pos and e[0] not in cursor.holes]
    return [e for e in inside if e[0] < cursor.hi or not rules.window][:batch]


def _opened(rules: Rules, snapshot: Snapshot, cursor: Claim) -> Claim:
    holes, closed = cursor.holes, tuple(sorted(x for x in cursor.holes if snapshot.sees(x)))
    holes = frozenset(x for x in holes if not snapshot.sees(x)) | {x for x in snapshot.running if x >= cursor.hi}
    lo = cursor.hi
    if not (rules.holes and rules.window):
        holes = frozenset()
    if not rules.closed:
        closed = ()
    pos = (closed[0] if closed else lo, 0) if rules.window else cursor.pos
    return Claim(lo=lo, hi=snapshot.xmax, holes=holes, closed=closed, pos=pos)


def _claims(lane: Lane, who: int, cursor: Claim, found: list[Entry]) -> Step[Lane]:
    """Return the step that writes and commits the claim's row, which has its own transaction id."""
    xid = lane.next_xid
    claim = cursor._replace(xid=xid, came_from=cursor.pos, pos=found[-1], took=tuple(found))
    after = lane._replace(claims=(*lane.claims, claim), next_xid=xid + 1, completed=max(lane.completed, xid))
    return Step(f"c{who + 1} claims {found}", after.set(who, Claimer()))


def _crashed(lane: Lane) -> Lane:
    """Return the lane after a crash: undurable claims are lost, and their transaction ids are reused."""
    claims = lane.claims[: lane.durable]
    last = max([0, *lane.committed, *(claim.xid for claim in claims)])
    return lane._replace(
        crashes=lane.crashes - 1,
        running=(),
        claims=claims,
        next_xid=last + 1,
        completed=last,
        claimers=(Claimer(), Claimer()),
    )


def interval(lane: Lane, claim: Claim) -> tuple[Entry, ...]:
    """Return the entries that `claimed_jobs` reads for this claim, at any time."""
    between = (e for e in lane.visible() if claim.came_from < e <= claim.pos)
    if claim.closed:
        return tuple(e for e in between if e[0] in claim.closed)
    return tuple(e for e in between if e[0] not in claim.holes)


def check(lane: Lane) -> str:
    """Return the promise that this state breaks, or an empty string."""
    claimed = lane.claimed()
    if len(set(claimed)) < len(claimed):
        return "an entry was claimed twice"
    if not set(claimed) <= set(lane.visible()):
        return "an entry was claimed that was never committed"
    if any(interval(lane, claim) != claim.took for claim in lane.claims):
        return "the set that a claim took has changed"
    return ""


def explore_cursor(rules: Rules | None = None, *, producers: int = 3, batch: int = 1, crashes: int = 0) -> Explored:
    """Explore all states of a lane with `producers` transactions and claims of `batch` jobs."""
    given = rules or Rules()
    return explore(
        Lane(producers, crashes),
        lambda lane: steps(given, batch, lane),
        check,
        lambda lane: set(lane.claimed()) == set(lane.visible()),
    )
