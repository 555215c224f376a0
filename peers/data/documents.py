"""Text to train on and to score: the documents in this machine's files, and what is left out of them.

What cannot be read is left out and counted, with the first one's name and reason: one bad file of thousands
ends no peer. No file is held in memory, however long it is or its lines are.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sysconfig
from codecs import getincrementaldecoder
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from peers.config.atomic_files import is_file, is_folder, is_there
from swarmnet.run.manifest import STANDARD_LIBRARY

HELD_OUT = (
    "argparse", "bisect", "calendar", "configparser", "csv", "difflib", "fractions", "heapq",
    "ipaddress", "mailbox", "plistlib", "queue", "shlex", "statistics", "textwrap", "timeit",
)  # fmt: skip
"""Standard library modules that are never trained on: single files in Python 3.11 to 3.13."""
_LEFT_OUT = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)
TEXT_SUFFIXES = (".txt", ".md", ".jsonl")
ENDINGS = ", ".join(TEXT_SUFFIXES)
LONGEST_CORPUS_BYTES = 64 * 2**20
"""What one peer reads; of a larger text each peer takes its own random part."""
BETWEEN_DOCUMENTS = b"\n\n"
BLOCK_BYTES = 2**20
"""Read at a time."""
LINE_LIMIT = 16 * 2**20
"""A longer line of a .jsonl file is left out: it would be in memory three times."""
_BINARY_BYTES = 8192
"""A zero byte among the first so many is in no text; git looks at as many."""


class TextError(ValueError):
    """There is no text to be had there; one line that says what is missing, and where."""


@dataclass(slots=True)
class Reading:
    """What was read of a text, and what was not."""

    files: int = 0
    documents: int = 0
    bytes: int = 0
    left_out: int = 0
    """Files, and lines of .jsonl files."""
    first_left_out: str = ""
    """Its place, and why."""
    not_utf8: int = 0
    """Files that are read, but hold other bytes."""
    first_not_utf8: str = ""

    def leave_out(self, what: str) -> None:
        self.left_out += 1
        self.first_left_out = self.first_left_out or what

    def warnings(self) -> list[str]:
        """One line for each kind of trouble; empty: there was none."""
        told = []
        if self.left_out:
            more = f", and {self.left_out - 1:,} more" if self.left_out > 1 else ""
            told.append(f"left out of the text: {self.first_left_out}{more}")
        if self.not_utf8:
            more = f", and {self.not_utf8 - 1:,} more" if self.not_utf8 > 1 else ""
            told.append(f"not UTF-8: {self.first_not_utf8}{more}; write it as UTF-8 (iconv -t utf-8)")
        return told


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    bytes: int
    named: bool
    """A person named it, and not only its folder: it is text whatever it holds."""


Block = tuple[bool, bytes]
"""Whether it begins a document, and some of its text."""


class Text:
    """The documents of some places (as for `files_of`), the held-out modules never among them, nor what the
    run's owner has withdrawn: SHA-256 of a whole file's bytes, or of a .jsonl line's text as UTF-8."""

    def __init__(
        self,
        places: Iterable[str],
        *,
        longest_bytes: int = LONGEST_CORPUS_BYTES,
        seed: int = 0,
        withdrawn: Container[bytes] = (),
    ) -> None:
        """Of more than `longest_bytes` only a part is read, chosen by `seed`: give each peer its own.
        Raises TextError where there is no file."""
        self.places = tuple(places)
        self.longest_bytes, self.seed, self.withdrawn = longest_bytes, seed, withdrawn
        self.reading = Reading()
        """Of the newest pass over the blocks."""
        self._others = Reading()
        named = set(self.places)
        files = [file for place in self.places for file in files_of(place, self._others)]
        sized = [(file, _size(file, self._others)) for file in files]
        self._files = [_File(file, size, str(file) in named) for file, size in sized if size is not None]
        self._all_bytes = sum(file.bytes for file in self._files)
        self.total_bytes = min(self._all_bytes, longest_bytes)
        """About as many will be read."""

    def blocks(self) -> Iterator[Block]:
        """The documents, some bytes at a time; the same ones in each pass as long as the files are. Raises
        TextError if there is none."""
        self.reading = Reading(left_out=self._others.left_out, first_left_out=self._others.first_left_out)
        chance = random.Random(self.seed)
        files = list(self._files)
        if self._all_bytes > self.longest_bytes:
            chance.shuffle(files)
        room = self.longest_bytes
        for file in files:
            before = self.reading.documents
            for starts, block in self._of_file(file, room, chance):
                self.reading.documents += starts
                kept = block[:room]
                self.reading.bytes += len(kept)
                room -= len(kept) + starts * len(BETWEEN_DOCUMENTS)
                yield starts, kept
                if room <= 0:
                    break
            self.reading.files += self.reading.documents > before
            if room <= 0:
                return
        if not self.reading.documents:
            why = f": {self.reading.first_left_out}" if self.reading.left_out else ""
            raise TextError(f"no text in {', '.join(self.places)}{why}")

    def _of_file(self, file: _File, room: int, chance: random.Random) -> Iterator[Block]:
        """Of one that is larger than `room`, some part of about that length."""
        size = file.bytes
        try:
            with file.path.open("rb") as opened:
                if file.path.suffix == ".jsonl":
                    yield from self._of_lines(file.path, opened, min(1.0, room / max(1, size)), chance)
                    return
                if self.withdrawn and hashlib.file_digest(opened, "sha256").digest() in self.withdrawn:
                    return
                opened.seek(chance.randrange(size - room + 1) if size > room else 0)
                yield from self._of_bytes(file, opened, room)
        except OSError as error:
            self.reading.leave_out(f"{file.path}: {error.strerror}")

    def _of_bytes(self, file: _File, opened: BinaryIO, room: int) -> Iterator[Block]:
        middle = opened.tell() > 0
        block = opened.read(min(BLOCK_BYTES, room))
        if middle:
            block = block.lstrip(bytes(range(0x80, 0xC0)))  # The rest of a character.
        if b"\0" in block[:_BINARY_BYTES] and not file.named:
            self.reading.leave_out(f"{file.path}: is no text: it holds zero bytes")
            return
        if not block.strip():
            return
        decoder, starts, is_utf8 = getincrementaldecoder("utf-8")(), True, True
        while block:
            try:
                if is_utf8:
                    decoder.decode(block)
            except UnicodeDecodeError:
                is_utf8 = False
                self.reading.not_utf8 += 1
                self.reading.first_not_utf8 = self.reading.first_not_utf8 or str(file.path)
            yield starts, block
            starts, room = False, room - len(block)
            block = opened.read(min(BLOCK_BYTES, room))

    def _of_lines(
        self, file: Path, opened: BinaryIO, share: float, chance: random.Random
    ) -> Iterator[Block]:
        number = 0
        while line := opened.readline(LINE_LIMIT):
            number += 1
            if len(line) == LINE_LIMIT and not line.endswith(b"\n"):
                self.reading.leave_out(f"{file}:{number}: a line of more than {LINE_LIMIT:,} bytes")
                while line and not line.endswith(b"\n"):
                    line = opened.readline(LINE_LIMIT)
                continue
            if not line.strip() or chance.random() >= share:
                continue
            try:
                text = _text_of(line)
            except ValueError as error:
                self.reading.leave_out(f"{file}:{number}: {error}")
                continue
            if text and hashlib.sha256(text).digest() not in self.withdrawn:
                yield True, text


