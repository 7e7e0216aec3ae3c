"""Subjects in queues with own names: the same name of one task exists in two queues at once."""

from typing import Any

import psycopg
import pytest

from support.database import Connection, call, one
from support.hands import Hands, Job
from support.subjects import clock, end, many, promote, push


@pytest.fixture
def hands(db: Connection) -> Hands:
    """A worker of the queues eu and us, which have names of their own, and q and r, which share theirs."""
    for queue in ("eu", "us"):
        assert one(db, "select tallybook.queue_set(%s, own_names => true)", queue) == "created"
    return Hands(db, "eu", "us", "q", "r")


def start(hands: Hands) -> list[Job]:
    """Return all jobs that may run, of all queues, by the number in their args."""
    jobs = list[Job]()
    while more := hands.start():
        jobs += more
    return sorted(jobs, key=lambda job: job.args.get("n", 0))


def seen(db: Connection) -> list[tuple[Any, ...]]:
    """Scope, queue, state and args' n of each subject named a."""
    return db.execute(
        "select scope, queue, state, (args ->> 'n')::int from tallybook.subject where subject = 'a' order by scope"
    ).fetchall()


def refused(db: Connection, verb: str, **given: Any) -> str:
    """The message and the hint of a TB005."""
    with pytest.raises(psycopg.Error) as caught:
        call(db, verb, **given)
    assert caught.value.sqlstate == "TB005"
    return f"{caught.value.diag.message_primary} {caught.value.diag.message_hint}"


def test_one_name_lives_in_several_queues(db: Connection, hands: Hands) -> None:
    """S3-02: a queue with own names has its own subject of a name, others share one; a second push is a no-op."""
    made = {queue: push(db, "a", queue=queue, args={"n": n}) for n, queue in enumerate(("eu", "us", "q"))}
    assert [created for _, created in made.values()] == [True] * 3
    assert {queue: push(db, "a", queue=queue, args={"n": 9}) for queue in made} == {
        q: (job, False) for q, (job, _) in made.items()
    }
    assert push(db, "a", queue="r") == (made["q"][0], False)
    assert seen(db) == [("", "q", "pending", 2), ("eu", "eu", "pending", 0), ("us", "us", "pending", 1)]
    report = many(db, "subject_upsert_many", ["a", "b"], queue="us", args=['{"n": 5}'] * 2)
    assert [(job, said) for _, job, said, *_ in report] == [(made["us"][0], "updated"), (report[1][1], "created")]
    assert sorted((job.id, job.args["n"]) for job in start(hands)) == sorted(
        [(made["eu"][0], 0), (made["us"][0], 5), (made["q"][0], 2), (report[1][1], 5)]
    )


def test_each_ends_and_lives_on_alone(db: Connection, hands: Hands) -> None:
    """The end of a subject is recorded for it alone; an upsert revives it, with its iterations, in its queue."""
    for n, queue in enumerate(("eu", "us", "q")):
        push(db, "a", queue=queue, args={"n": n})
    eu, us, q = start(hands)
    end(hands, "subject_complete", us)
    end(hands, "subject_kill", q)
    end(hands, "subject_reschedule", eu, run_in="1 h")
    assert seen(db) == [("", "q", "killed", 2), ("eu", "eu", "planned", 0), ("us", "us", "completed", 1)]
    ((job, said, *_),) = call(db, "subject_upsert", queue="us", task="t", subject="a", args={"n": 7})
    assert (said, job not in (eu.id, us.id, q.id)) == ("updated", True)
    (again,) = start(hands)
    end(hands, "subject_reschedule", again, run_in="1 h")
    iterations = "select scope, iterations from tallybook.subject where subject = 'a' order by scope"
    assert db.execute(iterations).fetchall() == [("", 1), ("eu", 1), ("us", 2)]
    assert promote(db, "2 h") == 2
    assert {(job.id, job.args["n"]) for job in start(hands)} == {(eu.id, 0), (again.id, 7)}


def test_a_retry_gives_back_the_name_of_its_queue(db: Connection, hands: Hands) -> None:
    """A retry of a forgotten dead subject takes back its own name, and leaves the same name elsewhere alone."""
    shared, _ = push(db, "a", queue="q")
    (job,) = start(hands)
    end(hands, "subject_kill", job)
    dead, _ = push(db, "a", queue="eu")
    (attempt,) = start(hands)
    end(hands, "subject_kill", attempt)
    assert call(db, "subject_forget", task="t", subject="a", queue="eu") == [("forgotten",)]
    assert call(db, "retry", job_id=dead) == [(2,)]
    assert seen(db) == [("", "q", "killed", None), ("eu", "eu", "pending", None)]
    assert push(db, "a", queue="eu") == (dead, False)
    assert push(db, "a", queue="q") == (shared, False)


