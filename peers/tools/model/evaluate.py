"""How well a model predicts a text, in bits per byte: comparable between tokenizers and models.

Fixed windows in a fixed order, every token scored once: a window is predicted from the token before it
and from itself. The text starts after a line end, which is not scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

import torch
from torch import Tensor
from torch.nn import functional

from peers.data.documents import TextError, excerpt, fingerprint
from peers.data.tokenizer import ByteTokenizer, Tokenizer
from swarmnet.model.decoder import forward
from swarmnet.model.parameters import whole
from swarmnet.run.manifest import ModelShape

SCORED_BYTES = 64 * 1024
"""2.3 seconds of one core at 0.8M parameters (measured); enough to tell runs apart."""

OVERFLOW_NATS = 700.0
"""Their exponential is beyond a float."""


@dataclass(frozen=True, slots=True)
class Score:
    bits_per_byte: float
    bytes: int
    sha256: str
    """Of what was scored. Scores compare only where this and the window are equal."""
    window: int
    """Tokens predicted per window; their mean context is half of it."""
    perplexity: float
    """Per token: e to the mean loss."""
    loss: float
    """Nats per token."""


Pair = tuple[Tensor, Tensor]
LogitsOf = Callable[[Tensor], Tensor]
"""tokens_BT -> logits_BTV."""


@dataclass(frozen=True, slots=True)
class Windows:
    """A text cut for scoring."""

    scored: bytes
    window: int
    pairs: tuple[Pair, ...]
    """inputs_BT and labels_BT, int64."""

    @property
    def tokens(self) -> int:
        """Labels of all windows."""
        return labels_of(self.pairs)

    def score(self, nats: float) -> Score:
        """By the loss summed over all labels."""
        bits = nats / log(2) / len(self.scored)
        mean = nats / self.tokens
        perplexity = exp(mean) if mean < OVERFLOW_NATS else float("inf")
        return Score(bits, len(self.scored), fingerprint(self.scored), self.window, perplexity, mean)


def bits_per_byte(
    logits_of: LogitsOf,
    text: bytes,
    tokenizer: Tokenizer | None = None,
    *,
    window: int = 128,
    batch: int = 8,
    limit: int = SCORED_BYTES,
) -> Score:
    """Score `text` (an excerpt of at most `limit` bytes) with a model: tokens_BT -> logits_BTV.

    Raises TextError if there is no text.
    """
    windows = cut(text, tokenizer, window=window, batch=batch, limit=limit)
    return windows.score(nats_of(logits_of, windows.pairs))


def nats_of(logits_of: LogitsOf, pairs: Sequence[Pair]) -> float:
    """The loss summed over all labels."""
    nats = 0.0
    with torch.no_grad():
        for inputs_BT, labels_BT in pairs:
            logits_BTV = logits_of(inputs_BT)
            nats += functional.cross_entropy(
                logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum"
            ).item()
    return nats


def labels_of(pairs: Sequence[Pair]) -> int:
    """How many labels they have."""
    return sum(labels_BT.numel() for _, labels_BT in pairs)


def cut(
    text: bytes, tokenizer: Tokenizer | None = None, *, window: int, batch: int, limit: int = SCORED_BYTES
) -> Windows:
    """The windows of a text (an excerpt of at most `limit` bytes). Raises TextError if there is no text."""
    tokenizer = tokenizer or ByteTokenizer()
    scored = excerpt(text, limit)
    if not scored:
        raise TextError("there is no text to score")
    tokens = torch.cat((tokenizer.encode(b"\n")[-1:], tokenizer.encode(scored))).long()
    full = (len(tokens) - 1) // window
    inputs_NT = tokens[: full * window].view(full, window)
    labels_NT = tokens[1 : full * window + 1].view(full, window)
    pairs = [(inputs_NT[at : at + batch], labels_NT[at : at + batch]) for at in range(0, full, batch)]
    if full * window < len(tokens) - 1:
        pairs.append((tokens[None, full * window : -1], tokens[None, full * window + 1 :]))
    return Windows(scored, window, tuple(pairs))


def score_weights(
    weights: Mapping[str, Tensor],
    shape: ModelShape,
    text: bytes,
    tokenizer: Tokenizer | None = None,
    *,
    window: int = 128,
    limit: int = SCORED_BYTES,
) -> Score:
    """`bits_per_byte` of the model with these weights (global name -> float32)."""
    return bits_per_byte(
        lambda tokens_BT: forward(weights, shape, whole(shape), tokens_BT),
        text,
        tokenizer,
        window=min(window, shape.max_position_embeddings),
        limit=limit,
    )
