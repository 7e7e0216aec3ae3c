"""Rate limits in SQL: at most N calls in any window, in order, whoever asks, at a time that the test sets."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import psycopg
import pytest

from support.askers import HOUR, MIN, MS, Asker, S, T, put, two_at_once
from support.broken import without
from support.chance import seeds
from support.database import Connection, one
from support.subjects import push, upsert
from support.waiting import wait_until

EARLY = 120 * MS  # a waiting job comes back this long before its turn


def late(window: timedelta) -> timedelta:
    """Return how late a start may be."""
    return max(20 * MS, min(window / 100, S))


def most_in_window(starts: list[datetime], window: timedelta) -> int:
    """Return the largest number of starts in any window, if each may be late by what is allowed, or not."""
    starts, most_late = sorted(starts), late(window)
    begins = [first + most_late for first in starts]
    return max(sum(begin <= start < begin + window for start in [begin, *starts[n + 1 :]])
               for n, begin in enumerate(begins))  # fmt: skip


@pytest.fixture
def eight(db: Connection) -> Connection:
    """Eight calls a minute for each provider."""
    assert one(db, "select tallybook.rate_limit_set('provider', 8, '1 minute')") == "created"
    return db


def test_eight_a_minute_are_a_gap_of_seven_and_a_half_seconds(eight: Connection) -> None:
    """S1-18, S1-20: the first call does not wait; each next one starts 7,500 ms later, exactly at its turn."""
    jobs = put(eight, "provider:acme", n=8)
    asker = Asker(eight)
    assert asker.look(T) == jobs[:1]
    turns = eight.execute("select job_id, run_at from tallybook.scheduled order by run_at").fetchall()
    assert turns == [(job, T + n * 7500 * MS - EARLY) for n, job in enumerate(jobs) if n]
    assert asker.run(T + MIN) == jobs[1:]
    assert asker.started == [(job, T + n * 7500 * MS) for n, job in enumerate(jobs)]


def test_a_job_over_the_limit_is_put_off_without_a_failure(eight: Connection) -> None:
    """S1-18: waiting for a turn holds no worker and no lane, is no failure and no counted attempt, shows its time."""
    _, second = put(eight, "provider:acme", n=2)
    (other,) = put(eight)
    asker = Asker(eight)
    claimed = asker.claim(T)
    asker.ask([job for job in claimed if job[3]], T)
    row = eight.execute(
        "select state, failures, run_at from tallybook.job where id = %s", (second,)
    ).fetchone()  # fmt: skip
    assert row == ("scheduled", 0, T + 7500 * MS - EARLY)
    assert [job for _, job, _, limited in claimed if not limited] == [other]
    assert one(eight, "select jsonb_agg(distinct state) from tallybook.attempt where job_id = %s", second) == [
        "snoozed"
    ]


def test_each_key_is_held_by_itself(eight: Connection) -> None:
    """S1-18: a provider that is at its limit does not delay another one."""
    acme, other = put(eight, "provider:acme", n=2), put(eight, "provider:other", n=2)
    assert Asker(eight).look(T) == [acme[0], other[0]]


def test_a_rule_of_a_keys_own_goes_before_the_broad_one(eight: Connection) -> None:
    """S1-18: NAME:KEY has the rule NAME unless it has its own; a change of it applies from the next turn on."""
    eight.execute("select tallybook.rate_limit_set('provider:acme', 60, '1 minute')")
    jobs = put(eight, "provider:acme", n=3)
    asker = Asker(eight)
    asker.run(T + MIN)
    assert asker.started == [(job, T + n * S) for n, job in enumerate(jobs)]
    assert one(eight, "select tallybook.rate_limit_set('provider:acme', 60, '1 minute')") == "unchanged"
    assert one(eight, "select tallybook.rate_limit_set('provider:acme', 6, '1 minute')") == "changed"
    put(eight, "provider:acme", n=2)
    asker.look(T + MIN)
    asker.run(T + 2 * MIN, T + MIN)
    assert [start for _, start in asker.started[3:]] == [T + MIN, T + MIN + 10 * S]


def test_the_limit_survives_restarts(eight: Connection, connect: Any) -> None:
    """S1-19: a new worker on a new connection is held by the calls of another one."""
    put(eight, "provider:acme")
    assert len(Asker(eight).look(T)) == 1
    later = Asker(connect())
    put(eight, "provider:acme", at=T + S)
    assert later.look(T + S) == []
    later.run(T + MIN, T + S)
    assert [start for _, start in later.started] == [T + 7500 * MS]


def test_every_call_is_on_record_with_its_end(eight: Connection) -> None:
    """S1-19: each call is logged with key, time, job and success, whether it failed or not."""
    jobs = put(eight, "provider:acme", n=3)
    asker = Asker(eight)
    asker.run(T + MIN)
    asker.complete(jobs[0])
    asker.end("fail", jobs[1], error={"message": "no"})
    rows = eight.execute(
        "select name, called_at, job_id, success from tallybook.rate_calls order by called_at"
    ).fetchall()
    assert rows == [
        ("provider:acme", T + n * 7500 * MS, job, success)
        for n, (job, success) in enumerate(zip(jobs, [True, False, None], strict=True))
    ]


@pytest.mark.parametrize(
    ("verb", "more"), [("fail", {"error": {}, "retry_in": 6 * HOUR}), ("snooze", {"delay": 6 * HOUR})]
)
def test_a_job_that_comes_back_hours_after_its_turn_delays_no_other(
    eight: Connection, verb: str, more: dict[str, Any]
) -> None:
    """It has had its turn: new jobs do not wait behind its retry, which a dropped rule does not bring forward."""
    asker, at = Asker(eight), T + 10 * S
    first, second = put(eight, "provider:acme", n=2)
    asker.run(at)
    assert [job for job, _ in asker.started] == [first, second], "the second has waited for its turn"
    asker.end(verb, second, at=at, **more)
    (third,) = put(eight, "provider:acme", at=at)
    asker.run(at + 20 * S, since=at)
    assert [job for job, _ in asker.started] == [first, second, third]
    eight.execute("select tallybook.rate_limit_drop('provider', %s)", (at + 20 * S,))
    assert one(eight, "select run_at from tallybook.job where id = %s", second) == at + 6 * HOUR


@pytest.mark.parametrize(
    "moved",
    [
        "pushed while it waits", "pushed in its line", "postponed", "moved as a subject", "changed as a subject",
        "returned",
    ],
)  # fmt: skip
def test_a_job_that_is_given_another_time_is_not_the_end_of_the_line(eight: Connection, moved: str) -> None:
    """New jobs of the key are not put behind a waiting job that moved by hours, and no rule brings that job forward."""
    asker, turn, at, until = Asker(eight), T + 8 * S, T + 10 * S, T + 6 * HOUR
    (first,) = put(eight, "provider:acme")
    if "subject" in moved:
        job, _ = push(eight, "k", options={"limits": ["provider:acme"]}, at=T)
    else:
        (job,) = put(eight, "provider:acme", unique_key="k")
    assert asker.look(T) == [first]

    def push_to_later(at: datetime) -> None:
        assert put(eight, "provider:acme", unique_key="k", on_conflict="push_run_at", run_at=until, at=at) == [job]

    match moved:
        case "pushed while it waits":
            push_to_later(T + S)
        case "pushed in its line":
            eight.execute("select tallybook.promote(at => %s)", (turn,))
            push_to_later(turn)
            eight.execute("select tallybook.promote(at => %s)", (turn,))
        case "postponed":  # like that, but a claim meets it before promote moves it
            eight.execute("select tallybook.promote(at => %s)", (turn,))
            push_to_later(turn)
            assert asker.take(at=turn) == [job]
            assert asker.end("postpone", job, at=turn) == "scheduled"
        case "moved as a subject":  # by a person
            assert one(eight, "select tallybook.subject_move('t', 'k', %s, %s)", until, T + S) == "moved"
        case "changed as a subject":
            assert upsert(eight, "k", run_at=until, at=T + S)[1] == "updated"
        case "returned":
            asker.look(turn)
            assert asker.end("unclaim", job, delay=until - turn, at=turn) == "scheduled"
    assert one(eight, "select run_at from tallybook.job where id = %s", job) == until
    asker.started.clear()
    (new,) = put(eight, "provider:acme", at=at)
    assert asker.run(at + 20 * S, since=at) == [new]
    eight.execute("select tallybook.rate_limit_drop('provider', %s)", (at + 20 * S,))
    assert one(eight, "select run_at from tallybook.job where id = %s", job) == until


def _upserted(db: Connection, limit: str) -> str:
    """Upsert a subject of this limit; return the report."""
    return upsert(db, "k", options={"limits": [limit]}, at=T + S)[1]


def test_an_upsert_that_changes_nothing_leaves_a_subject_its_turn(eight: Connection) -> None:
    """S3-25: an upsert as before is reported as unchanged, and the waiting subject starts before newcomers."""
    asker = Asker(eight)
    (first,) = put(eight, "provider:acme")
    assert _upserted(eight, "provider:acme") == "created"
    subject = one(eight, "select id from tallybook.job where subject = 'k'")
    assert asker.look(T + S) == [first]
    assert _upserted(eight, "provider:acme") == "unchanged"
    (new,) = put(eight, "provider:acme", at=T + 2 * S)
    assert asker.run(T + MIN, since=T + 2 * S) == [subject, new]


def test_a_subject_that_gets_another_limit_leaves_the_line_of_the_old_one(eight: Connection) -> None:
    """It no longer counts as waiting for the old limit, and asks for the new one before it starts."""
    asker = Asker(eight)
    (first,) = put(eight, "provider:acme")
    assert _upserted(eight, "provider:acme") == "created"
    assert asker.look(T + S) == [first]
    assert _upserted(eight, "provider:other") == "updated"
    assert one(eight, "select waiting from tallybook.rate where name = 'provider:acme'") == 0
    subject = one(eight, "select id from tallybook.job where subject = 'k'")
    assert asker.run(T + MIN, since=T + 2 * S) == [subject]
    assert one(eight, "select name from tallybook.rate_call where job_id = %s", subject) == "provider:other"


def test_a_new_iteration_goes_behind_those_who_wait(eight: Connection) -> None:
    """A subject that has waited for its turn is a newcomer in its next iteration."""
    asker = Asker(eight)
    (first,) = put(eight, "provider:acme")
    assert _upserted(eight, "provider:acme") == "created"
    subject = one(eight, "select id from tallybook.job where subject = 'k'")
    assert asker.run(T + 9 * S, since=T + S) == [first, subject]
    others = put(eight, "provider:acme", n=2, at=T + 10 * S)
    assert asker.look(T + 10 * S) == []
    assert asker.end("subject_reschedule", subject, run_in=S, at=T + 10 * S) == "scheduled"
    assert asker.run(T + MIN, since=T + 11 * S) == [*others, subject]


def test_a_new_iteration_does_not_pass_the_backlog_of_its_queue(eight: Connection) -> None:
    """A subject that has waited for its turn goes before its queue's backlog once, not in its next iterations, too."""
    asker = Asker(eight)
    put(eight, "provider:acme")
    assert _upserted(eight, "provider:acme") == "created"
    subject = one(eight, "select id from tallybook.job where subject = 'k'")
    assert subject in asker.run(T + 9 * S, since=T + S)
    assert asker.end("subject_reschedule", subject, run_in=S, at=T + 10 * S) == "scheduled"
    backlog = put(eight, n=2, at=T + 10 * S)
    eight.execute("select tallybook.promote(at => %s)", (T + 12 * S,))
    assert [job for _, job, *_ in asker.claim(T + 12 * S)] == [*backlog, subject]


