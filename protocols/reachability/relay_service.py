"""The relay's side of circuits (circuit_relay.py): what a bootstrap carries for peers that nobody can dial.

p2pd has a relay of its own, but a race at its start settles with which limits: 128 KiB and two minutes a
circuit, or 4 GiB and half an hour (it registers two, the last one counts). This one takes its place: no limit
on a circuit, a share in its owner's upload limit, and a count of what it carries.

Who may have a slot: anybody, while there are some. What a stranger can make of it: circuits to those who have
asked to be reached, CIRCUITS_PER_PEER at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from protocols.daemon.hivemind_imports import P2P, StreamInfo
from protocols.daemon.multiaddr import is_circuit
from protocols.daemon.p2pd import DAEMON_ERRORS
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
from protocols.reachability.dial_back_service import observed_ip
from swarmnet.identifiers import PeerId
from swarmnet.membership.address_ranges import IP

SLOTS = 1024
"""A slot is an entry here and a connection that stands anyway, to the directory."""
SLOTS_PER_IP = 64
"""Of strangers who make themselves keys; a house, or a provider's shared address, has room."""
SLOT_SECONDS = 3600.0
"""As go-libp2p's."""
CIRCUITS = 256
"""Two descriptors here and four in p2pd each: a third of OPEN_FILES."""
CIRCUITS_PER_PEER = 32
"""Open from or to one peer: ten neighbours in its group, and some of the stages next to it."""
STREAMS, STREAMS_PER_PEER = CIRCUITS + 64, CIRCUITS_PER_PEER + 4
"""Open at once, with those that have not said yet what they are for."""
WRITE_SECONDS = 30.0
"""The other side is connected and reads nothing."""
_READ_BYTES = 64 * 1024
_STATUS = {
    "slots_full": REFUSED, "address_full": REFUSED, "relayed": REFUSED, "no_slot": NO_RESERVATION,
    "circuits_full": LIMIT_EXCEEDED, "peer_full": LIMIT_EXCEEDED, "not_reached": CONNECTION_FAILED,
    "malformed": MALFORMED,
}  # fmt: skip
"""What an asker is told, by why it gets nothing (peers/telemetry/reasons.py, RELAYING)."""


class OpensStreams(Protocol):
    """What is needed of `Daemon`."""

    async def open_stream(
        self, peer: PeerId, protocol: str, deadline_seconds: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]: ...


