"""The relay's side of circuits (circuit_relay.py): what a bootstrap carries for peers that nobody can dial.

p2pd has a relay of its own, but a race at its start settles with which limits: 128 KiB and two minutes a
circuit, or 4 GiB and half an hour (it registers two, the last one counts). This one takes its place: no limit
on a circuit, a share in its owner's upload limit, and a count of what it carries.

Who may have a slot: anybody, while there are some. What a stranger can make of it: circuits to those who have
asked to be reached, CIRCUITS_PER_PEER at a time, CIRCUITS_PER_RANGE with all others of its address range.
Which circuit gives way when there are too many is swarmnet/resources/circuit_table.py's decision.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
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
from swarmnet.identifiers import PeerId
from swarmnet.membership.address_ranges import range_of
from swarmnet.resources.circuit_table import CircuitLimits, CircuitTable, NoCircuit, gives_way

SLOTS = 1024
"""A slot is an entry here and a connection that stands anyway, to the directory."""
SLOTS_PER_RANGE = 64
"""Of one /24 or /48, where strangers make themselves keys; a provider's shared address has room."""
SLOT_SECONDS = 3600.0
"""As go-libp2p's."""
CIRCUITS = 256
"""Two descriptors here and four in p2pd each: a third of OPEN_FILES."""
CIRCUITS_PER_PEER = 32
"""Open from or to one peer: ten neighbours in its group, and some of the stages next to it."""
CIRCUITS_PER_RANGE = CIRCUITS // 4
"""Opened from one /24 or /48, as many as it may have slots: four networks fill a relay, then the newest give
way."""
STREAMS, STREAMS_PER_PEER = CIRCUITS + 64, CIRCUITS_PER_PEER + 4
"""Open at once, with those that have not said yet what they are for."""
WRITE_SECONDS = 30.0
"""The other side is connected and reads nothing."""
_READ_BYTES = 64 * 1024
_STATUS = {
    "slots_full": REFUSED, "address_full": REFUSED, "relayed": REFUSED, "no_slot": NO_RESERVATION,
    "circuits_full": LIMIT_EXCEEDED, "range_full": LIMIT_EXCEEDED, "peer_full": LIMIT_EXCEEDED,
    "not_reached": CONNECTION_FAILED, "malformed": MALFORMED,
}  # fmt: skip
"""What an asker is told, by why it gets nothing (peers/telemetry/reasons.py, RELAYING)."""


_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class _Stream:
    """A stream that another peer has opened."""

    writer: asyncio.StreamWriter
    address_range: str
    cut: bool = False
    """It has given way, and its task is about to end."""


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
        self.table = CircuitTable(CircuitLimits(CIRCUITS, CIRCUITS_PER_PEER, CIRCUITS_PER_RANGE))
        self._slots: dict[PeerId, tuple[float, str]] = {}
        """By peer: until when, and the address range that it came from."""
        self._cuts: dict[int, asyncio.Event] = {}
        """By circuit: what ends it when it gives way."""
        self._open: dict[asyncio.Task[None], _Stream] = {}
        """In the order in which they were opened."""
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
        return len(self.table)

    async def accept(
        self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one stream to its end."""
        task, peer = asyncio.current_task(), PeerId(info.peer_id.to_base58())
        seen = str(info.addr)
        code = "peer_full" if self._streams[peer] >= STREAMS_PER_PEER else self._crowded(range_of(seen))
        if task is None or code:
            self.refused[code] += 1
            writer.transport.abort()
            return
        self._open[task] = _Stream(writer, range_of(seen))
        self._streams[peer] += 1
        try:
            await self._answer(peer, seen, reader, writer)
        except (WireError, *DAEMON_ERRORS):
            pass  # It has gone, or is no asker.
        finally:
            self._streams[peer] -= 1
            self._streams += Counter()  # Without those that are at 0.
            del self._open[task]
            writer.transport.abort()

    def _crowded(self, address_range: str) -> str:
        """Make room for one more stream of that range, or the code of why there is none."""
        streams = [stream for stream in self._open.values() if not stream.cut]
        if len(streams) < STREAMS:
            return ""
        number = gives_way({at: stream.address_range for at, stream in enumerate(streams)}, address_range)
        if number is None:
            return "streams_full"
        streams[number].cut = True
        streams[number].writer.transport.abort()
        return ""

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
                answer = self._reserve(peer, range_of(seen))
            elif kind == HOP_CONNECT:
                code = await self._connect(peer, peer_in(ask), range_of(seen), (reader, writer))
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

    def _reserve(self, peer: PeerId, address_range: str) -> Fields:
        now = self._now()
        if peer not in self._slots:
            self._slots = {one: slot for one, slot in self._slots.items() if slot[0] > now}
            if len(self._slots) >= SLOTS:
                return self._refusal("slots_full")
            if sum(other == address_range for _, other in self._slots.values()) >= SLOTS_PER_RANGE:
                return self._refusal("address_full")
        self._slots[peer] = (now + SLOT_SECONDS, address_range)
        return {1: HOP_STATUS, 3: {1: int(now + SLOT_SECONDS)}, 4: NO_LIMIT, 5: OK}

    async def _connect(
        self, source: PeerId, target: PeerId, address_range: str, near: _Ends
    ) -> str:
        """Carry a circuit to its end, and the empty string; or at once why there is none."""
        until, _ = self._slots.get(target, (0.0, ""))
        if until <= self._now() or source == target:
            return "no_slot"
        try:
            number, displaced = self.table.open(
                source=source, target=target, address_range=address_range, now=_loop_seconds()
            )
        except NoCircuit as error:
            return error.code
        if displaced is not None:
            self._cuts[displaced].set()
        self._cuts[number] = asyncio.Event()
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
            near[1].write(encode({1: HOP_STATUS, 4: NO_LIMIT, 5: OK}))
            await self._carry(number, near, (far_reader, far))
            return ""
        finally:
            if far is not None:
                far.close()
            self.table.close(number)
            del self._cuts[number]

    async def _carry(self, number: int, near: _Ends, far: _Ends) -> None:
        """Both ways, until one side ends it, it is idle, or it gives way to another."""
        ways = [
            asyncio.create_task(self._pump(number, near[0], far[1]), name="circuit out"),
            asyncio.create_task(self._pump(number, far[0], near[1]), name="circuit back"),
            asyncio.create_task(self._until_over(number), name="circuit's end"),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _until_over(self, number: int) -> None:
        """Return when the circuit is idle, or gives way to another."""
        while (left := self.table.ends_at(number) - _loop_seconds()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._cuts[number].wait()

    async def _pump(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(_READ_BYTES):
            self.table.carried(number, _loop_seconds())
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
