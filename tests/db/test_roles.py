"""Roles: the rights to every function, view and table, checked against PostgreSQL's catalog."""

import re

import psycopg
import pytest
from psycopg import sql

from support.roles import Connection, House, house, refused
from tallybook._db import migrate, roles

pytestmark = pytest.mark.direct("logins of their own")


def functions(at: House) -> list[tuple[str, str, bool, list[str] | None, str]]:
    """Name, signature, security definer, settings and text of every function of the schema."""
    return at.db.execute(
        "select proname, oid::regprocedure::text, prosecdef, proconfig, prosrc from pg_proc"
        " where pronamespace = 'tallybook'::regnamespace and prokind in ('f', 'p')"
    ).fetchall()


def rights(db: Connection) -> list[tuple[str, str, set[str], str | None]]:
    return [
        (a, b, set(c), d) for a, b, c, d in db.execute("select kind, name, roles, columns from tallybook._rights()")
    ]


# --- the exact list ---------------------------------------------------------------------------------------------------


def test_every_public_name_is_in_the_list(at: House) -> None:
    """A function or view without a `-- rights:` line fails here; so does a duplicate or misplaced line."""
    called = {name for name, *_ in functions(at)}
    views = {
        row[0]
        for row in at.db.execute(
            "select relname from pg_class where relnamespace = 'tallybook'::regnamespace and relkind = 'v'"
        )
    }
    listed = rights(at.db)
    assert {role for _, _, given, _ in listed for role in given} == set(roles.KINDS)
    of_functions = {name for kind, name, *_ in listed if kind in ("definer", "caller")}
    of_views = {name for kind, name, *_ in listed if kind == "view"}
    public = {name for name in called | views if not name.startswith("_")}
    unlisted = sorted(public - of_functions - of_views)
    assert not unlisted, f"say who may use {', '.join(unlisted)}: a line `-- rights: ...` above each"
    lines = "".join(text for _, text in migrate.routines()).count("\n-- rights: ")
    assert lines == len(of_functions | of_views), "a line that is not right above what it is about, or one twice"
    assert len([name for kind, name, *_ in listed if kind in ("definer", "caller")]) == len(of_functions), (
        "a line twice"
    )


def test_every_role_may_call_exactly_its_functions(at: House) -> None:
    """For each role and function PostgreSQL allows exactly what the list says; PUBLIC may call nothing."""
    allowed = {name: roles for kind, name, roles, _ in rights(at.db) if kind in ("definer", "caller")}
    wrong = []
    for name, call, *_ in functions(at):
        for kind in roles.KINDS:
            found = at.db.execute(
                "select has_function_privilege(%s, %s, 'execute')", [at.prefix + kind, call]
            ).fetchone()
            if found != (kind in allowed.get(name, set()),):
                wrong.append(f"{kind}: {call} is {found}")
        nobody = at.db.execute("select has_function_privilege('public', %s, 'execute')", [call]).fetchone()
        if nobody != (False,):
            wrong.append(f"everybody may call {call}")
    assert not wrong, "\n".join(wrong)


def test_no_role_has_a_right_to_a_table(at: House) -> None:
    """Only the owner has rights to tables; of views each role reads exactly the listed columns, and writes none."""
    expected = {(kind, name): columns for what, name, who, columns in rights(at.db) if what == "view" for kind in who}
    wrong = []
    for table, kind_of, oid in at.db.execute(
        "select relname, relkind, oid from pg_class"
        " where relnamespace = 'tallybook'::regnamespace and relkind in ('r', 'p', 'v', 'm', 'f')"
    ).fetchall():
        columns = [
            row[0]
            for row in at.db.execute(
                "select attname from pg_attribute where attrelid = %s and attnum > 0 and not attisdropped", [oid]
            )
        ]
        for kind in roles.KINDS:
            role = at.prefix + kind
            read = {
                column
                for column in columns
                if at.db.execute(
                    "select has_column_privilege(%s, %s::oid, %s, 'select')", [role, oid, column]
                ).fetchone()
                == (True,)
            }
            listed = expected.get((kind, table), "") if kind_of == "v" else ""
            wanted = set(columns) if listed is None else {word.strip() for word in listed.split(",")} - {""}
            if read != wanted:
                wrong.append(f"{kind} reads of {table}: {sorted(read ^ wanted)} differ")
            written = at.db.execute(
                "select has_table_privilege(%s, %s::oid, 'insert, update, delete, truncate, references, trigger')"
                " or has_any_column_privilege(%s, %s::oid, 'insert, update, references')",
                [role, oid, role, oid],
            ).fetchone()
            if written != (False,):
                wrong.append(f"{kind} writes {table}")
    assert not wrong, "\n".join(wrong)


