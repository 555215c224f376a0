"""Resolve host names in multiaddrs from untrusted peers, and filter the results by the rules for addresses.

The p2pd process would resolve names itself and dial any address that the DNS returns. It therefore gets
addresses.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

from swarmnet.membership.address_ranges import NAME_KINDS, beginning, dialable, host_ip

LOOK_UP_SECONDS = 3.0
"""DNS timeout in seconds. A resolver retries after 5 s (resolv.conf(5)), and opening a link may take 8 s."""
MAX_NAMES = 4
"""Maximum number of names per peer that are resolved at once, equal to the addresses tried (p2pd/connect.py).
"""
MAX_ADDRESSES_OF_NAME = 4
"""Maximum number of addresses used per name. A host with IPv4 and IPv6 has two."""

LookUp = Callable[[str], Awaitable[Sequence[str]]]


async def look_up(name: str) -> Sequence[str]:
    """Return the IP addresses of a name; empty if there is no answer within `LOOK_UP_SECONDS`."""
    ip = host_ip(name)
    if ip is not None:
        return (str(ip),)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LOOK_UP_SECONDS):
            found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError):
        return ()
    return [str(entry[4][0]) for entry in found]


async def resolve_dialable(
    addresses: Sequence[str], own: Sequence[str], names: LookUp = look_up
) -> tuple[str, ...]:
    """Return the multiaddrs that a peer reached at `own` may dial, with IP addresses in place of names."""
    allowed = dialable(addresses, own)
    named = [address for address in allowed if beginning(address)[0] in NAME_KINDS][:MAX_NAMES]
    looked_up = await asyncio.gather(*(_resolve(address, names) for address in named))
    resolved = dict(zip(named, looked_up, strict=True))
    found: dict[str, None] = {}
    for address in allowed:
        if beginning(address)[0] not in NAME_KINDS:
            found[address] = None
        else:
            found |= dict.fromkeys(dialable(resolved.get(address, ()), own))
    return tuple(found)


async def _resolve(address: str, names: LookUp) -> list[str]:
    """Return the multiaddr once per IP address of its name, with the address in place of the name."""
    kind, host = beginning(address)
    rest = address.removeprefix(f"/{kind}/{host}")
    texts = [f"/ip{6 if ':' in ip else 4}/{ip}" for ip in await names(host)]
    fitting = [text for text in dict.fromkeys(texts) if kind == "dns" or text[3] == kind[3]]
    return [text + rest for text in fitting[:MAX_ADDRESSES_OF_NAME]]
