"""The decoders of the wire: all of protocols/ that reads bytes of others, and what makes their inputs."""

from __future__ import annotations

import asyncio
import math
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
from fuzz_inputs import (
    ALICE,
    BOB,
    FLOATS,
    INTEGERS,
    TEXTS,
    Decoder,
    anything,
    bent,
    built,
    fields_of,
    packed,
    swapped,
)
from msgpack import ExtType
from swarm import OWNER, sign, tiny_manifest

from peers.network.discovery.mdns import ANY, SERVICE, peer_in_announcement
from peers.worker.rounds.wire_events import read_progress
from protocols.daemon import multiaddr
from protocols.daemon.hivemind_imports import MSGPackSerializer, PeerID, dht_pb2
from protocols.daemon.p2pd import DAEMON_ERRORS
from protocols.dht.directory import split_multiaddr
from protocols.dht.stored_values import (
    DICTIONARY,
    PLAIN,
    key_id,
    split_values,
    stored_value,
    unpack_subkey,
    verify_value,
)
from protocols.dht.validator import ValidatedP2P
from protocols.errors import TooLarge, WireError
from protocols.framing.frames import FrameReader, FrameWriter
from protocols.messages.table import HEADER_LIMIT, MESSAGES, PeerRecord, Progress, decode, encode
from protocols.p2pd import chunk_streams
from protocols.p2pd.carriers import carried_peer, introduction
from protocols.p2pd.chunk_streams import ChunkCarriers, ChunkService
from protocols.p2pd.speed_test import SpeedService
from protocols.reachability import circuit_relay, dial_back
from protocols.reachability.dial_back_service import DialBackService, observed_ip, place_of
from protocols.reachability.relay_service import RelayService
from protocols.signed import msgpack_guard
from protocols.signed.envelope import ENVELOPE_BYTES, EnvelopeKind, open_envelope, run_bytes, seal
from protocols.signed.identity import public_key_bytes
from protocols.signed.invites import invite_bytes, invite_text, open_invite, prove_invite, seal_invite
from protocols.signed.moderation import add_signature, begin_moderation
from protocols.signed.opinions import OpinionDocument, open_opinion, seal_opinion
from protocols.signed.orders import open_order, seal_order
from protocols.signed.records import open_record, seal_record, stage_key
from protocols.signed.registry_entry import open_listing, seal_listing
from protocols.signed.signed_receipts import open_receipt, seal_receipt
from protocols.signed.slices import open_slices, sign_slices
from protocols.signed.stored_orders import is_stored_order, open_any_order, open_stored_order, stored_order
from swarmnet.identifiers import PeerId
from swarmnet.rounds.receipt_rules import Receipt
from swarmnet.run.canonical_form import owner_statement
from swarmnet.run.owner_orders import Ban, OwnerOrders, Withdrawal
from swarmnet.run.schema import Moderators

KINDS: tuple[Any, ...] = MESSAGES
ADDRESSES = (
    "/ip4/127.0.0.1/tcp/1",
    "/dns4/example.com/tcp/443",
    "/ip6/::1/udp/1/quic",
    "/unix/x",
    f"/ip4/1.2.3.4/tcp/1/p2p/{ALICE.peer_id}/p2p-circuit",
)
NOW_SECONDS = 1.8e9
"""When records are issued: their age is not the decoder's business."""
STRANGER = SimpleNamespace(peer_id=PeerID.from_base58(BOB.peer_id), addr="/ip4/1.2.3.4/tcp/5")


@cache
def run_id() -> Any:
    return sign(tiny_manifest()).run_id


def signed(
    kind: EnvelopeKind, payload: bytes, stage: int = 0, round: int = 1, sequence: int = 1 << 50
) -> bytes:
    """A payload that a hostile peer has signed as it should be signed."""
    return seal(ALICE, run_id(), kind, stage, round, sequence, payload)


def bent_or_signed(
    good: bytes, kind: EnvelopeKind, fields: list[Any], chance: Random, stage: int, round: int
) -> bytes:
    """An envelope with mutations; or a sound one around fields of any type, or around a bent payload."""
    way = chance.random()
    if way < 0.4:
        return bent(good, chance)
    payload = packed(swapped(fields, chance, 1))
    return signed(kind, (payload if way < 0.7 else bent(payload, chance))[:60_000], stage, round)


