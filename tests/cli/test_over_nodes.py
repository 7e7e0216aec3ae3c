"""`--nodes`: one command over three databases, with one of them away."""

import json

import pytest
from click.testing import Result

from support.cli import invoke
from support.database import UNREACHABLE
from support.fleet import Fleet
from tallybook import App
from tallybook._model.provider import new_key


class Shop:
    """Three nodes, and commands that run over them."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.nodes = {"north": 1, "south": 2, "west": 3}

    def put(self, name: str, *jobs: str) -> list[int]:
        number = self.nodes[name]
        return [int(self.fleet.run(number, f"select tallybook.enqueue({job})")[0][0]) for job in jobs]

    def says(self, *words: object, away: str | None = None, nodes: str | None = "all") -> Result:
        named = self.fleet.named(**({away: UNREACHABLE} if away else {}))
        over = () if nodes is None else ("--nodes", nodes)
        return invoke(*words, *over, to=self.fleet.dsn, TALLYBOOK_NODES=named)

    def rows(self, *words: object, away: str | None = None) -> list[dict[str, object]]:
        return list(json.loads(self.says(*words, "--json", away=away).stdout))


@pytest.fixture
def shop(fleet: Fleet) -> Shop:
    return Shop(fleet)


def test_a_list_is_one_list_of_all_nodes(shop: Shop) -> None:
    """`job list --nodes all` lists the newest jobs of all nodes, by time, up to --limit, each with its node."""
    first = shop.put("south", "'mail', 'a'", "'mail', 'b'")
    second = shop.put("north", "'mail', 'c'")
    third = shop.put("west", "'mail', 'd'", "'mail', 'e'")
    wanted = [("west", third[1]), ("west", third[0]), ("north", second[0]), ("south", first[1])]
    assert [(row["node"], row["id"]) for row in shop.rows("job", "list", "--limit", 4)] == wanted
    table = shop.says("job", "list", "--limit", 4).stdout.splitlines()
    assert table[0].split()[:2] == ["node", "id"] and [line.split()[0] for line in table[1:]] == [
        one for one, _ in wanted
    ]


def test_pages_over_nodes_neither_skip_nor_repeat(shop: Shop) -> None:
    """Each page continues after the one before on every node, and node names select which are listed."""
    put = [
        (name, *shop.put(name, "'mail', 'a'")) for name in ("north", "south", "west", "south", "south", "north", "west")
    ]
    listed, after, pages = list[tuple[str, object]](), None, 0
    while pages < 10:
        page = shop.says("job", "list", "--json", "--limit", 2, *(("--after", after) if after else ()))
        listed += [(row["node"], row["id"]) for row in json.loads(page.stdout)]
        pages += 1
        if "--after" not in page.stderr:
            break
        after = page.stderr.partition("--after ")[2].split()[0]
    assert listed == put[::-1]
    some = json.loads(shop.says("job", "list", "--json", nodes="west,north").stdout)
    assert {row["node"] for row in some} == {"north", "west"}


def test_queues_are_added_up(shop: Shop) -> None:
    """`queue list` and `count list` have one row per queue, with the sums of all nodes."""
    shop.put("north", "'mail', 'a'", "'only', 'a'")
    shop.put("south", "'mail', 'a'", "'mail', 'a', run_at => clock_timestamp() + interval '1 h'")
    rows = {row["name"]: row for row in shop.rows("queue", "list")}
    assert [(rows["mail"][key]) for key in ("node", "available", "scheduled")] == ["north, south", 2, 1]
    counted = {row["queue"]: row for row in json.loads(shop.says("count", "list", "--json").stdout)}
    assert (counted["mail"]["available"], counted["mail"]["scheduled"], counted["only"]["available"]) == (2, 1, 1)


def test_a_node_that_is_away_is_one_line(shop: Shop) -> None:
    """A list has the other nodes' answers and exit code 0; stderr names an absent node, without its secrets."""
    jobs = shop.put("north", "'mail', 'a'") + shop.put("west", "'mail', 'b'")
    found = shop.says("job", "list", "--json", away="south")
    assert (found.exit_code, [row["id"] for row in json.loads(found.stdout)]) == (0, jobs[::-1])
    assert found.stderr.startswith("node south did not answer: ") and len(found.stderr.splitlines()) == 1
    assert "geheim" not in found.stderr
    alone = shop.says("queue", "list", nodes="south", away="south")
    assert (alone.exit_code, alone.stderr.splitlines()[1]) == (1, "tallybook: error: no node has answered")


