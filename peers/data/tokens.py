"""Tokenize shards once and store the tokens on disk, so that memory does not grow with the text.

    STATE/text/shards/KEY.tokens    little-endian, in the narrowest type for the vocabulary; memory-mapped
    STATE/text/shards/KEY.json      what the tokens were made of

A shard here is a file of text, or several small ones. KEY is a hash of the shard's name, the tokenizer and
the end of text (the token or string between two documents). A shard with unchanged files is not read again. A
shard with changed files, or with newly withdrawn documents, is read, and tokenized again if its text differs.
Tokens are written to a temporary file, which is renamed when it is complete."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from peers.config.atomic_files import write_atomically
from peers.config.errors import UserError
from peers.data.documents import Block, DocumentText, ReadSummary, TextError
from peers.data.files import ReadingStopped
from peers.data.forms import RawTokens
from peers.data.shards import Shard
from peers.data.tokenizer import BATCH_BYTES, Tokenizer, open_reader, pieces_of
from swarmnet.run.schema import Data

FOLDER = "text"
SHARDS = "shards"
FORM = "swarmnet tokens 3"
"""Format version, part of the key: another way to cut or join documents makes other tokens."""

FREE_BYTES = 1 << 30
"""Bytes to leave free on the disk: checkpoints need room next to the text, and the largest have some GB."""

Progress = Callable[[int, int], None]
"""Called with the bytes of text that are tokenized so far, and the bytes in all."""


@dataclass(frozen=True, slots=True)
class ShardTokens:
    """The tokens of one shard."""

    name: str
    tokens: Tensor
    """One dimension, `dtype_for(vocabulary)`, memory-mapped."""
    reading: ReadSummary
    made: bool
    """True if the tokens were made now; False if they were read from disk."""


class _StoredMetadata(msgspec.Struct, frozen=True):
    """What the stored tokens of a shard were made of."""

    digest: str
    """Hash over the documents."""
    seen: str
    tokens: int
    reading: ReadSummary


class ShardCache:
    """Makes and stores the tokens of shards. Its calls block; make them from one thread at a time."""

    def __init__(
        self,
        *,
        tokenizer: Path | None,
        vocabulary: int,
        state: Path,
        data: Data | None = None,
        withdrawn: Collection[bytes] = (),
    ) -> None:
        """Make tokens by a tokenizer.json, or of bytes if `tokenizer` is None, and store them in a peer's
        `state` folder. Raises TextError for a tokenizer that does not fit."""
        self._tokenizer: Tokenizer = open_reader(data or Data(), tokenizer, vocabulary)
        self._dtype = self._tokenizer.dtype
        self._folder = state / FOLDER / SHARDS
        self._withdrawn = frozenset(withdrawn)
        tokenizer_id = "bytes" if tokenizer is None else hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        parts = [FORM, tokenizer_id, self._tokenizer.end.text.hex()]
        self._encoding_id = json.dumps(parts + [self._tokenizer.form] * bool(self._tokenizer.form))
        self._withdrawn_hash = hashlib.sha256(b"".join(sorted(self._withdrawn))).hexdigest()
        self.stopped = False
        """Set from another thread to end the reading with its next block."""

    @property
    def warning(self) -> str:
        """Warning of the tokenizer; empty: none."""
        return self._tokenizer.warning

    def keep_only(self, shards: Iterable[Shard]) -> None:
        """Remove all stored files but the tokens of these shards by this tokenizer. Raises TextError."""
        kept = {self._path(shard).stem for shard in shards}
        try:
            for path in self._folder.glob("*"):
                if path.stem not in kept or path.suffix not in (".tokens", ".json"):
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise TextError(f"{error.filename}: cannot be removed: {error.strerror}") from None

    def open(self, shard: Shard, progress: Progress) -> ShardTokens:
        """Return the tokens of a shard; empty if none of its text can be read. Stored tokens are returned if
        the files have the stored version mark, or if their text, which is then read, has the stored digest.
        Raises TextError if the disk refuses, TextUnreachable and ReadingStopped."""
        path, version_mark = self._path(shard), f"{shard.seen}/{self._withdrawn_hash}"
        stored = _read_metadata(path.with_suffix(".json"))
        tokens = None if stored is None else _map_file(path, stored.tokens, self._dtype)
        if stored is not None and tokens is not None and stored.seen == version_mark:
            return ShardTokens(shard.name, tokens, stored.reading, made=False)
        text = DocumentText(
            shard.files,
            shard.others,
            longest_bytes=shard.longest_bytes,
            seed=shard.seed,
            withdrawn=self._withdrawn,
            check=self._raise_if_stopped,
            vocabulary=self._tokenizer.vocabulary,
            parse_line=self._tokenizer.parse_line,
        )
        try:
            if tokens is not None:
                deque(text.blocks(), maxlen=0)  # Reads the whole text, which sets `text.digest`.
            made = stored is None or tokens is None or text.digest.hexdigest() != stored.digest
            if stored is None or made:
                count = self._write_tokens(path, text, progress)
            else:
                count = stored.tokens
                text.reading.keep_losses(stored.reading)
            # An incomplete text gets no version mark, so that it is read again next time.
            stored_mark = version_mark if text.whole else ""
            metadata = _StoredMetadata(text.digest.hexdigest(), stored_mark, count, text.reading)
            write_atomically(path.with_suffix(".json"), msgspec.json.encode(metadata))
        except OSError as error:
            raise TextError(
                f"{self._folder}: the text's tokens cannot be kept: {error.strerror}; they take as much room "
                f"as the text, {text.total_bytes / 1e6:,.0f} MB at most"
            ) from None
        except UserError as error:  # write_atomically raises this.
            raise TextError(str(error)) from None
        if made:
            tokens = _map_file(path, count, self._dtype)
        if tokens is None:  # The file is not the one that was written.
            raise TextError(f"{path} changed while it was read: start again")
        return ShardTokens(shard.name, tokens, text.reading, made)

    def _raise_if_stopped(self) -> None:
        if self.stopped:
            raise ReadingStopped

    def _write_tokens(self, path: Path, text: DocumentText, progress: Progress) -> int:
        """Tokenize a text into the file `path` and return the number of tokens. Raises OSError, also if less
        than `FREE_BYTES` of the disk are free, and then leaves no file behind."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)
        # The name is unique: another thread may not have stopped yet.
        part = path.with_suffix(f".{id(self):x}.part")
        count = 0
        try:
            with part.open("wb") as file:
                for batch_tokens in encoded(text, self._tokenizer, progress):
                    if shutil.disk_usage(path.parent).free < FREE_BYTES:
                        raise OSError(errno.ENOSPC, f"less than {FREE_BYTES >> 20} MiB of the disk are free")
                    file.write(batch_tokens.numpy().tobytes())
                    count += len(batch_tokens)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return count

    def _path(self, shard: Shard) -> Path:
        key = hashlib.sha256(f"{shard.name}/{self._encoding_id}".encode()).hexdigest()
        return self._folder / f"{key}.tokens"


