"""The dashboard of several nodes in a real browser: live parts cover all nodes and show when one is away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chromium import DESK, PHONE, Browser, browser, needed
from support.cli import Command
from support.fleet import Fleet
from support.proxy import Proxy
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.direct("opens three databases by their DSNs")]


@pytest.fixture
def look() -> Iterator[Browser]:
    needed()
    with browser() as one:
        yield one


def address(web: Command) -> str:
    web.says("the dashboard is at ")
    return web.output.partition("the dashboard is at ")[2].split()[0].rstrip("/").replace("127.0.0.1", "localhost")


def tile(look: Browser, name: str) -> str:
    """A number of the overview, as it is shown now."""
    return str(look.run(f"return document.querySelector('.tile.{name} strong').textContent"))


def test_what_is_live_over_nodes(fleet: Fleet, look: Browser, tmp_path: Path) -> None:
    """Figures of all nodes update without a reload; an absent node, with its figures' age, is shown until it is back.

    No page complains, on a phone in light or on a desktop in dark.
    """
    with Proxy(fleet.dsns[2]) as proxy:
        nodes = "\n".join(
            f"{name}={dsn}" for name, dsn in zip(("north", "south", "west"), (*fleet.dsns[:2], proxy.dsn), strict=True)
        )
        job = fleet.enqueue(3, "mail")
        words = ("web", "--port", "0", "--nodes", "all", "--operate")
        with Command(tmp_path, *words, dsn=fleet.dsn, TALLYBOOK_NODES=nodes) as web:
            site = address(web)
            look.get(f"{site}/")
            wait_until(lambda: tile(look, "available") == "1", "the job of west is counted")
            fleet.enqueue(2, "mail")
            wait_until(lambda: tile(look, "available") == "2", "that of south is, too, without a reload")
            look.get(f"{site}/job/{job}")
            look.press(look.find("form[action^='/job/cancel'] button"))
            assert f"Job {job} is cancelled." in look.text
            assert fleet.run(3, "select tallybook.state(%s)", job) == [("cancelled",)]
            look.get(f"{site}/")
            proxy.refusing = True
            proxy.cut()
            wait_until(
                lambda: "Node west does not answer" in look.text and "old" in look.text, "the page says so by itself"
            )
            proxy.refusing = False
            wait_until(lambda: "Node west does not answer" not in look.text, "and that it is back")
            for scheme, size in (("light", PHONE), ("dark", DESK)):
                look.scheme(scheme)
                look.size(*size)
                for page in (
                    "/",
                    "/nodes",
                    "/jobs",
                    "/dead",
                    "/queues",
                    "/schedules",
                    "/workers",
                    "/limits?node=south",
                ):
                    look.get(f"{site}{page}")
                    wide = look.run("return document.documentElement.scrollWidth <= window.innerWidth")
                    assert wide, f"{page} is wider than the window"
                    assert look.complaints() == [], page
