"""Relay traffic for peers that cannot be dialled: the relay's side of libp2p's circuit relay v2.

Such a peer, the target, reserves a *slot* here (RESERVE). Another peer, the source, asks to be connected to
it (CONNECT). The forwarded connection is a *circuit*: bytes between a stream from the source and one to the
target. The messages are defined in circuit_relay.py.

On its own, p2pd registers two relays, and a race at its start decides which one counts. Their limits are 128
KiB and two minutes a circuit, or 4 GiB and half an hour. This service replaces them. It limits neither, keeps
to this peer's upload limit, and counts the traffic.

Any peer may reserve a slot while some are free. An attacker can only open circuits to peers that reserved a
slot: `CIRCUITS_PER_PEER` at a time, and `CIRCUITS_PER_RANGE` together with all others of its address range.
If there are too many, swarmnet/resources/circuit_table.py decides which circuit is closed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from protocols.daemon.hivemind_imports import P2P, StreamInfo
from protocols.daemon.multiaddr import is_circuit
from protocols.daemon.p2pd import DAEMON_ERRORS, Daemon
from protocols.errors import Malformed, WireError
from protocols.framing.upload_turns import Upload
from protocols.messages.table import Chunk
from protocols.reachability.circuit_relay import (
    CONNECTION_FAILED,
    HOP_CONNECT,
    HOP_PROTOCOL,
    HOP_RESERVE,
    HOP_STATUS,
    LIMIT_EXCEEDED,
    MALFORMED,
    NO_LIMIT,
    NO_RESERVATION,
    OK,
    REFUSED,
    STEP_SECONDS,
    STOP_CONNECT,
    STOP_PROTOCOL,
    STOP_STATUS,
    Fields,
    encode,
    number_in,
    peer_field,
    peer_in,
    read_fields,
)
from swarmnet.identifiers import PeerId
from swarmnet.membership.address_ranges import range_of
from swarmnet.resources.circuit_table import CircuitLimits, CircuitTable, NoCircuit, circuit_to_displace

SLOTS = 1024
"""Maximum number of slots. A slot is an entry here and a connection that exists anyway, for the DHT."""
SLOTS_PER_RANGE = 64
"""Maximum slots of one /24 or /48, because keys are free to create. A provider's shared address fits."""
SLOT_SECONDS = 3600.0
"""Life of a slot in seconds, as in go-libp2p."""
CIRCUITS = 256
"""Maximum number of circuits. Each takes two descriptors here and four in p2pd: a third of `OPEN_FILES`."""
CIRCUITS_PER_PEER = 32
"""Maximum circuits from or to one peer: ten neighbours in its group, and some of the adjacent stages."""
CIRCUITS_PER_RANGE = CIRCUITS // 4
"""Maximum circuits opened from one /24 or /48. If networks fill a relay, the newest circuits are closed."""
STREAMS, STREAMS_PER_PEER = CIRCUITS + 64, CIRCUITS_PER_PEER + 4
"""Maximum number of open streams, including those that have not sent a request yet."""
WRITE_SECONDS = 30.0
"""Timeout for writing in seconds: the other side is connected but reads nothing."""
_READ_BYTES = 64 * 1024
_STATUS = {
    "slots_full": REFUSED,
    "address_full": REFUSED,
    "relayed": REFUSED,
    "no_slot": NO_RESERVATION,
    "circuits_full": LIMIT_EXCEEDED,
    "range_full": LIMIT_EXCEEDED,
    "peer_full": LIMIT_EXCEEDED,
    "not_reached": CONNECTION_FAILED,
    "malformed": MALFORMED,
}
"""The status sent to a refused peer, by reason (peers/telemetry/reasons.py, RELAYING)."""


_StreamEnds = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class _Stream:
    """A stream that another peer has opened."""

    writer: asyncio.StreamWriter
    address_range: str
    cut: bool = False
    """True if it was closed to make space, and its task is about to end."""