def test_readers_get_no_payload(at: House) -> None:
    """No column with args, results or errors is readable by reader, metrics or producer."""
    payload = {
        "args", "headers", "options", "result", "error", "errors", "last_error", "message", "details", "summary",
        "reason", "query", "progress_message", "unique_key", "order_key", "subject", "definition",
    }  # fmt: skip
    for kind, name, who, columns in rights(at.db):
        if (
            kind == "view"
            and who & {"reader", "metrics", "producer"}
            and name
            not in (
                "queues",
                "queue_stats",
                "queue_status",
                "workers",
                "services",
                "retentions",
                "installed",
                "rate",
                "rate_calls",
                "concurrency",
                "fair",
                "breaker",
                "provider_field",
                "provider_routes",
                "nodes",
                "node_pins",
            )
        ):
            assert columns is not None and not payload & {word.strip() for word in columns.split(",")}, name


def test_sequences_and_schema(at: House) -> None:
    """Roles may use the schema but create nothing in it, and have no right to a sequence."""
    for kind in roles.KINDS:
        role = at.prefix + kind
        assert at.db.execute(
            "select has_schema_privilege(%s, 'tallybook', 'usage'), has_schema_privilege(%s, 'tallybook', 'create')",
            [role, role],
        ).fetchone() == (True, False)
        found = at.db.execute(
            "select relname from pg_class where relnamespace = 'tallybook'::regnamespace"
            " and case when relkind = 'S' then has_sequence_privilege(%s, oid, 'usage, select, update') end",
            [role],
        ).fetchall()
        assert found == []


BATCH = "select tallybook._enqueue_batch('mail', 'send', %s, %s, %s::jsonb[], %s, %s, %s, null, %s::jsonb, now())"


def test_a_worker_cannot_choose_the_id_of_a_job(at: House) -> None:
    """S11: jobs of a batch get their ids from the sequence, whatever numbers a worker passes, on every call."""
    at.db.execute("select tallybook.enqueue('mail', 'send')")
    worker = at.as_("worker")
    for _ in range(2):
        made = worker.execute(
            BATCH, ([1, 1, 1], [None] * 3, ["{}"] * 3, [None, None, "2999-01-01"], [2, 2, 2], None, None)
        )
        assert made.fetchone() == (3,)
    ids = [row[0] for row in at.db.execute("select id from tallybook.job order by id")]
    assert ids == list(range(1, 8))


@pytest.mark.parametrize(
    ("attempts", "options", "text"),
    [(0, None, "max_attempts"), (None, '{"subject": "a"}', "no subject"), (None, '{"limits": []}', "limits")],
)
def test_a_worker_cannot_pass_a_batch_what_enqueue_refuses(
    at: House, attempts: int | None, options: str | None, text: str
) -> None:
    """S11: options and numbers that no job may have are refused in a direct call of the batch, too."""
    with pytest.raises(psycopg.Error, match=text):
        at.as_("worker").execute(BATCH, ([1], [None], ["{}"], [None], [2], attempts, options))


# --- definers ---------------------------------------------------------------------------------------------------------


def test_definers_are_hardened(at: House) -> None:
    """Every function with the owner's rights has search_path = pg_catalog, pg_temp; no other has either."""
    kinds = {name: kind for kind, name, who, _ in rights(at.db) if kind in ("definer", "caller") and who}
    for name, call, definer, config, _ in functions(at):
        path = [line for line in config or [] if line.startswith("search_path")]
        assert definer == (kinds.get(name) == "definer"), call
        assert path == (["search_path=pg_catalog, pg_temp"] if definer else []), call


