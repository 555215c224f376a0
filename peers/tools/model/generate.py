"""Text from a trained model, token by token."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from peers.data.tokenizer import ByteTokenizer, Tokenizer
from swarmnet.model.decoder import Cache, forward
from swarmnet.model.parameters import whole
from swarmnet.run.manifest import ModelShape


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
    """Continue `prompt` by `tokens` tokens, or until the text ends; yields the new bytes as they come.

    `temperature` 0 takes the likeliest token; `top_k` 0 allows all of them. `window` is how many tokens
    the model looks back at most: give it the length it was trained on, since positions beyond are new
    to it. When the window is full, it starts again from its newer half. An empty prompt is a line end.
    """
    going = Continuation(
        prompt,
        shape.max_position_embeddings,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        window=window,
        tokenizer=tokenizer,
    )
    if tokens < 0:
        raise ValueError("tokens must not be negative")
    model = LocalModel(weights, shape)
    for _ in range(tokens):
        yield going.take(model.logits(going))
        if going.ended:
            return


class LocalModel:
    """A whole model in this process, with the keys and values of the text that it continues."""

    def __init__(self, weights: Mapping[str, Tensor], shape: ModelShape) -> None:
        self._weights, self._shape = weights, shape
        self._cache = Cache()

    def logits(self, going: Continuation) -> Tensor:
        """[V]: what comes next in the text; one text at a time, asked once per token."""
        if not going.begun:
            self._cache = Cache()
        with torch.no_grad():
            fresh = torch.tensor([going.fresh])
            return forward(self._weights, self._shape, whole(self._shape), fresh, self._cache)[0, -1]


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
        self._shown = b""
        if temperature < 0 or top_k < 0 or self._window < 2:
            raise ValueError("temperature and top_k must not be negative, window at least 2")
        self._temperature, self._top_k = temperature, top_k
        self._generator = torch.Generator().manual_seed(seed)
        self.ended = False
        """The model has said that the text ends here."""
        self._seen: list[int] = []
        self._start = 0
        """Where the window begins; what is before it is not seen any more."""
        self.add(prompt or b"\n")

    def add(self, text: bytes) -> None:
        """Somebody else writes on. The window is seen anew: its end, as much as leaves room for a token."""
        self.ended = False
        seen = self._seen[self._start :] + self._tokenizer.encode(text).tolist()
        self._start = max(0, len(seen) - (self._window - 1))
        self._seen, self._fresh = seen, len(seen) - self._start
        self._prompt_tokens, self._shown = len(seen), b""

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
        token = _choose(logits_V, self._temperature, self._top_k, self._generator)
        self.ended = token == self._tokenizer.end.token
        if self.ended:
            return b""
        self._seen.append(token)
        self._fresh = 1
        if len(self._seen) - self._start > self._window:
            self._start = len(self._seen) - self._window // 2
            self._fresh = len(self._seen) - self._start
        # Decoded from where somebody else wrote last, as a character may take several tokens.
        text = self._tokenizer.decode(self._seen[self._prompt_tokens :])
        piece, self._shown = text[len(self._shown) :], text
        return piece


class Readable:
    """Bytes of a text, as they come, as characters that a terminal may show."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def add(self, piece: bytes, final: bool = False) -> str:
        """The characters that `piece` completes; with `final` also those that stay incomplete."""
        return harmless(self._decoder.decode(piece, final))


def harmless(text: str) -> str:
    """Without the characters that steer a terminal: a model writes what strangers taught it."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text
    )


def _choose(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V.float() / temperature
    if 0 < top_k < len(logits_V):
        threshold = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < threshold, float("-inf"))
    return int(torch.multinomial(logits_V.softmax(dim=0), 1, generator=generator))
