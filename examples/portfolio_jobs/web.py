"""The pages: portfolios and schedules; an owner requests an import, an export or a sync and sees its progress.

These pages have no login and listen on this machine only: add your application's login.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any, LiteralString
from urllib.parse import urlsplit

from flask import Flask, Response, abort, redirect, render_template, request, url_for
from psycopg.rows import dict_row

from examples.portfolio_jobs.jobs import app, export_holdings, import_holdings, read_screenshot, sync_wallet
from tallybook.contrib.flask import Tallybook

web = Flask(__name__)
web.config["MAX_CONTENT_LENGTH"] = 2_000_000
web.jinja_env.filters["money"] = lambda cents: f"{Decimal(cents) / 100:,.2f}"
tallybook = Tallybook(app, web)  # here and not in jobs.py, so that the worker does not import Flask

TASKS = {"import": import_holdings, "export": export_holdings, "screenshot": read_screenshot}
FIRES = "select schedule, fired_at, what, reason, jobs from tallybook.fires order by fired_at desc limit 20"


def found(query: LiteralString, *values: object) -> list[dict[str, Any]]:
    """Return the rows of a query."""
    with tallybook.transaction() as conn, conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query, values).fetchall()


def the_one(query: LiteralString, *values: object) -> dict[str, Any]:
    """Return the first row of a query, or answer 404."""
    rows = found(query, *values)
    return rows[0] if rows else abort(404)


@web.before_request
def from_here() -> None:
    """Reject forms from another site."""
    origin = request.headers.get("Origin")
    if request.method != "GET" and origin and urlsplit(origin).netloc != request.host:
        abort(403)


@web.get("/")
def index() -> str:
    """Show each portfolio's worth, the schedules' next ticks and the results of the last ones."""
    shown = {"schedules": found("select * from tallybook.schedules order by name"), "fires": found(FIRES)}
    return render_template("index.html", portfolios=found("select * from worth order by id limit 500"), **shown)


@web.get("/portfolios/<int:number>")
def portfolio(number: int) -> str:
    """Show a portfolio's holdings, its past worth and its owner's requests."""
    return render_template(
        "portfolio.html",
        portfolio=the_one("select * from portfolio where id = %s", number),
        wallets=found("select * from wallet where portfolio = %s", number),
        holdings=found("select * from holding where portfolio = %s order by symbol", number),
        valuations=found("select * from valuation where portfolio = %s order by day desc limit 30", number),
        requests=found(
            "select id, kind, asked_at, done_at from request where portfolio = %s order by id desc limit 10", number
        ),
    )


@web.post("/portfolios/<int:number>/<any(import, export, screenshot):kind>")
def ask(number: int, kind: str) -> Any:
    """Store the request and enqueue its job in one transaction, ahead of all scheduled jobs; then answer."""
    the_one("select id from portfolio where id = %s", number)
    content = request.form.get("content", "") if kind == "import" else ""
    picture = request.files["picture"].read() if kind == "screenshot" else None
    if "\0" in content or len(content) > 100_000:
        abort(422)
    with tallybook.transaction() as conn:
        noted = "insert into request (portfolio, kind, content, picture) values (%s, %s, %s, %s) returning id"
        ((asked,),) = conn.execute(noted, (number, kind, content, picture)).fetchall()  # the row keeps the args small
        job = TASKS[kind].with_(links={"portfolio": number}).enqueue_sync(conn, asked)
        conn.execute("update request set job_id = %s where id = %s", (job.id, asked))
    return redirect(url_for("status", number=asked), 303)


@web.post("/portfolios/<int:number>/sync")
def sync(number: int) -> Any:
    """Request a sync of the wallet before its schedule."""
    the_one("select portfolio from wallet where portfolio = %s", number)
    # With the key of the schedule's query: a job that is available already moves to the front.
    first = sync_wallet.with_(priority=1, unique=f"wallet:{number}", on_conflict="raise_priority")
    with tallybook.transaction() as conn:
        first.enqueue_sync(conn, number)
    return redirect(url_for("portfolio", number=number), 303)


@web.get("/requests/<int:number>")
def status(number: int) -> str:
    """Show a request's progress and result; the page reloads until the request has ended."""
    one = the_one("select * from request_status where id = %s", number)
    over = one["done_at"] is not None or one["state"] in ("cancelled", "dead", None)  # None: pruned
    return render_template("request.html", asked=one, over=over)


@web.get("/requests/<int:number>/file")
def file(number: int) -> Response:
    """Send the file of an export."""
    one = the_one("select content from request where id = %s and kind = 'export' and done_at is not null", number)
    return Response(one["content"], mimetype="text/csv", headers={"Content-Disposition": "attachment"})
