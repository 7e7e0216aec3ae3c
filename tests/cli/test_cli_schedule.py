"""tallybook schedule: list, show, next, set, pause, resume, drop, run."""

import json
import re
from datetime import timedelta
from typing import Any

import pytest

from support.cli import run
from tallybook import App
from tallybook._cli.output import local
from tallybook._model.cron import Cron
from tallybook._model.schedule import due


def put(dsn: str, *more: str) -> str:
    options = ("--args", '{"lang": "de"}', "--tz", "Europe/Berlin", "--queue", "r", *more)
    return run("schedule", "set", "report-de", "report", *options, dsn=dsn)


def test_a_schedule_from_the_command_line(dsn: str, db: Any) -> None:
    """S2-16: set, change, list, show, next and drop a schedule by hand; the output is what is stored."""
    assert "no schedules" in run("schedule", "list", dsn=dsn)
    assert re.match(r"schedule 'report-de' is created; next at \d{4}-", put(dsn, "--cron", "0 6 * * MON-FRI"))
    assert "is unchanged" in put(dsn, "--cron", "0 6 * * MON-FRI")
    assert "is changed" in put(dsn, "--cron", "30 6 * * *", "--overlap")
    assert "is changed" in put(dsn, "--cron", "30 6 * * *", "--jitter", "5 min", "--missed", "all")
    assert re.search(
        r"^report-de +30 6 \* \* \* Europe/Berlin +report ", run("schedule", "list", dsn=dsn), re.MULTILINE
    )
    (listed,) = json.loads(run("schedule", "list", "--json", dsn=dsn))
    assert (listed["missed"], listed["overlap"], listed["jitter"], listed["args"]) == (
        "all",
        False,  # not passed the last time
        "PT5M",
        {"lang": "de"},
    )
    ticks = run("schedule", "next", "report-de", "-n", "3", dsn=dsn).split()
    assert len(ticks) == 3 and all("T06:30:00+0" in tick for tick in ticks)
    assert json.loads(run("schedule", "next", "report-de", "-n", "3", "--json", dsn=dsn)) == ticks
    shown = run("schedule", "show", "report-de", dsn=dsn)
    assert "the database" in shown and "report in queue r" in shown and "jitter" in shown and "no fires" in shown
    assert "is removed" in run("schedule", "drop", "report-de", "--yes", dsn=dsn)
    assert db.execute("select count(*) from tallybook.schedule").fetchone() == (0,)


def test_a_schedule_shows_its_next_tick_before_a_worker_has_run(dsn: str, db: Any) -> None:
    """List and show have the tick that the first worker will fire, with its jitter; for a wrong expression, none."""
    name, ticks = "report-de", Cron("30 6 * * *", "Europe/Berlin")
    created = put(dsn, "--cron", "30 6 * * *", "--jitter", "5 min")
    db.execute("select tallybook.schedule_set('bad', 't', cron => '61 * * * *')")
    (at,) = db.execute("select since from tallybook.schedules where name = %s", (name,)).fetchone()
    tick = ticks.after(at)
    assert tick is not None and local(tick) in created
    fires = local(due(name, ticks, tick, timedelta(minutes=5)))
    bad, good = run("schedule", "list", dsn=dsn).splitlines()[1:]
    assert fires in good and re.fullmatch(r"bad +61 \* \* \* \* +t +0 +0 +0 +0 *", bad)
    assert re.search(f"^next +{fires}$", run("schedule", "show", name, dsn=dsn), re.MULTILINE)