class RelayService:
    """Answers on streams that others open."""

    def __init__(self, daemon: OpensStreams, now: Callable[[], float] = time.time) -> None:
        self._daemon, self._now = daemon, now
        self.upload: Upload | None = None
        """What all links of this process may send together, circuits among them; None: no limit."""
        self.carried_bytes = 0
        """Through circuits, both ways together."""
        self.refused: Counter[str] = Counter()
        """Slots and circuits that were asked for and not given, by code (`_STATUS`, `streams_full`)."""
        self._slots: dict[PeerId, tuple[float, IP | None]] = {}
        """By whom: until when, and from where."""
        self._ends: Counter[PeerId] = Counter()
        """Open circuits by who is at one of their ends."""
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._streams: Counter[PeerId] = Counter()

    async def serve(self, p2p: P2P) -> None:
        """Register with p2pd, in place of its own."""
        await p2p.add_binary_stream_handler(HOP_PROTOCOL, self.accept)

    @property
    def slots(self) -> int:
        """Reserved now."""
        return len(self._slots)

    @property
    def circuits(self) -> int:
        """Open now."""
        return self._ends.total() // 2

    async def accept(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one stream to its end."""
        task, peer = asyncio.current_task(), PeerId(info.peer_id.to_base58())
        if task is None or len(self._open) >= STREAMS or self._streams[peer] >= STREAMS_PER_PEER:
            self.refused["streams_full" if len(self._open) >= STREAMS else "peer_full"] += 1
            writer.transport.abort()
            return
        self._open[task] = writer
        self._streams[peer] += 1
        try:
            await self._answer(peer, str(info.addr), reader, writer)
        except (WireError, *DAEMON_ERRORS):
            pass  # It has gone, or is no asker.
        finally:
            self._streams[peer] -= 1
            self._streams += Counter()  # Without those that are at 0.
            del self._open[task]
            writer.transport.abort()

    async def _answer(
        self, peer: PeerId, seen: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        answer: Fields
        try:
            ask = await read_fields(reader)
            kind = number_in(ask, 1)
            if is_circuit(seen):  # A circuit through a circuit would be carried twice.
                answer = self._refusal("relayed")
            elif kind == HOP_RESERVE:
                answer = self._reserve(peer, observed_ip(seen))
            elif kind == HOP_CONNECT:
                code = await self._connect(peer, peer_in(ask), reader, writer)
                if not code:
                    return
                answer = self._refusal(code)
            else:
                raise Malformed("neither RESERVE nor CONNECT")
        except Malformed:
            answer = self._refusal("malformed")
        writer.write(encode(answer))
        async with asyncio.timeout(STEP_SECONDS):
            await reader.read(1)  # The asker ends it: our end could overtake the answer.

    def _refusal(self, code: str) -> Fields:
        self.refused[code] += 1
        return {1: HOP_STATUS, 5: _STATUS[code]}

    def _reserve(self, peer: PeerId, ip: IP | None) -> Fields:
        now = self._now()
        if peer not in self._slots:
            self._slots = {one: slot for one, slot in self._slots.items() if slot[0] > now}
            if len(self._slots) >= SLOTS:
                return self._refusal("slots_full")
            if sum(other == ip for _, other in self._slots.values()) >= SLOTS_PER_IP:
                return self._refusal("address_full")
        self._slots[peer] = (now + SLOT_SECONDS, ip)
        return {1: HOP_STATUS, 3: {1: int(now + SLOT_SECONDS)}, 4: NO_LIMIT, 5: OK}

    async def _connect(
        self, source: PeerId, target: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> str:
        """Carry a circuit to its end, and the empty string; or at once why there is none."""
        until, _ = self._slots.get(target, (0.0, None))
        if until <= self._now() or source == target:
            return "no_slot"
        if self.circuits >= CIRCUITS:
            return "circuits_full"
        if max(self._ends[source], self._ends[target]) >= CIRCUITS_PER_PEER:
            return "peer_full"
        self._ends.update((source, target))
        far: asyncio.StreamWriter | None = None
        try:
            try:
                far_reader, far = await self._daemon.open_stream(target, STOP_PROTOCOL, STEP_SECONDS)
                far.write(encode({1: STOP_CONNECT, 2: peer_field(source), 3: NO_LIMIT}))
                told = await read_fields(far_reader)
            except (WireError, *DAEMON_ERRORS):
                return "not_reached"
            if number_in(told, 1) != STOP_STATUS or number_in(told, 4) != OK:
                return "not_reached"
            writer.write(encode({1: HOP_STATUS, 4: NO_LIMIT, 5: OK}))
            await self._carry(reader, writer, far_reader, far)
            return ""
        finally:
            if far is not None:
                far.close()
            self._ends.subtract((source, target))
            self._ends += Counter()

    async def _carry(
        self, near: asyncio.StreamReader, near_writer: asyncio.StreamWriter,
        far: asyncio.StreamReader, far_writer: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        """Both ways, until one side ends it."""
        ways = [
            asyncio.create_task(self._pump(near, far_writer), name="circuit out"),
            asyncio.create_task(self._pump(far, near_writer), name="circuit back"),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES):
            if self.upload is not None:
                await self.upload.turn(len(data), Chunk.priority)
            writer.write(data)
            async with asyncio.timeout(WRITE_SECONDS):
                await writer.drain()
            self.carried_bytes += len(data)

    async def close(self) -> None:
        """Cut all circuits."""
        for writer in self._open.values():  # Cancelling their tasks makes asyncio 3.11 complain.
            writer.transport.abort()
        await asyncio.gather(*self._open, return_exceptions=True)
