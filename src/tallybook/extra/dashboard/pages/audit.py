"""Audit: changes by people and programs, newest first."""

import json
from typing import Any

from starlette.responses import Response

from tallybook._model.maintenance import AuditRow
from tallybook._model.merged import Part, Row, goes_on, merged, places
from tallybook.extra.dashboard.asked import job_of, text_of
from tallybook.extra.dashboard.database import Conn
from tallybook.extra.dashboard.redact import redact
from tallybook.extra.dashboard.view import Pages, View

pages = Pages()

_PAGE = 50


@pages.page("/audit")
async def audit(view: View) -> Response:
    actor, action, after = view.asked("actor"), view.asked("action"), text_of("after", view.asked("after"))
    many = view.site.nodes.many
    place = places(after) if many else {"": after or ""}

    async def read(conn: Conn, node: str) -> Part[Row[AuditRow]]:
        if not goes_on(place, node):
            return [], None, None
        rows = await view.app.audit.list(
            actor=actor or None, action=action or None, before=job_of(place.get(node, "")), max_rows=_PAGE + 1
        ).on(conn)
        lines = [Row(row.id, row.at, str(row.id), row) for row in rows[:_PAGE]]
        return lines, lines[-1].cursor if len(rows) > _PAGE else None, None

    found = await view.ask(read)
    lines, more, _ = (
        merged(found, place, _PAGE) if many else ([("", line) for line in found[""][0]], found[""][1], None)
    )
    shown = [(node, line.shown, _words(line.shown.target), _words(line.shown.done)) for node, line in lines]
    return view.render("audit.html", rows=shown, actor=actor, action=action, after=after, more=more)


def _words(values: dict[str, Any]) -> str:
    """Return values as readable text: name value, name value."""
    said = []
    for name, value in redact(values).items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        said.append(f"{name} {text if len(text) <= 300 else text[:300] + '…'}")
    return ", ".join(said)