@pytest.mark.parametrize("mark", ["turn", "held", "permits"])
def test_a_producer_cannot_set_what_tallybook_notes_about_a_wait(eight: Connection, mark: str) -> None:
    """Options with a mark of a job that waits for a limit raise TB005, whichever verb they are passed to."""
    options = json.dumps({mark: "provider:acme"})
    for query in (
        "select tallybook.enqueue('q', 't', options => %s)",
        "select tallybook.enqueue_many(array['q'], array['t'], array['{}'], options => array[%s])",
        "select tallybook.subject_push('q', 't', 's', options => %s)",
    ):
        with pytest.raises(psycopg.Error, match="options have no turn, held or permits") as error:
            eight.execute(query, (options,))
        assert error.value.sqlstate == "TB005"


def test_an_outage_is_not_followed_by_a_burst(eight: Connection) -> None:
    """S1-18: unused turns are not saved, and jobs that waited through the outage keep their place before newcomers."""
    jobs = put(eight, "provider:acme", n=20)
    asker = Asker(eight)
    asker.look(T)
    asker.started.clear()
    late = T + 2 * MIN  # 16 turns have passed meanwhile
    newcomers = put(eight, "provider:acme", n=2, at=late)
    order = asker.run(late + 10 * MIN, late)
    starts = [start for _, start in asker.started]
    assert sorted(order) == jobs[1:] + newcomers
    assert min(b - a for a, b in pairwise(starts)) >= 7500 * MS
    assert most_in_window(starts, MIN) <= 8
    assert max(map(order.index, jobs[1:17])) < min(map(order.index, newcomers)), "due before they came"


