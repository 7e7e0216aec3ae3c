"""Providers: their settings, the names of their secrets and their routes. No secret is read, accepted or shown here."""

from starlette.responses import Response

from tallybook.extra.dashboard.database import rows
from tallybook.extra.dashboard.view import Act, Pages, View

pages = Pages()
_PAGE = 100
_PROVIDERS = """\
select p.name, p.kind, p.active, p.created_at, p.changed_at,
       (select count(*) from (
          select from tallybook.provider_routes as r where r.provider = p.name limit 1000) as x) as routes,
       (select json_agg(json_build_object('field', x.field, 'slot', x.slot, 'set_at', x.set_at)) from (
          select f.field, f.slot, f.set_at from tallybook.provider_field as f where f.provider = p.name
           order by f.field, f.slot limit 50) as x) as secrets
  from tallybook.providers as p
 where position(lower(%(part)s) in lower(p.name)) > 0 and p.name > %(after)s
 order by p.name limit %(most)s"""
_ROUTES = """\
select r.data_type, r.symbol, r.provider, r.active, r.in_force from tallybook.provider_routes as r
 where (position(lower(%(part)s) in lower(r.provider)) > 0 or position(lower(%(part)s) in lower(r.data_type)) > 0)
   and (r.data_type, coalesce(r.symbol, '')) > (%(data_type)s, %(symbol)s)
 order by r.data_type, coalesce(r.symbol, '') limit %(most)s"""


@pages.page("/providers")
async def providers(view: View) -> Response:
    part, after = view.asked("q"), view.asked("after")
    # The first route of a kind of data is the general one, whose symbol is empty here.
    data_type, symbol = view.asked("data_type"), view.asked("symbol")
    async with view.read() as conn:
        found = await rows(conn, _PROVIDERS, part=part, after=after, most=_PAGE + 1)
        routes = await rows(conn, _ROUTES, part=part, data_type=data_type, symbol=symbol, most=_PAGE + 1)
    return view.render(
        "providers.html", providers=found[:_PAGE], more=len(found) > _PAGE, routes=routes[:_PAGE],
        more_routes=len(routes) > _PAGE, part=part, after=after, data_type=data_type, symbol=symbol,
    )  # fmt: skip


@pages.action("/provider/active")
async def active(act: Act) -> str:
    name, wanted = act.form("name"), act.form("active") == "yes"
    done = await act.app.providers.set(name, active=wanted, conn=act.conn)
    await act.audit("provider.set", {"provider": name, "active": wanted}, {"provider": done}, changed=done)
    return f"Provider {name} is {'active' if wanted else 'no longer active'}."


@pages.action("/provider/route/drop")
async def route_drop(act: Act) -> str:
    data_type, symbol = act.form("data_type"), act.form("symbol") or None
    done = await act.app.providers.drop_route(data_type, symbol=symbol, conn=act.conn)
    await act.audit("route.drop", {"data_type": data_type, "symbol": symbol}, {"dropped": done}, changed=done)
    what = f"{data_type} for {symbol}" if symbol else f"{data_type} for all symbols"
    return f"The route of {what} is dropped." if done else f"There is no route of {what}."
