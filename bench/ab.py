"""`make bench-ab BASE=rev`: compare drain, latency, cost and verbs of this commit with those of another one.

    python -m bench.ab REV [NAME...]      NAME: drain latency cost verbs; without one, all

In each pair, both sides are measured one right after the other, each on its own fresh server. The order alternates from
pair to pair, so other load on the machine affects both. The figure is the median over the pairs of the ratio this /
base. The base is checked out into a temporary git worktree and runs in this Python environment, with its own src. It
uses this commit's bench, or its own if this one does not fit (older interfaces).

The CPU time of single verbs is compared on one server, in turns of a few milliseconds: see ab_verbs.py.

PAIRS=10 sets the number of pairs, SCALE the size. The last line on stdout is JSON with every ratio.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench import ab_verbs
from bench.figures import SCALE, median, percentile, say

ROOT = Path(__file__).parents[1]
PROBE = Path(__file__).with_name("ab_probe.py")
PARTS = {"drain": ("drain-1", "drain-2"), "latency": ("latency-50", "latency-500"), "cost": ("cost",), "verbs": ()}
ALLOWED = 0.05
_FROM_NOTHING = 1000.0  # the ratio of a figure that was 0 and no longer is


class ProbeFailed(Exception):
    """A side could not be measured; the message has the end of its output."""


@dataclass(frozen=True)
class Side:
    """One commit: its src, and the bench to use."""

    name: str
    tree: Path
    bench: Path
    compiled: Path
    """The folder for compiled modules of both sides: a fresh checkout has none beside its source."""

    def measure(self, what: str) -> dict[str, float]:
        """Make one measurement. Raises ProbeFailed."""
        src = self.tree / "src"
        done = subprocess.run(
            [sys.executable, "-P", str(PROBE), what, str(src)],
            cwd=self.bench,  # the bench starts its workers with -m, which imports from here first
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(src), str(self.bench)]),
                "PYTHONDONTWRITEBYTECODE": "",
                "PYTHONPYCACHEPREFIX": str(self.compiled),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ProbeFailed(f"{what} of {self.name} failed:\n{done.stderr[-3000:]}")
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


@dataclass(frozen=True)
class Compared:
    """One figure's ratios this / base, one per pair."""

    figure: str
    ratios: list[float]
    base: float
    this: float

    @property
    def worse_by(self) -> float:
        """Return by which share the median is worse; below 0: better."""
        ratio = median(self.ratios)
        return 1 - ratio if self.figure.startswith("jobs_per_s") else ratio - 1

    def row(self) -> str:
        """Return the row for people: base, this, median ratio, quartiles, extremes, mark."""
        quarters = f"{percentile(self.ratios, 0.25):.3f} .. {percentile(self.ratios, 0.75):.3f}"
        ends = f"{min(self.ratios):.3f} .. {max(self.ratios):.3f}"
        mark = f"WORSE by {self.worse_by:.0%}" if self.worse_by > ALLOWED else ""
        return (
            f"  {self.figure:28} {self.base:>12,.2f} {self.this:>12,.2f} {median(self.ratios):>8.3f}"
            f"   {quarters:17} {ends:17} {mark}"
        )

    def line(self) -> dict[str, object]:
        """Return the values for programs."""
        return {
            "ratio": round(median(self.ratios), 4),
            "ratios": [round(ratio, 4) for ratio in self.ratios],
            "base": round(self.base, 3),
            "this": round(self.this, 3),
            "worse": self.worse_by > ALLOWED,
        }


def ratio(this: float, base: float) -> float:
    """Return this / base; 1 if both are 0."""
    if base:
        return this / base
    return 1.0 if this == 0 else _FROM_NOTHING


def git(*arguments: str) -> str:
    """Run git and return its output."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"bench.ab: git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """Check out that revision into a git worktree, which is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="tallybook-ab-") as folder:
        tree = Path(folder) / "base"
        git("worktree", "add", "--quiet", "--detach", str(tree), revision)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def fitting(side: Side, what: str) -> Side:
    """Return the base with this commit's bench if one try works, else with its own."""
    try:
        side.measure(what)
    except ProbeFailed as error:
        own = replace(side, bench=side.tree)
        say(f"  {what}: this commit's bench does not fit the base, so its own is used ({str(error).splitlines()[-1]})")
        own.measure(what)
        return own
    return side


def compare(this: Side, base: Side, names: list[str], pairs: int) -> list[Compared]:
    """Compare every figure of these benches, over this many pairs."""
    parts = [part for name in names for part in PARTS[name]]
    bases = {part: fitting(base, part) for part in parts}  # run both once first: to warm up and compile
    for part in parts:
        this.measure(part)
    values: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for pair in range(pairs):
        for part in parts:
            sides = (bases[part], this) if pair % 2 == 0 else (this, bases[part])
            found = {side.name: side.measure(part) for side in sides}
            then, now = found[base.name], found[this.name]
            both = [figure for figure in now if figure in then]
            for figure in both:
                values[figure].append((then[figure], now[figure]))
            shown = ", ".join(f"{figure} {ratio(now[figure], then[figure]):.3f}" for figure in both)
            say(f"  pair {pair + 1} of {pairs}: {part}: {shown}")
    if "verbs" in names:
        try:
            values |= ab_verbs.compare(base.tree / "src", this.tree / "src", pairs)
        except ab_verbs.NotComparable as error:  # the other figures are printed all the same
            say(f"  verbs: not compared: {error}")
    return [
        Compared(
            figure,
            [ratio(now, then) for then, now in measured],
            median([then for then, _ in measured]),
            median([now for _, now in measured]),
        )
        for figure, measured in values.items()
    ]


def main() -> int:
    """Compare, and print the result."""
    names = sys.argv[2:] or list(PARTS)
    if len(sys.argv) < 2 or any(name not in PARTS for name in names):
        say(f"usage: make bench-ab BASE=rev, or python -m bench.ab REV [{' '.join(PARTS)}]")
        return 2
    pairs = int(os.environ.get("PAIRS", "10"))
    revision = git("rev-parse", "--verify", "--short", f"{sys.argv[1]}^{{commit}}")
    changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    here = f"this ({git('rev-parse', '--short', 'HEAD')}{changed})"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the worktree is removed
    say(f"bench-ab: {here} against {revision}, {pairs} pairs, SCALE={SCALE:g}")
    with worktree(revision) as tree:
        compiled = tree.parent / "compiled"
        this, base = Side(here, ROOT, ROOT, compiled), Side(revision, tree, ROOT, compiled)
        compared = compare(this, base, names, pairs)
    say(f"  {'figure':28} {'base':>12} {'this':>12} {'ratio':>8}   {'quartiles':17} {'all':17}")
    for one in compared:
        say(one.row())
    worse = [one.figure for one in compared if one.worse_by > ALLOWED]
    say(f"bench-ab: figures more than {ALLOWED:.0%} worse: {', '.join(worse) or 'none'}")
    figures = {one.figure: one.line() for one in compared}
    print(json.dumps({"base": revision, "this": here, "pairs": pairs, "worse": worse, "figures": figures}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
