"""A crowd on a few order keys and unique keys: producers, workers that may die, cancels, retries, rescue.

The ledger does not prove what ran when, so each worker records it: a start after its answer, an end before it is sent.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psycopg
import pytest

from support.broken import without
from support.database import Connect, Connection
from support.hands import Hands, Job, put

pytestmark = pytest.mark.direct("kills sessions by their process")

KEYS = [f"k{n}" for n in range(4)]


@dataclass
class Crowd:
    """The state that all threads share."""

    connect: Connect
    enough: Callable[[Crowd], bool]
    """Whether all that the test needs has happened; until then it runs longer, on a slow machine."""
    began: float = field(default_factory=time.monotonic)
    running: dict[str, set[int]] = field(default_factory=lambda: {key: set() for key in KEYS})
    did: dict[int, int] = field(default_factory=dict)
    told: dict[int, int] = field(default_factory=dict)
    jobs: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def goes_on(self) -> bool:
        age = time.monotonic() - self.began
        return age < 3 or (age < 60 and not self.enough(self))

    def begins(self, job: Job) -> None:
        key = job.order_key
        with self.lock:
            self.did[job.id] = job.args.get("n", 0)
            if key is not None:
                if others := self.running[key] - {job.id}:
                    self.wrong.append(f"{job.id} started while {others} ran, key {key}")
                self.running[key].add(job.id)

    def ends(self, job: Job) -> None:
        with self.lock:
            if job.order_key is not None:
                self.running[job.order_key].discard(job.id)


def produce(crowd: Crowd, number: int) -> None:
    """Enqueue as one producer with its own unique key; the order keys are shared."""
    source, db = random.Random(number), crowd.connect(autocommit=False)
    n = 0
    while crowd.goes_on():
        said = []
        for _ in range(source.randint(1, 3)):
            if source.random() < 0.5:
                crowd.jobs.append(put(db, order_key=source.choice(KEYS)))
            else:
                n += 1
                job = put(
                    db, unique_key=f"u{number}", unique_while="queued", on_conflict="replace_args", args={"n": n},
                    order_key=source.choice([None, *KEYS]),
                )  # fmt: skip
                said.append((job, n))
        time.sleep(source.random() * 0.02)
        if source.random() < 0.2:
            db.rollback()
        else:
            db.commit()
            crowd.told.update(said)
        time.sleep(source.random() * 0.01)


def work(crowd: Crowd, number: int) -> None:
    """Work, die now and then, and come back."""
    source, db = random.Random(100 + number), crowd.connect()
    hands, held = Hands(db, at="'infinity'"), list[Job]()  # workers send no heartbeat here
    while crowd.goes_on() or held:
        if source.random() < 0.02:  # it dies: what it has started is no longer running
            for job in held:
                crowd.ends(job)
            hands.rescued()
            hands, held = Hands(db, at="'infinity'"), []
        if crowd.goes_on():
            held += hands.claim(source.randint(1, 8))
        free, busy = [], []
        for job in held:
            (now,) = hands.claimed_jobs(job.lease, job.id)
            if now.cancelled:
                hands.say("cancel_running", now)
            else:
                (busy if now.changing else free).append(now)
        ready, asked_again = hands.turn(free, patient=source.random() < 0.8) if free else ([], [])
        held = busy + [job for job in free if job.id in asked_again]
        for job in (job for job in free if job.id in ready):
            crowd.begins(job)
            time.sleep(source.random() * 0.002)
            crowd.ends(job)
            what = source.random()
            if what < 0.8:
                hands.complete(job)
            elif what < 0.9:
                hands.fail(job, source.choice(["0", "10 ms"]))
            else:
                hands.say("snooze", job, source.choice(["0", "10 ms"]))
        time.sleep(0.002)


def meddle(crowd: Crowd) -> None:
    """Run cancels, retries, promote and rescue."""
    source, db = random.Random(7), crowd.connect()
    while crowd.goes_on():
        if crowd.jobs and source.random() < 0.3:
            job = source.choice(crowd.jobs[-50:])
            for verb in ("cancel", "retry"):
                if source.random() < 0.5:
                    try:
                        db.execute(f"select tallybook.{verb}(%s)", (job,))  # type: ignore[arg-type]
                    except psycopg.Error as error:
                        assert error.sqlstate in ("TB002", "TB005"), error
        db.execute("select tallybook.promote()")
        if source.random() < 0.2:
            db.execute("select tallybook.rescue()")
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("guarded", [True, False], ids=["guard", "control"])
def test_a_crowd_keeps_its_lines(connect: Connect, db: Connection, guarded: bool) -> None:
    """S1-07, S3-08, P3: no two jobs of a key overlap, none is stuck, and no work promised to a producer is missed."""
    if not guarded:  # order_admit does not check whether a turn's holder is open, so jobs of one key overlap
        without(db, "order_admit", "or not tallybook._job_open(v_holder))", "or true)")
        without(db, "order_admit", "if tallybook._job_open(l.job_id) then v_mine := false; exit; end if;")

    def enough(crowd: Crowd) -> bool:
        return len(crowd.did) > 50 if guarded else any("started while" in wrong for wrong in [*crowd.wrong])

    crowd = Crowd(connect, enough)
    with ThreadPoolExecutor(6) as pool:
        parts = [pool.submit(produce, crowd, n) for n in (1, 2)] + [pool.submit(work, crowd, n) for n in (1, 2, 3)]
        parts.append(pool.submit(meddle, crowd))
    crowd.wrong += [repr(error) for part in parts if (error := part.exception())]
    hands = Hands(connect(), at="'infinity'")
    for _ in range(40):
        hands.db.execute("select tallybook.promote(at => clock_timestamp() + interval '1 h')")
        hands.db.execute("select tallybook.rescue()")
        for _ in range(30):
            jobs = hands.start()
            for job in jobs:
                crowd.begins(job)
                crowd.ends(job)
                hands.complete(job)
            if not jobs:
                break
    if not guarded:
        assert enough(crowd)
        return
    query = "select id, state, order_key from tallybook.job where state not in ('completed', 'cancelled', 'dead')"
    assert (crowd.wrong, hands.db.execute(query).fetchall()) == ([], []), "no job is open for ever"
    ends = dict(hands.db.execute("select id, state from tallybook.job").fetchall())
    told = {job: (n, crowd.did.get(job)) for job, n in crowd.told.items() if ends[job] == "completed"}
    assert {job: numbers for job, numbers in told.items() if len(set(numbers)) > 1} == {}, "the work told, and done"
    assert enough(crowd)
