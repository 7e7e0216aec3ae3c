"""Subjects from every kind of connection that a user may have, inside the user's own transaction."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from support.callers import Caller
from tallybook import App, Constant, SubjectReport
from tallybook.errors import ConfigError, InvalidArgument, PayloadError, SignatureError

app = App("prices")
AT = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
NAME = 'asset "42", {1,2} NULL \\ %s :name $1 \u2028 🦆'


@app.task(queue="prices", priority=3)
async def refresh(asset_id: int, *, note: str = "") -> None: ...


@app.task
def other(asset_id: int) -> None: ...


@app.task(unique=True)
def keyed(asset_id: int) -> None: ...


def names(db: Any) -> list[str]:
    return [row[0] for row in db.execute("select subject from tallybook.subject order by 1")]


def said(reports: list[SubjectReport]) -> list[tuple[str, str, datetime | None, datetime | None]]:
    return [(report.subject, report.report, report.old_run_at, report.new_run_at) for report in reports]


def test_verbs_are_part_of_the_transaction(caller: Caller, look: Any) -> None:
    """S3-02 S3-12 S3-23 S3-24 S3-25: each verb runs in the caller's transaction, on each kind of connection."""
    subject = refresh.with_(run_at=AT, headers={"t": NAME}, max_attempts=7).subject(NAME)
    caller.ask(subject.push(42))
    assert names(look) == []
    caller.rollback()
    assert caller.ask(subject.get()) is None
    first, second = caller.ask(subject.push(42, note=NAME)), caller.ask(subject.push(43))
    assert (first.created, second.created, first.job_id) == (True, False, second.job_id)
    later = refresh.with_(run_at=AT + timedelta(days=1)).subject(NAME)
    assert said([caller.ask(later.upsert(44))]) == [(NAME, "updated", AT, AT + timedelta(days=1))]
    assert caller.ask(later.upsert(44)).report == "unchanged"
    appended = caller.ask(refresh.append(3))
    caller.commit()
    info = subject.get().sync(look)
    assert info is not None
    assert (info.task, info.subject, info.queue, info.state, info.args) == (
        "refresh",
        NAME,
        "prices",
        "planned",
        {"asset_id": 44},
    )
    assert (info.next_run_at, info.iterations, info.priority) == (AT + timedelta(days=1), 0, 3)
    job = app.get(info.job_id).sync(look)
    assert (job.headers, job.max_attempts, job.subject) == ({"t": NAME}, 7, NAME)
    assert [caller.ask(subject.forget()) for _ in range(2)] == ["forgotten", "unknown"]
    caller.commit()
    assert names(look) == [appended.subject]


def test_bulk_forms_report_every_row(caller: Caller, look: Any) -> None:
    """S3-11 S3-12 S3-13: created, updated or unchanged, in the given order, over tasks and queues in one statement."""
    one, two = refresh.with_(run_at=AT), refresh.with_(run_at=AT, queue="slow", priority=9)
    rows = [one.subject("b").job(1), other.subject("b").job(2), two.subject(NAME).job(3), one.subject("a").job(4)]
    made = caller.ask(app.subjects.upsert_many(row for row in rows))
    assert [(report.subject, report.report) for report in made] == [
        ("b", "created"), ("b", "created"), (NAME, "created"), ("a", "created"),
    ]  # fmt: skip
    assert len({report.job_id for report in made}) == 4
    moved = [
        refresh.with_(run_at=AT + timedelta(hours=1)).subject("a").job(4),
        one.subject("b").job(1),
        one.subject("c").job(5),
    ]
    assert said(caller.ask(app.subjects.upsert_many(moved))) == [
        ("a", "updated", AT, AT + timedelta(hours=1)), ("b", "unchanged", AT, AT), ("c", "created", None, AT),
    ]  # fmt: skip
    pushed = caller.ask(app.subjects.push_many([one.subject("a").job(9), one.subject("d").job(9)]))
    assert [report.report for report in pushed] == ["unchanged", "created"]
    caller.commit()
    found = look.execute(
        'select task, subject, queue, priority from tallybook.subject order by task, subject collate "C"'
    ).fetchall()
    assert found == [
        ("other", "b", "default", 2), ("refresh", "a", "prices", 3), ("refresh", NAME, "slow", 9),
        ("refresh", "b", "prices", 3), ("refresh", "c", "prices", 3), ("refresh", "d", "prices", 3),
    ]  # fmt: skip


async def test_the_app_is_a_connection(shared: str, look: Any) -> None:
    """Without a connection the App takes one of its own and commits at once."""
    own = App("prices", dsn=shared)
    tasks = own.task(name="refresh")(refresh.fn)
    assert (await tasks.subject("a").push(1)).created
    again = await asyncio.to_thread(tasks.subject("a").push(1).sync)
    assert again.report == "unchanged"
    assert [row.report for row in await own.subjects.push_many([tasks.subject(n).job(1) for n in "ab"])] == [
        "unchanged",
        "created",
    ]
    assert await own.subjects.upsert_many([]) == own.subjects.push_many([]).sync() == []
    assert names(look) == ["a", "b"]


