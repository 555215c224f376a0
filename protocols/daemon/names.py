"""Resolve host names in multiaddrs from untrusted peers, and filter the results by the rules for addresses.

The p2pd process would resolve names itself and dial any address that the DNS returns, also private ones. It
therefore gets IP addresses only. The rules (swarmnet/membership/address_ranges.py) depend on the addresses at
which this peer itself is reached: for example, it dials private addresses only in its own private block.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

from swarmnet.membership.address_ranges import NAME_KINDS, beginning, dialable, host_ip

LOOK_UP_SECONDS = 3.0
"""DNS timeout in seconds. A resolver retries after 5 s (resolv.conf(5)), and opening a link may take 8 s."""
MAX_NAMES = 4
"""Maximum number of names per peer that are resolved at once, equal to the addresses tried (connect.py)."""
MAX_ADDRESSES_OF_NAME = 4
"""Maximum number of addresses used per name. A host with IPv4 and IPv6 has two."""

LookUp = Callable[[str], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a name (`look_up`, or a stand-in)."""


async def look_up(name: str) -> Sequence[str]:
    """Return the IP addresses of a name, or the IP that `name` already is. Empty if the name has none or the
    DNS does not answer within `LOOK_UP_SECONDS`."""
    ip = host_ip(name)
    if ip is not None:
        return (str(ip),)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LOOK_UP_SECONDS):
            entries = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError):
        return ()
    return [str(entry[4][0]) for entry in entries]


async def resolve_dialable(
    addresses: Sequence[str], own: Sequence[str], names: LookUp = look_up
) -> tuple[str, ...]:
    """Return those of `addresses` that a peer reached at `own` may dial, with IP addresses in place of names.
    The first `MAX_NAMES` names are resolved by `names`. The rules are applied before that and again after."""
    allowed = dialable(addresses, own)
    named = [address for address in allowed if beginning(address)[0] in NAME_KINDS][:MAX_NAMES]
    looked_up = await asyncio.gather(*(_resolve(address, names) for address in named))
    resolved = dict(zip(named, looked_up, strict=True))
    result: dict[str, None] = {}  # Used as an ordered set.
    for address in allowed:
        if beginning(address)[0] not in NAME_KINDS:
            result[address] = None
        else:
            result |= dict.fromkeys(dialable(resolved.get(address, ()), own))
    return tuple(result)


async def _resolve(address: str, names: LookUp) -> list[str]:
    """Return the multiaddr once per IP address of its name, with the address in place of the name. A dns4 or
    dns6 multiaddr gives IPv4 or IPv6 only. At most `MAX_ADDRESSES_OF_NAME` are returned."""
    kind, host = beginning(address)
    suffix = address.removeprefix(f"/{kind}/{host}")
    prefixes = [f"/ip{6 if ':' in ip else 4}/{ip}" for ip in await names(host)]
    # The character at index 3 is the IP version, both in `dns4` or `dns6` and in a prefix `/ip4/...`.
    fitting = [prefix for prefix in dict.fromkeys(prefixes) if kind == "dns" or prefix[3] == kind[3]]
    return [prefix + suffix for prefix in fitting[:MAX_ADDRESSES_OF_NAME]]
