"""Attackers for `scripts/soak floods`: strangers with fresh keys that send one peer far too much of one kind.

Who is cut comes back, first with the same key and then with fresh ones; every second key shows a signed
record and so passes for a newcomer to the victim's stage. Everything is bounded: time, keys, links, bytes.
They dial 127.0.0.1 only, and only the peer that the soak has started.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocols.daemon.hivemind_imports import MSGPackSerializer, PeerID, dht_pb2
from protocols.daemon.p2pd import DAEMON_ERRORS, LOOPBACK, Daemon
from protocols.dht.stored_values import key_id, stored_value
from protocols.errors import WireError
from protocols.framing.frames import FrameWriter
from protocols.messages.table import (
    Act,
    Chunk,
    GetManifest,
    Grad,
    Heartbeat,
    Hello,
    Lane,
    Message,
    PeerRecord,
    PeerRecords,
    ReceiptMessage,
    Statements,
    encode,
)  # fmt: skip
from protocols.p2pd.transport import P2pdTransport, protocol_name
from protocols.signed.envelope import RUN_ID_BYTES, EnvelopeKind, run_bytes, seal
from protocols.signed.identity import Identity, create, load
from protocols.signed.records import seal_record, stage_key
from protocols.signed.signed_receipts import seal_receipt
from swarmnet.identifiers import PeerId, RunId
from swarmnet.rounds.history import START
from swarmnet.rounds.receipt_rules import Receipt
from swarmnet.run.schema import WIRE_VERSION

MAX_KEYS = 6
"""Of one flood: each has a p2pd of its own, which the machine must bear."""
CUTS_PER_KEY = 3
"""So often a key comes back before it is given up for a fresh one."""
MAX_LINKS = 200
"""Of one flood."""
AGAIN_SECONDS = 0.5
"""Before who was cut comes back."""
DEADLINE_SECONDS = 10.0
QUEUED_BYTES = 1 << 20
"""On the attacker's side, before it waits for the victim to read."""
RECORDS, STATEMENTS, ITEMS = 32, 256, 900
"""In one message."""
FORGED_KEYS = 64
STREAMS, PART_BYTES, BODY_BYTES = 8, 40 << 20, 60 << 20
"""Streams at a time, and how much of each of three bodies is sent: 960 MiB together. Then nothing more."""
MAX_BODIES_BYTES = 1 << 30
LONG = (Grad("x", 1, 1, 1.0, 1, 0.0, 0.0, (1, 1, 1)), Act("x", 1, 1, 1, 1.0, (1, 1, 1)), Chunk(bytes(32), 0))
"""One of each priority."""
STORE = "DHTProtocol.rpc_store"
UNREAD = "it takes nothing since"
"""How a link of ours ends whose other side reads nothing (protocols/p2pd/multipath_link.py)."""


@dataclass(frozen=True, slots=True)
class Victim:
    """Whom it hits."""

    peer: PeerId
    address: str
    run_id: RunId
    stage: int
    block_rounds: int


@dataclass(slots=True)
class Flooded:
    """What one flood came to."""

    messages: int = 0
    sent_bytes: int = 0
    links: int = 0
    """Or streams, or calls."""
    ended: int = 0
    """Of these, by the victim."""
    pushed_back: int = 0
    """How often nothing was read for DEADLINE_SECONDS."""
    not_opened: int = 0
    keys: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    """What the victim said why, by code."""


class Deaf:
    """`Receiver` that counts what is refused."""

    def __init__(self, flooded: Flooded) -> None:
        self.flooded = flooded

    def received(self, peer: PeerId, lane: Lane, message: Message, body: bytes, wire_bytes: int) -> None:
        code = str(getattr(message, "code", "")) if type(message).__name__ == "Refuse" else ""
        if code:
            self.flooded.refusals[code] = self.flooded.refusals.get(code, 0) + 1

    def lost(self, peer: PeerId, lane: Lane, reason: str) -> None: ...

    def refused(self, peer: PeerId, code: str, reason: str) -> None: ...


Sends = Callable[[Identity, Victim], Iterator[Message]]


def beats(_me: Identity, _victim: Victim) -> Iterator[Message]:
    for number in itertools.count():
        yield Heartbeat(number, -1, 0.0, 1, True, 1, 0.0, 0, True)


def known(_me: Identity, victim: Victim) -> Iterator[Message]:
    """Records with signatures that are none."""
    other = Identity.from_seed(b"nobody")
    record = PeerRecord(other.peer_id, victim.stage, "worker", [], 0, 0.0, "0")
    good = seal_record(other, victim.run_id, record, time.time())
    for number in itertools.count():
        yield PeerRecords([_numbered(good, RECORDS * number + each) for each in range(RECORDS)])


