"""Text to train on and to score: the documents in files, on this machine or at a URL.

A document is a text file, a line of a .jsonl file, a row of a CSV or Parquet file, or a file of tokens. It is
read in blocks, pairs of (True if a document begins here, bytes), so that no file is in memory as a whole. An
unreadable file or line is skipped and counted. A place is a path, a URL or `python-stdlib`: the Python
sources of this machine's standard library.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import sys
import sysconfig
from codecs import getincrementaldecoder
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from io import BufferedReader
from pathlib import Path

from peers.config.atomic_files import is_file, is_folder, is_there
from peers.config.run_url import is_url, without_secret
from peers.data.files import (
    INDEX,
    LINES,
    MAX_UNPACKED_RATIO,
    ROWS,
    SUFFIXES,
    TABLE,
    Content,
    File,
    RemoteFolder,
    Unreadable,
    has_suffix,
    local_file,
    open_content,
    shown_suffixes,
    suffixes_of,
)
from peers.data.files import TextError as TextError
from peers.data.forms import (
    RawTokens,
    csv_rows,
    json_lines,
    parquet_lines,
    parquet_rows,
    raw_tokens,
    text_of_line,
)
from swarmnet.run.schema import STANDARD_LIBRARY

HELD_OUT = (
    "argparse",
    "bisect",
    "calendar",
    "configparser",
    "csv",
    "difflib",
    "fractions",
    "heapq",
    "ipaddress",
    "mailbox",
    "plistlib",
    "queue",
    "shlex",
    "statistics",
    "textwrap",
    "timeit",
)
"""Standard library modules that are held out of training. They are single files in Python 3.11 to 3.13."""
_LEFT_OUT = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)
LONGEST_CORPUS_BYTES = 64 * 2**20
"""Maximum bytes of text that one peer reads. From a larger text each peer reads its own random part."""
BETWEEN_DOCUMENTS = b"\n\n"
BLOCK_BYTES = 2**20
"""Bytes that are read at a time."""
MIN_UNPACKED_BYTES = 64 * 2**10
"""Bytes that a text may always unpack to, however small its files are."""
MAX_LOST_SHARE = 0.001
"""Share of bytes that decoding the tokens may lose without a warning: 1 byte of 1,000."""
_BINARY_BYTES = 8192
"""A file with a zero byte among its first `_BINARY_BYTES` is binary. Git checks the same number of bytes."""


@dataclass(slots=True)
class ReadSummary:
    """Counts of what was read of a text, and of what was skipped."""

    files: int = 0
    documents: int = 0
    bytes: int = 0
    left_out: int = 0
    """Number of skipped files and skipped lines of .jsonl files."""
    first_left_out: str = ""
    """Place of the first skipped file or line, and the reason."""
    kinds: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Maps kind of reason to the number of files and lines that it skipped, and the first with its place."""
    not_utf8: int = 0
    """Number of files that were read although they are not valid UTF-8."""
    first_not_utf8: str = ""
    ends_in_text: int = 0
    """Number of times that documents contain the run's end-of-text string."""
    encoded_bytes: int = 0
    """Bytes of UTF-8 that a tokenizer.json has encoded."""
    lost_bytes: int = 0
    """Number of those bytes that decoding does not restore."""
    tokenizer: str = ""
    """Warning of the tokenizer (`Tokenizer.warning`)."""

    def leave_out(self, what: str, kind: str) -> None:
        """Count a skipped file or line. `what` is its place and the reason; `kind` is equal for all that are
        reported together."""
        self._add(1, what, kind)

    def _add(self, count: int, first: str, kind: str) -> None:
        self.left_out += count
        self.first_left_out = self.first_left_out or first
        before, first = self.kinds.get(kind, (0, first))
        self.kinds = {**self.kinds, kind: (before + count, first)}  # Other summaries may share the old one.

    def warnings(self) -> list[str]:
        """Return one line for each kind of problem; empty: there was none."""
        lines = [self.tokenizer] if self.tokenizer else []
        lines += (f"left out of the text: {first}{_and_more(count)}" for count, first in self.kinds.values())
        if self.not_utf8:
            shown = f"{self.first_not_utf8}{_and_more(self.not_utf8)}"
            lines.append(f"not UTF-8: {shown}; write it as UTF-8 (iconv -t utf-8)")
        return lines + self.losses()

    def losses(self) -> list[str]:
        """Return one warning line for each kind of loss in tokenizing: end-of-text strings inside documents,
        and more than MAX_LOST_SHARE of the bytes not restored by decoding. Empty: no warning."""
        lines = []
        if self.ends_in_text:
            lines.append(
                f"documents contain the run's end of text {self.ends_in_text:,} times, which is no end "
                "there: remove it from them"
            )
        if self.lost_bytes > MAX_LOST_SHARE * self.encoded_bytes:
            share = self.lost_bytes / self.encoded_bytes
            lines.append(
                f"the tokenizer loses {self.lost_bytes:,} bytes of {self.encoded_bytes:,} ({share:.1%}): "
                "decoding does not give them back; `swarmnet tokenizer FILE` makes one that loses none"
            )
        return lines

    def reason(self) -> str:
        """Return what was skipped, as the tail of an error message; empty: nothing was skipped."""
        return f"; left out: {self.first_left_out}{_and_more(self.left_out)}" if self.left_out else ""

    def add_left_out(self, other: ReadSummary) -> None:
        """Add what another reading skipped, as if it came after this one."""
        for kind, (count, first) in other.kinds.items():
            self._add(count, first, kind)

    def keep_losses(self, kept: ReadSummary) -> None:
        """Copy from `kept`, an earlier reading of the same text, the counts that only encoding produces."""
        self.ends_in_text = kept.ends_in_text
        self.encoded_bytes = kept.encoded_bytes
        self.lost_bytes = kept.lost_bytes


