"""Find a run's text on this machine, only where the peer file says that it is.

The names of sources and tokenizer in a manifest come from a stranger. Opening them as paths could send any
file of this machine to the peers of the next stage. Only the first stage reads text. A machine without the
text can serve any other stage, and never moves to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from peers.config.atomic_files import is_file
from peers.config.errors import UserError
from peers.config.peer_file import PeerFile
from peers.config.run_file import as_key
from peers.config.run_url import is_url
from peers.data.documents import ReadSummary, TextError, files_at
from peers.data.files import FetchedFolder, Place, suffixes_of
from peers.data.shards import Shard, all_shards
from peers.data.shared_text import chosen_shards, fetched_folder, fetched_tokenizer, require_tokenizer
from peers.data.tokens import Progress, ShardCache, ShardTokens
from peers.telemetry.log_events import Notify
from protocols.signed.identity import peer_id_of
from swarmnet.model.epochs import EpochReader
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import BYTES, STANDARD_LIBRARY, Data

FIRST_STAGE = 0
PROGRESS_SECONDS = 5.0
"""Seconds between two progress lines while text is tokenized."""


def places_here(manifest: Manifest, config: PeerFile) -> dict[str, Place]:
    """Return by name of each of the run's sources the place of its text: a file, a folder, a URL or
    `python-stdlib`. The peer file names it. A source whose path is `python-stdlib` needs no entry. A shared
    text without one comes from other peers, if the user allows it; other sources are left out."""
    configured = {name: str(place) for name, place in config.data_paths.items()}
    sources = manifest.data.sources
    library = {source.name: STANDARD_LIBRARY for source in sources if source.path == STANDARD_LIBRARY}
    fetched = fetched_folder(config)
    shared = [source.name for source in sources if source.is_shared and config.max_text_bytes]
    places: dict[str, Place] = {**dict.fromkeys(shared, fetched), **library, **configured}
    return {source.name: places[source.name] for source in sources if source.name in places}


def tokenizer_here(manifest: Manifest, config: PeerFile) -> Path | None:
    """Return the path of the run's tokenizer.json, in the peer file or from other peers; None if there is
    none or tokens are bytes."""
    if manifest.data.tokenizer == BYTES:
        return None
    return config.tokenizer or fetched_tokenizer(manifest, config)


def is_fetched(places: Mapping[str, Place]) -> bool:
    """Return whether other peers send some of the text."""
    return any(isinstance(place, FetchedFolder) for place in places.values())


def missing_text(manifest: Manifest, config: PeerFile) -> str:
    """Return a message that says which part of the run's text is missing on this machine, and what to do;
    empty: nothing is missing, or the peer is a reducer, which reads none. Only file names are checked: no
    file is read and no server is contacted."""
    if config.role == "reducer":
        return ""
    places, tokenizer = places_here(manifest, config), tokenizer_here(manifest, config)
    for source in manifest.data.sources:
        problem = "the peer file does not say where it is"
        place = places.get(source.name)
        if place is not None:
            try:
                if isinstance(place, str) and not is_url(place):
                    files_at(place, ReadSummary(), suffixes_of(source.tokens))
                continue  # This source has text here.
            except TextError as error:
                problem = str(error)
        elif source.is_shared:
            problem = "other peers would send it, but max_text_bytes is 0"
        return (
            f"the run's source `{source.name}` is not on this machine ({problem}); say where its text is, in "
            f"the peer file: data_paths: {{{as_key(source.name)}: PATH}}"
        )
    is_fetched = config.tokenizer is None and tokenizer is not None
    if manifest.data.tokenizer != BYTES and not is_fetched and (tokenizer is None or not is_file(tokenizer)):
        where = f"{tokenizer} does not exist" if tokenizer else "the peer file does not say where"
        return (
            f"the run's tokenizer.json is not on this machine ({where}); say where it is, in the peer file: "
            "tokenizer: PATH"
        )
    return ""


def _must_read_text(manifest: Manifest, config: PeerFile) -> bool:
    """Return True if this peer must read the text: the user chose the first stage, or it is the only one."""
    return config.stage == FIRST_STAGE or len(manifest.stages) == 1


def require_text(manifest: Manifest, config: PeerFile) -> None:
    """Raise UserError if the chosen stage reads the run's text and this machine lacks it."""
    if _must_read_text(manifest, config) and (missing := missing_text(manifest, config)):
        raise UserError(missing)