def test_a_push_back_holds_all_calls_of_its_key(eight: Connection) -> None:
    """S1-19: after a 429 no call starts before its Retry-After; order and gaps stay, and other keys continue."""
    jobs = put(eight, "provider:acme", n=4)
    asker = Asker(eight)
    asker.look(T)
    until = T + HOUR
    assert one(eight, "select tallybook.rate_limit_push('provider:acme', %s)", until) == until
    assert one(eight, "select tallybook.rate_limit_push('provider:acme', %s)", T + MIN) == until, (
        "never brought forward"
    )
    (other,) = put(eight, "provider:other", at=T + MIN)
    assert asker.look(T + MIN) == [other]
    assert asker.run(until + HOUR, T + MIN) == jobs[1:]
    assert [start for job, start in asker.started if job in jobs[1:]] == [until + n * 7500 * MS for n in range(3)]


def test_what_is_urgent_goes_ahead_of_those_who_wait(eight: Connection) -> None:
    """S1-07: a job of priority 1 takes one of the next two turns, ahead of all that wait."""
    jobs = put(eight, "provider:acme", n=10)
    asker = Asker(eight)
    asker.look(T)
    (urgent,) = put(eight, "provider:acme", priority=1, at=T + S)
    asker.look(T + S)
    order = asker.run(T + HOUR, T + S)
    assert order.index(urgent) <= 1
    assert sorted(order) == sorted([*jobs[1:], urgent])


