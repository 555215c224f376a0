"""Keep a running peer discoverable by contacting its bootstraps regularly, even if they never failed.

Bootstraps are the configured peers through which newcomers join. They count as lost if this peer's DHT
routing table contains no bootstrap and no bootstrap answers. Newcomers may then not find this peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random

from peers.network.discovery.bootstrap import ANSWER_SECONDS
from peers.telemetry.log_events import Notify
from protocols.dht.directory import DhtDirectory, split_multiaddr
from swarmnet.identifiers import PeerId
from swarmnet.membership.bootstrap_contacts import LONGEST_ASK_SECONDS, BootstrapContacts

LOOK_SECONDS = 1.0
"""Interval of the checks of the routing table in seconds; they cost nothing."""


class Rejoining:
    """Contacts bootstraps when `BootstrapContacts` says so, and reports changes to user and metric."""

    def __init__(
        self,
        directory: DhtDirectory,
        bootstraps: Sequence[str],
        remembered: Callable[[], Sequence[str]],
        *,
        me: PeerId,
        notify: Notify,
        set_lost: Callable[[float], object],
        chance: Random,
    ) -> None:
        """Create the checks. `bootstraps` and `remembered` are multiaddrs; `set_lost` sets the gauge."""
        self.directory = directory
        self.bootstraps = [address for address in bootstraps if split_multiaddr(address)[0] != me]
        self.remembered = remembered
        self.me = me
        self.notify = notify
        self.set_lost = set_lost
        self.contacts = BootstrapContacts(
            [split_multiaddr(address)[0] for address in self.bootstraps], chance
        )

    async def run(self) -> None:
        """Call `look` once in `LOOK_SECONDS` until cancelled, beginning when the routing table has a peer. A
        peer without configured bootstraps begins at once."""
        joined = not self.bootstraps
        while True:
            joined = joined or bool(self.directory.met())
            if joined:
                await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Contact the bootstraps and remembered peers that are due. Notify the user when all bootstraps
        become lost, and when one answers again. Set the gauge."""
        were_lost = self.contacts.lost
        clock = asyncio.get_running_loop()
        remembered: Sequence[str] = self.remembered() if self.contacts.wants_remembered else ()
        addresses = [*self.bootstraps, *remembered]
        other_peers = [peer for peer in map(_peer_of, remembered) if peer != self.me]
        due = set(self.contacts.look(self.directory.met(), other_peers, clock.time()))
        if due:
            tried = [address for address in addresses if _peer_of(address) in due]
            answered = await self.directory.ask_again(tried, ANSWER_SECONDS)
            for peer in due:
                self.contacts.record_answer(peer, peer in answered, clock.time())
        self.set_lost(float(self.contacts.lost))
        if self.contacts.lost and not were_lost:
            self.notify(
                "bootstraps_lost",
                f"no bootstrap answers any more, so newcomers may not find this peer: it asks again at least "
                f"every {LONGEST_ASK_SECONDS * 1.2:.0f} s; training goes on",
            )
        elif were_lost and not self.contacts.lost:
            self.notify("bootstraps_found", "a bootstrap answers again: newcomers find this peer")


def _peer_of(address: str) -> PeerId:
    return split_multiaddr(address)[0]
