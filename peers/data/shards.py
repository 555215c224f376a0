"""The shards of a run's text, on this machine or at a URL. A shard here is a file, or several small files
that are tokenized together. With random sampling, all text of a peer is one shard. A source is one named text
of the run, for which each peer's configuration gives a place: a path or a URL.

A source may have a file `index.json`, which lists its files with their SHA-256. If the run's manifest names
the hash of this index, all peers read the same bytes of a file. A peer may have only some of the files.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, BinaryIO

import msgspec

from peers.config.atomic_files import is_file, is_folder, is_there
from peers.config.run_url import is_url
from peers.data.documents import ReadSummary, TextError, files_at, leads_out
from peers.data.files import INDEX as INDEX
from peers.data.files import (
    SUFFIXES,
    TOKEN_SUFFIXES,
    FetchedFolder,
    File,
    Place,
    RemoteFolder,
    Unreadable,
    has_suffix,
    local_file,
    shown_place,
    suffixes_of,
)
from swarmnet.run.schema import Data, TextSource
from swarmnet.snapshots.fetch import chunk_bytes

FORM = "swarmnet index 2"
MIN_SHARD_BYTES = 2**20
"""Minimum bytes of a shard. Smaller files are joined in the order of their names until they reach it. A file
shorter than a sequence would never be read alone, and each shard costs a disk access."""
MAX_INDEX_BYTES = 64 * 2**20
"""Maximum bytes of an index: some 400,000 files."""
_MAX_NAME = 512


_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Pinned(msgspec.Struct, frozen=True):
    """One entry of the index: a file with its size and hash."""

    name: str
    bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    sha256: _Sha256
    chunks: _Sha256
    """SHA-256 of the list of its chunks' hashes (`chunk_list`), by which peers send it to each other."""


class _Index(msgspec.Struct, frozen=True):
    form: str
    files: list[Pinned]


@dataclass(frozen=True, slots=True)
class Shard:
    name: str
    """`SOURCE/FILE` of its first file; the same on every machine."""
    files: tuple[File, ...]
    others: ReadSummary = field(default_factory=ReadSummary)
    """Counts of what was skipped besides these files, reported together with what is skipped in them."""
    longest_bytes: int = sys.maxsize
    """Maximum bytes to read; of a longer text `seed` chooses a part."""
    seed: int = 0

    @property
    def seen(self) -> str:
        """Return a version mark that changes with the files and with the settings by which they are read."""
        skipped = (self.others.left_out, self.others.first_left_out, self.others.tokenizer)
        files = [(file.name, file.seen, file.sha256, file.column, file.tokens) for file in self.files]
        marked = json.dumps([files, skipped, self.longest_bytes, self.seed])
        return hashlib.sha256(marked.encode()).hexdigest()

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def all_shards(
    data: Data,
    places: Mapping[str, Place],
    reading: ReadSummary,
    longest_bytes: int = sys.maxsize,
    seed: int = 0,
) -> dict[str, list[Shard]]:
    """Return the shards of each source by its name, in the manifest's order.

    If `data.sampling` is not "epoch", text is sampled at random. All sources are then one shard under the
    name "", of which at most `longest_bytes` are read, a part chosen by `seed`. `places` gives the place of
    each source; `reading` counts what is skipped. Raises TextError if a source has no text, and
    TextUnreachable if a URL does not answer."""
    if data.sampling == "epoch":
        return {source.name: shards_of(source, places[source.name], reading) for source in data.sources}
    files_by_source = [source_files(source, places[source.name], reading) for source in data.sources]
    files = tuple(file for named_files in files_by_source for _, file in named_files)
    return {"": [Shard("random", files, reading, longest_bytes, seed)]}


