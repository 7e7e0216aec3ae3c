"""Limits: concurrency limits, rate limits, breakers and fair keys, and the actions that change them."""

from typing import Any

from starlette.responses import Response

from tallybook._db.declared import Declared
from tallybook.extra.dashboard.database import rows
from tallybook.extra.dashboard.view import Act, Pages, View

pages = Pages()
_PAGE = 50
_COUNTED = 1000  # the number at which the database stops counting: it means this many or more
_CONCURRENCY = Declared("""
  concurrency_keys(from_name text, max_keys int)
  -> rows (name rule text, most int, held waiting bigint, source text)""")
_RATES = Declared("""
  rate_keys(from_name text, max_keys int)
  -> rows (name rule text, calls int, per interval, burst int, calls_ever calls_in_window waiting bigint,
           last_call_at next_call_at pushed_to timestamptz, source text)""")
_BREAKERS = Declared("""
  breaker_keys(from_name text, max_keys int)
  -> rows (name rule text, failures int, per open_for interval, state text, failed_in_window bigint,
           changed_at open_until timestamptz, probe waiting bigint, source text)""")
_FAIR = Declared("fair_keys(max_keys int) -> rows (queue text, priority int, fair_key text, waiting bigint)")
_KINDS = {"c": _CONCURRENCY.worker, "r": _RATES.worker, "b": _BREAKERS.worker}


@pages.page("/limits")
async def limits(view: View) -> Response:
    starts = {kind: view.asked(kind) or view.asked("from") for kind in _KINDS}
    found: dict[str, list[dict[str, Any]]] = {}
    async with view.read() as conn:
        for kind, query in _KINDS.items():
            found[kind] = await rows(conn, query, starts[kind], _PAGE + 1)
        fair = await rows(conn, _FAIR.worker, _PAGE + 1)
    following = {kind: _following(keys, kind) for kind, keys in found.items()}
    return view.render(
        "limits.html", concurrency=found["c"][:_PAGE], rates=found["r"][:_PAGE], breakers=found["b"][:_PAGE],
        fair=fair[:_PAGE], more_fair=len(fair) > _PAGE, starts=starts, following=following, counted=_COUNTED,
    )  # fmt: skip


def _following(keys: list[dict[str, Any]], kind: str) -> str | None:
    """Return the first key of the next page: the key after this page, or the last one that was read."""
    if len(keys) > _PAGE:
        return str(keys[_PAGE]["name"])
    if not keys:
        return None
    last, of_kind = keys[-1], {"c": "held", "r": "calls_in_window", "b": "failed_in_window"}[kind]
    used = last[of_kind] or last["waiting"] or last.get("pushed_to") or last.get("state", "closed") != "closed"
    return None if used or last["source"] is not None else str(keys.pop()["name"])


@pages.action("/limit/breaker/close")
async def breaker_close(act: Act) -> str:
    name = act.form("name")
    done = await act.app.breakers.close(name).on(act.conn)
    await act.audit("breaker.close", {"breaker": name}, {"closed": done})
    return f"Breaker {name} is closed." if done else f"Breaker {name} was already closed."


pages.form(
    "/limit/rate/push", "rate_limit.push", lambda app, name, _, wait: app.rate_limits.push(name, wait), "next_call_at",
    ("No call of {} starts before {:%Y-%m-%d %H:%M:%S} UTC.",), target="limit", wait=Act.form,
)  # fmt: skip
pages.form(
    "/limit/breaker/open", "breaker.open", lambda app, name, _, duration: app.breakers.open(name, duration),
    "open_until", ("Breaker {} is open until {:%Y-%m-%d %H:%M:%S} UTC.",),
    duration=lambda act, field: act.form(field) or None,
)  # fmt: skip
pages.form(
    "/limit/concurrency/set", "concurrency_limit.set",
    lambda app, name, _, most: app.concurrency_limits.set(name, most), "limit",
    ("Concurrency limit {} is {}: at most {most} at the same time.",), target="limit", most=Act.whole,
)  # fmt: skip
pages.form(
    "/limit/rate/set", "rate_limit.set",
    lambda app, name, _, calls, per, burst: app.rate_limits.set(name, calls, per=per, burst=burst), "limit",
    ("Rate limit {} is {}: {calls} in {per}.",), target="limit", calls=Act.whole, per=Act.form,
    burst=lambda act, field: act.whole(field) if act.form(field) else 1,
)  # fmt: skip
pages.form(
    "/limit/breaker/set", "breaker.set",
    lambda app, name, _, failures, per, open_for: app.breakers.set(name, failures, per=per, open_for=open_for),
    "breaker", ("Breaker {} is {}: {failures} failures in {per} open it for {open_for}.",),
    failures=Act.whole, per=Act.form, open_for=Act.form,
)  # fmt: skip
pages.form(
    "/limit/concurrency/drop", "concurrency_limit.drop", lambda app, name, _: app.concurrency_limits.drop(name),
    "dropped", ("Concurrency limit {} is dropped.", "There is no concurrency limit {}."), target="limit",
)  # fmt: skip
pages.form(
    "/limit/rate/drop", "rate_limit.drop", lambda app, name, _: app.rate_limits.drop(name), "dropped",
    ("Rate limit {} is dropped.", "There is no rate limit {}."), target="limit",
)  # fmt: skip
pages.form(
    "/limit/breaker/drop", "breaker.drop", lambda app, name, _: app.breakers.drop(name), "dropped",
    ("Breaker {} is dropped.", "There is no breaker {}."),
)  # fmt: skip
