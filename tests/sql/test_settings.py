"""Settings of a caller's session that change how PostgreSQL reads literals or writes names."""

from collections.abc import Callable

import pytest

from support.database import Connection, one

CALLS = """
select created from tallybook.enqueue_many('{q,q}', '{send,files}', array['{}', '{}'])
select tallybook.enqueue_from($$select '{}'::jsonb as args$$, 'q', 't')
select tallybook.enqueue_from($$select 1::text as key, '{}'::json as args$$, 'q', 't')
select tallybook.schedule_set('s', 't', cron => '*/5 * * * *')
select tallybook.summary('t', '{"a": 1}')
select id, cursor from tallybook.jobs(states => '{available}', max_jobs => 1, after => {cursor})
select id from tallybook.queue_top('q', after => {place})
select tallybook.queue_truncate('other', max_jobs => 1, mark => {mark})
select lower, upper from tallybook._ranges('tallybook.tally')
select finding from tallybook.doctor() where name = 'roles'
"""


@pytest.mark.parametrize("setting", ["standard_conforming_strings = off", "quote_all_identifiers = on"])
def test_a_setting_of_the_session_changes_no_answer(
    db: Connection, connect: Callable[..., Connection], setting: str
) -> None:
    """Functions return the same in sessions that read a backslash as an escape or write all names in quotes."""
    db.execute(
        "insert into tallybook.task (name, app, summary, definition, registered_at)"
        " values ('t', 'a', 'for {a}', '{}', now())"
    )
    db.execute("select tallybook.enqueue_many('{q,q,q,other,other}', '{t,t,t,t,t}', array_fill('{}'::text, '{5}'))")
    given = {
        "cursor": one(db, "select cursor from tallybook.jobs(states => '{available}', max_jobs => 1)"),
        "place": one(db, "select place from tallybook.queue_top('q', max_jobs => 1)"),
        "mark": one(db, "select mark::text from tallybook.queue_truncate('other', max_jobs => 1)"),
    }
    assert all(given.values())
    conn = connect()
    conn.execute(f"set {setting}".encode())
    for call in CALLS.strip().splitlines():
        for name, value in given.items():
            call = call.replace(f"{{{name}}}", f"'{value}'")
        found = []
        for each in (db, conn):
            each.execute("begin")
            found.append(each.execute(call.encode()).fetchall())
            each.execute("rollback")
        assert found[0] == found[1], call
        assert found[0]
