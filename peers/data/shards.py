"""What a run's text is read from: the shards of its sources, on this machine or where a URL leads. A shard is
a file, or several small ones together; where text is drawn, all that a peer draws from is one shard.

A source's `index.json` names its files with their SHA-256, and the run may name that of the index: then all
peers that read anything of this source read the same, and everybody can look it up. Who has only some of the
files reads these.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec

from peers.config.atomic_files import is_folder, is_there
from peers.config.run_url import is_url, without_secret
from peers.data.documents import ReadSummary, TextError, files_at, leads_out
from peers.data.files import INDEX as INDEX
from peers.data.files import SUFFIXES, File, RemoteFolder, Unreadable, has_suffix, local_file
from swarmnet.run.manifest import Data, TextSource

FORM = "swarmnet index 1"
MIN_SHARD_BYTES = 2**20
"""Smaller files, in the order of their names, are read as one shard until it has so many: a file that is
shorter than a sequence would never be read by itself, and each shard costs a look at the disk."""
MAX_INDEX_BYTES = 64 * 2**20
"""Some 400,000 files."""
_MAX_NAME = 512


class Pinned(msgspec.Struct, frozen=True):
    """A file as the index names it."""

    name: str
    bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    sha256: str


class _Index(msgspec.Struct, frozen=True):
    form: str
    files: list[Pinned]


@dataclass(frozen=True, slots=True)
class Shard:
    name: str
    """`SOURCE/FILE`, of the first of its files, the same on every machine."""
    files: tuple[File, ...]
    others: ReadSummary = field(default_factory=ReadSummary)
    """What is left out beside these files, and told with what is left out of them."""
    longest_bytes: int = sys.maxsize
    """Of more text only a part is read, chosen by `seed`."""
    seed: int = 0

    @property
    def seen(self) -> str:
        """Another when one of its files has changed, or what is read of them."""
        beside = (self.others.left_out, self.others.first_left_out, self.others.tokenizer)
        told = [(one.name, one.seen, one.sha256) for one in self.files]
        return hashlib.sha256(json.dumps([told, beside, self.longest_bytes, self.seed]).encode()).hexdigest()

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def all_shards(
    data: Data,
    places: Mapping[str, str],
    reading: ReadSummary,
    longest_bytes: int = sys.maxsize,
    seed: int = 0,
) -> dict[str, list[Shard]]:
    """Return the shards of each source by its name, in the manifest's order. Where text is drawn, there is
    one shard for all sources, of which a part of at most `longest_bytes` is read that `seed` chooses.
    `places`: where each source lies on this machine. Raises as `source_files`."""
    if data.sampling == "epoch":
        return {source.name: shards_of(source, places[source.name], reading) for source in data.sources}
    found = [source_files(source, places[source.name], reading) for source in data.sources]
    files = tuple(file for some in found for _, file in some)
    return {"": [Shard("random", files, reading, longest_bytes, seed)]}


def shards_of(source: TextSource, place: str, reading: ReadSummary) -> list[Shard]:
    """Return the shards of one source, in the order of their names. Raises as `source_files`."""
    shards: list[Shard] = []
    waiting: list[tuple[str, File]] = []
    named = ((name, file) for name, file in source_files(source, place, reading) if file.bytes > 0)
    found = sorted(named, key=lambda one: one[0])
    for number, one in enumerate(found, 1):
        waiting.append(one)
        if sum(file.bytes for _, file in waiting) >= MIN_SHARD_BYTES or number == len(found):
            shards.append(Shard(f"{source.name}/{waiting[0][0]}", tuple(file for _, file in waiting)))
            waiting = []
    return shards


def source_files(source: TextSource, place: str, reading: ReadSummary) -> list[tuple[str, File]]:
    """Return the files of one source, with their names below its place. `reading` counts
    what is left out or missing. Raises TextError: there is nothing, the index is not the run's, or a URL does
    not answer (TextUnreachable)."""
    named = _pinned(source, place, reading) if source.index else files_at(place, reading)
    found = list(named)
    if not any(file.bytes for _, file in found):
        why = reading.reason() or "; what is there is empty"
        raise TextError(f"the source `{source.name}` has no text at {without_secret(place)}{why}")
    return found


def _pinned(source: TextSource, place: str, reading: ReadSummary) -> Iterator[tuple[str, File]]:
    """What the run's index names and this machine has."""
    folder = RemoteFolder(place) if is_url(place) else Path(place).expanduser()
    for one in _index_of(source, place, folder):
        try:
            file = _below(folder, one.name, one.bytes, one.sha256)
        except OSError as error:
            where = f"{without_secret(place)}: {one.name}, which the run's index names"
            reading.leave_out(f"{where}: {error.strerror or error}")
            continue
        if file.bytes != one.bytes:
            reading.leave_out(f"{file.name} is not what the run's index names: get it again")
        else:
            yield one.name, file


