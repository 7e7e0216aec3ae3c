"""Circuit breakers in SQL: too many failures open them, a probe closes them, and no job is lost on the way."""

import random
from datetime import datetime, timedelta
from typing import Any, cast

import psycopg
import pytest

from support.askers import HOUR, MIN, MS, Asker, S, T, permits, put
from support.broken import without
from support.chance import seeds
from support.database import Connection, one
from support.hands import states

KEY = "provider:acme"


def rule(db: Connection, name: str = "provider", failures: int = 3, per: str = "1 min", open_for: str = "30 s") -> str:
    return one(db, "select tallybook.breaker_set(%s, %s, %s::interval, %s::interval)", name, failures, per, open_for)


def end(asker: Asker, job: int, at: datetime, how: str = "completed") -> None:
    """End an attempt in this way; a failure is tried again a minute later."""
    verb, more = {
        "completed": ("complete", {}), "failed": ("fail", {"error": {}, "retry_in": MIN}),
        "dead": ("fail", {"error": {}, "final": True}), "snoozed": ("snooze", {"delay": MIN}),
        "cancelled": ("cancel_running", {}), "expired": ("expire", {}),
    }[how]  # fmt: skip
    asker.end(verb, job, at=at, **more)


def state(db: Connection, name: str = KEY) -> tuple[Any, ...]:
    (row,) = db.execute(
        "select s.state, cardinality(s.failed_at), s.open_until, (select count(*) from tallybook.concurrency_line l"
        " where l.name = s.name) from tallybook.breaker_state s where s.name = %s",
        (name,),
    )
    return row


def broken(db: Connection, asker: Asker, n: int = 3, at: datetime = T) -> datetime:
    """Open the breaker by n jobs that die; return when that was."""
    for _ in range(n):
        (job,) = put(db, KEY, at=at)
        assert asker.look(at) == [job]
        end(asker, job, at, "dead")
        at += S
    permits(db, KEY, at=at)
    return at


def test_so_many_failures_open_it_and_its_jobs_wait(db: Connection) -> None:
    """After three failures in a minute the key's jobs wait without a failure, others do not, and the view shows it."""
    rule(db)
    asker = Asker(db)
    at = broken(db, asker)
    jobs, (other,) = put(db, KEY, n=4, at=at), put(db, "provider:other", at=at)
    assert asker.look(at) == [other]
    assert asker.claim(at) == []
    assert states(db, *jobs) == ["waiting"] * 4
    assert one(db, "select reason from tallybook.job where id = %s", jobs[0]) == f'the breaker of "{KEY}" is open'
    assert one(
        db, "select array_agg(distinct (attempts, failures)::text) from tallybook.job where id = any (%s)", jobs
    ) == ["(0,0)"]
    assert state(db) == ("open", 3, at + 30 * S, 4)
    assert db.execute("select name, rule, state, waiting from tallybook.breaker order by name").fetchall() == [
        ("provider", "provider", "closed", 0),
        (KEY, "provider", "open", 4),
        ("provider:other", "provider", "closed", 0),
    ]


def test_one_probe_closes_it(db: Connection) -> None:
    """After its time exactly one job starts; once that has completed, the others continue."""
    rule(db)
    asker = Asker(db)
    at = broken(db, asker)
    jobs = put(db, KEY, n=4, at=at)
    asker.look(at)
    assert (permits(db, at=at + 29 * S), asker.look(at + 29 * S)) == (0, [])
    at += 30 * S
    assert permits(db, at=at) == 1
    assert asker.look(at) == jobs[:1]
    (new,) = put(db, KEY, at=at)
    assert (permits(db, at=at), asker.look(at)) == (0, []), "one probe, whoever asks"
    assert state(db)[0] == "half-open"
    assert one(db, "select probe from tallybook.breaker where name = %s", KEY) == jobs[0]
    end(asker, jobs[0], at)
    assert permits(db, KEY, at=at) == 4
    assert asker.look(at) == [*jobs[1:], new]
    assert state(db) == ("closed", 0, None, 0)