def test_an_id_leads_to_its_node(shop: Shop) -> None:
    """show, why, cancel and retry go to the id's node, even if another is away; an unknown one is an error."""
    north, south, west = (shop.put(name, "'mail', 'send'")[0] for name in ("north", "south", "west"))
    assert json.loads(shop.says("job", "show", south, "--json", away="north").stdout)["id"] == south
    assert "available" in shop.says("job", "why", west).stdout
    both = shop.says("job", "cancel", north, west, south, away="west")
    assert (both.exit_code, shop.fleet.state(north), shop.fleet.state(south)) == (1, "cancelled", "cancelled")
    assert both.stdout.splitlines() == [f"job {north}: cancelled", f"job {south}: cancelled"] and "west" in both.stderr
    assert shop.says("job", "retry", south).stdout == f"job {south}: retried, attempt 2\n"
    unknown = shop.says("job", "show", 9 << 43)
    assert unknown.exit_code == 1 and "node 9" in unknown.stderr and "north (1), south (2), west (3)" in unknown.stderr


def test_bulk_actions_report_by_node(shop: Shop) -> None:
    """Bulk actions run node by node; an absent node is reported, and stops no other. Exit code 1."""
    jobs = {name: shop.put(name, "'mail', 'send'", "'mail', 'send'") for name in shop.nodes}
    done = shop.says("job", "cancel", "--queue", "mail", "--yes", away="south")
    assert done.stdout.splitlines() == [
        f"{name}: 2 jobs will not start, 0 run and are asked to stop" for name in ("north", "west")
    ]
    assert done.exit_code == 1 and done.stderr.startswith("south: error: ")
    states = {name: [shop.fleet.state(job) for job in jobs[name]] for name in jobs}
    assert states == {"north": ["cancelled"] * 2, "south": ["available"] * 2, "west": ["cancelled"] * 2}
    answer = json.loads(shop.says("job", "cancel", "--queue", "mail", "--yes", "--json", away="west").stdout)
    assert answer[1] == {"node": "south", "answer": {"cancelled": 2, "cancelling": 0}}
    assert answer[2]["node"] == "west" and "answer" not in answer[2] and answer[2]["error"]
    paused = shop.says("queue", "pause", "mail")
    assert paused.stdout.splitlines() == [f"{name}: queue 'mail' is paused" for name in shop.nodes]
    assert all(row["paused_at"] for row in shop.rows("queue", "list") if row["name"] == "mail")
    assert shop.says("queue", "resume", "mail").exit_code == 0


def test_limits_breakers_and_routes_are_set_on_each_node(shop: Shop) -> None:
    """Changes of limits, breakers, providers and routes run node by node, a line each; exit code 1 if one failed."""
    for words in (
        ("limit", "set", "acme", 8, "1min"), ("limit", "at-once", "acme", 2), ("limit", "push", "acme", "5min"),
        ("breaker", "set", "acme", 5, "1min", "30s"), ("breaker", "open", "acme"), ("breaker", "close", "acme"),
        ("provider", "add", "acme", "--kind", "mail"), ("provider", "set", "acme", "--kind", "sms"),
        ("provider", "route", "set", "equity", "acme"), ("provider", "route", "drop", "equity"),
        ("provider", "drop", "acme", "--yes"), ("breaker", "drop", "acme"),
    ):  # fmt: skip
        said = shop.says(*words)
        assert (said.exit_code, [line.split(":")[0] for line in said.stdout.splitlines()]) == (0, list(shop.nodes)), (
            words
        )
    for number in shop.nodes.values():
        for table in ("rate", "concurrency"):
            count = f"select count(*) from tallybook.{table} where name = 'acme'"  # noqa: S608
            assert shop.fleet.run(number, count) == [(1,)], (number, table)
    assert shop.says("limit", "set", "acme", 3, "1min", nodes="west").exit_code == 0
    shares = [(row["node"], row.get("calls", row.get("most"))) for row in shop.rows("limit", "list")]
    assert shares == [("north", 8), ("north", 2), ("south", 8), ("south", 2), ("west", 3), ("west", 2)]
    away = shop.says("limit", "drop", "acme", away="south")
    assert away.exit_code == 1 and "south: error:" in away.stderr and "geheim" not in away.output
    assert [line.split(":")[0] for line in away.stdout.splitlines()] == ["north", "north", "west", "west"]


