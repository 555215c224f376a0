"""Which way a link goes: directly where either side can dial, through a circuit
(reachability/circuit_relay.py) where none can.

libp2p keeps one connection between two peers and is content with any: a peer that was first met through a
relay would be spoken to through the relay for ever. So whoever opens a stream and finds itself on a circuit
knocks at the other's direct addresses; if somebody opens, the circuit is given up for a direct connection.
That serves the streams of the other side, too, which perhaps could not have dialled. And where a direct
connection comes to stand beside a circuit (p2pd dials by itself where it can), links leave the circuit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from protocols.daemon.multiaddr import is_circuit, through_relay
from protocols.daemon.p2pd import Daemon, Stream
from protocols.errors import PeerGone, Unreachable
from protocols.reachability.circuit_relay import PING_PROTOCOL
from protocols.reachability.dial_back_service import place_of
from swarmnet.identifiers import PeerId

HEAD_START_SECONDS = 1.0
"""Of direct addresses before a relay's: a TCP and TLS handshake at 300 ms round trip."""
KNOCK_SECONDS = 1.5
KNOCKS = 4
"""Addresses of one peer at once."""
SHUT_SECONDS = 600.0
"""How long doors that nobody opened are left alone."""
MOST_SHUT = 4096
LOOK_SECONDS = 5.0
"""Between two looks whether a direct connection stands beside a circuit."""
_GREETING = b"\x13/multistream/1.0.0\n"


async def knock(address: str) -> bool:
    """Whether a libp2p host answers at a TCP multiaddr; who it is only a dial can tell."""
    place = place_of(address)
    if place is None or address.startswith(("/ip4/127.", "/ip6/::1/")):
        return False
    writer = None
    try:
        async with asyncio.timeout(KNOCK_SECONDS):
            reader, writer = await asyncio.open_connection(place.host, place.port)
            writer.write(_GREETING)
            return await reader.readexactly(len(_GREETING)) == _GREETING
    except (OSError, EOFError, UnicodeError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.transport.abort()


class Ends(Protocol):
    """What is needed of a link."""

    @property
    def closed(self) -> bool: ...

    def fail(self, reason: str) -> None: ...


class Dialling:
    """How one peer dials the others."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._leaving: set[asyncio.Task[None]] = set()
        self._clock = asyncio.get_running_loop().time
        self._shut: dict[PeerId, float] = {}
        """Until when the direct addresses of these peers are not knocked at again."""

    async def stream(
        self, peer: PeerId, protocol: str, addresses: Sequence[str], deadline_seconds: float
    ) -> Stream:
        """A stream by the best way that is found in time; `addresses` are hints. Raises PeerGone."""
        until = self._clock() + deadline_seconds
        direct = [each for each in addresses if not is_circuit(each)]
        if addresses:
            await self._connect(peer, direct, [each for each in addresses if is_circuit(each)], until)
        stream = await self._daemon.stream(peer, protocol, self._left(until))
        if not direct or not through_relay(stream.address) or not await self._opens(peer, direct):
            return stream
        stream.writer.transport.abort()
        await self._daemon.disconnect(peer, self._left(until))
        await self._connect(peer, direct, [], until)
        stream = await self._daemon.stream(peer, protocol, self._left(until))
        if through_relay(stream.address):  # Somebody else answered at its address.
            self._leave_alone(peer)
        return stream

    def leave_circuit(self, peer: PeerId, link: Ends) -> None:
        """End this link, which goes through a relay, when a direct connection to its peer stands: whoever
        opened it does so again."""
        task = asyncio.create_task(self._leave(peer, link), name=f"circuit to {peer}")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _leave(self, peer: PeerId, link: Ends) -> None:
        while not link.closed:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                probe = await self._daemon.stream(peer, PING_PROTOCOL, LOOK_SECONDS)
            except PeerGone:
                continue  # The link will notice.
            probe.writer.transport.abort()
            if not through_relay(probe.address):
                link.fail("a direct connection stands now, and this was a circuit")

    async def close(self) -> None:
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _connect(
        self, peer: PeerId, direct: Sequence[str], circuits: Sequence[str], until: float
    ) -> None:
        """Have a connection, if any address leads to one in time. Raises PeerGone at the deadline."""
        tries = [([*direct, *circuits], self._left(until))]
        if direct and circuits and self._clock() >= self._shut.get(peer, 0.0):
            tries.insert(0, (list(direct), HEAD_START_SECONDS))
        for addresses, seconds in tries:
            try:
                await self._daemon.connect(peer, addresses, min(seconds, self._left(until)))
            except Unreachable as error:
                if self._left(until) <= 0.0:
                    raise PeerGone(str(error)) from None
                # else it may have moved: libp2p's own routing may know where
            else:
                return

    async def _opens(self, peer: PeerId, direct: Sequence[str]) -> bool:
        """Whether somebody opens at one of the direct addresses; where nobody did lately, nobody is asked."""
        if self._clock() < self._shut.get(peer, 0.0):
            return False
        if any(await asyncio.gather(*(knock(address) for address in direct[:KNOCKS]))):
            return True
        self._leave_alone(peer)
        return False

    def _leave_alone(self, peer: PeerId) -> None:
        self._shut.pop(peer, None)
        self._shut[peer] = self._clock() + SHUT_SECONDS
        while len(self._shut) > MOST_SHUT:
            del self._shut[next(iter(self._shut))]

    def _left(self, until: float) -> float:
        return max(0.0, until - self._clock())
