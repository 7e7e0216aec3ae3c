"""The number of rows that the verbs read: their own, however many there are.

Plans live as long as their session. A plan that was made while the tables were empty must also serve when they are
full: a table that was vacuumed while it was empty counts as one page with no rows, so to the planner reading a whole
index is as cheap as the right one, and a worker's session keeps that choice.
"""

from functools import partial
from typing import Any, LiteralString

import psycopg
import pytest

from support.broken import without
from support.database import Connection, one
from support.hands import put_many
from support.sessions import pages, rows_read


@pytest.mark.slow
def test_a_plan_from_an_empty_table_does_when_it_is_full(db: Connection, connect: Any) -> None:
    """S3-20: no verb reads more in a session with plans from empty tables than in a new one."""
    verbs = {
        "enqueue": "select tallybook.enqueue('q', 'work')",
        "enqueue with a unique key": "select tallybook.enqueue('q', 'work', unique_key => 'k')",
        "claim": "select tallybook.claim((select worker from staged), '{q}', '{2}', gen_random_uuid())",
        "the same claim again": "select tallybook.claim((select worker from staged), '{q}', '{2}',"
        " (select lease from staged))",
        "claim_job": "select tallybook.claim_job((select worker from staged), (select queued from staged),"
        " gen_random_uuid())",
        "claimed_jobs": "select * from tallybook.claimed_jobs((select lease from staged))",
        "complete all": "select tallybook.complete_many(array_fill(lease, '{3}'), jobs[1:3], '{1,1,1}') from staged",
        "complete one": "select tallybook.complete(lease, jobs[1], 1) from staged",
        "complete with a result": "select tallybook.complete_many(array[lease], jobs[1:1], '{1}', '{1}') from staged",
        "complete what has ended": "select tallybook.complete(lease, jobs[4], 1) from staged",
        "fail": "select tallybook.fail(lease, jobs[1], 1, '{}', '1 s') from staged",
        "bury": "select tallybook.fail(lease, jobs[1], 1, '{}', final => true) from staged",
        "snooze": "select tallybook.snooze(lease, jobs[1], 1, '1 min') from staged",
        "cancel what runs": "select tallybook.cancel(jobs[1]) from staged",
        "cancel what is queued": "select tallybook.cancel(queued) from staged",
        "renew": "select tallybook.renew(worker, 1) from staged",
        "enqueue what is there": "select tallybook.enqueue('q', 'work', unique_key => 'there')",
        "change what is there": "select tallybook.enqueue('q', 'work', unique_key => 'there',"
        " on_conflict => 'replace_args')",
        "take a key again": "select tallybook.enqueue('q', 'work', unique_key => 'over')",
        "crash": "select tallybook.crash(lease, jobs[1], 1, '{}') from staged",
        "put back": "select tallybook.unclaim(lease, jobs[1], 1, '1 s') from staged",
        "move": "select tallybook.move(lease, jobs[1], 1) from staged",
        "cancelled": "select tallybook.cancel_running(lease, jobs[1], 1) from staged",
        "ended": "select tallybook.ended(lease, jobs[1], 1) from staged",
        "result": "select * from tallybook.result((select jobs[1] from staged))",
        "promote": "select tallybook.promote(10)",
        "rescue": "select tallybook.rescue()",
        "enqueue after others": "select tallybook.enqueue_after('q', 'work', array[queued, jobs[1]]) from staged",
        "settle what has ended": "select tallybook.parents_resolve(array[jobs[4]]) from staged",
        "parents_resolve": "select tallybook.parents_resolve()",
        "retry": "select tallybook.retry(jobs[4]) from staged",
        "the view": "select * from tallybook.job where id = (select queued from staged)",
        "the attempts": "select * from tallybook.attempt where job_id = (select queued from staged)",
    }
    # Three jobs claimed by a worker, a dead one, and nine in line.
    stage = """
do $$
declare
  v_worker int := tallybook.worker_start('staged', '{q}'); v_lease uuid := gen_random_uuid();
  v_over uuid := gen_random_uuid(); v_jobs bigint[];
begin
  perform tallybook.enqueue_many(array_fill('q'::text, '{13}'), array_fill('work'::text, '{13}'),
    array_fill('{}'::text, '{13}'), priorities => array_fill(1, '{13}'));
  perform tallybook.enqueue('q', 'work', unique_key => 'there');
  perform tallybook.enqueue('q', 'work', unique_key => 'over', priority => 0);
  commit;
  perform tallybook.claim(v_worker, '{q}', '{1}', v_over);
  commit;
  perform tallybook.complete(v_over, l.job_id, 1) from tallybook.claimed_jobs(v_over) l;
  commit;
  perform tallybook.claim(v_worker, '{q}', '{4}', v_lease);
  commit;
  v_jobs := array(select job_id from tallybook.claimed_jobs(v_lease) order by job_id);
  perform tallybook.fail(v_lease, v_jobs[4], 1, '{}', final => true);
  perform tallybook.enqueue_after('q', 'work', v_jobs[3:4]);
  commit;
  drop table if exists staged;
  create table staged as
    select v_worker as worker, v_lease as lease, v_jobs as jobs, (select max(job_id) from tallybook.entry) as queued;
end $$"""
    fill = """
do $$
declare
  v_worker int := tallybook.worker_start('filler', '{q}'); v_lease uuid;
begin
  perform tallybook.enqueue_many(array_fill('q'::text, array[%(n)s]), array_fill('work'::text, array[%(n)s]),
    array_fill('{}'::text, array[%(n)s]));
  perform tallybook.enqueue('q', 'work', run_at => now() + make_interval(mins => n)) from generate_series(1, %(n)s) n;
  commit;
  for n in 1..%(n)s loop
    v_lease := gen_random_uuid();
    perform tallybook.claim(v_worker, '{q}', '{1}', v_lease);
    commit;
    perform tallybook.complete(v_lease, l.job_id, l.attempt) from tallybook.claimed_jobs(v_lease) l where n %% 10 <> 0;
    perform tallybook.fail(v_lease, l.job_id, l.attempt, '{}', final => true)
      from tallybook.claimed_jobs(v_lease) l where n %% 10 = 0;
    commit;
  end loop;
  perform tallybook.worker_stop(v_worker);
end $$"""
    tables = """
select format('%I.%I', n.nspname, c.relname) from pg_class c join pg_namespace n on n.oid = c.relnamespace
 where n.nspname = 'tallybook' and c.relkind = 'r'"""
    claims = 1_500
    for (table,) in db.execute(tables).fetchall():
        db.execute(f"vacuum (analyze) {table}".encode())
    old = connect()
    old.execute(stage)
    for query in verbs.values():  # its plans are made here
        rows_read(old, partial(old.execute, query))
    db.execute(fill.replace("%(n)s", str(claims)).replace("%%", "%"))
    db.execute(stage)
    new = connect()
    more = {}
    for verb, query in verbs.items():
        before, now = rows_read(new, partial(new.execute, query)), rows_read(old, partial(old.execute, query))
        if now > 1.5 * before + 50:
            more[verb] = (now, before)
    assert more == {}


