"""The verbs over subjects for producers, as pure values."""

from collections.abc import Sequence
from functools import partial

from tallybook._db.calls import PLURALS, RUN_AT, common
from tallybook._db.declared import Call, Declared, Simple
from tallybook._db.texts import loads, record, text_array
from tallybook._model.options import Options
from tallybook._model.subject import SubjectCall, SubjectInfo, SubjectReport

_JOB = "priority int, max_attempts int, headers jsonb, options jsonb"
_NAMED = f"queue text, task text, subject text, args jsonb, run_at timestamptz, {_JOB}"
_MOVED = "report text, old_run_at timestamptz, new_run_at timestamptz"
_PUSH = Declared(f"subject_push({_NAMED}) -> row (job_id bigint, created boolean)", run_at=RUN_AT)
_UPSERT = Declared(f"subject_upsert({_NAMED}) -> row (job_id bigint, {_MOVED})", run_at=RUN_AT)
_APPEND = Declared(f"subject_append(queue text, task text, args jsonb, {_JOB}) -> row (job_id bigint, subject text)")
_PLURALS = """\
queue text, task text, subjects text[], args text[], run_ats timestamptz[], priorities int[], options text[],
max_attempts int, headers text[]"""
_PUSH_MANY = Declared(f"subject_push_many({_PLURALS}) -> rows (subject text, job_id bigint, {_MOVED})")
_UPSERT_MANY = Declared(f"subject_upsert_many({_PLURALS}) -> rows (subject text, job_id bigint, {_MOVED})")
move = Simple("subject_move(task text, subject text, run_at timestamptz, queue text) -> text", str)
forget = Simple("subject_forget(task text, subject text, queue text) -> text", str)
"""Without a queue: of any queue that has the name."""

# One call per queue, task and limit, all in one statement; its rows are in the order of its subjects.
_MANY = """\
select cast(coalesce(json_agg(json_build_object('n', g.ns[u.n], 'subject', u.subject, 'job_id', u.job_id,
    'report', u.report, 'old_run_at', u.old_run_at, 'new_run_at', u.new_run_at)), '[]') as text)
  from (
    select r.queue, r.task, r.max_attempts, array_agg(r.n order by r.n) as ns,
           array_agg(r.subject order by r.n) as subjects, array_agg(r.args order by r.n) as args,
           array_agg(r.priority order by r.n) as priorities, array_agg(r.options order by r.n) as options,
           array_agg(r.headers order by r.n) as headers,
           array_agg(coalesce(r.run_at, clock_timestamp() + r.delay) order by r.n) as run_ats
      from unnest(cast(cast(%(queues)s as text) as text[]), cast(cast(%(tasks)s as text) as text[]),
                  cast(cast(%(subjects)s as text) as text[]), cast(cast(%(args)s as text) as text[]),
                  cast(cast(%(run_ats)s as text) as timestamptz[]), cast(cast(%(delays)s as text) as interval[]),
                  cast(cast(%(priorities)s as text) as int[]), cast(cast(%(options)s as text) as text[]),
                  cast(cast(%(max_attempts)s as text) as int[]), cast(cast(%(headers)s as text) as text[]))
             with ordinality
             as r(queue, task, subject, args, run_at, delay, priority, options, max_attempts, headers, n)
     group by r.queue, r.task, r.max_attempts order by r.queue, r.task, r.max_attempts offset 0) as g
  cross join lateral {called}
    with ordinality as u(subject, job_id, report, old_run_at, new_run_at, n)"""

_MEANT = Declared("_subject_named(p_task text, p_subject text, p_queue text) -> tallybook.subject_job")
NAMED = f"""\
{_MEANT.called()} as n
 cross join lateral (
   select v.* from tallybook.subject as v
    where v.task = n.task and v.subject = n.subject and v.scope = n.scope limit 1) as s"""  # noqa: S608
"""The row of the view subject, as s. Without a queue, of any queue that has the name; an error if several have it."""
_GET = f"select cast(to_json(s) as text) from {NAMED}"  # noqa: S608


def push(call: SubjectCall) -> Call[SubjectReport]:
    return _PUSH.call(partial(_pushed, call.name), **_params(call))


def upsert(call: SubjectCall) -> Call[SubjectReport]:
    return _UPSERT.call(lambda found: record(SubjectReport, {"subject": call.name, **loads(found)}), **_params(call))


def append(task: str, args: str, options: Options) -> Call[SubjectReport]:
    params = {"task": task, "args": args, "options": options.options_text, **common(options)}
    del params["run_at"], params["delay"]
    return _APPEND.call(partial(_pushed, ""), **params)


def push_many(calls: Sequence[SubjectCall]) -> Call[list[SubjectReport]]:
    return Call("subject_push_many", _many(_PUSH_MANY), _columns(calls), _reports)


def upsert_many(calls: Sequence[SubjectCall]) -> Call[list[SubjectReport]]:
    return Call("subject_upsert_many", _many(_UPSERT_MANY), _columns(calls), _reports)


def _many(verb: Declared) -> str:
    return _MANY.replace("{called}", verb.called(**{name: f"g.{name}" for name in verb.params}))


def get(task: str, name: str, queue: str | None) -> Call[SubjectInfo | None]:
    """Return the subject that a push into this queue would affect; None: of any queue that has the name."""
    return Call("subject", _GET, {"task": task, "subject": name, "queue": queue}, _info)


def _params(call: SubjectCall) -> dict[str, str | None]:
    own = {"task": call.task, "subject": call.name, "args": call.args, "options": call.options.options_text}
    return {**own, **common(call.options)}


def _columns(calls: Sequence[SubjectCall]) -> dict[str, str | None]:
    rows = [_params(call) for call in calls]
    return {PLURALS.get(name, f"{name}s"): text_array([row[name] for row in rows]) for name in rows[0]}


def _pushed(name: str, found: str) -> SubjectReport:
    row = loads(found)
    report = "created" if row.get("created", True) else "unchanged"
    return SubjectReport(subject=row.get("subject", name), job_id=row["job_id"], report=report)


def _reports(found: str) -> list[SubjectReport]:
    return [record(SubjectReport, row) for row in sorted(loads(found), key=lambda row: row["n"])]


def _info(found: str | None) -> SubjectInfo | None:
    return None if found is None else record(SubjectInfo, loads(found))
