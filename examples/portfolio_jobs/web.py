"""The pages: portfolios and what the clock does; an owner asks for an import or an export and sees how far it is.

Who is logged in is your application's business: these pages ask nobody, and listen on this machine only.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from flask import Flask, Response, abort, redirect, render_template, request, url_for
from psycopg.rows import dict_row

from examples.portfolio_jobs.jobs import app, export_holdings, import_holdings
from tallybook.contrib.flask import Tallybook

web = Flask(__name__)
web.config["MAX_CONTENT_LENGTH"] = 100_000
tallybook = Tallybook(app, web)  # here, not beside the jobs: the worker needs nothing of Flask

FIRES = "select schedule, fired_at, what, reason, jobs from tallybook.fires order by fired_at desc limit 20"


def found(query: str, *values: object) -> list[dict[str, Any]]:
    """The rows of a query."""
    with tallybook.transaction() as conn, conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query.encode(), values).fetchall()


def the_one(query: str, *values: object) -> dict[str, Any]:
    """The row of a query, or 404."""
    rows = found(query, *values)
    return rows[0] if rows else abort(404)


@web.before_request
def from_here() -> None:
    """No form of another site."""
    origin = request.headers.get("Origin")
    if request.method != "GET" and origin and urlsplit(origin).netloc != request.host:
        abort(403)


@web.get("/")
def index() -> str:
    """What each portfolio is worth, what the clock does next, and what became of its last ticks."""
    shown = {"schedules": found("select * from tallybook.schedules order by name"), "fires": found(FIRES)}
    return render_template("index.html", portfolios=found("select * from worth order by id limit 500"), **shown)


@web.get("/portfolios/<int:number>")
def portfolio(number: int) -> str:
    """What it holds, what it was worth, what its owner has asked for."""
    return render_template(
        "portfolio.html",
        portfolio=the_one("select * from portfolio where id = %s", number),
        holdings=found("select * from holding where portfolio = %s order by symbol", number),
        valuations=found("select * from valuation where portfolio = %s order by day desc limit 30", number),
        requests=found("select * from request where portfolio = %s order by id desc limit 10", number),
    )


@web.post("/portfolios/<int:number>/<any(import, export):kind>")
def ask(number: int, kind: str) -> Any:
    """Note the request and put its job in, in one transaction, before all that the clock has put in; then answer."""
    the_one("select id from portfolio where id = %s", number)
    content = request.form.get("content", "") if kind == "import" else ""
    if "\0" in content:
        abort(422)
    with tallybook.transaction() as conn:
        noted = "insert into request (portfolio, kind, content) values (%s, %s, %s) returning id"
        ((asked,),) = conn.execute(noted, (number, kind, content)).fetchall()
        task = import_holdings if kind == "import" else export_holdings
        job = task.with_(links={"portfolio": number}).enqueue_sync(conn, asked)
        conn.execute("update request set job_id = %s where id = %s", (job.id, asked))
    return redirect(url_for("status", number=asked), 303)


@web.get("/requests/<int:number>")
def status(number: int) -> str:
    """How far it is, and what came of it; the page asks again until it is over."""
    one = the_one("select * from request_status where id = %s", number)
    over = one["done_at"] is not None or one["state"] in ("cancelled", "dead")
    return render_template("request.html", asked=one, over=over)


@web.get("/requests/<int:number>/file")
def file(number: int) -> Response:
    """The file of an export."""
    one = the_one("select content from request where id = %s and kind = 'export' and done_at is not null", number)
    return Response(one["content"], mimetype="text/csv", headers={"Content-Disposition": "attachment"})
