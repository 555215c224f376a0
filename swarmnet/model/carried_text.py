"""Encode the tokens of a microbatch that travel with its hidden states.

Usually these are labels, int32 [B, T], which only the last stage reads. At narrow boundaries fewer numbers
per token cross than the model is wide, and the receiver adds the rest from the token (boundary.py). Every
stage then needs the tokens of the hidden states, and labels are those tokens shifted by one. The text is
therefore [B, T + 1]: each sequence, and the one token that follows it. A token has as few bytes as the
vocabulary needs, least significant first.

A label may be `IGNORE_INDEX` where the run's text has tokens that are only context. In a U-shaped run nothing
travels: the peer that knows the text computes the loss.

No input is trusted: `decode` refuses a wrong length and tokens outside the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarmnet.model.activation_codec import HiddenError
from swarmnet.model.sampling import IGNORE_INDEX
from swarmnet.run.activation_sizes import token_bytes
from swarmnet.run.manifest import Manifest

_INT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class CarriedText:
    """The text of one microbatch, encoded and decoded."""

    encoded: bytes
    """The bytes that every stage passes on unchanged."""
    labels: Tensor
    """int64 [B, T], each below the vocabulary, or `IGNORE_INDEX`."""
    tokens: Tensor | None = None
    """int64 [B, T]: the tokens of the hidden states; None if boundaries are not narrow."""


class TextCodec:
    """The text codec of one run, in which every microbatch's text has the same size."""

    def __init__(self, manifest: Manifest) -> None:
        self.size = manifest.text_bytes
        """Size of the encoded text in bytes."""
        self._sequences = manifest.data.micro_batch_size
        self._tokens = manifest.data.seq_len
        self._vocabulary = manifest.model.vocab_size
        self._token_bytes = token_bytes(self._vocabulary)
        self._is_narrow = manifest.model.boundary.is_narrow
        self._has_context = manifest.data.format == "messages"

    def encode(self, tokens: Tensor, labels: Tensor) -> CarriedText:
        """Encode the text of a new microbatch from its tokens and labels, both int64 [B, T]. Labels travel as
        int32. With narrow boundaries the tokens travel instead, and the last label of each sequence."""
        if not self.size:
            return CarriedText(b"", labels)
        if not self._is_narrow:
            return CarriedText(labels.to(torch.int32).numpy().tobytes(), labels)
        windows = torch.cat((tokens, labels[:, -1:]), dim=1).numpy().astype("<i4")
        bytes_N4 = np.ascontiguousarray(windows).view(np.uint8).reshape(-1, _INT32_BYTES)
        packed = bytes_N4[:, : self._token_bytes].tobytes()  # The higher bytes are zero.
        return CarriedText(packed, labels, tokens)

    def decode(self, data: bytes) -> CarriedText:
        """Decode the text of a microbatch: labels alone, or labels and tokens with narrow boundaries. Raises
        HiddenError if the length is wrong or a token is outside the vocabulary."""
        sequences, tokens = self._sequences, self._tokens
        if len(data) != self.size:
            raise HiddenError(f"{len(data)} bytes of tokens, {sequences} x {tokens} take {self.size}")
        if not self.size:
            return CarriedText(data, torch.empty(0, dtype=torch.int64))
        if not self._is_narrow:
            labels = self._checked(np.frombuffer(data, "<i4"), "labels").view(sequences, tokens)
            return CarriedText(data, labels)
        packed_NB = np.frombuffer(data, np.uint8).reshape(-1, self._token_bytes)
        bytes_N4 = np.pad(packed_NB, ((0, 0), (0, _INT32_BYTES - self._token_bytes)))
        windows = self._checked(bytes_N4.view("<i4").ravel(), "tokens").view(sequences, tokens + 1)
        labels = windows[:, 1:].contiguous()
        return CarriedText(data, labels, windows[:, :-1].contiguous())

    def _checked(self, values: np.ndarray, what: str) -> Tensor:
        """Return the values as int64. Raises HiddenError if one is outside the vocabulary."""
        tokens = np.where(values == IGNORE_INDEX, 0, values) if self._has_context else values
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            raise HiddenError(f"{what} outside the vocabulary")
        return torch.from_numpy(values.astype(np.int64))
