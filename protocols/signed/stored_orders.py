"""Orders of a run's owner, or of its moderators, as messages and the directory carry them.

In the DHT, the key of an order is made of the run id *and* its author's id: the owner's public key, or the
moderators' joint id. A node that stores the order need not know the run's manifest. A peer that signs with
another key only writes to a key that no reader uses, because readers know the author from the manifest. Thus
the proof of authorship takes no extra bytes.
"""

from __future__ import annotations

from protocols.signed.envelope import FORMAT, RUN_ID_BYTES, EnvelopeKind, run_bytes
from protocols.signed.identity import public_key_bytes
from protocols.signed.moderation import MODERATED, joint_id, open_complete
from protocols.signed.orders import SignedOrder, open_order
from swarmnet.identifiers import PeerId, RunId
from swarmnet.run.manifest import Manifest
from swarmnet.run.owner_orders import ORDER_LIMIT
from swarmnet.run.schema import MAX_MODERATORS

STORED_ORDER_LIMIT = RUN_ID_BYTES + ORDER_LIMIT


def open_any_order(data: bytes, run_id: RunId) -> SignedOrder:
    """Verify an order of whoever has signed it. The caller must check the author. Raises Malformed, TooLarge,
    WrongRun or BadSignature."""
    return open_complete(data, run_id) if data[:1] == bytes([MODERATED]) else open_order(data, run_id)


def open_order_of(manifest: Manifest, run_id: RunId, data: bytes) -> SignedOrder:
    """Verify an order of the owner or moderators. Raises Malformed, TooLarge, WrongRun or BadSignature."""
    if data[:1] == bytes([MODERATED]):
        return open_complete(data, run_id, manifest.moderators)
    return open_order(data, run_id, manifest.owner)


def authors_of(manifest: Manifest) -> tuple[PeerId, ...]:
    """Return whose orders count in a run: the owner, and the joint id of the moderators, if there are any."""
    moderators = manifest.moderators
    return (manifest.owner, joint_id(moderators)) if moderators.keys else (manifest.owner,)


def order_key(run_id: RunId, author: PeerId) -> bytes:
    """Return the DHT key of the author's order for a run."""
    return b"swarmnet order 1\0" + run_bytes(run_id) + public_key_bytes(author)


def stored_order(run_id: RunId, data: bytes) -> bytes:
    """Return an order as a directory node stores it: the run's id, then the order."""
    return run_bytes(run_id) + data


def is_stored_order(content: bytes) -> bool:
    """Return True if `content` is a stored order and not a manifest. A manifest is JSON, which never has
    such bytes at this offset."""
    start = content[RUN_ID_BYTES : RUN_ID_BYTES + 2]
    is_moderation = len(start) == 2 and start[0] == MODERATED and start[1] <= MAX_MODERATORS
    return is_moderation or start == bytes((FORMAT, EnvelopeKind.ORDER))


def open_stored_order(content: bytes) -> tuple[RunId, SignedOrder]:
    """Verify a stored order. Returns its run and it. Raises Malformed, TooLarge, WrongRun or BadSignature."""
    run_id = RunId(content[:RUN_ID_BYTES].hex())
    return run_id, open_any_order(content[RUN_ID_BYTES:], run_id)
