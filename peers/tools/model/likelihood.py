"""Compute the likelihood of texts and generate up to a stop text, as evaluation harnesses need it.

Every token is predicted once, with as much preceding text as the window holds. Shape suffixes as in
swarmnet/model/decoder.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peers.data.tokenizer import Tokenizer
from peers.tools.model.generate import generate
from swarmnet.model.decoder import forward
from swarmnet.model.parameters import whole
from swarmnet.run.schema import ModelShape

NUMBERS_AT_ONCE = 1 << 26
"""Logits of one batch: 256 MiB."""
ROWS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Likelihood of a text as the continuation of another."""

    nats: float
    """Logarithm of the probability; at most 0."""
    likeliest: bool
    """Whether each token was the likeliest one."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A window whose last `count` predictions belong to text `text`."""

    text: int
    inputs: list[int]
    labels: list[int]
    count: int


class ModelScorer:
    """Scorer of a whole model in this process. `window`: its training length in tokens."""

    def __init__(
        self, *, weights: Mapping[str, Tensor], shape: ModelShape, tokenizer: Tokenizer, window: int
    ) -> None:
        self._weights = weights
        self._shape = shape
        self._tokenizer = tokenizer
        self.window = min(window, shape.max_position_embeddings)

    def continuations(self, pairs: Sequence[tuple[str, str]]) -> list[Likelihood]:
        """Return the likelihood of each continuation, given (context, continuation) pairs. An empty context
        is a line end."""
        return self._read([self._joined(context, continuation) for context, continuation in pairs])

    def texts(self, texts: Sequence[str]) -> list[Likelihood]:
        """Return the likelihood of each whole text after a line end."""
        return self.continuations([("", text) for text in texts])

    def write(self, prompt: str, until: Sequence[str], tokens: int, temperature: float = 0.0) -> str:
        """Continue `prompt` by at most `tokens` tokens, up to the first of the texts `until`."""
        said = b""
        for piece in generate(
            self._weights,
            self._shape,
            prompt.encode(),
            tokens,
            temperature=temperature,
            window=self.window,
            tokenizer=self._tokenizer,
        ):
            said += piece
            ends = [at for stop in until if stop and (at := said.find(stop.encode())) >= 0]
            if ends:
                return said[: min(ends)].decode(errors="replace")
        return said.decode(errors="replace")

    def _joined(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Return the tokens of both, and how many of them belong to the continuation. Spaces at the end of
        the context are moved to the continuation, because tokenizers join a space with the next word."""
        bare = context.rstrip(" ")
        continuation = context[len(bare) :] + continuation
        before = self._tokenizer.encode((bare or "\n").encode()).tolist()
        both = self._tokenizer.encode(((bare or "\n") + continuation).encode()).tolist()
        if both[: len(before)] != before:  # The tokenizer joins across the border.
            both = before + self._tokenizer.encode(continuation.encode()).tolist()
        return both, len(both) - len(before)

    def _rows(self, text: int, tokens: list[int], scored: int) -> Iterator[_Row]:
        for first in range(len(tokens) - scored, len(tokens), self.window):
            stop = min(first + self.window, len(tokens))
            start = max(0, stop - 1 - self.window)
            yield _Row(text, tokens[start : stop - 1], tokens[first:stop], stop - first)

    def _read(self, texts: Sequence[tuple[list[int], int]]) -> list[Likelihood]:
        nats, likeliest = [0.0] * len(texts), [True] * len(texts)
        rows = [row for text, each in enumerate(texts) for row in self._rows(text, *each)]
        rows.sort(key=lambda row: -len(row.inputs))
        while rows:
            length = len(rows[0].inputs)
            most = max(1, min(ROWS_AT_ONCE, NUMBERS_AT_ONCE // (length * self._shape.vocab_size)))
            batch, rows = rows[:most], rows[most:]
            # Padded at the end, where later tokens do not change earlier predictions.
            inputs_BT = torch.tensor([row.inputs + [0] * (length - len(row.inputs)) for row in batch])
            with torch.no_grad():
                logits_BTV = forward(self._weights, self._shape, whole(self._shape), inputs_BT)
            for row, logits_TV in zip(batch, logits_BTV, strict=True):
                end = len(row.inputs)
                said_NV = logits_TV[end - row.count : end].float()
                labels_N = torch.tensor(row.labels)
                nats[row.text] += float(said_NV.log_softmax(1).gather(1, labels_N[:, None]).sum())
                likeliest[row.text] &= bool((said_NV.argmax(1) == labels_N).all())
        return [Likelihood(*each) for each in zip(nats, likeliest, strict=True)]
