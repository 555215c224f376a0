"""Find out whether other peers can dial this one: ask a connected peer to dial back from time to time.

A peer cannot see from inside whether a new connection would come through a NAT or a firewall. A helper is a
connected peer that it asks to dial its addresses. One success is believed; a failure must be confirmed by two
helpers. The result goes only into the metrics and the event log, so a lying helper gains little.

A dial-back costs the helper about a second of one core (docs/decisions/0010-dial-back.md). All peers ask
equally often, so each helps as often as it asks: twice an hour.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from peers.network.addresses import LOOPBACK, TRIED, Addresses, has_untried, is_public_address
from protocols.daemon.multiaddr import is_circuit
from protocols.daemon.p2pd import DAEMON_ERRORS
from protocols.errors import WireError
from protocols.reachability.dial_back import DialBackResult
from protocols.reachability.fresh_dial import DialOutcome
from swarmnet.identifiers import PeerId

Connections = Callable[[float], Awaitable[Sequence[tuple[PeerId, str]]]]
"""Returns each connected peer and its address, within a timeout. Raises PeerGone if p2pd does not answer."""
Way = Literal["direct", "relayed", "none", "unknown"]
"""How other peers can connect to this one."""

FIRST_SECONDS = 60.0
"""Seconds after p2pd's start: by then routers, relays and the directory have answered."""
AGAIN_SECONDS = 1800.0
"""Pause in seconds after an attempt with a result."""
RETRY_SECONDS = 300.0
"""Pause in seconds after an attempt without a result."""
SHOW_SECONDS = 10.0
"""Interval for updating the result: slots at relays come and go between two probes."""
HELPERS = 8
"""Maximum peers asked for one result; those with py-libp2p can answer."""
WITNESSES = 2
"""Number of helpers that must fail before this peer counts as unreachable."""
CONNECTIONS_SECONDS = 5.0
"""Timeout for p2pd to list the connections."""

TEXTS = {
    "direct": "others get in: this peer is reachable directly",
    "relayed": "no direct connection comes in; others reach this peer through a relay, which is slower: "
    "`swarmnet doctor` with its peer file says what to fix",
    "none": "no connection comes in, and no relay leads here: this peer trains over the connections that it "
    "opens itself. `swarmnet doctor` with its peer file says what to fix",
    "unknown": "unknown whether others can connect: no peer could check",
}

Asks = Callable[[PeerId, Callable[[str], Sequence[str]]], Awaitable[DialBackResult]]
"""`ask_dial_back` of this peer: takes a helper, and a function from observed to requested addresses."""


def has_a_network(addresses: Sequence[str]) -> bool:
    """Return True if peers on other machines could reach this one at all."""
    return any(not address.startswith(LOOPBACK) for address in addresses)


def reached_an_announced(addresses: Addresses, dialled: Sequence[DialOutcome]) -> bool | None:
    """Return True if the helper reached an announced address, and False if it tried and reached none. Returns
    None if it tried no address, or left out a public one."""
    outcomes = {each.address: each.outcome for each in dialled if each.outcome in TRIED}
    if any(outcomes.get(address) == "reached" for address in addresses.announced):
        return True
    return False if outcomes and not has_untried(dialled) else None


def order_helpers(connections: Sequence[tuple[PeerId, str]], chance: Random) -> list[PeerId]:
    """Return the connected peers in the order in which to ask them: first those at public addresses, then
    private ones, then those behind a relay, each in random order. What a public peer reaches, any peer can
    reach. A peer behind a relay does not see this peer's address."""
    rank_of: dict[PeerId, int] = {}
    for peer, address in chance.sample(connections, len(connections)):
        is_private = not is_public_address(address)
        rank = 2 if is_circuit(address) else int(is_private)
        rank_of[peer] = min(rank, rank_of.get(peer, rank))
    return sorted(rank_of, key=rank_of.__getitem__)


@dataclass(eq=False, kw_only=True)
class ReachabilityProbe:
    """Probes the reachability of one peer while its p2pd runs. `tell` is called with the new `Way` whenever
    it has changed."""

    asks: Asks
    connections: Connections
    addresses: Callable[[], Addresses]
    tell: Callable[[Way], None]
    chance: Random

    def __post_init__(self) -> None:
        self.gets_in: bool | None = None
        """The last result; None if no helper could tell."""
        self.way: Way = "unknown"

    async def run(self) -> None:
        """Probe in intervals until cancelled, and update `way` between two probes. The intervals are random,
        so that peers that started together do not probe together."""
        loop = asyncio.get_running_loop()
        pause = FIRST_SECONDS
        while True:
            next_probe = loop.time() + pause * self.chance.uniform(0.5, 1.5)
            while loop.time() < next_probe:
                self._update_way()
                await asyncio.sleep(min(SHOW_SECONDS, next_probe - loop.time()))
            self.gets_in = await self.ask()
            pause = RETRY_SECONDS if self.gets_in is None else AGAIN_SECONDS

    async def ask(self) -> bool | None:
        """Ask up to `HELPERS` connected peers in turn to dial this one. Returns True as soon as a helper
        reached an announced address, and False if `WITNESSES` helpers tried and failed. If fewer could try,
        returns False if one failed, and None if none could try."""
        failures = 0
        try:
            helpers = order_helpers(await self.connections(CONNECTIONS_SECONDS), self.chance)
        except WireError:
            return None  # p2pd is about to be started again.
        for helper in helpers[:HELPERS]:
            addresses = self.addresses()
            try:
                answer = await self.asks(helper, addresses.to_ask)
            except (WireError, *DAEMON_ERRORS):
                continue
            was_reached = reached_an_announced(addresses, answer.dialled)
            if was_reached:
                return True
            if was_reached is False:
                failures += 1
            if failures == WITNESSES:
                break
        return False if failures else None

    def _update_way(self) -> None:
        """Derive `way`, how others can connect, from the last probe and the current relays. Report it if it
        has changed."""
        way: Way = "unknown"
        if self.gets_in:
            way = "direct"
        elif self.gets_in is False:
            way = "relayed" if self.addresses().relayed else "none"
        if way != self.way:
            self.way = way
            self.tell(way)