def test_what_is_due_is_found_by_its_index(db: Connection) -> None:
    """S3-20, S4-03: promote reads the ten due jobs, not the 3,000 others; control: without the index it reads all."""
    db.execute("select tallybook.enqueue('q', 'work', run_at => now() + '1 day') from generate_series(1, 3000)")
    db.execute("select tallybook.enqueue('q', 'work', run_at => now() + '1 hour') from generate_series(1, 10)")
    due: LiteralString = "select tallybook.promote(at => now() + '2 hours')"
    assert rows_read(db, partial(db.execute, due)) < 300
    with db.transaction(force_rollback=True):
        db.execute("drop index tallybook.scheduled_due")
        assert rows_read(db, partial(db.execute, due)) > 3000


MOST = 90  # pages; all remaining jobs are 100 more
OF_TEN: dict[str, LiteralString] = {
    "claimed_jobs": "select * from tallybook.claimed_jobs((select lease from ten limit 1))",
    "complete": "select tallybook.complete_many(array_agg(lease), array_agg(job_id), array_agg(attempt)) from ten",
    "rescue": "select tallybook._open_attempts((select worker from ten limit 1), 0)",
}


def _claim_ten(db: Connection, queue: str = "q") -> None:
    started = "create table ten as select tallybook.worker_start('w', array[%s]) as worker, gen_random_uuid() as lease"
    psycopg.ClientCursor(db).execute(started, (queue,))
    db.execute("select tallybook.claim(worker, array[%s::text], '{10}', lease) from ten", (queue,))
    db.execute("""
    create table more as select t.worker, t.lease, l.job_id, l.attempt from ten t, tallybook.claimed_jobs(t.lease) l;
    drop table ten; alter table more rename to ten""")