# They execute statements on our own partitions, named by the catalog: prune creates, locks and empties these.
OUR_TABLES = {
    "_prune_range", "_range_count", "_range_foreign", "_range_lock", "_range_merge", "_range_split", "_range_young",
}  # fmt: skip


def test_what_executes_statements_over_our_tables_takes_no_text(at: House) -> None:
    """S11: prune's functions that execute statements take bounds, tables, times and a letter, but no text or name."""
    types = {'"char"', "interval", "numeric", "regclass[]", "timestamp with time zone", "tallybook.history_range"}
    found = at.db.execute(
        "select p.proname, array(select format_type(t, null) from unnest(p.proargtypes) t) from pg_proc p"
        " where p.pronamespace = 'tallybook'::regnamespace and p.proname = any (%s)",
        [sorted(OUR_TABLES)],
    ).fetchall()
    assert {name for name, _ in found} == OUR_TABLES
    assert {one for _, taken in found for one in taken} <= types


def test_a_worker_prunes_without_rights_to_tables(at: House) -> None:
    """S3-21, S11: prune creates ranges with the owner's rights: a worker may run it, and the owner owns them."""
    at.db.execute("select tallybook.enqueue('q', 'work')")
    worker = at.as_("worker")
    for days in (0, 1):
        for _ in range(30):
            row = worker.execute(
                "select again from tallybook.prune(clock_timestamp() + make_interval(days => %s))", [days]
            ).fetchone()
            if row == (False,):
                break
    found = at.db.execute(
        "select count(*), bool_and(c.relowner = p.relowner) from pg_inherits i join pg_class c on c.oid = i.inhrelid"
        " join pg_class p on p.oid = i.inhparent where i.inhparent = 'tallybook.entry_default'::regclass"
    ).fetchone()
    assert found == (2, True)


def test_definers_execute_no_text(at: House) -> None:
    """S11: no function with the owner's rights reaches, by any calls, one that executes a text."""
    texts: dict[str, str] = {}
    for name, _, _, _, source in functions(at):
        texts[name] = texts.get(name, "") + re.sub(r"--[^\n]*", "", source)
    reach = {name: set(re.findall(r"tallybook\.(\w+)\s*\(", text)) & set(texts) for name, text in texts.items()}
    # "execute function" names the function of a trigger: no text.
    dynamic = {name for name, text in texts.items() if re.search(r"(?i)\bexecute\b(?! function\b)", text)}
    assert {"enqueue_from", "_query_read"} <= dynamic  # else this checks nothing
    for name in {name for name, _, definer, *_ in functions(at) if definer}:
        seen, todo = set(), [name]
        while todo:
            one = todo.pop()
            if one not in seen:
                seen.add(one)
                todo += reach[one]
        assert not seen & dynamic - OUR_TABLES, f"{name} has the owner's rights and reaches {seen & dynamic}"
    for _, call, definer, *_ in functions(at):
        assert not definer or not re.search(r"\breg\w+\b", call), f"{call} takes the name of a thing in the database"


HIJACKED = "plpgsql as $$ begin raise exception 'hijacked as %', current_user; end $$"
BUILT_IN = {
    "octet_length(text)": "int", "jsonb_build_object(variadic text[])": "jsonb", "nextval(text)": "bigint",
    "hashtext(text)": "int", "cardinality(anyarray)": "int", "now()": "timestamptz", "clock_timestamp()": "timestamptz",
    "pg_current_snapshot()": "pg_snapshot",
}  # fmt: skip