# -- messages ---------------------------------------------------------------------------------------------


def header(chance: Random) -> bytes:
    kind, way = chance.choice(KINDS), chance.random()
    if way < 0.4:
        return bent(encode(built(kind, chance)), chance)
    fields = [
        anything(chance) if chance.random() < 0.35 else fields_of(built(field.type, chance))
        for field in msgspec.structs.fields(kind)
    ]
    fields = fields[: chance.randrange(len(fields) + 1)] if chance.random() < 0.2 else fields
    wild = packed([kind.__struct_config__.tag, *fields])
    return bent(wild, chance) if way > 0.8 else wild


def open_header(data: bytes, _folder: Path) -> None:
    msgpack_guard.check(data, HEADER_LIMIT)
    message = decode(data)
    if isinstance(message, Progress):
        read_progress(PeerId(ALICE.peer_id), message)


def frames(chance: Random) -> tuple[bytes, int]:
    """A stream of one to three messages, and the size of the parts in which it comes."""
    writer, stream = FrameWriter(chance.choice((64, 200, 1024, 65536))), b""
    for _ in range(chance.randrange(1, 4)):
        message = built(chance.choice(KINDS), chance)
        body = chance.randbytes(chance.choice((0, 1, 100, 5000))) if message.body else b""
        with suppress(TooLarge):  # Its header fits into no piece so short.
            writer.post(message, body)
    while (piece := writer.next_piece()) is not None:
        stream += piece
    stream += chance.choice((b"", b"", b"", b"\x20\0\0\0", b"\x10\0\0\0"))
    stream = bent(stream, chance) if chance.random() < 0.9 else stream
    return stream, chance.choice((1, 3, 7, 64, 1000, 10**6))


def read_frames(stream: tuple[bytes, int], _folder: Path) -> None:
    data, step = stream
    reader = FrameReader()
    for at in range(0, len(data), step):
        for message, _body, _taken in reader.feed(data[at : at + step]):
            assert isinstance(message, KINDS)


# -- what is signed ---------------------------------------------------------------------------------------

RECORD = PeerRecord(ALICE.peer_id, 0, "worker", ["/ip4/127.0.0.1/tcp/1"], 1, 1.0, "0")


def record(chance: Random) -> bytes:
    good = seal_record(ALICE, run_id(), RECORD, NOW_SECONDS)
    return bent_or_signed(good, EnvelopeKind.RECORD, fields_of(RECORD), chance, 0, 1)


ORDER = OwnerOrders(
    1 << 50,
    "maintenance",
    True,
    5,
    (Ban(PeerId(BOB.peer_id), "flooded"),),
    (Withdrawal("ab" * 32, "law"),),
    ("cd" * 16,),
)
ORDER_FIELDS: list[Any] = [
    "order",
    "maintenance",
    True,
    5,
    [[BOB.peer_id, "flooded"]],
    [[bytes(32), "law"]],
    [bytes(16)],
    None,
]


def order(chance: Random) -> bytes:
    good = seal_order(ALICE, run_id(), ORDER).data
    return bent_or_signed(good, EnvelopeKind.ORDER, ORDER_FIELDS, chance, -1, 0)


MODERATORS = Moderators((PeerId(ALICE.peer_id), PeerId(BOB.peer_id)), 2)


def moderation(chance: Random) -> bytes:
    """Bans that both have signed, with mutations; or signatures around any payload."""
    good = add_signature(BOB, run_id(), begin_moderation(ALICE, run_id(), MODERATORS, ORDER)).data
    if chance.random() < 0.5:
        return bent(good, chance)
    payload = packed(swapped(["moderation", "noise", [[BOB.peer_id, "flooded"]]], chance, 1))[:12_000]
    heads = [
        seal(one, run_id(), EnvelopeKind.MODERATION, -1, 0, 1 << 50, payload)[:ENVELOPE_BYTES]
        for one in sorted((ALICE, BOB), key=lambda one: one.peer_id)
    ]
    keys = sorted((ALICE.public_key, BOB.public_key))
    return b"".join([bytes([2, 2, 2]), *keys, bytes([2]), *heads, payload])


