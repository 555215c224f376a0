"""The largest body of each message, derived from a run's manifest.

A *contribution* is a peer's compressed update of a round. With *reducers*, peers that sum one shard of the
weights each, it is cut into *slices*, one for each shard.
"""

from __future__ import annotations

from protocols.messages.table import (
    Act,
    Chunk,
    Contribution,
    Evidence,
    Forwarded,
    ForwardRequest,
    Grad,
    ManifestResponse,
    Message,
    Slices,
)
from protocols.messages.terms import Bodies
from protocols.signed.envelope import ENVELOPE_BYTES
from protocols.signed.identity import SIGNATURE_BYTES
from protocols.signed.slices import head_bytes
from swarmnet.inference.inference_client import MAX_SEQUENCES
from swarmnet.run.activation_sizes import LABEL_BYTES, encoded_bytes
from swarmnet.run.canonical_form import MANIFEST_LIMIT
from swarmnet.run.manifest import Manifest
from swarmnet.snapshots.fetch import chunk_bytes


def longest_bodies(
    manifest: Manifest, payload_bytes: int = 0, state_bytes: int = 0, slices_bytes: int = 0
) -> dict[type[Message], int]:
    """Return the largest body in bytes of every kind of message in a run. `payload_bytes` is the size of a
    contribution to the stage or of a reducer's result. `state_bytes` is the size of the stage's settled
    weights. `slices_bytes` is the size of a contribution that is cut for reducers; 0 without reducers."""
    tokens = manifest.microbatch_tokens
    hidden_states = encoded_bytes(manifest.hidden_shape, "fp32")
    labels = LABEL_BYTES * tokens
    tokens_of_hidden_states = LABEL_BYTES * tokens if manifest.model.boundary.is_narrow else 0
    logits = LABEL_BYTES * MAX_SEQUENCES * manifest.model.vocab_size  # fp32, the size of a label
    contribution = ENVELOPE_BYTES + payload_bytes
    slices = head_bytes(manifest.sync.shards) + slices_bytes if slices_bytes else 0
    grant_signature = SIGNATURE_BYTES if slices_bytes else 0
    return {
        Act: manifest.body_bytes,
        Grad: manifest.gradient_bytes,
        Contribution: contribution,
        Slices: grant_signature + slices,
        Evidence: max(contribution, slices) if slices else 0,
        Chunk: min(state_bytes, chunk_bytes(state_bytes)),
        ManifestResponse: MANIFEST_LIMIT,
        # The inputs are hidden states (with their tokens at narrow boundaries) or tokens alone.
        ForwardRequest: max(hidden_states + tokens_of_hidden_states, LABEL_BYTES * tokens) + labels,
        Forwarded: max(hidden_states, logits),
    }


def bodies_for_workers(
    manifest: Manifest, payload_bytes: int, state_bytes: int, slices_bytes: int = 0
) -> Bodies:
    """Return the largest bodies that a worker accepts from peers that have sent `Hello`. Answers to requests
    that a worker never sends (`ManifestResponse`, `Forwarded`) are left out."""
    bodies = longest_bodies(manifest, payload_bytes, state_bytes, slices_bytes)
    del bodies[ManifestResponse], bodies[Forwarded]
    return bodies
