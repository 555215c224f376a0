"""The tensor side of inference: forward passes on the weights of a snapshot, in the compute thread.

Inference uses snapshots instead of the live weights. Snapshots change only every `snapshot_interval` rounds,
and all peers of a stage have the same ones, as do newcomers and checkpoints. Any peer can therefore repeat an
answer, weights do not change during a request, and training never waits for a reader.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import isfinite
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from peers.compute.stage_part import StagePart
from peers.state.snapshot_store import Snapshots, units_of
from peers.worker.pipeline.microbatch_compute import ComputeError
from protocols.messages.table import ForwardRequest
from swarmnet.inference.inference_client import MALFORMED, NO_ROUND, NOT_FINITE, NOT_READY
from swarmnet.model import activation_codec
from swarmnet.model.decoder import forward, scaled
from swarmnet.model.fixed_point import to_floats
from swarmnet.model.state_layout import BESIDE_WEIGHTS
from swarmnet.run.activation_sizes import Codec, encoded_bytes
from swarmnet.run.manifest import Manifest

VERSIONS_KEPT = 2
"""Weights of this many rounds are kept as floats (4 bytes a parameter each). One version serves conversations
that began earlier, the other serves newer ones."""
TOKEN_BYTES = 4
"""Tokens and labels travel as int32."""


@dataclass(frozen=True, slots=True)
class ForwardResult:
    round: int
    body: bytes
    loss_sum: float = 0.0


Result: TypeAlias = ForwardResult | ComputeError


class ForwardWork:
    def __init__(self, *, manifest: Manifest, stage: int, part: StagePart, snapshots: Snapshots) -> None:
        self.manifest = manifest
        self.span = manifest.span(stage)
        self._begins_narrow = self.span.first in manifest.model.boundary.after
        self._rules = manifest.path_rules()
        self.part = part
        self.snapshots = snapshots
        self._versions: OrderedDict[int, tuple[bytes, dict[str, Tensor]]] = OrderedDict()
        """Round -> digest and weights, in order of last use, the newest last."""

    def body_bytes(self, ask: ForwardRequest) -> int:
        """Return the body length in bytes that a well-formed request has."""
        tokens, model = ask.sequences * ask.tokens * TOKEN_BYTES, self.manifest.model
        shape = (ask.sequences, ask.tokens, model.crossing)
        inputs = tokens if self.span.has_embedding else encoded_bytes(shape, self._codec(ask))
        beside = tokens if self._begins_narrow else 0
        return inputs + beside + (tokens if ask.scores and self.span.has_head else 0)

    def run(self, ask: ForwardRequest, body: bytes) -> Result:
        """Compute the answer to a request whose shape and length have been checked."""
        version = self._version(ask.round)
        if isinstance(version, ComputeError):
            return version
        round, weights = version
        weights = scaled(weights, self._rules.branch_scale(ask.stage, ask.path))
        model = self.manifest.model
        try:
            inputs, tokens_BT, labels_BT = self._inputs(ask, body)
            if tokens_BT is not None:
                tokens_BT = tokens_BT.to(self.part.device)
            inputs = inputs.to(self.part.device)
            with torch.no_grad():
                output = forward(weights, model, self.span, inputs, tokens_BT=tokens_BT)
            return self._answer(ask, round, output, labels_BT)
        except activation_codec.HiddenError as error:
            return ComputeError(MALFORMED, str(error))

    def _answer(
        self, ask: ForwardRequest, round: int, output: Tensor, labels_BT: Tensor | None
    ) -> ForwardResult | ComputeError:
        """Encode the output of the stage's layers as a result. Raises HiddenError."""
        if not self.span.has_head:
            return ForwardResult(round, activation_codec.encode(output, self._codec(ask)))
        if labels_BT is None:
            return ForwardResult(round, activation_codec.encode(output[:, -1], "fp32"))
        labels_N = labels_BT.to(output.device).flatten()
        with torch.no_grad():
            loss = functional.cross_entropy(output.flatten(0, 1), labels_N, reduction="sum").item()
        return (
            ForwardResult(round, b"", loss)
            if isfinite(loss)
            else ComputeError(NOT_FINITE, "the loss is not finite")
        )

    def forget(self) -> None:
        """Free the weights; the next request prepares them again."""
        self._versions.clear()

    def _codec(self, ask: ForwardRequest) -> Codec:
        return "fp32" if ask.exact else self.manifest.activation_codec

    def _inputs(self, ask: ForwardRequest, body: bytes) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Decode a body into inputs (tokens or hidden states), carried tokens and labels; the last two may be
        None. Raises HiddenError."""
        size = ask.sequences * ask.tokens * TOKEN_BYTES
        labels = self._tokens(ask, body[-size:]) if ask.scores and self.span.has_head else None
        rest = body if labels is None else body[:-size]
        if self.span.has_embedding:
            return self._tokens(ask, rest), None, labels
        beside = None
        if self._begins_narrow:
            beside, rest = self._tokens(ask, rest[-size:]), rest[:-size]
        shape = (ask.sequences, ask.tokens, self.manifest.model.crossing)
        return activation_codec.decode(rest, shape, self._codec(ask)), beside, labels

    def _tokens(self, ask: ForwardRequest, data: bytes) -> Tensor:
        """Return tokens as int64 [B, T]. Raises HiddenError for tokens outside the vocabulary."""
        values = np.frombuffer(data, "<i4")
        if values.min() < 0 or values.max() >= self.manifest.model.vocab_size:
            raise activation_codec.HiddenError("tokens outside the vocabulary")
        return torch.from_numpy(values.astype(np.int64)).view(ask.sequences, ask.tokens)

    def _version(self, wanted: int) -> tuple[int, dict[str, Tensor]] | ComputeError:
        """Return the round and weights of the wanted round; -1 means the newest snapshot."""
        held = {snapshot.root.round: snapshot for snapshot in self.snapshots.held}
        if wanted < 0 and not held:
            return ComputeError(NOT_READY, "this peer has made no snapshot yet")
        round = max(held) if wanted < 0 else wanted
        snapshot, known = held.get(round), self._versions.get(round)
        if snapshot is None and known is None:
            return ComputeError(NO_ROUND, f"holds the weights of rounds {sorted({*held, *self._versions})}")
        if snapshot is not None and (known is None or known[0] != snapshot.root.digest):
            known = (snapshot.root.digest, self._views(units_of(snapshot.data)))
        assert known is not None
        self._versions[round] = known
        self._versions.move_to_end(round)
        while len(self._versions) > VERSIONS_KEPT:
            self._versions.popitem(last=False)
        return round, known[1]

    def _views(self, units: Tensor) -> dict[str, Tensor]:
        return {
            entry.name: to_floats(units[entry.place]).view(entry.shape).to(self.part.device)
            for entry in self.part.state.entries
            if not entry.name.startswith(BESIDE_WEIGHTS)
        }
