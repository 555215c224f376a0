"""Messages of inference: a client, a peer without a stage, requests forward passes from each stage.

See table.py and docs/wire.md for the message numbers and other properties.
"""

from __future__ import annotations

from typing import ClassVar

from protocols.fields import (
    BodyLimit,
    Message,
    Name,
    Nats,
    Number,
    Reason,
    RoundNumber,
    RunSizes,
    Seconds,
    StageNumber,
)
from swarmnet.inference.inference_client import MAX_SEQUENCES
from swarmnet.run.activation_sizes import LABEL_BYTES, encoded_bytes


def longest_request(run: RunSizes) -> int:
    """Return the largest body of a request in bytes. The inputs are hidden states (with their tokens at
    narrow boundaries) or tokens alone; the labels follow."""
    labels = LABEL_BYTES * run.manifest.microbatch_tokens  # Tokens have the same size.
    beside = labels if run.manifest.model.boundary.is_narrow else 0
    return max(encoded_bytes(run.manifest.hidden_shape, "fp32") + beside, labels) + labels


def longest_answer(run: RunSizes) -> int:
    """Return the largest body of an answer in bytes: hidden states, or logits in fp32."""
    logits = LABEL_BYTES * MAX_SEQUENCES * run.manifest.model.vocab_size  # fp32, the size of a label
    return max(encoded_bytes(run.manifest.hidden_shape, "fp32"), logits)


class ForwardRequest(Message, frozen=True, tag=50):
    """A client's request for a forward pass at one stage. Body for stage 0: tokens as int32 [B, T]. For
    later stages: hidden states [B, T, D], followed by their tokens if the boundary is narrow. On the last
    stage with `scores`, labels as int32 [B, T] come last."""

    kind: ClassVar[str] = "inference"
    priority: ClassVar[int] = 3
    body: ClassVar[BodyLimit] = longest_request
    request: Number
    attempt: Number
    """Counts the client's attempts of this request, so that late answers to old attempts are recognized."""
    stage: StageNumber
    round: RoundNumber
    """Round of the snapshot whose weights are used; -1 for the newest one held."""
    path: Number
    """Number of stages on the request's path. If the path has more stages than in training, middle stages are
    scaled down (`swarmnet.run.path_rules.Rules.branch_scale`)."""
    sequences: Number
    """The batch size B."""
    tokens: Number
    """The sequence length T."""
    exact: bool
    """True if hidden states travel as fp32 instead of the manifest's codec."""
    scores: bool
    """True if the client wants the loss of the labels instead of the logits."""
    deadline_seconds: Seconds
    """How long the client waits for the answer, from the time of sending."""


class Forwarded(Message, frozen=True, tag=51):
    """The answer to `ForwardRequest`. Body: hidden states [B, T, D]. The last stage sends the logits of each
    last token as fp32 [B, V], or nothing with `scores`."""

    kind: ClassVar[str] = "inference"
    priority: ClassVar[int] = 3
    body: ClassVar[BodyLimit] = longest_answer
    request: Number
    attempt: Number
    round: RoundNumber
    loss_sum: Nats
    """Loss in nats, summed over all labels; 0 without `scores`."""


class ForwardDeclined(Message, frozen=True, tag=52):
    """The peer refuses a request. `code` is one of those in swarmnet/inference/inference_client.py."""

    request: Number
    attempt: Number
    code: Name
    reason: Reason
