"""What a run that is read in epochs is read from: the shards of its sources, on this machine or where a URL
leads. A shard is a file, or several small ones together.

A source's `index.json` names its files with their SHA-256, and the run may name that of the index: then all
peers that read anything of this source read the same, and everybody can look it up. Who has only some of the
files reads these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from peers.config.atomic_files import is_folder, is_there
from peers.config.run_url import is_url, without_secret
from peers.data.documents import Reading, TextError, files_of, leads_out
from peers.data.files import ALL_SUFFIXES, BUFFER_BYTES, File, LocalFile, RemoteFolder, Unreadable, has_suffix
from peers.data.files import INDEX as INDEX
from swarmnet.run.manifest import STANDARD_LIBRARY, Source

FORM = "swarmnet index 1"
LEAST_SHARD_BYTES = 2**20
"""Smaller files, in the order of their names, are read as one shard until it has so many: a file that is
shorter than a sequence would never be read by itself, and each shard costs a look at the disk."""
MOST_INDEX_BYTES = 64 * 2**20
"""Some 400,000 files."""
_MOST_NAME = 512


@dataclass(frozen=True, slots=True)
class Pinned:
    """A file as the index names it."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Part:
    """A file of a shard."""

    file: File
    sha256: str = ""
    """That it must have; empty: whatever it holds."""


@dataclass(frozen=True, slots=True)
class Shard:
    name: str
    """`SOURCE/FILE`, of the first of its files, the same on every machine."""
    parts: tuple[Part, ...]

    @property
    def seen(self) -> str:
        """Another when one of its files has changed."""
        told = [(one.file.name, one.file.seen, one.sha256) for one in self.parts]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    @property
    def bytes(self) -> int:
        return sum(one.file.bytes for one in self.parts)

    def checked(self, reading: Reading, check: Callable[[], None] = lambda: None) -> list[File]:
        """Its files that are what the index says; `reading` hears of the others. `check` runs with each block
        that is read, and what it raises ends the reading. Raises TextUnreachable."""
        return [one.file for one in self.parts if _is_as_pinned(one, reading, check)]


def _is_as_pinned(part: Part, reading: Reading, check: Callable[[], None]) -> bool:
    if not part.sha256:
        return True
    digest = hashlib.sha256()
    try:
        with part.file.open() as opened:
            while block := opened.read(BUFFER_BYTES):
                check()
                digest.update(block)
            actual = digest.hexdigest()
    except OSError as error:
        reading.leave_out(f"{part.file.name}: {error.strerror or error}")
        return False
    if actual != part.sha256:
        reading.leave_out(f"{part.file.name} is not what the run's index names: get it again")
    return actual == part.sha256


def shards_of(source: Source, place: str, reading: Reading) -> list[Shard]:
    """Of one source, in the order of their names. `reading` hears of what is left out or missing. Raises
    TextError: there is nothing, the index is not the run's, or a URL does not answer (TextUnreachable)."""
    named = _pinned(source, place, reading) if source.index else _lying(place, reading)
    found = [(name, part) for name, part in sorted(named) if part.file.bytes > 0]
    if not found:
        why = reading.reason() or "; what is there is empty"
        raise TextError(f"the source `{source.name}` has no text at {without_secret(place)}{why}")
    shards: list[Shard] = []
    waiting: list[tuple[str, Part]] = []
    for one in found:
        waiting.append(one)
        if sum(part.file.bytes for _, part in waiting) >= LEAST_SHARD_BYTES:
            shards.append(_together(source, waiting))
            waiting = []
    if waiting:
        shards.append(_together(source, waiting))
    return shards


def _together(source: Source, files: list[tuple[str, Part]]) -> Shard:
    return Shard(f"{source.name}/{files[0][0]}", tuple(part for _, part in files))


def _lying(place: str, reading: Reading) -> Iterator[tuple[str, Part]]:
    """What there is, by name, without an index."""
    if is_url(place):
        folder = RemoteFolder(place)
        for name, file in folder.found().items():
            if has_suffix(name, ALL_SUFFIXES):
                yield name, Part(file)
            elif name != INDEX:
                reading.leave_out(f"{file.name}: of a folder only {', '.join(ALL_SUFFIXES)} are read")
        return
    paths = files_of(place, reading, ALL_SUFFIXES)
    root = _root_of(place, paths)
    for path in paths:
        try:
            yield path.relative_to(root).as_posix(), Part(LocalFile.at(path))
        except OSError as error:
            reading.leave_out(f"{path}: {error.strerror}")