def test_a_name_without_its_queue(db: Connection, hands: Hands) -> None:
    """Without its queue, an ambiguous name raises an error with the queues and changes nothing; with it, all works."""
    at = clock(db, "1 h")
    for queue in ("eu", "us", "q"):
        push(db, "a", queue=queue, run_at=at)
    push(db, "only", queue="eu", run_at=at)
    for verb, more in (("subject_forget", {}), ("subject_move", {"run_at": at})):
        said = refused(db, verb, task="t", subject="a", **more)
        assert 'several queues have a subject "a" of the task "t": those that share names, "eu", "us"' in said
        assert "Name the queue." in said
    assert call(db, "subject_move", task="t", subject="a", run_at=clock(db), queue="us") == [("moved",)]
    assert call(db, "subject_forget", task="t", subject="a", queue="eu") == [("forgotten",)]
    assert call(db, "subject_forget", task="t", subject="a", queue="eu") == [("unknown",)]
    assert call(db, "subject_forget", task="t", subject="only") == [("forgotten",)]
    assert call(db, "subject_forget", task="t", subject="a", queue="r") == [
        ("forgotten",)
    ]  # the name that q and r share
    promote(db)
    assert seen(db) == [("us", "us", "pending", None)]


@pytest.mark.parametrize("states", [None, ["completed"]])
def test_pages_pass_over_none_of_one_name(db: Connection, hands: Hands, states: list[str] | None) -> None:
    """Pages of one return each subject of one name once, even if all ended at the same moment."""
    for queue in ("eu", "us", "q"):
        push(db, "a", queue=queue)
    at = clock(db)
    for job in start(hands):
        end(hands, "subject_complete", job, at=at)
    jobs, after = list[int](), None
    while True:
        rows = call(db, "subjects", task="t", states=states, max_subjects=1, after=after)
        jobs += [row[2] for row in rows if row[1] is not None]
        if not rows or rows[-1][1] is not None:
            break
        after = rows[-1][-1]
    assert sorted(jobs) == sorted(row[0] for row in db.execute("select job_id from tallybook.subject").fetchall())


def test_a_truncate_forgets_the_names_of_its_queue(db: Connection, hands: Hands) -> None:
    """A truncate forgets the completed subjects of its queue, batch by batch; the same name elsewhere stays."""
    for queue in ("eu", "us", "q"):
        push(db, "a", queue=queue)
    at = clock(db)
    for job in start(hands):
        end(hands, "subject_complete", job, at=at)
    mark, remain = None, True
    while remain:
        ((mark, remain),) = db.execute(
            "select mark, remain from tallybook.queue_truncate('us', max_jobs => 1, mark => %s)",
            [psycopg.types.json.Jsonb(mark) if mark else None],
        ).fetchall()
    assert [scope for scope, *_ in seen(db)] == ["", "eu"]


def test_names_are_settled_before_the_first_job(db: Connection, hands: Hands) -> None:
    """own_names of a queue that has had jobs cannot change; passing the present value or null changes nothing."""
    push(db, "a", queue="eu")
    push(db, "a", queue="q")
    for queue, wanted in (("eu", False), ("q", True)):
        said = refused(db, "queue_set", queue=queue, own_names=wanted, max_attempts=3)
        assert f'queue "{queue}" has had jobs' in said
    assert one(db, "select tallybook.queue_set('eu', own_names => true)") == "unchanged"
    assert one(db, "select tallybook.queue_set('eu', max_attempts => 3)") == "changed"
    assert one(db, "select tallybook.queue_set('us', own_names => false)") == "changed"
    found = db.execute("select name, own_names, max_attempts from tallybook.queue order by name").fetchall()
    assert found == [("eu", True, 3), ("q", False, None), ("r", False, None), ("us", False, None)]


def test_a_dropped_queue_is_settled_anew(db: Connection, hands: Hands) -> None:
    """After its drop a queue can get own names; its next job fixes the setting again."""
    push(db, "a", queue="q")
    (job,) = start(hands)
    end(hands, "subject_drop", job)
    call(db, "worker_stop", worker=hands.worker)
    assert one(db, "select tallybook.queue_drop('q')") is True
    assert one(db, "select tallybook.queue_set('q', own_names => true)") == "created"
    push(db, "a", queue="q")
    assert seen(db) == [("q", "q", "pending", None)]
    assert 'queue "q" has had jobs' in refused(db, "queue_set", queue="q", own_names=False)