def _below(folder: RemoteFolder | Path, name: str, size: int = 0, sha256: str = "") -> File:
    """A file below a folder. Raises OSError."""
    if isinstance(folder, RemoteFolder):
        return folder.file(name, size, sha256)
    if leads_out(folder, folder / name):
        raise OSError(0, "is a link that leads out of the folder: put a copy of it in its place")
    return local_file(folder / name, sha256=sha256)


def _index_of(source: TextSource, place: str, folder: RemoteFolder | Path) -> list[Pinned]:
    """Checked against what the run says. Raises TextError."""
    where = f"the index of the source `{source.name}`, {INDEX} in {without_secret(place)}"
    try:
        with _below(folder, INDEX).open() as opened:
            data = opened.read(MAX_INDEX_BYTES + 1)
    except OSError as error:
        why = error.strerror or error
        raise TextError(f"{where}: {why}; it comes from whoever published the text") from None
    if hashlib.sha256(data).hexdigest() != source.index:
        raise TextError(f"{where}, is not the one that the run names: get it again from its origin")
    try:
        return parsed(data)
    except Unreadable as error:
        raise TextError(f"{where}, {error}") from None


def parsed(data: bytes) -> list[Pinned]:
    """An index: from whoever published the text. Raises Unreadable."""
    if len(data) > MAX_INDEX_BYTES:
        raise Unreadable(f"is longer than {MAX_INDEX_BYTES:,} bytes")
    try:
        index = msgspec.json.decode(data, type=_Index)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"is no index: {error}"[:200]) from None
    if index.form != FORM:
        raise Unreadable(f"is of another form than `{FORM}`")
    for one in index.files:
        if not is_plain(one.name):
            raise Unreadable(f"names a file outside of its folder: {one.name[:80]!r}")
    if len({one.name for one in index.files}) < len(index.files):
        raise Unreadable("names a file twice")
    return index.files


def is_plain(name: str) -> bool:
    """Whether it is a file of text below its folder: it becomes part of a path, or of a URL."""
    path = PurePosixPath(name)
    return (
        0 < len(name) <= _MAX_NAME and name.isprintable() and not path.is_absolute()
        and not any(part == ".." or part.startswith(".") for part in path.parts)
        and not set(name) & set('\\:?#%*|"<>') and str(path) == name and has_suffix(name, SUFFIXES)
    )  # fmt: skip


def index_of(folder: Path, reading: ReadSummary, progress: Callable[[int, int], None]) -> bytes:
    """The index of a folder of text, for its creator to publish beside it. Raises TextError."""
    if not is_folder(folder):
        why = "is no folder" if is_there(folder) else "does not exist"
        raise TextError(f"{folder} {why}: an index is of the files in a folder")
    found, done = files_at(str(folder), reading), 0
    whole, files = sum(file.bytes for _, file in found), []
    for name, file in found:
        if not is_plain(name):
            raise TextError(f"{file.name}: an index names only files that every system can: rename it")
        try:
            with file.open() as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
                files.append(Pinned(name, opened.tell(), digest))
        except OSError as error:
            raise TextError(f"{file.name}: {error.strerror}") from None
        done += files[-1].bytes
        progress(done, whole)
    lines = b",\n".join(map(msgspec.json.encode, files)).decode()
    return f'{{"form": {json.dumps(FORM)}, "files": [\n{lines}\n]}}\n'.encode()
