"""trace: the history of a subject, a unique key, links or a job across queues; and links on every path of a job."""

import json
from datetime import datetime
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from support.database import Connection, call, one
from support.hands import Hands, put, put_many
from support.sessions import pages
from support.subjects import end, push

LINKS = {"submission": 42, "form": "a/7"}
HEADERS = Jsonb({"trace": "x", "links": LINKS})
FAR = datetime.fromisoformat("2040-01-01T00:00:00+00:00")


def trace(db: Connection, **named: Any) -> list[tuple[int, int, str]]:
    """Return the job, attempt and event of each row, in the order of the call."""
    return [(row["job_id"], row["attempt"], row["event"]) for row in rows(db, **named)]


def rows(db: Connection, **named: Any) -> list[dict[str, Any]]:
    return [row for (row,) in call(db, "trace", "to_jsonb(trace)", **named)]


def linked(db: Connection, **links: Any) -> list[int]:
    return sorted(row[0] for row in db.execute("select tallybook._linked(%s, 100)", (Jsonb(links),)))


def test_a_link_is_followed_across_queues(db: Connection) -> None:
    """S4-02: the jobs of one submission, of several tasks and queues, are traced event by event in order of time."""
    hands = Hands(db, "q", "r")
    first = put(db, headers=HEADERS, args={"n": 1})
    put(db, headers={"links": {"submission": 43}})
    put(db)
    second = put(db, queue="r", task="u", headers=HEADERS)
    for job in hands.start():
        if job.id == first:
            hands.fail(job)
        else:
            hands.complete(job)
    for job in hands.start() + hands.start():
        hands.complete(job)
    expected = [
        (first, 1, "enqueued"), (second, 1, "enqueued"), (first, 1, "started"), (first, 1, "failed"),
        (first, 2, "started"), (first, 2, "completed"), (second, 1, "started"), (second, 1, "completed"),
    ]  # fmt: skip
    assert sorted(trace(db, links={"submission": 42})) == sorted(expected)
    found = rows(db, links={"submission": 42})
    assert [row["at"] for row in found] == sorted(row["at"] for row in found)
    assert found == list(reversed(rows(db, links={"submission": 42}, newest_first=True)))
    assert found == rows(db, links={"submission": "42", "form": "a/7"}), "as text, and all of several"
    assert trace(db, links={"submission": 42, "form": "b"}) == []
    assert {row["queue"] for row in found} == {"q", "r"}
    (failed,) = [row for row in found if row["event"] == "failed"]
    assert (failed["error"]["message"], failed["worker"]) == ("no luck", "hands")
    assert found[0]["details"] == {"args": {"n": 1}}
    assert {job for job, _, _ in trace(db, links={"submission": 42}, task="u")} == {second}
    assert rows(db, links={"submission": 42}, max_events=3) == found[-3:], "the newest so many, still in order"


def test_a_subject_is_followed(db: Connection) -> None:
    """S3-35: a subject's trace lists each step with its args, across queues and all jobs that the subject has had."""
    hands = Hands(db, "q", "r")
    job, _ = push(db, "doc", args={"n": 1})
    other, _ = push(db, "doc", task="u", queue="r")
    push(db, "other")
    (first,) = [job_ for job_ in hands.start() if job_.id == job]
    end(hands, "subject_reschedule", first, run_at=datetime.fromisoformat("2020-01-01T00:00:00+00:00"), args={"n": 2})
    db.execute("select tallybook.promote()")
    (again,) = [job_ for job_ in hands.start() + hands.start() if job_.id == job]
    end(hands, "subject_complete", again)
    revived = one(db, "select job_id from tallybook.subject_upsert('q', 't', 'doc', '{\"n\": 3}')")
    assert revived != job
    found = rows(db, subject="doc")
    assert {row["job_id"] for row in found} == {job, other, revived}
    steps = [(row["attempt"], row["event"]) for row in found if row["job_id"] == job]
    assert steps == [(1, "enqueued"), (1, "started"), (1, "snoozed"), (2, "started"), (2, "completed")]
    assert next(row["details"] for row in found if row["job_id"] == job and row["attempt"] == 2) == {"args": {"n": 2}}
    assert {row["job_id"] for row in rows(db, subject="doc", task="t")} == {job, revived}
    assert trace(db, subject="nobody") == []


def test_a_unique_key_is_followed(db: Connection, hands: Hands) -> None:
    """The trace of a unique key lists all jobs that have had it, of every task or of one."""
    first, foreign = put(db, unique_key="k"), put(db, unique_key="k", task="u")
    put(db, unique_key="other")
    hands.complete(*hands.start())
    second = put(db, unique_key="k")
    assert {job for job, _, _ in trace(db, unique_key="k")} == {first, foreign, second}
    assert trace(db, unique_key="k", task="u") == [
        (foreign, 1, "enqueued"),
        (foreign, 1, "started"),
        (foreign, 1, "completed"),
    ]


