"""The longest body of each kind of message, as it follows from a run's manifest."""

from __future__ import annotations

from protocols.messages.table import (
    Act,
    AskForward,
    Chunk,
    Contribution,
    Evidence,
    Forwarded,
    Grad,
    ManifestIs,
    Message,
    Slices,
)
from protocols.messages.terms import Bodies
from protocols.signed.envelope import ENVELOPE_BYTES
from protocols.signed.identity import SIGNATURE_BYTES
from protocols.signed.slices import head_bytes
from swarmnet.inference.machine import MOST_SEQUENCES
from swarmnet.run.activation_sizes import LABEL_BYTES, encoded_bytes
from swarmnet.run.manifest import MANIFEST_LIMIT, Manifest
from swarmnet.snapshots.fetch import chunk_bytes


def longest_bodies(
    manifest: Manifest, payload_bytes: int = 0, state_bytes: int = 0, slices_bytes: int = 0
) -> dict[type[Message], int]:
    """The longest body of every kind of message in a run. `payload_bytes`: of a contribution to the stage, or
    of a result; `state_bytes`: of its settled weights; `slices_bytes`: of a contribution in slices, 0 where
    there are no reducers."""
    tokens, exact = manifest.microbatch_tokens, encoded_bytes(manifest.hidden_shape, "fp32")
    beside = LABEL_BYTES * tokens if manifest.model.boundary.is_narrow else 0
    logits = LABEL_BYTES * MOST_SEQUENCES * manifest.model.vocabulary  # fp32, as long as a label
    contribution = ENVELOPE_BYTES + payload_bytes
    slices = head_bytes(manifest.sync.shards) + slices_bytes if slices_bytes else 0
    grant = SIGNATURE_BYTES if slices_bytes else 0
    return {
        Act: manifest.body_bytes,
        Grad: manifest.gradient_bytes,
        Contribution: contribution,
        Slices: grant + slices,
        Evidence: max(contribution, slices) if slices else 0,
        Chunk: min(state_bytes, chunk_bytes(state_bytes)),
        ManifestIs: MANIFEST_LIMIT,
        AskForward: max(exact + beside, LABEL_BYTES * tokens) + LABEL_BYTES * tokens,
        Forwarded: max(exact, logits),
    }


def bodies_for_workers(
    manifest: Manifest, payload_bytes: int, state_bytes: int, slices_bytes: int = 0
) -> Bodies:
    """What a worker of a stage takes of those who have greeted: all but the answers to questions that it does
    not ask."""
    bodies = longest_bodies(manifest, payload_bytes, state_bytes, slices_bytes)
    del bodies[ManifestIs], bodies[Forwarded]
    return bodies