class RelayService:
    """Answers relay requests on streams that others open."""

    def __init__(self, daemon: Daemon, now: Callable[[], float] = time.time) -> None:
        self._daemon = daemon
        self._now = now
        self.upload: Upload | None = None
        """Upload limit shared by all links of this process, circuits included; None if there is no limit."""
        self.carried_bytes = 0
        """Bytes relayed through circuits, both ways together."""
        self.refused: Counter[str] = Counter()
        """Refused slots and circuits by code (`_STATUS`, `streams_full`)."""
        self.table = CircuitTable(CircuitLimits(CIRCUITS, CIRCUITS_PER_PEER, CIRCUITS_PER_RANGE))
        self._slots: dict[PeerId, tuple[float, str]] = {}
        """Maps peer to its slot's expiry and the address range from which it was reserved."""
        self._end_events: dict[int, asyncio.Event] = {}
        """Maps circuit to the event that ends it when it must make space."""
        self._open: dict[asyncio.Task[None], _Stream] = {}
        """Open streams in the order of opening."""
        self._streams: Counter[PeerId] = Counter()

    async def serve(self, p2p: P2P) -> None:
        """Register `accept` with p2pd as its relay, in place of p2pd's own."""
        await p2p.add_binary_stream_handler(HOP_PROTOCOL, self.accept)

    @property
    def slots(self) -> int:
        return len(self._slots)

    @property
    def circuits(self) -> int:
        return len(self.table)

    async def accept(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one stream, with one request for a slot or a circuit, until it ends. A stream that exceeds
        the limits is refused, unless another stream is cut to make space."""
        task, peer = asyncio.current_task(), PeerId(info.peer_id.to_base58())
        source_address = str(info.addr)
        address_range = range_of(source_address)
        if self._streams[peer] >= STREAMS_PER_PEER:
            refusal_code = "peer_full"
        else:
            refusal_code = self._make_space(address_range)
        if task is None or refusal_code:
            self.refused[refusal_code] += 1
            writer.transport.abort()
            return
        self._open[task] = _Stream(writer, address_range)
        self._streams[peer] += 1
        try:
            await self._answer(peer, source_address, reader, writer)
        except (WireError, *DAEMON_ERRORS):
            pass  # The peer has gone, or does not speak this protocol.
        finally:
            self._streams[peer] -= 1
            self._streams += Counter()  # Removes the peers whose count is 0.
            del self._open[task]
            writer.transport.abort()

    def _make_space(self, address_range: str) -> str:
        """If `STREAMS` are open, cut one to make space for a new stream from this address range: the newest
        of the range with most streams. Returns an empty string. If the new stream itself would have to be
        cut, returns the code of its refusal."""
        streams = [stream for stream in self._open.values() if not stream.cut]
        if len(streams) < STREAMS:
            return ""
        ranges = {index: stream.address_range for index, stream in enumerate(streams)}
        index = circuit_to_displace(ranges, address_range)
        if index is None:
            return "streams_full"
        streams[index].cut = True
        streams[index].writer.transport.abort()
        return ""

    async def _answer(
        self, peer: PeerId, source_address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Read one RESERVE or CONNECT request of a peer connected from `source_address`, and write a
        reservation or a refusal. After a CONNECT that succeeds, relay the circuit until it ends instead."""
        answer: Fields
        try:
            request = await read_fields(reader)
            kind = number_in(request, 1)
            if is_circuit(source_address):  # The bytes of a circuit through a circuit would pass here twice.
                answer = self._refusal("relayed")
            elif kind == HOP_RESERVE:
                answer = self._reserve(peer, range_of(source_address))
            elif kind == HOP_CONNECT:
                target, address_range = peer_in(request), range_of(source_address)
                code = await self._connect(peer, target, address_range, (reader, writer))
                if not code:
                    return
                answer = self._refusal(code)
            else:
                raise Malformed("neither RESERVE nor CONNECT")
        except Malformed:
            answer = self._refusal("malformed")
        writer.write(encode(answer))
        async with asyncio.timeout(STEP_SECONDS):
            await reader.read(1)  # The peer closes the stream: if this side did, the answer might be lost.

    def _refusal(self, code: str) -> Fields:
        """Count a refusal and return the answer for it."""
        self.refused[code] += 1
        return {1: HOP_STATUS, 5: _STATUS[code]}

    def _reserve(self, peer: PeerId, address_range: str) -> Fields:
        """Reserve or renew a peer's slot for `SLOT_SECONDS`. Returns the answer: a refusal if there are too
        many slots, in all or of this address range. A slot can always be renewed."""
        now = self._now()
        if peer not in self._slots:
            # Drop the expired slots; each is (expiry, address range).
            self._slots = {holder: slot for holder, slot in self._slots.items() if slot[0] > now}
            if len(self._slots) >= SLOTS:
                return self._refusal("slots_full")
            slots_of_range = sum(slot_range == address_range for _, slot_range in self._slots.values())
            if slots_of_range >= SLOTS_PER_RANGE:
                return self._refusal("address_full")
        self._slots[peer] = (now + SLOT_SECONDS, address_range)
        reservation = {1: int(now + SLOT_SECONDS)}  # Field numbers: see circuit_relay.py.
        return {1: HOP_STATUS, 3: reservation, 4: NO_LIMIT, 5: OK}

    async def _connect(self, source: PeerId, target: PeerId, address_range: str, near: _StreamEnds) -> str:
        """Open a circuit from `source`, whose stream is `near`, to `target`, and relay it until it ends. Then
        return an empty string. If no circuit can be opened, return the code of the refusal. If there are too
        many circuits, the one that `self.table` chooses is ended."""
        slot_until, _ = self._slots.get(target, (0.0, ""))
        if slot_until <= self._now() or source == target:
            return "no_slot"
        try:
            number, displaced = self.table.open(
                source=source, target=target, address_range=address_range, now=_loop_seconds()
            )
        except NoCircuit as error:
            return error.code
        if displaced is not None:
            self._end_events[displaced].set()  # Ends that circuit.
        self._end_events[number] = asyncio.Event()
        far: asyncio.StreamWriter | None = None
        try:
            try:
                far_reader, far = await self._daemon.open_stream(target, STOP_PROTOCOL, STEP_SECONDS)
                far.write(encode({1: STOP_CONNECT, 2: peer_field(source), 3: NO_LIMIT}))
                response = await read_fields(far_reader)
            except (WireError, *DAEMON_ERRORS):
                return "not_reached"
            if number_in(response, 1) != STOP_STATUS or number_in(response, 4) != OK:
                return "not_reached"
            _, near_writer = near
            near_writer.write(encode({1: HOP_STATUS, 4: NO_LIMIT, 5: OK}))
            await self._relay_both_ways(number, near, (far_reader, far))
            return ""
        finally:
            if far is not None:
                far.close()
            self.table.close(number)
            del self._end_events[number]

    async def _relay_both_ways(self, number: int, near: _StreamEnds, far: _StreamEnds) -> None:
        """Relay both directions of circuit `number`, between the source's stream `near` and the target's
        stream `far`. Returns when a side ends it, it is idle, or it must make space for another."""
        (near_reader, near_writer), (far_reader, far_writer) = near, far
        tasks = [
            asyncio.create_task(self._copy(number, near_reader, far_writer), name="circuit out"),
            asyncio.create_task(self._copy(number, far_reader, near_writer), name="circuit back"),
            asyncio.create_task(self._wait_for_end(number), name="circuit's end"),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_for_end(self, number: int) -> None:
        """Return when the circuit has been idle for too long or must make space for another."""
        while (seconds_left := self.table.ends_at(number) - _loop_seconds()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds_left):
                    await self._end_events[number].wait()

    async def _copy(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy one direction of a circuit until `reader` ends, within the upload limit if there is one.
        Raises TimeoutError if the other side reads nothing for `WRITE_SECONDS`."""
        while data := await reader.read(_READ_BYTES):
            self.table.carried(number, _loop_seconds())  # The circuit is not idle.
            if self.upload is not None:
                await self.upload.turn(len(data), Chunk.priority)
            writer.write(data)
            async with asyncio.timeout(WRITE_SECONDS):
                await writer.drain()
            self.carried_bytes += len(data)

    async def close(self) -> None:
        """Cut all circuits."""
        for stream in self._open.values():  # Cancelling their tasks makes asyncio 3.11 complain.
            stream.writer.transport.abort()
        await asyncio.gather(*self._open, return_exceptions=True)


def _loop_seconds() -> float:
    return asyncio.get_running_loop().time()
