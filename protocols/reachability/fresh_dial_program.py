"""A program that dials addresses with py-libp2p, each on a new connection, and prints what answered there.

    python fresh_dial_program.py < {"peer": "12D3Koo...", "addresses": ["/ip4/.../tcp/..."], "seconds": 5}
    > {"address": "/ip4/...", "outcome": "reached", "detail": "...", "seconds": 0.03}     a line per address

py-libp2p is a libp2p implementation independent of p2pd, and this process has no connections. Therefore any
peer can reach what it reaches. It is a separate process because its protobuf definitions collide with
hivemind's, because it uses trio, and because the dialled hosts may be hostile. It imports nothing of
swarmnet.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import sys
import time
from collections.abc import Iterator

import trio
from cryptography.exceptions import InvalidSignature, InvalidTag
from google.protobuf.message import DecodeError
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.security.noise.transport import PROTOCOL_ID, Transport
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr
from noise.exceptions import NoiseHandshakeError, NoiseInvalidMessage, NoiseValueError

MEMORY_BYTES = 1 << 30
"""Limit of the address space; normally 0.4 GB are used. A dialled host may answer with a flood."""
CLOSE_SECONDS = 1.0
NICENESS = 10
"""Low priority, because the peer that starts this program is training."""
FOREIGN = (
    BaseLibp2pError,
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    TypeError,
    AttributeError,
    LookupError,
    MemoryError,
    OverflowError,
    InvalidSignature,
    InvalidTag,
    DecodeError,
    NoiseHandshakeError,
    NoiseInvalidMessage,
    NoiseValueError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)
"""Exceptions that untrusted bytes can raise or were seen to raise (a length near 2^63: OverflowError)."""
REFUSED = {errno.ECONNREFUSED: "refused", errno.ECONNRESET: "refused"}
NO_WAY = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EADDRNOTAVAIL)


async def meet(address: str, peer: str) -> tuple[str, str]:
    """Dial an address and make libp2p's Noise handshake, which proves the key of `peer`. Returns (outcome,
    text about it); the outcomes are those of fresh_dial.py. Waits forever if the other side is silent."""
    try:
        connection = await TCP().dial(Multiaddr(address))
    except (OpenConnectionError, OSError, ValueError) as error:
        return _not_connected(error)
    try:
        await MultiselectClient().select_one_of([PROTOCOL_ID], MultiselectCommunicator(connection))
        noise = Transport(create_new_key_pair(), noise_privkey=create_noise_key().private_key)
        await noise.secure_outbound(connection, ID.from_base58(peer))
    except PeerIDMismatchesPubkey as error:
        return "other_peer", str(error).rpartition("=")[2]
    except FOREIGN as error:
        return "not_libp2p", f"something listens there that is no libp2p with Noise ({type(error).__name__})"
    finally:
        with trio.move_on_after(CLOSE_SECONDS) as closing:
            closing.shield = True  # Close it even if the time of the dial is over.
            await connection.close()
    return "reached", "Noise handshake with this peer's key"


def _not_connected(error: BaseException) -> tuple[str, str]:
    """Return (outcome, text about it) of a failed TCP connection, from the error and its causes."""
    numbers = [getattr(cause, "errno", None) for cause in _causes(error)]
    codes = {number for number in numbers if number}
    for code in codes:
        if code in REFUSED:
            return "refused", "nothing listens there"
    for code in codes:
        if code in NO_WAY:
            return "no_way", os.strerror(code)
        if code == errno.ETIMEDOUT:
            return "silent", os.strerror(code)
    return "no_way", str(error)[:200]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception, those of its group, and those that caused it."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for part in error.exceptions:
                yield from _causes(part)
        error = error.__cause__ or error.__context__


async def dial(address: str, peer: str, seconds: float) -> None:
    """Dial one address for at most `seconds`, and print the line of JSON with the outcome."""
    began = time.monotonic()
    outcome, detail = "silent", f"no answer within {seconds:g} s"
    with trio.move_on_after(seconds):
        outcome, detail = await meet(address, peer)
    took = round(time.monotonic() - began, 4)
    print(json.dumps({"address": address, "outcome": outcome, "detail": detail, "seconds": took}), flush=True)


async def dial_all(peer: str, addresses: list[str], seconds: float) -> None:
    async with trio.open_nursery() as nursery:
        for address in addresses:
            nursery.start_soon(dial, address, peer, seconds)


def main() -> None:
    """Limit memory and priority, and dial the addresses of the task on standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    os.nice(NICENESS)
    logging.disable()
    task = json.load(sys.stdin)
    trio.run(dial_all, task["peer"], task["addresses"], task["seconds"])


if __name__ == "__main__":
    main()
