"""Dial-back: a peer lets another one check whether the addresses that it announces lead to it.

The asker is the peer that wants the check; the helper dials its addresses. Each message is called a part.

    on a stream of /swarmnet/1/dial-back, each part: length u16 | a MessagePack array
    helper    Greeting           a challenge, and the address the asker was seen at
    asker     DialBackRequest    a peer, its addresses, and its signature over challenge, helper and addresses
    helper    DialBackResponse   what was met at each address

The signing peer is the asker itself, or a running peer whose key a separate program uses. The signature makes
the peer accountable for the dials. dial_back_service.py lists what a helper refuses to dial.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from protocols.daemon.p2pd import DAEMON_ERRORS, Daemon
from protocols.errors import Malformed, PeerGone
from protocols.fields import Name
from protocols.reachability.fresh_dial import ADDRESSES, DIAL_SECONDS, START_SECONDS, Address, DialOutcome
from protocols.signed.identity import Identity, public_key_bytes
from protocols.signed.msgpack_guard import check
from swarmnet.identifiers import PeerId
from swarmnet.run.schema import WIRE_VERSION

DIAL_BACK_PROTOCOL = f"/swarmnet/{WIRE_VERSION}/dial-back"
PART_LIMIT = 8192
"""Maximum size of one part in bytes; eight outcomes with their details take 4 300 at most."""
STEP_SECONDS = 10.0
"""Timeout in seconds for a part that costs the other side nothing."""
ANSWER_SECONDS = START_SECONDS + DIAL_SECONDS + STEP_SECONDS
CHALLENGE_BYTES = 16
_DOMAIN = b"swarmnet dial-back 1\0"
_LENGTH = struct.Struct(">H")


class Part(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base class of the messages on the stream."""


class Greeting(Part, frozen=True):
    """The helper's first message."""

    challenge: Annotated[bytes, Meta(min_length=CHALLENGE_BYTES, max_length=CHALLENGE_BYTES)]
    observed: Annotated[str, Meta(max_length=200)]
    """The multiaddr at the other end of the connection; empty if that is a relay's."""


class DialBackRequest(Part, frozen=True):
    """The asker's signed request to dial `addresses`."""

    peer: Name
    addresses: Annotated[tuple[Address, ...], Meta(min_length=1, max_length=ADDRESSES)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class DialBackResponse(Part, frozen=True):
    """The helper's answer with the outcomes."""

    code: Literal["done", "busy", "unable"]
    """busy: asked too often, by this address or by all; unable: py-libp2p is not installed there."""
    dialled: Annotated[tuple[DialOutcome, ...], Meta(max_length=ADDRESSES)]


SomePart = TypeVar("SomePart", bound=Part)


@dataclass(frozen=True, slots=True)
class DialBackResult:
    """The result of a dial-back for the asker."""

    observed: str
    """The multiaddr at which the helper saw the asker; empty if that is a relay's."""
    code: Literal["done", "busy", "unable"]
    dialled: tuple[DialOutcome, ...]
    """The outcome at each address, in the order of the request."""


def statement(challenge: bytes, helper: PeerId, peer: PeerId, addresses: Sequence[str]) -> bytes:
    """Return the bytes that `peer`, to which the addresses should lead, signs for this helper and challenge.
    Raises ValueError if an id has no Ed25519 key."""
    addresses_hash = hashlib.sha256("\n".join(addresses).encode()).digest()
    return b"".join((_DOMAIN, challenge, public_key_bytes(helper), public_key_bytes(peer), addresses_hash))


def encode(part: Part) -> bytes:
    """Return a part as it goes over the stream, preceded by its length."""
    data = msgspec.msgpack.encode(part)
    return _LENGTH.pack(len(data)) + data


async def read_part(reader: asyncio.StreamReader, kind: type[SomePart], seconds: float) -> SomePart:
    """Read the next part, which must be a `kind`. Raises Malformed, or PeerGone if none comes in time."""
    try:
        async with asyncio.timeout(seconds):
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            if length > PART_LIMIT:
                raise Malformed(f"a part of {length} bytes; at most {PART_LIMIT} are allowed")
            data = await reader.readexactly(length)
    except DAEMON_ERRORS as error:
        raise PeerGone(f"no {kind.__name__.lower()} came: {error or type(error).__name__}") from None
    check(data, PART_LIMIT)
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # The latter is no MsgspecError.
        raise Malformed(f"no {kind.__name__.lower()}: {error}") from None


async def ask_dial_back(
    daemon: Daemon, helper: PeerId, identity: Identity, addresses: Callable[[str], Sequence[str]]
) -> DialBackResult:
    """Let a connected helper dial addresses of the peer `identity`, and return who answered at each. The
    callback `addresses` gets the multiaddr at which the helper sees this peer, and returns the addresses to
    dial; the first `ADDRESSES` are used. Without any, nothing is requested. Raises PeerGone or Malformed."""
    reader, writer = await daemon.open_stream(helper, DIAL_BACK_PROTOCOL, STEP_SECONDS)
    try:
        greeting = await read_part(reader, Greeting, STEP_SECONDS)
        wanted = tuple(addresses(greeting.observed))[:ADDRESSES]
        if not wanted:
            return DialBackResult(greeting.observed, "done", ())
        signed = statement(greeting.challenge, helper, identity.peer_id, wanted)
        writer.write(encode(DialBackRequest(identity.peer_id, wanted, identity.sign(signed))))
        answer = await read_part(reader, DialBackResponse, ANSWER_SECONDS)
        answered_addresses = tuple(dialled.address for dialled in answer.dialled)
        if answer.code == "done" and answered_addresses != wanted:
            raise Malformed(f"{helper} answered for other addresses than it was asked for")
        return DialBackResult(greeting.observed, answer.code, answer.dialled)
    finally:
        writer.transport.abort()
