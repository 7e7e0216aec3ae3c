"""The verb of an App over the audit; a mixin of App like _operations."""

from __future__ import annotations

from tallybook._db import audit as calls
from tallybook._model.audit import AuditRow
from tallybook._run import run, run_sync

__all__ = ["Audits"]


class Audits:
    """Mixed into App."""

    async def audits(
        self,
        conn: object,
        *,
        actor: str | None = None,
        action: str | None = None,
        before: int | None = None,
        max_rows: int = 50,
    ) -> list[AuditRow]:
        """List what people have changed by pages and by the API, newest first, at most `max_rows` (1 to 1000).

        `before` is the id of the last row of the page before. Rows go after 90 days, unless `retention` says otherwise.

            for row in await app.audits(conn, actor="ada"): print(row.at, row.action, row.target)
        """
        return await run(conn, calls.audits(actor=actor, action=action, before=before, max_rows=max_rows))

    def audits_sync(
        self,
        conn: object,
        *,
        actor: str | None = None,
        action: str | None = None,
        before: int | None = None,
        max_rows: int = 50,
    ) -> list[AuditRow]:
        """List what people have changed; audits without an event loop."""
        return run_sync(conn, calls.audits(actor=actor, action=action, before=before, max_rows=max_rows))
