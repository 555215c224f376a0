"""Which network an address belongs to: whose voices count as one, and where a stranger's word does not lead.

Keys and ports cost nothing, networks do: whoever has many keys rarely has many networks. And an address in a
record is the word of whoever made it, so a peer does not knock for it at doors that only it can reach: those
of its own machine, and of the networks behind its router.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

IP = ipaddress.IPv4Address | ipaddress.IPv6Address
RANGE_BITS = {4: 24, 6: 48}
"""Of an IP version: what one customer is given at least (RFC 6177 for IPv6; BEP 42 and go-ethereum count
IPv4 alike)."""
PRIVATE_BLOCKS = tuple(map(ipaddress.ip_network, (
    "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7",
)))  # fmt: skip
"""RFC 1918, RFC 6598 (overlays such as Tailscale's, too) and RFC 4193. An overlay or a cluster spreads its
machines over the whole block, so no smaller part of it tells who is a neighbour."""


def ip_of(text: str) -> IP | None:
    """The IP address written so, an IPv4 in IPv6 clothes as what it is; None if it is none."""
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    return (ip.ipv4_mapped or ip) if isinstance(ip, ipaddress.IPv6Address) else ip


def range_of(address: str) -> str:
    """The /24 or /48 of the IP with which a multiaddr begins, a relay's for a circuit; what has none is known
    by its name."""
    kind, host = _beginning(address)
    ip = ip_of(host) if kind in ("ip4", "ip6") else None
    if ip is None:
        return f"{kind}/{host}"
    return str(ipaddress.ip_network((ip, RANGE_BITS[ip.version]), strict=False))


@lru_cache(2 * 4096)
def public_ranges(addresses: tuple[str, ...]) -> frozenset[str]:
    """The ranges of the public IPs in which a peer is reached itself. In a lab all are of one private range,
    and behind a relay all of the relay's, which has its own bounds."""
    direct = [address for address in addresses if "/p2p-circuit" not in address]
    ips = [(ip_of(_beginning(address)[1]), address) for address in direct]
    return frozenset(range_of(address) for ip, address in ips if ip is not None and ip.is_global)


def dialable(addresses: Iterable[str], own: Iterable[str]) -> tuple[str, ...]:
    """Those multiaddrs of a record to which a peer may be led that is itself reached at `own`: public ones
    and names; private ones of a block in which it has an address, too; loopback ones if it has no others."""
    here = [ip for each in own if "/p2p-circuit" not in each and (ip := ip_of(_beginning(each)[1]))]
    return tuple(address for address in addresses if _leads_out(address, here))


def _leads_out(address: str, here: list[IP]) -> bool:
    kind, host = _beginning(address)
    if kind not in ("ip4", "ip6"):
        return host.rstrip(".").rpartition(".")[2].lower() != "localhost"
    ip = ip_of(host)
    if ip is None or ip.is_multicast or ip.is_unspecified or ip.is_link_local:
        return False
    if ip.is_loopback:
        return bool(here) and all(each.is_loopback for each in here)
    if ip.is_global:
        return True
    return any(ip in block and any(each in block for each in here) for block in PRIVATE_BLOCKS)


def _beginning(address: str) -> tuple[str, str]:
    """The first protocol of a multiaddr and its value."""
    _, kind, host, *_ = [*address.split("/"), "", "", ""]
    return kind, host
