"""Multiaddrs: as the bytes that p2pd reads, and whether they lead through a relay
(reachability/circuit_relay.py)."""

from __future__ import annotations

from protocols.daemon.hivemind_imports import Multiaddr, PeerID

_CIRCUIT, _ED25519 = b"\xa2\x02", b"\xa5\x03\x26"
_CIRCUIT_BYTES = len(_ED25519) + 38 + len(_CIRCUIT)
"""multiformats: /p2p of an Ed25519 peer id, then /p2p-circuit."""


def multiaddr_bytes(address: str) -> bytes:
    """Binary multiaddr, without the peer's own `/p2p/` at the end. ValueError if it is none.

    hivemind's codec writes `/p2p/12D3...` as a CID, which p2pd does not read, so a relay's id is put in here
    (multiformats: code 421 is p2p, 290 p2p-circuit; an Ed25519 peer id has 38 bytes)."""
    transport, *rest = address.split("/p2p/")
    data = bytes(Multiaddr(transport).to_bytes())
    for part in rest:
        peer, _, tail = part.partition("/")
        if tail == "p2p-circuit":
            raw = PeerID.from_base58(peer).to_bytes()
            data += b"\xa5\x03" + bytes([len(raw)]) + raw + b"\xa2\x02"
        elif tail:
            raise ValueError(f"{address!r} holds a part this program does not know: {tail}")
    return data


def is_circuit(address: str) -> bool:
    """Whether a multiaddr leads through a relay."""
    return "/p2p-circuit" in address


def through_relay(multiaddr: bytes) -> bool:
    """Whether the binary multiaddr of a connection's other end is that of a circuit. Of relays with Ed25519
    keys, as ours have."""
    return multiaddr.endswith(_CIRCUIT) and multiaddr[-_CIRCUIT_BYTES:].startswith(_ED25519)
