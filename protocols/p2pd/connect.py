"""Choose the path of a link: direct if either side can dial, otherwise a relay circuit.

A circuit is a connection that a third peer relays, for peers behind a router that cannot be dialled. Between
two peers, libp2p keeps one connection, direct or circuit. A peer first met through a relay would always be
reached through the relay. Therefore a peer that opens a stream and gets a circuit probes the other's direct
addresses. If one answers, the circuit is replaced by a direct connection. This also helps the streams of the
other side, which perhaps could not have dialled. If p2pd opens a direct connection in addition to a circuit,
links (long-lived streams) leave the circuit (reachability/circuit_relay.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from protocols.daemon.multiaddr import is_circuit, through_relay
from protocols.daemon.p2pd import Daemon, Stream
from protocols.errors import PeerGone, Unreachable
from protocols.p2pd.multipath_link import P2pdLink
from protocols.reachability.circuit_relay import PING_PROTOCOL
from protocols.reachability.dial_back_service import place_of
from swarmnet.identifiers import PeerId

HEAD_START_SECONDS = 1.0
"""Head start of direct addresses before relays, in seconds: a TCP and TLS handshake at 300 ms round trip."""
KNOCK_SECONDS = 1.5
KNOCKS = 4
"""Number of addresses of one peer that are probed at once."""
SHUT_SECONDS = 600.0
"""Direct addresses that did not answer are not probed again for this many seconds."""
MAX_SHUT = 4096
LOOK_SECONDS = 5.0
"""Interval of the checks whether a direct connection exists in addition to a circuit, in seconds."""
_GREETING = b"\x13/multistream/1.0.0\n"
"""What both sides of a libp2p connection send first."""


async def probe_address(address: str) -> bool:
    """Return True if some libp2p host answers at a TCP multiaddr within `KNOCK_SECONDS`; which peer it is
    remains unknown. Loopback and other multiaddrs give False, without a probe."""
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


class Dialling:
    """Opens this peer's streams to other peers."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._leaving: set[asyncio.Task[None]] = set()
        self._clock = asyncio.get_running_loop().time
        self._unreachable_until: dict[PeerId, float] = {}
        """Maps peer to the time until which its direct addresses are not probed again."""

    async def stream(
        self, peer: PeerId, protocol: str, addresses: Sequence[str], deadline_seconds: float
    ) -> Stream:
        """Open a stream to a peer: over a direct connection if one of its direct addresses answers, otherwise
        over a circuit. `addresses` are hints; libp2p may know others. Raises PeerGone at the deadline."""
        until = self._clock() + deadline_seconds
        direct = [address for address in addresses if not is_circuit(address)]
        circuits = [address for address in addresses if is_circuit(address)]
        if addresses:
            await self._connect(peer, direct, circuits, until)
        stream = await self._daemon.stream(peer, protocol, self._seconds_left(until))
        if not direct or not through_relay(stream.address):
            return stream
        if not await self._answers_directly(peer, direct):
            return stream
        # The peer was reached through a relay but answers directly: replace the circuit.
        stream.writer.transport.abort()
        await self._daemon.disconnect(peer, self._seconds_left(until))
        await self._connect(peer, direct, [], until)
        stream = await self._daemon.stream(peer, protocol, self._seconds_left(until))
        if through_relay(stream.address):  # Another peer answered at its address.
            self._pause_probes(peer)
        return stream

    def leave_circuit(self, peer: PeerId, link: P2pdLink) -> None:
        """Watch a link over a relay in the background. End it once there is a direct connection to its peer;
        the link's owner then opens it again."""
        task = asyncio.create_task(self._leave(peer, link), name=f"circuit to {peer}")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _leave(self, peer: PeerId, link: P2pdLink) -> None:
        """Open a probe stream every `LOOK_SECONDS`, and fail the link once a probe is direct."""
        while not link.closed:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                probe = await self._daemon.stream(peer, PING_PROTOCOL, LOOK_SECONDS)
            except PeerGone:
                continue  # If the peer has gone, the link ends without this check.
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
        """Try to connect: first to the direct addresses alone, unless they recently did not answer, then to
        all. Returns without a connection if none leads to the peer. Raises PeerGone at the deadline."""
        attempts = [([*direct, *circuits], self._seconds_left(until))]  # Addresses, and their timeout.
        if direct and circuits and self._clock() >= self._unreachable_until.get(peer, 0.0):
            attempts.insert(0, (list(direct), HEAD_START_SECONDS))
        for addresses, seconds in attempts:
            try:
                await self._daemon.connect(peer, addresses, min(seconds, self._seconds_left(until)))
            except Unreachable as error:
                if self._seconds_left(until) <= 0.0:
                    raise PeerGone(str(error)) from None
                # Otherwise the peer may have a new address, which libp2p's own routing may know.
            else:
                return

    async def _answers_directly(self, peer: PeerId, direct: Sequence[str]) -> bool:
        """Return True if one of the first `KNOCKS` direct addresses answers. If none does, later calls return
        False without probing for `SHUT_SECONDS`."""
        if self._clock() < self._unreachable_until.get(peer, 0.0):
            return False
        if any(await asyncio.gather(*(probe_address(address) for address in direct[:KNOCKS]))):
            return True
        self._pause_probes(peer)
        return False

    def _pause_probes(self, peer: PeerId) -> None:
        """Stop probing the peer's direct addresses for `SHUT_SECONDS`. At most `MAX_SHUT` peers are
        remembered; the oldest is dropped first."""
        self._unreachable_until.pop(peer, None)
        self._unreachable_until[peer] = self._clock() + SHUT_SECONDS
        while len(self._unreachable_until) > MAX_SHUT:
            del self._unreachable_until[next(iter(self._unreachable_until))]

    def _seconds_left(self, until: float) -> float:
        """Return the seconds left until this time, at least 0."""
        return max(0.0, until - self._clock())