def test_who_waits_and_is_cancelled_leaves_no_hole(eight: Connection) -> None:
    """S1-18: turns of cancelled jobs go to other jobs: a newcomer does not wait behind them."""
    jobs = put(eight, "provider:acme", n=100)
    asker = Asker(eight)
    asker.look(T)
    for job in jobs[1:]:
        eight.execute("select tallybook.cancel(%s)", (job,))
    new = put(eight, "provider:acme", n=2, at=T + S)
    assert asker.run(T + MIN, T + S) == new
    assert [start for job, start in asker.started if job in new] == [T + 7500 * MS, T + 15 * S]


@pytest.mark.parametrize("pace", [True, False], ids=["guard", "control"])
def test_after_an_outage_only_so_many_come_as_can_start(eight: Connection, pace: bool) -> None:
    """S1-19: jobs whose turns have passed get new ones, in their order, and do not come all at once."""
    if not pace:  # all of them come into line, to be claimed in vain
        without(eight, "promote", "if v_limited then", "if false then")
    jobs = put(eight, "provider:acme", n=40)
    asker = Asker(eight)
    assert asker.look(T) == jobs[:1]
    assert one(eight, "select promoted from tallybook.promote(at => %s)", T + HOUR) == (1 if pace else 39)
    if not pace:
        return
    waiting = eight.execute("select job_id, run_at from tallybook.scheduled order by run_at").fetchall()
    assert [job for job, _ in waiting] == jobs[2:]
    assert [at for _, at in waiting] == [T + HOUR + n * 7500 * MS - 120 * MS for n in range(1, 39)]
    assert asker.run(T + 3 * HOUR, T + HOUR) == jobs[1:]
    assert one(eight, "select max(attempt) from tallybook.entry") <= 3, (
        "put off once, and for the longer gaps that come now and then"
    )


@pytest.mark.parametrize(
    "moved",
    ["pushed by minutes", "control", "overtaken by urgent jobs", "a longer gap, for a distant caller, than told"],
)
def test_who_waits_costs_one_more_entry(eight: Connection, moved: str) -> None:
    """S1-18: a job that a rate limit holds has two entries, however often its turn moves; no place or turn is lost."""
    if moved == "control":  # only late jobs get a new turn in place, so the others are claimed in vain
        without(eight, "_pace", "greatest(r.next_at, r.promised_at) > c_near", "false")
    jobs = put(eight, "provider:acme", n=40)
    asker = Asker(eight)
    assert asker.look(T) == jobs[:1]
    match moved:
        case "overtaken by urgent jobs":
            put(eight, "provider:acme", n=10, priority=1, at=T + S)
        case "pushed by minutes" | "control":
            eight.execute("select tallybook.rate_limit_push('provider:acme', %s)", (T + 3 * MIN,))
        case _:
            eight.execute("update tallybook.rate_state set lag = '1 s', next_at = next_at + interval '1 s'")
    order = [job for job in asker.run(T + HOUR, T + S) if job in jobs]
    most = one(eight, "select max(n) from (select count(*) as n from tallybook.entry group by job_id) x")
    if moved == "control":
        assert (sorted(order), most > 2) == (jobs[1:], True)
        return
    assert (order, most) == (jobs[1:], 2)
    starts = sorted(start for _, start in asker.started)
    assert max(b - a for a, b in pairwise(starts[1:])) <= 8500 * MS