def test_the_events_of_a_long_way(db: Connection, hands: Hands) -> None:
    """A trace has one row per event: scheduled, started, failed, started again, dead, retried, lost and cancelled."""
    job = put(db, run_at=FAR)
    assert trace(db, job=job) == [(job, 1, "enqueued"), (job, 1, "scheduled")]
    db.execute("update tallybook.scheduled set run_at = clock_timestamp()")
    db.execute("select tallybook.promote()")
    hands.fail(hands.start()[0])
    hands.fail(hands.start()[0], final=True)
    assert [event for _, _, event in trace(db, job=job)][-1] == "dead"
    db.execute("select tallybook.retry(%s)", (job,))
    hands.start()
    hands.rescued()
    hands = Hands(db)
    (last,) = hands.start()
    hands.fail(last, "1 h")
    db.execute("select tallybook.cancel(%s, 'enough')", (job,))
    events = [(attempt, event) for _, attempt, event in trace(db, job=job)]
    assert events[0] == (1, "enqueued")
    assert [event for event in events[1:] if event != (1, "scheduled")] == [
        (1, "started"), (1, "failed"), (2, "started"), (2, "dead"), (3, "retried"), (3, "started"), (3, "lost"),
        (4, "started"), (4, "failed"), (5, "scheduled"), (5, "cancelling"),
    ]  # fmt: skip
    db.execute("update tallybook.scheduled set run_at = clock_timestamp()")
    db.execute("select tallybook.promote()")
    hands.claim()
    last_row = rows(db, job=job)[-1]
    assert (last_row["event"], last_row["details"]) == ("cancelled", {"reason": "enough"})


def test_what_waits_says_for_what(db: Connection, hands: Hands) -> None:
    """A job that was set aside for its order key has a moved event, then a waiting event with the key."""
    put(db, order_key="k")
    job = put(db, order_key="k")
    hands.start()
    assert trace(db, job=job) == [(job, 1, "enqueued"), (job, 1, "moved"), (job, 2, "waiting")]
    assert rows(db, job=job)[-1]["details"] == {"order_key": "k"}


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({}, "exactly one thing to follow"),
        ({"subject": "s", "job": 1}, "exactly one thing to follow"),
        ({"job": 1, "max_events": 0}, "max_events 0"),
        ({"links": {}}, "links are one JSON object"),
        ({"links": {"Submission": 1}}, "kind has 1 to 50"),
    ],
)
def test_what_cannot_be_followed_is_refused(db: Connection, named: dict[str, Any], said: str) -> None:
    """Nothing to follow, two things to follow, or invalid values raise TB005."""
    with pytest.raises(psycopg.Error, match=said) as error:
        trace(db, **named)
    assert error.value.sqlstate == "TB005"


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ("[1]", "one JSON object"),
        ("{}", "one JSON object"),
        (json.dumps({f"k{n}": 1 for n in range(11)}), "at most 10"),
        ('{"a b": 1}', "kind has 1 to 50"),
        ('{"a": ""}', "1 to 200 bytes"),
        ('{"a": "' + "x" * 201 + '"}', "1 to 200 bytes"),
        ('{"a": 1.5}', "whole number"),
        ('{"a": null}', "whole number"),
        ('{"a": {}}', "whole number"),
    ],
)
def test_bad_links_are_refused(db: Connection, links: str, said: str) -> None:
    """Invalid links raise TB005 in every verb that enqueues: one job, many, children, subjects and schedules."""
    headers = f'{{"links": {links}}}'
    for query in (
        "select tallybook.enqueue('q', 't', headers => %s::jsonb)",
        "select tallybook.enqueue_many('{q}', '{t}', '{\"{}\"}', headers => array[%s])",
        "select tallybook.fan_out('{q}', '{t}', '{\"{}\"}', headers => array[%s])",
        "select tallybook.subject_push('q', 't', 's', '{}', headers => %s::jsonb)",
        "select tallybook.schedule_set('s', 't', every => '1 min', headers => %s::jsonb)",
    ):
        with pytest.raises(psycopg.Error, match=said) as error:
            db.execute(query, (headers,))
        assert error.value.sqlstate == "TB005", query
    assert one(db, "select count(*) from tallybook.job") == 0


