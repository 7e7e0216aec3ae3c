"""Maintenance: services, retention, findings of the doctor, the schema."""

import asyncio
from typing import Any

from starlette.responses import Response

from tallybook._model.maintenance import LEVELS
from tallybook.extra.dashboard.database import rows
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
    folded = next((one.last_run_at for one in services if one.name == "fold"), None)
    return view.render(
        "maintenance.html", services=services, retentions=retentions, held=held[:100],
        more_held=max(0, len(held) - 100), schema=schema, folded=folded, first=True, **found,
    )  # fmt: skip


@pages.page("/maintenance/findings")
async def findings(view: View) -> Response:
    """Show the doctor's findings so far; the page requests them until they are complete."""
    return view.render("maintenance_findings.html", first=False, **await _findings(view))


async def _findings(view: View) -> dict[str, Any]:
    found, complete = await (await view.at()).database.examination.look()
    found = sorted(found, key=lambda one: -LEVELS.index(one.level))
    return {
        "bad": [one for one in found if not one.good or one.level == "note"],
        "good": [one for one in found if one.level == "ok"], "complete": complete,
        "roles": next((one for one in found if one.name == "roles"), None),
    }  # fmt: skip


pages.form(
    "/maintenance/service", "service.every", lambda app, name, _, every: app.services.set(name, every), "changed",
    ("Service {} checks every {every}.", "Service {} is unchanged."), every=Act.form,
)  # fmt: skip
pages.form(
    "/maintenance/retention", "retention.set", lambda app, name, _, keep: app.history.set(name, keep), "changed",
    ("The retention of class {} is {keep}.", "Class {} is unchanged."), keep=Act.form,
)  # fmt: skip
