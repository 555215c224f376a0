"""Keep slots at relays for a peer that others may not be able to dial.

A slot is a reservation at a relay: the relay then forwards connections (circuits) to the peer
(circuit_relay.py). A peer cannot detect from inside whether others can dial it, so it reserves slots even
without a firewall. An unused slot costs the relay almost nothing, and dialling peers try the direct addresses
first (p2pd/connect.py). A slot is useless once the peer's connection to the relay has ended, so a ping
watches that connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from protocols.daemon.multiaddr import is_circuit
from protocols.daemon.p2pd import DAEMON_ERRORS, Daemon
from protocols.dht.directory import split_multiaddr
from protocols.errors import PeerGone, WireError
from protocols.reachability.circuit_relay import PING_PROTOCOL, STEP_SECONDS, reserve
from swarmnet.identifiers import PeerId

MAX_RELAYS = 3
"""Maximum number of relays. One is enough; each more is a fallback and adds two addresses to the record."""
ADDRESSES_PER_RELAY = 2
PING_BYTES = 32
PING_SECONDS = 10.0
"""Ping interval in seconds. go-libp2p ends a ping stream after 60 s of silence."""
RENEW_SECONDS = 900.0
"""Renewal interval in seconds, well within the hour that a slot lasts."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 10.0

Tell = Callable[[str, PeerId, Sequence[str]], None]
"""Called with (text for people, relay, addresses through it)."""


def usable_relays(multiaddrs: Sequence[str]) -> dict[PeerId, tuple[str, ...]]:
    """Return the first `MAX_RELAYS` peers that can be relays for peers on other machines, with their
    addresses. Loopback addresses, and those that lead through a relay themselves, are left out."""
    relays: dict[PeerId, list[str]] = {}
    for multiaddr in multiaddrs:
        if is_circuit(multiaddr) or multiaddr.startswith(("/ip4/127.", "/ip6/::1/")):
            continue
        peer, address = split_multiaddr(multiaddr)
        relays.setdefault(peer, []).append(address)
    chosen = list(relays.items())[:MAX_RELAYS]
    return {peer: tuple(addresses[:ADDRESSES_PER_RELAY]) for peer, addresses in chosen}


def circuits_through(multiaddrs: Sequence[str]) -> tuple[str, ...]:
    """Return the circuit addresses of any peer that has a slot at one of these relays."""
    relays = usable_relays(multiaddrs).items()
    return tuple(circuit(address, relay) for relay, addresses in relays for address in addresses)


def circuit(address: str, relay: PeerId) -> str:
    """Return the address through a relay at `address`, without the target peer's own /p2p/ part."""
    return f"{address}/p2p/{relay}/p2p-circuit"


class Relays:
    """Keeps the slots of one peer. Start with `use`."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._slots: dict[PeerId, tuple[str, ...]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._has_slot = asyncio.Event()
        self.moved: Callable[[], None] = lambda: None
        """Called when `addresses` has changed."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs through the relays, without this peer's own /p2p/ part."""
        return tuple(address for slot in self._slots.values() for address in slot)

    def use(self, multiaddrs: Sequence[str], tell: Tell) -> None:
        """Keep a slot at each usable relay among these addresses, in the background until `close`.
        `tell(text, relay, addresses)` is called when a slot was reserved or lost."""
        for relay, addresses in usable_relays(multiaddrs).items():
            keeping = self._keep_slot(relay, addresses, tell)
            self._tasks.append(asyncio.create_task(keeping, name=f"relay {relay}"))

    async def first(self, seconds: float) -> bool:
        """Wait up to `seconds` for the first slot. Returns False if there is none by then, or no relay."""
        if not self._tasks:
            return False
        try:
            async with asyncio.timeout(seconds):
                await self._has_slot.wait()
        except TimeoutError:
            return False
        return True

    async def _keep_slot(self, relay: PeerId, addresses: Sequence[str], tell: Tell) -> None:
        """Reserve and renew a slot at one relay forever, with growing pauses after failures. `tell` is called
        for each new slot, and for each failure whose reason differs from the one before."""
        pause = FIRST_PAUSE_SECONDS
        reported_reason = ""
        while True:
            try:
                await self._daemon.connect(relay, addresses, STEP_SECONDS)
                await reserve(self._daemon, relay)
                if relay not in self._slots:
                    circuits = tuple(circuit(address, relay) for address in addresses)
                    self._slots[relay] = circuits
                    self._has_slot.set()
                    self.moved()
                    text = f"who cannot dial this peer directly reaches it through {circuits[0]}"
                    tell(text, relay, circuits)
                    pause, reported_reason = FIRST_PAUSE_SECONDS, ""
                await self._watch(relay)
                continue  # Reserve the slot again, to renew it.
            except (WireError, *DAEMON_ERRORS) as error:
                reason = str(error) or type(error).__name__
            if self._slots.pop(relay, None) is not None:
                self.moved()
            if reason != reported_reason:
                reported_reason = reason
                tell(f"nobody reaches this peer through {relay} now: {reason}", relay, ())
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)

    async def _watch(self, relay: PeerId) -> None:
        """Ping the relay regularly, and return after `RENEW_SECONDS`, when the slot must be renewed. Raises
        PeerGone when the connection has ended, TimeoutError if a ping is not answered."""
        reader, writer = await self._daemon.open_stream(relay, PING_PROTOCOL, STEP_SECONDS)
        clock = asyncio.get_running_loop().time
        until = clock() + RENEW_SECONDS
        try:
            while clock() < until:
                try:
                    async with asyncio.timeout(PING_SECONDS):
                        data = await reader.read(PING_BYTES)
                except TimeoutError:  # The relay was silent, as it should be: ping it.
                    writer.write(bytes(PING_BYTES))
                    async with asyncio.timeout(STEP_SECONDS):
                        await reader.readexactly(PING_BYTES)
                else:
                    raise PeerGone("it speaks unasked" if data else "its connection has ended")
        finally:
            writer.transport.abort()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