def _read_metadata(path: Path) -> _StoredMetadata | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_StoredMetadata)
    except (OSError, ValueError, RecursionError):
        return None


def _map_file(path: Path, count: int, dtype: torch.dtype) -> Tensor | None:
    """Return the `count` tokens in a file, memory-mapped; None if it is missing or has another length."""
    try:
        if path.stat().st_size != count * dtype.itemsize:
            return None
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.from_file(str(path), shared=False, size=count, dtype=dtype)
    except (OSError, RuntimeError):
        return None


def encoded(text: DocumentText, tokenizer: Tokenizer, progress: Progress) -> Iterator[Tensor]:
    """Yield the tokens of a text as one-dimensional tensors, each of about BATCH_BYTES of text.
    `text.reading` counts what tokenizing loses. `progress` is called after each tensor but the last."""
    batch: list[bytes | None] = []
    batch_bytes = 0
    for piece in _pieces_and_ends(text, keeps_whole=tokenizer.parse_line is not None):
        batch.append(piece)
        batch_bytes += len(piece or b"")
        if batch_bytes >= BATCH_BYTES:
            yield _encode_batch(batch, tokenizer, text.reading)
            batch, batch_bytes = [], 0
            progress(text.reading.bytes, text.total_bytes)
    yield _encode_batch(batch, tokenizer, text.reading)


def _encode_batch(batch: Sequence[bytes | None], tokenizer: Tokenizer, reading: ReadSummary) -> Tensor:
    """Return the tokens of a batch, one-dimensional. A batch has pieces of text, and None for an end of text
    between two documents. Count in `reading` the bytes that the tokens lose."""
    pieces = [piece for piece in batch if piece is not None and not isinstance(piece, RawTokens)]
    tokens = tokenizer.encode_pieces(pieces)
    text_bytes, lost = tokenizer.lost_bytes(pieces, tokens)
    reading.encoded_bytes += text_bytes
    reading.lost_bytes += lost
    reading.ends_in_text += sum(map(tokenizer.end.count, pieces))
    dtype = tokenizer.dtype
    if tokenizer.end.token is None:
        end = tokenizer.encode(tokenizer.end.text)
    else:
        end = torch.tensor([tokenizer.end.token], dtype=dtype)
    next_tokens = iter(tokens)

    def encoded_piece(piece: bytes | None) -> Tensor:
        if isinstance(piece, RawTokens):
            return torch.from_numpy(np.frombuffer(piece, "<u4").astype(np.int64)).to(dtype)
        return end if piece is None else next(next_tokens)

    return torch.cat([torch.empty(0, dtype=dtype), *map(encoded_piece, batch)])


def _pieces_and_ends(text: DocumentText, keeps_whole: bool) -> Iterator[bytes | None]:
    """Yield the text in pieces to tokenize, and None between two documents. A short document is one piece.
    With `keeps_whole` each document is one, and nothing is between two."""
    documents_begun = 0

    def document_of(block: Block) -> tuple[int, bool]:
        """Return which document a block belongs to, from 1, and whether that consists of tokens. Called once
        for each block in order."""
        nonlocal documents_begun
        starts_document, content = block
        if starts_document:
            documents_begun += 1
        return documents_begun, isinstance(content, RawTokens)

    for (number, is_tokens), blocks in groupby(text.blocks(), key=document_of):
        if keeps_whole:
            yield b"".join(block for _, block in blocks)
            continue
        if number > 1:
            yield None
        contents = (content for _, content in blocks)
        yield from contents if is_tokens else pieces_of(contents)
