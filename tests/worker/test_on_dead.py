"""on_dead: the job that a job's death enqueues, in the same transaction."""

import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from support.waiting import wait_until
from support.worker_process import Workers
from tallybook import App, Constant, Context, Dead
from tallybook._task.catalogue import check_tasks
from tallybook.errors import ConfigError
from tallybook.testing import drain

MAILS: list[dict[str, Any]] = []
app = App("prices")


@app.task(queue="mail")
async def mail_admin(job: int, task: str, args: dict[str, Any], failures: int, error: dict[str, Any]) -> None:
    """The notifier: PRICE_FETCH_FAILED {assetId, symbol, retries, error}, as the mission requires."""
    MAILS.append({"job": job, "task": task, "failures": failures, "error": error, **args})


@app.task(retry=Constant(timedelta(0)), max_attempts=2, on_dead=mail_admin)
async def fetch_price(asset_id: int, symbol: str) -> None:
    raise ConnectionError(f"no price for {symbol}")


@app.task(on_dead="mail_admin")
async def gives_up(asset_id: int) -> Dead:
    return Dead("the asset is gone")


@pytest.fixture(autouse=True)
def no_mails() -> None:
    MAILS.clear()


def enqueued(db: Any) -> list[tuple[Any, ...]]:
    """Return queue and args of the notifier's jobs."""
    return db.execute("select queue, args from tallybook.job where task = 'mail_admin' order by id").fetchall()


def test_a_final_failure_tells_the_admin(dsn: str, db: Any) -> None:
    """S1-25: after the last attempt the on_dead task runs once, with job, task, args, failures and error."""
    job = fetch_price.enqueue_sync(db, 7, "INFY")
    done = drain(app, dsn=dsn)
    assert (done.retrying, done.dead, done.completed) == (1, 1, 1)
    (mail,) = MAILS
    assert mail["error"].pop("traceback")
    kept = {key: mail["error"].pop(key) for key in ("at", "started_at", "worker", "attempt")}
    assert kept["attempt"] == 2
    assert mail == {
        "job": job.id,
        "task": "fetch_price",
        "asset_id": 7,
        "symbol": "INFY",
        "failures": 2,
        "error": {"type": "ConnectionError", "message": "no price for INFY", "reason": "failed"},
    }
    assert [queue for queue, _ in enqueued(db)] == ["mail"]


def test_nothing_is_told_of_what_goes_on_or_names_nobody(dsn: str, db: Any) -> None:
    """S1-25: a failure that is retried notifies nobody yet, and a task without on_dead never does."""

    @app.task
    async def says_nothing() -> None:
        raise ValueError("nobody is told")

    fetch_price.with_(retry=Constant(timedelta(hours=1))).enqueue_sync(db, 7, "INFY")
    says_nothing.with_(max_attempts=1).enqueue_sync(db)
    done = drain(app, dsn=dsn)
    assert (done.retrying, done.dead) == (1, 1)
    assert enqueued(db) == []


def test_a_handler_that_gives_up_tells_the_admin(dsn: str, db: Any) -> None:
    """S1-25: Dead is a death like any other; on_dead may be a name."""
    job = gives_up.enqueue_sync(db, 7)
    drain(app, dsn=dsn)
    (mail,) = MAILS
    assert (mail["job"], mail["failures"], mail["error"]["type"]) == (job.id, 1, "Dead")
    assert mail["error"]["message"] == "the asset is gone"


def test_expiry_tells_the_admin(dsn: str, db: Any) -> None:
    """S1-25: the notifier of a job that did not start by its expires_at gets the reason expired and no failure."""
    fetch_price.with_(expires_at=datetime.now(UTC) - timedelta(seconds=1)).enqueue_sync(db, 7, "INFY")
    drain(app, dsn=dsn)
    (mail,) = MAILS
    assert (mail["failures"], mail["error"]["reason"], mail["symbol"]) == (0, "expired", "INFY")


def test_a_death_tells_once_and_again_after_a_retry(dsn: str, db: Any) -> None:
    """S1-25: each death notifies once; a user's retry that ends in another death notifies again."""
    job = gives_up.enqueue_sync(db, 7)
    drain(app, dsn=dsn)
    drain(app, dsn=dsn)
    assert len(MAILS) == 1
    app.retry(job).sync(db)
    drain(app, dsn=dsn)
    assert len(MAILS) == 2


def test_a_death_that_is_rolled_back_tells_nobody(dsn: str, db: Any, connect: Any) -> None:
    """S1-25, P2: the on_dead job is in the death's own transaction: both exist, or neither."""
    drain(app, dsn=dsn)  # registers the tasks
    job = fetch_price.enqueue_sync(db, 7, "INFY")
    lease = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
    db.execute("select tallybook.worker_start('here', '{default}')")
    db.execute("select tallybook.claim(lastval()::int, '{default}', '{1}', %s::uuid)", (lease,))
    fail = 'select tallybook.fail(%s::uuid, %s, 1, \'{"message": "no"}\', final => true)'
    other = connect(autocommit=False)
    assert other.execute(fail, (lease, job.id)).fetchone() == ("dead",)
    assert len(enqueued(other)) == 1
    other.rollback()
    assert enqueued(db) == []
    assert db.execute("select count(*) from tallybook.dead").fetchone() == (0,)
    # And the control: the same death, committed.
    assert db.execute(fail, (lease, job.id)).fetchone() == ("dead",)
    assert len(enqueued(db)) == 1


