"""Concurrency limits in SQL: running jobs never exceed the limit, however attempts end, and waiting jobs continue."""

import random
from datetime import datetime
from typing import Any, LiteralString, cast

import psycopg
import pytest
from psycopg.types.json import Jsonb

from support.askers import HOUR, MIN, MS, Asker, S, T, permits, put, two_at_once
from support.broken import without
from support.chance import seeds
from support.database import Connection, one
from support.hands import states


def limit(db: Connection, name: str = "customer", most: int = 2) -> str:
    return one(db, "select tallybook.concurrency_limit_set(%s, %s)", name, most)


def test_only_so_many_run_and_the_others_wait(db: Connection) -> None:
    """S1-18: two of five jobs run; three wait, hold no worker and no lane, and show why; another key is not delayed."""
    limit(db)
    jobs, (other,) = put(db, "customer:1", n=5), put(db, "customer:2")
    asker = Asker(db)
    assert asker.look(T) == [*jobs[:2], other]
    assert states(db, *jobs) == ["running"] * 2 + ["waiting"] * 3
    assert (
        one(db, "select reason from tallybook.job where id = %s", jobs[2])
        == 'the permits of the limit "customer:1" are taken'
    )
    assert asker.claim(T) == []
    row = db.execute("select name, rule, most, held, waiting from tallybook.concurrency order by name").fetchall()
    assert row == [
        ("customer", "customer", 2, 0, 0),
        ("customer:1", "customer", 2, 2, 3),
        ("customer:2", "customer", 2, 1, 0),
    ]


def test_who_has_a_permit_starts_when_it_can(db: Connection) -> None:
    """S1-18: a job with a permit may start up to an hour late; one that also has a rate limit may not."""
    limit(db)
    db.execute("select tallybook.rate_limit_set('api', 10, '1 second')")
    (plain,), (paced,) = put(db, "customer:1"), put(db, "customer:2", "api")
    asker = Asker(db)
    assert asker.look(T) == [plain, paced]
    assert asker.late == {plain: HOUR, paced: 20 * MS}


def test_an_end_lets_the_next_go_on(db: Connection) -> None:
    """S1-18: each completion frees one permit for the next job by priority, then arrival; waiting is no attempt."""
    limit(db)
    jobs = put(db, "customer:1", n=4)
    (urgent,) = put(db, "customer:1", priority=1)
    asker = Asker(db)
    assert asker.look(T) == [urgent, jobs[0]]
    order = []
    while asker.held:
        asker.complete(min(asker.held))
        permits(db, "customer:1")
        order += asker.look(T)
    assert order == jobs[1:]
    assert one(db, "select array_agg(distinct (attempts, failures)::text) from tallybook.job") == ["(1,0)"]
    assert one(db, "select count(*) from tallybook.concurrency_line") == 0


@pytest.mark.direct("listens")
@pytest.mark.parametrize("quiet", [False, True])
def test_nobody_is_woken_for_a_queue_that_the_caller_looks_at(db: Connection, connect: Any, quiet: bool) -> None:
    """S1-18: concurrency_release notifies the queue of a released job, unless the caller lists it as quiet."""
    limit(db, most=1)
    (first, _) = put(db, "customer:1", n=2)
    asker = Asker(db)
    asker.look(T)
    asker.complete(first)
    ear = connect()
    ear.execute("listen tallybook")
    assert one(ear, "select clear from tallybook.listen_begin('{q}')")
    query = "select released from tallybook.concurrency_release('{customer:1}', at => %s, quiet => %s)"
    assert one(db, query, T, ["q", "other"] if quiet else ["other"]) == 1
    db.execute("notify tallybook, 'last'")
    words = []
    for word in ear.notifies(timeout=60):
        words.append(word.payload)
        if word.payload == "last":
            break
    assert words == (["last"] if quiet else ["q", "last"])


def test_a_key_that_somebody_has_is_not_waited_for(db: Connection, connect: Any) -> None:
    """S1-18: concurrency_release returns null at once if the key's row is locked, and releases nothing."""
    limit(db, most=1)
    (first, _) = put(db, "customer:1", n=2)
    asker = Asker(db)
    asker.look(T)
    asker.complete(first)
    person = connect(autocommit=False)
    person.execute("select name from tallybook.rate_state for update")
    assert one(db, "select released from tallybook.concurrency_release('{customer:1}', at => %s)", T) is None
    person.rollback()
    assert permits(db, "customer:1") == 1


