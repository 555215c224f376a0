"""Open the files of a text, on this machine or at a URL, and detect their format.

A file holds plain bytes, lines of JSON or rows of Parquet, and may be packed by Zstandard. Its content
decides the format; its name decides only where the content does not. Zstandard, Parquet and URLs need the
packages zstandard, pyarrow and fsspec (the extra `text`).
"""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from peers.config.remote_files import connect, is_web, lasting_cause, reached
from peers.config.run_url import without_secret
from peers.errors import how_to_install

if TYPE_CHECKING:
    from typing_extensions import Buffer

INDEX = "index.json"
"""Name of the file that lists the files of a text with their SHA-256 (peers/data/shards.py)."""
LINES, ROWS, PACKED = ".jsonl", ".parquet", ".zst"
LINE_SUFFIXES = (LINES, ".ndjson")
PROSE_SUFFIXES = (".txt", ".md")
_PLAIN_SUFFIXES = (*PROSE_SUFFIXES, *LINE_SUFFIXES)
SUFFIXES = (*_PLAIN_SUFFIXES, *(suffix + PACKED for suffix in _PLAIN_SUFFIXES), ROWS)
"""Endings of text files. Files of a folder with another ending are skipped."""
MAX_WINDOW_BYTES = 2**27
"""Maximum memory that a Zstandard frame may ask for. The `zstd` command has the same default limit."""
LINE_LIMIT = 16 * 2**20
"""Maximum bytes of a line of JSON or a string of Parquet. A longer one is skipped: it would be in memory
three times."""
ROWS_AT_A_TIME = 64
"""Rows of Parquet in memory at a time. Each is a document; the longest documents of web crawls have some
MB."""
LARGE_CHUNK_BYTES = 64 * 2**20
"""A row group with a larger column `text` is read one row at a time, since 64 rows may be all of it."""
MAX_UNPACKED_RATIO = 100
"""Maximum bytes of text per byte of its files. Zstandard packs prose to a third (its own benchmarks)."""
BUFFER_BYTES = 2**20
UNKNOWN_BYTES = 2**20
"""The size assumed for a file whose server reports none."""
_REFUSED = (
    (0, b"\x1f\x8b\x08", "is packed by gzip", "gunzip --keep {}"),
    (4, b"1AY&SY", "is packed by bzip2", "bunzip2 --keep {}"),
    (0, b"\xfd7zXZ\0", "is packed by xz", "unxz --keep {}"),
    (0, b"PK\x03\x04", "is a ZIP archive", "unzip {}"),
    (257, b"ustar", "is a tar archive", "tar -xf {}"),
    (0, b"%PDF-", "is a PDF", "pdftotext {}"),
    (0, b"\xff\xfe", "is UTF-16", "iconv -f utf-16 -t utf-8 {0} > {0}.utf8.txt"),
    (0, b"\xfe\xff", "is UTF-16", "iconv -f utf-16 -t utf-8 {0} > {0}.utf8.txt"),
)
"""Offset, bytes and meaning of the formats that are refused, with the command that unpacks each (from
file(1))."""
_ZSTANDARD, _PARQUET = b"\x28\xb5\x2f\xfd", b"PAR1"
"""First bytes of each format (RFC 8878; the Parquet format)."""


class Unreadable(Exception):
    """A file does not have the format that its name promises. The message gives the reason without the
    name."""


class TextError(ValueError):
    """A place has no text. The message is one line that says what is missing, and where."""


class TextUnreachable(TextError):
    """The server of a text does not answer, or refuses. A later try may succeed."""


class ReadingStopped(Exception):
    """The caller has cancelled the reading of a text."""


@dataclass(frozen=True, slots=True)
class File:
    """One file of a text, on this machine or at a URL."""

    name: str
    """Name for people: a path, or a URL without its secrets."""
    bytes: int
    """Size as stored, packed or not."""
    seen: str
    """Version mark of the file; it differs after the file has changed."""
    open: Callable[..., AbstractContextManager[BufferedReader]]
    """Opens the file as a stream, or seekable with `seekable=True`. Raises OSError if the file is missing or
    unreadable. Raises TextUnreachable, also during reading."""
    named: bool = False
    """True if the user named this file and not only its folder: it is then text whatever it contains."""
    sha256: str = ""
    """SHA-256 that the file must have; empty: any."""


def local_file(path: Path, *, named: bool = False, sha256: str = "") -> File:
    """Return a file of this machine. Raises OSError."""
    found = path.stat()
    return File(
        str(path), found.st_size, f"{found.st_size}/{found.st_mtime_ns}", partial(_open_local, path), named,
        sha256,
    )  # fmt: skip


def _open_local(path: Path, seekable: bool = False) -> BufferedReader:
    return BufferedReader(path.open("rb", buffering=0), BUFFER_BYTES)


