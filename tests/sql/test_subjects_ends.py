"""Subjects for workers: how an iteration ends, what is counted, what is rescued, and versions side by side."""

from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from support.database import Connection
from support.hands import Hands, Job, states
from support.subjects import call, clock, end, promote, push, seen, start_one, state, upsert

ENDS: list[tuple[str, dict[str, Any]]] = [
    ("subject_reschedule", {"run_in": "1 h"}),
    ("subject_complete", {}),
    ("subject_drop", {}),
    ("subject_kill", {}),
    ("subject_reject", {"message": "no"}),
]


# --- reschedule -----------------------------------------------------------------------------------------------------


def test_reschedule(db: Connection, hands: Hands) -> None:
    """S3-01, S3-07, S3-27: reschedule counts an iteration, sets last_at, resets attempts and failures; same job."""
    job, _ = push(db, "a", args={"n": 1})
    end(hands, "subject_reject", start_one(hands), message="no", retry_in="0")
    attempt = start_one(hands)
    assert (seen(db)["failures"], seen(db)["attempts"]) == (1, 2)
    at = clock(db)
    run_at = clock(db, "1 week")
    assert end(hands, "subject_reschedule", attempt, run_at=run_at, at=at) == "scheduled"
    found = seen(db)
    assert found["job_id"] == attempt.id == job
    assert {name: found[name] for name in ("state", "iterations", "failures", "attempts", "last_error", "args")} == {
        "state": "planned", "iterations": 1, "failures": 0, "attempts": 0, "last_error": None, "args": {"n": 1},
    }  # fmt: skip
    assert (found["last_at"], found["next_run_at"]) == (at, run_at)


@pytest.mark.parametrize("run_in", ["1 week", "1 month", "90 s"])
def test_a_relative_date(db: Connection, hands: Hands, run_in: str) -> None:
    """S3-40: run_in is a distance in PostgreSQL's own words, such as '1 week'."""
    push(db, "a")
    at = clock(db)
    end(hands, "subject_reschedule", start_one(hands), run_in=run_in, at=at)
    assert (seen(db)["next_run_at"],) == db.execute("select %s::timestamptz + %s::interval", (at, run_in)).fetchone()


@pytest.mark.parametrize("past", ["-1 h", "0"])
def test_a_past_date_is_pending_at_once(db: Connection, hands: Hands, past: str) -> None:
    """S3-27: a subject that is rescheduled to a past date is in line at once, and its iterations continue."""
    push(db, "a")
    for done in range(1, 4):
        assert end(hands, "subject_reschedule", start_one(hands), run_in=past) == "available"
        found = seen(db)
        assert (found["state"], found["iterations"], found["attempts"]) == ("pending", done, 0)


def test_new_args_from_the_worker(db: Connection, hands: Hands) -> None:
    """S3-27, S3-28: each end can set other args, for the next iteration or for the record."""
    push(db, "a", args={"n": 1})
    end(hands, "subject_reschedule", start_one(hands), run_in="0", args={"n": 2})
    attempt = start_one(hands)
    assert attempt.args == {"n": 2}
    end(hands, "subject_complete", attempt, args={"n": 3})
    assert seen(db)["args"] == {"n": 3}
    push(db, "b")
    end(hands, "subject_kill", start_one(hands), args={"n": 4})
    assert seen(db, "b")["args"] == {"n": 4}
    assert db.execute("select args from tallybook.dead").fetchall() == [({"n": 4},)]


@pytest.mark.parametrize(
    "bad", [{}, {"run_in": "1 h", "run_at": "2030-01-01"}, {"run_at": "infinity"}, {"run_in": "1 h", "args": "[1]"}]
)
def test_a_reschedule_that_says_no_time(db: Connection, hands: Hands, bad: dict[str, Any]) -> None:
    """TB005 for no time, for two, for an infinite one and for invalid args; the attempt stays open."""
    push(db, "a")
    attempt = start_one(hands)
    with pytest.raises(psycopg.Error) as caught:
        end(hands, "subject_reschedule", attempt, **bad)
    assert caught.value.sqlstate == "TB005"
    assert state(db, "a") == "active"
    assert end(hands, "subject_reschedule", attempt, run_in="1 h") == "scheduled"