def kept_order(chance: Random) -> bytes:
    whole = stored_order(run_id(), order(chance))
    return bent(whole, chance) if chance.random() < 0.5 else whole


def read_kept_order(data: bytes, _folder: Path) -> None:
    if is_stored_order(data):
        open_stored_order(data)


def invite(chance: Random) -> bytes:
    if chance.random() < 0.3:
        envelope = signed(EnvelopeKind.INVITE, packed(["invite", "", 7, ALICE.public_key]), -1, 0)
        handed = b"\x03" + ALICE.seed_bytes() + envelope
        return bent(prove_invite(handed, run_id(), PeerId(BOB.peer_id)), chance)
    good = seal_invite(ALICE, run_id(), PeerId(BOB.peer_id), NOW_SECONDS, NOW_SECONDS)
    return bent_or_signed(good, EnvelopeKind.INVITE, ["invite", BOB.peer_id, 7, b""], chance, -1, 0)


def open_as_bob(data: bytes, _folder: Path) -> None:
    open_invite(data, run_id(), PeerId(ALICE.peer_id), PeerId(BOB.peer_id))


def typed_invite(chance: Random) -> str:
    envelope = signed(EnvelopeKind.INVITE, packed(["invite", "", 7, ALICE.public_key]), -1, 0)
    text = invite_text(b"\x03" + ALICE.seed_bytes() + envelope)
    return bent(text.encode(), chance).decode(chance.choice(("latin1", "utf-8", "utf-16")), "replace")


SLICE_SIZES = (40, 0, 33)
"""Of a run; one shard has nothing to say."""


def slices(chance: Random) -> tuple[bytes, list[int]]:
    """A body, and whose slices it is said to have."""
    shards = chance.choice(([0, 1, 2], [0], [2], [1], [], [0, 2]))
    parts = [chance.randbytes(size) for size in SLICE_SIZES]
    head, _ = sign_slices(ALICE, run_id(), 0, 1, 5, parts)
    body = head + b"".join(parts[shard] for shard in shards)
    if chance.random() < 0.2:
        shards = [chance.choice((*INTEGERS, 0, 1, 2)) for _ in range(chance.randrange(4))]
    return bent(body, chance), shards


def receipt(chance: Random) -> bytes:
    made = Receipt(PeerId(ALICE.peer_id), PeerId(BOB.peer_id), 0, 0, 3, 2, 5)
    good = seal_receipt(ALICE, run_id(), made, NOW_SECONDS)
    stage, round = chance.choice((0, -1, 3)), chance.choice((0, 3, 2**32 - 1))
    return bent_or_signed(good, EnvelopeKind.RECEIPT, ["receipt", BOB.peer_id, 0, 2, 5], chance, stage, round)


def listing(chance: Random) -> bytes:
    return bent(seal_listing(run_id(), PeerId(OWNER.peer_id), OWNER.sign(owner_statement(run_id()))), chance)


def opinion(chance: Random) -> bytes:
    document = OpinionDocument(chance.choice(("", "ab" * 32, "a page")), "good", chance.random() < 0.5)
    return bent(seal_opinion(ALICE, run_id(), document, NOW_SECONDS).data, chance)


def introduced(chance: Random) -> tuple[bytes, str]:
    good = introduction(ALICE, PeerId(BOB.peer_id), PeerId(BOB.peer_id))
    return bent(good, chance), chance.choice((BOB.peer_id, *TEXTS, "Qm" + "x" * 44))


# -- the directory ----------------------------------------------------------------------------------------


