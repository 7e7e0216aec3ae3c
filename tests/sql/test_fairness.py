"""Fairness in SQL: jobs of many keys are released in rounds, and keys that are known to be gone cost nothing."""

import json
import random
from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from support import askers
from support.askers import HOUR, Asker, S, T
from support.broken import without
from support.chance import seeds
from support.database import Connect, Connection, call, one
from support.hands import put_many
from support.sessions import pages


def put(db: Connection, key: str, n: int = 1, **more: Any) -> list[int]:
    return askers.put(db, n=n, **{**more, "options": {"fair_key": key, **more.get("options", {})}})


def load(db: Connection, keys: list[str]) -> None:
    put_many(db, len(keys), options=[json.dumps({"fair_key": key}) for key in keys], at=T)


class Dealer:
    """Calls fair_release and keeps what it knows from call to call, as the service does."""

    def __init__(self, db: Connection, most: int = 200) -> None:
        self.db, self.most, self.known, self.busy, self.remain = db, most, None, False, False

    def deal(self, at: datetime = T) -> int:
        query = "select known::text, released, busy, remain from tallybook.fair_release(%s::jsonb, %s, at => %s)"
        ((self.known, dealt, self.busy, self.remain),) = self.db.execute(query, (self.known, self.most, at)).fetchall()
        return dealt


def keys_of(db: Connection, jobs: list[int]) -> list[str]:
    query = "select id, options ->> 'fair_key' from tallybook.job where id = any (%s)"
    rows = dict(db.execute(query, (jobs,)).fetchall())
    return [rows[job] for job in jobs]


def in_line(db: Connection) -> int:
    """Return how many entries no claim has passed, by the view."""
    return one(db, "select count(*) from tallybook.job where state = 'available'")


def test_each_key_gets_one_turn_a_round(db: Connection) -> None:
    """Jobs of three keys are claimed in rounds, one of each key; within a key in the order of their enqueue."""
    a, b, c = put(db, "a", 5), put(db, "b", 2), put(db, "c", 3)
    assert Dealer(db).deal() == 10
    assert Asker(db).take() == [a[0], b[0], c[0], a[1], b[1], c[1], a[2], c[2], a[3], a[4]]


def test_a_round_goes_on_where_the_last_deal_ended(db: Connection) -> None:
    """With room for one job at a time each key is served in turn, even if two callers alternate."""
    for key in "abc":
        put(db, key, 3)
    worker, dealers = Asker(db), [Dealer(db, 1), Dealer(db, 1)]
    seen = []
    for n in range(9):
        assert dealers[n % 2].deal() == 1
        seen += worker.take()
    assert "".join(keys_of(db, seen)) == "abcabcabc"


def test_random_keys_are_a_random_order(db: Connection) -> None:
    """Jobs with random keys run by key, around a ring: a later job can pass earlier ones, and all of them run."""
    rng, dealer, worker = random.Random(7), Dealer(db, 1), Asker(db)
    early, late = ([f"{rng.getrandbits(64):016x}" for _ in range(20)] for _ in range(2))
    for key in early:
        put(db, key)
    seen: list[int] = []
    for n in range(40):
        if n == 10:
            for key in late:
                put(db, key)
        assert dealer.deal() == 1
        seen += worker.take()
    first, last = sorted(early)[:10], sorted(early)[9]
    waiting = sorted({*early, *late} - {*first}, key=lambda key: (key <= last, key))
    assert keys_of(db, seen) == [*first, *waiting]
    assert {*late} & {*waiting[:10]} and {*early} & {*waiting[-10:]}


def shuffle(db: Connection, on: bool = True) -> str:
    return one(db, "select tallybook.queue_set('q', random_order => %s)", on)


def test_a_queue_in_random_order(db: Connection) -> None:
    """With random_order all jobs of a queue run, in an order that is not theirs; without it again, in theirs."""
    assert [shuffle(db), shuffle(db)] == ["created", "unchanged"]
    jobs = [call(db, "enqueue", queue="q", task="t", at=T)[0][0] for _ in range(30)]
    dealer, worker, seen = Dealer(db, 5), Asker(db), []
    while dealer.deal():
        seen += worker.take()
    assert sorted(seen) == jobs != seen
    assert shuffle(db, False) == "changed"
    jobs = [call(db, "enqueue", queue="q", task="t", at=T)[0][0] for _ in range(30)]
    assert (dealer.deal(), worker.take()) == (0, jobs)


