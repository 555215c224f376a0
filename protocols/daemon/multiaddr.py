"""Encode multiaddrs in the binary form that p2pd reads, and recognize addresses that lead through a relay.

Such an address ends in /p2p/<the relay's peer id>/p2p-circuit: the relay forwards the connection (a circuit).
"""

from __future__ import annotations

from protocols.daemon.hivemind_imports import Multiaddr, PeerID

_CIRCUIT, _ED25519 = b"\xa2\x02", b"\xa5\x03\x26"
_CIRCUIT_BYTES = len(_ED25519) + 38 + len(_CIRCUIT)
"""Length in bytes of the suffix /p2p/<Ed25519 peer id>/p2p-circuit of a relay address (multiformats)."""


def multiaddr_bytes(address: str) -> bytes:
    """Return the binary multiaddr, without the peer's own `/p2p/` at the end. Raises ValueError if it is
    invalid.

    hivemind's codec writes `/p2p/12D3...` as a CID, which p2pd does not read. This function therefore encodes
    a relay's id itself (multiformats: code 421 is p2p, 290 p2p-circuit; an Ed25519 peer id has 38 bytes)."""
    transport, *rest = address.split("/p2p/")
    data = bytes(Multiaddr(transport).to_bytes())
    for part in rest:
        peer, _, suffix = part.partition("/")
        if suffix == "p2p-circuit":
            raw = PeerID.from_base58(peer).to_bytes()
            data += b"\xa5\x03" + bytes([len(raw)]) + raw + b"\xa2\x02"  # The two codes as varints.
        elif suffix:
            raise ValueError(f"{address!r} holds a part this program does not know: {suffix}")
    return data


def is_circuit(address: str) -> bool:
    """Return True if a multiaddr leads through a relay."""
    return "/p2p-circuit" in address


def through_relay(multiaddr: bytes) -> bool:
    """Return True if a connection's remote binary multiaddr is a circuit through a relay. Only relays with
    Ed25519 keys are recognized, which all peers of this program have."""
    return multiaddr.endswith(_CIRCUIT) and multiaddr[-_CIRCUIT_BYTES:].startswith(_ED25519)