@pytest.mark.parametrize(
    ("more", "asks"),
    [
        ("select 1", False),
        ("select tallybook.rate_limit_set('customer', 10, '1 s')", True),
        ("select tallybook.breaker_set('customer', 3, '1 min', '1 min')", True),
        ("select tallybook.concurrency_limit_set('queue:q', 5)", True),
        ("delete from tallybook.concurrency_holder", True),
    ],
    ids=["permits alone", "a rate", "a breaker", "a rule for its queue", "its permit was lost"],
)
def test_who_waited_for_a_permit_asks_no_second_time(db: Connection, more: LiteralString, asks: bool) -> None:
    """A job that re-enters its lane with all its permits starts without asking; if anything else limits it, it asks."""
    limit(db, most=1)
    first, second = put(db, "customer:1", n=2)
    asker = Asker(db)
    asker.look(T)
    asker.complete(first)
    permits(db, "customer:1")
    db.execute(more)
    assert [(job, limited) for _, job, _, limited in asker.claim(T)] == [(second, asks)]


def test_a_job_without_limits_asks_for_none(db: Connection) -> None:
    """If no rule covers a whole queue or task, a claim looks up no rules for new jobs, with or without limits."""
    limit(db)
    without(db, "_is_limited", "begin", "begin raise exception 'asked';")
    (plain,), (other,) = put(db), put(db, options=Jsonb({"note": 1}))
    asker = Asker(db)
    assert [(job, limited) for _, job, _, limited in asker.claim(T)] == [(plain, False), (other, False)]
    named = put(db, "customer:1")
    assert [(job, limited) for _, job, _, limited in asker.claim(T)] == [(*named, True)]
    limit(db, "queue:q")
    put(db)
    with pytest.raises(psycopg.Error, match="asked"):
        asker.claim(T)


def test_a_newcomer_goes_behind_those_who_wait(db: Connection) -> None:
    """S1-18: a free permit goes to a waiting job, even if a newer job asks first."""
    limit(db, most=1)
    first, second = put(db, "customer:1", n=2)
    asker = Asker(db)
    asker.look(T)
    asker.complete(first)
    (new,) = put(db, "customer:1")
    assert asker.look(T) == [second], "let go on by who asks"
    assert states(db, new) == ["waiting"]


@pytest.mark.parametrize(
    ("end", "more"),
    [
        ("fail", {"error": {}, "retry_in": S}), ("fail", {"error": {}, "final": True}), ("snooze", {"delay": S}),
        ("cancel_running", {}), ("rescue", {}),
    ],
    ids=["fail", "bury", "snooze", "cancelled", "rescue"],
)  # fmt: skip
def test_whatever_ends_an_attempt_frees_its_place(db: Connection, end: str, more: dict[str, Any]) -> None:
    """S1-18: a failure, a snooze, a cancel and a rescue free the permit; the job asks again at its next attempt."""
    limit(db, most=1)
    first, second = put(db, "customer:1", n=2)
    asker = Asker(db)
    asker.look(T)
    if end == "rescue":
        db.execute("update tallybook.worker set seen_at = '-infinity' where id = %s", (asker.worker,))
        db.execute("select tallybook.rescue(only_worker => %s, at => %s)", (asker.worker, T))
        asker = Asker(db)
    else:
        asker.end(end, first, at=T, **more)
    assert permits(db) == 1, "found by the service"
    assert second in asker.look(T)
    if end in ("snooze", "rescue") or "retry_in" in more:
        asker.complete(second)
        permits(db, at=T + MIN)
        assert asker.look(T + MIN) == [first]


def test_no_place_is_kept_for_a_job_that_waits_for_another_key(db: Connection) -> None:
    """S1-18: a job with two keys takes both permits or none; while one key is full, other jobs use the other key."""
    limit(db, "a", 1)
    limit(db, "b", 1)
    (of_a,), (of_b,) = put(db, "a"), put(db, "b")
    asker = Asker(db)
    assert asker.look(T) == [of_a, of_b]
    (both,) = put(db, "a", "b")
    assert asker.look(T) == []
    asker.complete(of_a)
    assert permits(db, "a") == 0
    (other,) = put(db, "a")
    assert asker.look(T) == [other], "the permit of a was not kept"
    asker.complete(other)
    asker.complete(of_b)
    assert permits(db, "b") == 1
    (late,) = put(db, "a")
    assert asker.look(T) == [both], "with both permits, before a newcomer"
    assert states(db, late) == ["waiting"]
    assert one(db, "select count(*) from tallybook.entry where job_id = %s", both) == 2, "it came into line once more"


