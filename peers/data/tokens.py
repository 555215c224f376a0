"""A text's tokens: made once, some of the text at a time, and kept on the disk by what they were made of.

    STATE/text/HASH.tokens     the tokens, little-endian, as narrow as the vocabulary allows; mapped, not read
    STATE/text/newest.json     what they were made of

HASH covers the text, document by document, and the tokenizer: a start with the same text takes as long as
reading it does. The file is written beside and moved when it is whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from peers.config.atomic_files import write_atomically
from peers.config.run_file import SignedManifest
from peers.data.documents import Block, Reading, Text, TextError
from peers.data.tokenizer import BATCH_BYTES, Ending, Tokenizer, dtype_for, open_tokenizer, pieces_of
from swarmnet.identifiers import MicrobatchId
from swarmnet.model.sampling import window_starts, windows
from swarmnet.run.manifest import BYTES

FOLDER = "text"
NEWEST = "newest.json"
FORM = "swarmnet tokens 2"
"""Goes into the hash: another way to cut or join documents makes other tokens."""

FREE_BYTES = 1 << 30
"""Left free on the disk: checkpoints, the largest of which are some GB, must find room beside the text."""

Progress = Callable[[int, int], None]
"""Bytes of text that are tokens now, and bytes in all."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as tokens, and how it came to be that."""

    tokens: Tensor
    """One dimension, `dtype_for(vocabulary)`."""
    reading: Reading
    made: bool
    """False: they lay on the disk."""
    before: int | None = None
    """How many tokens lay there of another text, or of this one before it changed."""
    shards: int = 0
    """Of which these are the first one's; 0: the text is not read in shards."""


def tokens_on_disk(
    text: Text, tokenizer: Path | None, vocabulary: int, state: Path, progress: Progress,
    end_of_text: str = "",
) -> Tokens:  # fmt: skip
    """The tokens of a text by a tokenizer.json, or None: bytes; kept in a peer's state folder. Raises
    TextError: no text, a tokenizer that does not fit, a full disk."""
    opened = open_tokenizer(tokenizer, vocabulary, end_of_text)
    key = _hash_of(text, tokenizer, opened.end)
    folder, dtype = state / FOLDER, dtype_for(opened.vocabulary)
    newest = _newest(folder)
    if newest.get("hash") == key:
        kept = mapped(folder / f"{key}.tokens", newest.get("tokens"), dtype)
        if kept is not None:
            keep_losses(text.reading, newest.get("text"))
            text.reading.tokenizer = opened.warning
            return Tokens(kept, text.reading, made=False)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for interrupted in folder.glob("*.part"):
            interrupted.unlink()
        count = written(folder / f"{key}.tokens", text, opened, progress)
        told = {"hash": key, "tokens": count, "text": asdict(text.reading)}
        write_atomically(folder / NEWEST, json.dumps(told).encode())
        for older in folder.glob("*.tokens"):
            if older.stem != key:
                older.unlink()
    except OSError as error:
        raise TextError(
            f"{folder}: the text's tokens cannot be kept: {error.strerror}; they take as much room as the "
            f"text, {text.total_bytes / 1e6:,.0f} MB at most"
        ) from None
    kept = mapped(folder / f"{key}.tokens", count, dtype)
    if kept is None:
        raise TextError(f"{folder / key}.tokens changed while it was read: start again")
    before = newest.get("tokens")
    text.reading.tokenizer = opened.warning
    return Tokens(kept, text.reading, made=True, before=before if isinstance(before, int) else None)


def encoded(text: Text, tokenizer: Tokenizer, progress: Progress) -> Iterator[Tensor]:
    """The tokens of about BATCH_BYTES of text at a time. `text.reading` counts what they lose."""
    batch: list[bytes | None] = []
    waiting = 0
    for piece in _pieces(text):
        batch.append(piece)
        waiting += len(piece or b"")
        if waiting >= BATCH_BYTES:
            yield _tokens_of(batch, tokenizer, text.reading)
            batch, waiting = [], 0
            progress(text.reading.bytes, text.total_bytes)
    yield _tokens_of(batch, tokenizer, text.reading)


