"""Classifies addresses: which IP range they belong to, and which of a stranger's addresses may be dialled.

Keys and ports are free, IP ranges are not: a peer with many keys rarely has many ranges. Limits therefore
apply per range. The addresses in a record are unverified, so a peer does not dial those that only it can
reach. These are addresses of its own machine, and private ones behind its router (request forgery). Addresses
of peers are multiaddrs such as `/ip4/1.2.3.4/tcp/4001`.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from functools import lru_cache

IP = ipaddress.IPv4Address | ipaddress.IPv6Address
RANGE_BITS = {4: 24, 6: 48}
"""Prefix length of a range by IP version: what one customer gets at least (RFC 6177, BEP 42, go-ethereum)."""
PRIVATE_BLOCKS = tuple(
    map(
        ipaddress.ip_network,
        (
            "10.0.0.0/8",
            "172.16.0.0/12",
            "192.168.0.0/16",
            "100.64.0.0/10",
            "fc00::/7",
        ),
    )
)
"""Private blocks: RFC 1918, RFC 6598 (also overlays such as Tailscale's) and RFC 4193. An overlay or a
cluster spreads its machines over the whole block, so no smaller part of it identifies neighbours."""


NAT64, NAT64_LOCAL = ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48")
"""NAT64 prefixes: RFC 6052, whose last 32 bits are an IPv4 address, and RFC 8215, local to a network."""
_NUMBER = re.compile(r"0[xX][0-9a-fA-F]{1,8}|[1-9][0-9]{0,9}|0[0-7]{0,11}")
MEMORY = "memory"
"""Protocol of addresses inside one process (protocols/memory)."""
NAME_KINDS = ("dns", "dns4", "dns6")
"""Protocols of a multiaddr whose value is resolved by DNS."""


def ip_of(text: str) -> IP | None:
    """Parse an IP address; None if it is none. An IPv4 address inside an IPv6 one is returned as IPv4."""
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    return (_embedded(ip) or ip) if isinstance(ip, ipaddress.IPv6Address) else ip


def host_ip(host: str) -> IP | None:
    """Return the IP address that a resolver makes of a host without a DNS query; None if it is a name.

    It parses what `ip_of` does and IPv4 as in inet_aton(3) (127.1, 2130706433, 0x7f.1, 0177.0.0.1)."""
    host = host.rstrip(".").strip("[]")
    ip = ip_of(host)
    if ip is not None:
        return ip
    parts = host.split(".")
    if len(parts) > 4 or not all(map(_NUMBER.fullmatch, parts)):
        return None
    *leading, last = map(_parse_number, parts)
    # Each leading part is one byte, and the last one fills the bytes that are left.
    end_of_last = 1 << 8 * (4 - len(leading))
    if any(number > 255 for number in leading) or last >= end_of_last:
        return None
    high_bytes = sum(number << 24 - 8 * index for index, number in enumerate(leading))
    return ipaddress.IPv4Address(high_bytes + last)


def _parse_number(text: str) -> int:
    """Parse a number as C does: hexadecimal after 0x, octal after another 0, else decimal."""
    if text[:2] in ("0x", "0X"):
        return int(text, 16)
    return int(text, 8 if text[:1] == "0" else 10)


def is_public(ip: IP) -> bool:
    """Return whether an address, as `ip_of` returned it, belongs to one host of the public internet."""
    if not ip.is_global or ip.is_multicast:
        return False
    return isinstance(ip, ipaddress.IPv4Address) or not (ip.is_site_local or ip in NAT64_LOCAL)


def _embedded(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address to which packets for this IPv6 address go; None if there is none.

    The kinds are mapped (RFC 4291), 6to4 (RFC 3056), NAT64, ISATAP (RFC 5214), compatible (::/96)."""
    embedded = ip.ipv4_mapped or ip.sixtofour
    if embedded:
        return embedded
    number = int(ip)
    is_isatap = number >> 32 & 0xFDFFFFFF == 0x00005EFE  # The mask leaves out the bit for global scope.
    is_compatible = 1 < number < 1 << 32
    if ip in NAT64 or is_isatap or is_compatible:
        return ipaddress.IPv4Address(number & 0xFFFFFFFF)
    return None


def range_of(address: str) -> str:
    """Return the /24 (IPv4) or /48 (IPv6) network of a multiaddr's first IP. Behind a relay that is the
    relay's IP. If the multiaddr begins with a name, return its protocol and the name."""
    kind, host = beginning(address)
    ip = _ip_at(kind, host)
    if ip is None:
        return f"{kind}/{host}"
    return str(ipaddress.ip_network((ip, RANGE_BITS[ip.version]), strict=False))


@lru_cache(2 * 4096)
def public_ranges(addresses: tuple[str, ...]) -> frozenset[str]:
    """Return the ranges of the public IPs among a peer's addresses. Private addresses are left out, as those
    of a lab would all share one range. Addresses behind a relay are left out too: a relay has its own limits.
    """
    direct = [address for address in addresses if "/p2p-circuit" not in address]
    ips = [(_ip_at(*beginning(address)), address) for address in direct]
    return frozenset(range_of(address) for ip, address in ips if ip is not None and is_public(ip))


def dialable(addresses: Iterable[str], own: Iterable[str]) -> tuple[str, ...]:
    """Return those of `addresses`, the multiaddrs in a record, that a peer with the addresses `own` may dial.

    Names, public addresses and this machine's own are allowed. A private one is allowed in a block where this
    peer is too, and a loopback one if this peer has no others. A resolved name must pass again
    (protocols/daemon/names.py)."""
    direct = [address for address in own if "/p2p-circuit" not in address]
    ips = [_ip_at(*beginning(address)) for address in direct]
    own_ips = [ip for ip in ips if ip is not None]
    return tuple(address for address in addresses if _may_dial(address, own_ips))


def _may_dial(address: str, own_ips: list[IP]) -> bool:
    """Return whether a peer with the IPs `own_ips` may dial a multiaddr (the rules of `dialable`)."""
    kind, host = beginning(address)
    ip = _ip_at(kind, host)
    if ip is None and kind in NAME_KINDS:  # The caller resolves it and checks the result.
        return host.rstrip(".").rpartition(".")[2].lower() != "localhost"
    if kind == MEMORY:
        return True
    if ip is None or ip.is_multicast or ip.is_unspecified or ip.is_link_local:
        return False
    if ip.is_loopback:
        return bool(own_ips) and all(own_ip.is_loopback for own_ip in own_ips)
    if is_public(ip) or ip in own_ips:  # Some machines have an address that is neither public nor private.
        return True
    return any(ip in block and any(own_ip in block for own_ip in own_ips) for block in PRIVATE_BLOCKS)


def _ip_at(kind: str, host: str) -> IP | None:
    """Return the IP of a multiaddr that begins with protocol `kind` and value `host`; None if it has none."""
    if kind in NAME_KINDS:
        return host_ip(host)
    return ip_of(host) if kind in ("ip4", "ip6") else None


def beginning(address: str) -> tuple[str, str]:
    """Return the first protocol of a multiaddr and its value."""
    _, kind, host, *_ = [*address.split("/"), "", "", ""]
    return kind, host