def test_each_way_into_a_queue_in_random_order(db: Connection) -> None:
    """Each new job of such a queue draws a fair key: one by one, many, scheduled, unique, by a query, after parents."""
    shuffle(db)
    call(db, "enqueue", queue="q", task="t", at=T, run_at=T + HOUR)
    db.execute(
        "select tallybook.enqueue_many('{q,q,q}', '{t,t,t}', array['{}', '{}', '{}'], unique_keys => '{NULL,u,NULL}',"
        " run_ats => array[null, null, %s]::timestamptz[], at => %s)",
        (T + HOUR, T),
    )
    query = "select '{}'::jsonb as args, n::text as key, %s::timestamptz + n * interval '1 h' as run_at"
    rows = query.replace("%s", f"'{T - HOUR}'") + " from generate_series(1, 2) n"
    assert one(db, "select created from tallybook.enqueue_from(%s, 'q', 't', at => %s)", rows, T) == 2
    db.execute("select tallybook.schedule_set('s', 't', queue => 'q', every => '1 min', at => %s)", (T - HOUR,))
    db.execute("select tallybook.schedule_run('s', at => %s)", (T,))
    parent = one(db, "select min(id) from tallybook.job")
    db.execute("select tallybook.enqueue_after('q', 't', array[%s]::bigint[], at => %s)", (parent, T))
    keys = db.execute("select id, options ->> 'fair_key' from tallybook.job").fetchall()
    assert len(keys) == 8 and all(key for _, key in keys) and len({key for _, key in keys}) == 8


def test_only_a_queue_in_random_order_draws_fair_keys(db: Connection) -> None:
    """A job's own fair key stays, a job with an order key gets none, nor one of another queue in the same call."""
    shuffle(db)
    put(db, "mine")
    call(db, "enqueue", queue="q", task="t", order_key="o", at=T)
    db.execute(
        "select tallybook.enqueue_many('{q,q,q,other}', '{t,t,t,t}', array_fill('{}'::text, array[4]),"
        " order_keys => '{NULL,o,NULL,NULL}', options => %s, at => %s)",
        ([None, None, '{"fair_key": "mine"}', None], T),
    )
    keys = [key for (key,) in db.execute("select options ->> 'fair_key' from tallybook.job order by id").fetchall()]
    assert keys[0] == keys[4] == "mine" and keys[1] is keys[3] is keys[5] is None and keys[2] not in (None, "mine")


def test_random_order_outlives_a_move_and_a_change_of_class(db: Connection) -> None:
    """The lanes that follow at a new retention class and after a move to another cluster are in random order, too."""
    put(db, "a")
    shuffle(db)
    db.execute("select tallybook.queue_set('q', retention => 'brief')")
    db.execute("update tallybook.installation set system_identifier = 1")
    assert one(db, "select rebased from tallybook.rebase(at => %s)", T)
    job = call(db, "enqueue", queue="q", task="t", at=T)[0][0]
    assert keys_of(db, [job])[0] is not None


@pytest.mark.slow
def test_a_tenant_with_thousands_delays_others_by_one_round(db: Connection) -> None:
    """After 5,000 jobs of one key, one job each of 300 others is claimed within the line of 200 and one round."""
    load(db, ["big"] * 5000)
    dealer, worker, order = Dealer(db), Asker(db), []
    dealer.deal()
    load(db, [f"k{n}" for n in range(300)])
    while len(order) < 1000:
        order += worker.take(50)
        dealer.deal()
        assert in_line(db) <= 200
    last = max(n for n, key in enumerate(keys_of(db, order)) if key != "big")
    assert last < 200 + 301


def test_an_ordinary_job_is_not_touched(db: Connection) -> None:
    """A job without a fair key goes to its lane at once, and no lane or row of fairness is created for it."""
    db.execute("select tallybook.enqueue('q', 't', at => %s)", (T,))
    assert one(db, "select count(*) from tallybook.waiting") == 0
    assert one(db, "select count(*) from tallybook.lane where part = 'fair'") == 0
    assert Dealer(db).deal() == 0
    assert len(Asker(db).take()) == 1


