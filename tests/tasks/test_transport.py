"""A call may go only to the address that was checked."""

import socket
from collections.abc import Callable
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpcore2
import pytest

from support.outside import HttpServer, Reply, certificate, http_server, provider, serving, two_http_servers
from tallybook import App, Constant, JobInfo
from tallybook.extra.tasks import _address, _transport, http, new_signing_secret, webhook
from tallybook.extra.tasks._address import Allowed, problem
from tallybook.testing import drain

Run = Callable[..., JobInfo]
LATER = webhook.with_(retry=Constant(timedelta(hours=1)))  # nothing is tried again within one drain
PUBLIC, INTERNAL = "127.0.0.2", "127.0.0.1"  # the first plays a public address: it is allowed


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.8.9.10", "0.0.0.0", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254",
     "100.64.0.1", "100.100.100.200", "192.0.0.192", "192.0.2.1", "198.18.0.1", "203.0.113.7", "224.0.0.1", "239.1.1.1",
     "240.0.0.1", "255.255.255.255", "168.63.129.16", "192.88.99.1", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1",
     "fd00:ec2::254", "ff02::1", "fec0::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1",
     "64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b:1::1", "2002:7f00:1::", "2002:808:808::", "2001:0:7f00:1::1"],
)  # fmt: skip
def test_addresses_that_nobody_is_sent_to(address: str) -> None:
    """S4-06: loopback, private, link-local, multicast, reserved and metadata addresses are refused, also in IPv6."""
    assert problem(ip_address(address)) is not None
    assert Allowed().refusal("endpoint.test", address) is not None


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.215.14", "100.63.255.255", "2606:4700::1111", "64:ff9b::1.1.1.1", "::ffff:1.1.1.1"]
)
def test_public_addresses_are_called(address: str) -> None:
    """S4-06: ordinary public addresses are allowed, also wrapped in NAT64 or IPv6."""
    assert problem(ip_address(address)) is None


def test_what_is_allowed() -> None:
    """S4-06: a provider allows networks, also wrapped in IPv6, and whole names, and nothing else."""
    allowed = Allowed.of(["10.0.0.0/8", "Hooks.Internal", "::1"], option="allow")
    assert allowed.refusal("x", "10.9.9.9") is allowed.refusal("x", "::ffff:10.9.9.9") is None
    assert allowed.refusal("hooks.internal.", "192.168.0.1") is allowed.refusal("x", "::1") is None
    assert allowed.refusal("x", "192.168.0.1") and allowed.refusal("y.hooks.internal", "127.0.0.1")


