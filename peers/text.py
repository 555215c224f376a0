"""Text to train on and to score: where it is read from, and how it becomes tokens."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sysconfig
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from peers.extras import how_to_install
from peers.files import is_file, is_folder
from peers.run_file import SignedManifest
from swarmnet.identifiers import MicrobatchId
from swarmnet.manifest import BYTES, STANDARD_LIBRARY, Data
from swarmnet.sampling import window_starts, windows

HELD_OUT = (
    "argparse", "bisect", "calendar", "configparser", "csv", "difflib", "fractions", "heapq",
    "ipaddress", "mailbox", "plistlib", "queue", "shlex", "statistics", "textwrap", "timeit",
)  # fmt: skip
"""Standard library modules that are never trained on: single files in Python 3.11 to 3.13."""
_LEFT_OUT = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)
_TEXT_SUFFIXES = frozenset({".txt", ".jsonl"})
LONGEST_CORPUS_BYTES = 64 * 2**20
"""What one peer keeps in memory; of a larger text each peer takes its own random part."""
_BETWEEN_DOCUMENTS = b"\n\n"
_TOKENIZER_PIECE = 2**20


class TextError(ValueError):
    """There is no text to be had there; one line that says what is missing, and where."""


class Tokenizer(Protocol):
    @property
    def vocabulary(self) -> int:
        """Tokens are 0 to this, exclusive."""

    def encode(self, text: bytes) -> Tensor:
        """Tokens of `text`: uint8 or int32, one dimension."""

    def decode(self, tokens: Sequence[int]) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ByteTokenizer:
    """A token is a byte."""

    vocabulary: int = 256

    def encode(self, text: bytes) -> Tensor:
        return (
            torch.frombuffer(bytearray(text), dtype=torch.uint8)
            if text
            else torch.empty(0, dtype=torch.uint8)
        )

    def decode(self, tokens: Sequence[int]) -> bytes:
        # A model may have more than 256 outputs; those beyond are no text.
        return bytes(token for token in tokens if token < 256)


class FileTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` package. Text that is not UTF-8 is replaced."""

    def __init__(self, path: Path) -> None:
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
        pieces = [piece.decode("utf-8", "replace") for piece in _pieces(text, _TOKENIZER_PIECE)]
        encoded = self._loaded.encode_batch(pieces, add_special_tokens=False)
        return torch.cat(
            [
                torch.empty(0, dtype=torch.int32),
                *(torch.tensor(one.ids, dtype=torch.int32) for one in encoded),
            ]
        )

    def decode(self, tokens: Sequence[int]) -> bytes:
        """A character whose last bytes are still to come is left away."""
        text = str(self._loaded.decode(list(tokens), skip_special_tokens=False))
        return text.rstrip("\N{REPLACEMENT CHARACTER}").encode()


def open_tokenizer(file: Path | None, vocabulary: int) -> Tokenizer:
    """A tokenizer.json, or None: bytes. Raises TextError if the model's vocabulary is smaller."""
    tokenizer: Tokenizer = ByteTokenizer() if file is None else FileTokenizer(file)
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


def load_corpus(
    places: Sequence[str],
    vocabulary: int,
    *,
    tokenizer: Path | None = None,
    longest_bytes: int = LONGEST_CORPUS_BYTES,
    seed: int = 0,
    withdrawn: Container[bytes] = (),
) -> Tensor:
    """All text of `places` (as for `files_of`) as one tensor of tokens: uint8 for bytes, int32 with a
    `tokenizer` (a tokenizer.json).

    Of more than `longest_bytes` only a part is kept, chosen by `seed`: give each peer its own. `withdrawn`:
    SHA-256 of documents that are left out.
    """
    opened = open_tokenizer(tokenizer, vocabulary)
    return opened.encode(load_text(places, longest_bytes=longest_bytes, seed=seed, withdrawn=withdrawn))


def load_text(
    places: Iterable[str],
    *,
    longest_bytes: int = LONGEST_CORPUS_BYTES,
    seed: int = 0,
    withdrawn: Container[bytes] = (),
) -> bytes:
    """The documents of `places`, an empty line between them, the held-out modules never among them, nor what
    the run's owner has withdrawn: SHA-256 of a whole file's bytes, or of a .jsonl line's text as UTF-8."""
    places = tuple(places)
    files = [file for place in places for file in files_of(place)]
    total = sum(map(_size, files))
    chance = random.Random(seed)
    if total > longest_bytes:
        chance.shuffle(files)
    documents: list[bytes] = []
    room = longest_bytes
    for file in files:
        for document in _documents(file, room, chance, withdrawn):
            documents.append(document[:room])
            room -= len(document) + len(_BETWEEN_DOCUMENTS)
            if room <= 0:
                return _BETWEEN_DOCUMENTS.join(documents)
    if not documents:
        raise TextError(f"no text in {', '.join(places)}")
    return _BETWEEN_DOCUMENTS.join(documents)