def test_what_waits_says_what_for(db: Connection) -> None:
    """Until its turn a job is waiting, with a reason; the view counts waiting jobs by key."""
    jobs = put(db, "tenant:42", 2)
    assert db.execute("select state, reason from tallybook.job where id = %s", (jobs[0],)).fetchone() == (
        "waiting",
        'the turn of its fair key "tenant:42" has not come',
    )
    assert db.execute("select queue, priority, fair_key, waiting, oldest from tallybook.fair").fetchall() == [
        ("q", 2, "tenant:42", 2, T)
    ]


@pytest.mark.parametrize(
    ("options", "order_key"),
    [({"fair_key": ""}, None), ({"fair_key": 7}, None), ({"fair_key": "x" * 201}, None), ({"fair_key": "a"}, "o")],
)
def test_what_does_not_fit_is_refused(db: Connection, options: dict[str, Any], order_key: str | None) -> None:
    """A fair key that is no text of 1 to 200 bytes, or comes with an order key, raises TB005."""
    with pytest.raises(psycopg.Error) as found:
        db.execute("select tallybook.enqueue('q', 't', options => %s, order_key => %s)", (Jsonb(options), order_key))
    assert found.value.sqlstate == "TB005"


def test_a_subject_has_no_fair_key(db: Connection) -> None:
    """A subject with a fair key raises TB005, because its job comes at its own time."""
    with pytest.raises(psycopg.Error) as found:
        db.execute("select tallybook.subject_push('q', 't', 's', options => '{\"fair_key\": \"a\"}')")
    assert found.value.sqlstate == "TB005"


def test_late_commits_are_found(db: Connection, connect: Connect) -> None:
    """A job that commits after later ones were released is released next; a very late one after 4 s."""
    put(db, "b")
    dealer, worker = Dealer(db), Asker(db)
    with connect(autocommit=False) as late, connect(autocommit=False) as very_late:
        (second,) = put(very_late, "z")
        load(db, ["a"] * 150)
        (first,) = put(late, "a")
        put(db, "a", 2)
        assert dealer.deal() == 153
        worker.take(200)
        late.commit()
        assert dealer.deal() == 1
        assert worker.take() == [first]
        very_late.commit()
        assert dealer.deal() == 0
        assert dealer.deal(T + 4 * S) == 1
        assert worker.take() == [second]


def test_one_deals_at_a_time(db: Connection, connect: Connect) -> None:
    """While one session releases jobs, another reports busy and releases none; afterwards it finds the line full."""
    put(db, "a", 30)
    with connect(autocommit=False) as other:
        assert Dealer(other, 10).deal() == 10
        mine = Dealer(db, 10)
        assert (mine.deal(), mine.busy, mine.remain) == (0, True, True)
        other.commit()
    assert (mine.deal(), mine.busy) == (0, False)
    assert in_line(db) == 10


def test_two_deal_more_without_the_lock(db: Connection, connect: Connect) -> None:
    """Control: without the lock two concurrent releases put twice as many jobs in line."""
    without(db, "fair_release", "tallybook._service_claim('fair_release ' || l.lane_id, at)", "true")
    put(db, "a", 30)
    others = put(db, "b", 30)
    lane = one(db, "select lane_id from tallybook.lane where part = 'fair'")
    mine = Dealer(db, 10)  # it knows only these; otherwise all that it chooses would be locked
    mine.known = json.dumps(
        {lane: {"keys": {"b": others[10]}, "top": others[-1] + 100, "full": False, "looked": T.timestamp()}}
    )
    with connect(autocommit=False) as other:
        assert Dealer(other, 10).deal() == 10
        assert mine.deal() == 10
        other.commit()
    assert in_line(db) == 20


def test_a_cancelled_job_does_not_start(db: Connection) -> None:
    """A job that is cancelled while it waits ends at its turn, in a claim; the others continue."""
    jobs = put(db, "a", 3)
    assert one(db, "select tallybook.cancel(%s, at => %s)", jobs[1], T) == "cancelled"
    Dealer(db).deal()
    assert Asker(db).take() == [jobs[0], jobs[2]]
    assert one(db, "select state from tallybook.job where id = %s", jobs[1]) == "cancelled"


def test_a_cancelled_job_is_retried(db: Connection) -> None:
    """A retry by a person undoes the cancel of a waiting job: the job continues to wait, and runs once."""
    (job,) = put(db, "a")
    db.execute("select tallybook.cancel(%s, at => %s)", (job, T))
    db.execute("select tallybook.retry(%s, at => %s)", (job, T))
    Dealer(db).deal()
    assert Asker(db).take() == [job]


