"""Verbs of subjects without statistics: they use indexes only, and ten times the subjects or iterations cost no more.

The server's own counters measure it, as in test_plans.py.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from support.database import one, without_statistics
from support.sessions import Reading, placed, reading

Readings = dict[str, list[Reading]]
TABLES = "^(entry|claim|outcome)_(brief|default|long)|^scheduled$|^subject_job$|^dead$"

# Half of the subjects are planned, a quarter pending, an eighth completed, the rest dead; two have n / 10 iterations.
FILL = """
do $$
declare
  v_worker int := tallybook.worker_start('old', '{{long,q}}'); v_lease uuid;
begin
  for part in {first}..({subjects} / 1000 - 1) loop
    perform tallybook.subject_push_many('q', 't',
      array(select format('planned %s', n) from generate_series(part * 500, part * 500 + 499) n),
      array_fill('{{"a": 1}}'::text, '{{500}}'), run_ats => array_fill(now() + interval '1 day', '{{500}}'));
    perform tallybook.subject_push_many('ended', 't',
      array(select format('ended %s', n) from generate_series(part * 250, part * 250 + 249) n),
      array_fill('{{}}'::text, '{{250}}'));
    perform tallybook.subject_push_many('q', 't',
      array(select format('pending %s', n) from generate_series(part * 250, part * 250 + 249) n),
      array_fill('{{}}'::text, '{{250}}'));
    commit;
    for part in 1..5 loop
      v_lease := gen_random_uuid();
      perform tallybook.claim(v_worker, '{{ended}}', '{{50}}', v_lease);
      commit;
      perform case when l.job_id % 2 = 0 then tallybook.subject_complete(v_lease, l.job_id, l.attempt)
                   else tallybook.subject_reject(v_lease, l.job_id, l.attempt, 'no', max_attempts => 1) end
         from tallybook.claimed_jobs(v_lease) l;
      commit;
    end loop;
  end loop;
  perform tallybook.subject_push('long', 't', name) from unnest('{{"long, active", "long, pending"}}'::text[]) name;
  commit;
  for iteration in 1..({subjects} / 10) loop
    v_lease := gen_random_uuid();
    perform tallybook.claim(v_worker, '{{long}}', '{{2}}', v_lease);
    commit;
    perform tallybook.subject_reschedule(v_lease, l.job_id, l.attempt, run_in => '0')
      from tallybook.claimed_jobs(v_lease) l;
    commit;
  end loop;
  v_lease := gen_random_uuid();
  perform tallybook.claim(v_worker, '{{long}}', '{{2}}', v_lease);
  commit;
  perform tallybook.subject_reschedule(v_lease, l.job_id, l.attempt, run_in => '0')
    from tallybook.claimed_jobs(v_lease) l where l.unique_key = 'long, pending';
  delete from place;
  insert into place select 'active', format('%L::uuid, %s, %s', v_lease, l.job_id, l.attempt)
    from tallybook.claimed_jobs(v_lease) l where l.unique_key = 'long, active';
  commit;
