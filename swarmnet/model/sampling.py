"""Which text a microbatch holds: a pure function, so that anybody can find out and nobody has to say.

Windows are drawn uniformly and independently; two peers may draw overlapping ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnet.identifiers import MicrobatchId, RunId
from swarmnet.run.manifest import Data

_DRAW_BYTES = 16
"""128 bits modulo the corpus: no start is likelier than another by more than 2**-64 for 2**64 tokens."""


class SamplingError(ValueError):
    """The corpus is too short for a single window."""


def window_starts(
    run_id: RunId,
    seed: int,
    microbatch: MicrobatchId,
    corpus_tokens: int,
    sequences: int,
    sequence_tokens: int,
) -> tuple[int, ...]:
    """Where each of the `sequences` windows of `sequence_tokens` + 1 tokens starts in the corpus."""
    choices = corpus_tokens - sequence_tokens
    if choices < 1:
        raise SamplingError(
            f"the text has {corpus_tokens} tokens, one window takes {sequence_tokens + 1}: add text"
        )
    name = f"swarmnet sampling/{run_id}/{seed}/{microbatch.origin}/{microbatch.counter}"
    stream = hashlib.shake_256(name.encode()).digest(_DRAW_BYTES * sequences)
    draws = (stream[at : at + _DRAW_BYTES] for at in range(0, len(stream), _DRAW_BYTES))
    return tuple(int.from_bytes(draw, "little") % choices for draw in draws)


def drawn(run_id: RunId, seed: int, key: MicrobatchId, corpus: Tensor, data: Data) -> tuple[Tensor, Tensor]:
    """inputs_BT and labels_BT of a microbatch of this corpus (1-D)."""
    length = data.sequence_tokens
    starts = window_starts(run_id, seed, key, len(corpus), data.microbatch_sequences, length)
    return windows(corpus, starts, length)


def windows(corpus: Tensor, starts: Sequence[int], sequence_tokens: int) -> tuple[Tensor, Tensor]:
    """inputs_BT and labels_BT of the windows of `corpus` (1-D) that begin at `starts`."""
    return inputs_and_labels([corpus[start : start + sequence_tokens + 1] for start in starts])


def inputs_and_labels(windows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """inputs_BT and labels_BT (int64): the windows, and the same moved on by one token."""
    window_BT = torch.stack(list(windows)).long()
    return window_BT[:, :-1].contiguous(), window_BT[:, 1:].contiguous()
