"""Subjects for producers: push, append, upsert, their bulk forms, forget, and the views."""

import json
import uuid
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from support.askers import HOUR, Asker, T
from support.database import Connection, one
from support.hands import Hands, put, states
from support.subjects import call, clock, end, forget, many, promote, push, seen, start_one, state, subject, upsert


def ended(hands: Hands, name: str, how: str) -> int:
    """End a new subject in one way and return its job."""
    job, _ = push(hands.db, name)
    attempt = next(one for one in hands.start() if one.id == job)
    if how == "dead":
        assert end(hands, "subject_reject", attempt, message="no", max_attempts=1) == "dead"
    else:
        end(hands, {"completed": "subject_complete", "killed": "subject_kill"}[how], attempt)
    assert state(hands.db, name) == how
    return job


# --- push and append ------------------------------------------------------------------------------------------------


def test_a_subject_has_these_columns(db: Connection) -> None:
    """S3-01: a subject is a row with its name, args, state, attempts, iterations, its next time and its last."""
    run_at = clock(db, "1 h")
    job, created = push(db, "a", args={"n": 1}, run_at=run_at, priority=4)
    assert created
    found = seen(db)
    made_at = found.pop("made_at")
    assert clock(db, "-1 min") < made_at < clock(db)
    assert found == {
        "task": "t", "subject": "a", "job_id": job, "queue": "q", "state": "planned", "priority": 4, "args": {"n": 1},
        "iterations": 0, "failures": 0, "attempts": 0, "next_run_at": run_at, "last_at": None, "last_error": None,
        "error": None, "ended_at": None, "scope": "",
    }  # fmt: skip
    push(db, "plain")
    assert seen(db, "plain")["args"] == {}


def test_a_second_push_is_a_no_op(db: Connection, hands: Hands) -> None:
    """S3-02, S3-22: a second push of a subject changes nothing, whether it is planned, pending, active or completed."""
    job, created = push(db, "a", args={"n": 1}, run_at=clock(db, "1 h"))
    assert created
    assert push(db, "a", args={"n": 2}) == (job, False)
    assert promote(db, "2 h") == 1
    assert (state(db, "a"), push(db, "a", args={"n": 2})) == ("pending", (job, False))
    attempt = start_one(hands)
    assert (state(db, "a"), push(db, "a", args={"n": 2})) == ("active", (job, False))
    assert attempt.args == {"n": 1}
    end(hands, "subject_complete", attempt)
    assert (state(db, "a"), push(db, "a", args={"n": 2})) == ("completed", (job, False))
    assert hands.start() == []
    assert seen(db)["args"] == {"n": 1}


def test_a_name_is_one_per_task(db: Connection) -> None:
    """S3-02: the same name under another task is another subject; an equal unique key is neither."""
    first, _ = push(db, "a")
    second, created = push(db, "a", task="other")
    assert created
    assert first != second
    plain = put(db, unique_key="a")
    assert plain not in (first, second)
    assert put(db, unique_key="a") == plain
    assert push(db, "a") == (first, False)
    rows = db.execute("select id, unique_key, subject from tallybook.job where task = 't' order by id").fetchall()
    assert rows == [(first, None, "a"), (plain, "a", None)]


def test_jobs_are_found_by_their_unique_key_and_subjects_are_not(db: Connection) -> None:
    """cancel_many by key and on_conflict change the ordinary job with the key, not the subject of that name."""
    job, _ = push(db, "a", args={"n": 1})
    plain = put(db, unique_key="a", args={"n": 2})
    put(db, unique_key="a", args={"n": 3}, on_conflict="replace_args")
    ((cancelled, cancelling),) = call(db, "cancel_many", unique_key="a")
    assert (cancelled, cancelling) == (1, 0)
    assert states(db, job, plain) == ["available", "cancelled"]
    assert seen(db)["args"] == {"n": 1}


