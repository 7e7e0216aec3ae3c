"""`tallybook demo`: a realistic run in less than a minute, with deliberate failures.

The demo saves form submissions in a business table, each with its webhook delivery in the same transaction. Two worker
processes deliver them over HTTP to a receiver that fails some of them. One worker is killed with SIGKILL in the middle.
Start reading at app.py.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

__all__ = ["run"]


class _Interrupted(KeyboardInterrupt):
    """A signal; its number is the argument. A KeyboardInterrupt, for which psycopg cancels the query that runs."""


def run(input: Path | None = None, *, plain: bool | None = None) -> int:  # noqa: A002 - it is the option's name
    """Run the demo to its end and return its exit status. The last line on standard output has the figures.

    input  a CSV file with a header; None: the variable DEMO_INPUT, or the 2,400 included submissions
    plain  True: lines instead of the live display; None: lines unless standard output is a terminal
    0: nothing was lost and all counts agree. 1: they do not, or the demo could not run. 2: the input cannot be used.
    128 + n: stopped by signal n. Errors go to standard error.
    """
    from tallybook.errors import TallybookError
    from tallybook.extra.demo import rows

    try:
        taken = rows.read(Path(input or os.environ.get("DEMO_INPUT") or rows.SHIPPED))
    except rows.InputError as error:
        return _fail(2, str(error))
    try:
        with _interruptible():
            return _play(taken, plain)
    except _Interrupted as stopped:
        number = stopped.args[0]
        return _fail(128 + number, f"stopped by {signal.Signals(number).name}; everything was removed")
    except BrokenPipeError:  # the reader has stopped, as in `make demo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except TallybookError as error:
        return _fail(1, str(error))


def _play(taken: list[dict[str, str]], plain: bool | None) -> int:
    from tallybook.extra.demo import rows, stage
    from tallybook.extra.demo.display import chosen

    with chosen(plain) as display:
        if len(taken) == rows.MOST:
            display.event(f"using the first {rows.MOST} rows, so that the demo ends within a minute")
        figures, summary = stage.play(taken, display)
    print("\n".join(summary))
    for problem in figures.problems:
        print(f"demo: error: {problem}", file=sys.stderr)
    print(figures.line, flush=True)
    return 1 if figures.problems else 0


def _fail(status: int, text: str) -> int:
    print(f"demo: error: {text}", file=sys.stderr, flush=True)
    return status


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise the first signal and ignore later ones: a second Ctrl-C must not interrupt the clean-up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(number: int, _: FrameType | None) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise _Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