def _and_more(count: int) -> str:
    """Return how many of `count` are not named if the first is; empty: none."""
    return f", and {count - 1:,} more" if count > 1 else ""


Block = tuple[bool, bytes]
"""Whether the block starts a document, and some of the document's bytes."""


ParseLine = Callable[[bytes], tuple[bytes, bytes]]
"""Returns the document in a .jsonl line, and the bytes whose SHA-256 names it. Raises ValueError."""


@dataclass(eq=False)
class DocumentText:
    """The documents of some files, without those that the run's owner has withdrawn. A withdrawn document is
    named by the SHA-256 of the file's bytes, or of the line's or row's text as UTF-8.

    From a text over `longest_bytes` only a part is read, chosen by `seed`: give each peer its own seed."""

    files: Sequence[File]
    others: ReadSummary = field(default_factory=ReadSummary)
    """What was skipped besides `files`."""
    _: KW_ONLY
    longest_bytes: int = sys.maxsize
    seed: int = 0
    withdrawn: Container[bytes] = ()
    check: Callable[[], None] = lambda: None
    """Called with each block; an error that it raises ends the reading."""
    places: str = ""
    """Named in the error about a text without documents; empty: such a text is no error."""
    vocabulary: int = sys.maxsize
    """Files of tokens hold ids below it."""
    parse_line: ParseLine | None = None
    """If set, only lines of JSON and Parquet are read."""

    def __post_init__(self) -> None:
        self.reading = ReadSummary()
        """Summary of the newest pass over the blocks."""
        self.whole = True
        """Whether that pass found every file, each with its expected `sha256`."""
        self.digest = hashlib.sha256()
        """Hash over the documents of that pass, in their order."""
        self._all_bytes = sum(file.bytes for file in self.files)
        self.total_bytes = min(self._all_bytes, self.longest_bytes)
        """Approximate number of bytes that a pass reads."""

    def blocks(self) -> Iterator[Block]:
        """Yield the documents block by block, and set `reading`, `whole` and `digest` for this pass. From a
        text over `longest_bytes`, a random part is read. Every pass yields the same blocks while the files
        are unchanged. Raises TextError if there is no document, unless `places` is empty."""
        self.reading = replace(self.others)
        self.whole = True
        self.digest = hashlib.sha256()
        chance = random.Random(self.seed)
        files = list(self.files)
        if self._all_bytes > self.longest_bytes:
            chance.shuffle(files)
        bytes_left = self.longest_bytes
        self._unpacked_left = max(MIN_UNPACKED_BYTES, MAX_UNPACKED_RATIO * self._all_bytes)
        for file in files:
            documents_before = self.reading.documents
            for starts, block in self._read_file(file, bytes_left, chance):
                self.check()
                if starts:
                    self.reading.documents += 1
                kept = block if isinstance(block, RawTokens) else block[:bytes_left]
                self.digest.update(bytes([starts]) + kept)
                size = len(kept) // 2 if file.tokens == "uint16" else len(kept)  # RawTokens are uint32.
                self.reading.bytes += size
                separator_bytes = len(BETWEEN_DOCUMENTS) if starts else 0
                bytes_left -= size + separator_bytes
                yield starts, kept
                if bytes_left <= 0:
                    break
            if self.reading.documents > documents_before:
                self.reading.files += 1
            if bytes_left <= 0:
                return
        if not self.reading.documents and self.places:
            raise TextError(f"no text in {self.places}{self.reading.reason()}")

    def _read_file(self, file: File, room: int, chance: random.Random) -> Iterator[Block]:
        """Yield the blocks of one file, without withdrawn documents. From a file larger than `room` bytes,
        yield a random part of about that length. A file is counted as skipped if it cannot be read, unpacks
        to too many bytes, or has another SHA-256 than expected."""
        try:
            if file.sha256 and bytes.fromhex(file.sha256) in self.withdrawn:
                return
            if not self._has_expected_hash(file):
                return
            if file.tokens:
                yield from self._read_tokens(file, room, chance)
                return
            with open_content(file) as content:
                if self._is_withdrawn(file, content.form):
                    return
                for starts, block in self._read_content(file, content, room, chance):
                    self._unpacked_left -= len(block)
                    if self._unpacked_left < 0:
                        raise Unreadable(f"its text unpacks to over {MAX_UNPACKED_RATIO} times its bytes")
                    yield starts, block
        except OSError as error:
            self.whole = False
            self.reading.leave_out(f"{file.name}: {error.strerror or error}", "unreadable")
        except Unreadable as error:
            self.reading.leave_out(f"{file.name}: {error}", "unreadable")

    def _read_content(
        self, file: File, content: Content, room: int, chance: random.Random
    ) -> Iterator[Block]:
        """Return the blocks of an opened file by its format. From a file larger than `room` bytes, documents
        in lines or rows are skipped at random, and plain text is read from a random byte."""
        if self.parse_line is not None and content.form not in (LINES, ROWS):
            raise Unreadable("holds no lines of JSON and is no Parquet, in which conversations are")
        if content.form:
            read_share = min(1.0, room / max(1, file.bytes))
            stream, is_skipped = content.stream, lambda: chance.random() >= read_share
            if content.form == LINES:
                return self._read_lines(file, json_lines(stream), is_skipped)
            if content.form == TABLE:
                return self._read_rows(file.name, csv_rows(stream, file.column), is_skipped)
            if self.parse_line is not None:
                return self._read_lines(file, parquet_lines(file.name, stream), is_skipped)
            return self._read_rows(file.name, parquet_rows(file.name, stream, file.column), is_skipped)
        if file.bytes > room and not content.packed and content.stream.seekable():
            content.stream.seek(chance.randrange(file.bytes - room + 1))
        return self._read_plain(file, content.stream, room)

    def _has_expected_hash(self, file: File) -> bool:
        """Return True if the file has its expected SHA-256, or if none is expected. Otherwise count the file
        as skipped and return False."""
        if not file.sha256:
            return True
        with file.open() as stream:
            if self._hash(stream).hex() == file.sha256:
                return True
        self.whole = False
        self.reading.leave_out(f"{file.name} is not what the run's index names: get it again", "index")
        return False

    def _is_withdrawn(self, file: File, form: str) -> bool:
        if not self.withdrawn or form:
            return False
        with open_content(file) as content:
            return self._hash(content.stream) in self.withdrawn

    def _hash(self, stream: BufferedReader) -> bytes:
        digest = hashlib.sha256()
        while block := stream.read(BLOCK_BYTES):
            self.check()
            digest.update(block)
        return digest.digest()

    def _read_plain(self, file: File, opened: BufferedReader, room: int) -> Iterator[Block]:
        """Yield the blocks of a text file, which is one document, from its present position and at most
        `room` bytes. A file that contains zero bytes is skipped as binary, unless the user named it. A file
        of white space only is skipped too. A file that is not UTF-8 is read, and counted."""
        starts_inside = opened.seekable() and opened.tell() > 0
        block = opened.read(min(BLOCK_BYTES, room))
        if starts_inside:
            block = block.lstrip(bytes(range(0x80, 0xC0)))  # Drops the last bytes of a divided character.
        if b"\0" in block[:_BINARY_BYTES] and not file.named:
            self.reading.leave_out(f"{file.name}: is no text: it holds zero bytes", "binary")
            return
        if not block.strip():
            return
        decoder = getincrementaldecoder("utf-8")()
        starts = is_utf8 = True
        while block:
            try:
                if is_utf8:
                    decoder.decode(block)
            except UnicodeDecodeError:
                is_utf8 = False
                self.reading.not_utf8 += 1
                self.reading.first_not_utf8 = self.reading.first_not_utf8 or file.name
            yield starts, block
            starts, room = False, room - len(block)
            block = opened.read(min(BLOCK_BYTES, room))

    def _read_tokens(self, file: File, room: int, chance: random.Random) -> Iterator[Block]:
        """Yield the tokens of a file, which is one document. From a file larger than `room` bytes, yield a
        random part."""
        start = chance.randrange(file.bytes - room + 1) if file.bytes > room else 0
        starts = True
        with file.open(seekable=start > 0) as stream:
            if self._is_withdrawn(file, ""):
                return
            for block in raw_tokens(stream, file.tokens, self.vocabulary, start, room):
                yield starts, block
                starts = False

    def _read_lines(
        self, file: File, lines: Iterable[bytes | Unreadable], is_skipped: Callable[[], bool]
    ) -> Iterator[Block]:
        """Yield the documents in lines of JSON. `is_skipped` is called once per document and decides at
        random whether to skip it. Lines without text are counted as skipped."""
        for number, line in enumerate(lines, 1):
            if isinstance(line, Unreadable):
                self.reading.leave_out(f"{file.name}:{number}: {line}", "long")
                continue
            if not line.strip() or is_skipped():
                continue
            try:
                if self.parse_line is None:
                    text = named = text_of_line(line, file.column)
                else:
                    text, named = self.parse_line(line)
            except ValueError as error:
                self.reading.leave_out(f"{file.name}:{number}: {error}", str(error).partition(":")[0])
                continue
            yield from self._yield_document(text, named)

    def _read_rows(
        self, file: str, rows: Iterator[str | Unreadable], is_skipped: Callable[[], bool]
    ) -> Iterator[Block]:
        """Yield the documents in the rows of a file, as `_read_lines` does for lines of JSON."""
        for number, text in enumerate(rows, 1):
            if is_skipped():
                continue
            if isinstance(text, Unreadable):
                self.reading.leave_out(f"{file}: row {number}: {text}", "row")
            else:
                encoded = text.encode("utf-8", "replace")
                yield from self._yield_document(encoded, encoded)

    def _yield_document(self, text: bytes, named: bytes) -> Iterator[Block]:
        """Yield a document as one block, unless it is empty or withdrawn by the SHA-256 of `named`."""
        if text and hashlib.sha256(named).digest() not in self.withdrawn:
            yield True, text