def shards_of(source: TextSource, place: Place, reading: ReadSummary) -> list[Shard]:
    """Return the shards of one source. Its files are joined in the order of their names until a shard has
    `MIN_SHARD_BYTES`; empty files are left out. Raises TextError and TextUnreachable."""
    shards: list[Shard] = []
    joined: list[tuple[str, File]] = []
    not_empty = ((name, file) for name, file in source_files(source, place, reading) if file.bytes > 0)
    named_files = sorted(not_empty, key=lambda named_file: named_file[0])
    for number, named_file in enumerate(named_files, 1):
        joined.append(named_file)
        is_last = number == len(named_files)
        if is_last or sum(file.bytes for _, file in joined) >= MIN_SHARD_BYTES:
            first_name = joined[0][0]
            shards.append(Shard(f"{source.name}/{first_name}", tuple(file for _, file in joined)))
            joined = []
    return shards


def source_files(source: TextSource, place: Place, reading: ReadSummary) -> list[tuple[str, File]]:
    """Return (name relative to the place, file) of each file of one source, or of those in its index if the
    manifest names one. `reading` counts what is skipped or missing. Raises TextError if there is no text or
    another index, and TextUnreachable if a URL does not answer."""
    if source.index or isinstance(place, FetchedFolder):
        listed: Iterable[tuple[str, File]] = _files_in_index(source, place, reading)
    else:
        listed = files_at(place, reading, suffixes_of(source.tokens))
    named_files = [(name, replace(file, column=source.column, tokens=source.tokens)) for name, file in listed]
    if not any(file.bytes for _, file in named_files):
        why = reading.reason() or "; what is there is empty"
        raise TextError(f"the source `{source.name}` has no text at {shown_place(place)}{why}")
    return named_files


def _files_in_index(source: TextSource, place: Place, reading: ReadSummary) -> Iterator[tuple[str, File]]:
    """Yield (name, file) of each file in the run's index that exists with the size listed there. The other
    files are counted in `reading` as skipped. Raises TextError if the index is not the run's."""
    if isinstance(place, FetchedFolder):
        for entry in read_index(source, place):
            name = f"{source.name}/{entry.name}"
            yield entry.name, place.file(name, entry.bytes, entry.sha256, entry.chunks)
        return
    folder = RemoteFolder(place) if is_url(place) else folder_of(Path(place).expanduser())
    for entry in read_index(source, place):
        try:
            file = _file_below(folder, entry.name, entry.bytes, entry.sha256)
        except OSError as error:
            where = f"{shown_place(place)}: {entry.name}, which the run's index names"
            reading.leave_out(f"{where}: {error.strerror or error}", "index, unreadable")
            continue
        if file.bytes != entry.bytes:
            reading.leave_out(f"{file.name} is not what the run's index names: get it again", "index")
        else:
            yield entry.name, file


def _file_below(folder: RemoteFolder | Path, name: str, size: int = 0, sha256: str = "") -> File:
    """Return the file of that name below a folder. A remote file gets the expected `size` and is not checked.
    Raises OSError if a local file is missing or a link out of the folder."""
    if isinstance(folder, RemoteFolder):
        return folder.file(name, size, sha256)
    if leads_out(folder, folder / name):
        raise OSError(0, "is a link that leads out of the folder: put a copy of it in its place")
    return local_file(folder / name, sha256=sha256)


def index_of_place(place: Path) -> Path:
    """Return the path of the index of a text: in its folder, or beside its only file."""
    return place.with_name(f"{place.name}.{INDEX}") if is_file(place) else place / INDEX


def folder_of(place: Path) -> Path:
    """Return the folder in which the files of a text are."""
    return place.parent if is_file(place) else place


def read_index(source: TextSource, place: Place) -> list[Pinned]:
    """Return the entries of a source's index. Raises TextError if its hash is not the manifest's, or if it
    has more bytes than the manifest states."""
    where = f"the index of the source `{source.name}`, {INDEX} in {shown_place(place)}"
    try:
        with _index_file(source, place).open() as opened:
            data = opened.read(MAX_INDEX_BYTES + 1)
    except OSError as error:
        why = error.strerror or error
        raise TextError(f"{where}: {why}; get it from the publisher of the text") from None
    if hashlib.sha256(data).hexdigest() != source.index:
        raise TextError(f"{where}, is not the one that the run names: get it again from its origin")
    try:
        entries = parsed(data)
    except Unreadable as error:
        raise TextError(f"{where}, {error}") from None
    size = sum(entry.bytes for entry in entries)
    if source.is_shared and (len(entries), size) != (source.files, source.file_bytes):
        raise TextError(
            f"{where}: {len(entries):,} files of {size:,} bytes; the run states {source.files:,} of "
            f"{source.file_bytes:,}: ask the run's owner to publish it again"
        )
    return entries


