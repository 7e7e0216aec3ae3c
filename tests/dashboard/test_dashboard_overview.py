"""The overview and the charts: consistent numbers, tiles that link to what they count, and the doctor's findings."""

import json
import re
from typing import Any

from support.dashboard import Answer, Make, visiting
from support.hands import Hands, put

TILE = re.compile(r'<a class="tile (\w+)" href="([^"]+)">.*?<strong title="([\d,]+)">')
ROWS = re.compile(r'<tr[^>]*>.*?<th scope="row">.*?</tr>', re.S)


def some_of_each(db: Any) -> None:
    """Jobs in several states: two scheduled, one retrying, three available, one running, one dead."""
    for _ in range(2):
        db.execute("select tallybook.enqueue('later', 'note', '{}', run_at => now() + interval '1 hour')")
    hands = Hands(db, "mail")
    for attempts in (5, 1):
        put(db, queue="mail", task="note", max_attempts=attempts)
        (job,) = hands.start()
        hands.fail(job, "1 hour", final=attempts == 1)
    put(db, queue="mail", task="note")
    hands.start()
    for _ in range(3):
        put(db, queue="mail", task="note")


def numbers(page: Answer, queue: str) -> dict[str, str]:
    """The row of a queue, keyed by its table's heads."""
    table = page.text.partition('id="h-queues"')[2]
    heads = re.findall(r"<th[^>]*>([^<]*)</th>", table.partition("</thead>")[0])
    (row,) = [one for one in ROWS.findall(table) if f">{queue}<" in one]
    return dict(zip(heads[1:], re.findall(r'<td class="n[^"]*">([^<]*)</td>', row), strict=False))


async def test_a_tile_leads_to_what_it_counts(make: Make, db: Any) -> None:
    """Each tile of the overview and of a queue links to as many jobs as it shows."""
    some_of_each(db)
    async with visiting(make()) as visitor:
        for address in ("/", "/queue?name=mail"):
            tiles = TILE.findall((await visitor.get(address)).text)
            assert [name for name, _, _ in tiles] == [
                "available",
                "running",
                "scheduled",
                "retrying",
                "waiting",
                "dead",
            ]
            for name, href, n in tiles:
                page = await visitor.get(href.replace("&amp;", "&"))
                assert len(ROWS.findall(page.text)) == int(n), (address, name)


async def test_a_number_is_the_same_everywhere(make: Make, db: Any) -> None:
    """Scheduled and retrying have a column each, which adds up to the tile; the chart agrees."""
    some_of_each(db)
    async with visiting(make()) as visitor:
        page = await visitor.get("/")
        tiles = {name: int(n) for name, _, n in TILE.findall(page.text)}
        rows = [numbers(page, queue) for queue in ("mail", "later")]
        for name, n in tiles.items():
            assert sum(int(row[name]) for row in rows) == n, name
        assert (tiles["scheduled"], tiles["retrying"]) == (2, 1)
        chart = json.loads((await visitor.get("/series?span=15m")).text)
        assert (chart["scheduled"][-1], chart["retrying"][-1]) == (2, 1)
        assert chart["open"][-1] == tiles["available"] + tiles["running"]
        jobs = await visitor.get("/jobs")
        assert 'title="2">2<' in jobs.text.partition(">scheduled")[2][:60]


async def test_the_last_point_of_a_chart_has_the_rates_of_a_minute(make: Make, db: Any) -> None:
    """The unfinished step is no dip: its rates are those of the last minute, as on the tile and in the lists."""
    db.execute("select tallybook.fold()")
    hands = Hands(db, "mail")
    for _ in range(30):
        put(db, queue="mail", task="note")
        (job,) = hands.start()
        hands.complete(job)
    db.execute("select tallybook.fold()")
    async with visiting(make()) as visitor:
        for span in ("15m", "3h", "1d", "7d"):
            chart = json.loads((await visitor.get(f"/series?span={span}")).text)
            assert chart["completed"][-1] == 0.5, span
            assert len({len(column) for column in chart.values()}) == 1 and chart["at"] == sorted(chart["at"])
        assert json.loads((await visitor.get("/series?queue=other")).text)["completed"][-1] == 0
        assert numbers(await visitor.get("/"), "mail")["completed"] == "30/min"
        for address in ("/", "/queues", "/queue?name=mail"):
            assert ">30/min<" in (await visitor.get(address)).text, address


async def test_each_chart_has_a_span(make: Make, db: Any) -> None:
    """The address holds each chart's span, and changing one keeps the other; on a queue's page, too."""
    put(db, queue="mail", task="note")
    async with visiting(make()) as visitor:
        for address, more in (("/?level=7d", ""), ("/queue?name=mail&level=7d", "name=mail&")):
            page = await visitor.get(address)
            assert re.findall(r'data-chart="(\w+)" data-span="(\w+)"', page.text) == [("flow", "15m"), ("level", "7d")]
            assert f"{address.partition('?')[0]}?{more}flow=3h&level=7d" in page.links
        assert 'data-span="15m"' in (await visitor.get("/?flow=odd")).text


async def test_the_overview_says_what_the_doctor_has_found(make: Make, db: Any) -> None:
    """The banner shows a queue that no worker serves, with a link to advice, and no passed check."""
    put(db, queue="nightly", task="note")
    site = make()
    async with visiting(site) as visitor:
        await site.nodes.first.examination.look(60.0)
        alerts = (await visitor.get("/")).text.partition('<ul class="alerts"')[2].partition("</ul>")[0]
        assert "queue &#34;nightly&#34; has had available jobs" in alerts and "no live worker serves it" in alerts
        assert '<a href="/maintenance">' in alerts
        assert "checks" not in alerts and "connections are in use" not in alerts
