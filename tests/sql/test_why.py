"""why: each reason why a job does not run, created for real, then removed, with the answer after each step."""

import random
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from support.database import Connect, Connection, one
from support.hands import Hands, Job, put, put_many
from support.subjects import push


def why(db: Connection, job: int, at: str = "clock_timestamp()") -> list[tuple[str | None, str, dict[str, Any]]]:
    """Return state, code and details; check that each explanation is a sentence."""
    query = f"select state, reason, explanation, details from tallybook.why(%s, at => {at})"  # noqa: S608
    rows = db.execute(query, (job,)).fetchall()  # type: ignore[arg-type]
    assert rows and all(row[2].endswith(".") and "%s" not in row[2] for row in rows)
    assert len({row[0] for row in rows}) == 1
    states = db.execute("select state from tallybook.job where id = %s", (job,)).fetchall()
    assert not states or states[0][0] == rows[0][0], "the state is the view's"
    return [(row[0], row[1], row[3]) for row in rows]


def codes(db: Connection, job: int, at: str = "clock_timestamp()") -> list[str]:
    return [code for _, code, _ in why(db, job, at)]


def test_a_job_that_nothing_holds_should_start(db: Connection, hands: Hands) -> None:
    """Issue 6, 4: with a worker and nothing before it a job should start; claimed, it shows its worker and start."""
    job = put(db)
    assert why(db, job) == [("available", "should_start", {})]
    (claimed,) = hands.start()
    ((state, code, details),) = why(db, job)
    assert (state, code) == ("running", "running")
    assert (details["worker"], details["worker_id"], details["attempt"]) == ("hands", hands.worker, 1)
    assert datetime.fromisoformat(details["since"]) == one(
        db, "select started_at from tallybook.job where id = %s", job
    )
    hands.complete(claimed)
    assert codes(db, job) == ["completed"]


def test_no_such_job(db: Connection) -> None:
    """An id that no job has is unknown and has no state."""
    assert why(db, 4711) == [(None, "unknown", {})]


def test_uncommitted_is_unknown_to_others(db: Connection, connect: Connect, hands: Hands) -> None:
    """A job is uncommitted inside its own transaction, and unknown outside until that commits."""
    other = connect(autocommit=False)
    job = put(other)
    assert codes(other, job) == ["uncommitted"]
    assert codes(db, job) == ["unknown"]
    other.commit()
    assert codes(db, job) == ["should_start"]


def test_not_due(db: Connection, hands: Hands) -> None:
    """A scheduled job is not_due with its time; once due, promote is pending; once promoted, it should start."""
    job = put(db, run_at=datetime.fromisoformat("2040-01-01T00:00:00+00:00"))
    ((state, code, details),) = why(db, job)
    assert (state, code, details) == ("scheduled", "not_due", {"until": "2040-01-01T00:00:00+00:00"})
    later = "'2040-01-01 00:00:01+00'"
    db.execute("update tallybook.worker set seen_at = 'infinity'")
    assert codes(db, job, later) == ["service_pending"]
    db.execute(f"select tallybook.promote(at => {later})")  # type: ignore[arg-type]
    assert codes(db, job, later) == ["should_start"]


def test_retrying(db: Connection, hands: Hands) -> None:
    """A job in backoff shows its failures and its last error; a snooze is no failure."""
    job, snoozed = put(db), put(db)
    first, second = hands.start()
    hands.fail(first, "1 hour")
    hands.say("snooze", second, timedelta(hours=1))
    ((state, code, details),) = why(db, job)
    assert (state, code, details["failures"], details["error"]["message"]) == ("retrying", "retrying", 1, "no luck")
    ((state, code, details),) = why(db, snoozed)
    assert (state, code, details["after"]) == ("scheduled", "not_due", "snoozed")


