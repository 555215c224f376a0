"""The tokens of shards: made once, a shard at a time, and kept on the disk, so that memory does not grow with
the text.

    STATE/text/shards/KEY.tokens    as in peers/data/tokens.py; mapped while the shard is read
    STATE/text/shards/KEY.json      what they were made of

KEY is of the shard's name, tokenizer and end of text. A shard whose files look as they did is not read again;
one that looks otherwise, or from which documents may have been withdrawn, is read, and made anew if it then
holds another text.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from torch import Tensor

from peers.config.atomic_files import write_atomically
from peers.data.documents import Block, Reading, Text, TextError
from peers.data.shards import Shard
from peers.data.tokenizer import Tokenizer, dtype_for, open_tokenizer
from peers.data.tokens import FOLDER, Digest, Progress, keep_losses, mapped, written
from peers.errors import UserError

SHARDS = "shards"


@dataclass(frozen=True, slots=True)
class ShardTokens:
    """One shard, open."""

    name: str
    tokens: Tensor
    """One dimension, mapped."""
    reading: Reading
    made: bool
    """False: they lay on the disk."""


class Stopped(Exception):
    """Whoever wanted the tokens does so no more."""


class ShardCache:
    """Opens shards. Blocking; call from a thread, one at a time."""

    def __init__(
        self, tokenizer: Path | None, vocabulary: int, state: Path, end_of_text: str = "",
        withdrawn: Collection[bytes] = (),
    ) -> None:  # fmt: skip
        """As `tokens_on_disk`. Raises TextError."""
        self._tokenizer: Tokenizer = open_tokenizer(tokenizer, vocabulary, end_of_text)
        self._dtype = dtype_for(self._tokenizer.vocabulary)
        self._folder = state / FOLDER / SHARDS
        self._file, self._withdrawn = tokenizer, frozenset(withdrawn)
        made_by = "bytes" if tokenizer is None else hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        self._made_by = json.dumps([made_by, self._tokenizer.end.text.hex()])
        self._left_out = hashlib.sha256(b"".join(sorted(self._withdrawn))).hexdigest()
        self.stopped: Callable[[], bool] = lambda: False
        """Asked while a shard is read or made."""

    @property
    def warning(self) -> str:
        """What the tokenizer warns of."""
        return self._tokenizer.warning

    def keep_only(self, shards: Iterable[Shard]) -> None:
        """Remove what is of other shards, or of another tokenizer, or was not finished. Raises TextError."""
        kept = {self._key(shard) for shard in shards}
        try:
            for path in self._folder.glob("*"):
                if path.stem not in kept or path.suffix not in (".tokens", ".json"):
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise TextError(f"{error.filename}: cannot be removed: {error.strerror}") from None

    def open(self, shard: Shard, progress: Progress) -> ShardTokens:
        """Its tokens; none, where none of it can be read. Raises TextError: a full disk; TextUnreachable;
        Stopped."""
        key, seen = self._key(shard), f"{shard.seen}/{self._left_out}"
        kept = _noted(self._folder / f"{key}.json")
        tokens = mapped(self._folder / f"{key}.tokens", kept.get("tokens"), self._dtype)
        reading = _reading(kept.get("reading"))
        if tokens is not None and reading is not None and kept.get("seen") == seen:
            return ShardTokens(shard.name, tokens, reading, made=False)
        try:
            if tokens is not None:
                text, digest, whole = self._read(shard)
                deque(text.blocks(), maxlen=0)
                if kept.get("hash") == digest.hexadecimal():
                    keep_losses(text.reading, kept.get("reading"))
                    self._note(key, seen if whole else "", digest.hexadecimal(), len(tokens), text.reading)
                    return ShardTokens(shard.name, tokens, text.reading, made=False)
            return self._made(shard, key, seen, progress)
        except OSError as error:
            raise TextError(
                f"{self._folder}: the text's tokens cannot be kept: {error.strerror}; they take as much room "
                "as the text"
            ) from None
        except UserError as error:  # Of writing beside.
            raise TextError(str(error)) from None

    def _read(self, shard: Shard) -> tuple[Text, Digest, bool]:
        """Its text, not read yet, what will have its hash when it is, and whether all of its files are there
        and are what they should be: else how they look says nothing, for others may come in their place."""
        others, digest = Reading(), Digest(self._file, self._tokenizer.end)

        def check() -> None:
            if self.stopped():
                raise Stopped

        def hear(block: Block) -> None:
            check()
            digest.take(block)

        files = shard.checked(others, check)
        return Text.of(files, others, self._withdrawn, hear), digest, len(files) == len(shard.parts)

    def _made(self, shard: Shard, key: str, seen: str, progress: Progress) -> ShardTokens:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"{key}.tokens"
        (self._folder / f"{key}.json").unlink(missing_ok=True)
        text, digest, whole = self._read(shard)
        count = written(path, text, self._tokenizer, progress)
        self._note(key, seen if whole else "", digest.hexadecimal(), count, text.reading)
        tokens = mapped(path, count, self._dtype)
        if tokens is None:
            raise TextError(f"{path} changed while it was read: start again")
        return ShardTokens(shard.name, tokens, text.reading, made=True)

    def _note(self, key: str, seen: str, digest: str, tokens: int, reading: Reading) -> None:
        told = {"hash": digest, "seen": seen, "tokens": tokens, "reading": asdict(reading)}
        write_atomically(self._folder / f"{key}.json", json.dumps(told).encode())

    def _key(self, shard: Shard) -> str:
        return hashlib.sha256(f"{shard.name}/{self._made_by}".encode()).hexdigest()


def _noted(path: Path) -> dict[str, object]:
    try:
        told = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _reading(told: object) -> Reading | None:
    """What was kept of it; None: nothing that could be."""
    if not isinstance(told, dict) or set(told) != {field.name for field in fields(Reading)}:
        return None
    return Reading(**told)