@pytest.mark.parametrize(
    ("end", "more"),
    [
        ("fail", {"error": {}, "retry_in": "0"}),
        ("snooze", {"delay": "0"}),
        ("crash", {"error": {}}),
        ("fail", {"error": {}, "final": True}),
    ],
)
def test_the_next_attempt_waits_only_for_what_it_asks_for(db: Connection, end: str, more: dict[str, Any]) -> None:
    """A key that a handler asked for in an attempt that has run keeps no permit of it for the next attempt."""
    limit(db, "a", 1)
    limit(db, "b", 1)
    asker = Asker(db)

    def asks(job: int, name: str, at: datetime = T) -> list[int]:
        lease, attempt = asker.held[job]
        return asker.ask([(lease, job, attempt, True)], at, [name])

    (of_a,), (job,) = put(db, "a"), put(db)
    assert sorted(asker.look(T)) == [of_a, job]
    assert asks(job, "a") == []
    asker.complete(of_a)
    assert permits(db, "a") == 1
    assert asker.look(T) == [job] and asks(job, "a") == [job]
    asker.end(end, job, at=T, **more)
    if "final" in more:
        db.execute("select tallybook.retry(%s, %s)", (job, T))
    of_b, other = *put(db, "b"), *put(db, "a")
    assert sorted(asker.look(T + MIN)) == sorted([of_b, other, job])
    assert asks(job, "b", T + MIN) == []
    asker.complete(of_b)
    assert permits(db, "b", at=T + MIN) == 1, "it does not wait for a"


def test_a_job_that_waits_for_a_permit_and_is_pushed_delays_no_other(db: Connection) -> None:
    """A key with a rate and a concurrency limit: new jobs do not wait for a job that was pushed by hours."""
    limit(db, "api", 1)
    db.execute("select tallybook.rate_limit_set('api', 8, '1 minute')")
    asker, until = Asker(db), T + 6 * HOUR
    (first,), (job,) = put(db, "api"), put(db, "api", unique_key="k", at=T)
    assert asker.look(T) == [first]
    db.execute("select tallybook.promote(at => %s)", (T + 10 * S,))
    assert asker.look(T + 10 * S) == [] and states(db, job) == ["waiting"]
    assert put(db, "api", unique_key="k", on_conflict="push_run_at", run_at=until, at=T + 11 * S) == [job]
    asker.complete(first)
    assert permits(db, "api", at=T + 12 * S) == 0 and states(db, job) == ["scheduled"]
    (new,) = put(db, "api", at=T + 20 * S)
    assert asker.look(T + 20 * S) == [new]


def test_a_raised_priority_counts_for_a_job_that_waits_for_a_permit(db: Connection) -> None:
    """A waiting job that is given a higher priority gets the next permit, before older jobs of lower priority."""
    limit(db, most=1)
    first, _ = put(db, "customer:1", n=2)
    (urgent,) = put(db, "customer:1", unique_key="k")
    asker = Asker(db)
    assert asker.look(T) == [first]
    assert put(db, "customer:1", unique_key="k", on_conflict="raise_priority", priority=0) == [urgent]
    asker.complete(first)
    assert permits(db, "customer:1") == 1
    assert asker.look(T) == [urgent]


def test_a_job_that_was_cancelled_while_it_waited_does_not_wait_for_its_permit_later(db: Connection) -> None:
    """After a cancel, a rescue and a retry, a job that waits for its order key shows that key as the reason."""
    limit(db, most=1)
    asker = Asker(db)
    (first,) = put(db, "customer:1")
    assert asker.look(T) == [first]

    def admitted() -> list[int]:
        claimed = asker.claim(T)
        asked = [[row[n] for row in claimed] for n in range(3)]
        ready = one(db, "select ready from tallybook.order_admit(%s, %s, %s, at => %s)", *asked, T)
        return asker.ask([row for row in claimed if row[1] in ready], T)

    (job,) = put(db, "customer:1", order_key="o")
    assert admitted() == [] and states(db, job) == ["waiting"]
    db.execute("select tallybook.cancel(%s, at => %s)", (job, T))
    db.execute("select tallybook.rescue(at => %s)", (T,))
    assert asker.claim(T) == []
    limit(db, "plenty", 9)
    (later,) = put(db, "plenty", order_key="o")
    assert admitted() == [later]
    db.execute("select tallybook.retry(%s, %s)", (job, T))
    assert admitted() == []
    assert states(db, job, later) == ["waiting", "running"]
    assert one(db, "select reason from tallybook.job where id = %s", job) == (
        'another job with order key "o" is before it'
    )