def test_a_paused_queue_and_a_missing_worker(db: Connection) -> None:
    """Several reasons hold at once: who paused the queue and when, and no worker; each is removed by itself."""
    job = put(db)
    assert codes(db, job) == ["no_worker"]
    db.execute("select tallybook.pause('q', 'ann', '2026-01-01 00:00+00')")
    (first, second) = why(db, job)
    assert first[1:] == ("queue_paused", {"queue": "q", "since": "2026-01-01T00:00:00+00:00", "by": "ann"})
    assert second[1:] == ("no_worker", {"queue": "q"})
    hands = Hands(db)
    assert codes(db, job) == ["queue_paused"]
    db.execute("select tallybook.resume('q')")
    assert codes(db, job) == ["should_start"]
    db.execute("update tallybook.worker set seen_at = now() - interval '1 h' where id = %s", (hands.worker,))
    ((_, code, details),) = why(db, job)
    assert (code, details["silent"]) == ("no_worker", 1)


def test_nobody_knows_its_task(db: Connection) -> None:
    """No live worker of the queue has the task, before and after a worker has set the job aside for one that has."""
    old = one(db, "select tallybook.worker_start('old', '{q}', '{other}')")
    job = put(db)
    assert why(db, job) == [("available", "unknown_task", {"queue": "q", "task": "t"})]
    hands = Hands(db)
    hands.worker = old
    hands.say("move", hands.claim()[0])
    db.execute("update tallybook.worker set ended_at = now() where id <> %s", (old,))
    assert why(db, job) == [("available", "unknown_task", {"queue": "q", "task": "t", "aside": True})]
    db.execute("select tallybook.worker_start('new', '{q}', '{t}')")
    assert codes(db, job) == ["should_start"]


def test_nobody_knows_the_version_of_its_args(db: Connection) -> None:
    """No live worker knows the version of the job's args, until one of the newer release starts."""
    catalogue = '[{{"name": "t", "app": "shop", "version": {}}}]'
    db.execute("select tallybook.worker_start('v1', '{q}', '{t}', catalogue => %s)", (catalogue.format(1),))
    job = put(db, options={"version": 2})
    assert why(db, job) == [("available", "unknown_version", {"queue": "q", "task": "t", "version": 2})]
    db.execute("select tallybook.worker_start('v2', '{q}', '{t}', catalogue => %s)", (catalogue.format(2),))
    assert codes(db, job) == ["should_start"]


def test_behind_others(db: Connection, hands: Hands) -> None:
    """behind counts exactly the jobs before it in its lane and in lanes of lower numbers; each claim lowers it."""
    jobs = [put(db) for _ in range(5)]
    put(db, priority=1)
    assert why(db, jobs[3]) == [("available", "behind", {"before": 3, "of_lower_priority": 1, "priority": 2})]
    assert [job.id for job in hands.claim(1)] != jobs[:1], "the lower number goes first"
    assert why(db, jobs[3]) == [("available", "behind", {"before": 3, "of_lower_priority": 0, "priority": 2})]
    hands.claim(2)
    assert [details["before"] for _, _, details in why(db, jobs[4])] == [2]
    hands.claim(1)
    assert codes(db, jobs[3]) == ["should_start"]


def test_the_count_of_others_has_a_bound(db: Connection, hands: Hands) -> None:
    """Behind 12,000 jobs, why reports at least 10,000 and that there are more."""
    put_many(db, 12_000)
    job = put(db)
    ((_, code, details),) = why(db, job)
    assert (code, details["before"], details["more"]) == ("behind", 10_000, True)
    text = one(db, "select explanation from tallybook.why(%s)", job)
    assert text == "It is behind at least 10,000 others in its lane."


def test_a_late_commit(db: Connection, connect: Connect, hands: Hands) -> None:
    """A job that committed after its lane moved on is late_commit, with the jobs before it, and comes next but one."""
    late = connect(autocommit=False)
    before = put(db)  # creates the lane; a transaction that does not see it would create its own
    assert [j.id for j in hands.claim(1)] == [before]
    job = put(late)
    first, second = put(db), put(db)
    assert [j.id for j in hands.claim(1)] == [first]
    late.commit()
    ((_, code, details),) = why(db, job)
    assert (code, details["before"]) == ("late_commit", 1)
    newest = put(db)
    assert why(db, newest)[0][2]["before"] == 2
    assert [j.id for j in hands.claim(1)] == [second]
    assert [j.id for j in hands.claim(1)] == [job]
    assert codes(db, newest) == ["should_start"]


