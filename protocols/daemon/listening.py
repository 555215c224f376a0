"""Check whether a TCP port accepts connections, before libp2p dials it.

libp2p waits longer after each failed dial, up to 5 minutes. A check without libp2p does not add to this
back-off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence


def tcp_place(address: str) -> tuple[str, int] | None:
    """Return host and port of a plain TCP multiaddr, or None for any other."""
    match address.strip("/").split("/"):
        case [("ip4" | "ip6" | "dns" | "dns4" | "dns6"), host, "tcp", port] if port.isdecimal():
            return host, int(port)
        case _:
            return None


async def listens_at_any(addresses: Sequence[str], deadline_seconds: float) -> bool:
    """Return True if one of these addresses accepts a TCP connection in time. Also return True, without a
    check, if one of them is not plain TCP."""
    hosts_and_ports = [place for place in map(tcp_place, addresses) if place is not None]
    if len(hosts_and_ports) < len(addresses):
        return True
    checks = (_listens(host, port, deadline_seconds) for host, port in hosts_and_ports)
    return any(await asyncio.gather(*checks))


async def _listens(host: str, port: int, deadline_seconds: float) -> bool:
    """Return True if a TCP connection to the port is accepted in time; it is closed at once."""
    try:
        async with asyncio.timeout(deadline_seconds):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
