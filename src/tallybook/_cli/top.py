"""tallybook top."""

import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial

import click

from tallybook._cli.common import dsn_option, duration
from tallybook._cli.database import Db, answers, connect, nodes_option
from tallybook._cli.errors import Problem, problem
from tallybook._db.driver import Error
from tallybook._db.top import Rates, Reading, added, merged, rates, read
from tallybook.errors import TallybookError


def _seconds(value: str) -> timedelta:
    """The type of --every: a number of seconds, or a duration like "2 s"."""
    try:
        found = timedelta(seconds=float(value))
    except (ValueError, OverflowError):
        found = duration(value)
    if not timedelta(seconds=0.1) <= found <= timedelta(hours=1):
        raise ValueError(f"{value!r}: from 0.1 s to 1 h")
    return found


@click.command()
@dsn_option
@nodes_option
@click.option("--every", type=_seconds, default="1", show_default=True, metavar="SECONDS", help="Refresh interval.")
@click.option("--once", is_flag=True, help="Print one screen and exit.")
def top(dsn: str | None, nodes_: str | None, every: timedelta, once: bool) -> None:
    """Show queues, workers, running jobs and failures, live.

    Press q or Ctrl-C to quit. Needs rich: pip install 'tallybook[rich]'. Without a terminal only --once works.
    """
    try:
        import rich  # noqa: F401

        from tallybook._cli.top_screen import screen
    except ImportError:
        raise Problem("top needs the package rich", hint="pip install 'tallybook[rich]'") from None
    if not once and not sys.stdout.isatty():
        raise click.UsageError("there is no terminal: pass --once for one screen")
    with ExitStack() as stack:
        looks: Looks = partial(_one, dsn) if nodes_ is None else _all(Db(dsn, stack, True, nodes_))
        with looks() as look:  # an error at the start is printed on the normal screen
            first, _, trouble = look(None)
        if once:
            width, height = shutil.get_terminal_size((120, 40))
            for line in screen(first, Rates(), width=width, height=height, trouble=trouble):
                click.echo(line.plain.rstrip())
        else:
            _watch(looks, every.total_seconds(), first)


Look = Callable[[Reading | None], tuple[Reading, Rates, str | None]]
"""A function from the earlier reading to the new reading, the rates between them, and a problem if any."""
Looks = Callable[[], AbstractContextManager[Look]]


@contextmanager
def _one(dsn: str | None) -> Iterator[Look]:
    with connect(dsn) as conn:

        def look(before: Reading | None) -> tuple[Reading, Rates, str | None]:
            found = read(conn, before)
            return found, rates(before, found), None

        yield look


def _all(db: Db) -> Looks:
    """Read all nodes concurrently. A node that does not answer keeps its last figures, with their age."""
    known: dict[str, Reading] = {}
    at: dict[str, float] = {}

    def look(_: Reading | None) -> tuple[Reading, Rates, str | None]:
        happened, away = [], []
        for answer in answers(db, lambda one: read(one.conn, known.get(one.node or "")), seconds=2.0):
            name, (found, refusal) = answer.node.name, answer.value or (None, None)
            if found is not None:
                happened.append(rates(known.get(name), found))
                known[name], at[name] = found, time.monotonic()
            else:
                age = f"; its figures are {time.monotonic() - at[name]:.0f} s old" if name in at else ""
                away.append(f"node {name} did not answer: {refusal or answer.error}{age}")
        if not known:
            raise Problem("no node has answered", hint=away[0])
        return merged(known), added(happened), "; ".join(away) or None

    return lambda: nullcontext(look)


def _watch(looks: Looks, every: float, shown: Reading) -> None:
    """Run until the user ends it, and restore the terminal in every case."""
    from rich.console import Console, Group
    from rich.live import Live

    from tallybook._cli.top_screen import screen

    console = Console(markup=False, highlight=False, emoji=False)
    with ExitStack() as stack:
        stack.enter_context(suppress(KeyboardInterrupt))
        check = stack.enter_context(_signals())
        pressed = stack.enter_context(_keys())
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))

        def show(rate: Rates, trouble: str | None = None) -> None:
            lines = screen(shown, rate, width=console.width, height=console.height, trouble=trouble)
            for line in lines[:-1]:
                line.end = "\n"
            live.update(Group(*lines), refresh=True)

        rate, failed = Rates(), 0
        while True:
            check()
            show(rate, None if not failed else "connecting again ...")
            try:
                with looks() as look:
                    while True:
                        check()
                        shown, rate, trouble = look(None if failed else shown)
                        failed = 0
                        show(rate, trouble)
                        if pressed(every):
                            return
            except (Error, TallybookError) as error:
                failed += 1
                told = problem(error)
                # The last figures stay visible below the error.
                show(rate, f"no answer: {told.message if told else error}; trying again")
            if pressed(every):
                return


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits a number of seconds for a q; without a terminal for input it only waits."""
    if not sys.stdin.isatty():
        yield lambda seconds: bool(select.select([], [], [], seconds)[0])
        return
    import termios
    import tty

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)

    def pressed(seconds: float) -> bool:
        if not select.select([stdin], [], [], seconds)[0]:
            return False
        typed = os.read(stdin, 1024)
        return not typed or b"q" in typed.lower()  # empty: the terminal is closed

    try:
        tty.setcbreak(stdin)
        yield pressed
    finally:
        termios.tcsetattr(stdin, termios.TCSAFLUSH, before)


@contextmanager
def _signals() -> Iterator[Callable[[], None]]:
    """Convert signals to an exception, so that the terminal is restored.

    Yields a function that raises it again: Python drops an exception that a signal raises inside a finalizer.
    """
    came: list[int] = []

    def end(number: int, frame: object = None) -> None:
        came.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def check() -> None:
        if came:
            end(came[0])

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield check
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