def _tokens_of(batch: Sequence[bytes | None], tokenizer: Tokenizer, reading: Reading) -> Tensor:
    """Return the tokens of pieces, and of the end of text where there is None."""
    pieces = [piece for piece in batch if piece is not None]
    tokens = tokenizer.encode_pieces(pieces)
    given, lost = tokenizer.lost_bytes(pieces, tokens)
    reading.encoded_bytes += given
    reading.lost_bytes += lost
    reading.ends_in_text += sum(map(tokenizer.end.count, pieces))
    dtype, token, each = dtype_for(tokenizer.vocabulary), tokenizer.end.token, iter(tokens)
    end = tokenizer.encode(tokenizer.end.text) if token is None else torch.tensor([token], dtype=dtype)
    parts = [end if piece is None else next(each) for piece in batch]
    return torch.cat([torch.empty(0, dtype=dtype), *parts])


def _pieces(text: Text) -> Iterator[bytes | None]:
    """What the tokenizer is given: whole documents where they are short, and None between two."""
    number = 0

    def document_of(block: Block) -> int:
        nonlocal number
        number += block[0]
        return number

    for count, blocks in groupby(text.blocks(), key=document_of):
        if count > 1:
            yield None
        yield from pieces_of(block for _, block in blocks)


class Digest:
    """SHA-256 over the tokenizer, what stands between documents and each document's own hash."""

    def __init__(self, tokenizer: Path | None, end: Ending) -> None:
        self._whole = whole = hashlib.sha256(FORM.encode())
        whole.update(hashlib.sha256(end.text).digest())
        whole.update(BYTES.encode() if tokenizer is None else hashlib.sha256(tokenizer.read_bytes()).digest())
        self._document = hashlib.sha256()

    def take(self, block: Block) -> None:
        starts, text = block
        if starts:
            self._whole.update(self._document.digest())
            self._document = hashlib.sha256()
        self._document.update(text)

    def hexadecimal(self) -> str:
        whole = self._whole.copy()
        whole.update(self._document.digest())
        return whole.hexdigest()


def _hash_of(text: Text, tokenizer: Path | None, end: Ending) -> str:
    """`Digest` of all of it."""
    digest = Digest(tokenizer, end)
    for block in text.blocks():
        digest.take(block)
    return digest.hexadecimal()


def written(path: Path, text: Text, tokenizer: Tokenizer, progress: Progress) -> int:
    """How many tokens were written. Raises OSError; nothing stays then."""
    part, count = path.with_suffix(".part"), 0
    try:
        with part.open("wb") as file:
            for some in encoded(text, tokenizer, progress):
                if shutil.disk_usage(path.parent).free < FREE_BYTES:
                    raise OSError(errno.ENOSPC, f"less than {FREE_BYTES >> 20} MiB of the disk are free")
                file.write(some.numpy().tobytes())
                count += len(some)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def mapped(path: Path, count: object, dtype: torch.dtype) -> Tensor | None:
    """The file's tokens; None if it is not as long as it should be."""
    try:
        if type(count) is not int or path.stat().st_size != count * dtype.itemsize:
            return None
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.from_file(str(path), shared=False, size=count, dtype=dtype)
    except (OSError, RuntimeError):
        return None


def keep_losses(reading: Reading, saved: object) -> None:
    """Take from a note about the same text what only encoding it counts."""
    if isinstance(saved, Mapping):
        for name in ("ends_in_text", "encoded_bytes", "lost_bytes"):
            count = saved.get(name)
            setattr(reading, name, count if type(count) is int and count >= 0 else 0)


def _newest(folder: Path) -> dict[str, object]:
    try:
        told = json.loads((folder / NEWEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


class Corpus:
    """Text of one peer as tokens (data_path.Text)."""

    def __init__(self, signed: SignedManifest, tokens: Tensor) -> None:
        self.signed = signed
        self.tokens = tokens

    def microbatch(self, key: MicrobatchId) -> tuple[Tensor, Tensor]:
        data, seed = self.signed.manifest.data, self.signed.manifest.seed
        starts = window_starts(
            self.signed.run_id, seed, key, len(self.tokens), data.microbatch_sequences, data.sequence_tokens
        )
        return windows(self.tokens, starts, data.sequence_tokens)