def test_cancelled_and_not_carried_out(db: Connection, hands: Hands) -> None:
    """A cancel that no claim has met is pending, then the job is cancelled; a running job is cancelling."""
    job, running = put(db, priority=3), put(db)
    (claimed,) = hands.start(1)
    db.execute("select tallybook.cancel(%s, 'changed my mind')", (job,))
    ((state, code, details),) = why(db, job)
    assert (state, code, details["reason"]) == ("cancelled", "cancel_pending", "changed my mind")
    db.execute("select tallybook.cancel(%s)", (running,))
    assert codes(db, running) == ["running", "cancelling"]
    hands.say("cancel_running", claimed)
    hands.claim()
    assert codes(db, running) == ["cancelled"]
    ((state, code, details),) = why(db, job)
    assert (state, code, details["reason"]) == ("cancelled", "cancelled", "changed my mind")


def test_a_silent_worker(db: Connection, hands: Hands) -> None:
    """A job on a worker that has stopped its heartbeat is worker_silent; rescued, it should start on another worker."""
    job = put(db)
    hands.start()
    assert codes(db, job) == ["running"]
    assert codes(db, job, "clock_timestamp() + interval '1 h'") == ["running", "worker_silent"]
    hands.rescued()
    assert codes(db, job) == ["no_worker"]
    Hands(db)
    assert codes(db, job) == ["should_start"]


def test_dead_and_dropped(db: Connection, hands: Hands) -> None:
    """A dead letter shows its reason and its error; a retry by a person puts it back; a dropped one stays dropped."""
    job = put(db)
    hands.fail(hands.start()[0], final=True)
    ((state, code, details),) = why(db, job)
    assert (state, code, details["reason"], details["error"]["message"]) == ("dead", "dead", "failed", "no luck")
    db.execute("select tallybook.retry(%s)", (job,))
    assert codes(db, job) == ["should_start"]
    hands.fail(hands.start()[0], final=True)
    db.execute("select tallybook.drop_dead(%s)", (job,))
    assert codes(db, job) == ["dropped"]
    with pytest.raises(psycopg.Error) as refused:
        db.execute("select tallybook.retry(%s)", (job,))
    assert refused.value.diag.message_detail == "Its dead letter was dropped."


def test_past_its_expiry(db: Connection, hands: Hands) -> None:
    """A job that is past its expires_at is expired, because no attempt of it starts."""
    job = put(db, expires_at=datetime.fromisoformat("2040-01-01T00:00:00+00:00"))
    db.execute("update tallybook.worker set seen_at = 'infinity'")
    assert codes(db, job) == ["should_start"]
    assert codes(db, job, "'2040-01-01 00:00+00'") == ["expired"]


def test_waits_for_its_parents(db: Connection, hands: Hands) -> None:
    """A child lists its open parents; once they end, parents_resolve is pending; once resolved, it should start."""
    one_, two = put(db), put(db)
    child = one(db, "select tallybook.enqueue_after('q', 't', after => %s)", [one_, two])
    first, second = hands.start()
    assert why(db, child) == [("waiting", "parents", {"open": 2, "jobs": [one_, two]})]
    hands.complete(first)
    db.execute("select tallybook.parents_resolve()")
    assert why(db, child) == [("waiting", "parents", {"open": 1, "jobs": [two]})]
    hands.complete(second)
    ((_, code, details),) = why(db, child)
    assert (code, details["service"]) == ("service_pending", "parents_resolve")
    db.execute("select tallybook.parents_resolve()")
    assert codes(db, child) == ["should_start"]


def test_its_order_key(db: Connection, hands: Hands) -> None:
    """In its lane or set aside, a job names the first job of its order key; once that completes, the next is behind."""
    first, second, third = (put(db, order_key="k") for _ in range(3))
    (running,) = hands.start()
    assert running.id == first
    assert why(db, second) == [("waiting", "order_key", {"key": "k", "job": first, "before": 0})]
    assert why(db, third) == [("waiting", "order_key", {"key": "k", "job": first, "before": 1})]
    late = put(db, order_key="k")
    assert why(db, late) == [("available", "order_key", {"key": "k", "job": first, "before": 2})]
    hands.complete(running)
    assert codes(db, second) == ["behind"], "back in line, behind the late one, which is to be put aside"