def unservable_stages(manifest: Manifest, config: PeerFile, missing: str) -> frozenset[int]:
    """Return the stages that this machine must not serve: the first stage, which reads the text, if some is
    missing. `missing` is the message of `missing_text`; empty: none is missing. The first stage is not
    excluded if the user chose it or the run has no other. In a U-shaped run a peer with text serves no other
    stage, unless the user chose one; then it never moves to the first."""
    excludes_first = bool(missing) and not _must_read_text(manifest, config)
    if manifest.is_u_shaped and not excludes_first:
        if config.stage in ("auto", FIRST_STAGE):
            return frozenset(range(1, len(manifest.stages)))
        excludes_first = True
    return frozenset({FIRST_STAGE}) if excludes_first else frozenset()


def shards_here(
    manifest: Manifest, config: PeerFile, public_key: bytes, withdrawn: frozenset[bytes]
) -> tuple[dict[str, list[Shard]], ShardCache, ReadSummary]:
    """Return the shards of each source by its name, the cache of their tokens, and what was skipped.

    A shard is a file of the text, or several small ones. Documents whose SHA-256 is in `withdrawn` are left
    out, by the owner's order. Stored tokens of other shards are removed. The peer's `public_key` is the seed
    of random sampling. Raises TextError if the text is not here, TextUnreachable if a URL does not answer."""
    if missing := missing_text(manifest, config):
        raise TextError(missing)
    data, reading = manifest.data, ReadSummary()
    cache = ShardCache(
        tokenizer=tokenizer_here(manifest, config),
        vocabulary=manifest.model.vocab_size,
        state=config.state,
        data=data,
        withdrawn=withdrawn,
    )
    reading.tokenizer = cache.warning
    require_tokenizer(manifest, tokenizer_here(manifest, config))
    shards = kept_shards(manifest, data, config, public_key, withdrawn, reading)
    cache.keep_only(shard for source_shards in shards.values() for shard in source_shards)
    return shards, cache, reading


def kept_shards(
    manifest: Manifest,
    data: Data,
    config: PeerFile,
    public_key: bytes,
    withdrawn: frozenset[bytes],
    reading: ReadSummary,
) -> dict[str, list[Shard]]:
    """Return the shards of each source of `data` that this peer keeps, by its name. `data` is the run's, or
    some of its sources. Raises TextError and TextUnreachable."""
    places, seed = places_here(manifest, config), int.from_bytes(public_key[:4], "little")
    shards = all_shards(data, places, reading, config.max_data_bytes, seed)
    if not is_fetched(places):
        return shards
    return chosen_shards(
        shards,
        reader=EpochReader(manifest.run_id(), manifest.seed, peer_id_of(public_key)),
        withdrawn=withdrawn,
        max_fetched_bytes=config.max_text_bytes,
        seed=seed,
        is_random=data.sampling == "random",
    )


def first_shard_here(
    manifest: Manifest, config: PeerFile, public_key: bytes, progress: Progress
) -> tuple[ShardTokens, int]:
    """Return the tokens of the first of all shards, and the number of shards. A caller uses this to check
    that the text can be read. `progress` is called during tokenizing. Raises UserError if it cannot."""
    try:
        shards, cache, reading = shards_here(manifest, config, public_key, frozenset())
        all_of_run = [shard for source_shards in shards.values() for shard in source_shards]
        first = replace(all_of_run[0], others=reading)  # Its warnings include what was skipped elsewhere.
        return cache.open(first, progress), len(all_of_run)
    except TextError as error:
        raise UserError(str(error)) from None


def text_line(read: ShardTokens, shards: int = 1) -> str:
    """Return a line for people about `read`, the first of `shards` shards: its number of tokens, documents,
    files and bytes."""
    reading = read.reading
    text = (
        f"{len(read.tokens):,} tokens: {_count(reading.documents, 'document')} in "
        f"{_count(reading.files, 'file')}, {reading.bytes / 1e6:,.1f} MB"
    )
    if shards > 1:
        text = f"the first of {shards:,} shards: {text}"
    return text if read.made else f"{text}, as they were kept"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def progress_lines(
    notify: Notify, now: Callable[[], float], what: str = "makes tokens of the text, once"
) -> Progress:
    """Return a progress callback, which notifies the user at most every PROGRESS_SECONDS. A line says `what`
    is done, how far, and the estimated time left. `now` returns seconds."""
    started_at = printed_at = now()

    def progress(done: int, total: int) -> None:
        """Print progress: `done` of `total` bytes of the text are tokenized."""
        nonlocal printed_at
        current = now()
        if current - printed_at < PROGRESS_SECONDS or done <= 0:
            return
        printed_at = current
        left = (current - started_at) * max(0, total - done) / done
        notify("tokenizing", f"{what}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {left:.0f} s to go")

    return progress