def text_at(
    places: Iterable[str],
    longest_bytes: int = LONGEST_CORPUS_BYTES,
    *,
    column: str = "text",
    tokens: str = "",
    vocabulary: int = sys.maxsize,
    parse_line: ParseLine | None = None,
) -> DocumentText:
    """Return the text at some places, at most `longest_bytes` of it, read as a source with this `column` and
    type of `tokens`. `parse_line` as in DocumentText. Raises TextError if there is no file, and during
    reading if there is no document."""
    place_list, skipped = list(places), ReadSummary()
    found = [each for place in place_list for each in files_at(place, skipped, suffixes_of(tokens))]
    files = [replace(file, column=column, tokens=tokens) for _, file in found]
    shown = ", ".join(map(without_secret, place_list))
    return DocumentText(
        files,
        skipped,
        longest_bytes=longest_bytes,
        places=shown,
        vocabulary=vocabulary,
        parse_line=parse_line,
    )


def joined(text: DocumentText) -> bytes:
    """Return all documents in memory, separated by an empty line."""
    parts: list[bytes] = []
    for starts, block in text.blocks():
        if starts and parts:
            parts.append(BETWEEN_DOCUMENTS)
        parts.append(block)
    return b"".join(parts)


def read_text(path: str, warn: Callable[[str], None]) -> bytes:
    """Return the documents at a path, joined, as a text to score (`--eval-text`). `warn` is called with each
    warning, for example about skipped files."""
    text = text_at([path])
    scored = joined(text)
    for warning in text.reading.warnings():
        warn(warning)
    return scored