def test_append_makes_a_name(db: Connection) -> None:
    """S3-02, S3-24: append creates subjects with random names, pending at once and in their order."""
    rows = [call(db, "subject_append", queue="q", task="t", args={"n": n})[0] for n in range(3)]
    names = {str(uuid.UUID(name)) for _, name in rows}
    assert len(names) == 3
    assert {state(db, name) for name in names} == {"pending"}
    assert [job.args["n"] for job in Hands(db).start()] == [0, 1, 2]


def test_a_past_date_is_pending_a_future_one_planned(db: Connection) -> None:
    """S3-22: pushed with a past date, a subject is pending; with a future one, planned."""
    push(db, "past", run_at=clock(db, "-1 h"))
    push(db, "future", run_at=clock(db, "1 h"))
    push(db, "now")
    assert [state(db, name) for name in ("past", "future", "now")] == ["pending", "planned", "pending"]


def test_defaults_of_push(db: Connection) -> None:
    """S3-23: push by default has version 1 of the args, priority 2 and no delay, and reports what it created."""
    job, created = push(db, "a")
    row = db.execute("select priority, args, options, max_attempts from tallybook.job where id = %s", (job,)).fetchone()
    assert created
    assert row == (2, {}, {"subject": {"iterations": 0}}, None)


@pytest.mark.parametrize(
    "bad",
    [
        {"subject": ""},
        {"subject": None},
        {"subject": "x" * 513},
        {"task": ""},
        {"queue": "x" * 65},
        {"queue": " q"},
        {"priority": -1},
        {"max_attempts": 0},
        {"run_at": "infinity"},
        {"options": {"subject": {"iterations": 9}}},
        {"options": {"version": 0}},
        {"headers": {"x": "y" * 9000}},
    ],
)
@pytest.mark.parametrize("verb", ["subject_push", "subject_upsert"])
def test_what_does_not_fit_is_refused(db: Connection, verb: str, bad: dict[str, Any]) -> None:
    """S3-23: a name that is too long, or any other invalid argument, raises TB005, and nothing is created."""
    with pytest.raises(psycopg.Error) as caught:
        call(db, verb, **{"queue": "q", "task": "t", "subject": "a", **bad})
    assert caught.value.sqlstate == "TB005"
    assert db.execute("select count(*) from tallybook.subject_job").fetchone() == (0,)


def test_nobody_forges_a_subject(db: Connection) -> None:
    """The options of an ordinary job cannot make it a subject's."""
    with pytest.raises(psycopg.Error) as caught:
        put(db, options={"subject": {}})
    assert caught.value.sqlstate == "TB005"


# --- upsert ---------------------------------------------------------------------------------------------------------


def test_upsert_of_a_planned_one(db: Connection) -> None:
    """S3-12, S3-13: upsert reports created, updated or unchanged, with the time before and after."""
    first, second = clock(db, "1 h"), clock(db, "2 h")
    job, *said = upsert(db, "a", args={"n": 1}, run_at=first)
    assert said == ["created", None, first]
    assert upsert(db, "a", args={"n": 1}, run_at=first) == (job, "unchanged", first, first)
    assert upsert(db, "a", args={"n": 1}) == (job, "unchanged", first, first)
    assert upsert(db, "a", args={"n": 2}, run_at=second) == (job, "updated", first, second)
    assert upsert(db, "a", args={"n": 3}, priority=1, queue="other") == (job, "updated", second, second)
    found = seen(db)
    assert (found["args"], found["next_run_at"], found["priority"], found["queue"]) == ({"n": 3}, second, 1, "other")


