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
    tokenizer = tokenizer or ByteTokenizer()
    window = min(window or shape.context, shape.context)
    if tokens < 0 or temperature < 0 or top_k < 0 or window < 2:
        raise ValueError("tokens, temperature and top_k must not be negative, window at least 2")
    generator = torch.Generator().manual_seed(seed)
    seen = tokenizer.encode(prompt or b"\n").tolist()
    prompt_tokens = len(seen)
    shown = b""
    cache = Cache()
    fresh = seen[-(window - 1) :]
    for _ in range(tokens):
        if cache.length + len(fresh) > window:
            cache, fresh = Cache(), seen[-(window // 2) :]
        with torch.no_grad():
            logits_BTV = forward(weights, shape, whole(shape), torch.tensor([fresh]), cache)
        fresh = [_choose(logits_BTV[0, -1], temperature, top_k, generator)]
        seen += fresh
        # Decoded from the start, as a character may take several tokens.
        text = tokenizer.decode(seen[prompt_tokens:])
        yield text[len(shown) :]
        shown = text


def _choose(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V.float() / temperature
    if 0 < top_k < len(logits_V):
        threshold = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < threshold, float("-inf"))
    return int(torch.multinomial(logits_V.softmax(dim=0), 1, generator=generator))