def _numbered(data: bytes, number: int, at: int = 0) -> bytes:
    """With another sequence in the envelope that begins `at`: not what was signed."""
    return data[: at + 56] + number.to_bytes(8, "big") + data[at + 64 :]


def statements(_me: Identity, victim: Victim) -> Iterator[Message]:
    """Sound signatures of peers that nobody knows."""
    signers = [Identity.from_seed(b"signer %d" % number) for number in range(FORGED_KEYS)]
    sealed = [
        seal(signer, victim.run_id, EnvelopeKind.SETTLED, victim.stage, round, round, START + bytes(32))
        for round in range(STATEMENTS // 4) for signer in signers
    ]  # fmt: skip
    for number in itertools.count():
        first = STATEMENTS * number % len(sealed)
        yield Statements(sealed[first : first + STATEMENTS])


def receipts(me: Identity, victim: Victim) -> Iterator[Message]:
    """Properly signed, for blocks that have never been."""
    rounds, contributor = victim.block_rounds, victim.peer
    for block in itertools.count(1):
        first = rounds * block
        receipt = Receipt(
            PeerId(me.peer_id), contributor, victim.stage, first, first + rounds - 1, rounds, 10**12
        )
        yield ReceiptMessage(seal_receipt(me, victim.run_id, receipt, time.time()))


SENDS: dict[str, Sends] = {"beats": beats, "known": known, "statements": statements, "receipts": receipts}


@dataclass(slots=True)
class Attack:
    """One flood, and how far it may go."""

    name: str
    victim: Victim
    folder: Path
    """Of the attackers' keys."""
    until: float
    """Unix time."""
    stop: asyncio.Event
    flooded: Flooded = field(default_factory=Flooded)

    def over(self) -> bool:
        return time.time() >= self.until or self.stop.is_set() or self.flooded.links >= MAX_LINKS

    def identities(self) -> Iterator[tuple[int, Path]]:
        """Identity files, one for each life of the attacker."""
        for number in range(MAX_KEYS):
            if self.over():
                return
            path = self.folder / f"{self.name}-{number}"
            create(path)
            self.flooded.keys += 1
            yield number, path


async def flood_links(attack: Attack) -> None:
    """Of one of SENDS, on greeted links."""
    victim = attack.victim
    for number, path in attack.identities():
        transport = await P2pdTransport.start(path, LOOPBACK)
        transport.listen(Deaf(attack.flooded))
        me = load(path)
        record = PeerRecord(me.peer_id, victim.stage, "worker", list(transport.addresses), 0, 0.0, "0")
        shown = seal_record(me, victim.run_id, record, time.time()) if number % 2 else b""
        hello = Hello(WIRE_VERSION, run_bytes(victim.run_id), shown)
        try:
            cuts = 0
            while cuts < CUTS_PER_KEY and not attack.over():
                cuts += await _flood_link(transport, hello, SENDS[attack.name](me, victim), attack)
                await asyncio.sleep(AGAIN_SECONDS)
        finally:
            await transport.close()


async def _flood_link(
    transport: P2pdTransport, hello: Hello, messages: Iterator[Message], attack: Attack
) -> bool:
    """Until the victim ends the link (True), or it is time."""
    victim, flooded = attack.victim, attack.flooded
    try:
        link = await transport.open(victim.peer, "group", DEADLINE_SECONDS, [victim.address])
    except WireError:
        flooded.not_opened += 1
        return True
    flooded.links += 1
    try:
        link.post(hello)
        while time.time() < attack.until and not attack.stop.is_set():
            flooded.sent_bytes += link.post(next(messages))
            flooded.messages += 1
            if link.queued_bytes > QUEUED_BYTES:
                await link.drained(QUEUED_BYTES // 2, DEADLINE_SECONDS)
            elif flooded.messages % 16 == 0:
                await asyncio.sleep(0)
    except WireError as error:
        if not link.closed or UNREAD in str(error):  # Our own side gave up: nothing was ended.
            flooded.pushed_back += 1
            return False
        flooded.ended += 1
        return True
    finally:
        link.close()
    return False


async def flood_store(attack: Attack) -> None:
    """Requests to the victim's directory node to store hundreds of forged records each."""
    victim = attack.victim
    other = Identity.from_seed(b"nobody")
    record = PeerRecord(other.peer_id, victim.stage, "worker", [], 0, 0.0, "0")
    good = run_bytes(victim.run_id) + seal_record(other, victim.run_id, record, time.time())
    numbers = itertools.count()
    for _, path in attack.identities():
        daemon = await Daemon.start(path, LOOPBACK)
        try:
            cuts = 0
            while cuts < CUTS_PER_KEY and not attack.over():
                request = dht_pb2.StoreRequest(
                    keys=[key_id(stage_key(victim.run_id, victim.stage))] * ITEMS,
                    subkeys=[MSGPackSerializer.dumps(other.peer_id)] * ITEMS,
                    values=[stored_value(_numbered(good, next(numbers), RUN_ID_BYTES)) for _ in range(ITEMS)],
                    expiration_time=[time.time() + 60] * ITEMS, in_cache=[False] * ITEMS,
                )  # fmt: skip
                cuts += await _store(daemon, request, attack)
        finally:
            await daemon.stop()


async def _store(daemon: Daemon, request: Any, attack: Attack) -> bool:
    """Whether the victim ended the call."""
    victim, flooded = attack.victim, attack.flooded
    flooded.links += 1
    flooded.messages += ITEMS
    flooded.sent_bytes += request.ByteSize()
    try:
        await daemon.connect(victim.peer, [victim.address], DEADLINE_SECONDS)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await daemon.p2p.call_protobuf_handler(
                PeerID.from_base58(victim.peer), STORE, request, dht_pb2.StoreResponse
            )
    except TimeoutError:
        flooded.pushed_back += 1
    except (WireError, *DAEMON_ERRORS):
        flooded.ended += 1
        await asyncio.sleep(AGAIN_SECONDS)
        return True
    return False


async def flood_bodies(attack: Attack) -> None:
    """Messages with long bodies that never end, on streams that never greet."""
    for _, path in attack.identities():
        daemon = await Daemon.start(path, LOOPBACK)
        try:
            await daemon.connect(attack.victim.peer, [attack.victim.address], DEADLINE_SECONDS)
            await asyncio.gather(*(_hold_bodies(daemon, attack) for _ in range(STREAMS)))
        except (WireError, *DAEMON_ERRORS):
            attack.flooded.not_opened += 1
            await asyncio.sleep(AGAIN_SECONDS)
        finally:
            await daemon.stop()


async def _hold_bodies(daemon: Daemon, attack: Attack) -> None:
    """One stream after the other, each with three bodies begun: until it was cut often enough."""
    flooded = attack.flooded
    for _ in range(CUTS_PER_KEY):
        if attack.over():
            return
        try:
            peer, data = attack.victim.peer, protocol_name("data")
            reader, writer = await daemon.open_stream(peer, data, DEADLINE_SECONDS)
        except (WireError, *DAEMON_ERRORS):
            flooded.not_opened += 1
            continue
        flooded.links += 1
        try:
            async with asyncio.timeout(max(0.0, attack.until - time.time())):
                await _begin_bodies(writer, attack)
                while await reader.read(1 << 16):  # Until the victim ends it.
                    pass
            flooded.ended += 1
        except TimeoutError:
            return  # It was time.
        except DAEMON_ERRORS:
            flooded.ended += 1
        finally:
            writer.transport.abort()
        await asyncio.sleep(AGAIN_SECONDS)


async def _begin_bodies(writer: asyncio.StreamWriter, attack: Attack) -> None:
    """Raises DAEMON_ERRORS as soon as the stream is cut."""
    first = FrameWriter()
    first.post(GetManifest())
    writer.write(first.next_piece() or b"")
    part, flooded = bytes(1 << 16), attack.flooded
    for message in LONG:
        header = encode(message)
        content = struct.pack(">HI", len(header), BODY_BYTES) + header + part
        writer.write(_piece(0x80 | message.priority, content))
        for _ in range(PART_BYTES // len(part) - 1):
            if flooded.sent_bytes >= MAX_BODIES_BYTES or attack.stop.is_set():
                return
            writer.write(_piece(message.priority, part))
            flooded.sent_bytes += len(part)
            await writer.drain()
        flooded.messages += 1


def _piece(flags: int, content: bytes) -> bytes:
    return struct.pack(">BBH", flags, len(content) >> 16, len(content) & 0xFFFF) + content


FLOODS: dict[str, Callable[[Attack], Awaitable[None]]] = {
    **dict.fromkeys(SENDS, flood_links), "store": flood_store, "bodies": flood_bodies,
}  # fmt: skip
