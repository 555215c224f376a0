"""Open the files of a text, on this machine or at a URL, and detect their format.

A file holds plain bytes, lines of JSON, CSV, rows of Parquet, or tokens, and may be packed by Zstandard or
gzip. Its content decides the format; its name decides only where the content does not. Zstandard, Parquet and
URLs need the packages zstandard, pyarrow and fsspec (the extra `text`).
"""

from __future__ import annotations

import io
import json
import shlex
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from gzip import BadGzipFile, GzipFile
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from peers.config.errors import how_to_install
from peers.config.remote_files import connect, is_web, lasting_cause, reached
from peers.config.run_url import without_secret

if TYPE_CHECKING:
    from typing_extensions import Buffer

INDEX = "index.json"
"""Name of the file that lists the files of a text with their SHA-256 (peers/data/shards.py)."""
LINES, TABLE, ROWS = ".jsonl", ".csv", ".parquet"
PACKED = (".zst", ".gz")
LINE_SUFFIXES = (LINES, ".ndjson")
PROSE_SUFFIXES = (".txt", ".md")
_PLAIN_SUFFIXES = (*PROSE_SUFFIXES, *LINE_SUFFIXES, TABLE)
SUFFIXES = (*_PLAIN_SUFFIXES, *(suffix + packed for packed in PACKED for suffix in _PLAIN_SUFFIXES), ROWS)
"""Endings of text files. Files of a folder with another ending are skipped."""
TOKEN_SUFFIXES = (".bin", ".npy")
"""Endings of files of a source with `tokens`, of which no others are read."""
_PLAIN_SHOWN = f"{', '.join(_PLAIN_SUFFIXES)} (also packed: {', '.join(PACKED)}) and {ROWS}"
MAX_WINDOW_BYTES = 2**27
"""Maximum memory that a Zstandard frame may ask for. The `zstd` command has the same default limit."""
LINE_LIMIT = 16 * 2**20
"""Maximum bytes of a line of JSON or a string of Parquet. A longer one, in memory three times, is skipped."""
ROWS_AT_A_TIME = 64
"""Rows of Parquet in memory at a time. Each is a document; the longest of web crawls have some MB."""
LARGE_CHUNK_BYTES = 64 * 2**20
"""A row group with a larger column `text` is read one row at a time, since 64 rows may be all of it."""
MAX_UNPACKED_RATIO = 100
"""Maximum bytes of text per byte of its files. Zstandard packs prose to a third (its own benchmarks)."""
BUFFER_BYTES = 2**20
UNKNOWN_BYTES = 2**20
"""The size assumed for a file whose server reports none."""
_REFUSED = (
    (4, b"1AY&SY", "is packed by bzip2", "bunzip2 --keep {}"),
    (0, b"\xfd7zXZ\0", "is packed by xz", "unxz --keep {}"),
    (0, b"PK\x03\x04", "is a ZIP archive", "unzip {}"),
    (257, b"ustar", "is a tar archive", "tar -xf {}"),
    (0, b"%PDF-", "is a PDF", "pdftotext {}"),
    (0, b"\xff\xfe", "is UTF-16", "iconv -f utf-16 -t utf-8 {0} > {0}.utf8.txt"),
    (0, b"\xfe\xff", "is UTF-16", "iconv -f utf-16 -t utf-8 {0} > {0}.utf8.txt"),
)
"""Offset, bytes and meaning (from file(1)) of the refused formats, with the command that unpacks each."""
_ZSTANDARD, _GZIP, _PARQUET = b"\x28\xb5\x2f\xfd", b"\x1f\x8b\x08", b"PAR1"
"""First bytes of each format (RFC 8878, RFC 1952; the Parquet format)."""


class Unreadable(Exception):
    """A file does not have the format that its name promises. The message says why, without the name."""


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
    chunks: str = ""
    """SHA-256 of the list of its chunks' hashes, by which other peers send the file; empty: it is here."""
    column: str = "text"
    """Field with the text of a document (`TextSource.column`)."""
    tokens: str = ""
    """Type of the tokens in the file; empty: it holds text."""


def local_file(path: Path, *, named: bool = False, sha256: str = "") -> File:
    """Return a file of this machine. Raises OSError."""
    found = path.stat()
    version_mark = f"{found.st_size}/{found.st_mtime_ns}"
    return File(str(path), found.st_size, version_mark, partial(_open_local, path), named, sha256)


def _open_local(path: Path, seekable: bool = False) -> BufferedReader:
    return BufferedReader(path.open("rb", buffering=0), BUFFER_BYTES)


@dataclass(frozen=True, slots=True)
class FetchedFolder:
    """The files of this machine that came from other peers. Each has its SHA-256 as its name."""

    folder: Path

    def path(self, sha256: str) -> Path:
        return self.folder / sha256

    def file(self, name: str, bytes: int, sha256: str, chunks: str) -> File:
        """Return a file of a text, which may not be here yet. `name` is its name in the text."""
        open_file = partial(_open_local, self.path(sha256))
        return File(name, bytes, sha256, open_file, sha256=sha256, chunks=chunks)

    def __str__(self) -> str:
        return "other peers"


