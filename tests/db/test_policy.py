"""The action for each error of the database, by SQLSTATE, and the wait between tries."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg import errors as pg

from tallybook._db import policy
from tallybook._db.policy import Action, Outage, action_for, backoff, is_final, is_gone

GONE, AGAIN, WAIT = Action.RECONNECT, Action.AGAIN, Action.WAIT


@pytest.mark.parametrize(
    ("state", "action"),
    # The promised rows; where one names a class, each of its SQLSTATEs that psycopg knows.
    [(state, action) for action, states in {
        GONE: ["08000", "08003", "08006", "08001", "08004", "08P01", "57P01", "57P02", "57P03", "57P05", "25006",
               "25P03", "25P04", "58000", "58030", "58P01"],
        AGAIN: ["40001", "40P01", "55P03", "57014"],
        WAIT: ["53000", "53100", "53200", "53300", "53400"],
        Action.PAYLOAD: ["22P02", "22P05", "22003", "54000", "54001", "23514"],
        Action.OURS: ["TB001", "TB002", "TB003", "TB004", "TB005", "TB006", "TB007", "TB008"],
        Action.FINAL: ["28P01", "28000", "3D000"],
        Action.CALLER: ["23505", "42601", "42501", "22012", "40002", "25001", "55000"],
    }.items() for state in states],
)  # fmt: skip
def test_every_row_of_the_table(state: str, action: Action) -> None:
    """F4 F6 F15 F16 F18 F19 F20: each promised SQLSTATE leads to exactly the action in the table."""
    try:
        cls: type[psycopg.Error] = pg.lookup(state)
    except KeyError:
        cls = type("Raised", (psycopg.DatabaseError,), {"sqlstate": state})
    error = cls("it failed")
    assert error.sqlstate == state
    assert action_for(error) is action
    assert is_gone(error) is (action in (GONE, WAIT))
    assert is_final(error) is (action is Action.FINAL)


def test_no_row_of_the_table_is_dead() -> None:
    """Every prefix in the table matches at least one code of the list above, or is named here."""
    ((_, rows),) = [mark.args for mark in test_every_row_of_the_table.pytestmark]  # type: ignore[attr-defined]
    listed = {state for state, _ in rows}
    unused = {prefix for prefix in policy.TABLE if not any(state.startswith(prefix) for state in listed)}
    assert unused == {"26000", "40003", "0P"}


@pytest.mark.parametrize(
    ("error", "closed", "action"),
    [
        (psycopg.OperationalError("consuming input failed: server closed the connection unexpectedly"), False, GONE),
        (psycopg.OperationalError("connection failed: FATAL:  password authentication failed"), False, GONE),
        (psycopg.OperationalError("connection failed: FATAL:  sorry, too many clients already"), False, WAIT),
        (psycopg.InterfaceError("the connection is closed"), True, GONE),
        (psycopg.InterfaceError("cannot adapt"), False, Action.CALLER),
        (pg.SyntaxError("syntax error"), True, GONE),
        (ConnectionResetError("reset"), False, GONE),
        (TimeoutError("timed out"), False, GONE),
        (ValueError("a defect"), True, Action.CALLER),
    ],
)
def test_errors_without_a_sqlstate(error: Exception, closed: bool, action: Action) -> None:
    """F4: a lost connection mostly has no SQLSTATE; its class, connection and message decide."""
    assert action_for(error, SimpleNamespace(closed=closed)) is action


def test_one_table_only() -> None:
    """Only these modules of the package use SQLSTATEs; another one needs a reason, and a line here."""
    allowed = {
        "transactions.py",
        "pooler.py",
        "policy.py",
        "errors.py",
        "sync.py",
        "link.py",
        "heartbeat.py",
        "exactly_once.py",
        "worker.py",  # missing functions: the schema is too new for this release
    }
    folder = Path(policy.__file__).parents[1]
    using = {
        file.name
        for file in folder.rglob("*.py")
        if "sqlstate" in file.read_text() and file.parent.name in ("_db", "_worker")
    }
    assert using <= allowed


def test_backoff_grows_is_bounded_and_jittered() -> None:
    """F16 F48: 0.1 to 10 s, doubling, with jitter: clients that were cut off together do not return together."""
    for failures in range(40):
        most = min(10.0, 0.1 * 2**failures)
        drawn = [backoff(failures) for _ in range(50)]
        assert all(most / 2 <= pause <= most for pause in drawn)
        assert len(set(drawn)) > 40


def test_lacking_resources_are_waited_for_longer() -> None:
    """F15 F16: if the server lacks resources, tries are at least a second apart, with jitter."""
    outage = Outage("x")
    pauses = [outage.failed(pg.TooManyConnections("it failed")) for _ in range(20)]
    assert all(1.0 <= pause <= 10.0 for pause in pauses)
    assert len(set(pauses)) > 15


def test_an_outage_is_told_at_its_start_each_tenth_time_and_then_seldom(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong password while running is logged at failure 1, 10, 20, 30, then every 5 minutes, and at its end."""
    now = [0.0]
    monkeypatch.setattr(policy.time, "monotonic", lambda: now[0])
    caplog.set_level(logging.INFO, "tallybook.db")
    outage = Outage("database host=db")
    told: list[int] = []
    for failure in range(1, 200):
        caplog.clear()
        outage.failed(psycopg.OperationalError('FATAL:  password authentication failed for user "shop"\nmore'))
        if caplog.records:
            told.append(failure)
            assert "password authentication failed" in caplog.text
            assert "more" not in caplog.text
        now[0] += 10.0
    assert told == [1, 10, 20, 30, 60, 90, 120, 150, 180]
    caplog.clear()
    outage.over()
    assert "connected again after" in caplog.text
    outage.failed(psycopg.OperationalError("again"))
    assert "again" in caplog.text


def test_quiet_failures_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """A restarted server answers the next try, so one failure is not logged."""
    outage = Outage("x", quiet=1)
    error: Any = psycopg.OperationalError("gone")
    assert outage.failed(error) <= 0.05
    outage.over()
    assert not caplog.records
    outage.failed(error)
    assert not caplog.records
    outage.failed(error)
    assert len(caplog.records) == 1
