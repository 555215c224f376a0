"""Where an archive lies: a folder, or anything that fsspec opens (s3://, gs://, sftp://, memory://, ...).

Blocking; call from a thread. A file is there as a whole or not at all: folders get it by a rename, object
stores by how they work, and readers check every file against the index besides.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from peers.errors import UserError
from peers.extras import how_to_install
from peers.files import write_atomically
from peers.supervision import reason

NAME_LIMIT = 128


class ArchiveError(UserError):
    """An archive that cannot be read or written; the message names it and says why."""


class Store(Protocol):
    url: str

    def read(self, name: str) -> bytes | None:
        """The file, or None: not there. ArchiveError where it cannot be read."""

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


class FolderStore:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder)

    def read(self, name: str) -> bytes | None:
        """See `Store.read`."""
        try:
            return (self.folder / name).read_bytes()
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


@contextlib.contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Whatever a backend raises becomes ArchiveError, with its kind beside the words. Not only OSError comes:
    botocore, gcsfs and paramiko have kinds of their own, which cannot be named without importing them, and a
    store that is not reached must not end who uses it with a traceback."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - see above
        raise ArchiveError(f"{what}: {reason(error)}") from None


class FsspecStore:
    def __init__(self, url: str) -> None:
        self.url = url
        try:
            import fsspec
        except ImportError:
            raise ArchiveError(f"{url} needs the package fsspec: {how_to_install('archive')}") from None
        with _refusals(f"{url} cannot be opened"):
            self._files: Any
            self._files, self._root = fsspec.core.url_to_fs(url)

    def read(self, name: str) -> bytes | None:
        """See `Store.read`."""
        with _refusals(f"{self.url}/{name}: cannot be read"), contextlib.suppress(FileNotFoundError):
            data: bytes = self._files.cat_file(self._path(name))
            return data
        return None

    def write(self, name: str, data: bytes) -> None:
        """See `Store.write`."""
        with _refusals(f"{self.url}/{name}: cannot be written"):
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(self._path(name), data)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        with _refusals(f"{self.url}/{name}: cannot be removed"), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"
