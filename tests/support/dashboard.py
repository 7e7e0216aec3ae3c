"""A visitor of the dashboard without a browser, which keeps cookies, reads pages, follows links and posts forms."""

import html
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
from psycopg import sql
from starlette.routing import Route

from tallybook.extra.dashboard.access import Session
from tallybook.extra.dashboard.site import CSP
from tallybook.extra.dashboard.users import hashed
from tallybook.web import Site

HERE = ("127.0.0.1", 50_000)
_HREF = re.compile(r'<a [^>]*?href="([^"]*)"')
_FORM = re.compile(r'<form method="post" action="([^"]*)"')


@dataclass
class Answer:
    """An answer of the server."""

    status: int
    text: str
    headers: httpx2.Headers

    @property
    def forms(self) -> list[str]:
        """Return the addresses of the forms that change something."""
        return [html.unescape(one) for one in _FORM.findall(self.text)]

    @property
    def links(self) -> list[str]:
        return [html.unescape(one) for one in _HREF.findall(self.text)]


@dataclass
class Visitor:
    """One simulated browser."""

    http: httpx2.AsyncClient
    site: Site
    root: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    async def ask(self, method: str, path: str, **options: Any) -> Answer:
        headers = {**self.headers, **options.pop("headers", {})}
        got = await self.http.request(method, self.root + path, headers=headers, **options)
        return Answer(got.status_code, got.text, got.headers)

    async def get(self, path: str, **headers: str) -> Answer:
        return await self.ask("GET", path, headers=headers)

    @property
    def cookies(self) -> str:
        return "; ".join(f"{one.name}={one.value}" for one in self.http.cookies.jar)

    @property
    def session(self) -> Session:
        """Return the session in the cookie."""
        return self.site.sessions.read(self.cookies, self.http.base_url.netloc.decode())

    async def post(self, path: str, *, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        """Post a form with this session's token, like a browser."""
        if self.session.get("token") is None:
            await self.get("/login")
        if self.session.get("token") is None:
            await self.get("/queues")
        fields.setdefault("token", self.session.get("token") or "")
        return await self.ask("POST", path, data=fields, headers=headers or {})

    async def login(self, name: str, password: str, **fields: str) -> Answer:
        return await self.post("/login", name=name, password=password, **fields)


@asynccontextmanager
async def visiting(
    site: Site,
    *,
    within: Any = None,
    client: tuple[str, int] | None = HERE,
    base: str = "http://localhost",
    root: str = "",
    raises: bool = False,
) -> AsyncIterator[Visitor]:
    """Yield a visitor from the address `client` who uses the URL `base`; `within` mounts the dashboard below `root`.

    Errors of the application are only visible as answers, unless `raises` is set.
    """
    app: Any = within or site
    transport = httpx2.ASGITransport(app=app, client=client, raise_app_exceptions=raises)
    async with httpx2.AsyncClient(transport=transport, base_url=base) as http:
        yield Visitor(http, site, root)


def routes(site: Site, method: str) -> list[str]:
    """Return the paths of all routes with this method."""
    return [one.path for one in site.routes if isinstance(one, Route) and method in (one.methods or ())]


# Routes that are not pages: parts and data of pages, and routes for machines.
NO_PAGES = {
    "/login", "/events", "/series", "/metrics", "/healthz", "/readyz",
    "/jobs/preview/further", "/dead/preview/further", "/maintenance/findings",
}  # fmt: skip


JOBS = 6
"""Number of visited jobs: not all of them have links, errors or actions."""


async def walk(visitor: Visitor, *, most: int = 150) -> dict[str, Answer]:
    """Visit every page that links from the overview lead to, one for each path and set of parameters."""
    found: dict[str, Answer] = {}
    left, seen = ["/"], Counter(["/"])
    while left and len(found) < most:
        address = left.pop(0)
        found[address] = answer = await visitor.get(address)
        for link in answer.links:
            link = link.removeprefix(visitor.root)
            parts = urlsplit(link)
            if parts.netloc or not link.startswith("/"):
                continue
            kind = re.sub(r"\d+", "#", parts.path) + "?" + ",".join(f"{k}" for k in sorted(parse_qs(parts.query)))
            if link not in found and link not in left and seen[kind] < (JOBS if "#" in kind else 1):
                seen[kind] += 1
                left.append(link)
    return found


def covers(path: str, addresses: Any) -> bool:
    """Return whether one of these addresses belongs to this route."""
    pattern = re.compile(re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(path)) + r"(\?.*)?$")
    return any(pattern.match(address) for address in addresses)


PASSWORD = "correct horse battery"
HASH = hashed(PASSWORD)
SECURITY = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
Make = Callable[..., Site]


def users_file(folder: Path, ada: str = HASH, mode: int = 0o600, text: str | None = None) -> Path:
    """Write a file of users: ada may operate, bob may look."""
    path = folder / "users.toml"
    said = f'[users.ada]\npassword = "{ada}"\noperate = true\n[users.bob]\npassword = "{HASH}"\n'
    path.write_text(said if text is None else text)
    path.chmod(mode)
    return path


def contents(db: Any) -> dict[str, Any]:
    """Return all rows of all tables."""
    tables = db.execute(
        "select relname from pg_class where relnamespace = 'tallybook'::regnamespace and relkind in ('r', 'p')"
    ).fetchall()
    query = sql.SQL("select md5(string_agg(t::text, E'\\n' order by t::text)) from {} t")
    return {name: db.execute(query.format(sql.Identifier("tallybook", name))).fetchone() for (name,) in tables}


def audits(db: Any) -> list[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Return the rows of the audit, oldest first."""
    return list(db.execute("select actor, action, target, done from tallybook.audits order by id").fetchall())
