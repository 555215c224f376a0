"""Choose the text of a microbatch by a pure function, so that every peer can compute it and none has to send
it.

Windows are drawn uniformly and independently; two peers may draw overlapping ones. A token that is only
context, such as a prompt, has a negative number in a text. It is an input, and its label is `IGNORE_INDEX`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnet.identifiers import MicrobatchId, RunId
from swarmnet.run.schema import Data

IGNORE_INDEX = -100
"""Label without a loss, as in torch's cross entropy."""
_DRAW_BYTES = 16
"""128 bits modulo the corpus size: for 2**64 tokens probabilities differ by at most 2**-64."""


class SamplingError(ValueError):
    """The corpus is too short for a single window."""


def window_starts(
    run_id: RunId,
    seed: int,
    microbatch: MicrobatchId,
    corpus_tokens: int,
    sequences: int,
    seq_len: int,
) -> tuple[int, ...]:
    """Return the index of the first token of each of the `sequences` windows, of `seq_len` + 1 tokens. A hash
    of run, seed and microbatch draws them. Raises SamplingError if the corpus is shorter than a window."""
    possible_starts = corpus_tokens - seq_len
    if possible_starts < 1:
        raise SamplingError(f"the text has {corpus_tokens} tokens, one window takes {seq_len + 1}: add text")
    name = f"swarmnet sampling/{run_id}/{seed}/{microbatch.origin}/{microbatch.counter}"
    stream = hashlib.shake_256(name.encode()).digest(_DRAW_BYTES * sequences)
    draws = (stream[index : index + _DRAW_BYTES] for index in range(0, len(stream), _DRAW_BYTES))
    return tuple(int.from_bytes(draw, "little") % possible_starts for draw in draws)


def drawn(run_id: RunId, seed: int, key: MicrobatchId, corpus: Tensor, data: Data) -> tuple[Tensor, Tensor]:
    """Return inputs_BT and labels_BT (int64) of the microbatch `key`, drawn from this corpus (1-D)."""
    length = data.seq_len
    starts = window_starts(run_id, seed, key, len(corpus), data.micro_batch_size, length)
    return windows(corpus, starts, length)


def windows(corpus: Tensor, starts: Sequence[int], seq_len: int) -> tuple[Tensor, Tensor]:
    """Return inputs_BT and labels_BT (int64) of the windows of `corpus` (1-D) that begin at `starts`."""
    return inputs_and_labels([corpus[start : start + seq_len + 1] for start in starts])


def inputs_and_labels(windows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return inputs_BT and labels_BT (int64): the windows, and the same one token later. A token that is only
    context has the label `IGNORE_INDEX`."""
    window_BT = torch.stack(list(windows)).long()
    labels_BT = torch.where(window_BT < 0, IGNORE_INDEX, window_BT)[:, 1:]
    tokens_BT = torch.where(window_BT < 0, as_context(window_BT), window_BT)
    return tokens_BT[:, :-1].contiguous(), labels_BT.contiguous()


def as_context(tokens: Tensor) -> Tensor:
    """Return tokens of a signed type as context, by negative numbers; and such numbers as tokens."""
    return -1 - tokens


def learned(labels: Tensor) -> int:
    """Return the number of labels with a loss."""
    return int((labels != IGNORE_INDEX).sum())
