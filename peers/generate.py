"""Text from a trained model, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from peers.text import ByteTokenizer, Tokenizer
from swarmnet.manifest import ModelShape
from swarmnet.model import Cache, forward, whole


def generate(
    weights: Mapping[str, Tensor],
    shape: ModelShape,
    prompt: bytes,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
    window: int | None = None,
    tokenizer: Tokenizer | None = None,
) -> Iterator[bytes]:
    """Continue `prompt` by `tokens` tokens; yields the new bytes as they come.

    `temperature` 0 takes the likeliest token; `top_k` 0 allows all of them. `window` is how many tokens
    the model looks back at most: give it the length it was trained on, since positions beyond are new
    to it. When the window is full, it starts again from its newer half. An empty prompt is a line end.
    """
    going = Continuation(
        prompt,
        shape.context,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        window=window,
        tokenizer=tokenizer,
    )
    if tokens < 0:
        raise ValueError("tokens must not be negative")
    cache = Cache()
    for _ in range(tokens):
        if not going.begun:
            cache = Cache()
        fresh = torch.tensor([going.fresh])
        with torch.no_grad():
            logits_BTV = forward(weights, shape, whole(shape), fresh, cache)
        yield going.take(logits_BTV[0, -1])


class Continuation:
    """A text that grows token by token: what the model is to see next, and what it says to it.

    Arguments as of `generate`.
    """

    def __init__(
        self,
        prompt: bytes,
        context: int,
        *,
        temperature: float = 0.8,
        top_k: int = 40,
        seed: int = 0,
        window: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._tokenizer = tokenizer or ByteTokenizer()
        self._window = min(window or context, context)
        if temperature < 0 or top_k < 0 or self._window < 2:
            raise ValueError("temperature and top_k must not be negative, window at least 2")
        self._temperature, self._top_k = temperature, top_k
        self._generator = torch.Generator().manual_seed(seed)
        self._seen: list[int] = self._tokenizer.encode(prompt or b"\n").tolist()
        self._prompt_tokens = len(self._seen)
        self._shown = b""
        self._start = max(0, self._prompt_tokens - (self._window - 1))
        """Where the window begins; what is before it is not seen any more."""
        self._fresh = self._prompt_tokens - self._start

    @property
    def visible(self) -> list[int]:
        """The tokens of the window: what a model without a cache is to be given."""
        return self._seen[self._start :]

    @property
    def fresh(self) -> list[int]:
        """Those of them that it has not been given yet."""
        return self._seen[len(self._seen) - self._fresh :]

    @property
    def begun(self) -> bool:
        """Whether a part of the window was given before: a cache of it is of use."""
        return len(self._seen) - self._fresh > self._start

    def take(self, logits_V: Tensor) -> bytes:
        """Choose the next token by what the model says to `visible`; the new bytes of text."""
        self._seen.append(_choose(logits_V, self._temperature, self._top_k, self._generator))
        self._fresh = 1
        if len(self._seen) - self._start > self._window:
            self._start = len(self._seen) - self._window // 2
            self._fresh = len(self._seen) - self._start
        # Decoded from the start, as a character may take several tokens.
        text = self._tokenizer.decode(self._seen[self._prompt_tokens :])
        piece, self._shown = text[len(self._shown) :], text
        return piece


def _choose(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V.float() / temperature
    if 0 < top_k < len(logits_V):
        threshold = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < threshold, float("-inf"))
    return int(torch.multinomial(logits_V.softmax(dim=0), 1, generator=generator))
