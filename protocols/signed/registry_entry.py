"""The registry: which runs want to be found, under one key of the directory.

An entry is a run id with its owner's key and signature over it, as the manifest carries them. Any peer of a
run can store it, nobody can make one for a run that no owner has signed. It says nothing else: whoever reads
it fetches the manifest by the id, which proves itself and says whether the run is `listed`.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.errors import BadSignature, Malformed
from protocols.signed.envelope import RUN_ID_BYTES, run_bytes
from protocols.signed.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, peer_id_of, public_key_bytes, verify
from swarmnet.identifiers import PeerId, RunId
from swarmnet.run.manifest import owner_statement

LISTING_BYTES = RUN_ID_BYTES + PUBLIC_KEY_BYTES + SIGNATURE_BYTES
"""128: shorter than any record, which tells them apart."""
LISTING_SECONDS = 600.0
"""An entry's life; the run's peers store it again."""
RUNS_KEY = b"swarmnet runs 1\0"
"""The registry's place in the directory; subkeys are run ids."""


@dataclass(frozen=True, slots=True)
class Listing:
    run_id: RunId
    owner: PeerId
    """Who signed; the manifest says whether that is the run's owner."""


def seal_listing(run_id: RunId, owner: PeerId, signature: bytes) -> bytes:
    """`signature`: the manifest's."""
    data = run_bytes(run_id) + public_key_bytes(owner) + signature
    open_listing(data)
    return data


def open_listing(data: bytes) -> Listing:
    """Raises Malformed or BadSignature."""
    if len(data) != LISTING_BYTES:
        raise Malformed(f"an entry of the registry of {len(data)} bytes; it has {LISTING_BYTES}")
    run_id = RunId(data[:RUN_ID_BYTES].hex())
    owner = PeerId(peer_id_of(data[RUN_ID_BYTES : RUN_ID_BYTES + PUBLIC_KEY_BYTES]))
    if not verify(owner, owner_statement(run_id), data[-SIGNATURE_BYTES:]):
        raise BadSignature(f"the entry of the run {run_id[:16]}... is not signed by {owner}")
    return Listing(run_id, owner)
