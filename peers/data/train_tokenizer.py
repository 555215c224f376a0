"""Train a tokenizer on a text: byte-level BPE, which can encode every text, by the `tokenizers` package."""

from __future__ import annotations

from collections.abc import Iterator

from peers.config.errors import how_to_install
from peers.data.documents import DocumentText, TextError
from peers.data.tokenizer import pieces_of
from peers.data.tokens import Progress


def train_tokenizer(
    text: DocumentText, vocabulary: int, eos_token: str, progress: Progress
) -> tuple[bytes, int]:
    """Train a tokenizer with at most `vocabulary` tokens, `eos_token` among them. Returns its tokenizer.json
    and its number of tokens. `progress` is called with the bytes read so far and in all. Raises TextError if
    there is no text, or if the package `tokenizers` is missing."""
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise TextError(
            f"making a tokenizer needs the package `tokenizers`: {how_to_install('hf')}"
        ) from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        min_frequency=2,
        special_tokens=[eos_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    next(text.blocks())  # Raises TextError for a missing text; the trainer would hide that.
    tokenizer.train_from_iterator(_pieces(text, progress), trainer)
    return tokenizer.to_str(pretty=True).encode(), int(tokenizer.get_vocab_size())


def _pieces(text: DocumentText, progress: Progress) -> Iterator[str]:
    for piece in pieces_of(block for _, block in text.blocks()):
        progress(text.reading.bytes, text.total_bytes)
        yield piece.decode("utf-8", "replace")