def test_the_notifiers_own_death_tells_nobody(dsn: str, db: Any) -> None:
    """S1-25: a notifier that dies enqueues no other job, so chains of deaths end."""
    shop = App("shop")

    @shop.task(max_attempts=1)
    async def tell(job: int, task: str, args: dict[str, Any], failures: int, error: dict[str, Any]) -> None:
        raise OSError("the mail server is down")

    @shop.task(max_attempts=1, on_dead=tell)
    async def broken() -> None:
        raise ValueError

    broken.enqueue_sync(db)
    assert drain(shop, dsn=dsn).dead == 2
    tasks = db.execute("select task, reason from tallybook.dead order by job_id").fetchall()
    assert tasks == [("broken", "failed"), ("tell", "failed")]
    # Even if the catalogue was edited by hand.
    db.execute("update tallybook.task set on_dead_task = 'tell' where name = 'tell'")
    tell.enqueue_sync(db, 1, "x", {}, 1, {})
    lease = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
    db.execute("select tallybook.worker_start('here', '{default}')")
    db.execute("select tallybook.claim(lastval()::int, '{default}', '{1}', %s::uuid)", (lease,))
    (job,) = db.execute("select job_id from tallybook.claimed_jobs(%s)", (lease,)).fetchone()
    db.execute("select tallybook.fail(%s, %s, 1, '{}', final => true)", (lease, job))
    assert db.execute("select count(*) from tallybook.job").fetchone() == (3,)


@pytest.mark.slow
def test_a_worker_that_dies_with_its_job_tells_the_admin(dsn: str, db: Any) -> None:
    """S1-25, F24, P8: the last rescue of a killed worker's job notifies the admin, with the reason crashed."""

    async def _hold(ctx: Context, n: int) -> None: ...

    # The processes declare `hold` without on_dead; the catalogue has one, as if from another worker of the program.
    db.execute(
        "insert into tallybook.task (name, app, on_dead_task, on_dead_queue, definition, registered_at)"
        " values ('hold', 'shop', 'mail_admin', 'mail', '{}', now())"
    )
    keep = "create function keep() returns trigger language plpgsql as 'begin return null; end'"
    db.execute(f"{keep}; create trigger keep before update on tallybook.task for each row execute function keep()")
    with Workers(dsn, db) as workers:
        job = App("shop").task(name="hold")(_hold).enqueue_sync(db, 5)
        for crash in range(3):
            worker = workers.start()
            wait_until(lambda crash=crash: len(workers.ran(job)) == crash + 1, "the job runs")
            worker.signal(signal.SIGKILL)
            worker.ends()
        assert enqueued(db) == []
        workers.start()  # finds the dead worker
        wait_until(lambda: enqueued(db), "the admin is told")
    ((queue, args),) = enqueued(db)
    error = args.pop("error")
    assert (queue, args) == ("mail", {"job": job.id, "task": "hold", "args": {"n": 5}, "failures": 0})
    assert (error["reason"], error["type"]) == ("crashed", "WorkerLost")


def declared(on_dead: Any) -> App:
    """Return an app with two good notifiers, some bad ones and the task `mine` with this one."""
    shop = App("shop")

    def good(job: int, task: str, args: dict[str, Any], failures: int, error: dict[str, Any]) -> None: ...

    @shop.task
    async def few(job: int, task: str) -> None: ...

    @shop.task
    async def with_context(ctx: Context, job: int, task: str, args: Any, failures: int, error: Any) -> None: ...

    shop.task(name="good")(good)
    shop.task(name="more")(lambda job, task, args, failures, error, to: None)
    shop.task(name="anything")(lambda job, task, args, failures, error, **rest: None)
    shop.task(name="chained", on_dead="good")(good)
    shop.task(name="versioned", version=2)(good).upgrade(1)(lambda args: args)
    shop.task(name="mine", on_dead=on_dead)(good)
    return shop


@pytest.mark.parametrize("name", ["good", "with_context"])
def test_what_on_dead_may_name(name: str) -> None:
    """S1-25: it may be a task of the app with exactly the five args, with or without a Context."""
    check_tasks(declared(name))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "few",
            r"takes other arguments\. Write `def few\(job: int, task: str, args: dict, failures: int, error: dict\)`",
        ),
        ("more", "takes other arguments"),
        ("anything", "takes other arguments"),
        ("chained", "has an on_dead of its own"),
        ("versioned", "has a version"),
        ("mine", "that is the task itself"),
        ("goood", r"app 'shop' has no task of that name\. Did you mean 'good'\?"),
    ],
)
def test_what_on_dead_may_not_name(name: str, said: str, dsn: str) -> None:
    """S1-25: a worker does not start with a notifier that cannot be called; the error gives the reason."""
    with pytest.raises(ConfigError, match=said) as caught:
        drain(declared(name), dsn=dsn)
    assert caught.value.option == "on_dead of task 'mine'"


@pytest.mark.parametrize("wrong", [42, "", "a\nb", fetch_price, fetch_price.with_(priority=1), print])
def test_what_is_no_task_is_told_where_it_is_declared(wrong: Any) -> None:
    """on_dead is a task of the same app or a name; anything else is an error at the declaration."""
    with pytest.raises(ConfigError, match="on_dead"):
        declared(wrong)
