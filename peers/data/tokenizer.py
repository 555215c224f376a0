"""Text as tokens: a byte each, or as a `tokenizer.json` says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from peers.data.documents import BETWEEN_DOCUMENTS, TextError
from peers.errors import how_to_install
from swarmnet.run.manifest import BYTES, Data

PIECE_BYTES = 64 * 1024
"""A text is cut here at the latest. The tokenizers package takes time with the square of a piece that has no
line end: 1 MiB 1.4 s, 4 MiB 40 s and 1 GB of memory (docs/log.md)."""
BATCH_BYTES = 2**20
"""Encoded at a time, on as many threads as the package takes."""
_SPACES = (b" ", b"\t", b"\r")
_LONGEST_CHARACTER = 4
"""Bytes of UTF-8."""


class Tokenizer(Protocol):
    @property
    def vocabulary(self) -> int:
        """Tokens are 0 to this, exclusive."""

    def encode(self, text: bytes) -> Tensor:
        """Tokens of `text`: one dimension, of `dtype_for(vocabulary)`."""

    def encode_pieces(self, pieces: Sequence[bytes]) -> Tensor:
        """Tokens of pieces of text that follow each other, each at most some PIECE_BYTES long."""

    def decode(self, tokens: Sequence[int]) -> bytes: ...

    @property
    def end(self) -> Ending:
        """What stands between two documents."""


@dataclass(frozen=True, slots=True)
class Ending:
    """What stands between two documents."""

    text: bytes = BETWEEN_DOCUMENTS
    token: int | None = None
    """Which the model says where a text ends; None: it never does."""


def dtype_for(vocabulary: int) -> torch.dtype:
    """The smallest that holds every token: a text's tokens are as large as the text at most."""
    if vocabulary <= 2**8:
        return torch.uint8
    return torch.uint16 if vocabulary <= 2**16 else torch.int32


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """A token is a byte."""

    vocabulary: int = 256
    end: Ending = Ending()

    def encode(self, text: bytes) -> Tensor:
        if not text:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def encode_pieces(self, pieces: Sequence[bytes]) -> Tensor:
        return self.encode(b"".join(pieces))

    def decode(self, tokens: Sequence[int]) -> bytes:
        # A model may have more than 256 outputs; those beyond are no text.
        return bytes(token for token in tokens if token < 256)


class FileTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` package. Text that is not UTF-8 is replaced."""

    def __init__(self, path: Path) -> None:
        self.end = Ending()
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError:
            raise TextError(f"{path} needs the package `tokenizers`: {how_to_install('hf')}") from None
        if not path.is_file():
            raise TextError(f"tokenizer {path} does not exist")
        try:
            self._loaded: Any = Loaded.from_str(path.read_text("utf-8"))
        except Exception as error:  # noqa: BLE001 - the package raises bare Exception for a bad file
            raise TextError(f"{path} is not a tokenizer.json: {error}") from None

    @property
    def vocabulary(self) -> int:
        return int(self._loaded.get_vocab_size())

    def encode(self, text: bytes) -> Tensor:
        return self.encode_pieces(list(pieces_of([text])))

    def encode_pieces(self, pieces: Sequence[bytes]) -> Tensor:
        texts = [piece.decode("utf-8", "replace") for piece in pieces]
        encoded = self._loaded.encode_batch_fast(texts, add_special_tokens=False)
        dtype = dtype_for(self.vocabulary)
        return torch.cat(
            [torch.empty(0, dtype=dtype), *(torch.tensor(one.ids, dtype=dtype) for one in encoded)]
        )

    def decode(self, tokens: Sequence[int]) -> bytes:
        """A character whose last bytes are still to come is left away."""
        text = str(self._loaded.decode(list(tokens), skip_special_tokens=False))
        return text.rstrip("\N{REPLACEMENT CHARACTER}").encode()


def open_tokenizer(file: Path | None, vocabulary: int, end_of_text: str = "") -> Tokenizer:
    """A tokenizer.json, or None: bytes. `end_of_text`: the manifest's. Raises TextError if the model's
    vocabulary is smaller, or if the end of a text is not one token."""
    tokenizer = ByteTokenizer() if file is None else FileTokenizer(file)
    if end_of_text:
        tokens = tokenizer.encode(end_of_text.encode()).tolist()
        if len(tokens) != 1:
            raise TextError(
                f"data.end_of_text {end_of_text!r} is {len(tokens)} tokens of tokenizer {file or BYTES}; it "
                "must be one: add it to the tokenizer as a special token, or name another"
            )
        end = Ending(end_of_text.encode(), tokens[0])
        if isinstance(tokenizer, FileTokenizer):
            tokenizer.end = end
        else:
            tokenizer = ByteTokenizer(end=end)
    if tokenizer.vocabulary > vocabulary:
        raise TextError(
            f"tokenizer {file or BYTES} has {tokenizer.vocabulary} tokens, the model {vocabulary}: "
            "raise model.vocabulary"
        )
    return tokenizer


def tokenizer_file(data: Data, given: Path | None) -> Path | None:
    """The tokenizer.json of a run's text on this machine; None: its tokens are bytes. `given`: where a person
    says that it is: what stands in a manifest is the owner's name for it, never a place. Raises TextError."""
    if data.tokenizer == BYTES:
        if given is not None:
            raise TextError(f"tokenizer {given} is not for this run, whose tokens are bytes: leave it out")
        return None
    if given is None:
        raise TextError(
            f"the run's text is read with a tokenizer.json that its owner hands out ({data.tokenizer}): say "
            "where it is on this machine: --tokenizer FILE"
        )
    return given


def pieces_of(blocks: Iterable[bytes], length: int = PIECE_BYTES) -> Iterator[bytes]:
    """A document, which comes in blocks of any length, as pieces of at most `length` bytes: cut behind a line
    end, else before white space (tokens begin with it), else between two characters."""
    waiting = b""
    for block in blocks:
        waiting = waiting + block if waiting else block
        start = 0
        while len(waiting) - start > length:
            stop = _cut(waiting, start, start + length)
            yield waiting[start:stop]
            start = stop
        waiting = waiting[start:]
    if waiting:
        yield waiting


def _cut(text: bytes, start: int, last: int) -> int:
    """Where a piece that began at `start` ends, behind `start` and at `last` at the latest."""
    half = (start + last + 1) // 2
    line_end = text.rfind(b"\n", half, last)
    if line_end >= 0:
        return line_end + 1
    space = max(text.rfind(each, half, last) for each in _SPACES)
    if space > start:
        return space
    for stop in range(last, max(start, last - _LONGEST_CHARACTER), -1):
        if text[stop] & 0xC0 != 0x80:  # No byte that continues a character.
            return stop
    return last