def item(chance: Random) -> tuple[bytes, bytes, bytes, float]:
    """Key, subkey, value and expiry as in a store request of hivemind's."""
    good = stored_value(run_bytes(run_id()) + seal_record(ALICE, run_id(), RECORD, NOW_SECONDS))
    honest = MSGPackSerializer.dumps(ALICE.peer_id)
    tag = chance.choice((DICTIONARY, PLAIN, honest, chance.randbytes(20), packed(anything(chance))))
    if tag == DICTIONARY:
        entries = [[ALICE.peer_id, good, 2e9], *(anything(chance) for _ in range(chance.randrange(3)))]
        code = chance.choice((0x50, 0x50, 0x50, 0x51))
        value = packed(ExtType(code, packed([None, 0.0, entries])))
        value = bent(value, chance) if chance.random() < 0.5 else value
    elif chance.random() < 0.6:
        value = bent(good, chance)
    else:
        value = stored_value(chance.randbytes(chance.choice((0, 1, 31, 32, 33, 63, 64, 65, 120, 152, 300))))
    size = chance.choice((20, 20, 20, 20, 0, 19, 21))
    return key_id(stage_key(run_id(), 0))[:size], tag, value, chance.choice((2e9, *FLOATS))


def read_item(item: tuple[bytes, bytes, bytes, float], _folder: Path) -> None:
    for one in split_values(0, *item):
        verify_value(one.value, plain=one.tag == PLAIN)
        if one.tag != PLAIN:
            unpack_subkey(one.tag)


class StillDaemon:
    """A p2pd for the gate alone: nothing runs."""

    ending = None

    async def connections(self, deadline_seconds: float) -> list[tuple[str, str]]:
        return []


def store_request(chance: Random) -> bytes:
    items = [item(chance) for _ in range(chance.randrange(1, 4))]
    keys, tags, values, expiries = zip(*items, strict=True)
    request = dht_pb2.StoreRequest(
        keys=keys,
        subkeys=tags,
        values=values,
        expiration_time=expiries,
        in_cache=[chance.random() < 0.1 for _ in keys],
    )
    if chance.random() < 0.1:
        del request.values[:]
    return bytes(request.SerializeToString())


async def serve_store(data: bytes, _folder: Path) -> None:
    async def hivemind(request: Any, _context: Any) -> Any:
        assert all(len(key) == 20 for key in request.keys)
        assert all(map(math.isfinite, request.expiration_time))
        return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys))

    request = dht_pb2.StoreRequest()
    request.ParseFromString(data)
    await _gate()._serve_store(hivemind, request, SimpleNamespace(remote_id=STRANGER.peer_id))


def find_answer(chance: Random) -> bytes:
    _, tag, value, expires = item(chance)
    kinds = (dht_pb2.FOUND_REGULAR, dht_pb2.FOUND_DICTIONARY, dht_pb2.NOT_FOUND)
    kind = kinds[tag == DICTIONARY] if chance.random() < 0.8 else chance.choice(kinds)
    near = [chance.randbytes(chance.choice((0, 20, 38, 5000))) for _ in range(chance.randrange(3))]
    result = dht_pb2.FindResult(
        type=kind, value=value, expiration_time=expires, nearest_node_ids=near, nearest_peer_ids=near
    )
    return bytes(dht_pb2.FindResponse(results=[result] * chance.randrange(3)).SerializeToString())


async def take_found(data: bytes, _folder: Path) -> None:
    response = dht_pb2.FindResponse()
    response.ParseFromString(data)
    _gate()._filter_values(BOB.peer_id, dht_pb2.FindRequest(keys=[key_id(stage_key(run_id(), 0))]), response)
    for result in response.results[:1]:  # One key was asked for; hivemind drops an answer with more results.
        assert result.type == dht_pb2.NOT_FOUND or math.isfinite(result.expiration_time)


def _gate() -> ValidatedP2P:
    return ValidatedP2P(StillDaemon(), lambda peer, reason: None)  # type: ignore[arg-type]


# -- relays, checks of reachability, chunks: whole services on streams ------------------------------------


class NoWriter:
    """Takes what a service answers, and keeps nothing."""

    def __init__(self) -> None:
        self.transport = SimpleNamespace(abort=lambda: None, get_write_buffer_size=lambda: 0)

    def write(self, data: bytes) -> None: ...

    def close(self) -> None: ...

    async def drain(self) -> None: ...


