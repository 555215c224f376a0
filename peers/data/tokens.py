"""The tokens of shards: made once, some of the text at a time, and kept on the disk, so that memory does not
grow with the text.

    STATE/text/shards/KEY.tokens    little-endian, as narrow as the vocabulary allows; mapped, not read
    STATE/text/shards/KEY.json      what they were made of

KEY is of the shard's name, tokenizer and end of text. A shard whose files look as they did is not read again;
one that looks otherwise, or from which documents may have been withdrawn, is read, and made anew if it then
holds another text. Tokens are written beside and moved when they are whole.
"""

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
import torch
from torch import Tensor

from peers.config.atomic_files import write_atomically
from peers.data.documents import Block, DocumentText, ReadSummary, TextError
from peers.data.files import ReadingStopped
from peers.data.shards import Shard
from peers.data.tokenizer import BATCH_BYTES, Tokenizer, dtype_for, open_tokenizer, pieces_of
from peers.errors import UserError

FOLDER = "text"
SHARDS = "shards"
FORM = "swarmnet tokens 3"
"""Goes into the key: another way to cut or join documents makes other tokens."""

FREE_BYTES = 1 << 30
"""Left free on the disk: checkpoints, the largest of which are some GB, must find room beside the text."""

Progress = Callable[[int, int], None]
"""Bytes of text that are tokens now, and bytes in all."""


@dataclass(frozen=True, slots=True)
class ShardTokens:
    """One shard, open."""

    name: str
    tokens: Tensor
    """One dimension, `dtype_for(vocabulary)`, mapped."""
    reading: ReadSummary
    made: bool
    """False: they lay on the disk."""


class _Note(msgspec.Struct, frozen=True):
    """What the tokens of a shard were made of."""

    digest: str
    """Of the documents."""
    seen: str
    tokens: int
    reading: ReadSummary


class ShardCache:
    """Opens shards. Blocking; call from a thread, one at a time."""

    def __init__(
        self, tokenizer: Path | None, vocabulary: int, state: Path, eos_token: str = "",
        withdrawn: Collection[bytes] = (),
    ) -> None:  # fmt: skip
        """Tokens by a tokenizer.json, or None: bytes; kept in a peer's state folder. Raises TextError for a
        tokenizer that does not fit."""
        self._tokenizer: Tokenizer = open_tokenizer(tokenizer, vocabulary, eos_token)
        self._dtype = dtype_for(self._tokenizer.vocabulary)
        self._folder = state / FOLDER / SHARDS
        self._withdrawn = frozenset(withdrawn)
        made_by = "bytes" if tokenizer is None else hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        self._made_by = json.dumps([FORM, made_by, self._tokenizer.end.text.hex()])
        self._left_out = hashlib.sha256(b"".join(sorted(self._withdrawn))).hexdigest()
        self.stopped = False
        """Ends what is read or made in another thread with its next block."""

    @property
    def warning(self) -> str:
        """What the tokenizer warns of."""
        return self._tokenizer.warning

    def keep_only(self, shards: Iterable[Shard]) -> None:
        """Remove what is of other shards, or of another tokenizer, or was not finished. Raises TextError."""
        kept = {self._path(shard).stem for shard in shards}
        try:
            for path in self._folder.glob("*"):
                if path.stem not in kept or path.suffix not in (".tokens", ".json"):
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise TextError(f"{error.filename}: cannot be removed: {error.strerror}") from None

    def open(self, shard: Shard, progress: Progress) -> ShardTokens:
        """Its tokens; none, where none of it can be read. Raises TextError: a full disk; TextUnreachable;
        Stopped."""
        path, seen = self._path(shard), f"{shard.seen}/{self._left_out}"
        note = _noted(path.with_suffix(".json"))
        tokens = None if note is None else _mapped(path, note.tokens, self._dtype)
        if note is not None and tokens is not None and note.seen == seen:
            return ShardTokens(shard.name, tokens, note.reading, made=False)
        text = DocumentText(
            shard.files, shard.others, longest_bytes=shard.longest_bytes, seed=shard.seed,
            withdrawn=self._withdrawn, check=self._check,
        )  # fmt: skip
        try:
            if tokens is not None:
                deque(text.blocks(), maxlen=0)
            made = note is None or tokens is None or text.digest.hexdigest() != note.digest
            if note is None or made:
                count = self._write(path, text, progress)
            else:
                count = note.tokens
                text.reading.keep_losses(note.reading)
            new = _Note(text.digest.hexdigest(), seen if text.whole else "", count, text.reading)
            write_atomically(path.with_suffix(".json"), msgspec.json.encode(new))
        except OSError as error:
            raise TextError(
                f"{self._folder}: the text's tokens cannot be kept: {error.strerror}; they take as much room "
                f"as the text, {text.total_bytes / 1e6:,.0f} MB at most"
            ) from None
        except UserError as error:  # Of writing beside.
            raise TextError(str(error)) from None
        if made:
            tokens = _mapped(path, count, self._dtype)
        if tokens is None:
            raise TextError(f"{path} changed while it was read: start again")
        return ShardTokens(shard.name, tokens, text.reading, made)

    def _check(self) -> None:
        if self.stopped:
            raise ReadingStopped

    def _write(self, path: Path, text: DocumentText, progress: Progress) -> int:
        """How many tokens were written. Raises OSError; nothing stays then."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.with_suffix(".json").unlink(missing_ok=True)
        part, count = path.with_suffix(f".{id(self):x}.part"), 0  # Another thread may not have stopped yet.
        try:
            with part.open("wb") as file:
                for some in encoded(text, self._tokenizer, progress):
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

    def _path(self, shard: Shard) -> Path:
        key = hashlib.sha256(f"{shard.name}/{self._made_by}".encode()).hexdigest()
        return self._folder / f"{key}.tokens"


def _noted(path: Path) -> _Note | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Note)
    except (OSError, ValueError, RecursionError):
        return None


def _mapped(path: Path, count: int, dtype: torch.dtype) -> Tensor | None:
    """The file's tokens; None if it is not as long as it should be."""
    try:
        if path.stat().st_size != count * dtype.itemsize:
            return None
        if count == 0:
            return torch.empty(0, dtype=dtype)
        return torch.from_file(str(path), shared=False, size=count, dtype=dtype)
    except (OSError, RuntimeError):
        return None


def encoded(text: DocumentText, tokenizer: Tokenizer, progress: Progress) -> Iterator[Tensor]:
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


def _tokens_of(batch: Sequence[bytes | None], tokenizer: Tokenizer, reading: ReadSummary) -> Tensor:
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


def _pieces(text: DocumentText) -> Iterator[bytes | None]:
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