@pytest.mark.parametrize("late", [False, True], ids=["in the window", "committed late"])
@pytest.mark.parametrize("one_class", [False, True], ids=["three classes", "one class"])
def test_ten_jobs_of_a_big_transaction_are_all_that_is_read(
    db: Connection, connect: Any, one_class: bool, late: bool
) -> None:
    """S3-19: a worker that claims ten of a transaction's 20,000 jobs reads, ends and rescues ten, not all of them.

    With one retention class, no partition is pruned: a plan must not read nothing only because of that.
    """
    if one_class:
        db.execute("drop table tallybook.entry_brief, tallybook.entry_long, tallybook.claim_brief,"
                   " tallybook.claim_long, tallybook.outcome_brief, tallybook.outcome_long")  # fmt: skip
    business = connect(autocommit=False)
    put_many(business, 20_000)
    if late:  # a window opens while it runs: it is a hole, and is drained as a closed one
        db.execute("select tallybook.enqueue('q', 'work')")
        db.execute("select tallybook.claim(tallybook.worker_start('other', '{q}'), '{q}', '{10}', gen_random_uuid())")
    business.commit()
    _claim_ten(db)
    assert db.execute("select count(*) from ten").fetchone() == (10,)
    assert {verb: n for verb, query in OF_TEN.items() if (n := pages(db, query)) > MOST} == {}


def test_control_without_the_limit_all_jobs_of_a_transaction_are_read(db: Connection) -> None:
    """Control: an index scan does not end at a row's second column; the number of jobs in the claim ends it."""
    put_many(db, 20_000)
    without(db, "claimed_jobs", "limit case when claimed_jobs.job is null then c.jobs else 1 end")
    _claim_ten(db)
    assert pages(db, OF_TEN["claimed_jobs"]) > MOST


def test_a_list_of_jobs_skips_no_other_jobs_of_their_transaction(db: Connection) -> None:
    """Ten completed jobs of a transaction are listed as cheaply before 19,990 others of it as before ten."""
    found = []
    for queue, jobs in (("few", 20), ("q", 20_000)):
        put_many(db, jobs, queue)
        _claim_ten(db, queue)
        db.execute("select tallybook.complete(lease, job_id, attempt) from ten; drop table ten")
        query = f"select * from tallybook.jobs('{queue}', states => '{{completed}}')"  # noqa: S608
        assert len(db.execute(query).fetchall()) == 10
        found.append(pages(db, query))
    assert found[1] < found[0] + 50


def test_a_claim_is_published_without_a_look_at_earlier_jobs_of_the_transaction(db: Connection) -> None:
    """The last ten of a transaction's 20,000 jobs are claimed as cheaply as the first ten, their events included."""
    db.execute("select tallybook.queue_set('q', notify => true)")
    put_many(db, 20_000)
    db.execute("create table ten as select tallybook.worker_start('w', '{q}') as worker")
    claim: LiteralString = "select tallybook.claim(worker, '{q}', '{10}', gen_random_uuid()) from ten"
    first = pages(db, claim)
    db.execute("select tallybook.claim(worker, '{q}', '{19980}', gen_random_uuid()) from ten")
    assert pages(db, claim) < first + 50


def test_why_reads_only_what_is_before_a_job(db: Connection) -> None:
    """The tenth of 2,000 jobs of one transaction reads no more index entries of its line than are before it."""
    db.execute("select tallybook.enqueue('q', 'work') from generate_series(1, 2000)")
    tenth = one(db, "select job_id from tallybook.entry order by job_id offset 9 limit 1")
    line = (
        "select coalesce(sum(pg_stat_get_xact_tuples_returned(c.oid)), 0) from pg_class c"
        " where c.relname ~ '^entry_.*_lane_id'"
    )
    query = f"select details ->> 'before' from tallybook.why({tenth}) where reason = 'behind'"  # noqa: S608
    assert one(db, query) == "9"
    with db.transaction():
        before = one(db, line)
        db.execute(query)
        assert 0 < one(db, line) - before < 30
