"""Where an archive lies: a folder, or anything that fsspec opens (s3://, gs://, sftp://, memory://, ...).

Blocking; call from a thread. A file is there as a whole or not at all: folders and sftp get it by a rename,
object stores by how they work, and readers check every file against the index besides.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from peers.config.atomic_files import is_file, is_there, write_atomically
from peers.config.remote_files import is_web, lasting_cause, reason_of, web_options
from peers.config.run_url import without_secret
from peers.errors import UserError, how_to_install
from peers.runtime.supervision import reason
from peers.telemetry.events import Say

READ_LIMIT = 64 * 1024 * 1024
"""Bytes of a file of which nothing says how long it is."""
_BLOCK_BYTES = 1024 * 1024
"""Read at a time from a web server."""


class ArchiveError(UserError):
    """An archive that cannot be read or written; the message names it and says why."""


class StoreUnreachable(ArchiveError):
    """Whoever keeps the files does not answer, or refuses: it may be otherwise later."""


class Store(Protocol):
    url: str

    def read(self, name: str, limit: int = READ_LIMIT) -> bytes | None:
        """Return a file, or None: not there. Raises ArchiveError where it cannot be read, or is longer than
        `limit` bytes, of which no more are in memory."""

    def write(self, name: str, data: bytes) -> None:
        """Raises UserError."""

    def delete(self, name: str) -> None:
        """What is not there needs no deleting. Raises ArchiveError."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def open_store(url: str) -> Store:
    """A path or file:// URL is a folder; everything else is fsspec's. Raises ArchiveError."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return FolderStore(Path(url).expanduser())
    if scheme == "file":
        return FolderStore(Path("/" + rest.lstrip("/")))
    return FsspecStore(url)


def _within(data: bytes, limit: int, place: str) -> bytes:
    """Return the file. Raises ArchiveError where it is longer than `limit` bytes."""
    if len(data) > limit:
        raise ArchiveError(f"{place} is longer than {limit:,} bytes, as no such file is: name another place")
    return data


class FolderStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder)

    def read(self, name: str, limit: int = READ_LIMIT) -> bytes | None:
        """See `Store.read`."""
        try:
            if is_there(self.folder / name) and not is_file(self.folder / name):
                raise ArchiveError(f"{self.folder / name}: is no file (a link to a device?): remove it")
            with (self.folder / name).open("rb") as file:
                return _within(file.read(limit + 1), limit, str(self.folder / name))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ArchiveError(f"{self.folder / name}: cannot be read: {error.strerror}") from None

    def write(self, name: str, data: bytes) -> None:
        """See `Store.write`."""
        write_atomically(self.folder / name, data)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise ArchiveError(f"{self.folder / name}: cannot be removed: {error.strerror}") from None


_RENAMES = frozenset({"sftp", "ssh"})
"""Where a name is taken by another file in one step (POSIX rename), and a file that is written in place may
be left half written. Object stores have the new file when all of it has come, and no renaming."""
_UNFINISHED = ".part"


class FsspecStore:
    def __init__(self, url: str) -> None:
        self.url = without_secret(url)
        self._secret_url = url
        self._files: Any = None
        try:
            import fsspec
        except ImportError:
            raise ArchiveError(f"{self.url} needs the package fsspec: {how_to_install('archive')}") from None
        self._connect = fsspec.core.url_to_fs
        with self._connected("cannot be opened"):
            pass

    def read(self, name: str, limit: int = READ_LIMIT) -> bytes | None:
        """See `Store.read`."""
        with self._connected("cannot be read", name) as (files, path):
            try:
                return _within(self._first_bytes(files, path, limit + 1), limit, f"{self.url}/{name}")
            except FileNotFoundError as error:
                if (cause := lasting_cause(error)) is not None:
                    raise cause from None
                return None

    def _first_bytes(self, files: Any, path: str, count: int) -> bytes:  # noqa: ANN401 - a package without types
        """Return as many bytes of a file, or all. A web server may send more than it is asked for: it is read
        as a stream."""
        if not is_web(self._secret_url):
            data: bytes = files.cat_file(path, start=0, end=count)
            return data
        parts = bytearray()
        with files.open(path, "rb", block_size=0) as file:
            while len(parts) < count and (part := file.read(min(_BLOCK_BYTES, count - len(parts)))):
                parts += part
        return bytes(parts)

    def write(self, name: str, data: bytes) -> None:
        """See `Store.write`."""
        with self._connected("cannot be written", name) as (files, path):
            files.makedirs(path.rpartition("/")[0], exist_ok=True)
            if self.url.partition("://")[0] not in _RENAMES:
                files.pipe_file(path, data)
                return
            files.pipe_file(path + _UNFINISHED, data)
            files.mv(path + _UNFINISHED, path)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        with (
            self._connected("cannot be removed", name) as (files, path),
            contextlib.suppress(FileNotFoundError),
        ):
            files.rm_file(path)

    @contextlib.contextmanager
    def _connected(self, what: str, name: str = "") -> Iterator[tuple[Any, str]]:
        """The file system, and the path of a file there. After a failure the next use connects anew: fsspec
        keeps a file system, and one whose connection broke (sftp) stays broken.

        Whatever a backend raises becomes StoreUnreachable, with its kind beside the words. Not only OSError
        comes: botocore, gcsfs and paramiko have kinds of their own, which cannot be named without importing
        them, and a store that is not reached must not end who uses it with a traceback."""
        place = f"{self.url}/{name}" if name else self.url
        try:
            if self._files is None:
                self._files, self._root = self._opened(place, what)
            yield self._files, f"{self._root.rstrip('/')}/{name}"
        except ArchiveError:
            raise
        except Exception as error:  # noqa: BLE001 - see above
            self._files = None
            told = reason_of(error).replace(self._secret_url, self.url)
            raise StoreUnreachable(f"{place}: {what}: {told}") from None

    def _opened(self, place: str, what: str) -> tuple[Any, str]:
        """fsspec's file system, and the archive's path there."""
        try:
            options = web_options(self._secret_url)
            files, root = self._connect(self._secret_url, skip_instance_cache=True, **options)
        except (ImportError, ValueError) as error:  # No such kind of store, or its package is not installed.
            raise ArchiveError(f"{place}: {what}: {reason(error)}") from None
        return files, root


Result = TypeVar("Result")
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 300.0
"""Between attempts; twice as long each time."""


async def until_reached(attempt: Callable[[], Awaitable[Result]], say: Say) -> Result:
    """What it gives once the store answers; what cannot become otherwise is raised."""
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            return await attempt()
        except StoreUnreachable as error:
            say("archive", f"{error}; trying again in {pause:.0f} s (Ctrl+C stops)")
        await asyncio.sleep(pause)
        pause = min(LONGEST_PAUSE_SECONDS, 2 * pause)
