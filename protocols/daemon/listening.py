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
    """Return True if one of these ports accepts a connection in time, or if an address is not plain TCP."""
    places = [place for place in map(tcp_place, addresses) if place is not None]
    if len(places) < len(addresses):
        return True
    return any(await asyncio.gather(*(_listens(place, deadline_seconds) for place in places)))


async def _listens(place: tuple[str, int], deadline_seconds: float) -> bool:
    try:
        async with asyncio.timeout(deadline_seconds):
            _, writer = await asyncio.open_connection(*place)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True