def test_a_secret_is_read_once_for_all_nodes(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret is read once and encrypted on each node; only a node that already has the provider fails."""
    monkeypatch.setenv("TALLYBOOK_KEYS", new_key("k1"))
    monkeypatch.setenv("ACME", "sk-canary")
    assert shop.says("provider", "add", "acme", "--kind", "mail", nodes="south").exit_code == 0
    added = shop.says("provider", "add", "acme", "--kind", "mail", "--secret-env", "api_key=ACME")
    assert added.exit_code == 1 and "south: error: provider 'acme' exists already" in added.stderr
    assert shop.says("provider", "set-secret", "acme", "api_key", "--from-env", "ACME").exit_code == 0
    for dsn in shop.fleet.dsns:
        assert App("shop", dsn=dsn).providers.get_sync("acme").secrets["api_key"].reveal() == "sk-canary"


def test_dead_letters_of_all_nodes(shop: Shop) -> None:
    """Dead letters are merged by time of death; a retry by filter runs on each node, a drop by id on its own."""
    north, south, last = shop.fleet.die(1), shop.fleet.die(2, "no paper"), shop.fleet.die(2)
    listed = shop.rows("dead", "list")
    assert [(row["node"], row["job"]) for row in listed] == [("south", last), ("south", south), ("north", north)]
    assert shop.says("dead", "drop", south).stdout == f"job {south}: dropped\n"
    unknown = shop.says("dead", "drop", south + 99)
    assert (unknown.exit_code, unknown.stderr.splitlines()[-1][:30]) == (1, f"job {south + 99}: unknown job"[:30])
    again = shop.says("dead", "retry", "--error", "stamp", "--yes").stdout
    assert again.splitlines() == [
        f"{name}: {n} jobs are retried" for name, n in (("north", 1), ("south", 1), ("west", 0))
    ]


def test_the_doctor_of_all_nodes(shop: Shop) -> None:
    """The doctor checks each node; an absent one is an error of its own."""
    found = shop.says("doctor", "--json", away="west")
    by_node = {one["node"]: one for one in json.loads(found.stdout)}
    assert found.exit_code == 1 and by_node["west"]["error"]
    assert by_node["north"]["answer"] and by_node["south"]["answer"]


def test_one_database_unless_nodes_are_named(shop: Shop) -> None:
    """TALLYBOOK_NODES alone changes nothing: without --nodes a command reads one database."""
    mine = shop.put("north", "'mail', 'a'")
    shop.put("south", "'mail', 'a'")
    assert [row["id"] for row in json.loads(shop.says("job", "list", "--json", nodes=None).stdout)] == mine
    strange = shop.says("job", "list", nodes="north,nowhere")
    assert strange.exit_code == 1 and "nowhere" in strange.stderr


def test_top_of_all_nodes(shop: Shop) -> None:
    """`top` sums the queues of all nodes, and names an absent node."""
    shop.put("north", "'mail', 'a'", "'mail', 'a'")
    shop.put("west", "'mail', 'a'")
    shop.fleet.run(3, "select tallybook.worker_start('one', '{mail}')")
    found = shop.says("top", "--once", away="south")
    lines = [line.split() for line in found.stdout.splitlines()]
    assert found.exit_code == 0 and "node south did not answer" in found.stdout
    assert next(line for line in lines if line[:1] == ["mail"])[1] == "3"
    assert any(line[:1] == ["west/one"] for line in lines)
    nobody = shop.says("top", "--once", nodes="south", away="south")
    assert nobody.exit_code == 1 and "no node has answered" in nobody.stderr