def test_a_checkpoint_ends_with_its_iteration(db: Connection, hands: Hands) -> None:
    """Within an iteration a checkpoint outlives failures; the next iteration starts without one."""
    job, _ = push(db, "a")
    attempt = start_one(hands)
    hands.one("select tallybook.checkpoint(%s, %s, %s, '7')", attempt.lease, attempt.id, attempt.attempt)
    end(hands, "subject_reject", attempt, message="no", retry_in="0")
    assert hands.one("select tallybook.checkpoint_of(%s)", job) == 7
    end(hands, "subject_reschedule", start_one(hands), run_in="0")
    assert hands.one("select tallybook.checkpoint_of(%s)", job) is None


# --- the other ends -------------------------------------------------------------------------------------------------


def test_complete_keeps_drop_forgets(db: Connection, hands: Hands) -> None:
    """S3-07, S3-28: a completed subject is kept: push is a no-op; a dropped one is forgotten: push creates it."""
    job, _ = push(db, "a")
    assert end(hands, "subject_complete", start_one(hands)) == "completed"
    found = seen(db)
    assert (found["state"], found["iterations"], found["attempts"], found["next_run_at"]) == ("completed", 1, 1, None)
    assert found["last_at"] == found["ended_at"]
    assert push(db, "a") == (job, False)
    job, _ = push(db, "b")
    assert end(hands, "subject_drop", start_one(hands)) == "dropped"
    assert state(db, "b") is None
    again, created = push(db, "b")
    assert created
    assert again != job
    assert seen(db, "b")["iterations"] == 0


def test_a_plain_complete_means_the_same(db: Connection, hands: Hands) -> None:
    """S3-28: complete, with or without a result, called once or twice, ends a subject as subject_complete does."""
    for said, result in (("a", None), ("b", '"x"')):
        push(db, said)
        attempt = start_one(hands)
        for _ in range(2):
            assert hands.say("complete", attempt, *([] if result is None else [result])) is True
        found = seen(db, said)
        assert (found["state"], found["iterations"], found["job_id"]) == ("completed", 1, attempt.id)
        assert found["last_at"] is not None
        assert push(db, said) == (attempt.id, False)
    assert db.execute("select count(*) from tallybook.subject_job where ended_as = 'completed'").fetchone() == (2,)


def test_kill(db: Connection, hands: Hands) -> None:
    """S3-22, S3-28: a killed subject is kept, as a dead letter with the reason killed."""
    job, _ = push(db, "a")
    assert end(hands, "subject_kill", start_one(hands), reason="no such page") == "dead"
    found = seen(db)
    assert (found["state"], found["iterations"], found["last_error"]) == ("killed", 1, "no such page")
    assert db.execute("select job_id, reason from tallybook.dead").fetchall() == [(job, "killed")]
    assert states(db, job) == ["dead"]


def test_reject_until_its_tolerance(db: Connection, hands: Hands) -> None:
    """S3-04, S3-29: a rejected subject is pending again, and dead at its fifth failure; its own limit goes first."""
    job, _ = push(db, "a")
    for failures in range(1, 5):
        assert end(hands, "subject_reject", start_one(hands), message="no", retry_in="0") == "available"
        assert (state(db, "a"), seen(db)["failures"]) == ("pending", failures)
    assert end(hands, "subject_reject", start_one(hands), message="no", retry_in="0") == "dead"
    found = seen(db)
    assert (found["state"], found["failures"], found["attempts"], found["iterations"]) == ("dead", 5, 5, 0)
    push(db, "b", max_attempts=2)
    assert end(hands, "subject_reject", start_one(hands), message="no", retry_in="0", max_attempts=9) == "available"
    assert end(hands, "subject_reject", start_one(hands), message="no", retry_in="0", max_attempts=9) == "dead"
    push(db, "c")
    assert end(hands, "subject_reject", start_one(hands), message="no", max_attempts=1) == "dead"
    assert states(db, job) == ["dead"]