def test_a_call_to_the_inside_is_refused(app: App, dsn: str, db: Any, names: dict[str, list[str]]) -> None:
    """S4-06: an inside address in any notation is not connected to and the job is dead; if allowed, it is called."""
    names["inside.test"] = [INTERNAL]
    hosts = ("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "inside.test")
    secrets = {"signing_secret": new_signing_secret()}
    with http_server() as inside:
        urls = {host: f"http://{host}:{inside.port}/" for host in hosts}
        shared = {"allow_http": True}
        refused = [provider(host, secrets, url=url, **shared) for host, url in urls.items()]
        allowed = [
            provider(f"own {host}", secrets, url=url, allow=["127.0.0.0/8", "::1"], **shared)
            for host, url in urls.items()
        ]
        serving(app, *refused, *allowed)
        jobs = [webhook.enqueue_sync(db, host, {}) for host in hosts]
        jobs += [http.enqueue_sync(db, url=url) for url in urls.values()]
        drain(app, dsn=dsn)
        for job in jobs:
            found = app.get(job).sync(db)
            assert found.state == "dead" and "loopback" in (found.last_error or "")
            assert (found.errors or [])[-1]["type"] == "tallybook.errors.AddressRefused"
        assert inside.got == []
        jobs = [
            webhook.enqueue_sync(db, f"own {host}", {}) for host in hosts
        ]  # the control: if allowed, the call arrives
        drain(app, dsn=dsn)
        assert {app.get(job).sync(db).state for job in jobs} == {"completed"} and len(inside.got) == len(hosts)


def test_without_the_check_the_inside_is_called(
    app: App, run: Run, db: Any, endpoint: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-06, negative control: if every address counts as public, a URL of the args reaches the inside."""
    assert run(http.enqueue_sync(db, url=f"{endpoint.url}/admin?a=b", query={"c": 1})).state == "dead"
    monkeypatch.setattr(_address, "problem", lambda address: None)
    found = run(http.enqueue_sync(db, url=f"{endpoint.url}/admin?a=b", query={"c": 1}))
    assert (found.state, found.result["text"]) == ("completed", "fine")
    assert [got.path for got in endpoint.got] == ["/admin?a=b&c=1"]


def rebinding(app: App, run: Run, db: Any, names: dict[str, list[str]]) -> tuple[JobInfo, list[int]]:
    """One webhook to a name that is public at the first lookup and inside later; the job, and the calls per server."""
    names["rebinding.test"] = [PUBLIC, INTERNAL]
    with two_http_servers(PUBLIC, INTERNAL) as (public, inside):
        settings = {"url": f"http://rebinding.test:{public.port}/", "allow_http": True, "allow": [PUBLIC]}
        serving(app, provider("acme", {"signing_secret": new_signing_secret()}, **settings))
        found = run(webhook.enqueue_sync(db, "acme", {}))
        if public.got:
            assert public.got[0].headers["host"] == f"rebinding.test:{public.port}"
        return found, [len(public.got), len(inside.got)]


def test_a_name_that_rebinds_leads_to_the_address_that_was_checked(
    app: App, run: Run, db: Any, names: dict[str, list[str]]
) -> None:
    """S4-06: DNS rebinding: the name is resolved once, and the connection goes to the very address that was checked."""
    found, calls = rebinding(app, run, db, names)
    assert (found.state, calls) == ("completed", [1, 0])


def test_rebinding_reaches_the_inside_where_the_name_is_connected_to(
    app: App, run: Run, db: Any, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-06, negative control: if a name is checked and then connected to, as is usual, the call ends up inside."""

    async def by_name(self: Any, host: str, port: int, *args: Any, **kwargs: Any) -> Any:
        await self._checked(host, port)
        return await httpcore2.AnyIOBackend().connect_tcp(host, port)

    monkeypatch.setattr(_transport.CheckedBackend, "connect_tcp", by_name)
    found, calls = rebinding(app, run, db, names)
    assert (found.state, calls) == ("completed", [0, 1])


def test_one_bad_address_among_good_ones_is_refused(
    app: App, run: Run, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-06: a name with a public and an inside address is refused, because the choice must not be luck."""

    async def both(host: str, port: int) -> list[str]:
        return [PUBLIC, INTERNAL]

    monkeypatch.setattr(_transport, "resolve", both)
    with http_server(PUBLIC) as public:
        settings = {"url": f"http://two.test:{public.port}/", "allow_http": True, "allow": [PUBLIC]}
        serving(app, provider("acme", {"signing_secret": new_signing_secret()}, **settings))
        assert run(webhook.enqueue_sync(db, "acme", {})).state == "dead"
        assert public.got == []


def test_an_address_that_does_not_answer_is_passed_over(
    app: App, run: Run, db: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4-06: of several checked addresses, the first that accepts the connection is called."""

    async def both(host: str, port: int) -> list[str]:
        return ["127.0.0.3", PUBLIC]

    monkeypatch.setattr(_transport, "resolve", both)
    with http_server(PUBLIC) as public:
        settings = {"url": f"http://two.test:{public.port}/", "allow_http": True, "allow": ["127.0.0.0/8"]}
        serving(app, provider("acme", {"signing_secret": new_signing_secret()}, **settings))
        assert run(webhook.enqueue_sync(db, "acme", {})).state == "completed"
        assert len(public.got) == 1


def test_tls_is_with_the_name_and_the_connection_with_the_address(
    app: App, run: Run, db: Any, names: dict[str, list[str]], tmp_path: Path
) -> None:
    """S4-06: certificate, SNI and Host are the name's; another name at the same address fails at the certificate."""
    cert = certificate(tmp_path, "endpoint.test")
    names["endpoint.test"] = names["other.test"] = [INTERNAL]
    with http_server(cert=cert) as endpoint:
        endpoint.reply(Reply(body=b"over tls"))
        shared = {"allow": [INTERNAL], "ca": (tmp_path / "only").read_text(encoding="ascii")}
        secrets = {"signing_secret": new_signing_secret()}
        serving(
            app,
            provider("right", secrets, url=f"https://endpoint.test:{endpoint.port}/", **shared),
            provider("wrong", secrets, url=f"https://other.test:{endpoint.port}/", **shared),
            provider("unknown", secrets, url=f"https://endpoint.test:{endpoint.port}/", allow=[INTERNAL]),
        )
        right, wrong, unknown = (run(LATER.enqueue_sync(db, name, {})) for name in ("right", "wrong", "unknown"))
        assert right.state == "completed" and right.result["answer"] == "over tls"
        assert wrong.state == unknown.state == "retrying"
        assert "CERTIFICATE_VERIFY_FAILED" in wrong.last_error
        assert "CERTIFICATE_VERIFY_FAILED" in unknown.last_error
        assert [got.headers["host"] for got in endpoint.got] == [f"endpoint.test:{endpoint.port}"]


def test_a_proxy_of_the_environment_is_not_asked(app: App, run: Run, db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """S4-06: HTTP_PROXY is ignored, because a proxy would make the check worthless."""
    with http_server() as endpoint, http_server() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        serving(
            app,
            provider(
                "acme", {"signing_secret": new_signing_secret()}, url=endpoint.url, allow_http=True, allow=[INTERNAL]
            ),
        )
        assert run(LATER.enqueue_sync(db, "acme", {})).state == "completed"
        assert (len(endpoint.got), proxy.got) == (1, [])


def test_a_host_that_is_not_there_is_tried_again(app: App, run: Run, db: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that does not resolve, or a port without a listener, is a temporary failure."""

    async def none(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    with socket.socket() as unused:
        unused.bind((INTERNAL, 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        serving(
            app, provider("acme", {"signing_secret": new_signing_secret()}, url=url, allow_http=True, allow=[INTERNAL])
        )
        found = run(LATER.enqueue_sync(db, "acme", {}))
        assert found.state == "retrying" and "ConnectError" in found.last_error
        monkeypatch.setattr(_transport, "resolve", none)
        found = run(LATER.enqueue_sync(db, "acme", {}))
        assert found.state == "retrying" and "name resolution" in found.last_error
