"""Generate text with a trained model, token by token."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from peers.data.tokenizer import ByteTokenizer, Tokenizer
from swarmnet.model.decoder import Cache, forward
from swarmnet.model.parameters import whole
from swarmnet.run.schema import ModelShape


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
    """Continue `prompt` by `tokens` tokens, or until the text ends. Yields the new bytes as they come.

    `temperature` 0 takes the likeliest token; `top_k` 0 allows all tokens. `window` is the maximum context in
    tokens. Set it to the training length, since the model never saw later positions. A full window is cut to
    its newer half. An empty prompt is a line end.
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
    """A whole model in this process, with the KV cache of one text."""

    def __init__(self, weights: Mapping[str, Tensor], shape: ModelShape) -> None:
        self._weights = weights
        self._shape = shape
        self._cache = Cache()

    def logits(self, going: Continuation) -> Tensor:
        """Return the logits [V] of the next token. Call it once per token, for one text at a time."""
        if not going.begun:
            self._cache = Cache()
        with torch.no_grad():
            fresh = torch.tensor([going.fresh])
            return forward(self._weights, self._shape, whole(self._shape), fresh, self._cache)[0, -1]


class Continuation:
    """A text that grows token by token: the model's next input, and the sampling of its output.

    The arguments are those of `generate`.
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
        self._temperature = temperature
        self._top_k = top_k
        self._generator = torch.Generator().manual_seed(seed)
        self.ended = False
        """Whether the model has ended the text."""
        self._seen: list[int] = []
        self._start = 0
        """Start of the window; the model does not see earlier tokens."""
        self.add(prompt or b"\n")

    def add(self, text: bytes) -> None:
        """Append text of another author. The window is cut to leave room for a token, and computed again."""
        self.ended = False
        seen = self._seen[self._start :] + self._tokenizer.encode(text).tolist()
        self._start = max(0, len(seen) - (self._window - 1))
        self._seen = seen
        self._fresh = len(seen) - self._start
        self._prompt_tokens = len(seen)
        self._shown = b""

    @property
    def visible(self) -> list[int]:
        """Return the tokens of the window: the input of a model without a KV cache."""
        return self._seen[self._start :]

    @property
    def fresh(self) -> list[int]:
        """Return those of them that the model has not seen yet."""
        return self._seen[len(self._seen) - self._fresh :]

    @property
    def begun(self) -> bool:
        """Whether the model has seen a part of the window, so that its KV cache is valid."""
        return len(self._seen) - self._fresh > self._start

    def take(self, logits_V: Tensor) -> bytes:
        """Choose the next token by the logits for `visible`. Return the new bytes of text."""
        token = _choose(logits_V, self._temperature, self._top_k, self._generator)
        self.ended = token == self._tokenizer.end.token
        if self.ended:
            return b""
        self._seen.append(token)
        self._fresh = 1
        if len(self._seen) - self._start > self._window:
            self._start = len(self._seen) - self._window // 2
            self._fresh = len(self._seen) - self._start
        # Decode from the last appended text on, as a character may take several tokens.
        text = self._tokenizer.decode(self._seen[self._prompt_tokens :])
        piece = text[len(self._shown) :]
        self._shown = text
        return piece


class Readable:
    """Decodes the bytes of a growing text into characters that are safe on a terminal."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def add(self, piece: bytes, final: bool = False) -> str:
        """Return the characters that `piece` completes; with `final` also incomplete ones."""
        return harmless(self._decoder.decode(piece, final))


def harmless(text: str) -> str:
    """Replace characters that steer a terminal: strangers chose the training text."""
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