def test_priorities_have_rounds_of_their_own(db: Connection) -> None:
    """Each priority has its own rounds, and a lower number runs first."""
    later, first = put(db, "a", 2), put(db, "b", 1, priority=1)
    assert Dealer(db).deal() == 3
    worker = Asker(db)
    assert worker.take() + worker.take() == first + later


def test_raised_priority_moves_what_waits(db: Connection) -> None:
    """on_conflict raise_priority: the waiting job with that unique key moves to the rounds of the other priority."""
    put(db, "a", 2)
    (job,) = put(db, "a", unique_key="u")
    assert put(db, "a", unique_key="u", priority=0, on_conflict="raise_priority") == [job]
    Dealer(db).deal()
    assert Asker(db).take(1) == [job]


def test_a_pushed_job_comes_later(db: Connection) -> None:
    """on_conflict push_run_at: at its turn the job is scheduled, and it returns to the rounds at its time."""
    (job,) = put(db, "a", unique_key="u")
    put(db, "a", unique_key="u", run_at=T + HOUR, on_conflict="push_run_at")
    dealer = Dealer(db)
    dealer.deal()
    assert one(db, "select state from tallybook.job where id = %s", job) == "scheduled"
    db.execute("select tallybook.promote(at => %s)", (T + HOUR,))
    assert dealer.deal(T + HOUR) == 1
    assert Asker(db).take(at=T + HOUR) == [job]


def test_scheduled_and_retried_jobs_come_into_the_rounds(db: Connection) -> None:
    """A promoted job waits for its turn like a new one, both when it is first due and after a failure."""
    dealer, worker = Dealer(db, 1), Asker(db)
    (job,) = put(db, "b", run_at=T + S)
    dealer.deal()
    put(db, "a", 2)
    db.execute("select tallybook.promote(at => %s)", (T + S,))
    assert one(db, "select state from tallybook.job where id = %s", job) == "waiting"
    seen = []
    for _ in range(3):
        dealer.deal(T + S)
        seen += worker.take(at=T + S)
    assert keys_of(db, seen) == ["a", "b", "a"]
    worker.end("fail", job, error={"message": "no"}, at=T + S, retry_in=S)
    db.execute("select tallybook.promote(at => %s)", (T + 2 * S,))
    assert one(db, "select state from tallybook.job where id = %s", job) == "waiting"
    dealer.deal(T + 2 * S)
    assert worker.take(at=T + 2 * S) == [job]


def test_what_was_given_back_goes_straight_to_the_line(db: Connection) -> None:
    """A job that was unclaimed or rescued goes straight to the lane, because its turn had come."""
    first, _ = put(db, "a", 2)
    dealer, worker = Dealer(db, 1), Asker(db)
    dealer.deal()
    assert worker.take() == [first]
    assert worker.end("unclaim", first) == "available"
    assert worker.take() == [first]
    db.execute("select tallybook.worker_stop(%s)", (worker.worker,))
    assert Asker(db).take() == [first]


@pytest.mark.parametrize("straight", [False, True], ids=["guard", "control"])
def test_jobs_that_go_on_at_once_do_not_keep_others_out(db: Connection, straight: bool) -> None:
    """A job that snoozes without delay waits for another turn, so another key's job starts after those in line."""
    if straight:  # into the lane, which is always full then: the other job never starts
        without(db, "_next_attempt", "p_at, null, p_fair)", "p_at, null, false)")
    put(db, "a", 10)
    dealer, worker, seen = Dealer(db, 10), Asker(db), []
    dealer.deal()
    (other,) = put(db, "b")
    for _ in range(6):
        seen += worker.take(5)
        for job in list(worker.held):
            assert worker.end("snooze", job, delay=timedelta(0)) == "available"
        dealer.deal()
    assert other not in seen if straight else other in seen[:12]


def test_a_persons_retry_waits_for_its_turn(db: Connection) -> None:
    """A retried dead letter waits for its turn, so that thousands of retries delay nobody."""
    (job,) = put(db, "a")
    dealer, worker = Dealer(db), Asker(db)
    dealer.deal()
    worker.take()
    worker.end("fail", job, error={"message": "no"}, at=T, final=True)
    db.execute("select tallybook.retry(%s, at => %s)", (job, T))
    assert one(db, "select state from tallybook.job where id = %s", job) == "waiting"
    dealer.deal()
    assert worker.take() == [job]