def test_who_waits_can_be_cancelled(db: Connection) -> None:
    """S1-18: a cancelled job is skipped and ends; it takes no permit."""
    limit(db, most=1)
    jobs = put(db, "customer:1", n=3)
    asker = Asker(db)
    asker.look(T)
    db.execute("select tallybook.cancel(%s)", (jobs[1],))
    asker.complete(jobs[0])
    assert permits(db, "customer:1") == 1
    assert asker.look(T) == [jobs[2]]
    assert states(db, *jobs) == ["completed", "cancelled", "running"]


def test_a_rule_that_changes_or_goes_lets_them_go_on(db: Connection) -> None:
    """S1-18: a higher limit applies at the next release, a lower one stops no job, and without one all continue."""
    limit(db, most=1)
    jobs = put(db, "customer:1", n=6)
    asker = Asker(db)
    asker.look(T)
    assert (limit(db, most=3), limit(db, most=3)) == ("changed", "unchanged")
    assert (permits(db), asker.look(T)) == (2, jobs[1:3])
    limit(db, most=1)
    asker.complete(jobs[0])
    assert (permits(db), asker.look(T)) == (0, [])
    limit(db, "all", 1)  # a name that still has a rule of any kind is not unknown
    assert one(db, "select tallybook.concurrency_limit_drop('customer')") is True
    db.execute("select tallybook.rate_limit_set('customer', 1000, '1 s')")
    assert permits(db) == 3
    assert len(asker.look(T)) == 3


def test_a_limit_that_leaves_the_code_lets_them_go_on(db: Connection) -> None:
    """A limit that the code no longer declares is dropped, its waiting jobs continue, and a person's rule stays."""
    limit(db, "all", 1)
    rules = {"concurrency": [{"name": "customer", "most": 1}, {"name": "all", "most": 9}]}
    db.execute("select tallybook._limits_register('shop', %s)", (Jsonb(rules),))
    first, second = put(db, "customer:1", n=2)
    asker = Asker(db)
    assert asker.look(T) == [first] and states(db, second) == ["waiting"]
    db.execute("select tallybook._limits_register('shop', '{}')")
    assert db.execute("select name, most from tallybook.limit_rule").fetchall() == [("all", 1)]
    assert permits(db) == 1
    db.execute("select tallybook.rate_limit_set('customer', 1000, '1 s')")  # else its name is unknown
    assert asker.look(T) == [second]


def test_a_rate_and_a_place_are_taken_together(db: Connection) -> None:
    """S1-18: a job with a permit but no turn returns the permit; with both it starts; each start counts one call."""
    limit(db, "api", 2)
    db.execute("select tallybook.rate_limit_set('api', 1, '1 s')")
    jobs = put(db, "api", n=4)
    asker = Asker(db)
    assert asker.look(T) == jobs[:1]
    assert one(db, "select held from tallybook.concurrency where name = 'api'") == 1
    at, started = T, [jobs[0]]
    while len(started) < 4:
        at += 200 * MS
        for job in list(asker.held):
            if job in started:
                asker.complete(job)
        permits(db, at=at)
        started += asker.look(at)
        assert at < T + MIN
    assert sorted(started) == jobs
    assert one(db, "select count(*) from tallybook.rate_call") == 4


def test_a_limit_of_a_queue_and_of_a_task(db: Connection) -> None:
    """S1-18: jobs that name no limit are held by the limits of their queue and task."""
    limit(db, "queue:q", 3)
    limit(db, "task:slow", 1)
    slow, fast = put(db, n=2, task="slow"), put(db, n=3)
    asker = Asker(db)
    assert asker.look(T) == [slow[0], *fast[:2]]
    assert states(db, slow[1], fast[2]) == ["waiting", "waiting"]


def test_other_claims_read_no_more_for_those_who_wait(db: Connection) -> None:
    """S1-18: a thousand waiting jobs cost the claims of their queue nothing: no claim reads their rows."""
    returned = (
        "select sum(pg_stat_get_xact_tuples_returned(oid)) from pg_class"
        " where relnamespace = 'tallybook'::regnamespace and relkind in ('r', 'i')"
    )

    def rows() -> int:
        """Return the fewest rows that a claim of one other job reads in five runs; its effects are rolled back."""
        found = []
        with db.transaction(force_rollback=True):
            db.execute("select tallybook.enqueue('q', 't', priority => 1)")
            for _ in range(5):
                before = one(db, returned)
                db.execute("select tallybook.claim(%s, '{q}', '{1}', gen_random_uuid())", [asker.worker])
                found.append(one(db, returned) - before)
        return int(min(found))

    limit(db, most=1)
    asker = Asker(db)
    put(db, "customer:1")
    asker.look(T)
    alone = rows()
    put(db, "customer:1", n=1000)
    asker.look(T)
    assert one(db, "select waiting from tallybook.concurrency where name = 'customer:1'") == 1000
    assert rows() < alone + 100


