"""The registry: a list of public runs, stored under one key of the DHT.

An entry is a run id with its owner's key and signature, as the manifest carries them. Any peer of a run can
store the entry. No peer can forge one for a run that the owner has not signed. The entry contains nothing
else: a reader fetches the manifest by the run id, and the manifest says whether the run is `listed`.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.errors import BadSignature, Malformed
from protocols.signed.envelope import RUN_ID_BYTES, run_bytes
from protocols.signed.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, peer_id_of, public_key_bytes, verify
from swarmnet.identifiers import PeerId, RunId
from swarmnet.run.canonical_form import owner_statement

LISTING_BYTES = RUN_ID_BYTES + PUBLIC_KEY_BYTES + SIGNATURE_BYTES
"""Size in bytes of an entry: 128. Any record is longer, which distinguishes the two."""
LISTING_SECONDS = 600.0
"""Life of an entry in seconds; the run's peers store it again."""
RUNS_KEY = b"swarmnet runs 1\0"
"""The registry's key in the DHT; its subkeys are run ids."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A verified entry of the registry."""

    run_id: RunId
    owner: PeerId
    """The peer that signed; only the manifest says whether it owns the run."""


def seal_listing(run_id: RunId, owner: PeerId, signature: bytes) -> bytes:
    """Build the entry of a run. `signature` is the owner's signature in the manifest."""
    data = run_bytes(run_id) + public_key_bytes(owner) + signature
    open_listing(data)
    return data


def open_listing(data: bytes) -> Listing:
    """Verify an entry. Raises Malformed or BadSignature."""
    if len(data) != LISTING_BYTES:
        raise Malformed(f"an entry of the registry of {len(data)} bytes; it has {LISTING_BYTES}")
    run_id = RunId(data[:RUN_ID_BYTES].hex())
    owner = PeerId(peer_id_of(data[RUN_ID_BYTES : RUN_ID_BYTES + PUBLIC_KEY_BYTES]))
    if not verify(owner, owner_statement(run_id), data[-SIGNATURE_BYTES:]):
        raise BadSignature(f"the entry of the run {run_id[:16]}... is not signed by {owner}")
    return Listing(run_id, owner)