RUN = """
select tallybook.enqueue('q', 't', '{"a": 1}', unique_key => 'k', order_key => 'o', @now);
select tallybook.enqueue_many('{q,q}', '{t,t}', array['{}', '{}'], @now);
select tallybook.enqueue('q', 't', run_at => pg_catalog.clock_timestamp() + '1 h'::interval, @now);
select tallybook.worker_start('w', '{q}', '{t}', @now);
select tallybook.claim(1, '{q}', '{10}', '7c9e6679-7425-40de-944b-e07fc1f90ae7', @now);
select tallybook.claimed_jobs('7c9e6679-7425-40de-944b-e07fc1f90ae7', @now);
select tallybook.admit('{7c9e6679-7425-40de-944b-e07fc1f90ae7}', '{1}', '{1}', @now);
select tallybook.order_admit('{7c9e6679-7425-40de-944b-e07fc1f90ae7}', '{1}', '{1}', @now);
select tallybook.complete_many('{7c9e6679-7425-40de-944b-e07fc1f90ae7}', '{1}', '{1}', @now);
select tallybook.fail('7c9e6679-7425-40de-944b-e07fc1f90ae7', 2, 1, '{"message": "x"}', @now);
select tallybook.promote(@now);
select tallybook.rescue(@now);
select tallybook.rebase(@now);
select tallybook.services_due(@now);
select tallybook.schedule_set('s', 't', every => '1 h', @now);
select tallybook.schedule_run('s', @now);
select tallybook.cancel(4, @now);
select tallybook.retry(4, @now);
select tallybook.dead_letters();
select tallybook.backlog();
select tallybook.fold(@now);
select tallybook.counts();
select tallybook.throughput(@now);
select tallybook.timings(@now);
select tallybook.levels(@now);
select tallybook.count_event('e');
select tallybook.event_set('e', 3);
select tallybook.event_series('e', @now);
select tallybook.recount(@now);
select tallybook.verify();
select id, state, args from tallybook.job order by id using operator(pg_catalog.<);
""".replace("@now", "at => pg_catalog.clock_timestamp()")


def hostile(at: House) -> Connection:
    """A session whose search_path starts with a schema of fake operators and built-ins, and temporary tables."""
    name = at.prefix + "hostile"
    made = [f"create schema {name}", f"grant usage on schema {name} to public"]
    for kind in ("bigint", "text", "int", "uuid"):
        made += [
            f"create function {name}.eq({kind}, {kind}) returns boolean language {HIJACKED}",
            f"create operator {name}.= (function = {name}.eq, leftarg = {kind}, rightarg = {kind})",
        ]
    made += [f"create function {name}.{call} returns {of} language {HIJACKED}" for call, of in BUILT_IN.items()]
    at.db.execute(";\n".join(made).encode())
    user = at.user("producer")
    for kind in ("worker", "operator"):
        at.db.execute(sql.SQL("grant {} to {}").format(sql.Identifier(at.prefix + kind), sql.Identifier(user)))
    conn = at.connect(user)
    for table in ("entry", "lane", "pg_class", "pg_proc"):
        conn.execute(sql.SQL("create temp table {} (x int)").format(sql.Identifier(table)))
    conn.execute(sql.SQL("set search_path = {}, pg_temp, pg_catalog").format(sql.Identifier(name)))
    return conn


def test_a_hostile_search_path_has_no_effect(at: House) -> None:
    """S10: operators, built-ins and temporary tables before pg_catalog in the caller's search_path change nothing."""
    conn = hostile(at)
    for statement in filter(None, RUN.split(";\n")):
        conn.execute(statement.encode())
    assert conn.execute("select state from tallybook.job where id operator(pg_catalog.=) 1").fetchone() == (
        "completed",
    )


def test_control_without_the_search_path_it_has(at: House) -> None:
    """Negative control: with the owner's rights and the caller's search_path, the caller's code runs as the owner."""
    conn = hostile(at)
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        conn.execute("table tallybook.entry")
    for _, call, definer, *_ in functions(at):
        if definer:
            at.db.execute(f"alter function {call} reset search_path".encode())
    wrong = []
    for statement in filter(None, RUN.split(";\n")):
        try:
            conn.execute(statement.encode())
        except psycopg.Error as error:
            wrong.append(str(error))
    assert any(f"hijacked as {at.owner}" in text for text in wrong), wrong


