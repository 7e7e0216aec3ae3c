"""A stored procedure that a form's endpoint calls: it keeps the submission, whatever happens to the job."""

from typing import Any

import psycopg
import pytest

TABLE = "create table submission (id bigint generated always as identity primary key, data jsonb not null)"
SUBMIT = """
create function submit(queue text, data jsonb) returns table (submission_id bigint, job_id bigint)
language plpgsql as $$
begin
  insert into submission (data) values (submit.data) returning id into submission_id;
  begin
    job_id := tallybook.enqueue(submit.queue, 'tallybook.webhook',
      jsonb_build_object('provider', 'acme', 'body', submit.data));
  exception when others then
    raise warning 'submission % has no webhook: %', submission_id, sqlerrm;
  end;
  return next;
end $$"""


def counts(db: Any) -> tuple[int, int]:
    row = db.execute("select (select count(*) from submission), (select count(*) from tallybook.job)").fetchone()
    return row[0], row[1]


def test_a_procedure_returns_the_jobs_id(db: Any) -> None:
    """S4-05: a procedure, called as an RPC, enqueues in its own transaction and returns the id, for the state."""
    db.execute(TABLE)
    db.execute(SUBMIT)
    submission, job = db.execute("""select * from submit('out', '{"n": 1}')""").fetchone()
    assert db.execute("select tallybook.state(%s)", (job,)).fetchone() == ("available",)
    assert submission == 1 and counts(db) == (1, 1)


def test_an_error_does_not_break_the_caller(db: Any) -> None:
    """S4-05: the procedure catches a refused enqueue: the submission stays, there is no job, the caller continues."""
    db.execute(TABLE)
    db.execute(SUBMIT)
    with db.transaction():
        assert db.execute("""select * from submit('', '{"n": 1}')""").fetchone() == (1, None)
        assert db.execute("""select job_id is not null from submit('out', '{"n": 2}')""").fetchone() == (True,)
    assert counts(db) == (2, 1)


def test_a_savepoint_keeps_the_submission(db: Any) -> None:
    """S4-05: a refused enqueue raises its SQLSTATE, and a savepoint keeps what was written before."""
    db.execute(TABLE)
    with db.transaction():
        db.execute("insert into submission (data) values ('{}')")
        with pytest.raises(psycopg.Error) as caught, db.transaction():
            db.execute("select tallybook.enqueue('out', '', '{}')")
        assert caught.value.sqlstate == "TB005"
    assert counts(db) == (1, 0)


def test_control_without_a_savepoint_the_submission_is_lost(db: Any) -> None:
    """S4-05, negative control: without a savepoint the same error loses the submission."""
    db.execute(TABLE)
    with pytest.raises(psycopg.Error), db.transaction():
        db.execute("insert into submission (data) values ('{}')")
        db.execute("select tallybook.enqueue('out', '', '{}')")
    assert counts(db) == (0, 0)
