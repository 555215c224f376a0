"""Encode libp2p's circuit relay v2 messages, and reserve a slot at a relay.

A peer that cannot be dialled keeps a connection to a relay and reserves a *slot* there. Others dial it
through the relay. The traffic is encrypted end to end, so the relay only carries bytes. Each message is an
unsigned varint length and a protobuf (github.com/libp2p/specs, relay/circuit-v2).

A hop message passes between a peer and its relay, a stop message between the relay and a circuit's target.
The numbers below are protobuf field numbers; a field may be a message itself.

    hop    type 1: RESERVE 0, CONNECT 1, STATUS 2 | peer 2 | reservation 3 | limit 4 | status 5
    stop   type 1: CONNECT 0, STATUS 1 | peer 2 | limit 3 | status 4
    peer   id 1        reservation   expire 1, Unix seconds        limit   seconds 1 | bytes 2; 0: none
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from protocols.daemon.hivemind_imports import PeerID
from protocols.daemon.p2pd import DAEMON_ERRORS, Daemon
from protocols.errors import Malformed, PeerGone, TooLarge
from swarmnet.identifiers import PeerId

HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/stop"
PING_PROTOCOL = "/ipfs/ping/1.0.0"
MESSAGE_LIMIT = 4096
"""Maximum size of a message in bytes, as in go-libp2p."""
HOP_RESERVE, HOP_CONNECT, HOP_STATUS = 0, 1, 2
STOP_CONNECT, STOP_STATUS = 0, 1
OK, REFUSED, LIMIT_EXCEEDED, CONNECTION_FAILED, NO_RESERVATION, MALFORMED = 100, 200, 201, 203, 204, 400
NO_LIMIT = {1: 0, 2: 0}
"""The limit field for no limit. libp2p leaves a circuit with such a field for a direct connection."""
STEP_SECONDS = 10.0
"""Timeout for a message in seconds."""
MIN_BYTES = 1 << 30
"""Minimum bytes each way of a useful circuit; one that carries less is cut within minutes. p2pd's own relay
mostly carries 128 KiB (relay_service.py)."""
_VARINT, _BYTES = 0, 2

Fields = dict[int, Any]
"""A message by field number. Values are integers, bytes, or nested fields."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A slot at a relay."""

    expires: float
    """Expiry in seconds since 1970 on the relay's clock; 0 if the relay did not report it."""
    most_bytes: int
    """Bytes that a circuit carries each way; 0 if there is no limit."""


def encode(fields: Fields) -> bytes:
    """Return the encoded message, preceded by its length."""
    data = _encode_fields(fields)
    return _varint(len(data)) + data


def decode(data: bytes) -> Fields:
    """Return the fields of an encoded message, which comes without its length. Nested messages stay encoded.
    If a field is repeated, its last value counts. Raises Malformed if it is not a message."""
    message = Empty()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise Malformed(f"no message of a relay: {error}") from None
    # `Empty` declares no field, so protobuf keeps all of them as unknown fields.
    unknown = UnknownFieldSet(message)
    return {unknown[index].field_number: unknown[index].data for index in range(len(unknown))}


async def read_fields(reader: asyncio.StreamReader, seconds: float = STEP_SECONDS) -> Fields:
    """Read the next message's fields. Raises Malformed, TooLarge, or PeerGone if none comes in time."""
    try:
        async with asyncio.timeout(seconds):
            length = shift = 0  # A varint: 7 bits a byte, the lowest first; bit 7 is set if more follow.
            while True:
                (byte,) = await reader.readexactly(1)
                length |= (byte & 127) << shift
                shift += 7
                if length > MESSAGE_LIMIT or shift > 21:
                    raise TooLarge(f"a message of a relay may have {MESSAGE_LIMIT} bytes")
                if byte < 128:
                    return decode(await reader.readexactly(length))
    except DAEMON_ERRORS as error:
        raise PeerGone(f"no message came: {error or type(error).__name__}") from None


def number_in(fields: Fields, key: int) -> int:
    """Return an integer field, or 0 if it is missing. Raises Malformed if it has another type."""
    value = fields.get(key, 0)
    if not isinstance(value, int):
        raise Malformed("a number is missing in a message of a relay")
    return value


def peer_in(fields: Fields) -> PeerId:
    """Return the target peer of a CONNECT message. Raises Malformed if it is not an Ed25519 peer id."""
    raw = _decode_part(fields, 2).get(1)
    if not isinstance(raw, bytes) or len(raw) != 38:
        raise Malformed("a circuit to a peer without an Ed25519 key")
    return PeerId(PeerID(raw).to_base58())


def peer_field(peer: PeerId) -> Fields:
    """Return the fields by which a message names a peer."""
    return {1: PeerID.from_base58(peer).to_bytes()}


async def reserve(daemon: Daemon, relay: PeerId) -> Reservation:
    """Reserve or renew a slot at a connected relay. Raises PeerGone if the relay does not answer, refuses, or
    limits circuits to less than `MIN_BYTES`. Raises Malformed for an invalid answer."""
    reader, writer = await daemon.open_stream(relay, HOP_PROTOCOL, STEP_SECONDS)
    try:
        writer.write(encode({1: HOP_RESERVE}))
        answer = await read_fields(reader)
        kind, status = number_in(answer, 1), number_in(answer, 5)
        if kind != HOP_STATUS or status != OK:
            raise PeerGone(f"{relay} has no slot for us (status {status})")
        reservation, limit = _decode_part(answer, 3), _decode_part(answer, 4)
        expires, max_bytes = number_in(reservation, 1), number_in(limit, 2)
    finally:
        writer.transport.abort()
    if 0 < max_bytes < MIN_BYTES:
        raise PeerGone(f"{relay} carries {max_bytes} bytes through a circuit; {MIN_BYTES} are needed")
    return Reservation(float(expires), max_bytes)


def _decode_part(fields: Fields, key: int) -> Fields:
    """Return the fields of a nested message; none if it is missing. Raises Malformed."""
    value = fields.get(key, b"")
    if not isinstance(value, bytes):
        raise Malformed("a part is missing in a message of a relay")
    return decode(value)


def _encode_fields(fields: Fields) -> bytes:
    """Return the protobuf encoding of fields, without a length before it."""
    data = b""
    for key, value in fields.items():
        if isinstance(value, int):
            data += _varint(key << 3 | _VARINT) + _varint(value)
        else:
            part = value if isinstance(value, bytes) else _encode_fields(value)
            data += _varint(key << 3 | _BYTES) + _varint(len(part)) + part
    return data


def _varint(value: int) -> bytes:
    """Return an integer as protobuf varint: 7 bits a byte, the lowest first."""
    data = b""
    while value >= 128:
        data += bytes([value & 127 | 128])
        value >>= 7
    return data + bytes([value])