class RemoteFolder:
    """The folder behind a URL that the user typed. Its calls block; make them from a thread."""

    def __init__(self, url: str) -> None:
        """Raises TextError."""
        self._secret_url, self.url = url, without_secret(url)
        self._files, self._root = connect(url, lambda why: TextError(f"text {why}"))

    def file(self, name: str, bytes: int = 0, sha256: str = "") -> File:
        """Return the file of that name below the folder. This does not check that the file exists."""
        opens = partial(self._open, f"{self._root}/{name}")
        return File(f"{self.url.rstrip('/')}/{name}", bytes, "", opens, sha256=sha256)

    def found(self) -> dict[str, File]:
        """Return every file below the URL by its relative name. Raises TextUnreachable, or TextError if
        nothing is there."""
        with self._reached():
            try:
                listed = self._files.find(self._root, detail=True)
                if not listed and (info := self._files.info(self._root))["type"] == "file":
                    listed = {self._root: info}
            except FileNotFoundError as error:
                if lasting_cause(error) is not None:
                    raise
                raise TextError(
                    f"text {self.url}: the server has no such file, and no list of files: give the URL of a "
                    "file, or put an index there (`swarmnet index FOLDER`)"
                ) from None
        files = {}
        for path, info in listed.items():
            name = str(path).removeprefix(self._root).lstrip("/")
            shown = f"{self.url.rstrip('/')}/{name}" if name else self.url
            name = name or str(path).rpartition("/")[2]  # The URL leads to a file.
            if info.get("size") is None and has_suffix(name, SUFFIXES):
                info = self._info(path)
            size = UNKNOWN_BYTES if info.get("size") is None else int(info["size"])
            files[name] = File(shown, size, _seen(info), partial(self._open, path))
        return files

    def _info(self, path: str) -> dict[str, Any]:
        """Return the server's metadata of one file; empty if the server refuses."""
        with self._reached():
            try:
                info: dict[str, Any] = self._files.info(path)
            except FileNotFoundError as error:
                if lasting_cause(error) is not None:
                    raise
                return {}
            return info

    @contextmanager
    def _open(self, path: str, seekable: bool = False) -> Iterator[BufferedReader]:
        """Open a file. A web server sends it as one stream unless it must be `seekable`: not every server
        sends parts of a file."""
        web = is_web(self._secret_url)
        options = {"block_size": 0} if web and not seekable else {}
        with self._reached(), self._files.open(path, "rb", **options) as file:
            try:
                yield BufferedReader(_Remote(file, seekable or not web), BUFFER_BYTES)
            except TextError:
                raise
            except ValueError:
                if not (web and seekable):
                    raise
                raise Unreadable(
                    "its server sends no part of a file (HTTP Range), which Parquet needs: download it, and "
                    "name the file on this machine"
                ) from None

    def _reached(self) -> AbstractContextManager[None]:
        def unreachable(why: str) -> TextUnreachable:
            return TextUnreachable(f"text {self.url} cannot be read: {why}")

        return reached(self._secret_url, unreachable, TextError, Unreadable, ReadingStopped)


def _seen(info: dict[str, Any]) -> str:
    """Return a version mark of a remote file, made of every version field that its server reports. Servers
    use different names for these fields."""
    keys = ("size", "ETag", "etag", "md5Hash", "LastModified", "Last-Modified", "mtime", "created")
    values = (info.get(key) for key in keys)
    return "/".join(str(each) for each in values if each is not None)


class _Remote(io.RawIOBase):
    """Adapter of an fsspec file for a BufferedReader: some of these files cannot read into a buffer."""

    def __init__(self, file: IO[bytes], seekable: bool) -> None:
        self._file, self._seekable = file, seekable

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._seekable

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        some = self._file.read(len(view))
        view[: len(some)] = some
        return len(some)


def has_suffix(name: str, suffixes: tuple[str, ...]) -> bool:
    """Return whether a name ends in one of `suffixes`, ignoring case."""
    return name.lower().endswith(suffixes)


@dataclass(frozen=True, slots=True)
class Content:
    """Unpacked content of a file, from its beginning."""

    form: str
    """LINES, ROWS, or empty for plain bytes."""
    packed: bool
    stream: BufferedReader


@contextmanager
def open_content(file: File) -> Iterator[Content]:
    """Open a file by its detected format. Raises OSError and TextError, and Unreadable also during
    reading."""
    with file.open() as stream:
        head = stream.peek(BUFFER_BYTES)
        if head.startswith(_ZSTANDARD) or has_suffix(file.name, (PACKED,)):
            with _unpacked(file.name, stream) as inner:
                yield _content(file.name, inner, packed=True)
            return
        if not _is_parquet(file.name, head):
            yield _content(file.name, stream, packed=False)
            return
    with file.open(seekable=True) as stream:
        yield Content(ROWS, False, stream)


def _is_parquet(name: str, head: bytes) -> bool:
    return head.startswith(_PARQUET) or has_suffix(name, (ROWS,))