def test_a_probe_that_fails_opens_it_once_more(db: Connection) -> None:
    """After a failed probe the others wait for the same time again, and then the next probe starts."""
    rule(db)
    asker = Asker(db)
    at = broken(db, asker) + 30 * S
    jobs = put(db, KEY, n=3, at=at)
    assert asker.look(at) == jobs[:1], "without anybody in line the first that asks is the probe"
    end(asker, jobs[0], at, "failed")
    assert permits(db, KEY, at=at) == 0
    assert state(db) == ("open", 1, at + 30 * S, 2)
    at += 30 * S
    assert (permits(db, at=at), asker.look(at)) == (1, jobs[1:2])
    end(asker, jobs[1], at)
    permits(db, KEY, at=at)
    assert asker.look(at) == jobs[2:]


@pytest.mark.parametrize("how", ["snoozed", "cancelled", "expired", "lost"])
def test_a_probe_that_says_nothing_is_followed_by_another(db: Connection, how: str) -> None:
    """A probe that is snoozed, cancelled, lost or expired neither opens nor closes the breaker: the next one starts."""
    rule(db)
    asker = Asker(db)
    at = broken(db, asker) + 30 * S
    jobs = put(db, KEY, n=3, at=at)
    assert asker.look(at) == jobs[:1]
    if how == "lost":
        db.execute("update tallybook.worker set seen_at = '-infinity' where id = %s", (asker.worker,))
        db.execute("select tallybook.rescue(only_worker => %s, at => %s)", (asker.worker, at))
        asker = Asker(db)
    else:
        end(asker, jobs[0], at, how)
    assert permits(db, at=at) == 1
    assert len(asker.look(at)) == 1
    assert state(db)[0] == "half-open"


def test_jobs_that_expire_do_not_open_it(db: Connection) -> None:
    """A job that is too old at its claim has not called anybody, so it is not a failure of the breaker's key."""
    rule(db)
    asker = Asker(db)
    for job in put(db, KEY, n=3):
        asker.look(T)
        end(asker, job, T, "expired")
    permits(db, KEY)
    assert state(db)[:2] == ("closed", 0)


def test_failures_that_are_far_apart_do_not_open_it(db: Connection) -> None:
    """Two failures in a minute and one later do not open it; snoozes, cancels and completions are no failures."""
    rule(db)
    asker = Asker(db)
    jobs = put(db, KEY, n=9)
    assert asker.look(T) == jobs
    for n, how in enumerate(["failed", "dead", "snoozed", "cancelled", "completed", "completed"]):
        end(asker, jobs[n], T + n * S, how)
    permits(db, KEY, at=T + 10 * S)
    assert state(db)[:2] == ("closed", 2)
    end(asker, jobs[6], T + 61 * S, "failed")
    permits(db, KEY, at=T + 61 * S)
    assert state(db)[:2] == ("closed", 1), "of the others' minute is over"
    for job in jobs[7:]:
        end(asker, job, T + 62 * S, "failed")
    permits(db, KEY, at=T + 62 * S)
    assert state(db)[0] == "open"


def test_what_runs_when_it_opens_does_not_close_it(db: Connection) -> None:
    """A job that started before the breaker opened and ends afterwards is no probe."""
    rule(db)
    asker = Asker(db)
    jobs = put(db, KEY, n=5)
    assert asker.look(T) == jobs
    for job in jobs[:3]:
        end(asker, job, T, "failed")
    permits(db, KEY)
    end(asker, jobs[3], T + S)
    permits(db, KEY, at=T + S)
    assert state(db)[0] == "open"
    (late,) = put(db, KEY, at=T + 31 * S)
    assert asker.look(T + 31 * S) == [late], "its probe"
    end(asker, jobs[4], T + 32 * S, "failed")
    permits(db, KEY, at=T + 32 * S)
    assert state(db)[0] == "half-open", "and what fails that ran before says nothing of the probe"