end $$"""


def batch(verb: str, name: str, number: str = "n") -> str:
    """A call with 50 subjects of one kind."""
    names = f"array(select format('{name} %s', {number}) from generate_series(1, 50) n)"  # noqa: S608
    args = "array_fill('{\"n\": 2}'::text, '{50}')"
    return f"select * from tallybook.subject_{verb}_many('q', 't', {names}, {args})"  # noqa: S608


VERBS = {
    **{
        f"the view: {name}": f"select * from tallybook.subject where task = 't' and subject = '{name}'"  # noqa: S608
        for name in ("planned 7", "pending 7", "ended 6", "ended 7", "long, active", "long, pending", "none")
    },
    "the list of the stopped": "select * from tallybook.subjects(states => '{completed,killed,dead}',"
    " max_subjects => 20)",
    "the trace of one": "select * from tallybook.trace(subject => 'planned 7')",
    "the newest errors": "select * from tallybook.error order by ended_at desc limit 20",
    "push": "select * from tallybook.subject_push('q', 't', 'new')",
    "push, there": "select * from tallybook.subject_push('q', 't', 'planned 7')",
    "push_many, new": batch("push", "new"),
    "push_many, planned": batch("push", "planned"),
    "push_many, pending": batch("push", "pending"),
    "upsert_many, new": batch("upsert", "new"),
    "upsert_many, planned": batch("upsert", "planned"),
    "upsert_many, pending": batch("upsert", "pending"),
    "upsert_many, completed": batch("upsert", "ended", "2 * n"),
    "upsert_many, dead": batch("upsert", "ended", "2 * n + 1"),
    "upsert, long and active": "select * from tallybook.subject_upsert('q', 't', 'long, active', '{\"n\": 1}')",
    "upsert, long and pending": "select * from tallybook.subject_upsert('long', 't', 'long, pending', '{\"n\": 1}')",
    "push, long and pending": "select * from tallybook.subject_push('q', 't', 'long, pending')",
    "forget": "select tallybook.subject_forget('t', 'planned 7')",
    "forget, ended": "select tallybook.subject_forget('t', 'ended 7')",
    "reschedule": "select tallybook.subject_reschedule(:active, run_in => '1 h')",
    "complete": "select tallybook.subject_complete(:active)",
    "plain complete": "select tallybook.complete(:active)",
    "drop": "select tallybook.subject_drop(:active)",
    "kill": "select tallybook.subject_kill(:active)",
    "reject": "select tallybook.subject_reject(:active, 'no')",
    "reject, the last": "select tallybook.subject_reject(:active, 'no', max_attempts => 1)",
}
CONTROLS = {
    "all that is planned": "select count(*) from tallybook.scheduled",
    "all attempts of one": "select count(*) from tallybook.entry"
    " where job_id = (select min(job_id) from tallybook.entry"
    " where lane_id = (select lane_id from tallybook.lane where queue = 'long'))",
}


@pytest.fixture(scope="module", params=["never vacuumed", "vacuumed while empty"])
def readings(request: pytest.FixtureRequest, server: Any, template: str) -> Iterator[Readings]:
    """Readings of each call on a small and on a ten times larger database, never analyzed.

    All calls share one session, which keeps the plans that it made while the tables were empty. A table that was
    vacuumed then counts as one page, so reading a whole index seems as cheap as one look-up.
    """
    with without_statistics(server, template) as db:
        db.execute("create table place (name text, id text)")
        if request.param == "vacuumed while empty":
            db.execute("vacuum")
        db.execute("insert into place values ('active', 'gen_random_uuid(), 1, 2')")
        for verb in VERBS.values():
            with db.transaction(force_rollback=True):
                db.execute(placed(db, verb))
        found: Readings = {verb: [] for verb in CONTROLS | VERBS}
        for first, size in ((0, 1_000), (1, 10_000)):
            if first:  # reschedule the active subject, so that the filling can continue
                db.execute(placed(db, "select tallybook.subject_reschedule(:active, run_in => '0')"))
            db.execute(FILL.format(first=first, subjects=size))  # type: ignore[arg-type]
            for verb, query in (CONTROLS | VERBS).items():
                found[verb].append(reading(db, placed(db, query), TABLES))
        counts = "select array[count(*), count(*) filter (where ended_as is not null)] from tallybook.subject_job"
        assert one(db, counts) == [10_002, 2_500]
        assert one(db, "select max(attempt) from tallybook.entry") > 1_000
        assert one(db, "select count(*) from pg_stats where schemaname = 'tallybook' and tablename <> 'lane'") == 0
        if (
            request.param == "vacuumed while empty"
        ):  # a person's query, planned anew from the statistics of empty tables
            del found["the newest errors"]
        yield found


@pytest.mark.slow
def test_no_table_is_read_from_end_to_end(readings: Readings) -> None:
    """S3-19, S3-20: without statistics, no verb of subjects and no look-up in the views scans a whole table."""
    assert {verb: readings[verb] for verb in VERBS if verb in readings and readings[verb][1].whole_tables} == {}


@pytest.mark.slow
def test_neither_subjects_nor_iterations_cost(readings: Readings) -> None:
    """S3-20: with ten times the subjects and iterations a call reads the same pages, but for the height of indexes."""
    grown = {}
    for verb in [verb for verb in VERBS if verb in readings]:
        small, large = (found.pages for found in readings[verb])
        print(f"{verb:30} {small:6} {large:6} pages")
        # One more page for each of 50 names: the index is higher, and a page holds fewer names.
        if large > max(1.3 * small, small + 60):
            grown[verb] = (small, large)
    assert grown == {}


@pytest.mark.slow
def test_control_what_reads_all_is_seen(readings: Readings) -> None:
    """Negative control: a count of planned jobs scans a table; all attempts of one subject cost more pages."""
    assert readings["all that is planned"][1].whole_tables == {"scheduled"}
    small, large = (found.pages for found in readings["all attempts of one"])
    print(small, large)
    assert large > max(1.3 * small, small + 60)