@pytest.mark.parametrize("of", ["text", "name"])
def test_an_owner_runs_no_code_of_others(empty_dsn: str, of: str) -> None:
    """S11: the migration, the roles and their scripts run no function that others have put into the search_path."""
    with psycopg.connect(empty_dsn, autocommit=True) as other:
        for takes in ("text", f"text, {of}", f"text, {of}, text"):
            other.execute(f"create function public.format({takes}) returns text language {HIJACKED}".encode())
        with house(empty_dsn) as made:
            made.give()
            made.db.execute("update tallybook.installation set routines = 'other'")
            assert migrate.migrate(made.db) == ["functions and views"]
            made.db.execute(roles.script(made.prefix, existing=True).encode())
            roles.forget(made.db)
            assert migrate.uninstall(made.db)
            made.db.execute(migrate.script().encode())
            with pytest.raises(psycopg.Error, match="hijacked"):  # else nothing was in the way
                made.db.execute(f"select format('%s'::text, 'x'::{of})".encode())


# --- what each may, and may not, by doing it --------------------------------------------------------------------------


def test_producer(at: House) -> None:
    """S10: a producer may enqueue and read the state of an id that it knows; it may not read, cancel or claim jobs."""
    conn = at.as_("producer")
    (job,) = conn.execute("""select tallybook.enqueue('q', 't', '{"secret": 1}')""").fetchone() or ()
    assert conn.execute("select tallybook.state(%s)", [job]).fetchone() == ("available",)
    assert conn.execute("select tallybook.state(4711)").fetchone() == (None,)
    refused(
        conn, "select id from tallybook.job", "select * from tallybook.entry", f"select tallybook.cancel({job})",
        f"select tallybook.result({job})", "select tallybook.dead_letters()",
        "insert into tallybook.queue (name) values ('x')", "select tallybook.worker_start('w', '{q}')",
        "select setval('tallybook.job_id', 1)", "select tallybook.enqueue_from('select 1', 'q', 't')",
        "select tallybook._roles_apply()",
    )  # fmt: skip


def test_no_session_is_left_out_of_the_counters(at: House) -> None:
    """S11: no setting of a producer's session keeps the counters from its changes."""
    conn = at.as_("producer")
    conn.execute("set tallybook.counting = 'off'")
    for queue in ("q", "other"):
        conn.execute(f"select tallybook.subject_upsert('{queue}', 't', 's', run_at => now() + '1 day')".encode())
    assert at.db.execute("select queue, scheduled from tallybook.counts() where scheduled <> 0").fetchall() == [
        ("other", 1)
    ]
    assert at.db.execute("select * from tallybook.verify()").fetchall() == []


def test_operator(at: House) -> None:
    """S10: an operator may read args, cancel, retry, pause and manage schedules, but neither enqueue nor claim."""
    at.db.execute("""select tallybook.enqueue('q', 't', '{"a": 1}')""")
    conn = at.as_("operator")
    assert conn.execute("select args from tallybook.job").fetchone() == ({"a": 1},)
    assert conn.execute("select tallybook.cancel(1)").fetchone() == ("cancelled",)
    assert conn.execute("select tallybook.retry(1)").fetchone() is not None
    assert conn.execute("select tallybook.pause('q')").fetchone() == (True,)
    who = conn.execute("select paused_by from tallybook.queues").fetchone()
    assert who == (conn.info.user,)  # not the owner, whose rights the function has
    assert conn.execute("select tallybook.schedule_set('s', 't', every => '1 h')").fetchone() == ("created",)
    assert conn.execute("select what from tallybook.schedule_run('s')").fetchone() == ("enqueued",)
    refused(
        conn, "select tallybook.enqueue('q', 't')", "select tallybook.claim(1, '{q}', '{1}', gen_random_uuid())",
        "delete from tallybook.dead", "select * from tallybook.dead",
        "update tallybook.schedules set query = 'select 1'",
    )  # fmt: skip