def stream_of(data: bytes) -> asyncio.StreamReader:
    """Has come whole, and has ended."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


def relay_message(chance: Random) -> bytes:
    """Of HOP and STOP; with its length, which lies now and then."""
    kind = chance.choice((circuit_relay.HOP_RESERVE, circuit_relay.HOP_CONNECT, chance.randrange(4)))
    peer = circuit_relay.peer_field(PeerId(ALICE.peer_id))
    good = circuit_relay.encode({1: kind, 2: peer, 3: {1: 5}, 4: {1: 0, 2: 0}, 5: 100})
    way = chance.random()
    if way < 0.3:
        return bent(good, chance)
    body = bent(good[1:], chance)[:4000] if way < 0.9 else chance.randbytes(chance.randrange(100))
    return (bytes([len(body) & 127 | 128, len(body) >> 7]) if len(body) > 127 else bytes([len(body)])) + body


async def read_relay_message(data: bytes, _folder: Path) -> None:
    fields = await circuit_relay.read_fields(stream_of(data), 5.0)
    for key in range(6):
        circuit_relay.number_in({key: value for key, value in fields.items() if isinstance(value, int)}, key)
    circuit_relay.peer_in(fields)


async def serve_circuit(data: bytes, _folder: Path) -> None:
    await RelayService(StillDaemon(), time.time).accept(STRANGER, stream_of(data), NoWriter())  # type: ignore[arg-type]


def dial_back_part(chance: Random) -> tuple[Any, bytes]:
    parts: dict[Any, list[Any]] = {
        dial_back.Greeting: [bytes(16), "/ip4/1.2.3.4/tcp/1"],
        dial_back.DialBackRequest: [ALICE.peer_id, ["/ip4/1.2.3.4/tcp/1"], bytes(64)],
        dial_back.DialBackResponse: ["done", [["/ip4/1.2.3.4/tcp/1", "reached", "", 1.0]]],
    }
    kind = chance.choice(list(parts))
    data = packed(swapped(parts[kind], chance) if chance.random() < 0.4 else parts[kind])
    data = bent(data, chance) if chance.random() < 0.7 else data
    return kind, struct.pack(">H", min(0xFFFF, len(data))) + data


async def read_dial_back_part(part: tuple[Any, bytes], _folder: Path) -> None:
    kind, data = part
    await dial_back.read_part(stream_of(data), kind, 5.0)


async def serve_dial_back(part: tuple[Any, bytes], _folder: Path) -> None:
    service = DialBackService(peer=PeerId(BOB.peer_id), able=lambda: False)
    await service.accept(STRANGER, stream_of(part[1]), NoWriter())  # type: ignore[arg-type]


def chunk_request(chance: Random) -> bytes:
    return bent(bytes(32) + struct.pack(">H", chance.randrange(2**16)), chance) * chance.choice((1, 2, 20))


async def serve_chunks(data: bytes, _folder: Path) -> None:
    service = ChunkService()
    service.find = lambda digest, index: memoryview(b"x" * 100) if index % 2 else None
    await service.accept(STRANGER, stream_of(data), NoWriter())  # type: ignore[arg-type]


def chunk_answer(chance: Random) -> bytes:
    body = chance.randbytes(chance.choice((0, 1, 100, 40_000)))
    return bent(struct.pack(">I", len(body)) + body, chance)


async def take_chunk(data: bytes, _folder: Path) -> None:
    async def resolve(addresses: Sequence[str]) -> Sequence[str]:
        return addresses

    fetch = ChunkCarriers(
        carriers=None, daemons=(), arrived=lambda *_: None, progressed=lambda _peer: None, resolve=resolve
    )  # type: ignore[arg-type]
    chunk = await fetch._read(stream_of(data), PeerId(BOB.peer_id))
    assert chunk is None or len(chunk) <= chunk_streams.CHUNK_LIMIT


def speed_request(chance: Random) -> bytes:
    up = chance.random() < 0.8
    data = struct.pack(">BI", 0 if up else 1, chance.choice((0, 1, 1000, 2**23, 2**23 + 1, 2**32 - 1)))
    return bent(data, chance) + bytes(chance.choice((0, 1000, 70_000)))


async def serve_speed(data: bytes, _folder: Path) -> None:
    await SpeedService().accept(STRANGER, stream_of(data), NoWriter())  # type: ignore[arg-type]


# -- names and addresses ----------------------------------------------------------------------------------


def address(chance: Random) -> str:
    if chance.random() < 0.1:
        return chance.choice(TEXTS)
    return bent(chance.choice(ADDRESSES).encode(), chance).decode("utf-8", "replace")


def read_address(text: str, _folder: Path) -> None:
    place_of(text)
    observed_ip(text)
    multiaddr.multiaddr_bytes(text)


def peer_address(chance: Random) -> str:
    return bent(f"{chance.choice(ADDRESSES)}/p2p/{ALICE.peer_id}".encode(), chance).decode("utf-8", "replace")


def peer_name(chance: Random) -> str:
    text = bent(chance.choice((ALICE, BOB)).peer_id.encode(), chance).decode("utf-8", "replace")
    return text if chance.random() < 0.9 else chance.choice(TEXTS)


def lan_service(chance: Random) -> tuple[str, dict[bytes, bytes | None]]:
    """A name and the TXT entries of a service on the local network."""
    values = [each.encode() for each in (*ADDRESSES, ANY, *TEXTS)]
    entries: dict[bytes, bytes | None] = {
        key: chance.choice([bent(chance.choice(values), chance), None])
        for key in (b"run", b"a0", b"a1", b"a3")
    }
    return f"{peer_name(chance)}.{SERVICE}", entries


def hear_lan_service(service: tuple[str, dict[bytes, bytes | None]], _folder: Path) -> None:
    for run in (None, run_id()):
        found = peer_in_announcement(*service, run)
        for each in found[1] if found else ():
            split_multiaddr(each)


WIRE = (WireError,)
DECODERS = (
    Decoder("headers", header, open_header, WIRE),
    Decoder("frames", frames, read_frames, WIRE),
    Decoder(
        "envelopes",
        lambda chance: bent(
            signed(EnvelopeKind.CONTRIBUTION, chance.randbytes(chance.randrange(100))), chance
        ),
        lambda data, _: open_envelope(data, run_id(), EnvelopeKind.CONTRIBUTION, 4096),
        WIRE,
    ),
    Decoder("records", record, lambda data, _: open_record(data, run_id()), WIRE),
    Decoder("orders", order, lambda data, _: open_order(data, run_id(), PeerId(ALICE.peer_id)), WIRE),
    Decoder("moderations", moderation, lambda data, _: open_any_order(data, run_id()), WIRE),
    Decoder("stored orders", kept_order, read_kept_order, WIRE),
    Decoder("invites", invite, open_as_bob, WIRE),
    Decoder("typed invites", typed_invite, lambda text, _: invite_bytes(text), WIRE),
    Decoder("slices", slices, lambda made, _: open_slices(made[0], run_id(), made[1], SLICE_SIZES), WIRE),
    Decoder("receipts", receipt, lambda data, _: open_receipt(data, run_id(), 4), WIRE),
    Decoder("listings", listing, lambda data, _: open_listing(data), WIRE),
    Decoder("opinions", opinion, lambda data, _: open_opinion(data), WIRE),
    Decoder(
        "introductions of carriers",
        introduced,
        lambda shown, _: carried_peer(shown[0], PeerId(shown[1]), PeerId(BOB.peer_id)),
        WIRE,
    ),
    Decoder("directory items", item, read_item, WIRE),
    Decoder("directory store requests", store_request, serve_store, WIRE),
    Decoder("directory find answers", find_answer, take_found, WIRE),
    Decoder("relay messages", relay_message, read_relay_message, WIRE),
    Decoder("relay streams", relay_message, serve_circuit, ()),
    Decoder("dial-back parts", dial_back_part, read_dial_back_part, WIRE),
    Decoder("dial-back streams", dial_back_part, serve_dial_back, ()),
    Decoder("chunk requests", chunk_request, serve_chunks, ()),
    Decoder("chunk answers", chunk_answer, take_chunk, (WireError, *DAEMON_ERRORS)),
    Decoder("speed requests", speed_request, serve_speed, ()),
    Decoder("multiaddrs", address, read_address, (ValueError,)),
    Decoder("multiaddrs of peers", peer_address, lambda text, _: split_multiaddr(text), (ValueError,)),
    Decoder("peer ids", peer_name, lambda text, _: public_key_bytes(PeerId(text)), (ValueError,)),
    Decoder("services on the local network", lan_service, hear_lan_service, ()),
)