def test_by_hand(db: Connection) -> None:
    """A person opens the breaker for a time and closes it, without failures; a probe meanwhile decides nothing."""
    rule(db)
    asker = Asker(db)
    until = one(db, "select tallybook.breaker_open(%s, '2 h', at => %s)", KEY, T)
    assert until == T + 2 * HOUR
    jobs = put(db, KEY, n=3)
    assert (asker.look(T), states(db, *jobs)) == ([], ["waiting"] * 3)
    assert permits(db, at=T + HOUR) == 0
    assert one(db, "select tallybook.breaker_close(%s, at => %s)", KEY, T + HOUR) is True
    assert one(db, "select tallybook.breaker_close(%s, at => %s)", KEY, T + HOUR) is False
    assert permits(db, at=T + HOUR) == 3
    assert asker.look(T + HOUR) == jobs
    at = T + HOUR
    one(db, "select tallybook.breaker_open(%s, '1 s', at => %s)", KEY, at)
    (probe,) = put(db, KEY, at=at + S)
    assert asker.look(at + S) == [probe]
    one(db, "select tallybook.breaker_open(%s, at => %s)", KEY, at + S)
    end(asker, probe, at + 2 * S)
    permits(db, KEY, at=at + 2 * S)
    assert state(db)[0] == "open"


def test_a_rule_that_goes_lets_all_go_on(db: Connection) -> None:
    """Without its rule no job waits; a changed rule applies at once."""
    assert [rule(db), rule(db), rule(db, failures=1)] == ["created", "unchanged", "changed"]
    db.execute("select tallybook.rate_limit_set('provider', 1000, '1 s')")  # so that the name is still known
    asker = Asker(db)
    at = broken(db, asker, n=1)
    jobs = put(db, KEY, n=3, at=at)
    assert asker.look(at) == []
    assert one(db, "select tallybook.breaker_drop('provider')") is True
    assert one(db, "select tallybook.breaker_drop('provider')") is False
    assert permits(db, at=at) == 3
    assert len(asker.look(at)) == 3
    assert states(db, *jobs) == ["running"] * 3
    assert one(db, "select count(*) from tallybook.breaker_state") == 0


def test_of_a_queue_and_of_a_task(db: Connection) -> None:
    """Jobs that name no limit are held by the breaker of their queue and of their task."""
    rule(db, "task:slow", 1)
    rule(db, "queue:q", 2)
    asker = Asker(db)
    slow, fast = put(db, n=1, task="slow")[0], put(db, n=1)[0]
    assert asker.look(T) == [slow, fast]
    end(asker, slow, T, "dead")
    slow, fast = put(db, n=1, task="slow")[0], put(db, n=1)[0]
    assert asker.look(T) == [fast]
    end(asker, fast, T, "dead")
    (fast,) = put(db)
    assert asker.look(T) == []
    assert states(db, slow, fast) == ["waiting", "waiting"]


def test_with_a_concurrency_limit_of_the_same_name(db: Connection) -> None:
    """Both apply: never more jobs than the permits, and none while the breaker is open."""
    rule(db)
    db.execute("select tallybook.concurrency_limit_set('provider', 2)")
    asker = Asker(db)
    jobs = put(db, KEY, n=6)
    assert asker.look(T) == jobs[:2]
    for job in jobs[:2]:
        end(asker, job, T, "dead")
    assert (permits(db, KEY), asker.look(T)) == (2, jobs[2:4])
    end(asker, jobs[2], T, "dead")
    assert (permits(db, KEY), asker.look(T)) == (0, [])
    end(asker, jobs[3], T)
    assert (permits(db, at=T + 30 * S), asker.look(T + 30 * S)) == (1, jobs[4:5])
    end(asker, jobs[4], T + 31 * S)
    assert (permits(db, KEY, at=T + 31 * S), asker.look(T + 31 * S)) == (1, jobs[5:])


@pytest.mark.parametrize("probes", [1, 2], ids=["guard", "control"])
def test_two_workers_get_one_probe(db: Connection, connect: Any, probes: int) -> None:
    """The second session finds the probe of the first."""
    if probes == 2:  # both start if probes are not counted
        without(db, "_permits_free", "1 - v_probes", "1")
    rule(db)
    asker = Asker(db)
    at = broken(db, asker) + 30 * S
    put(db, KEY, n=2, at=at)
    askers = [Asker(connect()) for _ in range(2)]
    claims = [other.claim(at, 1) for other in askers]
    assert sum(len(other.ask(claim, at)) for other, claim in zip(askers, claims, strict=True)) == probes