def _root_of(place: str, paths: list[Path]) -> Path:
    if place == STANDARD_LIBRARY:  # Its modules lie in one folder, whose own files come first in it.
        return min((path.parent for path in paths), key=lambda folder: len(folder.parts))
    root = Path(place).expanduser()
    return root if is_folder(root) else root.parent


def _pinned(source: Source, place: str, reading: Reading) -> Iterator[tuple[str, Part]]:
    """What the run's index names and this machine has."""
    folder, opens = _opener(place)
    index = _index_of(source, place, folder)
    for one in index:
        try:
            file = opens(one)
        except OSError as error:
            where = f"{without_secret(place)}: {one.name}, which the run's index names"
            reading.leave_out(f"{where}: {error.strerror or error}")
            continue
        if file.bytes != one.bytes:
            reading.leave_out(f"{file.name} is not what the run's index names: get it again")
        else:
            yield one.name, Part(file, one.sha256)


def _opener(place: str) -> tuple[RemoteFolder | Path, Callable[[Pinned], File]]:
    """The folder, and what finds a file in it."""
    if is_url(place):
        remote = RemoteFolder(place)
        return remote, lambda one: remote.file(one.name, one.bytes)
    root = Path(place).expanduser()

    def local(one: Pinned) -> File:
        path = root / one.name
        if leads_out(root, path):
            raise OSError(0, "is a link that leads out of the folder: put a copy of it in its place")
        return LocalFile.at(path)

    return root, local


def _index_of(source: Source, place: str, folder: RemoteFolder | Path) -> list[Pinned]:
    """Checked against what the run says. Raises TextError."""
    where = f"the index of the source `{source.name}`, {INDEX} in {without_secret(place)}"
    try:
        file = folder.file(INDEX) if isinstance(folder, RemoteFolder) else LocalFile.at(folder / INDEX)
        with file.open() as opened:
            data = opened.read(MOST_INDEX_BYTES + 1)
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
    if len(data) > MOST_INDEX_BYTES:
        raise Unreadable(f"is longer than {MOST_INDEX_BYTES:,} bytes")
    try:
        told = json.loads(data)
        if told["form"] != FORM:
            raise Unreadable(f"is of another form than `{FORM}`")
        found = [Pinned(one["name"], one["bytes"], one["sha256"]) for one in told["files"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Unreadable(f"is no index: {type(error).__name__}: {error}"[:200]) from None
    for one in found:
        if not (isinstance(one.name, str) and is_plain(one.name)):
            raise Unreadable(f"names a file outside of its folder: {str(one.name)[:80]!r}")
        if not (type(one.bytes) is int and 0 <= one.bytes < 2**63 and isinstance(one.sha256, str)):
            raise Unreadable(f"says no size or no SHA-256 of {one.name}")
    if len({one.name for one in found}) < len(found):
        raise Unreadable("names a file twice")
    return found


def is_plain(name: str) -> bool:
    """Whether it is a file of text below its folder: it becomes part of a path, or of a URL."""
    path = PurePosixPath(name)
    return (
        0 < len(name) <= _MOST_NAME and name.isprintable() and not path.is_absolute()
        and not any(part == ".." or part.startswith(".") for part in path.parts)
        and not set(name) & set('\\:?#%*|"<>') and str(path) == name and has_suffix(name, ALL_SUFFIXES)
    )  # fmt: skip


def index_of(folder: Path, reading: Reading, progress: Callable[[int, int], None]) -> bytes:
    """The index of a folder of text, for its creator to publish beside it. Raises TextError."""
    if not is_folder(folder):
        why = "is no folder" if is_there(folder) else "does not exist"
        raise TextError(f"{folder} {why}: an index is of the files in a folder")
    paths, done = files_of(str(folder), reading, ALL_SUFFIXES), 0
    files: list[dict[str, str | int]] = []
    try:
        whole = sum(path.stat().st_size for path in paths)
        for path in paths:
            name = path.relative_to(folder).as_posix()
            if not is_plain(name):
                raise TextError(f"{path}: an index names only files that every system can: rename it")
            with path.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
                files.append({"name": name, "bytes": opened.tell(), "sha256": digest})
                done += opened.tell()
            progress(done, whole)
    except OSError as error:
        raise TextError(f"{error.filename}: {error.strerror}") from None
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in files)
    return f'{{"form": {json.dumps(FORM)}, "files": [\n{lines}\n]}}\n'.encode()


def all_shards(
    sources: Iterable[Source], places: Mapping[str, str], reading: Reading
) -> dict[str, list[Shard]]:
    """By the name of the source; `places`: where each lies on this machine. Raises as `shards_of`."""
    return {source.name: shards_of(source, places[source.name], reading) for source in sources}
