"""Audit: what people have changed, newest first."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

from tallybook.extra.dashboard.asked import job_of
from tallybook.extra.dashboard.redact import redact
from tallybook.extra.dashboard.view import Pages, View

pages = Pages()

_PAGE = 50


@pages.page("/audit")
async def audit(view: View) -> Response:
    """A page of it, of everybody or of one actor, of all actions or of one."""
    actor, action, last = view.asked("actor"), view.asked("action"), job_of(view.asked("before"))
    async with view.read() as conn:
        found = await view.app.audit.list(
            actor=actor or None, action=action or None, before=last, max_rows=_PAGE + 1
        ).on(conn)
    shown = [(row, _words(row.target), _words(row.done)) for row in found[:_PAGE]]
    more = found[_PAGE - 1].id if len(found) > _PAGE else None
    return view.render("audit.html", rows=shown, actor=actor, action=action, before=last, more=more)


def _words(values: dict[str, Any]) -> str:
    """As people read it: name value, name value."""
    said = []
    for name, value in redact(values).items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        said.append(f"{name} {text if len(text) <= 300 else text[:300] + '…'}")
    return ", ".join(said)