def test_a_query_never_runs_with_more_rights_than_its_caller(at: House) -> None:
    """S11: an operator may neither set a query, which workers would run, nor run one; a worker runs it as itself."""
    at.db.execute("create table secret (x int)")
    at.db.execute(
        "select tallybook.schedule_set('s', 't', every => '1 h',"
        " query => 'select to_jsonb(s) as args from public.secret s')"
    )
    query = "select jsonb_build_object(''who'', current_user::text) as args"
    operator = at.as_("operator")
    refused(
        operator, f"select tallybook.schedule_set('p', 't', every => '1 h', query => '{query}')",
        "select tallybook.schedule_run('s')", f"select tallybook.enqueue_from('{query}', 'q', 't')",
    )  # fmt: skip
    worker = at.as_("worker")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="secret"):
        worker.execute("select tallybook.enqueue_from('select to_jsonb(s) as args from public.secret s', 'q', 't')")
    worker.execute(f"select tallybook.enqueue_from('{query}', 'q', 't')".encode())
    assert at.db.execute("select args from tallybook.job").fetchone() == ({"who": worker.info.user},)


def test_control_a_query_with_the_owners_rights(at: House) -> None:
    """Negative control: if the function around a query were a definer, its caller could read the owner's tables."""
    at.db.execute("create table secret (x int); insert into secret values (42)")
    call = "enqueue_from(text, text, text, int, int, jsonb, jsonb, timestamptz)"
    at.db.execute(f"alter function tallybook.{call} security definer".encode())
    query = "select to_jsonb(s) as args from public.secret s"
    at.as_("worker").execute(f"select tallybook.enqueue_from('{query}', 'q', 't')".encode())
    assert at.db.execute("select args from tallybook.job").fetchone() == ({"x": 42},)


def test_reader_and_metrics(at: House) -> None:
    """S10: a reader sees jobs without args and errors; metrics get numbers and nothing else."""
    at.db.execute("""select tallybook.enqueue('q', 't', '{"a": 1}')""")
    reader, metrics = at.as_("reader"), at.as_("metrics")
    assert reader.execute("select id, queue, state, attempts from tallybook.job").fetchone() == (1, "q", "available", 0)
    assert reader.execute("select job_id, state from tallybook.attempt").fetchone() == (1, "available")
    # No lease: a function that a view calls may be called by its readers, with any arguments.
    taken = reader.execute(
        "select format_type(t, null) from pg_proc p, unnest(p.proallargtypes) t"
        " where p.pronamespace = 'tallybook'::regnamespace and has_function_privilege(p.oid, 'execute')"
    ).fetchall()
    assert ("bigint",) in taken and ("uuid",) not in taken
    refused(
        reader, "select args from tallybook.job", "select * from tallybook.job", "select summary from tallybook.job",
        "select error from tallybook.attempt", "select message from tallybook.error", "select tallybook.result(1)",
    )  # fmt: skip
    for view in ("queues", "workers", "services", "installed"):
        reader.execute(f"table tallybook.{view}".encode())
    for conn in (reader, metrics):
        assert conn.execute("select queue, state, jobs from tallybook.backlog()").fetchall() == [("q", "available", 1)]
        assert conn.execute("select queue, task, available from tallybook.counts()").fetchall() == [("q", "t", 1)]
        for query in (
            "table tallybook.queue_stats", "table tallybook.queue_status", "select tallybook.throughput()",
            "select tallybook.timings()", "select tallybook.levels()", "select tallybook.event_counts()",
        ):  # fmt: skip
            conn.execute(query.encode())
        refused(conn, "select tallybook.recount()", "select tallybook.count_event('e')", "select tallybook.fold()",
                "select tallybook.series_keep(60, '1 h')", "table tallybook.total")  # fmt: skip
    refused(metrics, "select id from tallybook.job", "select tallybook.state(1)", "table tallybook.queues")


def test_what_a_definer_sets_for_the_transaction_stays(at: House) -> None:
    """A function's end resets only its own search_path: a claim still commits asynchronously."""
    conn = at.as_("worker")
    conn.execute("select tallybook.worker_start('w', '{q}')")
    with conn.transaction():
        conn.execute("select tallybook.claim(1, '{q}', '{1}', gen_random_uuid(), durable => false)")
        assert conn.execute("show synchronous_commit").fetchone() == ("off",)
        assert conn.execute("show search_path").fetchone() == ('"$user", public',)