def test_the_tolerance_counts_anew_with_each_iteration(db: Connection, hands: Hands) -> None:
    """S3-04, S3-07: only failures in a row count: a reschedule resets failures and crashes."""
    push(db, "a", max_attempts=2)
    for _ in range(4):
        end(hands, "subject_reject", start_one(hands), message="no", retry_in="0")
        attempt = start_one(hands)
        call(db, "crash", lease=attempt.lease, job_id=attempt.id, attempt=attempt.attempt, error={"message": "boom"})
        assert end(hands, "subject_reschedule", start_one(hands, "1 h"), run_in="0") == "available"
    assert (seen(db)["iterations"], seen(db)["failures"]) == (4, 0)


def test_an_unhandled_error_is_a_reject(db: Connection, hands: Hands) -> None:
    """S3-40: a plain fail of a subject's job has the effect of a reject: backoff, then dead."""
    push(db, "a", max_attempts=2)
    assert hands.fail(start_one(hands), "1 h") == "scheduled"
    assert (state(db, "a"), seen(db)["failures"], seen(db)["last_error"]) == ("planned", 1, "no luck")
    assert hands.fail(start_one(hands, "2 h")) == "dead"
    assert state(db, "a") == "dead"


@pytest.mark.parametrize(("verb", "more"), ENDS)
def test_the_fence(db: Connection, hands: Hands, verb: str, more: dict[str, Any]) -> None:
    """S3-05: an end by the wrong lease or attempt, after a rescue or repeated is refused, and changes nothing."""

    def _rest(job: Job) -> tuple[Any, ...]:
        return (job.id, job.attempt, job.args, job.blocked_by, job.order_key)

    push(db, "a", args={"n": 1})
    attempt = start_one(hands)
    assert end(hands, verb, Job(uuid4(), *_rest(attempt)), **more) == "refused"
    assert (
        end(hands, verb, Job(attempt.lease, attempt.id, attempt.attempt + 1, *_rest(attempt)[2:]), **more) == "refused"
    )
    hands.rescued()
    before = seen(db)
    assert before["state"] == "pending"
    assert end(hands, verb, attempt, **more) == "refused"
    assert seen(db) == before
    second = Hands(db)
    attempt = start_one(second)
    assert end(second, verb, attempt, **more) != "refused"
    assert end(second, verb, attempt, **more) == "refused"


@pytest.mark.parametrize(("verb", "more"), ENDS[:4])
def test_ordinary_jobs_have_other_ends(db: Connection, hands: Hands, verb: str, more: dict[str, Any]) -> None:
    """TB005: an ordinary job is no subject; its attempt stays open."""
    call(db, "enqueue", queue="q", task="t", unique_key="a")
    attempt = start_one(hands)
    with pytest.raises(psycopg.Error) as caught:
        end(hands, verb, attempt, **more)
    assert caught.value.sqlstate == "TB005"
    hands.complete(attempt)


# --- dead processes and maintenance ---------------------------------------------------------------------------------


def test_a_dead_process_gives_its_subject_back(db: Connection) -> None:
    """S3-05, S3-06: a lease holds until its worker is silent for that long; only then is the subject eligible again."""
    first = Hands(db)
    push(db, "a")
    attempt = start_one(first)
    lost = "select lost from tallybook.rescue(at => %s)"
    heard = first.one("select seen_at from tallybook.worker where id = %s", first.worker)
    for seconds in (20, 29):
        assert first.one(lost, heard + timedelta(seconds=seconds)) == 0
        assert state(db, "a") == "active"
    assert first.one(lost, heard + timedelta(seconds=31)) == 1
    assert (state(db, "a"), seen(db)["failures"], seen(db)["attempts"]) == ("pending", 0, 1)
    again = start_one(Hands(db))
    assert (again.id, again.attempt, seen(db)["attempts"]) == (attempt.id, attempt.attempt + 1, 2)


def test_rejects_are_spaced_in_time(db: Connection, hands: Hands) -> None:
    """S3-29: after a failure the next attempt comes later: by the given delay, or by the default backoff."""
    push(db, "a")
    end(hands, "subject_reject", start_one(hands), message="no", retry_in="5 min")
    assert promote(db, "4 min") == 0
    attempt = start_one(hands, "6 min")
    assert end(hands, "subject_reject", attempt, message="no") == "scheduled"
    assert state(db, "a") == "planned"


