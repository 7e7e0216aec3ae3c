"""docs/running.md and the files for other programs have the formats of those programs, and fit the code."""

import asyncio
import configparser
import json
import re
from datetime import timedelta
from typing import Any

import httpx2
import psycopg
import pytest
import yaml
from psycopg import AsyncConnection

from support.pages import FENCED, blocks, text
from support.paths import ROOT
from support.roles import house
from support.workers import Jobs, eventually, working
from tallybook import App, Context
from tallybook._cli import cli
from tallybook._db.numbers import METRICS
from tallybook._worker.settings import WorkerSettings

PAGE = text("docs/running.md")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / f"deploy/kubernetes/{name}.yaml").read_text(encoding="utf-8")))


def unit(said: str) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(said)
    return {name: dict(parser[name]) for name in parser.sections()}


def test_the_times_to_stop_are_those_of_the_worker() -> None:
    """Unit, manifest, compose file and text give a worker its stop timeout, its grace and 15 s more."""
    stop = WorkerSettings().stop_timeout + WorkerSettings().abort_timeout + timedelta(seconds=15)
    seconds = int(stop.total_seconds())
    service = unit(blocks(ROOT / "docs/running.md", "ini")[0])["Service"]
    assert int(service["TimeoutStopSec"]) == seconds
    assert manifests("worker")[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == seconds
    assert COMPOSE["services"]["worker"]["stop_grace_period"] == f"{seconds}s"
    assert f"**{seconds} s**" in PAGE and f"docker stop -t {seconds}" in PAGE


def test_the_commands_are_those_of_the_command_line() -> None:
    """The command line accepts the commands of the unit, the image, the compose file and the manifests as written."""

    def takes(words: list[str]) -> dict[str, Any]:
        """The parameters that Tallybook's command line reads from these words; raises if it cannot."""
        assert words[0] == "tallybook"
        command = cli.commands[words[1]]
        with command.make_context(words[1], list(words[2:])) as made:
            return made.params

    service = unit(blocks(ROOT / "docs/running.md", "ini")[0])["Service"]
    program, *words = service["ExecStart"].split()
    assert takes([program.removeprefix("/srv/shop/.venv/bin/"), *words])["metrics_port"] == 9464
    (container,) = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert takes(json.loads(container)).items() >= {"target": "app:app", "metrics_port": 9464}.items()
    assert takes(COMPOSE["services"]["migrate"]["command"])
    web = takes(COMPOSE["services"]["web"]["command"])
    assert (web["host"], web["port"], str(web["users"])) == ("0.0.0.0", 8420, "/run/secrets/users")
    assert [takes(containers[0]["args"]).get("port") for containers in map(_containers, ("migrate", "web"))] == [
        None,
        8420,
    ]
    assert takes(_containers("worker")[0]["args"]).items() >= {"metrics_port": 9464, "metrics_host": "0.0.0.0"}.items()
    with pytest.raises(Exception, match="No such option"):  # control
        takes(["tallybook", "worker", "-A", "shop:app", "--metrics-prot", "1"])


def _containers(name: str) -> list[dict[str, Any]]:
    return list(manifests(name)[0]["spec"]["template"]["spec"]["containers"])


def test_the_probes_ask_what_is_served() -> None:
    """Each probe and each health check requests a page and a port that its process serves."""
    for name, probes in (
        ("worker", ("startupProbe", "livenessProbe", "readinessProbe")),
        ("web", ("livenessProbe", "readinessProbe")),
    ):
        (container,) = _containers(name)
        for probe in probes:
            get = container[probe]["httpGet"]
            assert get["path"] in ("/healthz", "/readyz") and get["port"] == container["ports"][0]["name"]
        assert str(container["ports"][0]["containerPort"]) in container["args"]
    assert "http://127.0.0.1:9464/healthz" in DOCKERFILE
    assert "http://127.0.0.1:8420/healthz" in str(COMPOSE["services"]["web"]["healthcheck"])


@pytest.mark.parametrize("name", ["migrate", "worker", "web"])
def test_a_pod_has_no_rights_that_it_does_not_need(name: str) -> None:
    """Pods, containers and compose run as user 1000, without a token or capabilities, on a read-only root."""
    found = manifests(name)[0]["spec"]["template"]
    pod, (container,) = found["spec"], found["spec"]["containers"]
    assert pod["securityContext"].items() >= {"runAsNonRoot": True, "runAsUser": 1000}.items()
    assert pod["automountServiceAccountToken"] is False and container["resources"]["limits"]["memory"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    service = COMPOSE["services"][name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and not str(service.get("user", "")).startswith("0")
    assert "\nUSER 1000:1000\n" in DOCKERFILE


def test_selectors_match_and_only_this_machine_reaches_the_dashboard() -> None:
    """Deployments and the Service select their own pods; compose serves the dashboard on loopback only."""
    web, service = manifests("web")
    assert service["spec"]["selector"] == web["spec"]["template"]["metadata"]["labels"]
    for deployment in (web, *manifests("worker")):
        assert deployment["spec"]["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert COMPOSE["services"]["web"]["ports"] == ["127.0.0.1:8420:8420"]
    assert "ports" not in COMPOSE["services"]["postgres"]


def test_the_image_takes_files_that_there_are() -> None:
    """Each file that the Dockerfile copies exists, and .dockerignore lets it in."""
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()
    ]
    let_in = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(copied) == sorted(let_in) and all((ROOT / name).exists() for name in copied)


def test_every_block_is_read_by_its_own_language() -> None:
    """YAML and unit files of this page and of docs/telemetry.md parse, and none is empty."""
    other = (ROOT / "docs/telemetry.md").read_text(encoding="utf-8")
    found = [body for language, body in FENCED.findall(PAGE + other) if language == "yaml"]
    assert len(found) >= 4 and all(isinstance(yaml.safe_load(body), dict) for body in found)
    assert all(unit(body) for body in blocks(ROOT / "docs/running.md", "ini"))


@pytest.mark.direct("logs in as users of its own")
def test_the_number_that_is_scaled_by(empty_dsn: str) -> None:
    """The role metrics may run KEDA's query, which returns one whole number, 0 for an unknown queue."""
    scaled = yaml.safe_load(blocks(ROOT / "docs/running.md", "yaml")[0])
    query = scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert query == blocks(ROOT / "docs/running.md", "sql")[0].strip().rstrip(";")
    with house(empty_dsn) as at:
        at.give()
        with psycopg.connect(at.dsn_of(at.user("metrics")), autocommit=True) as conn:
            assert conn.execute(query).fetchall() == [(0,)]
            at.db.execute(
                "select tallybook.enqueue('mail', 't'), tallybook.enqueue('mail', 't'), tallybook.enqueue('q', 't')"
            )
            lease = "7c9e6679-7425-40de-944b-e07fc1f90ae8"
            at.db.execute("select tallybook.worker_start('w', '{mail}', '{t}')")
            at.db.execute("select tallybook.claim(1, '{mail}', '{1}', %s::uuid)", (lease,))
            assert conn.execute(query).fetchall() == [(2,)]  # one available, one running
            with pytest.raises(psycopg.errors.InsufficientPrivilege):  # and nothing else
                conn.execute("select * from tallybook.job")


@pytest.mark.direct("counts the connections of a worker")
async def test_the_connections_of_a_worker(app: App, dsn: str, db: Any) -> None:
    """A worker has as many connections as the page says, and one more from the first job that needs it, never more."""

    def connections() -> dict[str, str]:
        """The page's table: the number of connections for each purpose."""
        rows = re.findall(
            r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \|$", PAGE.split("## How many connections")[1].split("##")[0], re.M
        )
        return {what.split(":")[0].split(",")[0].strip(): count for count, what in rows[1:]}

    said = connections()
    jobs = Jobs(app, db)

    @app.task
    async def plain() -> None:
        pass

    @app.task
    async def says(ctx: Context) -> None:
        await ctx.progress(0.5)
        await ctx.progress(0.6)

    @app.task
    async def completes(ctx: Context) -> None:
        async with await AsyncConnection.connect(dsn) as conn:
            await ctx.complete(conn)

    @app.task(atomic=True)
    async def atomic(conn: AsyncConnection[Any]) -> None:
        pass

    def there() -> int:
        row = db.execute(
            "select count(*) from pg_stat_activity"
            " where application_name = 'tallybook counted' and datname = current_database()"
        ).fetchone()
        return int(row[0])

    async def run(task: Any) -> None:
        await jobs.ends(*(task.enqueue_sync(db) for _ in range(3)))

    async with working(app, dsn, {"default": 1}, name="counted", metrics_port=0) as worker:
        await eventually(lambda: not worker.why_not_ready(), "it is ready")
        await run(plain)
        expected = int(said["claims"]) + int(said["notifications"])
        await eventually(lambda: there() == expected, f"{there()} are {expected}")
        for task, what in (
            (says, "progress"),
            (completes, "checking how an attempt ended"),
            (atomic, "[atomic tasks](atomic.md)"),
        ):
            await run(task)
            expected += int(said[what].split()[0])
            await eventually(lambda: there() == expected, f"after {what}, {there()} are {expected}")  # noqa: B023
        assert worker.telemetry is not None
        for _ in range(2):
            metrics = f"http://127.0.0.1:{worker.telemetry.port}/metrics"
            assert (await asyncio.to_thread(httpx2.get, metrics, timeout=20)).status_code == 200
        expected += int(said["[metrics](telemetry.md)"])
        assert there() == expected
    await eventually(lambda: there() == 0, "all of them are closed")
    async with working(app, dsn, {"default": 1}, name="counted", notify=False) as worker:
        await eventually(lambda: not worker.why_not_ready(), "it is ready")
        await run(plain)
        expected = int(said["claims"])
        await eventually(lambda: there() == expected, f"{there()} are {expected}")


# Grafana

BOARD = json.loads((ROOT / "docs/grafana/tallybook.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def checked(expr: str) -> set[str]:
    """The metrics of an expression; AssertionError if it is not PromQL over our metrics."""
    bare = re.sub(r'"[^"]*"', '""', expr)
    depth = 0
    for char in bare:
        depth += (char in "({[") - (char in ")}]")
        assert depth >= 0, expr
    assert depth == 0, expr
    named = set()
    for metric, labels in re.findall(r"\b(tallybook_\w+)(?:\{([^}]*)\})?", bare):
        assert metric in METRICS, f"{metric} is no metric"
        named.add(metric)
        used = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels)
        assert set(used) <= set(METRICS[metric][1]), f"{metric} has no {used}"
        kind = METRICS[metric][0]
        assert (kind == "counter") == bool(re.search(rf"(?:rate|increase)\({metric}\b", bare)), f"{metric} is a {kind}"
    others = set(re.findall(r"[A-Za-z_]\w*", re.sub(r"\{[^}]*\}|\[[^\]]*\]|tallybook_\w+", " ", bare)))
    known = {
        "sum", "max", "min", "avg", "by", "rate", "increase", "queue", "task", "state", "end", "instance", "connection",
    }  # fmt: skip
    assert others <= known, f"{others - known} in {expr}"
    for labels in re.findall(r"\bby \(([^)]*)\)", bare):
        allowed = {"instance", *(label for metric in named for label in METRICS[metric][1])}
        assert {label.strip() for label in labels.split(",")} <= allowed, expr
    assert named, expr
    return named


def test_the_dashboard_names_metrics_that_there_are() -> None:
    """S2-09: every expression of the Grafana file uses metrics and labels that a scrape has, counters by rate."""
    named = set().union(*(checked(target["expr"]) for panel in PANELS for target in panel["targets"]))
    assert {
        "tallybook_up", "tallybook_jobs", "tallybook_jobs_ended_total", "tallybook_attempts_followed_total",
        "tallybook_oldest_job_age_seconds", "tallybook_worker_slots_used", "tallybook_worker_loop_lag_seconds",
        "tallybook_worker_connection_errors_total",
    } <= named  # fmt: skip


@pytest.mark.parametrize(
    "expr",
    ["sum(tallybook_job)", "sum(tallybook_jobs", "sum(tallybook_jobs{nobody=\"x\"})", "sum(tallybook_jobs_ended_total)",
     "rate(tallybook_up[5m])", "sum by (worker) (tallybook_jobs)", "summ(tallybook_up)", "sum(x)"],
)  # fmt: skip
def test_wrong_expressions_are_found(expr: str) -> None:
    """Control: an unknown metric, label or function, a missing parenthesis and a counter without rate are found."""
    with pytest.raises(AssertionError):
        checked(expr)


def test_the_dashboard_is_one_that_grafana_imports() -> None:
    """The dashboard has what Grafana needs: ids, disjoint places, named targets, the data source as a variable."""
    assert isinstance(BOARD["schemaVersion"], int) and BOARD["title"] and "id" not in BOARD
    variables = {found["name"]: found for found in BOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        place = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not place & taken, panel["title"]
        taken |= place
        assert panel["type"] in ("row", "stat", "timeseries") and panel["title"]
    for panel in PANELS:
        assert panel["description"] and panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            used = re.findall(r"\$(\w+)", target["expr"])
            assert set(used) <= {*variables, "__rate_interval"}