def test_upsert_moves_the_date_and_with_it_the_state(db: Connection, hands: Hands) -> None:
    """S3-25: a new time changes the state: a planned subject that is due runs, a pending one for later is planned."""
    job, *_ = upsert(db, "a", run_at=clock(db, "1 h"))
    assert upsert(db, "a", run_at=clock(db, "-1 s"))[1] == "updated"
    assert start_one(hands).id == job
    other, *_ = upsert(db, "b")
    assert state(db, "b") == "pending"
    later = clock(db, "1 h")
    assert upsert(db, "b", run_at=later)[1] == "updated"
    found = seen(db, "b")
    assert (found["state"], found["next_run_at"]) == ("planned", later)
    assert hands.start() == []
    promote(db)
    found = seen(db, "b")
    assert (found["state"], found["next_run_at"], found["attempts"]) == ("planned", later, 0)
    assert start_one(hands, "2 h").id == other


def test_upsert_of_a_pending_one(db: Connection, hands: Hands) -> None:
    """S3-25: a pending subject gets new args and a raised priority in place, for its next attempts too."""
    job, *_ = upsert(db, "a", args={"n": 1}, options={"version": 2})
    assert upsert(db, "a", args={"n": 1}, options={"version": 2})[1] == "unchanged"
    assert upsert(db, "a", args={"n": 2}, options={"version": 3})[:2] == (job, "updated")
    assert upsert(db, "a", args={"n": 2}, options={"version": 3})[1] == "unchanged"
    assert upsert(db, "a", args={"n": 2}, options={"version": 3}, priority=7)[1] == "unchanged"
    assert seen(db)["args"] == {"n": 2}
    assert upsert(db, "a", args={"n": 2}, options={"version": 3}, priority=1)[1] == "updated"
    attempt = start_one(hands)
    assert attempt.args == {"n": 2}
    end(hands, "subject_reschedule", attempt, run_in="1 h")
    row = db.execute("select args, options -> 'version', priority from tallybook.job where id = %s", (job,)).fetchone()
    assert row == ({"n": 2}, 3, 1)


def test_upsert_never_touches_an_active_one(db: Connection, hands: Hands) -> None:
    """S3-25: an active subject is reported as active, and neither it nor its next iteration is changed."""
    push(db, "a", args={"n": 1})
    attempt = start_one(hands)
    assert upsert(db, "a", args={"n": 2}, run_at=clock(db, "1 h")) == (attempt.id, "active", None, None)
    assert many(db, "subject_upsert_many", ["a"], args=['{"n": 2}'])[0][2] == "active"
    assert db.execute("select count(*) from tallybook.amendment").fetchone() == (0,)
    end(hands, "subject_reschedule", attempt, run_in="5 min")
    found = seen(db)
    assert found["args"] == {"n": 1}
    assert clock(db) < found["next_run_at"] < clock(db, "6 min")


@pytest.mark.parametrize("planned", [False, True])
def test_upsert_revives_a_completed_one(db: Connection, hands: Hands, planned: bool) -> None:
    """S3-12, S3-28: upsert revives a completed subject, with its iterations, as a new job; push leaves it."""
    job = ended(hands, "a", "completed")
    assert push(db, "a") == (job, False)
    run_at = clock(db, "1 h") if planned else None
    again, report, old, new = upsert(db, "a", args={"n": 2}, **({"run_at": run_at} if planned else {}))
    assert (report, old) == ("updated", None)
    assert new == run_at if planned else new <= clock(db)
    assert again != job
    found = seen(db)
    assert (found["state"], found["iterations"], found["ended_at"]) == ("planned" if planned else "pending", 1, None)
    assert found["last_at"] is not None
    attempt = start_one(hands, "2 h")
    assert (attempt.id, attempt.args) == (again, {"n": 2})
    assert states(db, job) == ["completed"]


@pytest.mark.parametrize("how", ["killed", "dead"])
def test_upsert_leaves_the_dead(db: Connection, hands: Hands, how: str) -> None:
    """S3-13: upsert reports a dead or killed subject as dead; neither upsert nor push changes it."""
    job = ended(hands, "a", how)
    assert upsert(db, "a", args={"n": 2}) == (job, "dead", None, None)
    assert push(db, "a") == (job, False)
    assert hands.start() == []


