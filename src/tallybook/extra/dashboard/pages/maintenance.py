"""Maintenance: services, retention, findings of the doctor, the schema. And the audit of changes, newest first."""

import asyncio
import json
from typing import Any

from starlette.responses import Response

from tallybook._model.maintenance import LEVELS, AuditRow
from tallybook._model.merged import Part, Row, goes_on, merged, places
from tallybook.extra.dashboard.database import Conn, rows
from tallybook.extra.dashboard.redact import redact
from tallybook.extra.dashboard.texts import id_of, text_of
from tallybook.extra.dashboard.view import Act, Pages, View

pages = Pages()
_SCHEMA = """\
select i.version, i.works_from, i.node, i.installed_at, i.migrated_at, current_setting('server_version') as server
  from tallybook.installed as i"""


@pages.page("/maintenance")
async def maintenance(view: View) -> Response:
    """Show the page; the doctor runs meanwhile, on its own connection."""
    looking = asyncio.create_task(_findings(view))
    try:
        async with view.read() as conn:
            services = await view.app.services.list().on(conn)
            retentions = await view.app.history.list().on(conn)
            held = await view.app.history.held().on(conn)
            schema = (await rows(conn, _SCHEMA))[0]
    finally:
        found = await looking
    return view.render(
        "maintenance.html", services=services, retentions=retentions, held=held, schema=schema, first=True, **found
    )


@pages.page("/maintenance/findings")
async def findings(view: View) -> Response:
    """Show the doctor's findings so far; the page requests them until they are complete."""
    return view.render("maintenance_findings.html", first=False, **await _findings(view))


async def _findings(view: View) -> dict[str, Any]:
    found, complete = await (await view.at()).database.examination.look()
    return {"findings": sorted(found, key=lambda one: -LEVELS.index(one.level)), "complete": complete}


pages.form(
    "/maintenance/service", "service.every", lambda app, name, _, every: app.services.set(name, every), "changed",
    ("Service {} checks every {every}.", "Service {} is unchanged."), every=Act.form,
)  # fmt: skip
pages.form(
    "/maintenance/retention", "retention.set", lambda app, name, _, keep: app.history.set(name, keep), "changed",
    ("The retention of class {} is {keep}.", "Class {} is unchanged."), keep=Act.form,
)  # fmt: skip


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
            actor=actor or None, action=action or None, before=id_of(place.get(node, "")), max_rows=_PAGE + 1
        ).on(conn)
        lines = [Row(row.id, row.at, str(row.id), row) for row in rows[:_PAGE]]
        return lines, lines[-1].cursor if len(rows) > _PAGE else None, None

    found = await view.ask(read)
    if many:
        lines, more, _ = merged(found, place, _PAGE)
    else:
        lines, more = [("", line) for line in found[""][0]], found[""][1]
    shown = [(node, line.shown, _words(line.shown.target), _words(line.shown.done)) for node, line in lines]
    return view.render("audit.html", rows=shown, actor=actor, action=action, after=after, more=more)


def _words(values: dict[str, Any]) -> str:
    said = []
    for name, value in redact(values).items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        said.append(f"{name} {text if len(text) <= 300 else text[:300] + '…'}")
    return ", ".join(said)
