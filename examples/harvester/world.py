"""The outside: a site of many pages, each generated from its number, and its HTTP server.

    python -m examples.harvester.world PORT PAGES

Most pages answer in some 50 ms, some take a second. Some fail with 503 once or twice, a few always fail with 500, and
some are gone. A twentieth of them change from day to day. `POST /day` starts the next day; `GET /record` returns what
the server has answered. The server is small and fast, so that the run measures the crawler.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sys
from collections import Counter, defaultdict, deque
from functools import cached_property

DAY = 86_400
_WANTED = re.compile(rb"^(GET|POST) (\S+) ")
_ETAG = re.compile(rb"\r\nif-none-match: ([^\r]*)\r\n", re.IGNORECASE)


def draw(*words: object) -> float:
    """Return a number in [0, 1) that looks random but depends only on the words."""
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=6).digest()) / 2**48


class Site:
    """The site, computed from its size. Links lead from page 1, its home, to the first `linked` pages."""

    def __init__(self, linked: int) -> None:
        self.linked = linked
        self.pages = linked + linked // 50  # no page links to the last ones

    def is_leaf(self, page: int) -> bool:
        return 4 * page - 2 > self.linked

    def is_gone(self, page: int) -> bool:
        return not 1 <= page <= self.pages or (self.is_leaf(page) and draw("gone", page) < 0.01)

    def is_broken(self, page: int) -> bool:
        return self.is_leaf(page) and not self.is_gone(page) and draw("broken", page) < 0.001

    def is_news(self, page: int) -> bool:
        return draw("news", page) < 0.05

    def links(self, page: int) -> list[int]:
        """Return a page's links: up to four pages below it, the page above it and one of the sections."""
        below = [n for n in range(4 * page - 2, 4 * page + 2) if n <= self.linked]
        return [*below, max(1, (page + 2) // 4), 1 + int(draw("section", page) * self.linked / 20)]

    def items(self, page: int, day: int) -> dict[int, int]:
        """Return the items that this page names, with their prices in cents. Most pages name none."""
        if draw("shop", page) > 0.2:
            return {}
        edition, count = self.edition(page, day), max(1, self.linked // 40)
        return {
            1 + int(draw("item", page, n) * count): 100 + int(draw("cents", page, n, edition) * 9900) for n in range(5)
        }

    def edition(self, page: int, day: int) -> int:
        """Return the page's edition on this day. News change on most days."""
        return 1 + sum(draw("edition", page, d) < 0.7 for d in range(2, day + 1)) if self.is_news(page) else 1

    def etag(self, page: int, day: int) -> str:
        return f'"{page}-{self.edition(page, day)}"'

    def failures(self, page: int, day: int) -> int:
        """Return how often the page fails on this day before it answers."""
        fate = draw("fails", page, day)
        return 2 if fate < 0.01 else 1 if fate < 0.04 else 0

    def delay(self, page: int, day: int) -> float:
        fate = draw("slow", page, day)
        return 1.0 if fate < 0.03 else 0.02 + 0.08 * fate

    def html(self, page: int, day: int) -> str:
        links = "\n".join(f'<li><a href="/page/{n}">page {n}</a></li>' for n in self.links(page))
        items = "\n".join(
            f'<li data-item="{item}" data-cents="{cents}">item {item}, {cents / 100:.2f}</li>'
            for item, cents in self.items(page, day).items()
        )
        return f"<!doctype html>\n<title>Page {page}</title>\n<ul>\n{links}\n</ul>\n<ul>\n{items}\n</ul>\n"

    @cached_property
    def readable(self) -> set[int]:
        """Return all readable pages that links from the home lead to."""
        found, ahead = {1}, deque([1])
        while ahead:
            for page in self.links(ahead.popleft()):
                if page not in found and not self.is_gone(page) and not self.is_broken(page):
                    found.add(page)
                    ahead.append(page)
        return found


class Server:
    """The server's record: reads of each page (200 or 304) by day, all answers, and the most concurrent requests."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.day = 1
        self.asked: Counter[tuple[int, int]] = Counter()
        self.read: dict[int, Counter[int]] = defaultdict(Counter)
        self.answers: Counter[int] = Counter()
        self.under_way = self.most_under_way = 0

    def answer(self, page: int, etag: str) -> tuple[int, str, float]:
        """Return status, body and delay in seconds."""
        site, day = self.site, self.day
        self.asked[day, page] += 1
        status, body = 200, ""
        if site.is_gone(page):
            status = 404
        elif site.is_broken(page):
            status = 500
        elif self.asked[day, page] <= site.failures(page, day):
            status = 503
        elif etag == site.etag(page, day):
            status = 304
        else:
            body = site.html(page, day)
        self.answers[status] += 1
        return status, body, site.delay(page, day)

    def record(self) -> str:
        read = {str(day): pages for day, pages in self.read.items()}
        return json.dumps({"read": read, "answers": self.answers, "most_under_way": self.most_under_way})


class Connection(asyncio.Protocol):
    """One kept-alive connection with one request at a time."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        if b"\r\n\r\n" not in self.received:
            return
        request, self.received = self.received, b""
        wanted = _WANTED.match(request)
        path = wanted[2].decode() if wanted else ""
        server = self.server
        if path == "/day":
            server.day += 1
        if not path.startswith("/page/"):
            self.send(200, server.record() if path == "/record" else "")
            return
        page, etag = int(path.removeprefix("/page/")), _ETAG.search(request)
        status, body, delay = server.answer(page, etag[1].decode() if etag else "")
        server.under_way += 1
        server.most_under_way = max(server.most_under_way, server.under_way)
        asyncio.get_running_loop().call_later(delay, self.served, page, server.day, status, body)

    def served(self, page: int, day: int, status: int, body: str) -> None:
        server = self.server
        server.under_way -= 1
        if status in (200, 304) and not self.transport.is_closing():
            server.read[day][page] += 1
        age = DAY if server.site.is_news(page) else 7 * DAY
        self.send(
            status, body, f"ETag: {server.site.etag(page, day)}\r\nCache-Control: max-age={age}\r\n"
            f"X-Request-Id: {page}-{server.asked[day, page]}\r\n",
        )  # fmt: skip

    def send(self, status: int, body: str, more: str = "") -> None:
        content = body.encode()
        head = f"HTTP/1.1 {status} .\r\nContent-Type: text/html\r\nContent-Length: {len(content)}\r\n{more}\r\n"
        self.transport.write(head.encode() + content)


async def main(port: int, pages: int) -> None:
    """Serve until the process is stopped."""
    server = Server(Site(pages))
    listening = await asyncio.get_running_loop().create_server(
        lambda: Connection(server), "127.0.0.1", port, backlog=256
    )
    await listening.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