def test_upsert_keeps_failures(db: Connection, hands: Hands) -> None:
    """A subject in backoff that gets new args keeps its failures: only a reschedule resets them."""
    push(db, "a")
    end(hands, "subject_reject", start_one(hands), message="no", retry_in="1 h")
    assert upsert(db, "a", args={"n": 2})[1] == "updated"
    found = seen(db)
    assert (found["failures"], found["attempts"], found["state"]) == (1, 1, "planned")


def test_upsert_sees_what_its_own_transaction_did(db: Connection, hands: Hands) -> None:
    """Push, upsert and forget in one transaction see each other, and a rollback leaves nothing."""
    with db.transaction(force_rollback=True):
        job, _ = push(db, "a", args={"n": 1})
        assert upsert(db, "a", args={"n": 2})[:2] == (job, "updated")
        assert upsert(db, "a", args={"n": 2})[:2] == (job, "unchanged")
        assert forget(db, "a") == "forgotten"
        again, created = push(db, "a")
        assert created
        assert again != job
    assert (state(db, "a"), hands.start()) == (None, [])


# --- bulk -----------------------------------------------------------------------------------------------------------


def test_push_many(db: Connection) -> None:
    """S3-11: one call pushes 300 subjects, skips those that exist, and reports in the given order."""
    there, _ = push(db, "s7")
    names = [f"s{n}" for n in range(300)]
    rows = many(db, "subject_push_many", names)
    assert [row[0] for row in rows] == names
    assert [row[0] for row in rows if row[2] != "created"] == ["s7"]
    assert rows[7][1:3] == (there, "unchanged")
    assert many(db, "subject_push_many", names) == [
        (name, row[1], "unchanged", None, None) for name, row in zip(names, rows, strict=True)
    ]
    assert len({job.id for job in Hands(db).start(1000)}) == 300


def test_upsert_many_reports_each(db: Connection, hands: Hands) -> None:
    """S3-12, S3-13: each has a report: created, updated, unchanged, active or dead, with its old and new time."""
    for how in ("dead", "killed", "completed"):
        ended(hands, how, how)
    push(db, "active")
    (active,) = hands.start()
    first, second = clock(db, "1 h"), clock(db, "2 h")
    push(db, "planned", run_at=first, args={"n": 1})
    push(db, "same", run_at=second, args={"n": 9})
    push(db, "pending", args={"n": 1})
    names = ["planned", "new", "same", "active", "pending", "dead", "killed", "completed"]
    rows = many(db, "subject_upsert_many", names, args=['{"n": 9}'] * 8, run_ats=[second] * 8)
    assert [(row[0], row[2]) for row in rows] == [
        ("planned", "updated"),
        ("new", "created"),
        ("same", "unchanged"),
        ("active", "active"),
        ("pending", "updated"),
        ("dead", "dead"),
        ("killed", "dead"),
        ("completed", "updated"),
    ]
    assert [(row[3], row[4]) for row in rows[:4]] == [(first, second), (None, second), (second, second), (None, None)]
    assert rows[4][4] == second
    assert rows[3][1] == active.id
    assert rows[5][3:] == (None, None)
    assert rows[7][3:] == (None, second)
    assert {seen(db, name)["next_run_at"] for name in ("planned", "new", "same", "pending", "completed")} == {second}


def test_duplicates_in_a_batch(db: Connection) -> None:
    """S3-13: if a name is twice in a batch, upsert uses the last one and push the first, and each has its row."""
    rows = many(db, "subject_upsert_many", ["a", "b", "a"], args=['{"n": 1}', '{"n": 2}', '{"n": 3}'])
    assert [(row[0], row[2]) for row in rows] == [("a", "unchanged"), ("b", "created"), ("a", "created")]
    assert rows[0][1] == rows[2][1]
    assert seen(db)["args"] == {"n": 3}
    rows = many(db, "subject_push_many", ["c", "c"], args=['{"n": 1}', '{"n": 2}'])
    assert [(row[0], row[2]) for row in rows] == [("c", "created"), ("c", "unchanged")]
    assert seen(db, "c")["args"] == {"n": 1}