def _content(name: str, stream: BufferedReader, packed: bool) -> Content:
    """Return the content with its detected format. Raises Unreadable for a refused format."""
    head = stream.peek(BUFFER_BYTES)
    if packed and _is_parquet(name, head):
        raise Unreadable(f"is Parquet within Zstandard: unzstd {shlex.quote(name)}")
    for place, magic, meaning, cure in _REFUSED:
        if head[place : place + len(magic)] == magic:
            raise Unreadable(f"{meaning}: {cure.format(shlex.quote(name))}")
    return Content(LINES if _is_lines(name, head) else "", packed, stream)


def _is_lines(name: str, head: bytes) -> bool:
    """Return whether a file is lines of JSON, by its name, else by its first line. Raises Unreadable for a
    single JSON document, which is not text."""
    inner = name.lower().removesuffix(PACKED)
    if inner.endswith(LINE_SUFFIXES):
        return True
    line, ends, _ = head.lstrip().partition(b"\n")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = {} if line.startswith(b'{"') and not ends and len(head) >= BUFFER_BYTES else None
    if isinstance(record, dict):
        return "text" in record or not inner.endswith(PROSE_SUFFIXES)
    if inner.endswith(".json") and line[:1] in (b"{", b"["):
        quoted = shlex.quote(name)
        raise Unreadable(f"is one JSON document and no lines of JSON: jq -c '.[]' {quoted} > {quoted}l")
    return False


@contextmanager
def _unpacked(name: str, stream: BufferedReader) -> Iterator[BufferedReader]:
    """Unpack a Zstandard stream. Raises TextError without the package, and Unreadable also during reading."""
    try:
        import zstandard
    except ImportError:
        raise TextError(f"{name} needs the package zstandard: {how_to_install('text')}") from None
    unpacking = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    try:
        with unpacking.stream_reader(stream, read_across_frames=True) as reader:
            yield BufferedReader(reader, BUFFER_BYTES)
    except zstandard.ZstdError as error:
        raise Unreadable(f"is not packed by Zstandard, or not whole: {error}") from None


def rows_of(name: str, stream: BufferedReader) -> Iterator[str | Unreadable]:
    """Yield the column `text` of a Parquet file, or the reason why a row has none. Only some rows are in
    memory at a time. Raises TextError, Unreadable."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise TextError(f"{name} needs the package pyarrow: {how_to_install('text')}") from None
    try:
        file = parquet.ParquetFile(stream, buffer_size=BUFFER_BYTES, pre_buffer=False)
        if "text" not in file.schema_arrow.names:
            raise Unreadable("has no column text")
        columns = (file.schema.column(at) for at in range(len(file.schema)))
        if any((one.path, one.physical_type) == ("text", "BYTE_ARRAY") for one in columns):
            # Keep dictionary encoding: a string that many rows share is in memory once.
            file = parquet.ParquetFile(
                stream, buffer_size=BUFFER_BYTES, pre_buffer=False, metadata=file.metadata,
                read_dictionary=["text"],
            )  # fmt: skip
        for group in range(file.num_row_groups):
            rows = _rows_at_a_time(file.metadata.row_group(group))
            for batch in file.iter_batches(rows, row_groups=[group], columns=["text"], use_threads=False):
                yield from map(_row, batch.column(0))
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise Unreadable(f"is no Parquet file, or not whole: {str(error).partition(chr(10))[0]}") from None


def _rows_at_a_time(group: Any) -> int:  # noqa: ANN401 - of a package without types
    """Return how many rows of a row group to read together, from its metadata. Raises Unreadable if the group
    unpacks to more than MAX_UNPACKED_RATIO times its bytes."""
    columns = [group.column(at) for at in range(group.num_columns)]
    text = [one for one in columns if one.path_in_schema.partition(".")[0] == "text"]
    unpacked = sum(one.total_uncompressed_size for one in text)
    if unpacked <= LARGE_CHUNK_BYTES:
        return ROWS_AT_A_TIME
    if unpacked > MAX_UNPACKED_RATIO * sum(one.total_compressed_size for one in text):
        raise Unreadable(f"unpacks to {unpacked:,} bytes, more than {MAX_UNPACKED_RATIO} times its own")
    return 1


def _row(scalar: Any) -> str | Unreadable:  # noqa: ANN401 - of a package without types
    """Return one value of the column `text`, or why it cannot be used."""
    value = getattr(scalar, "value", scalar)  # A dictionary value wraps the string.
    if value is None or not value.is_valid or not hasattr(value, "as_buffer"):
        return Unreadable("no string in its column text")
    if value.as_buffer().size > LINE_LIMIT:
        return Unreadable(f"a string of more than {LINE_LIMIT:,} bytes")
    text = value.as_py()
    return text if isinstance(text, str) else Unreadable("no string in its column text")
