"""The network addresses that a job may call: public ones, and those that a provider's settings allow.

`ipaddress.is_global` alone is not enough: IPv6 has several ways to write an IPv4 address, some multicast addresses are
"global", and one cloud has its metadata service on a public address.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

from tallybook.errors import ConfigError

_NAT64 = IPv6Network("64:ff9b::/96")
_SPECIAL = {
    ip_network(network): what
    for network, what in (
        ("100.64.0.0/10", "shared"), ("192.0.0.0/24", "reserved"), ("168.63.129.16/32", "a cloud's metadata"),
        ("192.88.99.0/24", "6to4"), ("64:ff9b:1::/48", "local NAT64"), ("2001::/23", "reserved"),
        ("3fff::/20", "documentation"), ("5f00::/16", "not public"), ("2002::/16", "6to4"), ("fec0::/10", "site-local"),
    )
}  # fmt: skip
"""Ranges in addition to those of `ipaddress`, which differ between releases of Python."""


def problem(address: IPv4Address | IPv6Address) -> str | None:
    """Return why a job must not call this address, or None for an ordinary public one."""
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            return "link-local"
        if (inner := _inner(address)) is not None:
            found = problem(inner)
            return None if found is None else f"{found}, as {inner} in IPv6"
    for network, what in _SPECIAL.items():
        if address in network:
            return what
    for what in ("unspecified", "loopback", "link_local", "multicast", "reserved", "private"):
        if getattr(address, f"is_{what}"):
            return what.replace("_", "-")
    return None if address.is_global else "not public"


def _inner(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address that this IPv6 address contains, or None."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None


@dataclass(frozen=True)
class Allowed:
    """The hosts and networks that jobs may call although they are not public."""

    names: frozenset[str] = frozenset()
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def of(cls, said: Any, *, option: str) -> Allowed:
        """Parse a list of host names, networks and addresses. ConfigError for anything else."""
        if not isinstance(said, Iterable) or isinstance(said, str | bytes):
            raise ConfigError(option, said, "not a list of hosts and networks", hint='Write ["10.0.0.0/8"]')
        names, networks = set(), []
        for one in said:
            if not isinstance(one, str) or not one:
                raise ConfigError(option, one, "neither a host nor a network")
            try:
                networks.append(ip_network(one, strict=False))
            except ValueError:
                if "/" in one:
                    raise ConfigError(option, one, "neither a host nor a network") from None
                names.add(one.lower().rstrip("."))
        return cls(frozenset(names), tuple(networks))

    def refusal(self, host: str, address: str) -> str | None:
        """Return why a job must not call `host` at `address`, or None if it may."""
        if host.lower().rstrip(".") in self.names:
            return None
        found = ip_address(address)
        inner = _inner(found) if isinstance(found, IPv6Address) else None
        if any(one in network for network in self.networks for one in (found, inner) if one is not None):
            return None
        return problem(found)