def test_priorities_options_and_headers_of_a_batch(db: Connection) -> None:
    """Each subject of a batch has its own priority, options and headers; null is the default."""
    many(
        db, "subject_upsert_many", ["a", "b"], args=["{}", "{}"], priorities=[1, None], max_attempts=9,
        options=['{"version": 2}', None], headers=[None, '{"trace": "x"}'],
    )  # fmt: skip
    rows = db.execute(
        "select subject, priority, options ->> 'version', headers, max_attempts from tallybook.job order by subject"
    ).fetchall()
    assert rows == [("a", 1, "2", None, 9), ("b", 2, None, {"trace": "x"}, 9)]


def test_new_headers_of_a_planned_subject_are_stored(db: Connection) -> None:
    """An upsert with other headers updates a planned subject; another trace alone does not, nor do no headers."""
    at, seen = {"run_at": T + HOUR, "at": T}, []
    old, new, trace = {"links": {"user": "7"}}, {"links": {"user": "8"}}, {"traceparent": "00-1", "baggage": "y=1"}
    for headers in (None, trace, old, new, new, new | trace, None):
        (_, report, _, _) = upsert(db, "a", headers=headers and json.dumps(headers), **at)
        seen.append((report, one(db, "select headers from tallybook.job")))
    changes = [("created", None), ("unchanged", None), ("updated", old), ("updated", new)]
    assert seen == changes + [("unchanged", new)] * 3


def test_an_empty_batch(db: Connection) -> None:
    """An empty batch returns no rows."""
    assert many(db, "subject_upsert_many", []) == []
    assert many(db, "subject_push_many", []) == []


@pytest.mark.parametrize("bad", [{"args": ["{}"]}, {"args": ["{}", "[]"]}, {"args": ["{}", None]}, {"priorities": [1]}])
def test_a_batch_that_does_not_fit(db: Connection, bad: dict[str, Any]) -> None:
    """An invalid batch raises TB005, and nothing of it is created."""
    with pytest.raises(psycopg.Error) as caught:
        many(db, "subject_upsert_many", ["a", "b"], **bad)
    assert caught.value.sqlstate == "TB005"
    assert db.execute("select count(*) from tallybook.subject_job").fetchone() == (0,)


# --- the order in which they run ------------------------------------------------------------------------------------


def test_the_oldest_due_runs_first(db: Connection, hands: Hands) -> None:
    """S3-03, S3-26: due subjects run by time, then by fewer failures; one that is due at that instant is included."""
    at = clock(db, "1 h")
    for failures in (2, 0, 1):  # the one that failed most is the oldest job
        push(db, f"f{failures}")
        for _ in range(failures):
            end(hands, "subject_reject", start_one(hands), message="no", retry_in="0")
        end(hands, "subject_reject", start_one(hands), message="no", retry_in="1 min")
    for name, run_at in (
        ("late", clock(db, "2 h")),
        ("f2", at),
        ("f0", at),
        ("f1", at),
        ("early", clock(db, "30 min")),
    ):
        upsert(db, name, run_at=run_at)
    ((promoted, *_),) = call(db, "promote", at=at)
    assert promoted == 4
    names = dict(db.execute("select job_id, subject from tallybook.subject_job").fetchall())
    assert [names[job.id] for job in hands.start()] == ["early", "f0", "f1", "f2"]