Place = str | FetchedFolder
"""Location of a source's text: a path, a URL, `python-stdlib`, or the folder of what other peers send."""


def shown_place(place: Place) -> str:
    """Return a place for people, without the secrets of a URL."""
    return without_secret(place) if isinstance(place, str) else str(place)


class RemoteFolder:
    """The folder behind a URL that the user typed. Its calls block; make them from a thread."""

    def __init__(self, url: str) -> None:
        """Raises TextError."""
        self._secret_url = url
        self.url = without_secret(url)
        self._files, self._root = connect(url, lambda why: TextError(f"text {why}"))

    def file(self, name: str, bytes: int = 0, sha256: str = "") -> File:
        """Return the file of that name below the folder. This does not check that the file exists."""
        open_file = partial(self._open, f"{self._root}/{name}")
        return File(f"{self.url.rstrip('/')}/{name}", bytes, "", open_file, sha256=sha256)

    def found(self) -> dict[str, File]:
        """Return the files below the URL by relative name; a URL of a file gives that file. If the server's
        list has no size of a text file, the size is requested; without an answer, `UNKNOWN_BYTES` is assumed.
        Raises TextUnreachable, or TextError if nothing is there or the server gives no list."""
        with self._translate_errors():
            try:
                listed = self._files.find(self._root, detail=True)
                if not listed:
                    root_info = self._files.info(self._root)
                    if root_info["type"] == "file":
                        listed = {self._root: root_info}
            except FileNotFoundError as error:
                if lasting_cause(error) is not None:
                    raise  # The file may exist: the connection failed.
                raise TextError(
                    f"text {self.url}: the server has no such file, and no list of files: give the URL of a "
                    "file, or put an index there (`swarmnet index FOLDER`)"
                ) from None
        files = {}
        for path, info in listed.items():
            name = str(path).removeprefix(self._root).lstrip("/")
            shown = f"{self.url.rstrip('/')}/{name}" if name else self.url
            name = name or str(path).rpartition("/")[2]  # `name` is empty if the URL is that of a file.
            if info.get("size") is None and has_suffix(name, SUFFIXES):
                info = self._info(path)
            size = UNKNOWN_BYTES if info.get("size") is None else int(info["size"])
            files[name] = File(shown, size, _version_mark(info), partial(self._open, path))
        return files

    def _info(self, path: str) -> dict[str, Any]:
        """Return the server's metadata of a file; empty if it has none. Raises TextUnreachable."""
        with self._translate_errors():
            try:
                info: dict[str, Any] = self._files.info(path)
            except FileNotFoundError as error:
                if lasting_cause(error) is not None:
                    raise
                return {}
            return info

    @contextmanager
    def _open(self, path: str, seekable: bool = False) -> Iterator[BufferedReader]:
        """Open a file for reading. From a web server it is read as one stream, because not every server sends
        parts of a file. With `seekable`, parts are requested. Raises TextUnreachable, and Unreadable if the
        server then sends no parts."""
        on_web = is_web(self._secret_url)
        options = {"block_size": 0} if on_web and not seekable else {}
        with self._translate_errors(), self._files.open(path, "rb", **options) as file:
            try:
                yield BufferedReader(_Remote(file, seekable or not on_web), BUFFER_BYTES)
            except TextError:
                raise
            except ValueError:  # fsspec raises this if the server sends no part of a file.
                if not (on_web and seekable):
                    raise
                raise Unreadable(
                    "its server sends no part of a file (HTTP Range), which Parquet needs: download it, and "
                    "name the file on this machine"
                ) from None

    def _translate_errors(self) -> AbstractContextManager[None]:
        """Return a context in which errors of the connection become TextUnreachable."""

        def unreachable(why: str) -> TextUnreachable:
            return TextUnreachable(f"text {self.url} cannot be read: {why}")

        return reached(self._secret_url, unreachable, TextError, Unreadable, ReadingStopped)


def _version_mark(info: dict[str, Any]) -> str:
    """Return a version mark of a remote file, made of every version field that its server reports. Servers
    use different names for these fields."""
    keys = ("size", "ETag", "etag", "md5Hash", "LastModified", "Last-Modified", "mtime", "created")
    values = (info.get(key) for key in keys)
    return "/".join(str(each) for each in values if each is not None)


class _Remote(io.RawIOBase):
    """Adapter of an fsspec file for a BufferedReader: some of these files cannot read into a buffer."""

    def __init__(self, file: IO[bytes], seekable: bool) -> None:
        self._file = file
        self._seekable = seekable

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


def suffixes_of(tokens: str) -> tuple[str, ...]:
    """Return the endings of the files of a source, whose files hold text or this type of `tokens`."""
    return TOKEN_SUFFIXES if tokens else SUFFIXES