def ask(hands: Hands) -> list[Job]:
    """Claim everything and ask the limits; return the jobs that start."""
    jobs = hands.claim()
    query = "select job_id from tallybook.limit_take(%s, %s, %s) where starts_in is not null"
    params = ([job.lease for job in jobs], [job.id for job in jobs], [job.attempt for job in jobs])
    started = {row[0] for row in hands.db.execute(query, params)}
    return [job for job in jobs if job.id in started]


def test_a_rate_limit(db: Connection, hands: Hands) -> None:
    """rate_limit names the key and the jobs before; a job that is still in its lane shows it in advance."""
    db.execute("select tallybook.rate_limit_set('acme', 1, '1 h')")
    jobs = [put(db, options={"limits": ["acme"]}) for _ in range(3)]
    assert [job.id for job in ask(hands)] == jobs[:1]
    ((state, code, details),) = why(db, jobs[2])
    assert (state, code, details["key"], details["rule"], details["calls"], details["before"]) == (
        "scheduled", "rate_limit", "acme", "acme", 1, 1,
    )  # fmt: skip
    later = put(db, options={"limits": ["acme"]})
    assert [(code, details["key"]) for _, code, details in why(db, later)] == [("rate_limit", "acme")]
    db.execute("select tallybook.rate_limit_drop('acme')")
    assert codes(db, later) == ["unknown_limit"]


def test_a_concurrency_limit(db: Connection, hands: Hands) -> None:
    """concurrency_limit names the key, its holders and the jobs before; a free permit needs concurrency_release."""
    db.execute("select tallybook.concurrency_limit_set('acme', 1)")
    jobs = [put(db, options={"limits": ["acme"]}) for _ in range(3)]
    (holder,) = ask(hands)
    assert holder.id == jobs[0]
    assert why(db, jobs[2]) == [
        ("waiting", "concurrency_limit", {"key": "acme", "most": 1, "held": 1, "jobs": jobs[:1], "before": 1})
    ]
    hands.complete(holder)
    ((_, code, details),) = why(db, jobs[1])
    assert (code, details["service"]) == ("service_pending", "concurrency_release")
    db.execute("select tallybook.concurrency_release()")
    assert codes(db, jobs[1]) == ["should_start"]
    assert [(code, d.get("jobs")) for _, code, d in why(db, jobs[2])] == [("concurrency_limit", [jobs[1]])]


def test_a_breaker(db: Connection, hands: Hands) -> None:
    """An open breaker holds a job; half-open, it names the probe; once it is closed, the job should start."""
    db.execute("select tallybook.breaker_set('acme', 3, '1 min', '1 h')")
    db.execute("select tallybook.breaker_open('acme', '1 h')")
    jobs = [put(db, options={"limits": ["acme"]}) for _ in range(2)]
    assert [code for _, code, _ in why(db, jobs[0])] == ["breaker"], "told before it is claimed"
    assert ask(hands) == []
    ((state, code, details),) = why(db, jobs[0])
    assert (state, code, details["state"]) == ("waiting", "breaker", "open")
    db.execute("select tallybook.breaker_open('acme', '0')")
    db.execute("select tallybook.concurrency_release()")
    assert [job.id for job in ask(hands)] == jobs[:1]
    ((_, code, details),) = why(db, jobs[1])
    assert (code, details["state"], details["job"]) == ("breaker", "half-open", jobs[0])
    db.execute("select tallybook.breaker_close('acme')")
    db.execute("select tallybook.concurrency_release()")
    assert codes(db, jobs[1]) == ["should_start"]