def test_pushed_past_dates_run_oldest_first(db: Connection, hands: Hands) -> None:
    """S3-03: in a batch the oldest past date runs first; subjects without a date run in the given order."""
    ats = [clock(db, "-1 min"), clock(db, "-3 min"), clock(db, "-2 min")]
    many(db, "subject_push_many", ["a", "b", "c"], args=['{"n": 3}', '{"n": 1}', '{"n": 2}'], run_ats=ats)
    many(db, "subject_push_many", ["z", "y"], args=['{"n": 4}', '{"n": 5}'])
    assert [job.args["n"] for job in hands.start()] == [1, 2, 3, 4, 5]


def test_priority_goes_before_the_date(db: Connection, hands: Hands) -> None:
    """S3-26: a lower priority number runs first, even if another subject has been due for longer."""
    push(db, "old", run_at=clock(db, "-1 h"), args={"n": 2})
    push(db, "urgent", priority=1, args={"n": 1})
    assert [job.args["n"] for _ in range(2) for job in hands.start()] == [1, 2]


# --- forget, cancel, retry ------------------------------------------------------------------------------------------


def test_forget(db: Connection, hands: Hands) -> None:
    """A forgotten subject's job does not run, and its name is free; an active subject is left alone."""
    assert forget(db, "a") == "unknown"
    for run_at in (None, clock(db, "1 h")):
        job, _ = push(db, "a", **({"run_at": run_at} if run_at else {}))
        assert forget(db, "a") == "forgotten"
        assert (state(db, "a"), states(db, job)) == (None, ["cancelled"])
    promote(db, "2 h")
    assert hands.start() == []
    push(db, "a")
    attempt = start_one(hands)
    assert (forget(db, "a"), state(db, "a")) == ("active", "active")
    end(hands, "subject_reschedule", attempt, run_in="1 h")
    for how in ("completed", "dead", "killed"):
        job = ended(hands, how, how)
        assert forget(db, how) == "forgotten"
        again, created = push(db, how)
        assert created
        assert again != job


def test_a_cancelled_subject_is_as_good_as_forgotten(db: Connection, hands: Hands) -> None:
    """A subject that is cancelled while pending, planned or active is not shown, and a push creates a new one."""
    for name, run_at in (("pending", None), ("planned", clock(db, "1 h")), ("active", None)):
        job, _ = push(db, name, **({"run_at": run_at} if run_at else {}))
        attempt = next((one for one in hands.start() if one.id == job), None) if name == "active" else None
        hands.one("select tallybook.cancel(%s)", job)
        if attempt:
            assert state(db, name) == "active"
            assert push(db, name) == (job, False)
            hands.say("cancel_running", attempt)
        assert state(db, name) is None
        again, created = push(db, name)
        assert created
        assert again != job
        assert upsert(db, name)[1] == "unchanged"
        hands.one("select tallybook.cancel(%s)", again)
        assert upsert(db, name)[1] == "created"


def test_cancelled_in_this_transaction_is_not_free_yet(db: Connection) -> None:
    """TB005 in the transaction of the cancel, because the job may have started."""
    job, _ = push(db, "a")
    with pytest.raises(psycopg.Error) as caught, db.transaction():
        db.execute("select tallybook.cancel(%s)", (job,))
        push(db, "a")
    assert caught.value.sqlstate == "TB005"
    assert state(db, "a") == "pending"


@pytest.mark.parametrize("how", ["dead", "killed"])
def test_a_person_retries_a_dead_subject(db: Connection, hands: Hands, how: str) -> None:
    """retry gives a dead or killed subject another attempt under its name, with its iterations."""
    push(db, "a", args={"n": 1})
    end(hands, "subject_reschedule", start_one(hands), run_in="1 h")
    attempt = start_one(hands, "2 h")
    end(hands, "subject_kill", attempt) if how == "killed" else hands.fail(attempt, final=True)
    iterations = seen(db)["iterations"]
    assert iterations == (2 if how == "killed" else 1)
    hands.one("select tallybook.retry(%s)", attempt.id)
    found = seen(db)
    assert (found["state"], found["iterations"], found["failures"], found["job_id"]) == (
        "pending",
        iterations,
        0,
        attempt.id,
    )
    assert upsert(db, "a", args={"n": 1})[:2] == (attempt.id, "unchanged")
    end(hands, "subject_complete", start_one(hands))
    assert seen(db)["iterations"] == iterations + 1