@pytest.mark.parametrize("unique_key", [None, "k"])
def test_a_held_job_comes_back_before_the_backlog(eight: Connection, unique_key: str | None) -> None:
    """At its turn a job is claimed before the plain jobs of its queue, also one with a unique key."""
    asker = Asker(eight)
    put(eight, "provider:acme")
    (held,) = put(eight, "provider:acme", unique_key=unique_key)
    asker.look(T)
    put(eight, n=20)
    due = one(eight, "select run_at from tallybook.job where id = %s", held)
    eight.execute("select tallybook.promote(at => %s)", (due,))
    assert [job for _, job, _, _ in asker.claim(due, n=1)] == [held]


def test_a_changed_rule_counts_for_those_who_wait(eight: Connection) -> None:
    """S1-18: a faster rule brings the turns of waiting jobs forward, in their order."""
    jobs = put(eight, "provider:acme", n=5)
    asker = Asker(eight)
    asker.look(T)
    eight.execute("select tallybook.rate_limit_set('provider', 60, '1 minute', at => %s)", (T + S,))
    assert asker.run(T + MIN, T + S) == jobs[1:]
    assert [start for job, start in asker.started if job in jobs[1:]] == [T + n * S for n in range(1, 5)]


def test_a_changed_rule_waits_for_no_transaction(eight: Connection, connect: Any) -> None:
    """While a producer's open transaction changes a waiting job, a rule is changed at once; that job keeps its turn."""
    asker, jobs = Asker(eight), put(eight, "provider:acme", n=3)
    asker.look(T)
    turns = dict(eight.execute("select job_id, run_at from tallybook.scheduled").fetchall())
    with connect(autocommit=False) as other:
        other.execute("select from tallybook.scheduled where job_id = %s for update", (jobs[2],))
        eight.execute("set lock_timeout = '2s'")
        eight.execute("select tallybook.rate_limit_set('provider', 60, '1 minute', at => %s)", (T,))
        now = dict(eight.execute("select job_id, run_at from tallybook.scheduled").fetchall())
        assert now[jobs[1]] < turns[jobs[1]] and now[jobs[2]] == turns[jobs[2]]


def test_a_mistaken_push_goes_with_its_rule(eight: Connection) -> None:
    """S1-18: a key that was pushed back for years by mistake is free once its rule is dropped and created again."""
    eight.execute("select tallybook.rate_limit_push('provider:acme', '2226-01-01')")
    eight.execute("select tallybook.rate_limit_drop('provider')")
    eight.execute("select tallybook.rate_limit_set('provider', 8, '1 minute')")
    jobs = put(eight, "provider:acme", n=1)
    assert Asker(eight).look(T) == jobs


def test_a_burst_starts_at_once_and_no_window_has_more(db: Connection) -> None:
    """S1-18: a burst of 5 of 20 a second starts 5 together; longer gaps make sure that no second ever has 21."""
    db.execute("select tallybook.rate_limit_set('api', 20, '1 second', burst => 5)")
    put(db, "api", n=100)
    asker = Asker(db)
    assert len(asker.run(T + MIN)) == 100
    starts = [start for _, start in asker.started]
    assert starts[:5] == [T] * 5
    assert starts[5] > T
    assert most_in_window(starts, S) <= 20


@pytest.mark.parametrize("seed", seeds(6))
def test_no_window_has_more_whatever_comes_when(db: Connection, seed: int) -> None:
    """S1-18: with random times, outages, pushes, cancels and several keys a job no window of a key has too many."""
    late = 20 * MS
    chance = random.Random(seed)
    rules = {"a": (5, S, 1), "b": (20, S, 4), "c": (3, 10 * S, 3)}
    for name, (calls, per, burst) in rules.items():
        db.execute("select tallybook.rate_limit_set(%s, %s, %s, burst => %s)", (name, calls, per, burst))
    asker, at, jobs = Asker(db), T, []
    for _ in range(60):
        at += chance.choice([0, 1, 10, 40, 150, 400, 3000]) * MS
        what = chance.random()
        if what < 0.5:
            keys = chance.sample(["a", "b", "b:x", "c"], chance.choice([1, 1, 2]))
            jobs += put(db, *keys, n=chance.randrange(1, 8), at=at, priority=chance.choice([1, 2, 2]))
        elif what < 0.6 and jobs:
            db.execute("select tallybook.cancel(%s)", (chance.choice(jobs),))
        elif what < 0.65:
            db.execute(
                "select tallybook.rate_limit_push(%s, %s)", (chance.choice(["a", "b:x"]), at + chance.random() * 3 * S)
            )
        started = asker.look(at, n=chance.choice([1, 7, 100]))
        if started and chance.random() < 0.3:
            at += chance.choice([25, 150, 300]) * MS
            asker.too_late([job for job, start in asker.started if job in started and start + late < at], at)
    asker.run(at + 24 * HOUR, at)
    calls = db.execute("select name, array_agg(called_at) from tallybook.rate_call group by name").fetchall()
    assert len(calls) == 4
    for name, starts in calls:
        most, window, _ = rules[name.split(":")[0]]
        assert most_in_window(starts, window) <= most, name
    left = db.execute("select id, state from tallybook.job where state not in ('running', 'cancelled')").fetchall()
    assert left == [], "nobody waits for ever"
    assert len(asker.started) == len({job for job, _ in asker.started})