def test_its_turn_among_the_keys(db: Connection, hands: Hands) -> None:
    """A job with a fair key shows how many of the key are before it and how many in line; released, it should start."""
    jobs = [put(db, options={"fair_key": "a"}) for _ in range(3)]
    ((state, code, details),) = why(db, jobs[2])
    assert (state, code, details) == ("waiting", "fair_key", {"key": "a", "before": 2, "in_line": 0})
    assert codes(db, jobs[0]) == ["fair_key", "service_pending"]
    db.execute("select tallybook.fair_release()")
    assert codes(db, jobs[0]) == ["should_start"]


@pytest.mark.direct("the producer's lock is looked at from another session")
def test_a_producer_holds_it(db: Connection, connect: Connect, hands: Hands) -> None:
    """While an open transaction changes a job with a unique key, the job is busy and does not start."""
    job = put(db, unique_key="u")
    assert codes(db, job) == ["should_start"]
    other = connect(autocommit=False)
    put(other, unique_key="u", on_conflict="replace_args", args={"n": 2})
    assert codes(db, job) == ["busy"]
    other.commit()
    assert codes(db, job) == ["should_start"]
    put(db, unique_key="u", on_conflict="push_run_at", run_at=datetime.fromisoformat("2040-01-01T00:00:00+00:00"))
    assert why(db, job) == [("available", "postponed", {"until": "2040-01-01T00:00:00+00:00"})]


def test_another_cluster(db: Connection, hands: Hands) -> None:
    """In a database from another cluster a job is not_rebased, until rebase has run."""
    job = put(db)
    db.execute("update tallybook.installation set system_identifier = 1")
    assert codes(db, job) == ["not_rebased"]
    db.execute("select tallybook.rebase()")
    assert codes(db, job) == ["no_worker"], "the workers of the other cluster are over"


def test_a_subject_whose_history_has_gone(db: Connection, hands: Hands) -> None:
    """A subject's job with no history left is history_gone, with the subject's name."""
    job, _ = push(db, "s")
    (claimed,) = hands.start()
    db.execute("select tallybook.subject_complete(%s, %s, %s)", (claimed.lease, claimed.id, claimed.attempt))
    assert codes(db, job) == ["completed"]
    db.execute("delete from tallybook.entry")
    assert [(code, d["subject"]) for _, code, d in why(db, job)] == [("history_gone", "s")]


def test_why_agrees_with_the_claim(db: Connection, connect: Connect) -> None:
    """In 150 random steps, whenever jobs should start, the next claim returns one of them and nothing else."""
    chance = random.Random(6)
    hands, jobs, held = Hands(db, at="'infinity'"), list[int](), list[Any]()  # it sends no heartbeat
    late: list[tuple[Connection, int]] = []
    looked = 0
    for _ in range(150):
        match chance.randrange(9):
            case 0 | 1:
                jobs.append(put(db, priority=chance.choice([1, 2])))
            case 2:
                jobs.append(put(db, run_at=datetime.fromisoformat("2040-01-01T00:00:00+00:00")))
            case 3 if jobs:
                db.execute("select tallybook.cancel(%s)", (chance.choice(jobs),))
            case 4 if len(late) < 3:
                conn = connect(autocommit=False)
                late.append((conn, put(conn)))
            case 5 if late:
                conn, job = late.pop()
                conn.commit()
                jobs.append(job)
            case 6 if held:
                hands.fail(held.pop(), chance.choice(["0", "1 h"]))
            case 7:
                db.execute(chance.choice(["select tallybook.pause('q')", "select tallybook.resume('q')"]))
            case _:
                said = {job: codes(db, job) for job in jobs}
                first = {job for job, found in said.items() if found in (["should_start"], ["late_commit"])}
                got = hands.claim(1)
                held += got
                looked += bool(got)
                assert {job.id for job in got if not job.cancelled} <= first | {
                    job for job, found in said.items() if found == ["behind"]
                }
                starts = {job for job, found in said.items() if found == ["should_start"]}
                if starts:
                    assert {job.id for job in got} <= starts, (said, got)
                    assert got, said
                if not any(found in (["should_start"], ["behind"], ["late_commit"]) for found in said.values()):
                    assert not got, said
    assert looked > 5