def test_retry_of_a_cancelled_subject(db: Connection, hands: Hands) -> None:
    """A retry of a subject's cancelled job revives the subject; if another job has the name, it raises TB005."""
    for name, run_at in (("pending", None), ("planned", clock(db, "1 h"))):
        job, _ = push(db, name, **({"run_at": run_at} if run_at else {}))
        hands.one("select tallybook.cancel(%s)", job)
        hands.one("select tallybook.retry(%s)", job)
        assert (state(db, name), push(db, name)) == (name, (job, False))
        hands.one("select tallybook.cancel(%s)", job)
        push(db, name)
        with pytest.raises(psycopg.Error) as caught:
            hands.one("select tallybook.retry(%s)", job)
        assert caught.value.sqlstate == "TB005"


def test_retry_of_a_forgotten_subject(db: Connection, hands: Hands) -> None:
    """A forgotten dead subject keeps its dead letter, and a retry gives it its name again."""
    job = ended(hands, "a", "dead")
    forget(db, "a")
    hands.one("select tallybook.retry(%s)", job)
    assert push(db, "a") == (job, False)


def test_dropping_the_dead_letter_keeps_the_name(db: Connection, hands: Hands) -> None:
    """A dead subject without its dead letter stays, and no push revives it; subject_forget frees the name."""
    job = ended(hands, "a", "killed")
    hands.one("select tallybook.drop_dead(%s)", job)
    assert (state(db, "a"), push(db, "a"), upsert(db, "a")[1]) == ("killed", (job, False), "dead")
    forget(db, "a")
    assert push(db, "a")[1]


# --- the views ------------------------------------------------------------------------------------------------------


def test_an_ended_subject_outlives_its_history(db: Connection, hands: Hands) -> None:
    """S3-28: without its history an ended subject looks the same; push is a no-op, upsert revives a completed one."""
    for how in ("completed", "dead", "killed"):
        ended(hands, how, how)
    push(db, "plain", args={"n": 1})
    hands.complete(start_one(hands))  # complete has the effect of subject_complete
    names = ("completed", "dead", "killed", "plain")
    before = [subject(db, name) for name in names]
    for table in ("outcome", "claim", "entry", "dead"):
        db.execute(f"delete from tallybook.{table}")  # type: ignore[arg-type]  # noqa: S608
    assert [subject(db, name) for name in names] == before
    assert [row["state"] for row in before if row] == ["completed", "dead", "killed", "completed"]
    assert not any(push(db, name)[1] for name in names)
    assert [upsert(db, name)[1] for name in names] == ["updated", "dead", "dead", "updated"]
    assert seen(db, "plain")["iterations"] == 1


def test_the_error_log(db: Connection, hands: Hands) -> None:
    """S3-29, S3-30: failures, newest first, by time, queue, task, subject, job, attempt, message, details, ref_id."""
    hour = timedelta(hours=1)
    push(db, "a")
    job = start_one(hands)
    end(hands, "subject_reject", job, message="first", details={"code": 7}, ref_id="worker-3", retry_in="0")
    again = start_one(hands)
    end(hands, "subject_kill", again, reason="second")
    plain = put(db, task="other")
    hands.fail(start_one(hands), final=True)
    rows = db.execute(
        "select queue, task, subject, job_id, attempt, state, message, details, ref_id from tallybook.error"
        " order by ended_at desc"
    ).fetchall()
    assert rows == [
        ("q", "other", None, plain, 1, "dead", "no luck", None, None),
        ("q", "t", "a", job.id, 2, "dead", "second", None, None),
        ("q", "t", "a", job.id, 1, "failed", "first", {"code": 7}, "worker-3"),
    ]
    (newest,) = db.execute("select ended_at from tallybook.error order by ended_at desc limit 1").fetchall()
    assert clock(db) - newest[0] < hour