def test_a_start_that_was_missed_is_made_up_for(db: Connection) -> None:
    """S1-18: a late job starts at once, takes no second call, and all later jobs are postponed by as much."""
    db.execute("select tallybook.rate_limit_set('api', 10, '1 second')")
    jobs = put(db, "api", n=3)
    asker = Asker(db)
    assert asker.look(T) == jobs[:2]
    asker.too_late(jobs[:1], T + 50 * MS)
    assert asker.run(T + MIN, T + 50 * MS) == jobs[2:]
    assert sorted(start - T for _, start in asker.started) == [50 * MS, 100 * MS, 250 * MS]
    assert one(db, "select granted from tallybook.rate_state where name = 'api'") == 3
    assert one(db, "select array_agg(called_at order by called_at) from tallybook.rate_call") == [
        T + n * MS for n in (50, 100, 250)
    ]


def test_starts_are_not_sooner_than_the_caller_can(db: Connection) -> None:
    """S1-18: with ahead the first start is that far from now, and the gaps stay the same."""
    db.execute("select tallybook.rate_limit_set('api', 10, '1 second')")
    put(db, "api", n=2)
    asker = Asker(db)
    asker.ask(asker.claim(T), T, ahead="interval '40 ms'")
    assert [start - T for _, start in asker.started] == [40 * MS, 140 * MS]


def test_who_is_far_away_may_be_late_by_as_much(db: Connection) -> None:
    """S1-18: late is at least ahead, and no window has more for it, if near and far callers share a key."""

    def far_and_near(db: Connection) -> list[tuple[datetime, timedelta]]:
        """Start 60 jobs of a key, some by a worker that needs 300 ms; return each start and how late it may be."""
        db.execute("select tallybook.rate_limit_set('api', 10, '1 second')")
        put(db, "api", n=60)
        asker, at, turn = Asker(db), T, 0
        while len(asker.started) < 60:
            db.execute("select tallybook.promote(at => %s)", (at,))
            while jobs := asker.claim(at, 1):
                turn += 1
                ahead = 300 * MS if turn % 4 == 0 else 0 * MS
                asker.ask(
                    jobs, at - ahead, ahead=f"interval '{ahead / MS} ms'"
                )  # it asks in time: nothing is lost by it
            at = max(at + MS, one(db, "select coalesce(min(run_at), %s) from tallybook.scheduled", at))
        return sorted((start, asker.late[job]) for job, start in asker.started)

    starts = far_and_near(db)
    assert {late for _, late in starts} == {20 * MS, 300 * MS}
    assert all(start - first >= S + late for (first, late), (start, _) in zip(starts, starts[10:], strict=False))


def test_control_a_gap_that_knows_only_the_last_start(db: Connection) -> None:
    """Control: if the longer gap covers only its own start, an earlier one that was later makes one too many."""
    without(db, "limit_take", "greatest(k.lag, k.late)", "k.late")
    with pytest.raises(AssertionError):
        test_who_is_far_away_may_be_late_by_as_much(db)


def test_control_without_the_longer_gap_a_late_start_makes_one_too_many(db: Connection) -> None:
    """Control: with gaps of exactly window / calls, a start that is a little late makes nine in a minute."""
    without(db, "limit_take", "k.next_at := k.next_at + k.lag;")
    db.execute("select tallybook.rate_limit_set('api', 8, '1 minute')")
    put(db, "api", n=20)
    asker = Asker(db)
    asker.run(T + HOUR)
    assert most_in_window([start for _, start in asker.started], MIN) > 8


