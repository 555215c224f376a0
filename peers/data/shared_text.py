"""The text that peers send to each other: where it is kept, which part of it a peer keeps, and what it can
send.

    STATE/text/fetched/SHA256         files, indexes, a tokenizer.json and chat settings from other peers
    STATE/text/fetched/SHA256.part    a file that is not complete

An index, which the manifest names by its hash, lists the files of a source. A file is cut into chunks. The
list of its chunks' hashes has a hash of its own in the index.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from peers.config.atomic_files import write_atomically
from peers.config.errors import UserError
from peers.config.peer_file import PeerFile
from peers.config.run_url import is_url
from peers.data.chat_settings import settings_beside
from peers.data.documents import TextError
from peers.data.files import FetchedFolder, File, Place
from peers.data.shards import Shard, folder_of, index_of_place, read_index
from swarmnet.model.epochs import EpochReader, reading_order
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import BYTES

FOLDER = "text"
FETCHED = "fetched"
PART = ".part"


def fetched_folder(config: PeerFile) -> FetchedFolder:
    """Return the folder of what other peers have sent to this one."""
    return FetchedFolder(config.state / FOLDER / FETCHED)


def fetched_tokenizer(manifest: Manifest, config: PeerFile) -> Path | None:
    """Return the path of the run's tokenizer.json if other peers send it; None: they do not, or the user does
    not allow it."""
    sha256 = manifest.data.tokenizer_sha256
    is_needed = manifest.data.tokenizer != BYTES and config.tokenizer is None
    return fetched_folder(config).path(sha256) if sha256 and is_needed and config.max_text_bytes else None


def needed_blobs(manifest: Manifest, config: PeerFile, places: Mapping[str, Place]) -> dict[str, str]:
    """Return what this peer must fetch before it knows the files of the text, by its SHA-256: a description
    of each index, the tokenizer and the chat template."""
    indexes = {
        source.index: f"the index of `{source.name}`"
        for source in manifest.data.sources
        if isinstance(places.get(source.name), FetchedFolder)
    }
    tokenizer = fetched_tokenizer(manifest, config)
    needed = indexes if tokenizer is None else {**indexes, tokenizer.name: "the tokenizer"}
    if tokenizer is not None and manifest.data.chat_template_sha256:
        needed[manifest.data.chat_template_sha256] = "the chat template"
    folder = fetched_folder(config)
    return {sha256: what for sha256, what in needed.items() if not folder.path(sha256).is_file()}


def chosen_shards(
    shards: Mapping[str, list[Shard]],
    *,
    reader: EpochReader,
    withdrawn: Collection[bytes],
    max_fetched_bytes: int,
    seed: int,
    is_random: bool,
) -> dict[str, list[Shard]]:
    """Return the shards of each source without withdrawn files that would have to be fetched, and of those
    that other peers send only `max_fetched_bytes`: the ones that this peer reads first. If `is_random`, about
    the shard's `longest_bytes` are fetched, chosen by `seed`. Raises TextError if nothing is left."""
    allowed = {
        name: [replace(shard, files=_not_withdrawn(shard.files, withdrawn)) for shard in some]
        for name, some in shards.items()
    }
    all_bytes = sum(fetched_bytes(some) for some in allowed.values())
    chosen = {}
    for name, some in allowed.items():
        room = max_fetched_bytes * fetched_bytes(some) // max(1, all_bytes)
        if all_bytes <= max_fetched_bytes:
            room = all_bytes
        if is_random:
            chosen[name] = [_sampled(shard, room, seed) for shard in some]
        else:
            chosen[name] = _that_fit(some, room, reader)
        chosen[name] = [shard for shard in chosen[name] if shard.files]
        if not chosen[name]:
            smallest = min((file.bytes for shard in some for file in shard.files), default=0)
            raise TextError(
                f"no file of the text `{name or 'of this run'}` may be fetched: the smallest has "
                f"{smallest:,} bytes, and max_text_bytes leaves {room:,}: set it to {smallest + all_bytes:,}"
            )
    return chosen


def fetched_bytes(shards: Iterable[Shard]) -> int:
    """Return the bytes of the files that other peers send."""
    return sum(file.bytes for shard in shards for file in shard.files if file.chunks)


