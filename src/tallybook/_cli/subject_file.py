"""Read subjects from a file, CSV with a header line or JSON lines, for `tallybook subject upsert --file`."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from tallybook._cli.errors import Problem
from tallybook._model.options import Options
from tallybook._model.payload import encode
from tallybook._model.subject import SubjectCall, check_subject
from tallybook.errors import TallybookError

COLUMNS = ("subject", "args", "run_at", "priority")
_READ: Mapping[str, Callable[[str], object]] = {"run_at": datetime.fromisoformat, "priority": int}
_FORMS = (
    """Write CSV with the header `subject,args`, or lines like '{"subject": "asset:42", "args": {"asset_id": 42}}'"""
)


def rows_of(path: str, stream: TextIO, task: str, options: Options) -> Iterator[tuple[SubjectCall, int]]:
    """Yield the subjects of a file in order, each with the position of its line's end in bytes. *.csv is CSV.

    Raises Problem with the number of a wrong line.
    """
    lines = _Counted(stream)
    found = _csv(path, lines) if Path(path).suffix.lower() == ".csv" else _json_lines(path, lines)
    for number, fields in found:
        yield _at(path, number, _call, fields, task, options), lines.read


class _Counted:
    """The lines of a stream, with a count of their bytes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.read = 0

    def __iter__(self) -> Iterator[str]:
        for line in self._stream:
            self.read += len(line.encode(errors="replace"))
            yield line


def _csv(path: str, lines: _Counted) -> Iterator[tuple[int, Mapping[str, Any]]]:
    before = csv.field_size_limit(2_000_000)  # args have up to 1 MB; the limit is the whole process's
    reader = csv.DictReader(lines, strict=True)
    try:
        titles = _at(path, 1, lambda: reader.fieldnames) or ()
        if "subject" not in titles or set(titles) - set(COLUMNS):
            odd = next((title for title in titles if title not in COLUMNS), None)
            what = "there is no column `subject`"
            if odd is not None:
                what = f"unknown column {odd!r}; the known columns are {', '.join(COLUMNS)}"
            hint = "Write args to one column `args`, as a JSON object"
            raise Problem(f"{path}: line 1: {what}", hint=hint, exit_code=2)
        while (row := _at(path, reader.line_num + 1, next, reader, None)) is not None:
            if None in row or None in row.values():
                raise Problem(f"{path}: line {reader.line_num}: it does not have {len(titles)} columns", exit_code=2)
            fields: dict[str, Any] = {name: value for name, value in row.items() if value != ""}
            if "args" in fields:
                fields["args"] = _at(path, reader.line_num, json.loads, fields["args"])
            yield reader.line_num, fields
    finally:
        csv.field_size_limit(before)


def _json_lines(path: str, lines: _Counted) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        fields = _at(path, number, json.loads, line)
        if not isinstance(fields, dict) or "subject" not in fields or set(fields) - set(COLUMNS):
            what = f"one JSON object with subject, and optionally {', '.join(COLUMNS[1:])}, is expected"
            raise Problem(f"{path}: line {number}: {what}", hint=_FORMS, exit_code=2)
        yield number, fields


def _at(path: str, number: int, read: Callable[..., Any], *given: Any) -> Any:
    try:
        return read(*given)
    except (ValueError, RecursionError, csv.Error, TallybookError) as error:
        raise Problem(f"{path}: line {number}: {error}", exit_code=2) from None


def _call(fields: Mapping[str, Any], task: str, options: Options) -> SubjectCall:
    args = fields.get("args")
    if not isinstance(args, dict | None):
        raise ValueError("args must be one JSON object")
    given = {name: fields[name] for name in _READ if fields.get(name) is not None}
    given |= {name: _READ[name](value) for name, value in given.items() if isinstance(value, str)}
    if "run_at" in given and options.delay is not None:
        options = replace(options, delay=None)
    subject = check_subject(fields["subject"])
    return SubjectCall(task, subject, encode(args or {}, task=task), options.replaced(given) if given else options)
