"""The signals that stop a worker: a program's own handlers stay unless it asks for ours."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

BOTH = (signal.SIGTERM, signal.SIGINT)


def unclaimed() -> tuple[signal.Signals, ...]:
    """Return those of SIGTERM and SIGINT that have their default handler; none outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return ()
    return tuple(number for number in BOTH if _is_default(number))


def _is_default(number: signal.Signals) -> bool:
    handler = signal.getsignal(number)
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    # asyncio.run handles SIGINT to cancel its main coroutine; that is not the program's own handler either.
    owner = getattr(getattr(handler, "func", None), "__self__", None)
    return isinstance(owner, asyncio.Runner)


@contextlib.contextmanager
def stop_on(numbers: tuple[signal.Signals, ...], stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at each of these signals; restore the previous handlers afterwards."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            if handler is not None:  # a handler that Python did not set cannot be restored from here
                signal.signal(number, handler)


class Stop:
    """A handler that calls `target`, which may change while the handler stays, so that no signal is missed in between.

    `told` is True once a signal has come.
    """

    def __init__(self) -> None:
        self.told = False
        self.target: Callable[[], object] = lambda: None

    def __call__(self) -> None:
        self.told = True
        self.target()