def _not_withdrawn(files: Iterable[File], withdrawn: Collection[bytes]) -> tuple[File, ...]:
    return tuple(f for f in files if not f.chunks or bytes.fromhex(f.sha256) not in withdrawn)


def _sampled(shard: Shard, room: int, seed: int) -> Shard:
    """Return the shard with a random part of the files that other peers send: of about its `longest_bytes`,
    and at most `room` bytes."""
    files = [file for file in shard.files if not file.chunks]
    candidates = [file for file in shard.files if file.chunks]
    Random(seed).shuffle(candidates)
    size = 0
    for file in candidates:
        if size < shard.longest_bytes and size + file.bytes <= room:
            files.append(file)
            size += file.bytes
    return replace(shard, files=tuple(files))


def _that_fit(shards: list[Shard], room: int, reader: EpochReader) -> list[Shard]:
    """Return the shards of which at most `room` bytes must be fetched, in the order of `shards`."""
    by_name = {shard.name: shard for shard in shards}
    chosen: set[str] = set()
    for name in reading_order(reader, by_name):
        size = fetched_bytes([by_name[name]])
        if size <= room:
            room -= size
            chosen.add(name)
    return [shard for shard in shards if shard.name in chosen]


def keep_only_fetched(folder: FetchedFolder, names: Collection[str]) -> None:
    """Remove everything from the folder but the files of these names, complete or not. Raises TextError."""
    try:
        for path in folder.folder.glob("*"):
            if path.name.removesuffix(PART) not in names:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise TextError(f"{error.filename}: cannot be removed: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file that this peer can send to others."""

    path: Path
    size: int
    """Bytes of the file."""
    sha256: bytes
    chunks: bytes
    """SHA-256 of the list of its chunks' hashes."""


def shared_files(
    manifest: Manifest, config: PeerFile, places: Mapping[str, Place], withdrawn: Collection[bytes]
) -> list[SharedFile]:
    """Return the files of shared sources that may be on this machine, without withdrawn ones."""
    found = []
    for source in manifest.data.sources:
        place = places.get(source.name)
        if not source.is_shared or place is None or (isinstance(place, str) and is_url(place)):
            continue
        with suppress(TextError):  # Reading the text reports it.
            for entry in read_index(source, place):
                if isinstance(place, FetchedFolder):
                    path = place.path(entry.sha256)
                else:
                    path = folder_of(Path(place).expanduser()) / entry.name
                sha256 = bytes.fromhex(entry.sha256)
                if sha256 not in withdrawn:
                    found.append(SharedFile(path, entry.bytes, sha256, bytes.fromhex(entry.chunks)))
    return found


def shared_blobs(
    manifest: Manifest, config: PeerFile, places: Mapping[str, Place], tokenizer: Path | None
) -> dict[bytes, Path]:
    """Return the indexes, the tokenizer and the chat template that this peer can send, by their SHA-256. The
    template of a tokenizer of its own is written to the folder of what peers send. Raises TextError."""
    blobs = {}
    for source in manifest.data.sources:
        place = places.get(source.name)
        if source.is_shared and isinstance(place, FetchedFolder):
            blobs[bytes.fromhex(source.index)] = place.path(source.index)
        elif source.is_shared and isinstance(place, str) and not is_url(place):
            blobs[bytes.fromhex(source.index)] = index_of_place(Path(place).expanduser())
    if manifest.data.tokenizer_sha256 and tokenizer is not None:
        blobs[bytes.fromhex(manifest.data.tokenizer_sha256)] = tokenizer
        if template := manifest.data.chat_template_sha256:
            path = blobs[bytes.fromhex(template)] = fetched_folder(config).path(template)
            if not path.is_file():
                try:
                    write_atomically(path, settings_beside(tokenizer, template).encoded())
                except UserError as error:
                    raise TextError(str(error)) from None
    return blobs


def require_tokenizer(manifest: Manifest, tokenizer: Path | None) -> None:
    """Raise TextError if the tokenizer on this machine is not the one of the manifest."""
    wanted = manifest.data.tokenizer_sha256
    if wanted and tokenizer is not None and tokenizer.is_file():
        found = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        if found != wanted:
            raise TextError(
                f"tokenizer {tokenizer} is not the run's: its SHA-256 is {found[:16]}..., not "
                f"{wanted[:16]}...; leave `tokenizer` out of the peer file, and other peers send it"
            )