@pytest.mark.parametrize("seed", seeds(8))
def test_never_more_than_the_limit_whatever_happens(db: Connection, seed: int) -> None:  # noqa: PLR0912
    """S1-18: under random claims, ends, deaths and cancels, no committed state exceeds the limit, and all jobs end."""
    left = "select count(*) from tallybook.job where state not in ('completed', 'cancelled', 'dead', 'running')"
    chance = random.Random(seed)
    rules = {"a": 3, "b": 1, "c": 5}
    for name, most in rules.items():
        limit(db, name, most)
    askers, jobs, at = [Asker(db), Asker(db)], [], T
    running: dict[int, Asker] = {}

    def check() -> None:
        for name, held in db.execute("select name, held from tallybook.concurrency").fetchall():
            assert held <= rules[name.split(":")[0]], (name, held)
        for key in ("a", "b", "b:x", "c"):
            now = [job for job in running if key in keys_of[job]]
            assert len(now) <= rules[key.split(":")[0]], (key, now)

    keys_of: dict[int, list[str]] = {}
    for _ in range(120):
        at += chance.choice([0, 10, 1000]) * MS
        what, asker = chance.random(), chance.choice(askers)
        if what < 0.3:
            keys = chance.sample(["a", "b", "b:x", "c"], chance.choice([1, 1, 2]))
            for job in put(db, *keys, n=chance.randrange(1, 5), at=at, priority=chance.choice([1, 2, 2])):
                jobs.append(job)
                keys_of[job] = keys
        elif what < 0.6 and running:
            job = chance.choice(list(running))
            fail, snooze = ("fail", {"error": {}, "retry_in": S}), ("snooze", {"delay": "0"})
            verb, more = chance.choice([("complete", {}), ("complete", {}), fail, snooze])
            running.pop(job).end(verb, job, **more)
            if chance.random() < 0.7:
                permits(db, *keys_of[job], at=at)
        elif what < 0.65 and jobs:
            job = chance.choice(jobs)
            db.execute("select tallybook.cancel(%s)", (job,))
        elif what < 0.7:
            db.execute("update tallybook.worker set seen_at = '-infinity' where id = %s", (asker.worker,))
            db.execute("select tallybook.rescue(only_worker => %s, at => %s)", (asker.worker, at))
            running = {job: owner for job, owner in running.items() if owner is not asker}
            askers[askers.index(asker)] = Asker(db)
        else:
            for job in asker.look(at, n=chance.choice([1, 3, 100])):
                running[job] = asker
        check()
    for _ in range(400):
        at += S
        for job, owner in list(running.items()):
            owner.end("complete", job)
        running.clear()
        db.execute("select tallybook.promote(at => %s)", (at + HOUR,))
        permits(db, at=at)
        for job in askers[0].look(at + HOUR):
            running[job] = askers[0]
        check()
        if not running and not one(db, left):
            break
    assert one(db, left) == 0, "nobody waits for ever"


@pytest.mark.direct("watches which session waits for which")
def test_two_that_ask_at_once_get_one_place(db: Connection, connect: Any) -> None:
    """S1-18: the second session waits for the first one's commit, then sees its permit."""
    limit(db, "one", 1)
    assert len(two_at_once(db, connect, "one")) == 1


@pytest.mark.direct("watches which session waits for which")
def test_two_that_are_the_first_of_their_key_get_one_place(db: Connection, connect: Any) -> None:
    """S1-18: both insert the row of an unused key; the second reads the first one's row once that has committed."""
    limit(db, "one", 1)
    assert len(two_at_once(db, connect, "one", known=False)) == 1


@pytest.mark.direct("watches which session waits for which")
def test_control_without_the_lock_two_get_one_place(db: Connection, connect: Any) -> None:
    """Control: without the lock on the key's row, both jobs start."""
    without(db, "_limit_keys", "order by s.name for update) s", "order by s.name) s")
    limit(db, "one", 1)
    assert len(two_at_once(db, connect, "one")) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("concurrency_limit_set('', 1)", "1 to 200 bytes"),
        ("concurrency_limit_set('a', 0)", "most 0 is out of range"),
        ("concurrency_limit_set('a', null)", "most null is out of range"),
        ("concurrency_limit_set('task:', 2)", "cannot be named task:"),
    ],
)
def test_what_does_not_fit_is_refused(db: Connection, call: str, message: str) -> None:
    """Invalid arguments raise TB005 with a clear message."""
    with pytest.raises(psycopg.Error, match=message) as error:
        db.execute(cast("Any", f"select tallybook.{call}"))
    assert error.value.sqlstate == "TB005"