def test_bulk_and_query_put_them_in_turn(db: Connection) -> None:
    """Jobs with a fair key from enqueue_many, even unique or for later, and from enqueue_from wait for their turn."""
    db.execute(
        "select tallybook.enqueue_many('{q,q,q,q}', '{t,t,t,t}', array['{}', '{}', '{}', '{}'],"
        " unique_keys => '{NULL,u,NULL,NULL}', run_ats => array[null, null, null, %s]::timestamptz[], options => %s,"
        " at => %s)",
        (T + HOUR, ['{"fair_key": "a"}', '{"fair_key": "b"}', None, '{"fair_key": "c"}'], T),
    )
    db.execute(
        "select tallybook.enqueue_from('select jsonb_build_object(''n'', n) as args from generate_series(1, 3) n',"
        " 'q', 't', options => '{\"fair_key\": \"d\"}', at => %s)",
        (T,),
    )
    states = "select j.state, count(*) from tallybook.job j group by 1 order by 1"
    assert db.execute(states).fetchall() == [("available", 1), ("scheduled", 1), ("waiting", 5)]
    assert Dealer(db).deal() == 5
    worker = Asker(db)
    assert len(worker.take() + worker.take()) == 6


def test_a_held_job_goes_on_when_its_place_is_free(db: Connection) -> None:
    """With a concurrency limit, a job that was set aside has had its turn, and returns without another one."""
    db.execute("select tallybook.concurrency_limit_set('p', 1)")
    jobs = put(db, "a", 2, options={"limits": ["p"]})
    dealer, worker = Dealer(db), Asker(db)
    dealer.deal()
    assert worker.ask(worker.claim(T), T) == jobs[:1]
    assert "permits" in one(db, "select reason from tallybook.job where id = %s", jobs[1])
    assert dealer.deal(T + HOUR) == 0
    worker.complete(jobs[0])
    assert one(db, "select released from tallybook.concurrency_release(at => %s)", T + HOUR) == 1
    assert worker.take(at=T + HOUR) == [jobs[1]]


def test_a_move_to_another_cluster_takes_them_along(db: Connection) -> None:
    """rebase moves waiting jobs and jobs in line to new lanes and their rounds, each exactly once."""
    jobs = put(db, "a", 3) + put(db, "b", 3)
    Dealer(db, 2).deal()
    db.execute("update tallybook.installation set system_identifier = 1")
    assert one(db, "select rebased from tallybook.rebase(at => %s)", T)
    more = put(db, "c")
    dealer, worker, seen = Dealer(db, 2), Asker(db), []
    for _ in range(6):
        dealer.deal()
        seen += worker.take()
    assert sorted(seen) == sorted(jobs + more)
    assert one(db, "select count(*) from tallybook.lane where part = 'fair' and retired_at is null") == 1


def test_a_look_says_that_there_is_to_deal(db: Connection) -> None:
    """services_due names fair_release while a job waits and no release ran in the last second, and not otherwise."""
    due = "select 'fair_release' = any (due) from tallybook.services_due(at => %s)"
    put(db, "a")
    db.execute("select tallybook.fair_release(max_line => 0, as_service => true, at => %s)", (T,))
    assert not one(db, due, T + 0.5 * S)
    assert one(db, due, T + 2 * S)
    db.execute("select tallybook.fair_release(as_service => true, at => %s)", (T + 2 * S,))
    assert not one(db, due, T + 4 * S)


def test_a_deal_reads_by_indexes_only(db: Connection) -> None:
    """Without statistics, as after an installation, a release among 3,000 waiting jobs scans no table."""
    load(db, [f"k{n % 20}" for n in range(3000)])
    dealer = Dealer(db)
    scans = (
        "select coalesce(sum(seq_scan), 0) from pg_stat_xact_user_tables where relname in ('waiting', 'fair_turn')"
        " or relname ~ '^(entry|claim)_'"
    )
    with db.transaction():
        before = one(db, scans)
        assert dealer.deal() == 200
        assert dealer.deal() == 0
        assert one(db, scans) == before