def shown_suffixes(suffixes: tuple[str, ...]) -> str:
    """Return endings for people."""
    return _PLAIN_SHOWN if suffixes == SUFFIXES else " and ".join(suffixes)


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


Unpacker = Callable[[str, BufferedReader], AbstractContextManager[BufferedReader]]
"""Unpacks a file, of which it gets the name and the stream."""


@contextmanager
def open_content(file: File) -> Iterator[Content]:
    """Open a file, detect its format, and unpack it if it is packed. A Parquet file is opened
    again, seekable. Raises OSError, TextError and Unreadable, also during reading."""
    with file.open() as stream:
        head = stream.peek(BUFFER_BYTES)
        if (unpack := _unpacker(file.name, head)) is not None:
            with unpack(file.name, stream) as inner:
                yield _detect_format(file, inner, packed=True)
            return
        if not _is_parquet(file.name, head):
            yield _detect_format(file, stream, packed=False)
            return
    with file.open(seekable=True) as stream:
        yield Content(ROWS, packed=False, stream=stream)


def _is_parquet(name: str, head: bytes) -> bool:
    return head.startswith(_PARQUET) or has_suffix(name, (ROWS,))


def _unpacker(name: str, head: bytes) -> Unpacker | None:
    """Return the function that unpacks a file, by its first bytes or its name; None if it is not packed."""
    zstandard, gzip = PACKED
    if head.startswith(_GZIP):
        return _unpack_gzip
    if head.startswith(_ZSTANDARD) or has_suffix(name, (zstandard,)):
        return _unpack
    return _unpack_gzip if has_suffix(name, (gzip,)) else None


def _detect_format(file: File, stream: BufferedReader, packed: bool) -> Content:
    """Return the unpacked `stream` with its format: lines of JSON, CSV or plain bytes. Raises Unreadable for
    a format that is refused, with the command that converts it."""
    name, head = file.name, stream.peek(BUFFER_BYTES)
    if packed and (_is_parquet(name, head) or head.startswith((_ZSTANDARD, _GZIP))):
        raise Unreadable(f"is packed twice, or is Parquet that is packed: unpack {shlex.quote(name)}")
    for offset, magic, meaning, command in _REFUSED:
        if head[offset : offset + len(magic)] == magic:
            raise Unreadable(f"{meaning}: {command.format(shlex.quote(name))}")
    if _unpacked_name(name).endswith(TABLE):
        return Content(TABLE, packed, stream)
    return Content(LINES if _is_lines(name, head, file.column) else "", packed, stream)


def _unpacked_name(name: str) -> str:
    """Return a name in lower case without the ending of what packed the file."""
    return reduce(str.removesuffix, PACKED, name.lower())


def _is_lines(name: str, head: bytes, column: str) -> bool:
    """Return True if a file is lines of JSON: by its name, or if its first line, in `head`, is a JSON object.
    In a file named as prose (.txt, .md), the object needs the field `column`. Raises Unreadable for a file
    that is one JSON document, such as a list."""
    unpacked_name = _unpacked_name(name)
    if unpacked_name.endswith(LINE_SUFFIXES):
        return True
    line, line_end, _ = head.lstrip().partition(b"\n")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        # A first line that is longer than `head` counts as an object by its beginning.
        is_cut_off = line.startswith(b'{"') and not line_end and len(head) >= BUFFER_BYTES
        record = {} if is_cut_off else None
    if isinstance(record, dict):
        return (
            column.partition(".")[0] in record
            or column in record
            or not unpacked_name.endswith(PROSE_SUFFIXES)
        )
    if unpacked_name.endswith(".json") and line[:1] in (b"{", b"["):
        quoted = shlex.quote(name)
        raise Unreadable(f"is one JSON document and no lines of JSON: jq -c '.[]' {quoted} > {quoted}l")
    return False


@contextmanager
def _unpack_gzip(_name: str, stream: BufferedReader) -> Iterator[BufferedReader]:
    """Yield the unpacked content of a gzip stream. Raises Unreadable, during reading, if it is damaged."""
    try:
        with GzipFile(fileobj=stream) as reader:
            yield BufferedReader(cast(io.RawIOBase, reader), BUFFER_BYTES)
    except (BadGzipFile, EOFError, zlib.error) as error:
        raise Unreadable(f"is not packed by gzip, or not whole: {error}") from None


@contextmanager
def _unpack(name: str, stream: BufferedReader) -> Iterator[BufferedReader]:
    """Yield the unpacked content of a Zstandard stream. Raises TextError if the package zstandard is missing,
    and Unreadable, during reading, if the content is damaged."""
    try:
        import zstandard
    except ImportError:
        raise TextError(f"{name} needs the package zstandard: {how_to_install('text')}") from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    try:
        with decompressor.stream_reader(stream, read_across_frames=True) as reader:
            yield BufferedReader(reader, BUFFER_BYTES)
    except zstandard.ZstdError as error:
        raise Unreadable(f"is not packed by Zstandard, or not whole: {error}") from None
