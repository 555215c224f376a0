"""The files of a text, wherever they lie, and the documents in them, whatever their form: bytes as they are,
lines of JSON, rows of Parquet; packed by Zstandard or not. Zstandard, Parquet and places elsewhere than on
this machine are read by the packages zstandard, pyarrow and fsspec (the extra `text`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from peers.config.run_url import without_secret
from peers.errors import how_to_install

if TYPE_CHECKING:
    from typing_extensions import Buffer

INDEX = "index.json"
"""Names the files of a text with their SHA-256 (peers/data/shards.py)."""
LINES, ROWS, PACKED = ".jsonl", ".parquet", ".zst"
PLAIN_SUFFIXES = (".txt", ".md", LINES)
ALL_SUFFIXES = (*PLAIN_SUFFIXES, *(suffix + PACKED for suffix in PLAIN_SUFFIXES), ROWS)
"""What is read in epochs. Of a text that is drawn from, packed files are not: where in them the text that a
peer takes lies is known only when all of it is unpacked."""
MOST_WINDOW_BYTES = 2**27
"""What a Zstandard frame may ask for as memory: the most that its own command unpacks without more ado."""
ROWS_AT_A_TIME = 64
"""Of Parquet: each is a document, the longest of web crawls some MB."""
BUFFER_BYTES = 2**20


class Unreadable(Exception):
    """A file that is not what its name says; the message says why, without the name."""


class TextError(ValueError):
    """There is no text to be had there; one line that says what is missing, and where."""


class TextUnreachable(TextError):
    """Whoever keeps the text elsewhere does not answer, or refuses: it may be otherwise later."""


class File(Protocol):
    @property
    def name(self) -> str:
        """For people: a path, or a URL without its secrets."""

    @property
    def bytes(self) -> int:
        """As it lies there, packed or not."""

    @property
    def seen(self) -> str:
        """Another when the file has changed."""

    def open(self) -> BufferedReader:
        """Raises OSError: it is not there, or cannot be read here; TextUnreachable."""


@dataclass(frozen=True, slots=True)
class LocalFile:
    path: Path
    bytes: int
    seen: str = ""

    @classmethod
    def at(cls, path: Path) -> LocalFile:
        """Raises OSError."""
        found = path.stat()
        return cls(path, found.st_size, f"{found.st_size}/{found.st_mtime_ns}")

    @property
    def name(self) -> str:
        return str(self.path)

    def open(self) -> BufferedReader:
        return self.path.open("rb")


class RemoteFolder:
    """Where a URL leads that a person of this machine typed. Blocking; call from a thread."""

    def __init__(self, url: str) -> None:
        """Raises TextError."""
        self._secret_url, self.url = url, without_secret(url)
        try:
            import fsspec
        except ImportError:
            raise TextError(f"{self.url} needs the package fsspec: {how_to_install('text')}") from None
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:  # No such kind of place, or its package is not installed.
            raise TextError(f"text {self.url} cannot be opened: {error}") from None
        self._root = root.rstrip("/")

    def file(self, name: str, bytes: int = 0) -> RemoteFile:
        """`name` is relative to the folder. Whether it is there is not asked."""
        return RemoteFile(f"{self.url.rstrip('/')}/{name}", bytes, "", self, f"{self._root}/{name}")

    def found(self) -> dict[str, RemoteFile]:
        """Every file there, by its name relative to the folder. Raises TextUnreachable."""
        with self._reached():
            listed = self._files.find(self._root, detail=True)
        files = {}
        for path, info in listed.items():
            name = str(path).removeprefix(self._root).lstrip("/")
            shown = f"{self.url.rstrip('/')}/{name}" if name else self.url
            name = name or str(path).rpartition("/")[2]  # The URL leads to a file.
            files[name] = RemoteFile(shown, int(info.get("size") or 0), _seen(info), self, path)
        return files

    def open(self, path: str) -> BufferedReader:
        with self._reached():
            return BufferedReader(_Remote(self._files.open(path, "rb"), self._reached), BUFFER_BYTES)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Whatever a backend raises becomes TextUnreachable (as in peers/state/archive_store.py): botocore,
        gcsfs, aiohttp and paramiko have kinds of their own, which cannot be named without importing them."""
        try:
            yield
        except (TextError, FileNotFoundError):
            raise
        except Exception as error:  # noqa: BLE001 - see above
            told = f"{type(error).__name__}: {error}".replace(self._secret_url, self.url)
            raise TextUnreachable(f"text {self.url} cannot be read: {told}") from None


def _seen(info: dict[str, Any]) -> str:
    """What a place tells of a file's version, whichever of it; there is no one word for it."""
    told = (info.get(key) for key in ("size", "ETag", "etag", "md5Hash", "LastModified", "mtime", "created"))
    return "/".join(str(each) for each in told if each is not None)


class _Remote(io.RawIOBase):
    """A remote file whose failures are TextUnreachable."""

    def __init__(self, file: IO[bytes], reached: Callable[[], AbstractContextManager[None]]) -> None:
        self._file, self._reached = file, reached

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with self._reached():
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer)
        with self._reached():
            some = self._file.read(len(view))
        view[: len(some)] = some
        return len(some)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


@dataclass(frozen=True, slots=True)
class RemoteFile:
    name: str
    bytes: int
    seen: str
    folder: RemoteFolder
    path: str

    def open(self) -> BufferedReader:
        return self.folder.open(self.path)


def form_of(name: str) -> str:
    """LINES, ROWS, or empty: bytes as they are."""
    inner = name.removesuffix(PACKED)
    return next((form for form in (LINES, ROWS) if inner.endswith(form)), "")


@contextmanager
def unpacked(file: File) -> Iterator[BufferedReader]:
    """What is in the file, from its beginning. Raises OSError, TextError, and Unreadable also while it is
    read."""
    with file.open() as opened:
        if not file.name.endswith(PACKED):
            yield opened
            return
        try:
            import zstandard
        except ImportError:
            raise TextError(f"{file.name} needs the package zstandard: {how_to_install('text')}") from None
        unpacking = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW_BYTES)
        try:
            with unpacking.stream_reader(opened, read_across_frames=True) as reader:
                yield BufferedReader(reader, BUFFER_BYTES)
        except zstandard.ZstdError as error:
            raise Unreadable(f"is not packed by Zstandard, or not whole: {error}") from None


def rows_of(name: str, opened: BufferedReader) -> Iterator[object]:
    """The column `text` of a Parquet file, some rows in memory at a time. Raises TextError, Unreadable."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise TextError(f"{name} needs the package pyarrow: {how_to_install('text')}") from None
    try:
        file = parquet.ParquetFile(opened, buffer_size=BUFFER_BYTES, pre_buffer=False)
        if "text" not in file.schema_arrow.names:
            raise Unreadable("has no column text")
        for batch in file.iter_batches(ROWS_AT_A_TIME, columns=["text"], use_threads=False):
            yield from batch.column(0).to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise Unreadable(f"is no Parquet file, or not whole: {str(error).partition(chr(10))[0]}") from None