def test_a_child_comes_into_the_rounds_after_its_parents(db: Connection) -> None:
    """enqueue_after: the child first waits for its parent, then for its turn."""
    (parent,) = put(db, "a")
    child = one(
        db,
        "select tallybook.enqueue_after('q', 't', array[%s]::bigint[], options => '{\"fair_key\": \"b\"}', at => %s)",
        parent, T,
    )  # fmt: skip
    dealer, worker = Dealer(db), Asker(db)
    assert dealer.deal() == 1
    worker.take()
    worker.complete(parent)
    db.execute("select tallybook.parents_resolve(at => %s)", (T,))
    assert "the turn of" in one(db, "select reason from tallybook.job where id = %s", child)
    assert dealer.deal() == 1
    assert worker.take() == [child]


def test_a_rate_limited_job_keeps_its_turn(db: Connection) -> None:
    """A job that a rate limit has postponed goes to the lane of turns at its time, not into the rounds again."""
    db.execute("select tallybook.rate_limit_set('p', 1, '1 hour')")
    jobs = put(db, "a", 2, options={"limits": ["p"]})
    dealer, worker = Dealer(db), Asker(db)
    dealer.deal()
    assert worker.ask(worker.claim(T), T) == jobs[:1]
    assert one(db, "select state from tallybook.job where id = %s", jobs[1]) == "scheduled"
    db.execute("select tallybook.promote(at => %s)", (T + 2 * HOUR,))
    assert one(db, "select count(*) from tallybook.waiting") == 0
    assert worker.take(at=T + 2 * HOUR) == [jobs[1]]
    assert one(db, "select count(*) from tallybook.lane where part = 'turn'") == 1


@pytest.mark.parametrize("knows", [True, False], ids=["guard", "control"])
def test_what_was_seen_once_costs_nothing(db: Connection, connect: Connect, knows: bool) -> None:
    """An idle release and claim read as much after 3,000 keys as after 150, under a pinned snapshot; no row stays."""
    releases, claims = [], []
    release = "select * from tallybook.fair_release(%s::jsonb, at => %s)"
    claim = "select * from tallybook.claim(%s, '{q}', '{10}', gen_random_uuid(), at => %s)"
    for tenants in (150, 3000):
        with connect(autocommit=False) as pin:
            pin.execute("set transaction isolation level repeatable read")
            pin.execute("select 1 from tallybook.waiting")
            dealer, worker = Dealer(db), Asker(db)
            load(db, [f"t{n}" for n in range(tenants)])
            while dealer.deal() or dealer.remain:
                while worker.take(200):
                    pass
            load(db, ["t1"])  # one more, as in a queue that is in use
            dealer.deal()
            worker.take()
            releases.append(pages(db, release, dealer.known if knows else None, T))
            claims.append(pages(db, claim, worker.worker, T))
    if not knows:
        assert releases[1] > releases[0] + 300, "a release that knows nothing reads the dead rows of all these keys"
        return
    assert releases[1] <= releases[0] + 30
    assert claims[1] <= claims[0] + 30
    assert one(db, "select count(*) from tallybook.waiting") == 0
    assert one(db, "select count(*) from tallybook.fair_turn") == 1
    assert one(db, "select count(*) from tallybook.lane where part = 'fair'") == 1


def test_a_backlog_is_not_walked_again(db: Connection, connect: Connect) -> None:
    """Under a pinned snapshot a release does not read a key's dead rows again; one that knows nothing does."""
    with connect(autocommit=False) as pin:
        pin.execute("set transaction isolation level repeatable read")
        pin.execute("select 1 from tallybook.waiting")
        dealer, worker = Dealer(db, 100), Asker(db)
        load(db, ["a"] * 4000)
        for _ in range(30):
            dealer.deal()
            worker.take(100)
        knows, knows_not = (
            pages(
                db,
                "select tallybook._fair_keys(l.lane_id, %s::jsonb -> l.lane_id::text, 100, %s)"
                " from tallybook.lane l where part = 'fair'",
                known, T,
            )
            for known in (dealer.known, None)
        )  # fmt: skip
        assert knows * 3 < knows_not


def test_more_keys_than_are_kept(db: Connection) -> None:
    """The first round serves each of 1,000 keys with two jobs once before the second round begins."""
    load(db, [f"k{n}" for n in range(1000)] * 2)
    dealer, worker, order = Dealer(db), Asker(db), []
    while len(order) < 2000:
        assert dealer.deal() > 0
        order += worker.take(200)
    keys = keys_of(db, order)
    assert max(Counter(keys[:1000]).values()) == 1
    assert set(Counter(keys).values()) == {2}