def test_maintenance(db: Connection) -> None:
    """S3-31: make_pending is promote, with a limit and a count; reschedule_orphans and mark_dead are rescue."""
    hands = Hands(db)
    for n in range(5):
        push(db, f"planned {n}", run_at=clock(db, "1 h"))
    in_2_h = clock(db, "2 h")
    assert [call(db, "promote", max_jobs=2, at=in_2_h)[0][0] for _ in range(4)] == [2, 2, 1, 0]
    assert {state(db, f"planned {n}") for n in range(5)} == {"pending"}
    for crash in range(3):
        hands = Hands(db)
        jobs = hands.start(1 if crash else 5)
        hands.rescued()
        expected = "dead" if crash == 2 else "pending"
        assert state(db, "planned 0") == expected, crash
        if crash == 0:  # only the first is left, so that the crash is its fault
            for name in [f"planned {n}" for n in range(1, 5)]:
                call(db, "subject_forget", task="t", subject=name)
        assert jobs
    assert upsert(db, "planned 0")[1] == "dead"
    assert db.execute("select reason from tallybook.dead").fetchall() == [("crashed",)]
    found = seen(db, "planned 0")
    assert (found["failures"], found["attempts"]) == (0, 3)


def test_attempts_that_never_started_are_none(db: Connection, hands: Hands) -> None:
    """A subject's attempts are those that have started, without one that was set aside for another worker."""
    push(db, "a")
    end(hands, "subject_reschedule", start_one(hands), run_in="0")
    (job,) = hands.claim()
    hands.say("move", job)
    assert (state(db, "a"), seen(db)["attempts"]) == ("pending", 0)
    row = db.execute("select tallybook.worker_start('w', '{q}', '{t}')").fetchone()
    assert row is not None
    hands.worker = row[0]
    start_one(hands)
    assert (state(db, "a"), seen(db)["attempts"]) == ("active", 1)


# --- versions -------------------------------------------------------------------------------------------------------


def test_versions_side_by_side(db: Connection) -> None:
    """S3-39: workers of several versions run side by side, each takes what it knows, and one upgrades subjects."""
    push(db, "old", args={"n": 1})
    push(db, "new", args={"number": 2}, options={"version": 2})
    old_worker, new_worker = Hands(db), Hands(db)
    catalogue = '[{"name": "t", "app": "x", "version": 2}]'
    new_worker.worker = new_worker.one("select tallybook.worker_start('new', '{q}', '{t}', catalogue => %s)", catalogue)
    for job in old_worker.start():  # it sets aside what it does not know, with no failure
        if job.args == {"number": 2}:
            assert old_worker.say("move", job) == "moved"
        else:
            end(old_worker, "subject_reschedule", job, run_in="0")
    (moved, other) = sorted([job for _ in range(2) for job in new_worker.start()], key=lambda job: "n" in job.args)
    assert (moved.args, other.args) == ({"number": 2}, {"n": 1})
    end(new_worker, "subject_reschedule", other, run_in="0", args={"number": 1}, version=2)
    end(new_worker, "subject_complete", moved)
    row = db.execute("select args, options -> 'version' from tallybook.job where id = %s", (other.id,)).fetchone()
    assert row == ({"number": 1}, 2)
    assert seen(db, "old")["iterations"] == 2


def test_moving_house_takes_subjects_along(db: Connection, hands: Hands) -> None:
    """A planned, pending or active subject continues under its name when the database moves to another cluster."""
    for name in ("active", "planned", "pending"):
        push(db, name, **({"run_at": clock(db, "1 h")} if name == "planned" else {}))
        if name == "active":
            start_one(hands)
    db.execute("update tallybook.installation set system_identifier = 1")
    db.execute("select tallybook.rebase()")
    assert [state(db, name) for name in ("active", "planned", "pending")] == ["pending", "planned", "pending"]
    assert not any(push(db, name)[1] for name in ("active", "planned", "pending"))
    promote(db, "2 h")
    there = Hands(db)
    for job in there.start():
        end(there, "subject_reschedule", job, run_in="1 h")
    assert {seen(db, name)["iterations"] for name in ("active", "planned", "pending")} == {1}
