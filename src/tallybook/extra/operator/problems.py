"""Refusals as application/problem+json (RFC 9457), and the status of each error of the core."""

import json
import logging
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from tallybook import errors
from tallybook._db.driver import Error, InsufficientPrivilege, InvalidSchemaName, UndefinedFunction, UndefinedTable
from tallybook._db.policy import Action, action_for

log = logging.getLogger("tallybook.api")

CODES: dict[str, tuple[int, str]] = {
    "malformed": (400, "The body is not JSON, or is nested deeper than 64 levels."),
    "unsigned": (401, "One of the four headers is missing, repeated or malformed."),
    "signature": (401, "The key is unknown, or the signature does not match this request."),
    "late": (401, "The request's timestamp is more than 300 s behind the database's clock."),
    "early": (401, "The request's timestamp is more than 300 s ahead of the database's clock."),
    "scope": (403, "The key lacks the scope that this request needs."),
    "read_only": (403, "This server is read-only."),
    "queue": (403, "The key is limited to other queues."),
    "rights": (403, "The API's database user lacks the rights for this request."),
    "unknown": (404, "The job, queue, schedule or path does not exist."),
    "method": (405, "The path does not support this method."),
    "conflict": (409, "The job's state does not allow the change, or another live job has the unique key."),
    "replayed": (409, "A request with this key and nonce has already been served."),
    "too_large": (413, "The body is larger than 1 MB."),
    "media_type": (415, "The body is not application/json, or is compressed."),
    "invalid": (422, "A value is missing, unknown or out of range."),
    "failed": (500, "An unexpected error occurred; the server's log contains it."),
    "unavailable": (503, "The database is unreachable, or has run out of a resource. Nothing was changed."),
    "slow": (503, "The request took too long, or waited too long for a lock. Nothing was changed."),
    "in_doubt": (503, "The connection was lost during the commit, so the change may or may not have been made."),
}
"""Each code with its status and meaning."""


class Problem(Exception):
    """A refusal: a code for programs, which sets the status, and a sentence for people."""

    def __init__(
        self, code: str, detail: str, *, hint: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = CODES[code][0]
        self.code, self.detail, self.hint, self.headers = code, detail, hint, dict(headers or {})
        if self.status == 401:
            self.headers["WWW-Authenticate"] = "Tallybook"
        if self.status == 503:
            self.headers["Retry-After"] = "1"

    @property
    def document(self) -> dict[str, Any]:
        title = HTTPStatus(self.status).phrase
        shown = {"type": "about:blank", "title": title, "status": self.status, "code": self.code}
        return shown | {"detail": self.detail} | ({"hint": self.hint} if self.hint else {})

    def response(self) -> Response:
        return Response(json.dumps(self.document), self.status, self.headers, media_type="application/problem+json")


_UNKNOWN = (errors.UnknownJob, errors.UnknownQueue, errors.UnknownSchedule, errors.UnknownTask, errors.UnknownNode)
_INVALID = (errors.InvalidArgument, errors.ConfigError, errors.PayloadError, errors.SignatureError, errors.NotSupported)
_AWAY = "the database cannot be reached or cannot serve requests now"


def problem_of(error: Exception) -> Problem:
    """Return the problem for an error. A defect is logged and its details are not shown."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, Error):
        return _of_database(error)
    for kinds, code in ((_UNKNOWN, "unknown"), (errors.KeyTaken, "conflict"), (_INVALID, "invalid")):
        if isinstance(error, kinds):
            return Problem(code, str(error).removesuffix("."))
    if isinstance(error, errors.CommitUnknown):
        return Problem("in_doubt", "the connection was lost at the commit; the change may or may not have been made")
    if isinstance(error, errors.QueueUnavailable | errors.SchemaError):
        # Its text names the server, which clients do not need to know.
        log.warning("%s", error)
        return Problem("unavailable", _AWAY)
    return _defect(error)


def _of_database(error: Error) -> Problem:
    action = action_for(error)
    if action is Action.AGAIN:
        return Problem("slow", "the request took too long, or waited too long for a lock")
    if action is Action.PAYLOAD:
        return Problem("invalid", "the database cannot store these values")
    if isinstance(error, InsufficientPrivilege):
        log.warning("the database user of the API lacks a right: %s", error)
        return Problem("rights", "the database user of this API lacks the right to do that")
    if action is not Action.CALLER or isinstance(error, InvalidSchemaName | UndefinedFunction | UndefinedTable):
        log.warning("the database cannot serve requests: %s", error)
        return Problem("unavailable", _AWAY)
    return _defect(error)


def _defect(error: Exception) -> Problem:
    log.exception("the request failed", exc_info=error)
    return Problem("failed", "unexpected error: see the log of the server")