def test_links_go_all_the_way_with_a_job(db: Connection, hands: Hands) -> None:
    """S4-02: links of plain, batch, child, keyed, fair, scheduled and subject jobs are found, also after retries."""
    many = (
        "select unnest(job_ids) from tallybook.enqueue_many('{q,q}', '{t,t}', '{\"{}\",\"{}\"}',"
        " headers => array[%s, null])"
    )
    text = json.dumps({"links": LINKS})
    plain = put(db, headers=HEADERS)
    (in_many, _) = [row[0] for row in db.execute(many, (text,))]
    child = one(db, "select tallybook.enqueue_after('q', 't', after => %s, headers => %s)", [plain], HEADERS)
    keyed, fair = put(db, unique_key="u", headers=HEADERS), put(db, headers=HEADERS, options={"fair_key": "f"})
    later, (subject, _) = put(db, run_at=FAR, headers=HEADERS), push(db, "s", headers={"links": LINKS})
    everything = sorted([plain, in_many, child, keyed, fair, later, subject])
    assert linked(db, submission=42) == everything
    assert linked(db, form="a/7") == everything
    for job in hands.start():
        hands.fail(job, "0") if job.id == plain else hands.fail(job, final=True)
    db.execute("select tallybook.retry(%s)", (keyed,))
    hands.complete(*hands.start())
    db.execute("select tallybook.parents_resolve()")
    db.execute("select tallybook.fair_release()")
    hands.complete(*hands.start())
    assert linked(db, submission=42) == everything
    for job in everything:
        assert one(db, "select links from tallybook.job where id = %s", job) == LINKS
    hands.complete(*hands.start())


def test_an_on_dead_job_has_the_links_of_the_dead_one(db: Connection) -> None:
    """S4-02: the job that is enqueued because a job died has the links of the dead job."""
    catalogue = '[{"name": "t", "app": "shop", "on_dead_task": "told", "on_dead_queue": "q"}]'
    db.execute("select tallybook.worker_start('w', '{q}', '{t}', catalogue => %s)", (catalogue,))
    job, hands = put(db, headers=HEADERS), Hands(db)
    hands.fail(hands.start()[0], final=True)
    (told,) = [found for found in linked(db, submission=42) if found != job]
    assert one(db, "select task from tallybook.job where id = %s", told) == "told"


def test_a_schedule_gives_its_jobs_their_links(db: Connection) -> None:
    """S4-02: jobs that a schedule enqueues have the schedule's links."""
    db.execute("select tallybook.schedule_set('s', 't', every => '1 min', headers => %s)", (HEADERS,))
    job = one(db, "select job_id from tallybook.schedule_run('s')")
    assert linked(db, submission=42) == [job]


@pytest.mark.new_database("it reads the sizes of indexes")
def test_jobs_without_links_are_in_no_index(db: Connection, hands: Hands) -> None:
    """Jobs without links add nothing to the indexes of links and subjects; the first with links does."""
    sizes = (
        "select coalesce(sum(pg_relation_size(c.oid)), 0) from pg_class c join pg_index i on i.indexrelid = c.oid"
        " join pg_class t on t.oid = i.indrelid"
        " where t.relname ~ '^entry' and c.relkind = 'i' and pg_get_indexdef(c.oid) ~ 'links|subject'"
    )
    before = one(db, sizes)
    put_many(db, 500)
    put(db, headers={"trace": "x"})
    assert one(db, sizes) == before
    put(db, headers=HEADERS)
    push(db, "s")
    assert one(db, sizes) > before, "and those that have some are in one"


def test_more_jobs_than_a_trace_takes_are_refused(db: Connection) -> None:
    """The trace of a link that more than 10,000 jobs have raises TB005."""
    put_many(db, 10_001, headers=['{"links": {"tenant": 1}}'] * 10_001)
    with pytest.raises(psycopg.Error, match="more than 10,000 jobs") as error:
        trace(db, links={"tenant": 1})
    assert error.value.sqlstate == "TB005"


def test_why_and_trace_do_not_know_how_much_history_there_is(db: Connection, hands: Hands) -> None:
    """why and trace read at most 60 pages more behind 15,000 completed jobs than behind 1,000, analyzed or not."""

    jobs: dict[str, int] = {}

    def stage() -> None:
        for name, more in {
            "plain": {},
            "later": {"run_at": FAR},
            "linked": {"headers": HEADERS},
            "keyed": {"unique_key": "u"},
        }.items():
            jobs.setdefault(name, put(db, **more))
        jobs.setdefault("subject", push(db, "s")[0])

    queries = [
        "select * from tallybook.why({plain})", "select * from tallybook.why({later})",
        "select * from tallybook.why({keyed})", "select * from tallybook.trace(links => '{{\"submission\": 42}}')",
        "select * from tallybook.trace(subject => 's')", "select * from tallybook.trace(unique_key => 'u')",
        "select * from tallybook.trace(job => {plain})",
    ]  # fmt: skip

    def history(n: int) -> None:
        for _ in range(n // 500):
            put_many(db, 500)
            found = hands.claim(500)
            params = ([job.lease for job in found], [job.id for job in found], [job.attempt for job in found])
            db.execute("select tallybook.complete_many(%s, %s, %s)", params)

    history(1000)
    stage()
    hands.complete(*hands.start())
    few = [pages(db, query.format(**jobs)) for query in queries]
    history(14_000)
    many = [pages(db, query.format(**jobs)) for query in queries]
    db.execute("analyze")
    after = [pages(db, query.format(**jobs)) for query in queries]
    seen = list(zip(queries, few, many, after, strict=True))
    assert all(max(b, c) <= a + 60 for _, a, b, c in seen), seen