def held_out_text() -> bytes:
    """Return the source of the standard library modules that are held out of training. It differs between
    versions of Python: scores are comparable only if its `fingerprint` is equal. Raises TextError."""
    library = _standard_library()
    files = [library / f"{module}.py" for module in HELD_OUT]
    texts = [file.read_bytes() for file in files if file.is_file()]
    if not texts:
        raise TextError(f"none of the held-out modules is in {library}: give a text to score")
    return BETWEEN_DOCUMENTS.join(texts)


def excerpt(text: bytes, limit: int, piece: int = 4096) -> bytes:
    """Return at most `limit` bytes of `text`: pieces of `piece` bytes at equal distances, joined."""
    if len(text) <= limit:
        return text
    count = max(1, limit // piece)
    length = min(piece, limit)
    last_start = len(text) - length
    starts = [last_start * number // max(1, count - 1) for number in range(count)]
    return b"".join(text[start : start + length] for start in starts)


def fingerprint(text: bytes) -> str:
    """Return the SHA-256 in hexadecimal. Only scores measured on the same text are comparable."""
    return hashlib.sha256(text).hexdigest()


def _standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def files_at(path: str, reading: ReadSummary, suffixes: tuple[str, ...] = SUFFIXES) -> list[tuple[str, File]]:
    """Return (relative name, file) of each text file at a path, a URL or `python-stdlib`.

    A folder gives the files that end in `suffixes`: its own first, then those of its subfolders. `reading`
    counts skipped files: those with other endings, and links out of the folder, which a stranger may have
    made. Raises TextError if there is no file, and TextUnreachable if a URL does not answer."""
    if is_url(path):
        remote_files = RemoteFolder(path).found()
        for name, file in remote_files.items():
            if name != INDEX and not has_suffix(name, suffixes):
                reading.leave_out(f"{file.name}: {_other_ending(suffixes)}", "ending")
        return [(name, file) for name, file in remote_files.items() if has_suffix(name, suffixes)]
    if path == STANDARD_LIBRARY:
        library = _standard_library()
        held_out = {library / f"{module}.py" for module in HELD_OUT}
        sources = [file for file in _walk(library, _LEFT_OUT) if file.suffix == ".py"]
        paths = [file for file in sources if file not in held_out]
        if not paths:
            raise TextError(f"{library} holds no Python source: name another text in data.sources")
        return _list_files(library, paths, reading)
    place = Path(path).expanduser()
    if is_file(place):
        return [(place.name, local_file(place, named=True))]
    if not is_folder(place):
        raise TextError(f"text {path} does not exist")
    skipped, paths = ReadSummary(), []
    for file_path in _walk(place, frozenset(), skipped):
        if file_path == place / INDEX:
            continue
        skip_reason = _skip_reason(file_path, place, suffixes)
        if skip_reason:
            skipped.leave_out(*skip_reason)
        else:
            paths.append(file_path)
    reading.add_left_out(skipped)
    if not paths:
        wanted = shown_suffixes(suffixes)
        raise TextError(f"folder {path} holds no text: put {wanted} files there{skipped.reason()}")
    return _list_files(place, paths, reading)


def _list_files(root: Path, paths: Iterable[Path], reading: ReadSummary) -> list[tuple[str, File]]:
    """Return (name relative to `root`, file) of each path. Those without a size are counted as skipped."""
    files = []
    for path in paths:
        try:
            files.append((path.relative_to(root).as_posix(), local_file(path)))
        except OSError as error:
            reading.leave_out(f"{path}: {error.strerror}", "unreadable")
    return files


def _other_ending(suffixes: tuple[str, ...]) -> str:
    return f"of a folder only {shown_suffixes(suffixes)} are read"


def _skip_reason(file: Path, place: Path, suffixes: tuple[str, ...]) -> tuple[str, str] | None:
    """Return why a file in the folder `place` is skipped, and the kind of reason; None: it is read."""
    shown = displayed(file)
    if shown != str(file):
        return f"{shown}: its name is not UTF-8: rename it", "name"
    if not has_suffix(file.name, suffixes):
        return f"{file}: {_other_ending(suffixes)}", "ending"
    if leads_out(place, file):
        why = f"is a link to {file.resolve()}, out of {place}: put a copy of it in its place"
        return f"{file} {why}", "link"
    if is_file(file) or not is_there(file):  # A missing file fails when its size is read.
        return None
    return f"{file}: is no file", "unreadable"


def displayed(path: Path) -> str:
    """Return a path for people: bytes of its name that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


_CACHED_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")


def leads_out(folder: Path, path: Path) -> bool:
    """Return True if a path in `folder` is a link out of it. In a Hugging Face cache, the files below
    `snapshots` are links into `blobs` of the same repository: these links do not count."""
    real_folder, target = folder.resolve(), path.resolve()
    if target.is_relative_to(real_folder):
        return False
    for ancestor in (real_folder, *real_folder.parents):
        if ancestor.name == "snapshots" and _CACHED_REPOSITORY.fullmatch(ancestor.parent.name):
            return not target.is_relative_to(ancestor.parent / "blobs")
    return True


def _walk(root: Path, left_out: frozenset[str], reading: ReadSummary | None = None) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, sorted, without hidden ones. Subfolders named in
    `left_out` and links to folders are not entered. `reading` counts such links and unreadable folders."""

    def leave_out(path: Path, why: str, kind: str) -> None:
        if reading is not None:
            reading.leave_out(f"{displayed(path)}{why}", kind)

    def refused(error: OSError) -> None:
        leave_out(Path(error.filename), f": {error.strerror}", "unreadable")

    for folder, subfolders, names in os.walk(root, onerror=refused):
        subfolders[:] = sorted(name for name in set(subfolders) - left_out if not name.startswith("."))
        for subfolder in (Path(folder, name) for name in subfolders):
            if subfolder.is_symlink():
                why = " is a link to a folder, which is not followed: name that folder itself"
                leave_out(subfolder, why, "link to a folder")
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))
