"""Jobs are enqueued on the node of their data, in its transaction, by every driver and by SQL."""

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from support.callers import KINDS, connected
from support.fleet import Asides, Fleet
from support.pages import code
from tallybook import App


@pytest.fixture(scope="module")
def fleet(asides: Asides) -> Iterator[Fleet]:
    """Three nodes with the shop's table."""
    with closing(Fleet(asides)) as made:
        made.each("create table orders (tenant int, item text)")
        yield made


@pytest.fixture
def shop(fleet: Fleet) -> App:
    """An app whose DSN is the first node's, which has the table of nodes."""
    app = App("shop", dsn=fleet.dsns[0])

    @app.task(queue="mail")
    async def confirm(tenant: int) -> None: ...

    return app


def counted(fleet: Fleet) -> list[tuple[int, int]]:
    """Count the orders and jobs of each node."""
    query = "select (select count(*) from orders), (select count(*) from tallybook.job)"
    return [fleet.run(number, query)[0] for number in (1, 2, 3)]


def more(before: list[tuple[int, int]], fleet: Fleet) -> list[tuple[int, int]]:
    """Count how many more orders and jobs each node has than before."""
    return [(orders - o, jobs - j) for (orders, jobs), (o, j) in zip(counted(fleet), before, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_lies_where_its_row_does(kind: str, fleet: Fleet, shop: App) -> None:
    """A program routes itself: a commit puts row and job on the key's node only, a rollback puts neither."""
    node = shop.nodes.of("tenant:7").sync()
    mine = [(int(number == node.number), int(number == node.number)) for number in (1, 2, 3)]
    before = counted(fleet)
    with connected(kind, node.dsn) as caller:
        caller.execute("insert into orders values (7, 'pen')")
        caller.enqueue(shop.tasks["confirm"], 7)
        caller.rollback()
        assert more(before, fleet) == [(0, 0)] * 3
        caller.execute("insert into orders values (7, 'pen')")
        job = caller.enqueue(shop.tasks["confirm"], 7)
        caller.commit()
    assert job.id >> 43 == node.number
    assert more(before, fleet) == mine


def test_a_pin_moves_the_jobs_that_come_after_it(fleet: Fleet, shop: App) -> None:
    """After a pin the tenant's next job goes to that node, and other nodes keep theirs; unpin undoes it."""
    first = shop.nodes.of("tenant:9").sync()
    other = next(one for one in shop.nodes.list().sync() if one != first)
    shop.nodes.pin("tenant:9", other.name).sync()
    assert shop.nodes.of("tenant:9").sync().number == other.number
    before = counted(fleet)
    with psycopg.connect(shop.nodes.of("tenant:9").sync().dsn) as conn:
        assert shop.tasks["confirm"].enqueue_sync(conn, 9).id >> 43 == other.number
    assert [jobs for _, jobs in more(before, fleet)] == [int(number == other.number) for number in (1, 2, 3)]
    shop.nodes.unpin("tenant:9").sync()
    assert shop.nodes.of("tenant:9").sync().number == first.number


def test_the_example_of_the_page_runs(fleet: Fleet, shop: App) -> None:
    """The code of docs/nodes.md, as written: an order and its job on the tenant's node."""
    number = shop.nodes.of("tenant:7").sync().number
    before = counted(fleet)
    (block,) = code("docs/nodes.md", "Enqueuing", "python")
    exec(block, {"app": shop, "psycopg": psycopg, "confirm": shop.tasks["confirm"]})  # noqa: S102
    assert more(before, fleet) == [(int(at == number), int(at == number)) for at in (1, 2, 3)]


def test_sql_puts_a_job_in_where_it_runs(fleet: Fleet) -> None:
    """SQL needs no routing: the statement that writes the row enqueues the job on the same node."""
    place = """\
with placed as (insert into orders values (7, 'pen') returning tenant)
select tallybook.enqueue('mail', 'confirm', jsonb_build_object('tenant', tenant)) from placed"""
    for number, dsn in enumerate(fleet.dsns, 1):
        before = counted(fleet)
        with psycopg.connect(dsn) as conn:
            row = conn.execute(place).fetchone()
        assert row is not None and row[0] >> 43 == number
        assert more(before, fleet) == [(int(at == number), int(at == number)) for at in (1, 2, 3)]
