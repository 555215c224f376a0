"""Storage of an archive: a folder, or anything that fsspec opens (s3://, gs://, sftp://, memory://, ...).

All calls block: use a thread. A file exists completely or not at all. Folders and sftp achieve that by a
rename, and object stores by their design. In addition, readers check every file against the index.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from peers.config.atomic_files import is_file, is_there, write_atomically
from peers.config.errors import UserError
from peers.config.remote_files import connect, is_web, lasting_cause, reason_of
from peers.config.run_url import without_secret

READ_LIMIT = 64 * 1024 * 1024
"""Maximum bytes of a file of unknown length."""
_BLOCK_BYTES = 1024 * 1024
"""Bytes per read from a web server."""


class ArchiveError(UserError):
    """An archive cannot be read or written. The message names it and the reason."""


class StoreUnreachable(ArchiveError):
    """The store does not answer, or refuses. A later attempt may succeed."""


class Store(Protocol):
    """A place for the files of an archive."""

    url: str

    def read(self, name: str, limit: int = READ_LIMIT) -> bytes | None:
        """Return a file, or None if it does not exist. Raises ArchiveError if it cannot be read, or if it is
        longer than `limit` bytes; then no more are kept in memory."""

    def write(self, name: str, data: bytes) -> None:
        """Write a file completely or not at all. Raises UserError."""

    def delete(self, name: str) -> None:
        """Delete a file if it exists. Raises ArchiveError."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def open_store(url: str) -> Store:
    """Return the store at a URL: a folder for paths and file:// URLs, else fsspec. Raises ArchiveError."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return FolderStore(Path(url).expanduser())
    if scheme == "file":
        return FolderStore(Path("/" + rest.lstrip("/")))
    return FsspecStore(url)


def _within(data: bytes, limit: int, place: str) -> bytes:
    """Return `data`, read from `place`. Raises ArchiveError if it is longer than `limit` bytes."""
    if len(data) > limit:
        raise ArchiveError(f"{place} is longer than {limit:,} bytes, as no such file is: name another place")
    return data


class FolderStore:
    """A store in a local folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder)

    def read(self, name: str, limit: int = READ_LIMIT) -> bytes | None:
        try:
            if is_there(self.folder / name) and not is_file(self.folder / name):
                raise ArchiveError(f"{self.folder / name}: is no file (a link to a device?): remove it")
            with (self.folder / name).open("rb") as file:
                # `file.read` allocates the requested bytes, and `limit` may come from an untrusted index.
                count = min(limit, os.fstat(file.fileno()).st_size) + 1
                return _within(file.read(count), limit, str(self.folder / name))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ArchiveError(f"{self.folder / name}: cannot be read: {error.strerror}") from None

    def write(self, name: str, data: bytes) -> None:
        write_atomically(self.folder / name, data)

    def delete(self, name: str) -> None:
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise ArchiveError(f"{self.folder / name}: cannot be removed: {error.strerror}") from None


_RENAMES = frozenset({"sftp", "ssh"})
"""Schemes that replace a file by an atomic rename (POSIX), but may leave a direct write incomplete. Object
stores show a new file only when it is complete, and have no rename."""
_UNFINISHED = ".part"


class FsspecStore:
    """A store that fsspec accesses."""

    def __init__(self, url: str) -> None:
        self.url = without_secret(url)
        self._secret_url = url
        self._files: Any = None
        with self._connected("cannot be opened"):
            pass

    def read(self, name: str, limit: int = READ_LIMIT) -> bytes | None:
        with self._connected("cannot be read", name) as (files, path):
            try:
                return _within(self._first_bytes(files, path, limit + 1), limit, f"{self.url}/{name}")
            except FileNotFoundError as error:
                if (cause := lasting_cause(error)) is not None:
                    raise cause from None
                return None

    def _first_bytes(self, files: Any, path: str, count: int) -> bytes:  # noqa: ANN401 - a package without types
        """Return the first `count` bytes of a file, or the whole file if it is shorter. A web server may send
        more than requested: its response is therefore read in blocks, and no further than `count`."""
        if not is_web(self._secret_url):
            data: bytes = files.cat_file(path, start=0, end=count)
            return data
        parts = bytearray()
        with files.open(path, "rb", block_size=0) as file:
            while len(parts) < count:
                part = file.read(min(_BLOCK_BYTES, count - len(parts)))
                if not part:
                    break
                parts += part
        return bytes(parts)

    def write(self, name: str, data: bytes) -> None:
        """Write a file completely or not at all. Over sftp and ssh it is written under a temporary name and
        then renamed. Raises UserError."""
        with self._connected("cannot be written", name) as (files, path):
            files.makedirs(path.rpartition("/")[0], exist_ok=True)
            if self.url.partition("://")[0] not in _RENAMES:
                files.pipe_file(path, data)
                return
            files.pipe_file(path + _UNFINISHED, data)
            files.mv(path + _UNFINISHED, path)

    def delete(self, name: str) -> None:
        with (
            self._connected("cannot be removed", name) as (files, path),
            contextlib.suppress(FileNotFoundError),
        ):
            files.rm_file(path)

    @contextlib.contextmanager
    def _connected(self, what: str, name: str = "") -> Iterator[tuple[Any, str]]:
        """Yield the fsspec file system and the path of the file `name` in it. `what` says in an error message
        what failed.

        Every exception but ArchiveError becomes StoreUnreachable, with the exception's class in the message.
        Backends (botocore, gcsfs, paramiko) have their own classes, which cannot be named without importing
        them. After a failure the next use reconnects, because a broken connection stays broken."""
        place = f"{self.url}/{name}" if name else self.url
        try:
            if self._files is None:
                self._files, self._root = connect(self._secret_url, ArchiveError, skip_instance_cache=True)
            yield self._files, f"{self._root}/{name}"
        except ArchiveError:
            raise
        except Exception as error:  # noqa: BLE001 - see above
            self._files = None
            why = reason_of(error).replace(self._secret_url, self.url)
            raise StoreUnreachable(f"{place}: {what}: {why}") from None