def test_of_very_many_keys_no_more_are_looked_up_than_there_is_room_for(db: Connection) -> None:
    """With 500 keys, more than are kept, and room for 3, a release looks up 4 keys and then knows one."""
    load(db, [f"k{n:03}" for n in range(500)])
    dealer, worker = Dealer(db), Asker(db)
    assert dealer.deal() == 200
    worker.take(3)
    assert dealer.deal() == 3
    (known,) = json.loads(str(dealer.known)).values()
    assert (known["full"], set(known["keys"])) == (True, {"k203"})


def test_a_key_with_much_fills_what_keys_with_little_leave(db: Connection) -> None:
    """With fifty keys of one job each and one of 300, one call fills the line, one job of each key first."""
    load(db, [f"k{n:02}" for n in range(50)] + ["x"] * 300)
    assert Dealer(db).deal() == 200
    keys = keys_of(db, Asker(db).take(200))
    assert keys[:51] == [*(f"k{n:02}" for n in range(50)), "x"]
    assert set(keys[51:]) == {"x"}


def test_a_run_as_service_commits_asynchronously(db: Connection) -> None:
    """A release as a service commits asynchronously: a crash only makes jobs wait again. A direct call does not."""
    put(db, "a")
    for as_service, said in ((False, "on"), (True, "off")):
        with db.transaction():
            db.execute("select * from tallybook.fair_release(as_service => %s, at => %s)", (as_service, T))
            assert one(db, "select current_setting('synchronous_commit')") == said
        assert one(db, "select current_setting('synchronous_commit')") == "on"


@pytest.mark.parametrize("seed", seeds(4, quick=1))
def test_all_end_exactly_once(db: Connection, seed: int) -> None:  # noqa: PLR0912
    """With random enqueues, delays, cancels, failures and two releasers each job ends once; the line stays short."""
    rng, at = random.Random(seed), T
    dealers, worker = [Dealer(db, 8), Dealer(db, 8)], Asker(db)
    jobs: list[int] = []
    cancelled: set[int] = set()
    for step in range(200):
        at += timedelta(milliseconds=rng.randrange(400))
        match rng.randrange(8) if step < 170 else rng.randrange(4, 8):
            case 0 | 1:
                jobs += put(db, rng.choice("abcde"), rng.randrange(1, 6), at=at)
            case 2:
                jobs += put(db, rng.choice("abcde"), at=at, run_at=at + rng.randrange(3) * S)
            case 3 if jobs:
                job = rng.choice(jobs)
                if one(db, "select tallybook.cancel(%s, at => %s)", job, at) == "cancelled":
                    cancelled.add(job)
            case 4 | 5 if worker.held and rng.random() < 0.4:
                job = rng.choice(list(worker.held))
                if rng.random() < 0.5:
                    worker.end("unclaim", job)
                else:
                    worker.end("fail", job, error={"message": "no"}, at=at, retry_in=S, max_attempts=30)
            case _:
                rng.choice(dealers).deal(at)
                worker.take(rng.randrange(1, 6), at)
                given_back = one(db, "select count(*) from tallybook.outcome where state = 'moved'")
                assert in_line(db) <= 8 + given_back, "those enter the line without a turn"
                for job in [job for job in worker.held if rng.random() < 0.5]:
                    worker.complete(job)
        db.execute("select tallybook.promote(at => %s)", (at,))
    for _ in range(200):
        at += 4 * S
        db.execute("select tallybook.promote(at => %s)", (at,))
        dealers[0].deal(at)
        worker.take(50, at)
        for job in list(worker.held):
            worker.complete(job)
        if not one(
            db,
            "select count(*) from tallybook.job"
            " where state in ('waiting', 'available', 'running', 'scheduled', 'retrying')",
        ):
            break
    states = dict(db.execute("select id, state from tallybook.job where id = any (%s)", (jobs,)).fetchall())
    assert set(states) == set(jobs)
    assert set(states.values()) <= {"completed", "cancelled", "dead"}
    assert all(states[job] == "cancelled" for job in cancelled)
    assert (
        one(
            db,
            "select max(n) from (select count(*) as n from tallybook.entry e join tallybook.outcome o"
            " on o.retention = e.retention and o.entry_xid = e.xid and o.entry_seq = e.seq"
            " where o.state in ('completed', 'cancelled', 'dead') group by e.job_id) x",
        )
        == 1
    )