@pytest.mark.direct("watches which session waits for which")
def test_sessions_that_make_keys_do_not_deadlock(eight: Connection, connect: Any) -> None:
    """F18: a session that inserts the row of a key has no other row locked.

    One session inserts b and another c. A third inserts a, and waits for b, then for c. The fourth comes once b is
    there.
    """
    names = {"makes b": ["provider:b"], "makes c": ["provider:c"],
             "makes a": ["provider:a", "provider:b", "provider:c"],
             "comes last": ["provider:a", "provider:b"]}  # fmt: skip
    askers, claims = {}, {}
    for who in names:
        put(eight, "provider:x")
        askers[who] = Asker(connect(autocommit=False))
        claims[who] = askers[who].claim(T, 1)
        askers[who].db.commit()

    def ask(who: str) -> list[int]:
        return askers[who].ask(claims[who], T, names[who])

    def waits(who: str, for_whom: str) -> None:
        pids = [askers[name].db.info.backend_pid for name in (for_whom, who)]
        wait_until(lambda: one(eight, "select %s = any (pg_blocking_pids(%s))", *pids), f"{who} waits for {for_whom}")

    with ThreadPoolExecutor(2) as pool:
        ask("makes b")
        ask("makes c")
        third = pool.submit(ask, "makes a")
        waits("makes a", "makes b")
        askers["makes b"].db.commit()
        waits("makes a", "makes c")
        fourth = pool.submit(ask, "comes last")
        waits("comes last", "makes a")
        askers["makes c"].db.commit()
        third.result(60)
        askers["makes a"].db.commit()
        fourth.result(60)
        askers["comes last"].db.commit()
    assert [row[0] for row in eight.execute("select name from tallybook.rate_state order by name")] == names["makes a"]


@pytest.mark.direct("watches which session waits for which")
def test_two_that_ask_at_once_get_two_turns(db: Connection, connect: Any) -> None:
    """S1-18: the second session waits for the first one's commit, then sees its call."""
    db.execute("select tallybook.rate_limit_set('api', 10, '1 second')")
    assert two_at_once(db, connect, "api") == [0.0, 0.1]


@pytest.mark.direct("watches which session waits for which")
def test_two_that_are_the_first_of_their_key_get_two_turns(db: Connection, connect: Any) -> None:
    """S1-18: both insert the row of an unused key; the second reads the first one's row once that has committed."""
    db.execute("select tallybook.rate_limit_set('api', 10, '1 second')")
    assert two_at_once(db, connect, "api", known=False) == [0.0, 0.1]


@pytest.mark.direct("watches which session waits for which")
def test_control_without_the_lock_two_get_one_turn(db: Connection, connect: Any) -> None:
    """Control: without the lock, both read, then write, and start at the same time: the original's defect."""
    without(db, "_limit_keys", "order by s.name for update) s", "order by s.name) s")
    db.execute("select tallybook.rate_limit_set('api', 10, '1 second')")
    assert two_at_once(db, connect, "api") == [0.0, 0.0]


def test_a_limit_of_a_queue_and_of_a_task_holds_their_jobs(db: Connection) -> None:
    """S1-18: jobs that name no limit are held by the rules of their queue and of their task."""
    db.execute("select tallybook.rate_limit_set('queue:q', 10, '1 second')")
    db.execute("select tallybook.rate_limit_set('task:slow', 1, '1 second')")
    fast, slow = put(db, n=2), put(db, n=2, task="slow")
    asker = Asker(db)
    asker.run(T + MIN)
    starts = dict(asker.started)
    assert [starts[job] - T for job in fast] == [0 * S, 0.1 * S]
    assert starts[slow[1]] - starts[slow[0]] >= S
    db.execute("select tallybook.rate_limit_drop('queue:q')")
    db.execute("select tallybook.rate_limit_drop('task:slow')")
    put(db, at=T + MIN)
    assert [limited for *_, limited in asker.claim(T + MIN)] == [False]


def test_a_job_of_two_limits_takes_both_or_none(db: Connection) -> None:
    """S1-18: a job that is held by one of its limits takes nothing of the others."""
    db.execute("select tallybook.rate_limit_set('slow', 1, '1 hour')")
    db.execute("select tallybook.rate_limit_set('fast', 1, '1 second')")
    put(db, "slow")
    held = put(db, "fast", "slow")
    asker = Asker(db)
    asker.look(T)
    assert one(db, "select coalesce(sum(granted), 0) from tallybook.rate_state where name = 'fast'") == 0
    (other,) = put(db, "fast", at=T)
    assert asker.look(T) == [other]
    assert asker.run(T + 2 * HOUR) == held
    assert asker.started[-1][1] == T + HOUR + late(HOUR)