@pytest.mark.parametrize("seed", seeds(4, quick=1))
def test_all_end_whatever_happens(db: Connection, seed: int) -> None:  # noqa: PLR0912
    """Random jobs, ends, times and manual changes: at most one probe a key, no start while it is open, and all end."""
    chance = random.Random(seed)
    rule(db, "a", 2, "20 s", "5 s")
    rule(db, "b", 1, "20 s", "3 s")
    db.execute("select tallybook.concurrency_limit_set('b', 2)")
    asker, at, running = Asker(db), T, dict[int, list[str]]()
    keys_of: dict[int, list[str]] = {}
    for step in range(260):
        at += chance.choice([0, 100, 2000]) * MS
        wild = step < 140
        what = chance.random()
        if wild and what < 0.3:
            keys = chance.choice([["a"], ["b"], ["a", "b"]])
            for job in put(db, *keys, n=chance.randrange(1, 4), at=at):
                keys_of[job] = keys
        elif wild and what < 0.35:
            verb = chance.choice(["breaker_open", "breaker_close"])
            db.execute(cast("Any", f"select tallybook.{verb}(%s, at => %s)"), (chance.choice("ab"), at))
        elif what < 0.75 and running:
            job = chance.choice(list(running))
            del running[job]
            ends = ["completed", "failed", "dead", "snoozed", "cancelled"] if wild else ["completed"]
            end(asker, job, at, chance.choice(ends))
            if chance.random() < 0.7:
                permits(db, *keys_of[job], at=at)
        else:
            permits(db, at=at)
            db.execute("select tallybook.promote(at => %s)", (at,))
            while jobs := asker.claim(at, chance.choice([1, 3, 100])):
                before = dict(
                    db.execute(
                        "select name, state from tallybook.breaker_state where open_until > %s", (at,)
                    ).fetchall()
                )
                for job in asker.ask(jobs, at):
                    assert not [key for key in keys_of[job] if before.get(key) == "open"], "while it is open"
                    running[job] = keys_of[job]
        for name, probes in db.execute(
            "select h.name, count(*) from tallybook.concurrency_holder h where h.probe and not exists ("
            "select from tallybook.outcome o where o.retention = h.retention and o.entry_xid = h.xid"
            " and o.entry_seq = h.seq) group by 1"
        ).fetchall():
            assert probes <= 1, name
    left = "select count(*) from tallybook.job where state not in ('completed', 'cancelled', 'dead')"
    for _ in range(200):
        at += 2 * MIN
        for job in list(running):
            del running[job]
            end(asker, job, at)
        permits(db, at=at)
        running.update({job: keys_of[job] for job in asker.look(at)})
        if not running and not one(db, left):
            break
    assert one(db, left) == 0, "nobody waits for ever"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("breaker_set('', 1, '1 s', '1 s')", "1 to 200 bytes"),
        ("breaker_set('queue:', 1, '1 s', '1 s')", "cannot be named queue:"),
        ("breaker_set('a', 0, '1 s', '1 s')", "failures 0 is out of range"),
        ("breaker_set('a', 1, '0 s', '1 s')", "per 00:00:00 is out of range"),
        ("breaker_set('a', 1, '1 s', null)", "open_for null is out of range"),
        ("breaker_open('a')", "there is no breaker a"),
        ("breaker_close('a')", "there is no breaker a"),
    ],
)
def test_what_does_not_fit_is_refused(db: Connection, call: str, message: str) -> None:
    """Invalid arguments raise a clear error."""
    with pytest.raises(psycopg.Error, match=message) as error:
        db.execute(cast("Any", f"select tallybook.{call}"))
    assert error.value.sqlstate == "TB005"


def test_a_duration_that_does_not_fit(db: Connection) -> None:
    """A negative duration and one of more than a century are refused."""
    rule(db, "a")
    for duration in (timedelta(seconds=-1), timedelta(days=40_000)):
        with pytest.raises(psycopg.Error, match="is out of range"):
            db.execute("select tallybook.breaker_open('a', %s)", (duration,))