def test_details_are_any_json(db: Connection, hands: Hands) -> None:
    """S3-30: details are stored unchanged, including nulls."""
    push(db, "a")
    details = {"a": None, "b": [1, {"c": None}]}
    end(hands, "subject_reject", start_one(hands), message="no", details=details)
    assert db.execute("select details from tallybook.error").fetchall() == [(details,)]
    assert json.dumps(seen(db)["error"]["details"]) == json.dumps(details)


# --- with a concurrency limit ---------------------------------------------------------------------------------------


def waits_for_a_permit(db: Connection, asker: Asker) -> tuple[int, int]:
    """Push a subject "b" whose job waits for the only permit, which the job of "a" has; return the jobs of both."""
    one(db, "select tallybook.concurrency_limit_set('api', 1)")
    (running, _), (waiting, _) = (push(db, name, options={"limits": ["api"]}, at=T) for name in "ab")
    assert asker.look(T) == [running]
    assert states(db, waiting) == ["waiting"]
    return running, waiting


def test_a_subject_that_waits_for_a_permit_is_pending(db: Connection) -> None:
    """S3-02: a subject whose job waits for a permit is pending, and a second push is a no-op."""
    _, job = waits_for_a_permit(db, Asker(db))
    found = seen(db, "b")
    assert (found["state"], found["job_id"], found["attempts"], found["next_run_at"]) == ("pending", job, 0, T)
    assert push(db, "b", at=T) == (job, False)
    assert one(db, "select count(*) from tallybook.job where subject = 'b'") == 1


def test_an_upsert_changes_a_subject_that_waits_for_a_permit(db: Connection) -> None:
    """S3-25: upsert changes args and priority of the waiting job in place; it starts once, with the new args."""
    asker = Asker(db)
    running, job = waits_for_a_permit(db, asker)
    assert upsert(db, "b", at=T)[:2] == (job, "unchanged")
    assert upsert(db, "b", at=T, args={"n": 2}, priority=1)[:2] == (job, "updated")
    assert upsert(db, "b", at=T, args={"n": 2}, priority=1)[:2] == (job, "unchanged")
    found = seen(db, "b")
    assert (found["state"], found["args"], found["priority"]) == ("pending", {"n": 2}, 1)
    assert asker.end("subject_complete", running) == "completed"
    assert one(db, "select released from tallybook.concurrency_release(at => %s)", T) == 1
    assert asker.look(T) == [job]
    assert one(db, "select args from tallybook.job where id = %s", job) == {"n": 2}
    assert one(db, "select count(*) from tallybook.job where subject = 'b'") == 1


def test_an_upsert_pushes_a_subject_that_waits_for_a_permit_to_later(db: Connection) -> None:
    """S3-25: a subject that is pushed to a later time is planned when its turn comes, and starts at that time."""
    asker = Asker(db)
    running, job = waits_for_a_permit(db, asker)
    assert upsert(db, "b", at=T, run_at=T + HOUR)[1:] == ("updated", T, T + HOUR)
    assert asker.end("subject_complete", running) == "completed"
    db.execute("select tallybook.concurrency_release(at => %s)", (T,))
    assert asker.look(T) == []
    assert state(db, "b") == "planned"
    assert asker.look(T + HOUR) == [job]


def test_a_subject_that_waits_for_a_permit_is_forgotten(db: Connection) -> None:
    """Forget cancels the subject's waiting job and frees the name."""
    _, job = waits_for_a_permit(db, Asker(db))
    assert forget(db, "b") == "forgotten"
    assert subject(db, "b") is None
    other, created = push(db, "b", at=T)
    assert created
    assert other != job