def _index_file(source: TextSource, place: Place) -> File:
    """Return the file of a source's index. Raises OSError if it is missing."""
    if isinstance(place, FetchedFolder):
        return local_file(place.path(source.index))
    if is_url(place):
        return RemoteFolder(place).file(INDEX)
    path = index_of_place(Path(place).expanduser())
    return _file_below(path.parent, path.name)


def parsed(data: bytes) -> list[Pinned]:
    """Return the entries of an index. Raises Unreadable if it is invalid: it comes from a stranger."""
    if len(data) > MAX_INDEX_BYTES:
        raise Unreadable(f"is longer than {MAX_INDEX_BYTES:,} bytes")
    try:
        index = msgspec.json.decode(data, type=_Index)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"is no index: {error}"[:200]) from None
    if index.form != FORM:
        raise Unreadable(f"is of another form than `{FORM}`")
    for entry in index.files:
        if not is_plain(entry.name):
            raise Unreadable(f"names a file outside of its folder: {entry.name[:80]!r}")
    if len({entry.name for entry in index.files}) < len(index.files):
        raise Unreadable("names a file twice")
    return index.files


def is_plain(name: str) -> bool:
    """Return whether `name` is a safe relative path of a text file: printable, normalized, without hidden
    parts, `..` or special characters. It becomes part of a path or a URL."""
    path = PurePosixPath(name)
    return (
        0 < len(name) <= _MAX_NAME
        and name.isprintable()
        and not path.is_absolute()
        and not any(part == ".." or part.startswith(".") for part in path.parts)
        and not set(name) & set('\\:?#%*|"<>')
        and str(path) == name
        and has_suffix(name, (*SUFFIXES, *TOKEN_SUFFIXES))
    )


def index_of(
    place: Path, reading: ReadSummary, progress: Callable[[int, int], None], tokens: str = ""
) -> bytes:
    """Return the bytes of an index file for a folder of text or of `tokens`, or for one file. The text's
    publisher puts it at `index_of_place`. All files are read for their hashes. `progress` is called with the
    bytes read so far and in all. Raises TextError if there is no text, or a file has a name that an index
    cannot have."""
    if not (is_folder(place) or is_file(place)):
        why = "is no folder" if is_there(place) else "does not exist"
        raise TextError(f"{place} {why}: an index is of the files in a folder")
    named_files, done_bytes = files_at(str(place), reading, suffixes_of(tokens)), 0
    all_bytes, entries = sum(file.bytes for _, file in named_files), []
    for name, file in named_files:
        if not is_plain(name):
            raise TextError(f"{file.name}: an index names only files that every system can: rename it")
        try:
            digest = hashlib.sha256()
            with file.open() as opened:
                hashes = chunk_list(opened, file.bytes, digest.update)
        except OSError as error:
            raise TextError(f"{file.name}: {error.strerror or error}") from None
        entries.append(Pinned(name, file.bytes, digest.hexdigest(), hashlib.sha256(hashes).hexdigest()))
        done_bytes += file.bytes
        progress(done_bytes, all_bytes)
    lines = b",\n".join(map(msgspec.json.encode, entries)).decode()
    return f'{{"form": {json.dumps(FORM)}, "files": [\n{lines}\n]}}\n'.encode()


def chunk_list(opened: BinaryIO, size: int, update: Callable[[bytes], object] = lambda _: None) -> bytes:
    """Return the SHA-256 of each chunk of an opened file of `size` bytes, one after the other. `update` is
    called with each chunk. Raises OSError, also if the file has another size."""
    hashes, read = [], 0
    while chunk := opened.read(chunk_bytes(size)):
        update(chunk)
        hashes.append(hashlib.sha256(chunk).digest())
        read += len(chunk)
    if read != size:
        raise OSError(f"has {read:,} bytes, and not {size:,}: it changed while it was read")
    return b"".join(hashes)
