"""Score how well a model predicts a text, in bits per byte, which is comparable between tokenizers and
models.

The windows are fixed and in a fixed order, and every token is scored once. A window is predicted from the
token before it and from its own earlier tokens. The text starts after a line end, which is not scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

import torch
from torch import Tensor
from torch.nn import functional

from peers.data.documents import DocumentText, TextError, excerpt, fingerprint
from peers.data.tokenizer import ByteTokenizer, Tokenizer
from swarmnet.model.decoder import forward
from swarmnet.model.parameters import whole
from swarmnet.model.sampling import IGNORE_INDEX, as_context, inputs_and_labels, learned
from swarmnet.run.schema import ModelShape

SCORED_BYTES = 64 * 1024
"""Bytes that are scored by default: 2.3 seconds of one core at 0.8M parameters (measured). It is enough to
tell runs apart."""

OVERFLOW_NATS = 700.0
"""Loss from which the exponential overflows a float."""


@dataclass(frozen=True, slots=True)
class Score:
    bits_per_byte: float
    bytes: int
    sha256: str
    """SHA-256 of the scored text. Scores compare only if this and the window are equal."""
    window: int
    """Tokens that are predicted per window; their mean context is half of it."""
    perplexity: float
    """Perplexity per token: e to the power of the mean loss."""
    loss: float
    """Mean loss in nats per token."""


Pair = tuple[Tensor, Tensor]
LogitsOf = Callable[[Tensor], Tensor]
"""Maps tokens_BT to logits_BTV."""


@dataclass(frozen=True, slots=True)
class Windows:
    """A text that is cut into windows for scoring."""

    scored: bytes
    window: int
    pairs: tuple[Pair, ...]
    """Inputs_BT and labels_BT of each batch, int64."""

    @property
    def tokens(self) -> int:
        """Number of labels in all windows, without those of context."""
        return labels_of(self.pairs)

    def score(self, nats: float) -> Score:
        """Return the score for the loss `nats`, summed over all labels."""
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


def score_answers(
    weights: Mapping[str, Tensor],
    shape: ModelShape,
    text: DocumentText,
    tokenizer: Tokenizer,
    *,
    window: int = 128,
) -> Score:
    """Return the score of the answers in the conversations of a text. The bytes are those of the answers.
    Raises TextError if there are none."""
    windows = cut_answers(text, tokenizer, window=min(window, shape.max_position_embeddings))
    return windows.score(
        nats_of(lambda tokens_BT: forward(weights, shape, whole(shape), tokens_BT), windows.pairs)
    )


def nats_of(logits_of: LogitsOf, pairs: Sequence[Pair]) -> float:
    """Return the loss in nats, summed over all labels but `IGNORE_INDEX`."""
    nats = 0.0
    with torch.no_grad():
        for inputs_BT, labels_BT in pairs:
            logits_BTV = logits_of(inputs_BT)
            nats += functional.cross_entropy(
                logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
            ).item()
    return nats


def labels_of(pairs: Sequence[Pair]) -> int:
    """Return the number of labels but `IGNORE_INDEX`."""
    return sum(learned(labels_BT) for _, labels_BT in pairs)


def cut(
    text: bytes, tokenizer: Tokenizer | None = None, *, window: int, batch: int, limit: int = SCORED_BYTES
) -> Windows:
    """Return the windows of a text (an excerpt of at most `limit` bytes). Raises TextError if empty."""
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


def cut_answers(
    text: DocumentText, tokenizer: Tokenizer, *, window: int, batch: int = 8, limit: int = SCORED_BYTES
) -> Windows:
    """Return a window for each conversation of a text, as `open_reader` encodes it, until they have `limit`
    tokens. Of a longer conversation it has the first `window` tokens. Raises TextError if no answer is
    within them."""
    rows, scored, left = list[Tensor](), list[bytes](), limit
    for starts, block in text.blocks():
        assert starts, "a conversation is one block"
        (tokens_T,) = tokenizer.encode_pieces([block])
        row_T = tokens_T[: window + 1]
        answers_N = row_T[1:][row_T[1:] >= 0]
        if len(answers_N):
            rows.append(row_T)
            scored.append(tokenizer.decode(answers_N.tolist()))
        left -= len(row_T)
        if left <= 0:
            break
    if not rows:
        raise TextError(f"no answer begins within the first {window} tokens{text.reading.reason()}")
    pairs = []
    for at in range(0, len(rows), batch):
        some = rows[at : at + batch]
        length = max(map(len, some))
        padding = as_context(torch.tensor(0))  # Behind the text, where it changes no prediction.
        pairs.append(
            inputs_and_labels(
                [functional.pad(row, (0, length - len(row)), value=int(padding)) for row in some]
            )
        )
    return Windows(b"".join(scored), window, tuple(pairs))


def score_weights(
    weights: Mapping[str, Tensor],
    shape: ModelShape,
    text: bytes,
    tokenizer: Tokenizer | None = None,
    *,
    window: int = 128,
    limit: int = SCORED_BYTES,
) -> Score:
    """Return `bits_per_byte` of the model with these weights (global name -> float32)."""
    return bits_per_byte(
        lambda tokens_BT: forward(weights, shape, whole(shape), tokens_BT),
        text,
        tokenizer,
        window=min(window, shape.max_position_embeddings),
        limit=limit,
    )
