"""What a trained model is used for: continuing a text, and scoring one."""

import hashlib
from itertools import pairwise
from math import log

import pytest
import torch
from model_sizes import model_shape
from sharp_weights import sharp_weights
from torch import Tensor
from torch.nn import functional

from peers.data.documents import TextError
from peers.data.tokenizer import ByteTokenizer, DocumentSeparator
from peers.tools.model.evaluate import bits_per_byte, score_weights
from peers.tools.model.generate import Continuation, generate
from swarmnet.model.decoder import forward
from swarmnet.model.parameters import HEAD, whole

SHAPE = model_shape(width=32, layers=2, heads=4, kv_heads=2, inner=48, max_position_embeddings=24)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return sharp_weights(SHAPE)


def made(weights: dict[str, Tensor], prompt: bytes = b"def f", tokens: int = 60, **options: float) -> bytes:
    return b"".join(generate(weights, SHAPE, prompt, tokens, **options))  # type: ignore[arg-type]


def test_a_seed_repeats_the_text_and_another_changes_it(weights: dict[str, Tensor]) -> None:
    assert made(weights, seed=1) == made(weights, seed=1)
    assert made(weights, seed=1) != made(weights, seed=2)
    assert len(made(weights)) == 60


def test_the_likeliest_token_follows_at_temperature_zero_as_without_a_cache(
    weights: dict[str, Tensor],
) -> None:
    text = list(b"def f")
    for _ in range(19):
        text.append(int(forward(weights, SHAPE, whole(SHAPE), torch.tensor([text]))[0, -1].argmax()))
    assert made(weights, tokens=19, temperature=0) == bytes(text[5:])


def test_generation_goes_on_past_the_window(weights: dict[str, Tensor]) -> None:
    text = list(b"def f")
    seen = text[:]
    for _ in range(40):
        if len(seen) > 8:
            seen = text[-4:]
        token = int(forward(weights, SHAPE, whole(SHAPE), torch.tensor([seen]))[0, -1].argmax())
        text.append(token)
        seen = [*seen, token]
    assert made(weights, tokens=40, temperature=0, window=8) == bytes(text[5:])


def test_top_1_is_the_likeliest_and_a_low_temperature_comes_close(weights: dict[str, Tensor]) -> None:
    likeliest = made(weights, temperature=0)
    assert made(weights, top_k=1, temperature=1) == likeliest
    assert made(weights, temperature=1e-4) == likeliest
    assert made(weights, temperature=5, top_k=0) != likeliest


def test_a_prompt_may_be_empty_or_longer_than_the_context(weights: dict[str, Tensor]) -> None:
    assert made(weights, b"") == made(weights, b"\n")
    assert made(weights, b"x" * 100 + b"def f" * 10, 5) == made(weights, b"y" * 7 + b"def f" * 10, 5)


@pytest.mark.parametrize("options", [{"temperature": -1}, {"top_k": -1}, {"window": 1}, {"tokens": -1}])
def test_impossible_options_are_refused(weights: dict[str, Tensor], options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        made(weights, **options)


def test_a_uniform_model_takes_eight_bits_per_byte(weights: dict[str, Tensor]) -> None:
    uniform = weights | {HEAD: torch.zeros_like(weights[HEAD])}
    text = bytes(range(256)) * 3 + b"odd end"
    score = score_weights(uniform, SHAPE, text)
    assert score.bits_per_byte == pytest.approx(8.0, abs=1e-6)
    assert score.bytes == len(text)
    assert score.sha256 == hashlib.sha256(text).hexdigest()
    assert score.window == SHAPE.max_position_embeddings


def test_a_model_that_knows_the_next_byte_takes_no_bits() -> None:
    def successor(tokens_BT: Tensor) -> Tensor:
        return 100.0 * functional.one_hot((tokens_BT + 1) % 256, 256)

    text = bytes((11 + number) % 256 for number in range(1000))
    assert bits_per_byte(successor, text).bits_per_byte == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("length", [1, 5, 10, 11, 95])
def test_every_byte_is_scored_once_with_its_window_before_it(length: int) -> None:
    seen: list[tuple[int, int]] = []
    text = bytes(range(100, 100 + length))

    def spy(tokens_BT: Tensor) -> Tensor:
        seen.extend((row[0], len(row)) for row in tokens_BT.tolist())
        return torch.zeros(*tokens_BT.shape, 256)

    bits_per_byte(spy, text, window=10, batch=4)
    assert sum(count for _, count in seen) == length
    assert seen[0][0] == ord("\n")
    assert all(second[0] == text[10 * at + 9] for at, (_, second) in enumerate(pairwise(seen)))


def test_the_score_is_the_mean_cross_entropy_of_the_windows(weights: dict[str, Tensor]) -> None:
    text = b"for each in range(10):\n    print(each)\n" * 2
    tokens = torch.tensor(list(b"\n" + text))
    nats = 0.0
    for start in range(0, len(text), 24):
        window = tokens[start : start + 25]
        logits = forward(weights, SHAPE, whole(SHAPE), window[None, :-1])[0]
        nats += functional.cross_entropy(logits, window[1:], reduction="sum").item()
    score = score_weights(weights, SHAPE, text)
    assert score.bits_per_byte == pytest.approx(nats / log(2) / len(text), rel=1e-5)


def test_a_long_text_is_scored_by_an_excerpt(weights: dict[str, Tensor]) -> None:
    text = b"a" * 10_000 + b"b" * 10_000
    score = score_weights(weights, SHAPE, text, limit=8192)
    assert score.bytes == 8192
    assert score.sha256 == hashlib.sha256(b"a" * 4096 + b"b" * 4096).hexdigest()


def test_no_text_has_no_score(weights: dict[str, Tensor]) -> None:
    with pytest.raises(TextError, match="no text to score"):
        score_weights(weights, SHAPE, b"")


def test_a_text_ends_where_the_model_says_so_and_goes_on_when_somebody_writes_on():
    tokenizer = ByteTokenizer()
    tokenizer.end = DocumentSeparator(b"\0", 0)
    going = Continuation(b"a", 16, temperature=0, tokenizer=tokenizer)
    assert (going.take(one_hot(98)), going.ended) == (b"b", False)
    assert (going.take(one_hot(0)), going.ended) == (b"", True)
    going.add(b"c")
    assert not going.ended
    assert going.visible == list(b"abc")


def one_hot(token: int) -> Tensor:
    """[V]: logits of which one is the largest."""
    return functional.one_hot(torch.tensor(token), 256).float()