def test_run_now_and_what_became_of_it(dsn: str, db: Any) -> None:
    """S2-13, S2-16: run enqueues the job, a second run reports that it was skipped and ends with 1; show has both."""
    run("schedule", "set", "s", "t", "--every", "1 hour", dsn=dsn)
    assert run("schedule", "run", "s", dsn=dsn) == "job 1\n"
    assert "skipped: the job of its last fire has not ended" in run("schedule", "run", "s", dsn=dsn, code=1)
    lines = run("schedule", "show", "s", dsn=dsn).splitlines()
    assert re.search(r"skipped +.*overlap$", lines[-2]) and re.search(r"enqueued +1 +available", lines[-1])
    fires = json.loads(run("schedule", "show", "s", "--json", dsn=dsn))["fires"]
    assert [(fire["what"], fire["reason"], fire["job_state"]) for fire in fires] == [
        ("skipped", "overlap", None),
        ("enqueued", None, "available"),
    ]
    assert "1 fired, 1 skipped, 0 missed, 0 failed" in "\n".join(lines)


def test_pause_and_resume(dsn: str) -> None:
    """S2-16: list shows who paused a schedule, and since when; resume ends the pause."""
    run("schedule", "set", "s", "t", "--cron", "@hourly", dsn=dsn)
    assert "is paused" in run("schedule", "pause", "s", "--by", "ada", dsn=dsn)
    assert "was paused already" in run("schedule", "pause", "s", dsn=dsn)
    assert re.search(r"paused since .* by ada", run("schedule", "list", dsn=dsn))
    assert "paused since" in run("schedule", "next", "s", dsn=dsn)
    assert "is resumed" in run("schedule", "resume", "s", dsn=dsn)
    assert "paused" not in run("schedule", "list", dsn=dsn) + run("schedule", "next", "s", dsn=dsn)
    assert "was not paused" in run("schedule", "resume", "s", dsn=dsn)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["set", "s", "t"], 2, "one of --cron and --every"),
        (["set", "s", "t", "--cron", "61 * * * *"], 2, "'61' does not fit the field minute"),
        (["set", "s", "t", "--cron", "@daily", "--tz", "Mars/Base"], 2, "an unknown time zone"),
        (["set", "s", "t", "--every", "1 month"], 2, "no fixed length"),
        (["set", "s", "t", "--every", "1 h", "--args", "[]"], 2, "--args must be one JSON object"),
        (["show", "report"], 1, "Did you mean 'report-de'?"),
        (["pause", "x"], 1, "unknown schedule 'x'"),
        (["run", "x"], 1, "unknown schedule 'x'"),
        (["drop", "x", "--yes"], 1, "unknown schedule 'x'"),
    ],
)
def test_mistakes_are_explained(dsn: str, words: list[str], code: int, text: str) -> None:
    """A wrong expression, zone, interval or name is an error that names it and changes nothing."""
    put(dsn, "--cron", "@daily")
    before = run("schedule", "show", "report-de", "--json", dsn=dsn)
    assert text in run("schedule", *words, dsn=dsn, code=code)
    assert run("schedule", "show", "report-de", "--json", dsn=dsn) == before
    assert len(json.loads(run("schedule", "list", "--json", dsn=dsn))) == 1


def test_a_schedule_in_code_can_be_looked_at_and_comes_back(dsn: str, db: Any) -> None:
    """S2-11: a schedule in code cannot be changed by hand, and after a drop it returns with the next worker."""

    def nothing() -> None: ...

    app = App("shop", dsn=dsn)
    app.task(schedule="@hourly", name="sweep")(nothing)
    db.execute("select tallybook._schedules_register('shop', %s)", (json.dumps(app._declared_schedules()),))
    assert 'declared in the code of app "shop"' in run(
        "schedule", "set", "sweep", "t", "--cron", "@daily", dsn=dsn, code=1
    )
    assert "the code of app shop" in run("schedule", "show", "sweep", dsn=dsn)
    assert "returns when a worker of app 'shop' starts" in run("schedule", "drop", "sweep", "--yes", dsn=dsn)
    run("schedule", "show", "sweep", dsn=dsn, code=1)
    db.execute("select tallybook._schedules_register('shop', %s)", (json.dumps(app._declared_schedules()),))
    assert "the code of app shop" in run("schedule", "show", "sweep", dsn=dsn)
