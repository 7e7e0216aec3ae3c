"""The stored form of an exception that ended an attempt: {type, message, traceback, attempt, worker}.

`describe` never raises, because it runs after a handler has already failed. Its result can always be stored as jsonb:
no NUL, no lone surrogate, and its JSON text fits the limit. The traceback is rendered here instead of by
`traceback.TracebackException`, which runs code of the user's (suggestions for a NameError inspect objects, `__notes__`
may be a property) and has no limit in bytes. Locals are never shown: they may hold secrets.
"""

import json
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType

_LIBRARY = str(Path(__file__).resolve().parents[1])
_STANDARD = str(Path(json.__file__).resolve().parents[1])
_UNPRINTABLE = "<unprintable>"
_MAX_CHAIN = 20  # shown exceptions of one chain, or members of one group
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"


def describe(exc: BaseException, *, attempt: int, worker: str, max_bytes: int = 16_000) -> dict[str, object]:
    """Return `exc` as a dict for the job's list of errors. Never raises, whatever the attributes of `exc` do.

    The JSON text of the dict has at most `max_bytes` of UTF-8 (if that is 1,000 or more). A long message keeps its
    start, a long traceback its end. At most 50 frames are shown, over all causes together. Frames of
    Tallybook above those of the handler are left out.
    """
    kind = _fit(_kind(exc), 200)
    message = _fit(safe_text(exc), max_bytes // 4)
    found = {"type": kind, "message": message, "traceback": "", "attempt": attempt, "worker": _fit(_clean(worker), 200)}
    try:
        text = _clean("".join(_Rendering().chain(exc)))
    except BaseException:  # a crafted `__cause__` or `exceptions` may raise anything
        text = f"<the traceback cannot be shown>\n{kind}: {message}\n"
    found["traceback"] = _fit(text, max_bytes - _size(found), keep_end=True)
    return found


def safe_text(value: object, limit: int = 100_000) -> str:
    """Return str(value), up to `limit` characters, without NUL and lone surrogates; "<unprintable>" if str() fails."""
    try:
        return _clean(str.__str__(str(value))[:limit])
    except BaseException:  # `__str__` may even raise SystemExit, which must not escape
        return _UNPRINTABLE


def _clean(text: str) -> str:
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def _kind(exc: BaseException) -> str:
    try:
        module, name = type(exc).__module__, type(exc).__qualname__
        return _clean(name if module in ("builtins", "__main__", "__mp_main__") else f"{module}.{name}")
    except BaseException:  # a metaclass may raise anything
        return "<unknown type>"


def _size(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode())


def _fit(text: str, size: int, *, keep_end: bool = False) -> str:
    """Return `text`, cut so that its JSON text has at most `size` bytes without the quotes."""
    if len(text) * 6 <= size or _size(text) - 2 <= size:
        return text
    mark, size = "[...]", max(size - 5, 0)
    text = (text[-size:] if size else "") if keep_end else text[:size]
    while (now := _size(text) - 2) > size:
        room = min(len(text) * size // now, len(text) - 1)
        text = (text[-room:] if room else "") if keep_end else text[:room]
    return mark + text if keep_end else text + mark


class _Rendering:
    """One traceback as text, in Python's layout; the newest exception takes its frames from `frames` first."""

    def __init__(self) -> None:
        self.frames = 50
        self.seen: set[int] = set()

    def chain(self, exc: BaseException, depth: int = 0) -> list[str]:
        """Return the lines of `exc` and of all its causes, the oldest first."""
        blocks: list[list[str]] = []
        link: str | None = None
        current: BaseException | None = exc
        while current is not None and id(current) not in self.seen and len(blocks) < _MAX_CHAIN:
            self.seen.add(id(current))
            blocks.append(self.one(current, depth) + ([link] if link else []))
            if current.__cause__ is not None:
                current, link = current.__cause__, _CAUSE
            else:
                current, link = None if current.__suppress_context__ else current.__context__, _CONTEXT
        if current is not None:
            blocks.append(["[earlier exceptions are left out]\n", link or ""])
        return [line for block in reversed(blocks) for line in block]

    def one(self, exc: BaseException, depth: int) -> list[str]:
        """Return the lines of `exc` alone, with its notes, and with the members of a group."""
        lines = self.stack(exc.__traceback__)
        text = safe_text(exc)
        lines.append(f"{_kind(exc)}: {text}\n" if text else f"{_kind(exc)}\n")
        lines.extend(f"{safe_text(note)}\n" for note in _notes(exc))
        if isinstance(exc, BaseExceptionGroup) and depth < 5:
            for number, member in enumerate(islice(exc.exceptions, _MAX_CHAIN), 1):
                block = "".join(self.chain(member, depth + 1)) or "[shown above]\n"
                lines.append(f"  +-- {number} of {len(exc.exceptions)}\n")
                lines.extend(f"  | {line}" for line in block.splitlines(keepends=True))
        return lines

    def stack(self, tb: TracebackType | None) -> list[str]:
        """Return the frames from the handler on with their source lines; the middle of many is left out."""
        frames = list(traceback.walk_tb(tb))
        frames = frames[next((at for at, (frame, _) in enumerate(frames) if not _is_ours(frame)), 0) :]
        if not frames:
            return []
        extract, left_out = traceback.StackSummary.extract, len(frames) - self.frames
        head = len(frames) if left_out <= 0 else min(10, self.frames // 5)
        lines = ["Traceback (most recent call last):\n", *extract(iter(frames[:head])).format()]
        if left_out > 0:
            lines += [f"  [{left_out} frames are left out]\n", *extract(iter(frames[head + left_out :])).format()]
        self.frames = max(0, -left_out)
        return lines


def _is_ours(frame: FrameType) -> bool:
    """Whether the frame is of this library or of a standard module."""
    name = frame.f_code.co_filename
    return name.startswith(_LIBRARY) or (name.startswith(_STANDARD) and "site-packages" not in name)


def _notes(exc: BaseException) -> Iterator[object]:
    try:
        notes = exc.__notes__
        return islice(notes, _MAX_CHAIN) if isinstance(notes, list) else iter(())
    except BaseException:
        return iter(())