def _text_of(line: bytes) -> bytes:
    """Of a .jsonl line. Raises ValueError, which says what is wrong with it."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError('no field "text" with a string in it')
    return str(record["text"]).encode("utf-8", "replace")


def joined(text: Text) -> bytes:
    """All documents in memory, an empty line between them."""
    return b"".join(
        BETWEEN_DOCUMENTS * (starts and number > 0) + block
        for number, (starts, block) in enumerate(text.blocks())
    )


def read_text(path: str, warn: Callable[[str], None]) -> bytes:
    """One file or folder as text to score (`--eval-text`), read as a source of that path would be; `warn`
    hears what is left out."""
    text = Text([path])
    scored = joined(text)
    for warning in text.reading.warnings():
        warn(warning)
    return scored


def held_out_text() -> bytes:
    """The held-out modules of this Python; they differ between versions, so compare only equal hashes."""
    library = _standard_library()
    found = [library / f"{module}.py" for module in HELD_OUT]
    texts = [file.read_bytes() for file in found if file.is_file()]
    if not texts:
        raise TextError(f"none of the held-out modules is in {library}: give a text to score")
    return BETWEEN_DOCUMENTS.join(texts)


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


def files_of(path: str, reading: Reading | None = None) -> list[Path]:
    """The files of `python-stdlib`, or at a path that a person of this machine typed; sorted. `reading` hears
    of what else lies there: other endings, and links that lead out of a folder, for a text comes as an
    archive that somebody else packed. Raises TextError if there is no file."""
    if path == STANDARD_LIBRARY:
        library = _standard_library()
        held_out = {library / f"{module}.py" for module in HELD_OUT}
        walked = _walk(library, _LEFT_OUT)
        files = [file for file in walked if file.suffix == ".py" and file not in held_out]
        if not files:
            raise TextError(f"{library} holds no Python source: name another text in data.sources")
        return files
    place = Path(path).expanduser()
    if is_file(place):
        return [place]
    if not is_folder(place):
        raise TextError(f"text {path} does not exist")
    reading, files = reading or Reading(), []
    inside = place.resolve()
    for file in _walk(place, frozenset(), reading):
        real = file.resolve()
        if file.suffix not in TEXT_SUFFIXES:
            reading.leave_out(f"{file}: of a folder only {ENDINGS} are read")
        elif not real.is_relative_to(inside):
            reading.leave_out(f"{file} is a link to {real}, out of {place}: put a copy of it in its place")
        elif is_file(file) or not is_there(file):  # Of what is not there its size will tell.
            files.append(file)
        else:
            reading.leave_out(f"{file}: is no file")
    if not files:
        raise TextError(f"folder {path} holds no text: put {ENDINGS} files there")
    return files


def _walk(root: Path, left_out: frozenset[str], reading: Reading | None = None) -> Iterator[Path]:
    def refused(error: OSError) -> None:
        if reading is not None:
            reading.leave_out(f"{error.filename}: {error.strerror}")

    for folder, subfolders, names in os.walk(root, onerror=refused):
        subfolders[:] = sorted(name for name in set(subfolders) - left_out if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))


def _size(file: Path, reading: Reading) -> int | None:
    try:
        return file.stat().st_size
    except OSError as error:
        reading.leave_out(f"{file}: {error.strerror}")
        return None