def test_append_makes_a_name_that_nobody_has(shared: str, look: Any) -> None:
    """S3-24: appended subjects are pending at once, each under its own name, first in first out."""
    reports = [refresh.append(n).sync(look) for n in range(3)]
    assert len({report.subject for report in reports}) == 3
    assert [report.report for report in reports] == ["created"] * 3
    infos = [refresh.subject(report.subject).get().sync(look) for report in reports]
    assert [info and (info.state, info.args["asset_id"]) for info in infos] == [("pending", n) for n in range(3)]
    line = look.execute("select id from tallybook.queue_top('prices') order by position").fetchall()
    assert line == [(report.job_id,) for report in reports]


def test_a_delay_counts_by_the_servers_clock(look: Any) -> None:
    """S3-22: a subject with a delay is planned, without one pending; each row has its own delay."""
    soon, later = refresh.with_(delay="1 hour"), refresh.with_(delay=timedelta(days=2))
    app.subjects.push_many([soon.subject("a").job(1), refresh.subject("b").job(2), later.subject("c").job(3)]).sync(
        look
    )
    found = look.execute(
        "select subject, state, round(extract(epoch from next_run_at - clock_timestamp()) / 3600)"
        " from tallybook.subject order by 1"
    ).fetchall()
    assert found == [("a", "planned", 1), ("b", "pending", 0), ("c", "planned", 48)]


def test_options_travel_with_the_subject(look: Any) -> None:
    """The retry policy and the version of the args are stored with the subject."""
    versioned = App("prices").task(name="refresh", version=2)(refresh.fn)
    versioned.with_(retry=Constant(timedelta(minutes=1))).subject("a").push(1).sync(look)
    app.subjects.push_many([versioned.subject("b").job(1)]).sync(look)
    rows = look.execute(
        "select s.subject, j.options - 'subject', j.options -> 'subject' ->> 'iterations'"
        "  from tallybook.subject s join tallybook.job j on j.id = s.job_id order by 1"
    )
    found = rows.fetchall()
    assert [(row[0], row[1]["version"], "retry" in row[1], row[2]) for row in found] == [
        ("a", 2, True, "0"),
        ("b", 2, False, "0"),
    ]


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    """S3-23: names, options and args are checked without a connection."""
    with pytest.raises(ConfigError, match="1 to 512 bytes"):
        refresh.subject("x" * 513)
    with pytest.raises(ConfigError, match="not a text"):
        refresh.subject(42)  # type: ignore[arg-type]
    for task in (refresh.with_(unique="x"), refresh.with_(order_key="x"), refresh.with_(expires_at=AT), keyed):
        with pytest.raises(ConfigError, match="a subject has none"):
            task.subject("a")
    with pytest.raises(ConfigError, match="what is appended runs at once"):
        refresh.with_(delay="1 s").append(1).sync(object())
    with pytest.raises(SignatureError):
        refresh.subject("a").push(1, colour="red").sync(object())  # type: ignore[call-arg]
    with pytest.raises(PayloadError):
        refresh.subject("a").job(object())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"subject 1 is of type JobCall. Describe it by task.subject\(name\).job"):
        two = [refresh.subject("a").job(1), refresh.job(1)]
        app.subjects.upsert_many(two).sync(object())  # type: ignore[arg-type]
    keyed.with_(unique=False).subject("a").job(1)


def test_a_name_is_that_of_its_queue(caller: Caller, look: Any) -> None:
    """S3-02: get, forget and move act on the subject that a push of this task and queue finds, on every connection."""
    assert app.queues.set("eu", own_names=True).sync(look) in ("created", "unchanged")
    here, there = refresh.with_(delay="1 hour").subject("a"), refresh.with_(delay="1 hour", queue="eu").subject("a")
    made = [caller.ask(subject.push(n)) for n, subject in enumerate((here, there, refresh.subject("a")))]
    assert [report.created for report in made] == [True, True, False]
    assert [info and info.job_id for info in (caller.ask(here.get()), caller.ask(there.get()))] == [
        made[0].job_id,
        made[1].job_id,
    ]
    assert caller.ask(there.move(AT)) == "moved"
    assert [info and info.next_run_at == AT for info in (caller.ask(here.get()), caller.ask(there.get()))] == [
        False,
        True,
    ]
    assert [caller.ask(there.forget()) for _ in range(2)] == ["forgotten", "unknown"]
    info = caller.ask(here.get())
    assert info is not None and (info.queue, info.state) == ("prices", "planned")
    caller.commit()
    listed = app.subjects.list(task="refresh", queue="prices").sync(look)
    assert [one.job_id for one in listed.subjects] == [made[0].job_id]