def read_text(path: str) -> bytes:
    """One file or folder as text to score (`--eval-text`), read as a source of that path would be."""
    return load_text([path])


def held_out_text() -> bytes:
    """The held-out modules of this Python; they differ between versions, so compare only equal hashes."""
    library = _standard_library()
    found = [library / f"{module}.py" for module in HELD_OUT]
    texts = [file.read_bytes() for file in found if file.is_file()]
    if not texts:
        raise TextError(f"none of the held-out modules is in {library}: give a text to score")
    return _BETWEEN_DOCUMENTS.join(texts)


def excerpt(text: bytes, limit: int, piece: int = 4096) -> bytes:
    """At most `limit` bytes of `text`, as pieces taken at equal distances over all of it."""
    if len(text) <= limit:
        return text
    pieces = max(1, limit // piece)
    length = min(piece, limit)
    starts = [(len(text) - length) * number // max(1, pieces - 1) for number in range(pieces)]
    return b"".join(text[start : start + length] for start in starts)


def fingerprint(text: bytes) -> str:
    """SHA-256 in hexadecimal: figures compare only where the text they were measured on is the same."""
    return hashlib.sha256(text).hexdigest()


def _standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def files_of(path: str) -> list[Path]:
    """The files of `python-stdlib`, or at a path that a person of this machine typed; sorted. Raises
    TextError if there is none, or if a folder holds a link to what lies outside of it."""
    if path == STANDARD_LIBRARY:
        library = _standard_library()
        held_out = {library / f"{module}.py" for module in HELD_OUT}
        files = [file for file in _walk(library, {".py"}, _LEFT_OUT) if file not in held_out]
        if not files:
            raise TextError(f"{library} holds no Python source: name another text in data.sources")
        return files
    place = Path(path).expanduser()
    if is_file(place):
        return [place]
    if not is_folder(place):
        raise TextError(f"text {path} does not exist")
    files = [file for file in _walk(place, _TEXT_SUFFIXES, frozenset()) if is_file(file)]
    if not files:
        raise TextError(f"folder {path} holds no text: put .txt or .jsonl files there")
    _require_inside(place, files)
    return files


def _require_inside(folder: Path, files: Iterable[Path]) -> None:
    """A text comes as an archive that somebody else packed, and may hold links. Raises TextError."""
    root = folder.resolve()
    for file in files:
        if not file.resolve().is_relative_to(root):
            raise TextError(
                f"{file} is a link to {file.resolve()}, outside of the folder {folder}: remove it, or put a "
                "copy of the file in its place"
            )


def _walk(root: Path, suffixes: Iterable[str], left_out: frozenset[str]) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - left_out)
        yield from (Path(folder, name) for name in sorted(names) if Path(name).suffix in suffixes)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise TextError(f"cannot read {file}: {error.strerror}") from error


def _documents(
    file: Path, room: int, chance: random.Random, withdrawn: Container[bytes] = ()
) -> Iterator[bytes]:
    """The documents of one file; of a file larger than `room`, some part of about that length."""
    size = _size(file)
    try:
        if file.suffix == ".jsonl":
            for text in _lines(file, min(1.0, room / max(1, size)), chance):
                if hashlib.sha256(text).digest() not in withdrawn:
                    yield text
            return
        with file.open("rb") as opened:
            if withdrawn and hashlib.file_digest(opened, "sha256").digest() in withdrawn:
                return
            opened.seek(chance.randrange(size - room + 1) if size > room else 0)
            text = opened.read(room)
    except OSError as error:
        raise TextError(f"cannot read {file}: {error.strerror}") from error
    if text.strip():
        yield text


def _lines(file: Path, share: float, chance: random.Random) -> Iterator[bytes]:
    with file.open("rb") as opened:
        for number, line in enumerate(opened, start=1):
            if not line.strip() or chance.random() >= share:
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise TextError(f"{file}:{number}: not JSON: {error}") from None
            if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                raise TextError(f'{file}:{number}: no field "text" with a string in it')
            if record["text"]:
                yield record["text"].encode("utf-8", "replace")


def _pieces(text: bytes, length: int) -> Iterator[bytes]:
    """Cut `text` at line ends into pieces of about `length` bytes, to bound the tokenizer's memory."""
    start = 0
    while start < len(text):
        line_end = text.find(b"\n", min(len(text), start + length))
        stop = len(text) if line_end < 0 else line_end + 1
        yield text[start:stop]
        start = stop


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