def test_a_limit_without_a_rule_is_told_and_changes_nothing(db: Connection) -> None:
    """S1-18: a misspelled name does not lift a limit: the job stays with its worker, which fails it."""
    jobs = put(db, "provder:acme")
    asker = Asker(db)
    assert asker.look(T) == []
    assert asker.unknown == [(jobs[0], "provder:acme")]
    assert one(db, "select state from tallybook.job where id = %s", jobs[0]) == "running"
    with pytest.raises(psycopg.Error, match="there is no rate limit provder:acme"):
        db.execute("select tallybook.rate_limit_push('provder:acme', now())")


def test_what_was_lost_gets_no_turn(eight: Connection) -> None:
    """S1-18: an attempt that was rescued meanwhile gets no turn and takes no call."""
    put(eight, "provider:acme")
    asker = Asker(eight)
    jobs = asker.claim(T)
    eight.execute("update tallybook.worker set seen_at = '-infinity' where id = %s", (asker.worker,))
    eight.execute("select tallybook.rescue(only_worker => %s, at => %s)", (asker.worker, T + HOUR))
    assert asker.ask(jobs, T + HOUR) == []
    assert one(eight, "select count(*) from tallybook.rate_call") == 0
    assert Asker(eight).look(T + HOUR) == [jobs[0][1]]


def test_a_handler_takes_what_it_knows_only_then(eight: Connection) -> None:
    """S1-18: names from the caller replace the job's; over the limit the attempt ends as snoozed."""
    first, second = put(eight, n=2)
    asker = Asker(eight)
    jobs = asker.claim(T)
    assert asker.ask(jobs, T, ["provider:acme"]) == [first]
    eight.execute("select tallybook.promote(at => %s)", (T + 8 * S,))
    (again,) = asker.claim(T + 8 * S)
    assert (again[1], again[2]) == (second, 2)
    assert asker.ask([again], T + 8 * S, ["provider:acme"]) == [second]


def test_it_needs_read_committed(eight: Connection, connect: Any) -> None:
    """S1-18: limit_take needs READ COMMITTED: an older snapshot cannot see all calls."""
    conn = connect(autocommit=False)
    conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    with pytest.raises(psycopg.Error, match="READ COMMITTED"):
        conn.execute("select tallybook.limit_take('{}', '{}', '{}')")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("rate_limit_set('', 1, '1 s')", "1 to 200 bytes"),
        ("rate_limit_set('a', 0, '1 s')", "calls 0 is out of range"),
        ("rate_limit_set('a', null, '1 s')", "calls null is out of range"),
        ("rate_limit_set('a', 1, '1 ms')", "per 00:00:00.001 is out of range"),
        ("rate_limit_set('a', 1, null)", "per null is out of range"),
        ("rate_limit_set('a', 2, '1 s', burst => 3)", "burst 3 is out of range"),
        ("rate_limit_set('queue', 2, '1 s')", "cannot be named queue"),
        ("enqueue('q', 't', options => '{\"limits\": \"a\"}')", "limits are a list of 1 to 8"),
        ("enqueue('q', 't', options => '{\"limits\": [1]}')", "limits are a list of 1 to 8"),
        ("enqueue('q', 't', options => '{\"limits\": []}')", "limits are a list of 1 to 8"),
    ],
)
def test_what_does_not_fit_is_refused(db: Connection, call: str, message: str) -> None:
    """Invalid arguments raise a clear error."""
    with pytest.raises(psycopg.Error, match=message) as error:
        db.execute(f"select tallybook.{call}")
    assert error.value.sqlstate == "TB005"


def test_the_view_shows_where_each_key_stands(eight: Connection) -> None:
    """S1-19: the view has each key's rule, calls, waiting jobs and the time of its next call."""
    put(eight, "provider:acme", n=3)
    Asker(eight).look(T)
    eight.execute("select tallybook.concurrency_limit_set('one', 1)")
    put(eight, "one:x", n=2)
    Asker(eight).look(T)  # a key of another kind, whose lock is in the same table
    row = eight.execute(
        "select name, rule, calls, calls_ever, waiting, last_call_at, next_call_at from tallybook.rate order by name"
    ).fetchall()
    assert row == [
        ("provider", "provider", 8, 0, 0, None, None),
        ("provider:acme", "provider", 8, 1, 2, T, T + 7500 * MS),
    ]
