"""The tokens of a microbatch as bytes, which go down with its hidden states.

Usually these are labels, int32 [B, T], which only the last stage reads. Where boundaries are narrow every
stage needs the tokens that hidden states belong to, and labels are those tokens moved on by one: then what
goes down is each sequence with the token that follows it, [B, T + 1], in as few bytes each as the vocabulary
takes, least significant first.

Nothing is trusted: `decode` refuses a wrong length and tokens outside the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarmnet.model.activation_codec import HiddenError
from swarmnet.run.activation_sizes import token_bytes
from swarmnet.run.manifest import Manifest

_INT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class CarriedText:
    labels: Tensor
    """int64 [B, T], each below the vocabulary."""
    tokens: Tensor | None = None
    """int64 [B, T]: what hidden states belong to; None where nobody asks, because boundaries are open."""


def encode(manifest: Manifest, text: CarriedText) -> bytes:
    """`manifest.text_bytes` bytes."""
    if not manifest.model.boundary.is_narrow:
        return text.labels.to(torch.int32).numpy().tobytes()
    assert text.tokens is not None, "whoever is behind a narrow boundary needs the tokens"
    windows = torch.cat((text.tokens, text.labels[:, -1:]), dim=1).numpy().astype("<i4")
    four_N4 = np.ascontiguousarray(windows).view(np.uint8).reshape(-1, _INT32_BYTES)
    return four_N4[:, : token_bytes(manifest.model.vocabulary)].tobytes()


def decode(manifest: Manifest, data: bytes | memoryview) -> CarriedText:
    """Raises HiddenError."""
    vocabulary = manifest.model.vocabulary
    sequences, tokens = manifest.data.microbatch_sequences, manifest.data.sequence_tokens
    if len(data) != manifest.text_bytes:
        raise HiddenError(f"{len(data)} bytes of tokens, {sequences} x {tokens} take {manifest.text_bytes}")
    if not manifest.model.boundary.is_narrow:
        return CarriedText(_checked(np.frombuffer(data, "<i4"), vocabulary, "labels").view(sequences, tokens))
    each = token_bytes(vocabulary)
    packed_NB = np.frombuffer(data, np.uint8).reshape(-1, each)
    four_N4 = np.pad(packed_NB, ((0, 0), (0, _INT32_BYTES - each)))
    windows = _checked(four_N4.view("<i4").ravel(), vocabulary, "tokens").view(sequences, tokens + 1)
    return CarriedText(windows[:, 1:].contiguous(), windows[:, :-1].contiguous())


def _checked(values: np.ndarray, vocabulary: int, what: str) -> Tensor:
    if values.min() < 0 or values.max() >= vocabulary:
        raise HiddenError(f"{what} outside the vocabulary")
    return torch.from_numpy(values.astype(np.int64))
